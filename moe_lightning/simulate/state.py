"""What a run has saved and where: recovery points in memory and on storage, and the tokens that a rollback loses."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import numpy as np

from moe_lightning.algorithms.dynamic_k_rule import DynamicK
from moe_lightning.algorithms.inventory import StorageInventory
from moe_lightning.algorithms.ledger import Ledger, Source, worst_case_plt
from moe_lightning.algorithms.migration import BoolArray
from moe_lightning.algorithms.placement import IntArray
from moe_lightning.algorithms.recovery_planner import Origin, RecoveryPlan
from moe_lightning.algorithms.selection import Selection, full_selection, persist_selection, sequential_selection
from moe_lightning.simulate.accounts import Mark
from moe_lightning.simulate.held_snapshots import SESSION, HeldSnapshot
from moe_lightning.simulate.policy import Policy
from moe_lightning.simulate.workload import Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pending:
    """A checkpoint that is being written."""

    snapshot: HeldSnapshot
    persist_LE: BoolArray
    done_ns: int
    nbytes: float


class SavedState:
    """The checkpoints of a simulated run, and its token ledger where only some experts are saved.

    Selection, ledger and Dynamic-K are those of training; counts are the routing's, layer by layer.

    Args:
        workload, policy: of the run.
        num_layers: layers that are told apart, each standing for several of the model.
        planned_assignments: of one layer in the whole training, the denominator of PLT.
        interval_steps: between checkpoints.
        planned_steps: of the whole training.
    """

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        *,
        num_layers: int,
        planned_assignments: int,
        interval_steps: int,
        planned_steps: int,
    ) -> None:
        experts = workload.num_experts
        self.shape = (num_layers, experts)
        some = None if policy.lossless else policy.k_snapshot  # a window is one checkpoint of everything
        self.k_snapshot = min(experts, some or experts)
        self.k_persist = min(self.k_snapshot, policy.k_persist or experts)
        self.partial = self.k_persist < experts
        self.written_bytes = 0.0
        self.saves = 0
        self.newest: HeldSnapshot | None = None
        self.written: HeldSnapshot | None = None
        self.storage = Mark()
        self._memory_versions: IntArray = np.zeros(self.shape, dtype=np.int64)
        self._storage_versions: IntArray = np.zeros(self.shape, dtype=np.int64)
        self._pending: deque[_Pending] = deque()
        self._ordinal = 0
        self._everything = full_selection(num_layers, experts).mask()
        self._windows: dict[tuple[int, int], Selection] = {}
        self._ledger = Ledger(num_layers=num_layers, num_experts=experts, planned_assignments=planned_assignments)
        self._dynamic: DynamicK | None = None
        if policy.plt_threshold is not None and self.partial:
            ahead = interval_steps if policy.plt_lookahead else 0
            predicted = partial(self._predicted_plt, interval=ahead, total_steps=planned_steps)
            self._dynamic = DynamicK(
                k0=self.k_persist, num_experts=experts, predicted_plt=predicted, threshold=policy.plt_threshold
            )
            self._raise_k()

    def _predicted_plt(self, k: int, *, interval: int, total_steps: int) -> float:
        copied = max(k, self.k_snapshot)
        return worst_case_plt(
            num_experts=self.shape[1], k=k, k_snapshot=copied, interval=interval, total_steps=total_steps
        )

    @property
    def plt(self) -> float:
        return self._ledger.plt

    def record(self, counts_LE: IntArray) -> None:
        """Tokens that each expert has been trained on since the last call."""
        if self.partial:
            self._ledger.record(counts_LE)

    def begin(self, mark: Mark, nodes: tuple[int, ...], writer_LE: IntArray, *, done_ns: int, nbytes: float) -> None:
        """The nodes of a world took a snapshot of the present state, which will be on storage at `done_ns`."""
        if any(entry.snapshot.mark.step == mark.step for entry in self._pending):
            return  # this very state is on its way
        self.saves += 1
        snapshot, persist = self._select()
        if self.partial:
            self._ledger.begin_checkpoint(mark.step, snapshot=snapshot, persist=persist)
            self._ordinal += 1
        self._memory_versions = np.where(snapshot, mark.step, self._memory_versions)
        taken = HeldSnapshot(mark=mark, nodes=nodes, versions_LE=self._memory_versions, writer_LE=writer_LE)
        self.newest = taken
        self._pending.append(_Pending(snapshot=taken, persist_LE=persist, done_ns=done_ns, nbytes=nbytes))

    def settle(self, now_ns: int) -> None:
        """Commit what has been written by now; what is older than the newest of it is void."""
        for done in [entry for entry in self._pending if entry.done_ns <= now_ns]:
            while self._pending.popleft() is not done:
                pass
            self.storage, self.written = done.snapshot.mark, done.snapshot
            self._storage_versions = np.where(done.persist_LE, self.storage.step, self._storage_versions)
            self.written_bytes += done.nbytes
            if self.partial:
                self._ledger.complete_checkpoint(self.storage.step)

    def note_snapshot(self, mark: Mark, nodes: tuple[int, ...], writer_LE: IntArray) -> None:
        """A snapshot of everything for protection, which storage will not get."""
        everything = np.full(self.shape, mark.step)
        self.newest = HeldSnapshot(mark=mark, nodes=nodes, versions_LE=everything, writer_LE=writer_LE)

    def lose(self, nodes: Collection[int]) -> None:
        """These nodes have failed, and their memory with them."""
        pending = [entry.snapshot for entry in self._pending]
        for snapshot in (self.newest, self.written, *pending):
            if snapshot is not None:
                snapshot.lost.update(nodes)

    def on_storage(self) -> StorageInventory:
        """The newest written checkpoint; at the start the initial state, which anybody can make."""
        versions = tuple(tuple(int(version) for version in row) for row in self._storage_versions)
        return StorageInventory(session=SESSION, step=self.storage.step, versions=versions)

    def restore(self, plan: RecoveryPlan, now: Mark) -> Mark:
        """Book what a recovery loses; the mark at which training goes on."""
        stale = plan.versions < plan.version
        if plan.level == "live" and not stale.any():
            return now
        nothing = np.zeros(self.shape, dtype=np.bool_)
        if self.partial:
            if plan.level == "live":
                self._ledger.begin_checkpoint(now.step, snapshot=nothing, persist=nothing)
                self._ledger.complete_checkpoint(now.step, persisted=nothing)
            elif any(entry.snapshot.mark.step == plan.version for entry in self._pending):
                # It counts as a recovery point although nothing of it has reached storage.
                self._ledger.complete_checkpoint(plan.version, persisted=nothing)
            old = np.where(plan.origins == Origin.STORAGE, int(Source.STORAGE), int(Source.MEMORY))
            before = self.plt
            self._ledger.recover(np.where(stale, old, int(Source.LIVE)))
            if self._dynamic is not None:
                self._dynamic.after_fault(self.plt - before)
                self._raise_k()
        marks = [self.storage, *(snapshot.mark for snapshot in (self.newest, self.written) if snapshot is not None)]
        mark = now if plan.level == "live" else next(mark for mark in marks if mark.step == plan.version)
        self._pending.clear()
        self._memory_versions = np.minimum(self._memory_versions, plan.versions)
        if self.newest is not None and self.newest.mark.step > mark.step:
            self.newest = self.written  # a later one is void
        return mark

    def forget_memory(self) -> None:
        """Nothing in host memory can be used any more."""
        self.newest = self.written = None

    def _raise_k(self) -> None:
        assert self._dynamic is not None
        self.k_persist = self._dynamic.k
        self.k_snapshot = max(self.k_snapshot, self.k_persist)

    def _select(self) -> tuple[BoolArray, BoolArray]:
        """bool [L, E] each: the experts that this checkpoint copies, and those of them that it writes; the first one
        takes all."""
        experts = self.shape[1]
        if self._ordinal == 0 or self.k_persist >= experts:
            return self._everything, self._everything
        chosen = self._window((self._ordinal - 1) % experts)  # windows repeat after at most E checkpoints
        written = chosen
        if self.k_persist < self.k_snapshot:
            written = persist_selection(chosen, k=self.k_persist, persisted_version=self._storage_versions)
        return chosen.mask(), written.mask()

    def _window(self, ordinal: int) -> Selection:
        key = ordinal, self.k_snapshot
        if key not in self._windows:
            layers, experts = self.shape
            self._windows[key] = (
                full_selection(layers, experts)
                if self.k_snapshot >= experts
                else sequential_selection(ordinal=ordinal, k=self.k_snapshot, num_layers=layers, num_experts=experts)
            )
        return self._windows[key]
