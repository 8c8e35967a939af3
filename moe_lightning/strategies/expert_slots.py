"""The slots in which a rank keeps the experts of a layer: who stands where, and room for more."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch.optim import Optimizer

from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.replicas import stacked_states
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.experts import VACANT
from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.context import World, broadcast_


def in_slots(placement: Placement, rank: int, slots: int | None) -> tuple[int, ...]:
    """The experts of a rank in its slots, ascending, and -1 in those that are left. No rank needs more slots than there
    are experts.
    """
    needed = max(len(placement.experts_on(n)) for n in range(placement.num_ranks))
    if slots is not None and slots < needed:
        raise ConfigurationError(
            f"slots={slots} cannot hold the {needed} experts that the placement puts on a rank: use at least {needed}"
        )
    held = placement.experts_on(rank)
    room = len(held) if slots is None else min(slots, placement.num_experts)
    return held + (-1,) * (room - len(held))


def new_slots(former: Sequence[int], now: Sequence[int], layer: int, arrived: Container[tuple[int, int]]) -> list[int]:
    """The slots of experts that neither were there nor have come from another rank."""
    return [
        slot
        for slot, (before, expert) in enumerate(zip(former, now, strict=True))
        if expert not in (VACANT, before) and (layer, expert) not in arrived
    ]


@torch.no_grad()
def grow(layer: MoELayer, slots: int, optimizers: Sequence[Optimizer]) -> None:
    """Give a layer's stacks vacant rows up to so many slots; parameters and states stay the same objects' own."""
    vacant = slots - layer.experts.num_slots
    if vacant <= 0:
        return
    for parameter in layer.experts.stacked_parameters().values():
        for optimizer, name, value in list(stacked_states(parameter, optimizers)):
            optimizer.state[parameter][name] = torch.cat([value, value.new_zeros(vacant, *value.shape[1:])])
        parameter.data = torch.cat([parameter.data, parameter.data.new_zeros(vacant, *parameter.shape[1:])])
        parameter.grad = None
    layer.experts.slot_experts += (VACANT,) * vacant


def take_rank_0_experts(layer: MoELayer, world: World) -> None:
    """Start from rank 0, as DDP does for dense parameters: its weights, or its seed where none are allocated."""
    experts = layer.experts
    if experts.is_deferred:
        seed = torch.tensor([experts.init_seed], device=world.device)
        broadcast_(seed, 0, world)
        experts.init_seed = int(seed)
    elif layer.dispatcher.world.size == 1 and world.size > 1:  # never placed: all ranks agree on that
        for parameter in experts.stacked_parameters().values():
            values = parameter.data.to(world.device)
            broadcast_(values, 0, world)
            parameter.data.copy_(values)
