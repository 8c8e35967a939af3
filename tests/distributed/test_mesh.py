"""A rank's places in a mesh, in real worlds: experts stay in their stage, everybody agrees with everybody."""

from __future__ import annotations

import copy
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_lightning.dispatch.dispatcher import Dispatcher
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.router import RouterConfig
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import Mesh, World, all_reduce_, broadcast_
from moe_lightning.parallel.mesh import MeshShape
from tests.distributed.harness import connect, run_ranks

TIMEOUT = timedelta(seconds=60)


def places(rank: int, world_size: int, shape: MeshShape) -> dict[str, object]:
    mesh = Mesh.build(connect(), shape, tuple(n // 2 for n in range(world_size)), TIMEOUT)
    total, first = torch.tensor(float(rank)), torch.tensor(float(rank))
    all_reduce_(total, mesh.world)
    broadcast_(first, 0, mesh.world)
    found = {
        "writer": mesh.whole.rank,
        "dispatch": (mesh.world.rank, mesh.world.size),
        "data": (mesh.data_rank, mesh.data_size),
        "stage": mesh.stage,
        "node": mesh.node_peers,
        "sum": float(total),
        "first": float(first),
        "told": all_gather_json(rank, mesh.world),
        "all": all_gather_json(rank, mesh.whole),
        "clocks": mesh.world.exchanges is mesh.whole.exchanges and mesh.pipe.bubbles is mesh.whole.bubbles,
    }
    mesh.close()
    return found


@pytest.mark.parametrize("sizes", [(1, 4, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (4, 1, 1, 1), (1, 2, 1, 2)])
def test_places(sizes: tuple[int, int, int, int]) -> None:
    pp, dp, cp, tp = sizes
    layout, stage_size = torch.arange(4).view(sizes), dp * cp * tp
    for rank, found in enumerate(run_ranks(4, places, MeshShape(pp=pp, dp=dp, cp=cp, tp=tp))):
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
    this rank, and a sum over torch's view of the same mesh."""
    mesh = Mesh.build(connect(), MeshShape(pp=2, dp=2), tuple(range(world_size)), TIMEOUT)
    torch.manual_seed(mesh.stage)
    layer = MoELayer(8, 16, 4, RouterConfig(top_k=2))
    alone, placement = copy.deepcopy(layer), uniform_placement(4, mesh.world.size)
    layer.place(Dispatcher(placement, mesh.world, [range(mesh.world.size)]), mesh.world.device)
    torch.manual_seed(rank)
    x_TD = torch.randn(12, 8)
    apart = (layer(x_TD) - alone(x_TD)).abs().max()
    ranks = torch.tensor(float(rank))
    dist.all_reduce(ranks, group=mesh.devices["pp"].get_group())
    sent_rows = layer.dispatcher.last_sent_rows
    mesh.close()
    return float(apart), sent_rows, float(ranks)


def test_experts_are_dispatched_inside_a_stage() -> None:
    apart, sent_rows, ranks = zip(*run_ranks(4, compute_in_stages), strict=True)
    assert max(apart) <= 1e-6
    assert min(sent_rows) > 0
    assert ranks == (2.0, 4.0, 2.0, 4.0)


def test_data_parallelism_alone_builds_nothing() -> None:
    world = World.offline(1, 3, torch.device("cpu"))
    mesh = Mesh.of(world, (0, 0, 1))
    assert mesh.world is mesh.whole is world
    assert (mesh.data_rank, mesh.data_size, mesh.stage, mesh.node_peers) == (1, 3, 0, (0, 1))
    assert np.prod(mesh.shape.sizes) == 3
