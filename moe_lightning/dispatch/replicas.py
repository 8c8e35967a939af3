"""Replicas of experts: their stacked parameters, and the sum of their gradients.

The flat gradient of an expert with m holders is split into m pieces. One exchange sends all copies of piece j to holder
j, which adds them in rank order, so that replicas stay bit-identical (law L3); a second one sends the sum to the other
holders. This is the bandwidth-optimal reduce-scatter and all-gather, for all experts of all layers in two collectives
and without a process group per expert.

Shapes: S slots of this rank, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning import kernels as ops
from moe_lightning.arrays import cut
from moe_lightning.dispatch.placement import Placement
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PendingExchange


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertStack:
    """The experts of one MoE layer as a rank holds them: row s of every tensor belongs to the expert in slot s.

    Attributes:
        parameters: [S, ...] by name, in an order that all ranks share.
        slot_experts: expert of each slot, -1 where it is vacant.
        placement: of the layer, over all ranks.
        rank: this one.
        base: the parameters that are frozen beside adapters: placements move them, checkpoints leave them out.
    """

    parameters: Mapping[str, nn.Parameter]
    slot_experts: tuple[int, ...]
    placement: Placement
    rank: int
    base: frozenset[str] = frozenset()

    @property
    def saved(self) -> dict[str, nn.Parameter]:
        """The parameters that checkpoints hold."""
        return {name: parameter for name, parameter in self.parameters.items() if name not in self.base}

    @property
    def num_experts(self) -> int:
        """E of the layer."""
        return self.placement.num_experts

    def held(self) -> list[tuple[int, int]]:
        """(slot, expert) pairs of the slots that are not vacant."""
        return [(slot, expert) for slot, expert in enumerate(self.slot_experts) if expert >= 0]

    def owned(self) -> list[tuple[int, int]]:
        """(slot, expert) pairs for which this rank speaks: it is the lowest holder."""
        owners = self.placement.owners()
        return [(slot, expert) for slot, expert in self.held() if owners[expert] == self.rank]

    def tensors(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """The parameters, each with the optimizer states that have a row for each of its slots."""
        return [
            tensor
            for parameter in self.parameters.values()
            for tensor in (parameter.detach(), *(t for *_, t in stacked_states(parameter, optimizers)))
        ]

    def is_full(self, tensor: Tensor) -> bool:
        """Return True if `tensor` has a row for every expert; rows of factored optimizer states have shapes of their
        own.
        """
        return tensor.shape[:1] == (self.num_experts,)

    def select(self, tensor_EX: Tensor) -> Tensor:
        """The rows of this rank's slots from a full stack; zeros for vacant ones."""
        rows = tensor_EX[list(self.slot_experts)]
        rows[[slot for slot, expert in enumerate(self.slot_experts) if expert < 0]] = 0
        return rows


def stacked_states(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> Iterator[tuple[Optimizer, str, Tensor]]:
    """(optimizer, name, state) of the optimizer states with a row for each slot, in an order that all ranks share."""
    for optimizer in optimizers:
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor) and value.shape[:1] == parameter.shape[:1]:
                yield optimizer, name, value


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """This rank's view of one replicated row of one parameter."""

    parameter: nn.Parameter
    slot: int
    holders: tuple[int, ...]
    bounds: tuple[int, ...]

    def part(self, holder: int) -> Tensor:
        """The piece of the gradient that this holder sums."""
        assert self.parameter.grad is not None
        index = self.holders.index(holder)
        return self.parameter.grad[self.slot].view(-1)[self.bounds[index] : self.bounds[index + 1]]


class ReplicaSum:
    """Adds replica gradients in place; built once for a placement, used after every backward pass.

    Args:
        stacks: of all layers, in the same order on every rank.
        world: the ranks that the placements speak of.
    """

    def __init__(self, stacks: Sequence[ExpertStack], world: World) -> None:
        self._world = world
        self._layers = [[*stack.parameters.values()] for stack in stacks]
        self._pieces = [piece for stack in stacks for piece in _replicated_rows(stack)]
        # On any rank, so that all ranks call the exchanges or none does.
        self._has_replicas = any(stack.placement.is_replicated for stack in stacks)

    def __call__(self) -> None:
        """Sum now; a parameter that got no gradient on this rank counts as zero, a frozen one is left alone.

        A layer without any gradient is left alone, too, as on one rank: ranks have or lack those of a layer together,
        since a backward pass through it exchanges rows between all of them.
        """
        if self._world.size == 1:
            return
        used = (layer for layer in self._layers if any(p.grad is not None for p in layer))
        trained = {parameter: None for layer in used for parameter in layer if _is_trained(parameter)}
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
        if not self._has_replicas:
            return
        pieces = [piece for piece in self._pieces if piece.parameter in trained]
        for dtype in sorted({p.dtype for p in trained}, key=str):
            self._sum([piece for piece in pieces if piece.parameter.dtype == dtype], dtype)

    def _sum(self, pieces: Sequence[_Piece], dtype: torch.dtype) -> None:
        """Reduce-scatter and then all-gather of the pieces of one dtype; what stays on this rank is not copied.

        Every rank takes part in the exchanges, also one without replicated rows: the collectives span the world.
        """
        me = self._world.rank
        arrived = self._exchange(pieces, dtype, _Piece.part, lambda piece, _: piece.part(me))
        for piece in pieces:
            own = piece.part(me)
            copies = [own if holder == me else next(arrived[holder]) for holder in piece.holders]
            ops.sum_in_rank_order(torch.stack(copies), out=own)
        sums = self._exchange(pieces, dtype, lambda piece, _: piece.part(me), _Piece.part)
        for piece in pieces:
            for holder in piece.holders:
                if holder != me:
                    piece.part(holder).copy_(next(sums[holder]))

    def _exchange(
        self,
        pieces: Sequence[_Piece],
        dtype: torch.dtype,
        sent: Callable[[_Piece, int], Tensor],
        wanted: Callable[[_Piece, int], Tensor],
    ) -> list[Iterator[Tensor]]:
        """Exchange a part of every piece with each other holder.

        Args:
            pieces: of one dtype.
            dtype: theirs.
            sent: (piece, holder) -> the part for this holder.
            wanted: (piece, holder) -> a part as large as what comes from there.

        Returns:
            For each rank the parts that it sent, in the order of the pieces.
        """
        ranks = range(self._world.size)
        shared = [[p for p in pieces if rank in p.holders and rank != self._world.rank] for rank in ranks]
        parts = [[sent(piece, rank) for piece in shared[rank]] for rank in ranks]
        sizes = [[wanted(piece, rank).numel() for piece in shared[rank]] for rank in ranks]
        nothing = torch.empty(0, dtype=dtype, device=self._world.device)
        sizes_out, sizes_in = [sum(part.numel() for part in of) for of in parts], [sum(of) for of in sizes]
        arrived = PendingExchange(torch.cat([nothing, *chain(*parts)]), sizes_out, sizes_in, self._world).wait()
        return [iter(torch.split(rows, of)) for rows, of in zip(torch.split(arrived, sizes_in), sizes, strict=True)]


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _replicated_rows(stack: ExpertStack) -> Iterator[_Piece]:
    for parameter in stack.parameters.values():
        for slot, expert in sorted(stack.held(), key=lambda pair: pair[1]):
            holders = stack.placement.holders(expert)
            if len(holders) > 1:
                bounds = cut(parameter[slot].numel(), len(holders))
                yield _Piece(parameter=parameter, slot=slot, holders=holders, bounds=bounds)
