"""The windows of a step in which a snapshot is copied: measured, planned by HAS, and kept by the copying thread.

Source: REFT 4.1, Alg. 1. Ours: the seconds of the windows are measured in the running training instead of derived from
a pipeline's shape; a plan takes twice the time that the bandwidth asks for, and one that made training wait is the
session's last: from then on copies go on in every window.
"""

from __future__ import annotations

import threading
import time
from enum import Enum

from moe_lightning.algorithms.snapshot_windows import schedule_snapshot
from moe_lightning.comm.world import World

_RESERVE = 2.0
_LONGEST_LOOK_S = 1e-3
_STALL_S = 1e-3


class Window(Enum):
    """Part of a step, as a copy sees it."""

    IDLE = "idle"
    """Between two batches: waiting for data, validation."""
    COMPUTE = "compute"
    """In forward and backward, outside exchanges."""
    COMMUNICATION = "communication"
    """In a token exchange."""


class CopyWindows:
    """Lets copies go on in some windows of a step only.

    The training thread tells where the step is (`begin_batch`, `end_batch`, `before_update`, `updated`), the copying
    thread asks before every chunk (`admit`). Until one whole step was measured, every window is open.

    Args:
        world: whose exchanges are the communication window.
        separate_link: exchanges and copies take different ways, as NVLink and PCIe, so that copies may go on during
            exchanges. On CPUs a rank that waits in an exchange has an idle core, and that window counts as idle time.

    Attributes:
        open: the windows that the present copy may use.
        copied_bytes: of the present copy, by window.
    """

    def __init__(self, world: World, *, separate_link: bool) -> None:
        self._clock, self._separate_link = world.exchanges, separate_link
        self._waits_are_idle = world.device.type == "cpu"
        self._clock.watch()
        self._changed = threading.Condition()
        self._in_batch = self._is_hurried = False
        self._measured: dict[Window, float] | None = None
        self._bytes_per_s = 0.0
        self._is_trusted = True
        self._held_s = 0.0
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
        self._in_batch = True

    def end_batch(self) -> None:
        """They ended, and no update followed."""
        self._in_batch = False
        self._idle_since = time.perf_counter()

    def before_update(self) -> None:
        """Forward and backward of the step's last micro-batch ended: the step's windows are measured."""
        whole_s = time.perf_counter() - self._updated_at
        communication_s = self._clock.seconds - self._communicated_s
        self._measured = {
            Window.IDLE: self._idle_s,
            Window.COMMUNICATION: communication_s,
            Window.COMPUTE: max(0.0, whole_s - self._idle_s - communication_s),
        }

    def hurry(self) -> None:
        """Somebody waits for the copy: it goes on in whatever window."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()

    def waited(self, stall_s: float) -> None:
        """Training had to wait so long for the copy."""
        if stall_s > _STALL_S and self.open != frozenset(Window):
            self._is_trusted = False

    def copy_begins(self, num_bytes: int) -> None:
        """Plan the windows of a copy from what the last step and the last copy took."""
        self.copied_bytes = dict.fromkeys(Window, 0)
        self._held_s = 0.0
        self._is_hurried = False
        self.open = self._plan(num_bytes)

    def _restart(self) -> None:
        self._updated_at = self._idle_since = time.perf_counter()
        self._idle_s, self._communicated_s = 0.0, self._clock.seconds

    def _plan(self, num_bytes: int) -> frozenset[Window]:
        if self._measured is None or not self._bytes_per_s or not self._is_trusted:
            return frozenset(Window)
        communication_s = self._measured[Window.COMMUNICATION]
        waits_s = communication_s if self._waits_are_idle else 0.0
        plan = schedule_snapshot(
            num_bytes,
            bytes_per_s=self._bytes_per_s / _RESERVE,
            idle_s=self._measured[Window.IDLE] + waits_s,
            compute_s=self._measured[Window.COMPUTE],
            communication_s=communication_s - waits_s,
            separate_link=self._separate_link,
        )
        if plan.stall_bytes:
            return frozenset(Window)
        used = {Window.IDLE}
        if plan.compute_bytes:
            used.add(Window.COMPUTE)
        if plan.communication_bytes or self._waits_are_idle:
            used.add(Window.COMMUNICATION)
        return frozenset(used)

    # ------------------------------------------------------------------ the copying thread

    def admit(self, num_bytes: int) -> None:
        """Return when so many bytes may be copied."""
        window = self._window()
        if not (self._is_hurried or window in self.open):
            began = time.perf_counter()
            with self._changed:
                while not (self._is_hurried or window in self.open):
                    self._changed.wait(_LONGEST_LOOK_S)
                    window = self._window()
            self._held_s += time.perf_counter() - began
        self.copied_bytes[window] += num_bytes

    def copy_ended(self, num_bytes: int, copy_s: float) -> None:
        """Learn the bandwidth from a copy's time, the time that it was held back left out."""
        if num_bytes:
            self._bytes_per_s = num_bytes / max(copy_s - self._held_s, 1e-9)

    def _window(self) -> Window:
        if self._clock.is_busy:
            return Window.COMMUNICATION
        return Window.COMPUTE if self._in_batch else Window.IDLE
