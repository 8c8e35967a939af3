"""The windows of a step in which a snapshot is copied: measured, planned by HAS, and kept by the copying thread.

Source: REFT 4.1, Alg. 1. Ours: the seconds of the windows are those of the last steps of the running training instead
of derived from a pipeline's shape; a plan takes twice the time that the bandwidth asks for, and each one that made
training wait doubles that for those after it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from enum import Enum

from moe_lightning.algorithms.snapshot_windows import schedule_snapshot
from moe_lightning.parallel.context import World

_STEPS = 5
_RESERVE = 2.0
_LONGEST_LOOK_S = 1e-3
_STALL_S = 1e-3


class Window(Enum):
    """Part of a step, as a copy sees it."""

    BUBBLE = "bubble"
    """In a batch, waiting for another stage of a pipeline."""
    IDLE = "idle"
    """Between two batches: waiting for data, validation."""
    COMPUTE = "compute"
    """In forward and backward, outside exchanges and bubbles."""
    COMMUNICATION = "communication"
    """In a token exchange."""


class CopyWindows:
    """Lets copies go on in some windows of a step only.

    The training thread tells where the step is (`begin_batch`, `end_batch`, `before_update`, `updated`), the copying
    thread asks before every chunk (`admit`). Until one whole step was measured, every window is open. What fits into
    the bubbles that are still to come waits for them.

    Args:
        world: whose exchanges are the communication window, and whose waits for other stages the bubbles.
        separate_link: exchanges and copies take different ways, as NVLink and PCIe, so that copies may go on during
            exchanges. On CPUs a rank that waits in an exchange has an idle core, and that window counts as idle time.

    Attributes:
        open: the windows that the present copy may use, for what does not fit into bubbles.
        copied_bytes: of the present copy, by window.
    """

    def __init__(self, world: World, *, separate_link: bool) -> None:
        self._clock, self._bubbles, self._separate_link = world.exchanges, world.bubbles, separate_link
        self._waits_are_idle = world.device.type == "cpu"
        self._clock.watch()
        self._bubbles.watch()
        self._changed = threading.Condition()
        self._in_batch = self._is_hurried = False
        self._measured: deque[Mapping[Window, float]] = deque(maxlen=_STEPS)
        self._bytes_per_s = 0.0
        self._reserve = _RESERVE
        self._held_s = self._bubbles_due_s = 0.0
        self._left_bytes = 0
        self._restart()
        self.open = frozenset(Window)
        self.copied_bytes = dict.fromkeys(Window, 0)

    # ------------------------------------------------------------------ the training thread

    def updated(self) -> None:
        """The optimizer has stepped: idle until the next batch."""
        self._in_batch = False
        self._restart()

    def begin_batch(self) -> None:
        """Forward and backward of a micro-batch begin."""
        self._idle_s += time.perf_counter() - self._idle_since
        self._other_bubbles_s += self._bubbles.seconds - self._left_batch_at_s
        self._in_batch = True

    def end_batch(self) -> None:
        """They ended, and no update followed."""
        self._in_batch = False
        self._idle_since, self._left_batch_at_s = time.perf_counter(), self._bubbles.seconds

    def before_update(self) -> None:
        """Forward and backward of the step's last micro-batch ended: the step's windows are measured."""
        whole_s = time.perf_counter() - self._updated_at
        bubble_s, communication_s = self._bubble_s, self._clock.seconds - self._communicated_s
        step = {Window.BUBBLE: bubble_s, Window.IDLE: self._idle_s, Window.COMMUNICATION: communication_s}
        self._measured.append(step | {Window.COMPUTE: max(0.0, whole_s - sum(step.values()))})

    def hurry(self) -> None:
        """Somebody waits for the copy: it goes on in whatever window."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()

    def waited(self, stall_s: float) -> None:
        """Training had to wait so long for the copy."""
        if stall_s > _STALL_S and (self.open != frozenset(Window) or self._bubbles_due_s):
            self._reserve *= 2

    def copy_begins(self, num_bytes: int) -> None:
        """Plan the windows of a copy from what the last steps and the last copy took."""
        self.copied_bytes = dict.fromkeys(Window, 0)
        self._held_s = 0.0
        self._is_hurried = False
        self._left_bytes = num_bytes
        self.open, self._bubbles_due_s = self._plan(num_bytes)

    def expected(self) -> dict[Window, float]:
        """Seconds of a step by window, the medians of the last ones; empty before one was measured."""
        if not self._measured:
            return {}
        return {window: statistics.median(step[window] for step in self._measured) for window in Window}

    def _restart(self) -> None:
        self._updated_at = self._idle_since = time.perf_counter()
        self._idle_s, self._communicated_s = 0.0, self._clock.seconds
        self._left_batch_at_s = self._other_bubbles_s = self._bubbles.seconds

    @property
    def _bubble_s(self) -> float:
        """Bubbles of this step, as far as they have ended."""
        return self._bubbles.seconds - self._other_bubbles_s

    def _plan(self, num_bytes: int) -> tuple[frozenset[Window], float]:
        """The windows for what fits no bubble, and the seconds of bubbles that are expected."""
        step = self.expected()
        if not step or not self._bytes_per_s:
            return frozenset(Window), 0.0
        communication_s = step[Window.COMMUNICATION]
        waits_s = communication_s if self._waits_are_idle else 0.0
        plan = schedule_snapshot(
            num_bytes,
            bytes_per_s=self._bytes_per_s / self._reserve,
            bubble_s=step[Window.BUBBLE],
            idle_s=step[Window.IDLE] + waits_s,
            compute_s=step[Window.COMPUTE],
            communication_s=communication_s - waits_s,
            separate_link=self._separate_link,
        )
        if plan.stall_bytes:
            return frozenset(Window), 0.0
        used = {Window.BUBBLE, Window.IDLE}
        if plan.compute_bytes:
            used.add(Window.COMPUTE)
        if plan.communication_bytes or self._waits_are_idle:
            used.add(Window.COMMUNICATION)
        fits_bubbles = plan.bubble_bytes == num_bytes
        return frozenset(Window) if fits_bubbles else frozenset(used), step[Window.BUBBLE]

    # ------------------------------------------------------------------ the copying thread

    def admit(self, num_bytes: int) -> None:
        """Return when so many bytes may be copied."""
        window = self._window()
        if not self._admits(window):
            began = time.perf_counter()
            with self._changed:
                while not self._admits(window):
                    self._changed.wait(_LONGEST_LOOK_S)
                    window = self._window()
            self._held_s += time.perf_counter() - began
        self.copied_bytes[window] += num_bytes
        self._left_bytes -= num_bytes

    def copy_ended(self, num_bytes: int, copy_s: float) -> None:
        """Learn the bandwidth from a copy's time, the time that it was held back left out."""
        if num_bytes:
            self._bytes_per_s = num_bytes / max(copy_s - self._held_s, 1e-9)

    def _admits(self, window: Window) -> bool:
        if self._is_hurried or window is Window.BUBBLE:
            return True
        due_s = self._bubbles_due_s - self._bubble_s
        fits_bubbles = due_s > 0 and self._left_bytes * self._reserve <= due_s * self._bytes_per_s
        return window in self.open and not fits_bubbles

    def _window(self) -> Window:
        if self._in_batch and self._bubbles.is_busy:
            return Window.BUBBLE
        if self._clock.is_busy:
            return Window.COMMUNICATION
        return Window.COMPUTE if self._in_batch else Window.IDLE
