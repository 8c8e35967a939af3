"""The padded all-to-all of DeepSpeed-MoE without drops, to compare with.

Every rank sends to every other one as many rows for each of its experts as the fullest (expert, rank) buffer holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from moe_lightning.dispatch.dispatcher import DISPATCH_BACKENDS
from moe_lightning.dispatch.transports import AllToAllSpec, DispatchPlan, ExchangeBackend
from moe_lightning.parallel.exchange import exchange_rows

PADDED = "padded"
"""Name in `DISPATCH_BACKENDS` once this module is imported."""


@DISPATCH_BACKENDS.register(PADDED)
class PaddedBackend(ExchangeBackend):
    """An `ExchangeBackend` whose exchanges are padded; the results are the same."""

    takes_device_plans = False

    @override
    def exchange(self, rows_MD: Tensor, spec: AllToAllSpec) -> Tensor:
        """Rows go out at the heads of full buffers, one for each rank, and are picked out of those that arrive."""
        plan, send, recv = spec.plan, spec.send_splits, spec.recv_splits
        assert isinstance(plan, DispatchPlan)
        there = (plan.tokens_EN.max() * plan.num_experts_N).tolist()
        here = [there[self.world.rank]] * self.world.size
        outgoing, incoming = (here, there) if spec.is_return else (there, here)
        padded_MD = rows_MD.new_zeros(sum(outgoing), rows_MD.shape[1])
        padded_MD = padded_MD.index_copy(0, _heads(send, outgoing).to(rows_MD.device), rows_MD)
        arrived_MD = exchange_rows(padded_MD, outgoing, incoming, self.world, spec.overlap_fn)
        self.rows_to_ranks = outgoing
        return arrived_MD[_heads(recv, incoming).to(rows_MD.device)]


def _heads(rows: Sequence[int], buffers: Sequence[int]) -> Tensor:
    """Where the rows lie: the first ones of each buffer."""
    starts = torch.tensor([0, *buffers]).cumsum(0)[:-1]
    pieces = [torch.arange(count) + start for count, start in zip(rows, starts.tolist(), strict=True)]
    return torch.cat(pieces)
