"""Every expert on every rank's host once training has ended, where memory allows: a script goes on with the module when
the other ranks are gone, as Lightning advises with `Trainer(devices=1).test(module)` on rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.moe.layer import EndedWorld
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, all_reduce_
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.stage_state import StageState

_MOST_BYTES = 1 << 30
_MOST_SHARE = 1 / 8
"""Of the memory that is free, over all ranks of a machine."""


class KeptExperts:
    """The stacks of all experts of a model, from the end of training on.

    Args:
        experts: under their placements.
        stages: of a pipeline, whose layers are then all kept; None: there is one.
    """

    def __init__(self, experts: PlacedExperts, stages: StageState | None = None) -> None:
        self._experts, self._stages = experts, stages
        self._layers = experts.layers if stages is None else stages.layers
        self._world = experts.world if stages is None else stages.whole
        self._stacks: list[dict[str, Tensor]] | None = None

    def keep(self, most_bytes: int) -> None:
        """Collective; keeps nothing where the experts take more than the least of the ranks allows. In a pipeline dense
        parameters are kept likewise.
        """
        if self._stages is not None:
            self._stages.gather(most_bytes)
        stacks, world = self._experts.stacks, self._world
        if self._stages is not None:
            stacks = self._stages.stacks(self._experts)
        entries = [(stack.num_experts, p) for stack in stacks for p in stack.parameters.values()]
        needed = sum(count * p.shape[1:].numel() * p.element_size() for count, p in entries)
        if needed > min(all_gather_json(most_bytes, world)):
            return
        self._stacks = [
            {name: _whole(parameter, stack, world) for name, parameter in stack.parameters.items()} for stack in stacks
        ]

    def hand_out(self) -> None:
        """The Trainer has ended: let the layers do without the other ranks, where they can."""
        if self._world.size == 1:
            return
        layers = self._layers
        stacks: Sequence[dict[str, Tensor] | None] = self._stacks or [None] * len(layers)
        for layer, whole in zip(layers, stacks, strict=True):
            layer.ended = EndedWorld(layer.experts, self._world.size, whole)

    def take_back(self, *, weights_change: bool) -> None:
        """A Trainer runs in this world again; what it changes is forgotten."""
        for layer in self._layers:
            layer.ended = None
        if weights_change:
            self._stacks = None


@torch.no_grad()
def _whole(parameter: nn.Parameter, stack: ExpertStack, world: World) -> Tensor:
    """[E, ...] on the host: each expert's row from the one rank that speaks for it, and zeros from the others."""
    whole = torch.zeros(stack.num_experts, *parameter.shape[1:], dtype=parameter.dtype, device=world.device)
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
