"""Which snapshot an agent persists next, and whether what it persists can still become a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_lightning.checkpoint.agreed_step import Agreement, agreed_step
from moe_lightning.checkpoint.arena import Arena
from moe_lightning.checkpoint.arena_location import rank_of
from moe_lightning.checkpoint.commit import missing_ranks
from moe_lightning.checkpoint.storage import Place
from moe_lightning.checkpoint.storages import storage_of
from moe_lightning.checkpoint.store import headings
from moe_lightning.checkpoint.triple_buffer import newest_common

_PAUSE_S = 0.2
_LONGEST_JOB_PAUSE_S = 5.0


@dataclass
class Job:
    """A step that is being persisted on this node.

    Attributes:
        agreed: with other nodes: this step's snapshot is the first of that step or later.
        written: arenas whose part is written.
        checked: when it was last looked whether the parts will come.
        asked, asked_at: how often, and when last, that the storage was asked for what others do.
    """

    session: str
    step: int
    world: int
    world_size: int
    began: float = field(default_factory=time.monotonic)
    agreed: int | None = None
    written: set[Path] = field(default_factory=set)
    nbytes: int = 0
    checked: float = 0.0
    asked: int = 0
    asked_at: float = 0.0


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


def others_went_on(root: Place, job: Job) -> bool:
    """Whether the other nodes will persist another step, or have persisted a later session's; asked less and less
    often, as it looks at more than the parts that are waited for.
    """
    now = time.monotonic()
    if now - job.asked_at < min(_LONGEST_JOB_PAUSE_S, _PAUSE_S * 2 ** min(job.asked, 10)):
        return False
    job.asked, job.asked_at = job.asked + 1, now
    agreed = Agreement.read(root)
    is_ours = agreed is not None and agreed.session == job.session and not agreed.is_open
    if agreed is not None and is_ours and (agreed.step > job.step or job.agreed not in (None, agreed.step)):
        return True
    return is_superseded(root, job.session)


def is_superseded(root: Place, session: str) -> bool:
    """Whether the others went on, in a world without this node, and save a later session."""
    agreed, committed = Agreement.read(root), headings(root)
    return (agreed is not None and agreed.session > session) or (bool(committed) and committed[0][1].session > session)


def is_void(job: Job, arenas: Iterable[Arena]) -> bool:
    """Whether training was rolled back: every rank of this node that lives has begun a later session."""
    arenas = list(arenas)
    followed = [a for a in arenas if any(table.session > job.session for table in a.waiting_tables())]
    return bool(followed) and all(arena in followed for arena in arenas if arena.writer_alive)


def will_lack_parts(job: Job, arenas: Mapping[Path, Arena], root: Place) -> bool:
    """Whether the parts of ranks of this node will never come, or the other nodes persist something else.

    A rank's arena that was left behind says nothing of that rank: it may have moved on to another node.
    """
    left = left_behind(arenas, job.session)
    here = [(rank_of(path), arena) for path, arena in arenas.items() if path not in left]
    late = {rank for rank, arena in here if passed_by(arena, job.session, job.step)}
    return (bool(late) and not late.isdisjoint(missing_parts(root, job))) or others_went_on(root, job)


def missing_parts(root: Place, job: Job) -> list[int]:
    """Ranks whose part is not there."""
    return missing_ranks(storage_of(root).staging(root, job.session, job.step, job.world), job.world_size)


def passed_by(arena: Arena, session: str, step: int) -> bool:
    """Whether a rank will never deliver a session's step: it has none and is dead, or has newer ones.

    A former session's snapshot of the step, which training came back to, says nothing.
    """
    steps = [table.step for table in arena.tables() if table.session == session]
    return step not in steps and (max(steps, default=step) > step or not arena.writer_alive)
