"""Checkpoint policy: settings, the keys of the next checkpoint, and the record of past ones.

Every rank computes the same plan alone: from the ordinal of the checkpoint, or from counters that are equal
everywhere. The result is the input of `Snapshotter.start`: keys to copy, keys meant for storage, and the file of each.

The ledger counts the routed tokens behind each expert's state: live, and newest copy in host memory; and it records the
versions and turns of experts. Unsaved tokens are differences, so a token can be lost only once (PLT). A checkpoint
records these numbers as of its step; tokens processed after it are trained again and are not lost.

Sources: PEC 3.1-3.2 and eq. 4, MoC-System 3, eq. 7 and 5.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.checkpoint.schedule import ReplayWindow, plan_window
from moe_lightning.checkpoint.selection import (
    SCOPES,
    Selection,
    full_selection,
    load_aware_global_selection,
    load_aware_selection,
    parse_scopes,
    persist_selection,
    sequential_selection,
    window_slots,
)
from moe_lightning.config import Coefficient, NonNegativeInt, PositiveInt, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.state.pieces import is_expert_key, parse_expert_key

Order = Literal["sequential", "load_aware", "load_aware_global"]


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Keys that one checkpoint copies and writes.

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
class CheckpointSettings:
    """Settings of a run's checkpoints.

    Attributes:
        every_n_steps: optimizer steps between checkpoints; "auto" after the first one takes the interval that costs
            least (MoC 5.3), never shorter than writing takes. Of a lossless window the first step counts.
        k_snapshot: experts of each layer copied into memory; None: all, "auto": as many as hide under forward and
            backward.
        k_persist: experts of each layer written to storage; None: as many as are copied.
        order: which experts are next: "sequential", "load_aware" (PEC Alg. 1 as printed) or "load_aware_global", which
            loses fewest tokens.
        scopes: the kinds of expert state that may stay behind: a preset ("full", "moc", "weights", "none") or kinds.
            Parameters in float32 are master weights; those of lower precision are weights.
        keep_last: whole checkpoints to keep.
        failures_per_hour: expected rate of faults, for the adaptive interval; 0: it is as short as writing allows.
        windows: when snapshots are copied: in "any" part of a step, as soon as possible, or "scheduled" by HAS (REFT
            4.1): while a stage waits for others (bubbles), while the device is idle, then during computation, then
            during exchanges, as far as each is needed.
        lossless: take windows of sparse snapshots, from which nothing is lost (`checkpoint/schedule.py`):
            `k_snapshot` experts of a layer are copied whole in each step, None or "auto": as many as hide under one.

    Raises:
        ConfigurationError: a value outside its range.
    """

    every_n_steps: PositiveInt | Literal["auto"] = 100
    k_snapshot: PositiveInt | Literal["auto"] | None = None
    k_persist: PositiveInt | None = None
    order: Order = "sequential"
    scopes: str | Iterable[str] = "full"
    keep_last: PositiveInt = 2
    failures_per_hour: Coefficient = 0.0
    windows: Literal["any", "scheduled"] = "any"
    lossless: bool = False

    @property
    def adapts(self) -> bool:
        """True if the interval or `k_snapshot` is chosen from measured times."""
        return "auto" in (self.every_n_steps, self.k_snapshot) or (self.lossless and self.k_snapshot is None)

    def __post_init__(self) -> None:
        if isinstance(self.k_snapshot, int) and self.k_persist is not None and self.k_persist > self.k_snapshot:
            raise ConfigurationError(
                f"k_persist={self.k_persist} is more than k_snapshot={self.k_snapshot}: "
                "only experts that are copied can be written"
            )
        takes_all = self.k_persist is None and self.order == "sequential" and parse_scopes(self.scopes) == set(SCOPES)
        if self.lossless and not takes_all:
            raise ConfigurationError(
                f"lossless=True saves all state of every expert, popular ones last: with k_persist={self.k_persist}, "
                f"order={self.order!r} and scopes={self.scopes!r} some would be left out; leave them at their defaults"
            )
        parse_scopes(self.scopes)


_HISTORY = 64
"""Checkpoints whose token counts are kept; of an older version, the newest one that is remembered before it counts, so
that losses are never reported too low."""


@validated
class CheckpointLedger:
    """Ledger of one run: tokens by (layer, expert), those that faults have lost, and checkpoints; equal on every rank.
    Its tables are replaced and never changed in place, so a shallow copy stays as it is.

    Turns follow from the snapshots taken, which are equal on every rank. Only agents see which snapshots become
    checkpoints; each one they commit holds everything that was due by then (`Piece.due`), so turns do not depend on it.

    Args:
        num_layers, num_experts: L and E.
        planned_assignments: tokens times top-k of the whole planned training, per layer (int or int64 [L], positive):
            the denominator of PLT.
        owners: int64 [L, E], the rank that writes each expert.
        num_ranks: of the world.
        scopes: state kinds that may stay behind.
        order: which experts are next.

    Attributes:
        processed, in_memory: int64 [L, E], tokens in the live state and in the newest snapshot.
        lost: int64 [L].
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
        self._shape = (num_layers, num_experts)
        self._planned = np.array(np.broadcast_to(np.asarray(planned_assignments, dtype=np.int64), (num_layers,)))
        self.processed: IntArray = np.zeros(self._shape, dtype=np.int64)
        self.in_memory = self.processed
        self.lost: IntArray = np.zeros(num_layers, dtype=np.int64)
        self._owners, self._num_ranks = owners, num_ranks
        self._scopes, self._order = scopes, order
        self._ordinal = 0
        self._persisted_version = np.full(self._shape, -1, dtype=np.int64)
        self._persisted_processed = self.processed
        self._history: dict[int, IntArray] = {}

    def record(self, counts: IntArray) -> None:
        """Add processed assignments, int64 [L, E], summed over all ranks."""
        self.processed = self.processed + counts

    def plt_of(self, lost_per_layer: IntArray) -> float:
        """The PLT that losing int64 [L] tokens amounts to, by MoC-System's definition: the mean over layers of lost /
        planned."""
        return float((lost_per_layer / self._planned).mean())

    @property
    def plt(self) -> float:
        """Proportion of lost tokens so far, as MoC-System defines it (eq. 7)."""
        return self.plt_of(self.lost)

    def reassign(self, owners: IntArray, num_ranks: int) -> None:
        """Experts moved, or the world changed: other ranks write them from now on. See `CheckpointLedger`."""
        self._owners, self._num_ranks = owners, num_ranks

    def plan(self, k_snapshot: int, k_persist: int, *, full: bool = False) -> CheckpointPlan:
        """The experts of the next checkpoint; among those that are copied, the ones written longest ago are written."""
        (num_layers, num_experts), k = self._shape, k_snapshot
        # Interleaving the ranks needs equal blocks of experts; under other placements all ranks count as one.
        ep_size = self._num_ranks if num_experts % self._num_ranks == 0 else 1
        shape = {"num_layers": num_layers, "num_experts": num_experts}
        if full or k_persist >= num_experts:
            snapshot = persist = full_selection(**shape)
        else:
            if self._order == "sequential":
                snapshot = sequential_selection(ordinal=self._ordinal, k=k, ep_size=ep_size, **shape)
            else:
                select = load_aware_selection if self._order == "load_aware" else load_aware_global_selection
                unsaved = self.processed - self.in_memory
                snapshot = select(unsaved, k=k, owners=self._owners, num_ranks=int(self._owners.max()) + 1)
            persist = persist_selection(snapshot, k=k_persist, persisted_version=self._persisted_version)
        if self._order == "sequential":
            slots = window_slots(k=k_persist, ep_size=ep_size, **shape)
        else:  # the load-aware orders save experts in no fixed company
            slots = np.broadcast_to(np.arange(num_experts), self._shape)
        return CheckpointPlan(snapshot=snapshot, persist=persist, scopes=self._scopes, slots=slots)

    def window(self, first: int, k: int) -> ReplayWindow:
        """A lossless window that begins after a step; popularity is the tokens since the snapshot before."""
        return plan_window(first, self.processed - self.in_memory, k)

    def cost(self, plan: CheckpointPlan) -> float:
        """The PLT that a restore of the checkpoint of this plan, taken now, would cost."""
        written = np.where(plan.persist.mask(), self.processed, self._persisted_processed)
        lost: IntArray = np.maximum(self.processed - written, 0).sum(axis=1)
        return self.plt_of(lost)

    def begin(self, step: int, plan: CheckpointPlan) -> None:
        """A checkpoint of the state after `step` is under way."""
        written = plan.persist.mask()
        self.in_memory = np.where(plan.snapshot.mask(), self.processed, self.in_memory)
        self._persisted_version = np.where(written, step, self._persisted_version)
        self._persisted_processed = np.where(written, self.processed, self._persisted_processed)
        known = self._history | {step: self.processed}
        self._history = {kept: known[kept] for kept in sorted(known)[-_HISTORY:]}
        self._ordinal += 1

    @property
    def largest_state_bytes(self) -> int:
        """Return an upper bound of the bytes of `state_dict` in a checkpoint."""
        return (4 + _HISTORY) * (self.processed.nbytes + 64) + (16 << 10)

    def state_dict(self) -> dict[str, Any]:
        """Everything as tensors and plain values, for a checkpoint and for a process that joins the run."""
        steps = sorted(self._history)
        tables = {
            "planned": self._planned,
            "processed": self.processed,
            "in_memory": self.in_memory,
            "lost": self.lost,
            "persisted_version": self._persisted_version,
            "persisted_processed": self._persisted_processed,
            "history": np.array([self._history[s] for s in steps], dtype=np.int64).reshape(-1, *self._shape),
        }
        saved: dict[str, Any] = {name: torch.from_numpy(table.copy()) for name, table in tables.items()}
        return {**saved, "ordinal": self._ordinal, "history_steps": steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another process is."""
        self._planned = _table(state["planned"])
        self.processed, self.in_memory = _table(state["processed"]), _table(state["in_memory"])
        self.lost = _table(state["lost"])
        self._ordinal, self._history = int(state["ordinal"]), _history_of(state)
        self._persisted_version = _table(state["persisted_version"])
        self._persisted_processed = _table(state["persisted_processed"])

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
        return self._lose(np.where(is_older, _seen_by(table, remembered), self.processed))

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
        processed = _table(saved["processed"])
        held = processed - unseen_tokens(saved, step, versions)
        self.processed, self.in_memory, self.lost = processed, held, _table(saved["lost"])
        self._ordinal, self._history = int(saved["ordinal"]), _history_of(saved)
        self._persisted_version, self._persisted_processed = versions.copy(), held.copy()
        return self._lose(held)

    def _lose(self, seen: IntArray) -> IntArray:
        """Replace experts of the live state by copies that contain int64 [L, E] tokens; returns the tokens lost."""
        loss: IntArray = np.maximum(self.processed - seen, 0)
        self.processed = self.processed - loss
        self.in_memory = np.minimum(self.in_memory, self.processed)
        self.lost = self.lost + loss.sum(axis=1)
        return loss


def unseen_tokens(saved: Mapping[str, Any], step: int, versions: IntArray) -> IntArray:
    """int64 [L, E]: the tokens that experts of some versions have not seen, as the ledger of a checkpoint remembers.

    Args:
        saved: from `CheckpointLedger.state_dict`.
        step: of the checkpoint.
        versions: int64 [L, E].
    """
    processed = _table(saved["processed"])
    persisted = _table(saved["persisted_version"]), _table(saved["persisted_processed"])
    unseen: IntArray = processed - _seen_by(versions, [persisted, *_history_of(saved).items(), (step, processed)])
    return unseen


def _table(saved: torch.Tensor) -> IntArray:
    """A copy of a saved table."""
    return saved.numpy().astype(np.int64)


def _history_of(saved: Mapping[str, Any]) -> dict[int, IntArray]:
    return {int(step): _table(counts) for step, counts in zip(saved["history_steps"], saved["history"], strict=True)}


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
