"""Exchanges among the ranks that share samples: pieces of one dimension of tensors for pieces of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_lightning.comm.collect import all_gather_json
from moe_lightning.comm.exchange import linear
from moe_lightning.comm.world import World


@dataclass(frozen=True, kw_only=True)
class Sharers:
    """The ranks of a world among which the sequences of the same samples are cut.

    Attributes:
        rank: this process's place among them, and of its part in each sequence.
        size: how many they are.
    """

    rank: int
    size: int
    world: World = field(repr=False)
    group: ProcessGroup = field(repr=False)

    @classmethod
    def of(cls, world: World) -> Sharers | None:
        """Of this rank; None where it has its samples alone."""
        group = world.axis_groups.get("cp")
        return None if group is None else cls(rank=group.rank(), size=group.size(), world=world, group=group)

    def swap(self, tensors: Sequence[Tensor], give: int, take: int) -> list[Tensor]:
        """Cut dimension `give` of every tensor over the N ranks and join their pieces along dimension `take`, in one
        exchange; the gradient travels back the same way.

        Args:
            tensors: of one dtype; the size of `give` is a multiple of N.

        Returns:
            Tensors whose dimension `give` is N times smaller and `take` N times larger.
        """
        pieces = [torch.stack(tensor.chunk(self.size, dim=give)) for tensor in tensors]
        flat = torch.cat([piece.flatten(1) for piece in pieces], dim=1)
        received = torch.split(_exchange(flat, self.group), [piece[0].numel() for piece in pieces], dim=1)
        return [
            torch.cat(part.view(piece.shape).unbind(), dim=take) for part, piece in zip(received, pieces, strict=True)
        ]

    def gather(self, tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Every tensor with the pieces of all ranks along one dimension; gradients are summed in the order of ranks."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        copies = flat.expand(self.size, -1)
        received = torch.split(_exchange(copies, self.group), [tensor.numel() for tensor in tensors], dim=1)
        return [
            torch.cat(part.view(self.size, *tensor.shape).unbind(), dim=dim)
            for part, tensor in zip(received, tensors, strict=True)
        ]

    def differ(self, value: object) -> bool:
        """Whether they have unlike values of JSON; the same answer on all of them."""
        alone = replace(self.world, rank=self.rank, size=self.size, background=self.group)
        values = all_gather_json(value, alone)
        return any(other != values[0] for other in values)


def _exchange(pieces: Tensor, group: ProcessGroup) -> Tensor:
    """Row r of [N, ...] to rank r, row r of the result from it."""
    swap = partial(_all_to_all, group=group)
    return linear(pieces, swap, swap)


def _all_to_all(pieces: Tensor, group: ProcessGroup) -> Tensor:
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received
