"""The triple buffer between a snapshot and its persistence, as a pure state machine.

Three host buffers, each either open for snapshots (S), being written to storage (P) or the recovery copy (R); all
start in S. A snapshot goes into an S buffer; when it is complete and no buffer is P, it may become P; when the persist
completes, P becomes R and the former R goes back to S. Sources: PEC 3.2, MoC-System 5.2; the papers show a timeline
only, which buffer is taken and which waiting snapshot is dropped is our choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

NO_STEP = -1


class Status(IntEnum):
    """What a buffer is for."""

    SNAPSHOT = 0
    PERSIST = 1
    RECOVERY = 2


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """One buffer: its status, the step whose snapshot it holds (NO_STEP: none that is whole), and when it was last
    taken up."""

    status: Status = Status.SNAPSHOT
    step: int = NO_STEP
    used_at: int = 0

    @property
    def waits(self) -> bool:
        """Holds a whole snapshot that is neither being persisted nor persisted."""
        return self.status is Status.SNAPSHOT and self.step != NO_STEP


@dataclass(frozen=True, kw_only=True)
class TripleBuffer:
    """The state of all buffers; every method returns a new state.

    Attributes:
        writing: index of the buffer that a snapshot is being copied into, or None.
        clock: counts snapshots begun, so that the least recently used buffer is known.
        newest: step of the newest whole snapshot there ever was, whether or not a buffer still holds it.
        wanted: the first snapshot of this step or later is held until it is persisted; NO_STEP: none is.
    """

    buffers: tuple[Buffer, ...] = (Buffer(), Buffer(), Buffer())
    writing: int | None = None
    clock: int = 0
    newest: int = NO_STEP
    wanted: int = NO_STEP

    def begin_snapshot(self) -> TripleBuffer:
        """Open the least recently used empty S buffer, or overwrite the oldest waiting snapshot that is not held; the
        result's `writing` names it."""
        assert self.writing is None, "a snapshot is already being written"
        free = [i for i, b in enumerate(self.buffers) if b.status is Status.SNAPSHOT]
        held = self.waiting.get(self.held) if self.held is not None else None
        index = min(free, key=lambda i: (i == held, self.buffers[i].waits, self.buffers[i].used_at))
        opened = Buffer(used_at=self.clock + 1)
        return replace(self._with(index, opened), writing=index, clock=self.clock + 1)

    def finish_snapshot(self, step: int) -> TripleBuffer:
        """The snapshot of `step` is whole and waits to be persisted."""
        assert self.writing is not None, "no snapshot is being written"
        whole = self._with(self.writing, replace(self.buffers[self.writing], step=step))
        return replace(whole, writing=None, newest=step)

    def abort_snapshot(self) -> TripleBuffer:
        """The snapshot being written will never be whole (its writer died): the buffer is empty."""
        return replace(self, writing=None)

    def want(self, step: int) -> TripleBuffer:
        """Hold the first snapshot of `step` or later; unchanged where that may have come and gone."""
        return replace(self, wanted=step) if step > self.newest or step in self.waiting else self

    def start_persist(self, step: int) -> TripleBuffer:
        """The waiting snapshot of `step` becomes P; older waiting ones are dropped."""
        assert self.persisting is None, "a persist is already running"
        chosen = self.waiting[step]
        kept = replace(self._without(lambda b: b.waits and b.step < step), wanted=NO_STEP)
        return kept._with(chosen, replace(self.buffers[chosen], status=Status.PERSIST))

    def finish_persist(self) -> TripleBuffer:
        """P is on storage: it becomes R, and the former R an empty S."""
        chosen = self.persisting
        assert chosen is not None, "no persist is running"
        kept = self._without(lambda b: b.status is Status.RECOVERY)
        return kept._with(chosen, replace(self.buffers[chosen], status=Status.RECOVERY))

    def fail_persist(self, *, keep: bool = True) -> TripleBuffer:
        """The persist did not succeed: its snapshot waits again, or is dropped (keep=False, or a newer one waits)."""
        chosen = self.persisting
        assert chosen is not None, "no persist is running"
        failed = self.buffers[chosen]
        keep = keep and not any(step > failed.step for step in self.waiting)
        return self._with(chosen, replace(failed, status=Status.SNAPSHOT, step=failed.step if keep else NO_STEP))

    def drop_waiting(self) -> TripleBuffer:
        """Waiting snapshots are void: a new session has rolled training back."""
        return replace(self._without(lambda b: b.waits), newest=NO_STEP, wanted=NO_STEP)

    @property
    def waiting(self) -> dict[int, int]:
        """step -> buffer of the snapshots that wait to be persisted."""
        return {b.step: i for i, b in enumerate(self.buffers) if b.waits}

    @property
    def held(self) -> int | None:
        """Step of the waiting snapshot that is not overwritten; None while none is wanted, or it has not come."""
        return min((step for step in self.waiting if 0 <= self.wanted <= step), default=None)

    @property
    def persisting(self) -> int | None:
        return self._first(Status.PERSIST)

    @property
    def recovery(self) -> int | None:
        return self._first(Status.RECOVERY)

    def _first(self, status: Status) -> int | None:
        return next((i for i, b in enumerate(self.buffers) if b.status is status), None)

    def _without(self, void: Callable[[Buffer], bool]) -> TripleBuffer:
        """Empty the buffers of which `void` is true."""
        buffers = tuple(replace(b, status=Status.SNAPSHOT, step=NO_STEP) if void(b) else b for b in self.buffers)
        return replace(self, buffers=buffers)

    def _with(self, index: int, buffer: Buffer) -> TripleBuffer:
        buffers = tuple(buffer if i == index else b for i, b in enumerate(self.buffers))
        return replace(self, buffers=buffers)


def newest_common(waiting: Iterable[Iterable[int]]) -> int | None:
    """The newest step whose snapshot waits in every rank's arena; None where there is none.

    Args:
        waiting: for each rank the steps of its waiting snapshots.
    """
    sets = [set(steps) for steps in waiting]
    return max(set.intersection(*sets), default=None) if sets else None
