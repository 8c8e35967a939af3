"""Copies of all experts on every rank at the end of training."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.state.tensors import rows_of
from moe_lightning.state.transfer import gather
from moe_lightning.strategies.placed_experts import PlacedExperts, StageMap

_MOST_BYTES = 1 << 30
_MOST_SHARE = 1 / 8
"""Share of the free memory, over all ranks of a machine."""


class GatheredExperts:
    """Stacks of all experts of a model, gathered at the end of training.

    Args:
        experts: under their placements.
        stages: of the model, whose layers are all gathered.
    """

    def __init__(self, experts: PlacedExperts, stages: StageMap) -> None:
        self._experts, self._stages = experts, stages
        self._layers, self._world = stages.layers, stages.world
        self._stacks: list[dict[str, Tensor]] | None = None

    def gather(self, most_bytes: int) -> None:
        """Gather all experts, unless they take more than the least limit of the ranks; collective. In a pipeline dense
        parameters are gathered too.
        """
        self._stages.gather(most_bytes)
        stacks, world = self._stages.stacks(self._experts), self._world
        entries = [(stack.num_experts, p) for stack in stacks for p in stack.parameters.values()]
        needed = sum(count * p.shape[1:].numel() * p.element_size() for count, p in entries)
        if needed > min(all_gather_json(most_bytes, world)):
            return
        pieces = [
            piece
            for layer, stack in enumerate(stacks)
            for name, parameter in stack.parameters.items()
            for piece in rows_of(f"{layer}/{name}", parameter.detach(), stack)
        ]
        found = gather(pieces, world, lambda _: range(world.size))
        self._stacks = [
            {name: found[f"{layer}/{name}"] for name in stack.parameters} for layer, stack in enumerate(stacks)
        ]

    def attach(self) -> None:
        """Let the layers compute without the other ranks, if they can, at the end of the Trainer."""
        if self._world.size == 1:
            return
        layers = self._layers
        stacks: Sequence[dict[str, Tensor] | None] = self._stacks or [None] * len(layers)
        for layer, whole in zip(layers, stacks, strict=True):
            layer.end_world(self._world.size, whole)


def gather_limit(num_processes: int) -> int:
    """Return the bytes that a rank may use for gathered experts, on a machine with so many ranks."""
    try:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):  # not known here
        return 0
    return min(_MOST_BYTES, int(free * _MOST_SHARE) // max(1, num_processes))
