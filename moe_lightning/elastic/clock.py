"""A clock of one's own: time that this process could have used, and not what passed while it was stopped."""

from __future__ import annotations

import time

_LONGEST_TICK_S = 0.25


class OwnClock:
    """Seconds since its construction as its owner lived them: each tick counts for at most a quarter of a second.

    A process or a whole machine that is stopped for minutes does not conclude on waking that others were silent so
    long.

    Attributes:
        now: seconds, as of the last tick.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.now = 0.0

    def tick(self) -> float:
        """Count what has passed since the last tick; its owner does this several times a second."""
        present = time.monotonic()
        self.now += min(present - self._last, _LONGEST_TICK_S)
        self._last = present
        return self.now
