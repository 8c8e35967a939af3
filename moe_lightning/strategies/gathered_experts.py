"""Copies of all experts on every rank at the end of training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch import Tensor

from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.state.tensors import rows_of
from moe_lightning.state.transfer import gather
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.stages import StageMap

_MOST_BYTES = 1 << 30
_MOST_SHARE = 1 / 8
"""Share of the free memory, over all ranks of a machine."""


Stacks = Sequence[Mapping[str, Tensor]]
"""All experts of each MoE layer, by the name of the stacked parameter."""


def gather_experts(experts: PlacedExperts, most_bytes: int) -> Stacks | None:
    """Return all experts; None if they take more than the least limit of the ranks. Collective."""
    stacks, world = experts.stacks, experts.world
    entries = [(stack.num_experts, p) for stack in stacks for p in stack.parameters.values()]
    needed = sum(count * p.shape[1:].numel() * p.element_size() for count, p in entries)
    if needed > min(all_gather_json(most_bytes, world)):
        return None
    pieces = [
        piece
        for layer, stack in enumerate(stacks)
        for name, parameter in stack.parameters.items()
        for piece in rows_of(f"{layer}/{name}", parameter.detach(), stack)
    ]
    found = gather(pieces, world, lambda _: range(world.size))
    return [{name: found[f"{layer}/{name}"] for name in stack.parameters} for layer, stack in enumerate(stacks)]


def attach_experts(stages: StageMap, stacks: Stacks | None) -> None:
    """Let the layers compute without the other ranks, if all experts are here, at the end of the Trainer."""
    size = stages.world.size
    for number, layer in enumerate(stages.layers if size > 1 else ()):
        layer.end_world(size, None if stacks is None else stacks[number])


def gather_limit(num_processes: int) -> int:
    """Return the bytes that a rank may use for gathered experts, on a machine with so many ranks."""
    try:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):  # not known here
        return 0
    return min(_MOST_BYTES, int(free * _MOST_SHARE) // max(1, num_processes))
