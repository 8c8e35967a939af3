"""The padded all-to-all of DeepSpeed-MoE without drops, to compare with.

Every rank sends to every other one as many rows for each of its experts as the fullest (expert, rank) buffer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from moe_lightning.algorithms.placement import IntArray
from moe_lightning.comm.dispatcher import Dispatcher
from moe_lightning.comm.exchange import exchange_rows


class PaddedDispatcher(Dispatcher):
    """A Dispatcher whose exchanges are padded; the results are the same."""

    _buffer_rows = 0

    @classmethod
    def like(cls, other: Dispatcher) -> PaddedDispatcher:
        """The same placement and slots, padded."""
        return cls(other.placement, other.world, other.groups, slot_experts=other.slot_experts)

    @override
    def _send_and_receive(self, tokens_EN: IntArray, quota_EN: IntArray) -> tuple[IntArray, IntArray]:
        self._buffer_rows = int(tokens_EN.max())
        return super()._send_and_receive(tokens_EN, quota_EN)

    @override
    def _exchange(
        self,
        rows_MD: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
        *,
        is_return: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Rows go out at the heads of full buffers, one for each rank, and are picked out of those that arrive."""
        there = [self._buffer_rows * len(self.placement.experts_on(rank)) for rank in range(self.world.size)]
        here = [there[self.world.rank]] * self.world.size
        outgoing, incoming = (here, there) if is_return else (there, here)
        padded_MD = rows_MD.new_zeros(sum(outgoing), rows_MD.shape[1])
        padded_MD = padded_MD.index_copy(0, _heads(send, outgoing).to(rows_MD.device), rows_MD)
        arrived_MD = exchange_rows(padded_MD, outgoing, incoming, self.world, meanwhile)
        self.last_sent_rows = sum(outgoing) - outgoing[self.world.rank]
        self.last_sent_bytes = self.last_sent_rows * rows_MD.shape[1] * rows_MD.element_size()
        return arrived_MD[_heads(recv, incoming).to(rows_MD.device)]


def _heads(rows: Sequence[int], buffers: Sequence[int]) -> Tensor:
    """Where the rows lie: the first ones of each buffer."""
    starts = torch.tensor([0, *buffers]).cumsum(0)[:-1]
    pieces = [torch.arange(count) + start for count, start in zip(rows, starts.tolist(), strict=True)]
    return torch.cat(pieces)
