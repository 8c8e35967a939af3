"""State comes back from snapshots in memory: from the own node, from peers, from what is left of a lost node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lightning.algorithms.recovery import Origin, RankInventory, plan_recovery
from moe_lightning.checkpoint.inventory import local_inventory
from moe_lightning.checkpoint.memory_checkpoint import MemoryCheckpoint
from moe_lightning.checkpoint.records import is_partial, parse_expert_key
from moe_lightning.checkpoint.recovery import fetch
from moe_lightning.checkpoint.room import arena_path
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.comm.collect import all_gather_json
from moe_lightning.comm.world import World
from moe_lightning.errors import CheckpointError
from tests.distributed.harness import connect, run_ranks
from tests.unit.checkpoint_state import EXPERTS, LAYERS, expert_keys, state_of, whole_state

RUN, SESSION = "run", "1"
ALL = {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}


def take_snapshots(
    base: Path, rank: int, world_size: int, steps: dict[int, set[int] | None], session: str = SESSION
) -> None:
    """Snapshots of a writer in the arenas of its node; `steps` names the experts that are copied (None: all)."""
    arenas = node_arenas(base, rank)
    snapshotter = Snapshotter(
        arena_path(arenas, rank),
        run=RUN,
        session=session,
        rank=rank,
        world_size=world_size,
        state=state_of(rank, world_size, 0),
        object_bytes=4096,
        objects=2,
    )
    for step, fresh in steps.items():
        snapshotter.start(
            step,
            state_of(rank, world_size, step),
            fresh=None if fresh is None else expert_keys(fresh),
            objects={f"rng/{rank}": {"state": torch.tensor([rank, step])}},
        )
        snapshotter.wait_before_update()
    snapshotter.close()


def node_arenas(base: Path, node: int) -> Path:
    arenas = base / f"node{node}"
    arenas.mkdir(exist_ok=True)
    return arenas


def agree(world: World, node: str, arenas: Path | None, reports: bool) -> list[RankInventory]:
    """All ranks' inventories, of ranks that hold nothing live."""
    snapshots = local_inventory(arenas, RUN) if arenas is not None and reports else ()
    own = RankInventory(rank=world.rank, node=node).with_snapshots(snapshots)
    return [RankInventory.from_json(entry) for entry in all_gather_json(own.to_json(), world)]


def assert_holds(
    source: MemoryCheckpoint, writers: int, versions: dict[int, int], experts: set[tuple[int, int]]
) -> None:
    """Everything that was asked for, with the bytes of its version; nothing else can be read."""
    assert source.keys() == sorted([*whole_state(0), *(f"rng/{writer}" for writer in range(writers))])
    for key, then in whole_state(source.step).items():
        if not is_partial(key):
            expected = then
        elif parse_expert_key(key)[:2] in experts:
            expected = whole_state(versions[parse_expert_key(key)[1]])[key]
        else:
            continue
        actual = source.read(key)
        assert actual.dtype == expected.dtype, key
        assert torch.equal(actual, expected), key
    for writer in range(writers):
        assert torch.equal(source.read_object(f"rng/{writer}")["state"], torch.tensor([writer, source.step]))


def shrunk_world(rank: int, world_size: int, base: str, writers: int) -> tuple[int, list[int]]:
    """Writers' nodes: writer w on node w % world_size; every rank of the new world is the only one of its node."""
    world = connect() if world_size > 1 else World.single()
    for writer in range(rank, writers, world_size):
        take_snapshots(Path(base), writer, writers, {3: None, 4: None, 5: {1}})
        source = node_arenas(Path(base), writer)
        for path in list(source.iterdir()):
            path.rename(node_arenas(Path(base), 100 + rank) / path.name)
    arenas = node_arenas(Path(base), 100 + rank)
    plan = plan_recovery(agree(world, f"node{rank}", arenas, True), None, num_layers=LAYERS, num_experts=EXPERTS)
    experts = {pair for pair in ALL if sum(pair) % world_size == rank}
    found = fetch(plan, world, arenas, experts)
    assert_holds(found, writers, dict.fromkeys(range(EXPERTS), plan.version), experts)
    other = ALL - experts - {(la, e) for la, e in ALL if e % writers % world_size == rank}
    for layer, expert in other:
        with pytest.raises(CheckpointError, match="another rank"):
            found.read(f"expert/{layer}/{expert}/weight/w1")
    assert np.array_equal(found.expert_versions(), plan.versions)
    return plan.version, plan.origins.ravel().tolist()


@pytest.mark.parametrize(("world_size", "writers"), [(1, 1), (1, 3), (2, 2), (2, 3), (3, 2)])
def test_a_world_of_another_size_reads_what_the_last_one_left(tmp_path: Path, world_size: int, writers: int) -> None:
    results = run_ranks(world_size, shrunk_world, str(tmp_path), writers)
    assert len({str(result) for result in results}) == 1
    assert results[0] == (4, [Origin.ARENA] * LAYERS * EXPERTS), "whole at 4; partial experts of 5 would be stale"
