"""Every expert on every rank's host once training has ended, where memory allows: a script goes on with the module when
the other ranks are gone, as Lightning advises with `Trainer(devices=1).test(module)` on rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_lightning.comm.collect import all_gather_json
from moe_lightning.comm.world import World, all_reduce_
from moe_lightning.modules.ended_world import EndedWorld
from moe_lightning.state.expert_stacks import ExpertStack
from moe_lightning.strategies.placed_experts import PlacedExperts

_MOST_BYTES = 1 << 30
_MOST_SHARE = 1 / 8
"""Of the memory that is free, over all ranks of a machine."""


class KeptExperts:
    """The stacks of all experts of a model, from the end of training on.

    Args:
        experts: under their placements.
    """

    def __init__(self, experts: PlacedExperts) -> None:
        self._experts = experts
        self._stacks: list[dict[str, Tensor]] | None = None

    def keep(self, most_bytes: int) -> None:
        """Collective; keeps nothing where the experts take more than the least of the ranks allows."""
        stacks, world = self._experts.stacks, self._experts.world
        needed = sum(stack.num_experts * p[:1].nbytes for stack in stacks for p in stack.parameters.values())
        if needed > min(all_gather_json(most_bytes, world)):
            return
        self._stacks = [
            {name: _whole(parameter, stack, world) for name, parameter in stack.parameters.items()} for stack in stacks
        ]

    def hand_out(self) -> None:
        """The Trainer has ended: let the layers do without the other ranks, where they can."""
        if self._experts.world.size == 1:
            return
        layers = self._experts.layers
        stacks: Sequence[dict[str, Tensor] | None] = self._stacks or [None] * len(layers)
        for layer, whole in zip(layers, stacks, strict=True):
            layer.ended = EndedWorld(layer.experts, self._experts.world.size, whole)

    def take_back(self, *, weights_change: bool) -> None:
        """A Trainer runs in this world again; what it changes is forgotten."""
        for layer in self._experts.layers:
            layer.ended = None
        if weights_change:
            self._stacks = None


@torch.no_grad()
def _whole(parameter: nn.Parameter, stack: ExpertStack, world: World) -> Tensor:
    """[E, ...] on the host: each expert's row from the one rank that speaks for it, and zeros from the others."""
    whole = parameter.new_zeros(stack.num_experts, *parameter.shape[1:])
    for slot, expert in stack.owned():
        whole[expert] = parameter[slot]
    all_reduce_(whole, world)
    return whole.cpu()


def room_for_experts(num_processes: int) -> int:
    """Bytes that a rank may keep beside its own experts, on a machine with so many ranks."""
    try:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):  # not known here
        return 0
    return min(_MOST_BYTES, int(free * _MOST_SHARE) // max(1, num_processes))
