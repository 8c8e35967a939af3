"""A rank's places in a mesh, in real worlds: experts stay in their stage, everybody agrees with everybody."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_lightning.dispatch.dispatcher import Dispatcher
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.router import RouterConfig
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, all_reduce_, broadcast_
from moe_lightning.parallel.mesh import Layout, MeshShape
from moe_lightning.strategies import expert_parallel
from tests.distributed.harness import run_pooled
from tests.distributed.training import train

TIMEOUT = timedelta(seconds=60)


def places(rank: int, world_size: int, shape: MeshShape) -> dict[str, object]:
    layout = Layout(shape=shape, nodes=tuple(n // 2 for n in range(world_size)))
    world = World.connect(torch.device("cpu"), TIMEOUT, layout)
    total, first = torch.tensor(float(rank)), torch.tensor(float(rank))
    all_reduce_(total, world.stage)
    broadcast_(first, 0, world.stage)
    found = {
        "writer": world.rank,
        "dispatch": (world.stage.rank, world.stage.size),
        "data": (world.data_rank, world.shape.dp),
        "stage": world.pipe.rank,
        "node": world.node_peers,
        "sum": float(total),
        "first": float(first),
        "told": all_gather_json(rank, world.stage),
        "all": all_gather_json(rank, world),
        "clocks": world.stage.exchanges is world.exchanges and world.pipe.bubbles is world.bubbles,
    }
    world.close()
    return found


@pytest.mark.parametrize("sizes", [(1, 4, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (4, 1, 1, 1), (1, 2, 1, 2)])
def test_places(sizes: tuple[int, int, int, int]) -> None:
    pp, dp, cp, tp = sizes
    layout, stage_size = torch.arange(4).view(sizes), dp * cp * tp
    for rank, found in enumerate(run_pooled(4, places, MeshShape(pp=pp, dp=dp, cp=cp, tp=tp))):
        stage, data, _, _ = (layout == rank).nonzero()[0].tolist()
        peers = list(range(stage * stage_size, (stage + 1) * stage_size))
        assert found == {
            "writer": rank,
            "dispatch": (rank - peers[0], stage_size),
            "data": (data, dp),
            "stage": stage,
            "node": (0, 1) if rank < 2 else (2, 3),
            "sum": float(sum(peers)),
            "first": float(peers[0]),
            "told": peers,
            "all": [0, 1, 2, 3],
            "clocks": True,
        }


def compute_in_stages(rank: int, world_size: int) -> tuple[float, int, float]:
    """How far a layer spread over the ranks of a stage is from the same layer on this rank alone, the rows that left
    this rank, and a sum over the stages."""
    world = World.connect(torch.device("cpu"), TIMEOUT, Layout(shape=MeshShape(pp=2, dp=2)))
    torch.manual_seed(world.pipe.rank)
    layer = MoELayer(8, 16, 4, RouterConfig(top_k=2))
    alone, placement = copy.deepcopy(layer), uniform_placement(4, world.stage.size)
    layer.place(Dispatcher(placement, world.stage, [range(world.stage.size)]), world.stage.device)
    torch.manual_seed(rank)
    x_TD = torch.randn(12, 8)
    apart = (layer(x_TD) - alone(x_TD)).abs().max()
    ranks = torch.tensor(float(rank))
    dist.all_reduce(ranks, group=world.group("pp"))
    sent_rows = layer.dispatcher.last_sent_rows
    world.close()
    return float(apart), sent_rows, float(ranks)


def test_experts_are_dispatched_inside_a_stage() -> None:
    apart, sent_rows, ranks = zip(*run_pooled(4, compute_in_stages), strict=True)
    assert max(apart) <= 1e-6
    assert min(sent_rows) > 0
    assert ranks == (2.0, 4.0, 2.0, 4.0)


def test_data_parallelism_alone_builds_nothing() -> None:
    world = World.offline(1, 3, torch.device("cpu"), Layout(shape=MeshShape(dp=3), nodes=(0, 0, 1)))
    assert world.stage is world
    assert (world.data_rank, world.shape, world.pipe.size, world.node_peers) == (1, MeshShape(dp=3), 1, (0, 1))
    with pytest.raises(FrozenInstanceError):
        world.rank = 0  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class Replicated(MeshShape):
    """A mesh with one more axis, whose ranks repeat each other's samples."""

    rep: int = 1


def train_replicated(rank: int, world_size: int, shape: MeshShape) -> dict[str, Any]:
    with mock.patch.object(expert_parallel, "chosen_axes", return_value=shape):
        return train(rank, world_size, steps=3)


def test_another_axis_is_one_more_field_of_the_mesh() -> None:
    """Its ranks have a group and equal shares of the same samples; nothing else in the package knows of it."""
    plain = run_pooled(1, partial(train_replicated, shape=MeshShape()))[0]["losses"]
    for found in run_pooled(4, partial(train_replicated, shape=Replicated(rep=2))):
        np.testing.assert_allclose(found["losses"], plain, rtol=1e-4)


def groups_of_axes(rank: int, world_size: int) -> tuple[int, tuple[int, ...], int]:
    world = World.connect(torch.device("cpu"), TIMEOUT, Layout(shape=Replicated(rep=2).over(world_size)))
    group = world.group("rep")
    return group.size(), world.shape.peers(rank, {"rep"}), world.data_rank


def test_another_axis_has_a_group() -> None:
    assert run_pooled(4, groups_of_axes) == [(2, (0, 1), 0), (2, (0, 1), 0), (2, (2, 3), 1), (2, (2, 3), 1)]
