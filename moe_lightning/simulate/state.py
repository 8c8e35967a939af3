"""What a run has saved and where: recovery points in memory and on storage, and the tokens that a rollback loses."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np

from moe_lightning.algorithms.dynamic_k import DynamicK
from moe_lightning.algorithms.ledger import Ledger, Source, worst_case_plt
from moe_lightning.algorithms.migration import BoolArray
from moe_lightning.algorithms.placement import IntArray
from moe_lightning.algorithms.selection import full_selection, sequential_selection
from moe_lightning.simulate.accounts import Mark
from moe_lightning.simulate.policy import Policy
from moe_lightning.simulate.workload import Workload


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A checkpoint that is being written."""

    mark: Mark
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
        self.k_snapshot = min(experts, policy.k_snapshot or experts)
        self.k_persist = min(self.k_snapshot, policy.k_persist or experts)
        self.partial = self.k_persist < experts
        self.written_bytes = 0.0
        self.saves = 0
        self.memory = Mark()
        self.storage = Mark()
        self._pending: deque[_Pending] = deque()
        self._ordinal = 0
        self._masks: dict[tuple[int, int], BoolArray] = {}
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
        return worst_case_plt(num_experts=self.shape[1], k=k, interval=interval, total_steps=total_steps)

    @property
    def plt(self) -> float:
        return self._ledger.plt

    def record(self, counts_LE: IntArray) -> None:
        """Tokens that each expert has been trained on since the last call."""
        if self.partial:
            self._ledger.record(counts_LE)

    def begin(self, mark: Mark, done_ns: int, nbytes: float) -> None:
        """A snapshot of the present state was taken, which will be on storage at `done_ns`."""
        if any(pending.mark.step == mark.step for pending in self._pending):
            return  # this very state is on its way
        self.saves += 1
        self.memory = mark
        if self.partial:
            snapshot, persist = self._mask(self.k_snapshot), self._mask(self.k_persist)
            self._ledger.begin_checkpoint(mark.step, snapshot=snapshot | persist, persist=persist)
            self._ordinal += 1
        self._pending.append(_Pending(mark=mark, done_ns=done_ns, nbytes=nbytes))

    def settle(self, now_ns: int) -> None:
        """Commit what has been written by now; what is older than the newest of it is void."""
        for done in [pending for pending in self._pending if pending.done_ns <= now_ns]:
            while self._pending.popleft() is not done:
                pass
            self.storage = done.mark
            self.written_bytes += done.nbytes
            if self.partial:
                self._ledger.complete_checkpoint(done.mark.step)

    def return_to_storage(self, in_memory_LE: BoolArray) -> Mark:
        """Go back to the newest written checkpoint; what survivors hold in memory comes from there (MoC 5.1)."""
        self._pending.clear()
        self._recover(np.where(in_memory_LE, int(Source.MEMORY), int(Source.STORAGE)))
        self.memory = self.storage
        return self.storage

    def return_to_memory(self) -> Mark:
        """Go back to the newest snapshot, which protection has saved whole."""
        if self.partial and any(pending.mark == self.memory for pending in self._pending):
            # It counts as a recovery point although nothing of it has reached storage.
            self._ledger.complete_checkpoint(self.memory.step, persisted=np.zeros(self.shape, dtype=np.bool_))
        self._pending.clear()
        self._recover(np.full(self.shape, int(Source.MEMORY)))
        return self.memory

    def _recover(self, sources: IntArray) -> None:
        if not self.partial:
            return
        before = self.plt
        self._ledger.recover(sources)
        if self._dynamic is not None:
            self._dynamic.after_fault(self.plt - before)
            self._raise_k()

    def _raise_k(self) -> None:
        assert self._dynamic is not None
        self.k_persist = self._dynamic.k
        self.k_snapshot = max(self.k_snapshot, self.k_persist)

    def _mask(self, k: int) -> BoolArray:
        """The sequential selection of this checkpoint; the first one is full."""
        layers, experts = self.shape
        if self._ordinal == 0 or k >= experts:
            return full_selection(layers, experts).mask()
        ordinal = (self._ordinal - 1) % experts  # windows repeat after at most E checkpoints
        if (ordinal, k) not in self._masks:
            chosen = sequential_selection(ordinal=ordinal, k=k, num_layers=layers, num_experts=experts)
            self._masks[ordinal, k] = chosen.mask()
        return self._masks[ordinal, k]
