"""What a run remembers about its partial checkpoints: tokens, versions, and whose turn is next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from moe_lightning.algorithms.ledger import Ledger, Source
from moe_lightning.algorithms.replay_window import ReplayWindow, plan_window
from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.plan import CheckpointPlan, Order, PartialPolicy
from moe_lightning.config import NonNegativeInt, validated
from moe_lightning.errors import ConfigurationError

_HISTORY = 64
"""Checkpoints whose token counts are kept; of an older version, the newest one that is remembered before it counts, so
that losses are never told too low."""


@validated
class CheckpointLedger:
    """What one run has counted and committed; every rank keeps the same, from the same counts.

    They hold whose turn it is, which every rank knows when a snapshot is taken. What becomes of a snapshot only the
    agents know: whatever they commit holds everything that was due by then (`Piece.due`), so turns need no answer.

    Args:
        num_layers, num_experts: L and E.
        planned_assignments: tokens times top-k of the whole planned training, per layer.
        owners: int64 [L, E], the rank that writes each expert.
        num_ranks: of the world.
        scopes: state kinds that may stay behind.
        order: which experts are next.

    Attributes:
        ledger: tokens in the live state, in memory and on storage.
    """

    def __init__(
        self,
        *,
        num_layers: NonNegativeInt,
        num_experts: NonNegativeInt,
        planned_assignments: int | IntArray,
        owners: IntArray,
        num_ranks: int,
        scopes: frozenset[str],
        order: Order = "sequential",
    ) -> None:
        self.ledger = Ledger(num_layers=num_layers, num_experts=num_experts, planned_assignments=planned_assignments)
        self._shape = (num_layers, num_experts)
        self._owners, self._num_ranks = owners, num_ranks
        self._scopes, self._order = scopes, order
        self._ordinal = 0
        self._persisted_version = np.full(self._shape, -1, dtype=np.int64)
        self._persisted_processed = np.zeros(self._shape, dtype=np.int64)
        self._history: dict[int, IntArray] = {}

    def reassign(self, owners: IntArray) -> None:
        """Experts moved: other ranks write them from now on."""
        self._owners = owners

    def plan(self, k_snapshot: int, k_persist: int, *, full: bool = False) -> CheckpointPlan:
        """The experts of the next checkpoint; among those that are copied, the ones written longest ago are written."""
        layers, experts = self._shape
        policy = PartialPolicy(
            num_layers=layers,
            num_experts=experts,
            k_snapshot=k_snapshot,
            k_persist=k_persist,
            scopes=self._scopes,
            order=self._order,
            # Interleaving the ranks needs equal blocks of experts; under other placements all ranks count as one.
            ep_size=self._num_ranks if experts % self._num_ranks == 0 else 1,
        )
        return policy.plan(
            self._ordinal,
            persisted_version=self._persisted_version,
            unsaved=self.ledger.unsaved(),
            owners=self._owners,
            full=full or k_persist >= experts,
        )

    def window(self, first: int, k: int) -> ReplayWindow:
        """A lossless window that begins after a step; the tokens since the snapshot before tell who is popular."""
        return plan_window(first, self.ledger.unsaved(), k)

    def cost(self, plan: CheckpointPlan) -> float:
        """The PLT that a restore of the checkpoint of this plan, taken now, would cost."""
        written = np.where(plan.persist.mask(), self.ledger.processed, self._persisted_processed)
        lost: IntArray = np.maximum(self.ledger.processed - written, 0).sum(axis=1)
        return self.ledger.plt_of(lost)

    def begin(self, step: int, plan: CheckpointPlan) -> None:
        """A checkpoint of the state after `step` is under way."""
        written = plan.persist.mask()
        self.ledger.take_snapshot(plan.snapshot.mask())
        self._persisted_version = np.where(written, step, self._persisted_version)
        self._persisted_processed = np.where(written, self.ledger.processed, self._persisted_processed)
        self._history[step] = self.ledger.processed.copy()
        for old in sorted(self._history)[:-_HISTORY]:
            del self._history[old]
        self._ordinal += 1

    @property
    def largest_dump_bytes(self) -> int:
        """What `dump` may grow to once written out."""
        table_bytes = self.ledger.processed.nbytes
        return (4 + _HISTORY) * (table_bytes + 64) + (16 << 10)

    def dump(self) -> dict[str, Any]:
        """Tensors and plain values for the checkpoint that was begun last."""
        steps = sorted(self._history)
        return {
            "ordinal": self._ordinal,
            "processed": torch.from_numpy(self.ledger.processed.copy()),
            "lost": torch.from_numpy(self.ledger.lost.copy()),
            "persisted_version": torch.from_numpy(self._persisted_version.copy()),
            "persisted_processed": torch.from_numpy(self._persisted_processed.copy()),
            "history_steps": steps,
            "history": torch.from_numpy(np.stack([self._history[s] for s in steps])),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything, for a process that joins the run; tensors and plain values."""
        return {
            "ledger": {name: torch.from_numpy(table) for name, table in self.ledger.state_dict().items()},
            "ordinal": self._ordinal,
            "persisted_version": torch.from_numpy(self._persisted_version.copy()),
            "persisted_processed": torch.from_numpy(self._persisted_processed.copy()),
            "history": {step: torch.from_numpy(counts.copy()) for step, counts in self._history.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another process is."""
        self.ledger.load_state_dict(state["ledger"])
        self._ordinal = int(state["ordinal"])
        self._persisted_version = np.asarray(state["persisted_version"], dtype=np.int64)
        self._persisted_processed = np.asarray(state["persisted_processed"], dtype=np.int64)
        self._history = {int(step): np.asarray(counts, np.int64) for step, counts in state["history"].items()}

    def lose(self, versions: Mapping[tuple[int, int], int]) -> IntArray:
        """Some experts of the live state came back older.

        Args:
            versions: of these experts, by (layer, expert).

        Returns:
            int64 [L, E]: the tokens that they have not seen; they are added to the ledger's losses.
        """
        table = np.full(self._shape, -1, dtype=np.int64)
        for expert, version in versions.items():
            table[expert] = version
        is_older = np.zeros(self._shape, dtype=np.bool_)
        is_older[tuple(zip(*versions, strict=True))] = True
        remembered: list[tuple[IntArray | int, IntArray]] = [(self._persisted_version, self._persisted_processed)]
        remembered += self._history.items()
        return self.ledger.lose(np.where(is_older, _seen_by(table, remembered), self.ledger.processed))

    def restore(self, saved: Mapping[str, Any], step: int, versions: IntArray) -> IntArray:
        """Go on after a restore of the checkpoint at `step` in which expert (l, e) has version `versions[l, e]`.

        Returns:
            int64 [L, E]: the tokens that the restored experts have not seen; they are added to the ledger's losses.
        """
        if tuple(saved["processed"].shape) != self._shape or versions.shape != self._shape:
            raise ConfigurationError(
                f"the checkpoint counts tokens of {list(saved['processed'].shape)} experts (layers, experts), "
                f"the model has {list(self._shape)}: use the configuration it was written with"
            )
        processed, history = saved["processed"].numpy().astype(np.int64), _history_of(saved)
        held = processed - unseen_tokens(saved, step, versions)
        self.ledger.load_state_dict(
            {
                "planned_assignments": self.ledger.planned_assignments,
                "processed": processed,
                "in_memory": held,
                "on_storage": held,
                "lost": saved["lost"].numpy().astype(np.int64),
                "point_processed": processed,
                "point_in_memory": held,
            }
        )
        self._ordinal = int(saved["ordinal"])
        self._persisted_version, self._persisted_processed = versions.copy(), held.copy()
        self._history = history
        return self.ledger.recover(Source.STORAGE)


def unseen_tokens(saved: Mapping[str, Any], step: int, versions: IntArray) -> IntArray:
    """int64 [L, E]: the tokens that experts of some versions have not seen, as the ledger of a checkpoint remembers.

    Args:
        saved: from `CheckpointLedger.dump`.
        step: of the checkpoint.
        versions: int64 [L, E].
    """
    processed = saved["processed"].numpy().astype(np.int64)
    persisted = saved["persisted_version"].numpy(), saved["persisted_processed"].numpy().astype(np.int64)
    unseen: IntArray = processed - _seen_by(versions, [persisted, *_history_of(saved).items(), (step, processed)])
    return unseen


def _history_of(saved: Mapping[str, Any]) -> dict[int, IntArray]:
    return {int(s): h.numpy().astype(np.int64) for s, h in zip(saved["history_steps"], saved["history"], strict=True)}


def _seen_by(versions: IntArray, remembered: Iterable[tuple[IntArray | int, IntArray]]) -> IntArray:
    """int64 [L, E]: the tokens that experts of these versions contain: those of the version itself where it is
    remembered, else of the newest one before it, else none.

    Args:
        versions: int64 [L, E].
        remembered: (version, tokens), one version for all experts or int64 [L, E].
    """
    seen, known = np.zeros_like(versions), np.full_like(versions, -1)
    for version, tokens in remembered:
        is_better = (version <= versions) & (version > known)
        seen, known = np.where(is_better, tokens, seen), np.where(is_better, version, known)
    return seen
