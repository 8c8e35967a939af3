"""Optimizer states that one rank keeps for all (ZeRO-1), on their way to other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from moe_lightning.kernels import pack, unpack
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PeerBuffer, exchange_parcels
from moe_lightning.state.pieces import DTYPES, Shapes, dtype_name

States = Mapping[str, Tensor]
"""Scope ("exp_avg", "step", ...) -> tensor of one parameter."""


def pack_states(states: States) -> Tensor:
    """uint8 bytes of all tensors on the host, in the order of their scopes."""
    tensors = [tensor.detach().to("cpu") for _, tensor in sorted(states.items())]
    return pack(tensors) if tensors else torch.empty(0, dtype=torch.uint8)


def shapes_of(states: States) -> Shapes:
    """What `unpack_states` needs to know."""
    return {scope: (dtype_name(tensor), tuple(tensor.shape)) for scope, tensor in sorted(states.items())}


def unpack_states(data: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """The tensors of packed states."""
    states = {scope: torch.empty(tuple(shape), dtype=DTYPES[dtype]) for scope, (dtype, shape) in shapes.items()}
    unpack(data, list(states.values()))
    return states


def move_shards(
    shards: Iterable[tuple[str, int]], takers: Mapping[str, Sequence[int]], local: Mapping[str, States], world: World
) -> dict[str, dict[str, Tensor]]:
    """Bring every parameter's optimizer state from the rank that has it to those that take it; collective.

    Args:
        shards: (name, rank) as in `RecoveryPlan.shards`; a rank of -1 is passed over: it is read from a snapshot.
        takers: of each name in the new world.
        local: states of the names that this rank has, live or replayed.

    Returns:
        Copies of the states, on the host, of the names that this rank takes.
    """
    sources = {name: rank for name, rank in shards if rank >= 0}
    packed = {name: pack_states(local[name]) for name, rank in sources.items() if rank == world.rank}
    told = all_gather_json({name: [data.numel(), shapes_of(local[name])] for name, data in packed.items()}, world)
    entries = {name: told[rank][name] for name, rank in sources.items()}
    ways = [(name, target) for name in sorted(sources) for target in takers[name]]
    parcels = [PeerBuffer(source=sources[name], target=target, nbytes=entries[name][0]) for name, target in ways]
    arrived = exchange_parcels(parcels, lambda at: packed[ways[at][0]], world)
    return {ways[at][0]: unpack_states(data, entries[ways[at][0]][1]) for at, data in arrived.items()}
