"""How the agents of several nodes come to persist the same step, without a word to each other but one small file.

Every node's snapshots come and go within a step or two, and its agent looks at them in its own time: two agents that
each chose for themselves could choose different steps again and again. So `.next.json` in the storage says which
snapshot is persisted next: the first one of a step or later. All ranks take snapshots of the same steps, so nodes that
learn of it before they have passed it hold the same one. A node that has passed it asks for a later one, further ahead
each time, until all of them hear in time.

The papers (MoC-System 5.2, REFT 4.2) leave open how nodes agree.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Self

from moe_lightning.checkpoint.arena import Arena
from moe_lightning.checkpoint.fence import world_lock
from moe_lightning.checkpoint.storage import Place
from moe_lightning.checkpoint.storages import storage_of
from moe_lightning.errors import CheckpointError

_NEXT = ".next.json"
_OPEN = -1
_LARGEST_STEP = 1 << 60
_LARGEST_MARGIN = 1 << 16
"""Steps; nodes that still miss each other's snapshots have none in common."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What is persisted next.

    Attributes:
        session: of the snapshots.
        step: the first snapshot of this step or later; negative while nobody has chosen.
        margin: how many steps ahead of itself the last node that was late has asked for.
    """

    session: str
    step: int = _OPEN
    margin: int = 0

    @property
    def is_open(self) -> bool:
        """Nobody has chosen a step yet."""
        return self.step < 0

    @classmethod
    def read(cls, root: Place) -> Self | None:
        """The present agreement of a storage; None where there is none, or nothing that can be read as one."""
        try:
            found = json.loads(storage_of(root).read(root / _NEXT))
            read = cls(session=found["session"], step=found["step"], margin=found["margin"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if (type(read.session), type(read.step), type(read.margin)) != (str, int, int):
            return None
        return read if max(abs(read.step), abs(read.margin)) < _LARGEST_STEP else None

    def later(self, newest: int) -> Agreement:
        """What a node proposes that has passed this one, from its newest step."""
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
        storage_of(root).put(root / _NEXT, json.dumps(asdict(proposal)).encode())
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
    """What waits already, unless nodes were late for that of late."""
    margin = agreed.margin if agreed is not None and agreed.session == session else 0
    step = max(arena.state.newest for arena in arenas) + margin if margin else common
    return Agreement(session=session, step=step, margin=margin)
