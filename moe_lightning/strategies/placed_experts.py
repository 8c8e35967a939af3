"""The experts of a model under their placements: which rows of which parameters live on this rank."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moe_lightning.algorithms.placement import Placement, dispatch_groups, parse_placements, uniform_placement
from moe_lightning.checkpoint.full_state import ExpertRows
from moe_lightning.comm.dispatcher import Dispatcher, QuotaPolicy
from moe_lightning.comm.replica_sum import ReplicaSum, StackedParameter
from moe_lightning.comm.world import World, broadcast_
from moe_lightning.errors import ConfigurationError
from moe_lightning.modules.moe_layer import MoELayer, moe_layers


class PlacedExperts:
    """Puts the experts of every MoE layer into this rank's slots and keeps the books.

    Args:
        module: the model; its layers start from rank 0's weights.
        placements: one for each MoE layer.
        world: the ranks.
        ep_size: ranks of a dispatch group; None: all.
        quota: how replicas share tokens.

    Attributes:
        layers: the MoE layers.
        rows: for each expert parameter, where its rows belong.

    Raises:
        ConfigurationError: a placement that does not fit the world, a dispatch group, or what the module still holds.
    """

    def __init__(
        self,
        module: nn.Module,
        placements: Sequence[Placement],
        world: World,
        *,
        ep_size: int | None = None,
        quota: QuotaPolicy = "balanced",
    ) -> None:
        self.layers = moe_layers(module)
        self.rows: dict[nn.Parameter, ExpertRows] = {}
        groups = dispatch_groups(world.size, ep_size or world.size)
        stacked = []
        for layer, placement in zip(self.layers, placements, strict=True):
            _take_rank_0_experts(layer, world)
            layer.place(Dispatcher(placement, world, groups, quota), world.device)
            slots = layer.experts.slot_experts
            for parameter in layer.experts.stacked_parameters().values():
                self.rows[parameter] = ExpertRows(slot_experts=slots, placement=placement, rank=world.rank)
                stacked.append(StackedParameter(parameter=parameter, slot_experts=slots, placement=placement))
        self._replica_sum = ReplicaSum(stacked, world)

    def sum_replica_gradients(self) -> None:
        """Add the gradients of each expert over its holders, in rank order."""
        self._replica_sum()

    def keys(self, module: nn.Module) -> dict[str, ExpertRows]:
        """The state_dict keys of the expert parameters."""
        named = module.named_parameters(remove_duplicate=False)
        return {name: self.rows[parameter] for name, parameter in named if parameter in self.rows}


def resolve_placements(
    module: nn.Module,
    num_ranks: int,
    *,
    ep_size: int | None = None,
    copies: int | None = None,
    placement: str | os.PathLike[str] | Sequence[Any] | None = None,
) -> list[Placement]:
    """The placement of each MoE layer: uniform with so many copies, or from a table or file.

    Raises:
        ConfigurationError: a file or table that is missing, malformed or made for other sizes.
    """
    layers = moe_layers(module)
    if placement is None:
        copies = max(1, num_ranks // (ep_size or num_ranks)) if copies is None else copies
        return [uniform_placement(layer.num_experts, num_ranks, copies) for layer in layers]
    if len({layer.num_experts for layer in layers}) > 1:
        raise ConfigurationError(
            "a placement table needs the same number of experts in every MoE layer: use copies instead"
        )
    table, origin = _read_table(placement)
    experts = layers[0].num_experts if layers else 0
    return parse_placements(table, num_layers=len(layers), num_experts=experts, num_ranks=num_ranks, origin=origin)


def _take_rank_0_experts(layer: MoELayer, world: World) -> None:
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


def _read_table(source: str | os.PathLike[str] | Sequence[Any]) -> tuple[object, str]:
    if not isinstance(source, str | os.PathLike):
        return list(source), "placement"
    path = Path(source)
    if not path.is_file():
        raise ConfigurationError(
            f"the placement file {path} does not exist: give a .json or .npy table [layers, experts, ranks]"
        )
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False), str(path)
        return json.loads(path.read_text()), str(path)
    except (ValueError, OSError, EOFError) as error:
        raise ConfigurationError(f"the placement file {path} is not a .json or .npy table: {error}") from error
