"""The exchanges of tensor parallelism, each with its transpose as gradient.

Every rank computes a loss of its own, and gradients are those of the sum of all ranks' losses: so the gradient of an
all-gather is a reduce-scatter, that of a reduce-scatter an all-gather, and that of a sum over ranks a sum over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_lightning.comm.exchange import all_gather_flat, linear
from moe_lightning.errors import ConfigurationError

# Before torch 2.13 it had another name, which warns there.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that compute parts of the same layers.

    Attributes:
        group: theirs.
        rank: this process among them.
        size: their number.
    """

    group: ProcessGroup = field(repr=False)
    rank: int
    size: int

    def __deepcopy__(self, memo: dict[int, object]) -> TensorRanks:
        """A copy of a model talks to the same ranks; a group cannot be copied."""
        return self

    def __reduce__(self) -> str:
        raise ConfigurationError(
            "layers that are cut over ranks cannot be pickled: save a checkpoint with the Trainer that cut them "
            "(trainer.save_checkpoint)"
        )

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, one after the other along a dimension."""
        return linear(x, partial(_gathered, dim=dim, ranks=self), partial(_sum_of_parts, dim=dim, ranks=self))

    def sum_parts(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along a dimension of the sum over ranks.

        Raises:
            ConfigurationError: the parts would not be equal.
        """
        self._check(x, dim)
        return linear(x, partial(_sum_of_parts, dim=dim, ranks=self), partial(_gathered, dim=dim, ranks=self))

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        return linear(x, partial(_summed, ranks=self), partial(_summed, ranks=self))

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of what all ranks have.

        Raises:
            ConfigurationError: the parts would not be equal.
        """
        self._check(x, dim)
        return x.chunk(self.size, dim)[self.rank]

    def cross_entropy(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """float32 [T], of logits of which each rank has those of some classes; the same on all ranks.

        Args:
            logits_TV: float32 [T, V / ranks].
            targets_T: int64, of all classes; those of no class count for nothing, and have any loss.
        """
        return _CrossEntropy.apply(logits_TV, targets_T, self)  # type: ignore[no-any-return, no-untyped-call]

    def _check(self, x: Tensor, dim: int) -> None:
        if x.shape[dim] % self.size:
            raise ConfigurationError(
                f"{x.shape[dim]} positions of a sequence are no multiple of mesh.tp={self.size}: pad the sequences, "
                "change their length (with mesh.cp, that of each part), or lower mesh.tp"
            )


def _gathered(x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    whole = first.new_empty(ranks.size * first.shape[0], *first.shape[1:])
    all_gather_flat(whole, first, ranks.group)
    return whole.movedim(0, dim).contiguous()


def _sum_of_parts(x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    part = first.new_empty(first.shape[0] // ranks.size, *first.shape[1:])
    _reduce_scatter(part, first, group=ranks.group)
    return part.movedim(0, dim).contiguous()


def _summed(x: Tensor, ranks: TensorRanks, op: Any = dist.ReduceOp.SUM) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, op=op, group=ranks.group)
    return total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, ranks: TensorRanks) -> Tensor:
        width = logits_TV.shape[1]
        own_T = targets_T - ranks.rank * width
        is_here_T = (own_T >= 0) & (own_T < width)
        own_T = own_T.clamp(0, width - 1)
        largest_T = _summed(logits_TV.amax(dim=1), ranks, dist.ReduceOp.MAX)
        shares_TV = (logits_TV - largest_T[:, None]).exp()
        chosen_T = logits_TV.gather(1, own_T[:, None])[:, 0].masked_fill(~is_here_T, 0.0)
        total_T, chosen_T = _summed(torch.stack([shares_TV.sum(dim=1), chosen_T]), ranks)
        ctx.ranks = ranks
        ctx.save_for_backward(shares_TV.div_(total_T[:, None]), own_T, is_here_T)
        losses_T: Tensor = total_T.log() + largest_T - chosen_T
        return losses_T

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> Any:
        shares_TV, own_T, is_here_T = ctx.saved_tensors
        total_T = _summed(gradient_T, ctx.ranks)
        gradient_TV = shares_TV * total_T[:, None]
        gradient_TV.scatter_add_(1, own_T[:, None], (-total_T).masked_fill(~is_here_T, 0.0)[:, None])
        return gradient_TV, None, None
