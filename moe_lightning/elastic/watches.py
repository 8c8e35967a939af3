"""Two watches over keys of the store that change while somebody lives: a neighbour's heartbeat, and newcomers' knocks.

Both compare values with a local clock only, so the clocks of the machines need not agree.
"""

from __future__ import annotations

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from moe_lightning.elastic.membership import Members

KNOCK_S = 0.2
"""How often a waiting member knocks."""

_KNOCKS = "knocks"


class Ring:
    """Each rank beats and watches the rank before it; together they watch all, at two requests a rank and beat.

    Args:
        members: the world.
        timeout_s: a rank without a new beat for this long is silent.
        now: the present moment; the first beat may take the timeout, too.
    """

    def __init__(self, members: Members, timeout_s: float, now: float) -> None:
        self._members = members
        self._timeout_s = timeout_s
        self._beats = 0
        self._next = now
        self._watched: int | None = None
        self._heard = 0
        self._heard_at = now

    def silent_rank(self, store: Store, left: set[int], now: float) -> int | None:
        """Beat where it is time, and say which neighbour has been silent for too long.

        Args:
            left: ranks that are gone as they should; the one before them is watched instead.
        """
        if now < self._next or self._members.size == 1:
            return None
        self._next = now + self._timeout_s / 10
        self._beats += 1
        beats = PrefixStore(f"{self._members.name}/beats", store)
        beats.add(str(self._members.rank), 1)
        watched = self._neighbour(left)
        if watched is None:
            return None
        heard = beats.add(str(watched), 0)
        if (watched, heard) != (self._watched, self._heard):
            self._watched, self._heard, self._heard_at = watched, heard, now
        return watched if now - self._heard_at > self._timeout_s else None

    def _neighbour(self, left: set[int]) -> int | None:
        """The nearest rank before this one that has not left."""
        size = self._members.size
        before = ((self._members.rank - distance) % size for distance in range(1, size))
        return next((rank for rank in before if rank not in left), None)


class Knocks:
    """Whether somebody outside the present world waits to be let in.

    A waiting member raises a counter again and again, and stops when it dies: nobody waits for it then.
    """

    def __init__(self) -> None:
        self._next = 0.0
        self._count: int | None = None
        self._since = 0.0
        self._last = 0.0

    def forget(self, now: float, settle_s: float) -> None:
        """A new world begins: who knocked before is in it, or will knock again.

        Args:
            settle_s: by how much members of one world may end their joins apart; the last of them knock that long.
        """
        self._count, self._since = None, 0.0
        self._next = now + settle_s

    def step(self, store: Store, knocking: bool, now: float) -> None:
        """Knock, or look whether somebody does; at most every `KNOCK_S`."""
        if now < self._next:
            return
        self._next = now + KNOCK_S
        count = store.add(_KNOCKS, int(knocking))
        if knocking:
            self._since = 0.0
        elif self._count is not None and count != self._count:
            self._since, self._last = self._since or now, now
        elif now - self._last > 3 * KNOCK_S:
            self._since = 0.0
        self._count = count

    def have_lasted(self, window_s: float, now: float) -> bool:
        """Whether somebody has knocked for the window (at least twice) and still does."""
        if not self._since or now - self._last > 3 * KNOCK_S:
            return False
        return self._last - self._since >= max(window_s, 2 * KNOCK_S) - KNOCK_S
