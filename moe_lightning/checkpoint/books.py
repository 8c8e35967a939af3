"""What a run remembers about its partial checkpoints: tokens, versions, and whose turn is next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from moe_lightning.algorithms.ledger import Ledger, Source
from moe_lightning.algorithms.placement import IntArray
from moe_lightning.algorithms.selection import (
    Selection,
    full_selection,
    load_aware_global_selection,
    load_aware_selection,
    persist_selection,
    sequential_selection,
)
from moe_lightning.errors import ConfigurationError

Policy = Literal["sequential", "load_aware", "load_aware_global"]
POLICIES = ("sequential", "load_aware", "load_aware_global")

_HISTORY = 64
"""Checkpoints whose token counts are kept; an expert restored from an older version counts as never saved."""


class Books:
    """The books of one run; every rank keeps the same ones, from the same counts.

    Args:
        num_layers, num_experts: L and E.
        planned_assignments: tokens times top-k of the whole planned training, per layer.
        owners: int64 [L, E], the rank that writes each expert.
        num_ranks: of the world.
        policy: which experts are next.

    Attributes:
        ledger: tokens in the live state, in memory and on storage.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        planned_assignments: int | IntArray,
        owners: IntArray,
        num_ranks: int,
        policy: Policy = "sequential",
    ) -> None:
        if policy not in POLICIES:
            raise ConfigurationError(f"policy={policy!r} is not known: use one of {list(POLICIES)}")
        self.ledger = Ledger(num_layers=num_layers, num_experts=num_experts, planned_assignments=planned_assignments)
        self._shape = (num_layers, num_experts)
        self._owners, self._num_ranks, self._policy = owners, num_ranks, policy
        self._ordinal = 0
        self._persisted_version = np.full(self._shape, -1, dtype=np.int64)
        self._history: dict[int, IntArray] = {}

    def select(self, k_snapshot: int, k_persist: int) -> tuple[Selection, Selection]:
        """The experts to copy and, among them, those to write: the ones written longest ago."""
        layers, experts = self._shape
        if k_snapshot >= experts:
            snapshot = full_selection(layers, experts)
        elif self._policy == "sequential":
            snapshot = sequential_selection(
                ordinal=self._ordinal,
                k=k_snapshot,
                num_layers=layers,
                num_experts=experts,
                ep_size=self._ep_size(),
            )
        else:
            choose = load_aware_selection if self._policy == "load_aware" else load_aware_global_selection
            snapshot = choose(self.ledger.unsaved(), k=k_snapshot, owners=self._owners, num_ranks=self._num_ranks)
        return snapshot, persist_selection(snapshot, k=k_persist, persisted_version=self._persisted_version)

    def group_of(self, layer: int, expert: int, k_persist: int) -> str:
        """File group of an expert: under sequential selection those written together share a file, so that a file is
        dropped as a whole when its experts are written again; else each expert has a file of its own."""
        experts = self._shape[1]
        if self._policy != "sequential" or experts % k_persist:
            return f"l{layer}e{expert}"
        ep_size = self._ep_size()
        position = expert % (experts // ep_size) * ep_size + expert // (experts // ep_size)
        return f"slot{(position // k_persist - layer) % (experts // k_persist)}"

    def _ep_size(self) -> int:
        """Ranks to interleave: that needs equal blocks of experts."""
        return self._num_ranks if self._shape[1] % self._num_ranks == 0 else 1

    def begin(self, step: int, snapshot: Selection, persist: Selection) -> None:
        """A checkpoint of the state after `step` is under way."""
        self.ledger.begin_checkpoint(step, snapshot=snapshot.mask(), persist=persist.mask())
        self._persisted_version = np.where(persist.mask(), step, self._persisted_version)
        self._history[step] = self.ledger.processed.copy()
        for old in sorted(self._history)[:-_HISTORY]:
            del self._history[old]
        self._ordinal += 1

    def dump(self) -> dict[str, Any]:
        """Tensors and plain values for the checkpoint that was begun last."""
        steps = sorted(self._history)
        return {
            "ordinal": self._ordinal,
            "processed": torch.from_numpy(self.ledger.processed.copy()),
            "lost": torch.from_numpy(self.ledger.lost.copy()),
            "persisted_version": torch.from_numpy(self._persisted_version.copy()),
            "history_steps": steps,
            "history": torch.from_numpy(
                np.stack([self._history[s] for s in steps]) if steps else np.zeros((0, *self._shape), np.int64)
            ),
        }

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
        history = {
            int(s): h.numpy().astype(np.int64) for s, h in zip(saved["history_steps"], saved["history"], strict=True)
        }
        processed = saved["processed"].numpy().astype(np.int64)
        held = np.zeros(self._shape, dtype=np.int64)
        for version, counts in (history | {step: processed}).items():
            held = np.where(versions == version, counts, held)
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
        self._persisted_version = versions.copy()
        self._history = history
        return self.ledger.recover(Source.STORAGE)
