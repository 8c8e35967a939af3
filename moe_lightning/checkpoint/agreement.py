"""Choice of the step that the agents of all nodes persist next.

All nodes must persist the same step, although snapshots are replaced within a step or two. `.next.json` in the storage
names the next snapshot to persist: the first one of a step or later. All ranks take snapshots of the same steps, so
nodes that read it in time hold the same one; a node that has passed the step proposes a later one, further ahead each
time. The papers (MoC-System 5.2, REFT 4.2) leave open how nodes agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from moe_lightning.checkpoint.arena import Arena, newest_common, rank_of
from moe_lightning.checkpoint.commit import missing_ranks
from moe_lightning.checkpoint.directory import headings, world_lock
from moe_lightning.checkpoint.manifest import dump_json, read_json
from moe_lightning.checkpoint.storage import storage_of
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import Size, Step, Text

_NEXT = ".next.json"
_OPEN = -1
_LARGEST_MARGIN = 1 << 16
"""Steps; nodes that still miss each other's snapshots have none in common."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Next snapshot to persist, as the nodes have agreed.

    Attributes:
        session: of the snapshots.
        step: the first snapshot of this step or later; negative while none is chosen.
        margin: how many steps ahead of itself the last node that was late has asked for.
    """

    session: Text
    step: Step = _OPEN
    margin: Size = 0

    @property
    def is_open(self) -> bool:
        """True if no step has been chosen yet."""
        return self.step < 0

    @classmethod
    def read(cls, root: Place) -> Self | None:
        """The present agreement of a storage; None where there is none, or nothing that can be read as one."""
        try:
            return read_json(cls, storage_of(root).read(root / _NEXT), str(root / _NEXT))
        except (OSError, CheckpointError):
            return None

    def later(self, newest: int) -> Agreement:
        """Return the proposal of a node that has passed this step, from the node's newest step."""
        margin = max(1, 2 * self.margin)
        return Agreement(session=self.session, step=newest + margin, margin=margin)

    def fulfilled(self) -> Agreement:
        """Open for the next step; the margin that was needed shrinks only slowly."""
        return Agreement(session=self.session, margin=self.margin // 2)


def propose(root: Place, seen: Agreement | None, proposal: Agreement, *, world: int = 0) -> Agreement:
    """Put a proposal in the place of what was seen; what has come there meanwhile counts instead.

    Returns:
        What holds now.

    Raises:
        OSError: the storage failed.
        CheckpointError: its lock is not to be had.
    """
    storage_of(root).make(root)
    with world_lock(root, world):
        present = Agreement.read(root)
        if present is not None and present != seen:
            return present
        storage_of(root).put(root / _NEXT, dump_json(Agreement, proposal))
        return proposal


def agreed_step(
    root: Place, session: str, arenas: Sequence[Arena], common: int | None, *, world: int = 0
) -> int | None:
    """The step that this node persists next, as agreed with the others; None while that is open or has not come.

    Args:
        arenas: of all ranks of this node; each has a snapshot of the session.
        common: the newest step that waits in all of them, or None.

    Raises:
        OSError: the storage failed.
        CheckpointError: training is over, and the nodes hold no snapshots of a common step.
    """
    agreed = Agreement.read(root)
    if agreed is None or agreed.session < session or (agreed.is_open and agreed.session == session):
        if common is None:
            return None
        agreed = propose(root, agreed, _first_choice(agreed, session, arenas, common), world=world)
    if agreed.is_open or agreed.session != session:
        return None
    for arena in arenas:
        if arena.state.wanted != agreed.step:
            arena.transition(lambda state: state.want(agreed.step))
    states = [arena.state for arena in arenas]
    held = {state.held for state in states}
    if any(state.wanted != agreed.step for state in states):
        propose(root, agreed, agreed.later(max(state.newest for state in states)), world=world)
    elif len(held) == 1 and None not in held:
        return held.pop()
    elif common is not None and not any(arena.writer_alive for arena in arenas):  # what was agreed on never comes
        if agreed.margin > _LARGEST_MARGIN:
            raise CheckpointError(f"training ended, and not all nodes hold snapshots of step {common}: none is written")
        propose(root, agreed, replace(agreed, step=common), world=world)
    return None


def _first_choice(agreed: Agreement | None, session: str, arenas: Sequence[Arena], common: int) -> Agreement:
    """Return an agreement on what waits already, or ahead of it if nodes were late recently."""
    margin = agreed.margin if agreed is not None and agreed.session == session else 0
    step = max(arena.state.newest for arena in arenas) + margin if margin else common
    return Agreement(session=session, step=step, margin=margin)


@dataclass
class Job:
    """A step that is being persisted on this node.

    Attributes:
        written_at: when the last part of this node was written; before that, when the job began.
        agreed: with other nodes: this step's snapshot is the first of that step or later.
        written: arenas whose part is written.
        looks, looked_at: how often, and when last, it was looked whether the parts will come.
    """

    session: str
    step: int
    world: int
    world_size: int
    began: float = field(default_factory=time.monotonic)
    written_at: float = field(default_factory=time.monotonic)
    agreed: int | None = None
    written: set[Path] = field(default_factory=set)
    nbytes: int = 0
    looks: int = 0
    looked_at: float = 0.0


def has_work(arena: Arena) -> bool:
    """Something to be written, or being written."""
    state = arena.state
    return bool(state.waiting) or state.persisting is not None


def interrupted_job(arenas: Iterable[Arena]) -> Job | None:
    """A persist that an agent before this one began."""
    for arena in arenas:
        index = arena.state.persisting
        if index is not None:
            table = arena.table(index)
            if table is not None:
                return Job(table.session, table.step, table.world, table.world_size)
            arena.transition(lambda s: s.fail_persist() if s.persisting is not None else s)
    return None


def next_job(root: Place, session: str | None, arenas: Sequence[Arena]) -> Job | None:
    """The newest step of a session that all its ranks hold, as agreed with other nodes; None while there is none.

    Args:
        session: the newest one of which a snapshot waits; None where nothing waits.
        arenas: of its ranks on this node.
    """
    if session is None:
        return None
    tables = [[t for t in arena.waiting_tables() if t.session == session] for arena in arenas]
    step = newest_common([t.step for t in ts] for ts in tables)
    known = next(((t.world, t.world_size) for ts in tables for t in ts), None)
    if known is None:
        return None  # what waited a moment ago has given way to a newer snapshot
    world, world_size = known
    if len(arenas) >= world_size:
        return None if step is None else Job(session, step, world, world_size)
    if any(all(t.session != session for t in arena.tables()) for arena in arenas):
        return None  # a rank has only just come to this session
    step = agreed_step(root, session, arenas, step, world=world)
    if step is None:
        return None
    agreed = Agreement.read(root)
    return Job(session, step, world, world_size, agreed=agreed.step if agreed is not None else None)


def left_behind(arenas: Mapping[Path, Arena], session: str) -> list[Path]:
    """Arenas of ranks that are no longer of this world: dead, and with snapshots of older sessions only."""
    return [
        path
        for path, arena in arenas.items()
        if not arena.writer_alive and all(table.session < session for table in arena.tables())
    ]


def others_advanced(root: Place, job: Job) -> bool:
    """Return True if the other nodes persist another step, or have persisted one of a later session."""
    agreed = Agreement.read(root)
    is_ours = agreed is not None and agreed.session == job.session and not agreed.is_open
    if agreed is not None and is_ours and (agreed.step > job.step or job.agreed not in (None, agreed.step)):
        return True
    return is_superseded(root, job.session)


def is_superseded(root: Place, session: str) -> bool:
    """Return True if the other nodes save a later session, in a world without this node."""
    agreed, committed = Agreement.read(root), headings(root)
    return (agreed is not None and agreed.session > session) or (bool(committed) and committed[0][1].session > session)


def is_void(job: Job, arenas: Iterable[Arena]) -> bool:
    """Return True if training was rolled back: every live rank of this node has begun a later session."""
    arenas = list(arenas)
    followed = [a for a in arenas if any(table.session > job.session for table in a.waiting_tables())]
    return bool(followed) and all(arena in followed for arena in arenas if arena.writer_alive)


def will_lack_parts(job: Job, arenas: Mapping[Path, Arena], root: Place) -> bool:
    """Return True if parts of this node's ranks can no longer be written, or the other nodes persist another step.

    An arena that was left behind is ignored: its rank may have moved to another node.
    """
    left = left_behind(arenas, job.session)
    here = [(rank_of(path), arena) for path, arena in arenas.items() if path not in left]
    late = {rank for rank, arena in here if cannot_provide(arena, job.session, job.step)}
    return (bool(late) and not late.isdisjoint(missing_parts(root, job))) or others_advanced(root, job)


def missing_parts(root: Place, job: Job) -> list[int]:
    """Ranks whose part is not there."""
    storage = storage_of(root)
    return missing_ranks(storage.names(storage.staging(root, job.session, job.step, job.world)), job.world_size)


def cannot_provide(arena: Arena, session: str, step: int) -> bool:
    """Return True if a rank can no longer provide a step of a session: it has no such snapshot and is dead or ahead.

    Snapshots that a former session took of the same step do not count.
    """
    steps = [table.step for table in arena.tables() if table.session == session]
    return step not in steps and (max(steps, default=step) > step or not arena.writer_alive)
