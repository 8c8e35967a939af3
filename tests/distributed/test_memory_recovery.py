"""State comes back from snapshots in memory: from the own node, from peers, from what is left of lost nodes."""

from __future__ import annotations

import shutil
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from moe_lightning.checkpoint.memory import fetch, local_inventory
from moe_lightning.checkpoint.protection import ProtectionLayout, aec_layout, arc_layout, protection_cost
from moe_lightning.checkpoint.recovery_plan import Origin, RankInventory, plan_recovery
from moe_lightning.errors import CheckpointError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from tests.distributed.harness import connect, run_ranks
from tests.distributed.protected_ranks import (
    ALL,
    RUN,
    assert_holds,
    node_arenas,
    protect,
    recover,
    snapshot,
    snapshotter_of,
)
from tests.parameters import slow
from tests.unit.checkpoint_state import EXPERTS, LAYERS


def other_world(rank: int, world_size: int, base: str, writers: int) -> tuple[int, list[int]]:
    """Writers deal their arenas to as many nodes as there are ranks now."""
    world = connect() if world_size > 1 else World.single()
    arenas = node_arenas(Path(base), rank)
    for writer in range(rank, writers, world_size):
        snapshotter = snapshotter_of(arenas, writer, writers)
        for step, fresh in ((3, None), (4, None), (5, {1})):
            snapshot(snapshotter, writer, writers, step, fresh)
        snapshotter.close()
    own = RankInventory(rank=rank, node=str(rank)).with_snapshots(local_inventory(arenas, RUN))
    inventories = [RankInventory.from_json(entry) for entry in all_gather_json(own.to_json(), world)]
    plan = plan_recovery(inventories, None, num_layers=LAYERS, num_experts=EXPERTS)
    experts = {pair for pair in ALL if sum(pair) % world_size == rank}
    found = fetch(plan, world, arenas, experts)
    assert_holds(found, dict.fromkeys(range(EXPERTS), plan.version), experts)
    for layer, expert in ALL - experts - {(la, e) for la, e in ALL if e % writers % world_size == rank}:
        with pytest.raises(CheckpointError, match="another rank"):
            found.read(f"expert/{layer}/{expert}/weight/w1")
    assert np.array_equal(found.expert_versions(), plan.versions)
    return plan.version, plan.origins.ravel().tolist()


@pytest.mark.parametrize(("world_size", "writers"), [slow(1, 1), (1, 3), slow(2, 3), (3, 2)])
def test_a_world_of_another_size_reads_what_the_last_one_left(tmp_path: Path, world_size: int, writers: int) -> None:
    results = run_ranks(world_size, other_world, str(tmp_path), writers)
    assert len({str(result) for result in results}) == 1
    assert results[0] == (4, [Origin.ARENA] * LAYERS * EXPERTS), "whole at 4; partial experts of 5 would be stale"


ROOM_TO_GROW = 3 << 20
LAYOUTS = {
    "arc": arc_layout([0, 1, 2]),
    "arc-two": arc_layout([0, 1, 2, 3], shifts=2),
    "mirror": aec_layout([0, 1]),
    "aec": aec_layout([0, 1, 2]),
    "aec-four": aec_layout([0, 1, 2, 3]),
    "aec-uneven": aec_layout([0, 0, 1, 2]),
}


@pytest.mark.parametrize("name", ["arc", "aec", *map(slow, sorted(LAYOUTS.keys() - {"arc", "aec"}))])
def test_every_survivable_set_of_nodes_is_survived_and_no_other_at_the_predicted_cost(
    tmp_path: Path, name: str
) -> None:
    layout: ProtectionLayout = LAYOUTS[name]
    whole, ranks, nodes = tmp_path / "whole", len(layout.node_of), sorted(set(layout.node_of))
    whole.mkdir()
    reports = run_ranks(ranks, protect, str(whole), layout, [5, 6])
    cost = protection_cost(layout, [report["snapshot_bytes"] for report in reports])
    assert max(report["sent_bytes"] for report in reports) == cost.sent_bytes
    assert max(report["received_bytes"] for report in reports) == cost.received_bytes
    largest = max(report["memory_bytes"] for report in reports)
    assert cost.memory_bytes < largest < cost.memory_bytes + ROOM_TO_GROW, "room for tables and growth, in every file"
    for number in range(1, min(3, len(nodes))):
        for failed in combinations(nodes, number):
            left = tmp_path / "left"
            shutil.copytree(whole, left)
            for node in failed:
                shutil.rmtree(left / f"node{node}")
            alive = [node for node in nodes if node not in failed]
            plan = run_ranks(len(alive), recover, str(left), alive)[0]
            assert (plan.level == "memory") == layout.survives(failed), failed
            assert plan.level == "nothing" or plan.version == 6
            shutil.rmtree(left)


def test_a_node_of_two_ranks_is_decoded_by_nodes_of_two_ranks(tmp_path: Path) -> None:
    """Two snapshots are lost with the node; what the others hold is read on their nodes by both ranks."""
    layout = aec_layout([0, 0, 1, 1, 2, 2])
    run_ranks(6, protect, str(tmp_path), layout, [5])
    shutil.rmtree(tmp_path / "node0")
    plan = run_ranks(4, recover, str(tmp_path), [1, 1, 2, 2])[0]
    assert (plan.version, plan.counts()[Origin.PARITY]) == (5, 4)
    assert [decode.writer for decode in plan.decodes] == [0, 1]
    assert {read.reader for read in plan.reads if read.origin is Origin.ARENA} == {0, 1, 2, 3}
