"""From a policy to the keys that the next checkpoint copies and writes.

Every rank computes the same plan alone: from the ordinal of the checkpoint, or from counters that are equal
everywhere. The result is what `Snapshotter.start` takes: keys to copy, keys meant for storage, and the file each of
them goes to.
Sources: PEC 3.1-3.2, MoC-System 3 and 5.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_lightning.algorithms.selection import (
    SCOPES,
    Selection,
    full_selection,
    load_aware_global_selection,
    load_aware_selection,
    persist_selection,
    sequential_selection,
    window_slots,
)
from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.state.pieces import is_expert_key, parse_expert_key

Order = Literal["sequential", "load_aware", "load_aware_global"]


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """What one checkpoint copies and writes.

    Attributes:
        snapshot: experts copied to memory.
        persist: those of them whose turn it is to go to storage, with the next snapshot that is committed.
        scopes: state kinds to which the selection applies; others are always copied and written.
        slots: int64 [L, E], the file slot of each expert: experts of a slot are usually saved together.
    """

    snapshot: Selection
    persist: Selection
    scopes: frozenset[str]
    slots: IntArray

    def fresh(self, keys: Iterable[str]) -> set[str]:
        """The expert keys to copy."""
        return self._chosen(keys, self.snapshot.mask())

    def persisted(self, keys: Iterable[str]) -> set[str]:
        """The expert keys meant for storage."""
        return self._chosen(keys, self.persist.mask())

    def groups(self, keys: Iterable[str]) -> dict[str, str]:
        """The file group of every expert key; state that is always written has a file of its own."""
        found = {}
        for key in filter(is_expert_key, keys):
            layer, expert, scope, _ = parse_expert_key(key)
            partial = scope in self.scopes
            found[key] = f"experts-slot{self.slots[layer, expert]:03d}" if partial else "experts-always"
        return found

    def _chosen(self, keys: Iterable[str], mask: BoolArray) -> set[str]:
        chosen = set()
        for key in filter(is_expert_key, keys):
            layer, expert, scope, _ = parse_expert_key(key)
            if scope not in self.scopes or mask[layer, expert]:
                chosen.add(key)
        return chosen


@validated
@dataclass(frozen=True, kw_only=True)
class PartialPolicy:
    """How many experts a checkpoint saves, and in which order they take turns.

    Attributes:
        k_snapshot: experts per layer copied to memory; may change between checkpoints (Dynamic-K): make a new policy.
        k_persist: experts per layer written to storage, at most k_snapshot.
        scopes: state kinds that are saved for the selected experts only.
        order: sequential needs no counters; load_aware is PEC's Algorithm 1 as printed; load_aware_global loses fewest
            tokens.
        ep_size: ranks among which the experts are dealt in contiguous blocks (1: any other placement).

    Raises:
        ConfigurationError: numbers that cannot work.
    """

    num_layers: int
    num_experts: int
    k_snapshot: int
    k_persist: int
    scopes: frozenset[str] = frozenset(SCOPES)
    order: Order = "sequential"
    ep_size: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.k_persist <= self.k_snapshot <= self.num_experts:
            raise ConfigurationError(
                f"k_persist={self.k_persist} and k_snapshot={self.k_snapshot} must satisfy "
                f"1 <= k_persist <= k_snapshot <= {self.num_experts} (the number of experts)"
            )

    def plan(
        self,
        ordinal: int,
        *,
        persisted_version: IntArray,
        unsaved: IntArray | None = None,
        owners: IntArray | None = None,
        full: bool = False,
    ) -> CheckpointPlan:
        """The plan of one checkpoint.

        Args:
            ordinal: number of this checkpoint since the last full one, from 0.
            persisted_version: int64 [L, E], step of each expert's newest planned version on storage; equal on all
                ranks.
            unsaved: int64 [L, E], the ledger's counters; needed by the load-aware orders.
            owners: int64 [L, E], the rank that saves each expert; needed by the load-aware orders.
            full: save everything.

        Raises:
            ConfigurationError: a load-aware order without its counters.
        """
        if full:
            snapshot = persist = full_selection(self.num_layers, self.num_experts)
        else:
            snapshot = self._select(ordinal, unsaved, owners)
            persist = persist_selection(snapshot, k=self.k_persist, persisted_version=persisted_version)
        return CheckpointPlan(snapshot=snapshot, persist=persist, scopes=self.scopes, slots=self._slots())

    def _select(self, ordinal: int, unsaved: IntArray | None, owners: IntArray | None) -> Selection:
        if self.order == "sequential":
            return sequential_selection(
                ordinal=ordinal,
                k=self.k_snapshot,
                num_layers=self.num_layers,
                num_experts=self.num_experts,
                ep_size=self.ep_size,
            )
        if unsaved is None or owners is None:
            raise ConfigurationError(f"order={self.order!r} needs the unsaved tokens and the owner of every expert")
        select = load_aware_selection if self.order == "load_aware" else load_aware_global_selection
        return select(unsaved, k=self.k_snapshot, owners=owners, num_ranks=int(owners.max()) + 1)

    def _slots(self) -> IntArray:
        """Sequential selection saves windows; the load-aware orders save experts in no fixed company."""
        if self.order != "sequential":
            return np.broadcast_to(np.arange(self.num_experts), (self.num_layers, self.num_experts))
        return window_slots(
            k=self.k_persist, num_layers=self.num_layers, num_experts=self.num_experts, ep_size=self.ep_size
        )
