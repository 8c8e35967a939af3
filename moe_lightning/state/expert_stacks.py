"""Who holds which expert: the stacked parameters of a MoE layer, the slots of this rank and the placement over all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.algorithms.placement import Placement


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

    def held(self) -> Iterator[tuple[int, int]]:
        """(slot, expert) pairs of the slots that are not vacant."""
        return ((slot, expert) for slot, expert in enumerate(self.slot_experts) if expert >= 0)

    def owned(self) -> Iterator[tuple[int, int]]:
        """(slot, expert) pairs for which this rank speaks: it is the lowest holder."""
        owners = self.placement.owners()
        return ((slot, expert) for slot, expert in self.held() if owners[expert] == self.rank)

    def tensors(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """The parameters, each with the optimizer states that have a row for each of its slots."""
        return [
            tensor
            for parameter in self.parameters.values()
            for tensor in (parameter.data, *(t for *_, t in stacked_states(parameter, optimizers)))
        ]

    def is_full(self, tensor: Tensor) -> bool:
        """Whether `tensor` has a row for every expert; rows of factored optimizer states have shapes of their own."""
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
