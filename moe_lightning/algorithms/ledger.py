"""The token ledger: how many tokens each expert's live state has seen, and how many a restore throws away (PLT).

Every expert's state is the result of a number of routed tokens. The ledger keeps that number for the live state, for
the newest copy in host memory and for the newest copy on storage, so "unsaved tokens" are differences and a token can
be lost only once. A checkpoint remembers these numbers as of its step; the newest one whose persist completed is the
recovery point. Tokens processed after the recovery point are trained again and are not lost. Sources: PEC eq. 4,
MoC-System eq. 7 and 5.1.

Shapes: L MoE layers, E experts a layer. Counts are routed assignments actually processed (after any capacity drops).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_lightning.algorithms.selection import longest_turn
from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.config import NonNegativeInt, validated
from moe_lightning.errors import ConfigurationError


class Source(IntEnum):
    """Where an expert's state is restored from after a fault."""

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


@validated
class Ledger:
    """Counts tokens per (layer, expert) in the live state, in memory and on storage.

    Args:
        num_layers: L.
        num_experts: E.
        planned_assignments: tokens times top-k of the whole planned training, per layer (int or int64 [L]): the
            denominator of PLT.

    Raises:
        ConfigurationError: planned_assignments is not positive.
    """

    def __init__(
        self, *, num_layers: NonNegativeInt, num_experts: NonNegativeInt, planned_assignments: int | IntArray
    ) -> None:
        shape = (num_layers, num_experts)
        planned = np.array(np.broadcast_to(np.asarray(planned_assignments, dtype=np.int64), (num_layers,)))
        if (planned < 1).any():
            raise ConfigurationError(
                f"planned_assignments={planned.min()} must be at least 1: tokens of the whole training times top-k"
            )
        self.planned_assignments = planned
        self.processed = np.zeros(shape, dtype=np.int64)
        self.in_memory = np.zeros(shape, dtype=np.int64)
        self.on_storage = np.zeros(shape, dtype=np.int64)
        self.lost = np.zeros(num_layers, dtype=np.int64)
        self._point = _Point(self.processed.copy(), self.in_memory.copy(), np.zeros(shape, dtype=np.bool_))
        self._pending: dict[int, _Point] = {}

    def record(self, counts: IntArray) -> None:
        """Add one step's processed assignments, int64 [L, E], summed over all ranks."""
        self.processed += counts

    def unsaved(self) -> IntArray:
        """int64 [L, E]: tokens in the live state that the newest snapshot does not contain (input of load-aware
        selection)."""
        return self.processed - self.in_memory

    def take_snapshot(self, snapshot: BoolArray) -> None:
        """These experts, bool [L, E], were copied into memory; nobody is going to say what becomes of them on
        storage."""
        self.in_memory = np.where(snapshot, self.processed, self.in_memory)

    def begin_checkpoint(self, step: int, *, snapshot: BoolArray, persist: BoolArray) -> None:
        """A snapshot of the state after `step` was taken, of which the `persist` experts go to storage; bool [L, E]
        each. It is remembered until `complete_checkpoint` is told of it or of a later one."""
        self.take_snapshot(snapshot)
        self._pending[step] = _Point(self.processed.copy(), self.in_memory.copy(), persist.copy())

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
        self._point = _Point(self.processed.copy(), self.in_memory.copy(), np.zeros(loss.shape, dtype=np.bool_))
        self._pending.clear()
        return loss

    def lose(self, seen: IntArray) -> IntArray:
        """Account for a fault that the live state outlives, with some experts replaced by older copies.

        Args:
            seen: int64 [L, E], the tokens that each expert now contains.

        Returns:
            int64 [L, E]: the tokens lost by this fault.
        """
        loss: IntArray = np.maximum(self.processed - seen, 0)
        self.processed = self.processed - loss
        self.in_memory = np.minimum(self.in_memory, self.processed)
        self.on_storage = np.minimum(self.on_storage, self.processed)
        self.lost = self.lost + loss.sum(axis=1)
        self._point = _Point(self.processed.copy(), self.in_memory.copy(), np.zeros(loss.shape, dtype=np.bool_))
        self._pending.clear()
        return loss

    def plt_of(self, lost_per_layer: IntArray) -> float:
        """The PLT that losing int64 [L] tokens amounts to, by MoC-System's definition: the mean over layers of lost /
        planned."""
        return float((lost_per_layer / self.planned_assignments).mean())

    @property
    def plt(self) -> float:
        """Proportion of lost tokens so far, as MoC-System defines it (eq. 7)."""
        return self.plt_of(self.lost)

    def state_dict(self) -> dict[str, Any]:
        """Everything as of the recovery point and now, as arrays; pending checkpoints are not part of it."""
        return {
            "planned_assignments": self.planned_assignments.copy(),
            "processed": self.processed.copy(),
            "in_memory": self.in_memory.copy(),
            "on_storage": self.on_storage.copy(),
            "lost": self.lost.copy(),
            "point_processed": self._point.processed.copy(),
            "point_in_memory": self._point.in_memory.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state (arrays or nested lists).

        Raises:
            ConfigurationError: the state belongs to another number of layers or experts.
        """
        tables = {name: np.asarray(state[name], dtype=np.int64).copy() for name in self.state_dict()}
        for name, table in tables.items():
            expected = self.lost.shape if name in ("planned_assignments", "lost") else self.processed.shape
            if table.shape != expected:
                raise ConfigurationError(
                    f"the saved ledger has {name} of shape {list(table.shape)}, this model needs {list(expected)}: "
                    "resume with the model that wrote the checkpoint"
                )
        self.planned_assignments, self.lost = tables["planned_assignments"], tables["lost"]
        self.processed, self.in_memory, self.on_storage = (tables[k] for k in ("processed", "in_memory", "on_storage"))
        nothing: NDArray[np.bool_] = np.zeros(self.processed.shape, dtype=np.bool_)
        self._point = _Point(tables["point_processed"], tables["point_in_memory"], nothing)
        self._pending.clear()


def staleness_sum(num_experts: int, k: int, num_checkpoints: int | None = None) -> int:
    """S(E, K, n): how many intervals old the experts of a layer are in total after n checkpoints (None: many) of K in
    turn."""
    ages = np.arange(num_experts) // min(k, num_experts)
    return int((ages if num_checkpoints is None else np.minimum(ages, num_checkpoints)).sum())


def expected_plt(
    *, num_experts: int, k: int, interval: int, total_steps: int, num_checkpoints: int | None = None
) -> float:
    """PLT of one fault under uniform routing and sequential selection; steady state is I * (E / K - 1) / (2 * I_total).

    Ours, not printed in the papers: it counts that the j-th most recently saved expert is floor(j / K) checkpoints old.
    """
    return interval * staleness_sum(num_experts, k, num_checkpoints) / (num_experts * total_steps)


def expected_plt_two_level(
    *, num_experts: int, k_snapshot: int, k_persist: int, interval: int, total_steps: int, dead_share: float
) -> float:
    """PLT of one fault in which a share of the experts was on nodes that died and the others are restored from memory
    (MoC-System 5.1)."""
    stale = dead_share * staleness_sum(num_experts, k_persist) + (1 - dead_share) * staleness_sum(
        num_experts, k_snapshot
    )
    return interval * stale / (num_experts * total_steps)


def worst_case_plt(
    *, num_experts: int, k: int, interval: int, total_steps: int, k_snapshot: int | None = None
) -> float:
    """Bound on the PLT of a restore from storage under any routing and sequential selection: all tokens went to the
    expert whose turn was longest ago.

    The load-aware orders have no such bound: an expert that gets few tokens may never have a turn, and then many.

    Args:
        k: experts per layer written to storage.
        k_snapshot: experts per layer copied to memory, of which those are; None: as many.
    """
    oldest = longest_turn(num_experts=num_experts, k_snapshot=k if k_snapshot is None else k_snapshot, k_persist=k)
    return interval * oldest / total_steps
