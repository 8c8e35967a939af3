"""Token ledger of a simulated run: checkpoints become recovery points once they are written, and faults go back to one.

Tokens that were processed after the recovery point are trained again and are not lost. Source: MoC-System 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.checkpoint.selection import Ledger


class Source(IntEnum):
    """Source of an expert's state in a restore after a fault."""

    LIVE = 0
    """A replica, parity or replay that gives the state exactly as of the recovery point: nothing is lost."""
    MEMORY = 1
    """The newest snapshot not younger than the recovery point."""
    STORAGE = 2
    """The newest persisted version."""


@dataclass(frozen=True, eq=False)
class _Point:
    """Tokens contained in each copy as of one checkpoint; int64 [L, E] each."""

    processed: IntArray
    in_memory: IntArray
    persists: BoolArray


class SimulatedLedger(Ledger):
    """Counts tokens per (layer, expert) in the live state, in memory and on storage.

    Args: as `Ledger`.
    """

    def __init__(self, *, num_layers: int, num_experts: int, planned_assignments: int | IntArray) -> None:
        super().__init__(num_layers=num_layers, num_experts=num_experts, planned_assignments=planned_assignments)
        self.on_storage = self.processed.copy()
        self._point = self._point_of(np.zeros(self.processed.shape, dtype=np.bool_))
        self._pending: dict[int, _Point] = {}

    def _point_of(self, persists: BoolArray) -> _Point:
        return _Point(self.processed.copy(), self.in_memory.copy(), persists)

    def begin_checkpoint(self, step: int, *, snapshot: BoolArray, persist: BoolArray) -> None:
        """A snapshot of the state after `step` was taken, of which the `persist` experts go to storage; bool [L, E]
        each. It is remembered until `complete_checkpoint` is called with it or a later one."""
        self.take_snapshot(snapshot)
        self._pending[step] = self._point_of(persist.copy())

    def complete_checkpoint(self, step: int, *, persisted: BoolArray | None = None) -> None:
        """The persist of the checkpoint at `step` is committed: it becomes the recovery point, and older pending ones
        are void.

        Args:
            persisted: the experts that storage now holds as of `step`, bool [L, E]; None means as planned.

        Raises:
            KeyError: no checkpoint was begun at that step.
        """
        point = self._pending.pop(step)
        self._pending = {later: pending for later, pending in self._pending.items() if later > step}
        saved = point.persists if persisted is None else persisted
        self.on_storage = np.where(saved, point.processed, self.on_storage)
        self._point = point

    def loss_if_recovered(self, sources: IntArray | Source) -> IntArray:
        """int64 [L, E]: tokens that recovering every expert from its source (a `Source`, or int [L, E] of them) would
        lose."""
        table = np.broadcast_to(np.asarray(sources), self.processed.shape)
        held = np.choose(table, [self._point.processed, self._point.in_memory, self.on_storage])
        loss: IntArray = np.maximum(self._point.processed - held, 0)
        return loss

    def recover(self, sources: IntArray | Source) -> IntArray:
        """Account for a fault: every expert goes back to the recovery point, or to the stale copy its source has.

        An expert restored from memory keeps the distance between memory and storage as a risk of the next fault; one
        restored from storage has no copy in memory any more.

        Returns:
            int64 [L, E]: the tokens lost by this fault.
        """
        loss = self.loss_if_recovered(sources)
        table = np.broadcast_to(np.asarray(sources), self.processed.shape)
        self.processed = self._point.processed - loss
        in_memory = np.minimum(self._point.in_memory, self.processed)
        self.in_memory = np.where(table == Source.STORAGE, self.on_storage, in_memory)
        self.lost = self.lost + loss.sum(axis=1)
        self._point = self._point_of(np.zeros(loss.shape, dtype=np.bool_))
        self._pending.clear()
        return loss
