"""Comparison of what several ranks hold alike: dense parameters, moments, buffers and replicas of experts.

Every tensor is summed by its bits, as integers, and all sums of a rank become one number: of a tensor with h holders
the first one adds (h - 1) times the sum and every other one subtracts it, each times an odd number of the tensor's
name. Over all ranks that is zero modulo 2^64 if all replicas are alike, and not if one bit differs. One number is sent
a comparison; names and sums follow if it is not zero. Differences that cancel in the sum of a tensor stay unseen.

What one rank alone holds (rows of sharded parameters, moments of ZeRO-1, experts with one replica) is not compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from moe_lightning.parallel.collectives import all_gather_json, fingerprint
from moe_lightning.parallel.context import World, all_reduce_
from moe_lightning.state.pieces import parse_dense_key
from moe_lightning.state.table import State
from moe_lightning.state.transfer import install, transfer

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Tensors of this rank that other ranks hold alike.

    Attributes:
        name: of a dense tensor, or "expert {e} of MoE layer {l}"; the same on all holders, and of nothing else.
        holders: the ranks that hold it.
        sum: int64 scalar, of its bits.
        tensors: its live tensors, in an order that all holders share.
    """

    name: str
    holders: tuple[int, ...]
    sum: Tensor
    tensors: Callable[[], Sequence[Tensor]]

    @cached_property
    def factor(self) -> int:
        """Factor of the sum on any rank but the first holder, modulo 2^64."""
        return -(fingerprint(self.name) | 1)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Replicas that are not alike.

    Attributes:
        name: see `Replica`.
        groups: the ranks that hold it, those with equal bits together.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def healthy(self) -> tuple[int, ...]:
        """The ranks whose replicas are taken for intact: more than any other number of equal ones; none where no two
        are equal, or as many are equal otherwise.
        """
        *others, most = sorted(self.groups, key=len)
        return most if len(most) > max(len(group) for group in others) else ()

    @property
    def damaged(self) -> tuple[int, ...]:
        """The other ranks."""
        return tuple(sorted(rank for group in self.groups if group != self.healthy for rank in group))


@torch.no_grad()
def replicas_of(state: State, buffers: Collection[str]) -> list[Replica]:
    """Return what this rank holds and others hold alike.

    Args:
        buffers: names of those that are the same on all their holders.
    """
    found = []
    for layer, stack in enumerate(state.stacks):
        tensors = stack.tensors([optimizer for optimizer, _ in state.optimizers])
        sums_S = sum((2 * n + 1) * _sum_of_rows(tensor) for n, tensor in enumerate(tensors))
        for slot, expert in stack.held():
            if len(holders := stack.placement.holders(expert)) > 1:
                found.append(
                    Replica(
                        name=f"expert {expert} of MoE layer {layer}",
                        holders=holders,
                        sum=sums_S[slot],  # type: ignore[index]
                        tensors=lambda tensors=tensors, slot=slot: [tensor[slot] for tensor in tensors],  # type: ignore[misc]
                    )
                )
    for piece in state.dense_pieces(transient=True):
        name, scope = parse_dense_key(piece.key)
        if len(piece.holders) > 1 and (scope != "buffer" or name in buffers):
            scope = "" if scope in ("weight", "buffer") else f" ({scope})"
            place = "" if piece.block.sizes == piece.block.whole else f" at {list(piece.block.offsets)}"
            found.append(
                Replica(
                    name=f"{name}{scope}{place}",
                    holders=piece.holders,
                    sum=_sum_of_rows(piece.tensor.unsqueeze(0))[0],
                    tensors=lambda tensor=piece.tensor: [tensor],  # type: ignore[misc]
                )
            )
    return found


@torch.no_grad()
def differing(replicas: Sequence[Replica], world: World) -> list[Difference]:
    """Return the replicas that differ in a bit, by name, the same on every rank; collective."""
    total = torch.zeros(1, dtype=torch.int64, device=world.device)
    if replicas:
        factors = [r.factor * (1 - len(r.holders) if r.holders[0] == world.rank else 1) for r in replicas]
        sums = torch.stack([replica.sum.to(world.device) for replica in replicas])
        total += (sums * torch.tensor([_signed(factor) for factor in factors], device=world.device)).sum()
    all_reduce_(total, world)
    return _named(replicas, world) if world.read(total).item() else []


def _named(replicas: Sequence[Replica], world: World) -> list[Difference]:
    ranks: dict[str, dict[int | None, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums in enumerate(all_gather_json({r.name: [int(r.sum), list(r.holders)] for r in replicas}, world)):
        for name, (value, _) in sums.items():
            ranks[name][value].append(rank)
    return [
        Difference(name=name, groups=tuple(tuple(group) for group in groups.values()))
        for name, groups in sorted(ranks.items())
        if len(groups) > 1
    ]


class _Repair(NamedTuple):
    """A replica that one rank sends another."""

    name: str
    source: int
    target: int


@torch.no_grad()
def overwrite(differences: Iterable[Difference], replicas: Sequence[Replica], world: World) -> None:
    """Overwrite replicas that differ with those of a rank of the majority, which each must have; collective."""
    held = {replica.name: replica for replica in replicas}
    repairs = [_Repair(d.name, d.healthy[0], target) for d in differences for target in d.damaged]
    arrived = {r.name: list(map(torch.empty_like, held[r.name].tensors())) for r in repairs if r.target == world.rank}
    transfer(repairs, lambda repair: held[repair.name].tensors(), lambda repair: arrived[repair.name], world)
    for name, values in arrived.items():
        install(zip(held[name].tensors(), values, strict=True))


def _sum_of_rows(tensor: Tensor) -> Tensor:
    """int64 [S], of the bits of each row."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.detach().contiguous().view(_BITS[real.element_size()])
    return bits.unsqueeze(-1).flatten(1).sum(dim=1, dtype=torch.int64)


def _signed(number: int) -> int:
    """The int64 of the same bits as an integer modulo 2^64."""
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number
