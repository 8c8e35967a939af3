"""State comes back from snapshots in memory: from the own node, from peers, from what is left of lost nodes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import threading
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lightning.checkpoint.arena import ARENAS, Arena, arena_path
from moe_lightning.checkpoint.memory import (
    COPIES,
    PARITIES,
    DamagedSnapshots,
    copy_path,
    fetch,
    local_inventory,
    parity_path,
)
from moe_lightning.checkpoint.protection import ProtectionLayout, aec_layout, arc_layout, no_protection, protection_cost
from moe_lightning.checkpoint.recovery_plan import Origin, RankInventory, RecoveryPlan, plan_recovery, without_snapshots
from moe_lightning.checkpoint.snapshot_protection import ProtectedFile, Protector
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from tests.distributed.harness import RankFailure, connect, run_pooled, run_ranks
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
from tests.parameters import slow, soak
from tests.unit.checkpoint_state import EXPERTS, LAYERS
from tests.unit.planning_references import survives


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
    results = run_pooled(world_size, other_world, str(tmp_path), writers)
    assert len({str(result) for result in results}) == 1
    assert results[0] == (4, [Origin.ARENA] * LAYERS * EXPERTS), "whole at 4; partial experts of 5 would be stale"


ROOM_TO_GROW = 3 << 20
LAYOUTS = {
    "arc": arc_layout([0, 1, 2]),
    "arc-two": arc_layout([0, 1, 2, 3], 2),
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
    reports = run_pooled(ranks, protect, str(whole), layout, [5, 6])
    cost = protection_cost(layout, [report["snapshot_bytes"] for report in reports])
    assert max(report["sent_bytes"] for report in reports) == cost.sent_bytes
    largest = max(report["memory_bytes"] for report in reports)
    assert cost.memory_bytes < largest < cost.memory_bytes + ROOM_TO_GROW, "room for tables and growth, in every file"
    for number in range(1, min(3, len(nodes))):
        for failed in combinations(nodes, number):
            left = tmp_path / "left"
            shutil.copytree(whole, left)
            for node in failed:
                shutil.rmtree(left / f"node{node}")
            alive = [node for node in nodes if node not in failed]
            plan = run_pooled(len(alive), recover, str(left), alive)[0]
            assert (plan.level == "memory") == survives(layout, failed), failed
            assert plan.level == "nothing" or plan.version == 6
            shutil.rmtree(left)


def test_a_node_of_two_ranks_is_decoded_by_nodes_of_two_ranks(tmp_path: Path) -> None:
    """Two snapshots are lost with the node; what the others hold is read on their nodes by both ranks."""
    layout = aec_layout([0, 0, 1, 1, 2, 2])
    run_pooled(6, protect, str(tmp_path), layout, [5])
    shutil.rmtree(tmp_path / "node0")
    plan = run_pooled(4, recover, str(tmp_path), [1, 1, 2, 2])[0]
    assert (plan.version, plan.counts()[Origin.PARITY]) == (5, 4)
    assert [decode.writer for decode in plan.decodes] == [0, 1]
    assert {read.reader for read in plan.reads if read.origin is Origin.ARENA} == {0, 1, 2, 3}


# ----------------------------------------------------------------------
# Protection that was interrupted, snapshots that are damaged, sessions that follow each other, and live survivors.


AEC = aec_layout(range(3))


def interrupted(rank: int, world_size: int, base: str, late: int) -> None:
    """Everybody protects step 6, but one rank comes no further than to open its parity."""
    world = connect()
    snapshotter = snapshotter_of(node_arenas(Path(base), rank), rank, world_size)
    protector = Protector(snapshotter.arena, AEC, world)
    for step in (4, 5):
        snapshot(snapshotter, rank, world_size, step)
        assert protector.start(step)
    protector.finish()
    snapshot(snapshotter, rank, world_size, 6)
    if rank == late:
        protector._publish_parity = lose_heart  # type: ignore[method-assign]
    assert protector.start(6)
    if rank == late:
        with pytest.raises(RuntimeError, match="a snapshot could not be protected: on the way"):
            protector.finish()
    protector.close()
    for step in (7, 8, 9):
        snapshot(snapshotter, rank, world_size, step)


def lose_heart(file: ProtectedFile, *_: object) -> None:
    file.begin().fill_(1)
    raise OSError("on the way")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_version_that_not_all_have_finished_does_not_count(tmp_path: Path, lost: int) -> None:
    """Rank 1 did not finish: its parity is torn. Without rank 0 that parity is needed, without rank 1 it is not."""
    run_pooled(3, interrupted, str(tmp_path), 1)
    shutil.rmtree(tmp_path / f"node{lost}")
    alive = [node for node in range(3) if node != lost]
    assert run_pooled(2, recover, str(tmp_path), alive)[0].version == (5 if lost == 0 else 6)


def damage(path: Path, step: int) -> None:
    """Flip one byte of the first payload of a version."""
    arena = Arena(path)
    placed = next(table for table in arena.tables() if table.step == step).placed[0]
    arena.memory[placed.at.data_offset] ^= 1
    arena.close()


def plan_around(rank: int, world_size: int, base: str, nodes: list[int]) -> tuple[list[str], int]:
    """Plan and fetch until no snapshot turns out to be damaged; the names of those that were."""
    world = connect()
    arenas = node_arenas(Path(base), nodes[rank])
    own = RankInventory(rank=rank, node=f"node{nodes[rank]}").with_snapshots(local_inventory(arenas, RUN))
    inventories = [RankInventory.from_json(entry) for entry in all_gather_json(own.to_json(), world)]
    found: list[str] = []
    while True:
        plan = plan_recovery(inventories, None, num_layers=LAYERS, num_experts=EXPERTS)
        if plan.level == "nothing":
            return found, -1
        try:
            source = fetch(plan, world, arenas, ALL)
        except DamagedSnapshots as error:
            found += sorted(":".join(map(str, place)) for place in error.damaged)
            inventories = without_snapshots(inventories, error.damaged)
        else:
            assert_holds(source, dict.fromkeys(range(EXPERTS), plan.version), ALL)
            return found, plan.version


def test_a_damaged_snapshot_is_named_on_every_rank_and_the_one_before_is_used(tmp_path: Path) -> None:
    run_pooled(3, protect, str(tmp_path), AEC, [5, 6])
    damage(copy_path(tmp_path / "node1", "1", 1, 1), 6)
    damage(parity_path(tmp_path / "node2", "1", 2), 5)
    shutil.rmtree(tmp_path / "node0")
    results = run_pooled(2, plan_around, str(tmp_path), [1, 2])
    assert results[0] == results[1]
    named, version = results[0]
    assert set(named) == {"node1:arena:1:6", "node1:copy:1:6", "node2:parity:0:5"}
    assert version == -1


def test_a_damaged_copy_is_not_needed_where_a_parity_is_whole(tmp_path: Path) -> None:
    run_pooled(3, protect, str(tmp_path), AEC, [5, 6])
    damage(copy_path(tmp_path / "node1", "1", 1, 1), 6)
    for path in tmp_path.glob(f"*/{ARENAS}"):
        path.unlink()
    assert run_pooled(3, plan_around, str(tmp_path), [0, 1, 2]) == [(["node1:arena:1:6"], 6)] * 3


def same_step_twice(rank: int, world_size: int, base: str) -> None:
    """The newest step is in the arena and protected."""
    world = connect()
    snapshotter = snapshotter_of(node_arenas(Path(base), rank), rank, world_size)
    protector = Protector(snapshotter.arena, aec_layout(range(world_size)), world)
    snapshot(snapshotter, rank, world_size, 7)
    assert protector.start(7)
    protector.finish()


def test_a_damaged_arena_does_not_matter_where_the_protected_version_is_whole(tmp_path: Path) -> None:
    run_pooled(2, same_step_twice, str(tmp_path))
    damage(arena_path(tmp_path / "node0", 0), 7)
    assert run_pooled(2, plan_around, str(tmp_path), [0, 1]) == [([], 7)] * 2
    damage(copy_path(tmp_path / "node0", "1", 0, 0), 7)
    assert run_pooled(2, plan_around, str(tmp_path), [0, 1]) == [(["node0:arena:0:7"], 7)] * 2, "from the parity"


def lopsided(rank: int, world_size: int, base: str, nodes: list[int], recovers: bool) -> list[str]:
    """Writer 0 has an expert and nothing else, writer 1 has everything but experts, writer 2 has nothing."""
    world = connect()
    arenas = node_arenas(Path(base), nodes[rank])
    if recovers:
        own = RankInventory(rank=rank, node=f"node{nodes[rank]}").with_snapshots(local_inventory(arenas, RUN))
        inventories = [RankInventory.from_json(entry) for entry in all_gather_json(own.to_json(), world)]
        plan = plan_recovery(inventories, None, num_layers=1, num_experts=1)
        found = fetch(plan, world, arenas, {(0, 0)})
        return [f"{key}={found.read(key).tolist()}" for key in found.keys("")]
    state = [{"expert/0/0/weight/w": torch.ones(3)}, {"dense/w/weight": torch.ones(2)}, {}][rank]
    snapshotter = Snapshotter(
        arena_path(arenas, rank), run=RUN, session="1", rank=rank, world_size=world_size, state=state, objects=1
    )
    protector = Protector(snapshotter.arena, AEC, world)
    snapshotter.start(1, state)
    snapshotter.finish()
    assert protector.start(1)
    protector.finish()
    return []


@pytest.mark.parametrize("lost", [0, slow(1), slow(2)])
def test_writers_may_have_experts_only_or_nothing(tmp_path: Path, lost: int) -> None:
    run_pooled(3, lopsided, str(tmp_path), [0, 1, 2], False)
    shutil.rmtree(tmp_path / f"node{lost}")
    alive = [node for node in range(3) if node != lost]
    found = run_pooled(2, lopsided, str(tmp_path), alive, True)
    assert found == [["dense/w/weight=[1.0, 1.0]", "expert/0/0/weight/w=[1.0, 1.0, 1.0]"]] * 2


def live_and_lost(rank: int, world_size: int, base: str, version: int) -> RecoveryPlan:
    """Survivors of three nodes hold the experts of their own live; node 2 held the others alone."""
    world = connect()
    arenas = node_arenas(Path(base), rank)
    mine = tuple(sorted((layer, expert) for layer, expert in ALL if expert % 3 == rank))
    own = RankInventory(rank=rank, node=f"node{rank}", live_version=version, experts=mine)
    own = own.with_snapshots(local_inventory(arenas, RUN))
    inventories = [RankInventory.from_json(entry) for entry in all_gather_json(own.to_json(), world)]
    plan = plan_recovery(inventories, None, num_layers=LAYERS, num_experts=EXPERTS)
    needed = {pair for pair in ALL if pair[1] % 3 == 2 and pair[0] % 2 == rank}
    source = fetch(plan, world, arenas, needed)
    if plan.level == "live":
        assert source.keys() == source.keys("expert/0/2/") + source.keys("expert/1/2/"), "only what is not live"
        for layer, expert in needed:
            assert source.version(f"expert/{layer}/{expert}/weight/w1") == version
            source.read(f"expert/{layer}/{expert}/weight/w1")
    return plan


def test_survivors_keep_their_state_where_lost_experts_are_protected_at_its_version(tmp_path: Path) -> None:
    run_pooled(3, protect, str(tmp_path), AEC, [5, 6])
    shutil.rmtree(tmp_path / "node2")
    plan = run_pooled(2, live_and_lost, str(tmp_path), 6)[0]
    assert plan.describe() == "6 experts from replicas, 2 from parity, 0 stale"
    assert np.argwhere(plan.origins == Origin.PARITY).tolist() == [[0, 2], [1, 2]]
    rolled_back = run_pooled(2, live_and_lost, str(tmp_path), 7)[0]
    assert (rolled_back.level, rolled_back.version) == ("memory", 6)


def second_session(rank: int, world_size: int, base: str, finish: int) -> list[str]:
    """After session 1 of three ranks, session 2 of two protects `finish` versions."""
    world = connect()
    arenas = node_arenas(Path(base), rank)
    snapshotter = snapshotter_of(arenas, rank, world_size, "2")
    protector = Protector(snapshotter.arena, aec_layout(range(2)), world)
    for step in range(10, 10 + finish):
        snapshot(snapshotter, rank, world_size, step)
        assert protector.start(step)
        protector.finish()
    all_gather_json(0, world)
    protector.close()
    return sorted({s.session for s in local_inventory(arenas, RUN) if s.kind is Origin.PARITY})


def test_the_former_sessions_protection_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    run_pooled(3, protect, str(tmp_path), AEC, [5])
    shutil.rmtree(tmp_path / "node2")
    run_ranks(2, second_session, str(tmp_path), 0)
    assert run_pooled(2, recover, str(tmp_path), [0, 1])[0].version == 5
    assert run_ranks(2, second_session, str(tmp_path), 1) == [["1", "2"]] * 2
    assert run_ranks(2, second_session, str(tmp_path), 2) == [["2"]] * 2
    files = [path for pattern in (COPIES, PARITIES) for path in tmp_path.glob(f"*/{pattern}")]
    assert {path.name.split(".")[1] for path in files} == {"2"}


def unprotected_session(rank: int, world_size: int, base: str) -> list[list[str]]:
    """A session without protection after one with it; the sessions of protecting files after each snapshot."""
    arenas = node_arenas(Path(base), 0)
    snapshotter = snapshotter_of(arenas, rank, world_size, "2")
    protector = Protector(snapshotter.arena, no_protection([0]), World.single())
    left = []
    for step in (10, 11):
        snapshot(snapshotter, rank, world_size, step)
        assert not protector.start(step)
        left.append(sorted({path.name.split(".")[1] for path in arenas.glob(COPIES)}))
    return left


def test_a_session_without_protection_retires_that_of_the_former_one(tmp_path: Path) -> None:
    run_pooled(2, protect, str(tmp_path), aec_layout(range(2)), [5])
    assert run_pooled(1, unprotected_session, str(tmp_path)) == [[["1"], []]]


def growing(rank: int, world_size: int, base: str) -> list[int]:
    """Objects that outgrow the files' room."""
    world = connect()
    arenas = node_arenas(Path(base), rank)
    snapshotter = snapshotter_of(arenas, rank, world_size, object_bytes=1 << 20)
    protector = Protector(snapshotter.arena, arc_layout(range(world_size)), world)
    for step, size in ((1, 10), (2, 100_000), (3, 10)):
        snapshot(snapshotter, rank, world_size, step, objects={f"rng/{rank}": {"state": torch.zeros(size)}})
        assert protector.start(step)
        report = protector.finish()
        assert (report.sent_bytes > 400_000) == (size == 100_000)
    steps = [s.step for s in local_inventory(arenas, RUN) if s.kind is Origin.COPY]
    protector.close()
    return steps


def test_a_snapshot_may_outgrow_its_room(tmp_path: Path) -> None:
    assert run_pooled(2, growing, str(tmp_path)) == [[3, 2]] * 2


def every_third(rank: int, world_size: int, base: str) -> tuple[list[int], list[int]]:
    """Snapshots of every step are packed ahead, but only every third one is protected."""
    world = connect()
    arenas = node_arenas(Path(base), rank)
    snapshotter = snapshotter_of(arenas, rank, world_size)
    protector = Protector(snapshotter.arena, arc_layout(range(world_size)), world)
    snapshotter.on_published = protector.prepare
    for step in range(1, 12):
        snapshot(snapshotter, rank, world_size, step)
        if step % 3 == 0:
            assert protector.start(step)
    protector.finish()
    files = (copy_path(arenas, "1", rank, writer) for writer in (rank, 1 - rank))
    own, other = ([table.step for table in Arena(path).tables()] for path in files)
    return own, other


def test_packing_ahead_takes_no_protected_version_away(tmp_path: Path) -> None:
    """Version 11 lies packed in the place of the oldest one, but counts for nothing yet."""
    assert run_pooled(2, every_third, str(tmp_path)) == [([9, 6], [9, 6, 3])] * 2


def refusals(rank: int, world_size: int, base: str) -> None:
    world = connect()
    snapshotter = snapshotter_of(node_arenas(Path(base), rank), rank, world_size)
    assert not Protector(snapshotter.arena, no_protection(range(2)), world).start(1)
    protector = Protector(snapshotter.arena, arc_layout(range(2)), world)
    if rank == 0:
        snapshot(snapshotter, rank, world_size, 1)
    assert not protector.start(1), "rank 1 has no snapshot"
    if rank == 1:
        snapshot(snapshotter, rank, world_size, 1)
        copy_path(snapshotter.arena.path.parent, "1", 1, 0).with_suffix(".alive").mkdir()
    with pytest.raises(ConfigurationError, match="rank 1 cannot keep protected snapshots"):
        protector.start(1)
    protector.close()


def test_what_cannot_be_protected_is_refused_by_all_ranks_alike(tmp_path: Path) -> None:
    run_pooled(2, refusals, str(tmp_path))  # which asserts on every rank


# ----------------------------------------------------------------------
# Processes are killed at random instants of copying, sending and publishing, and a node is lost with them: what was
# protected everywhere is still there, byte by byte. A schedule is a seed.


RANKS = 3


def protect_until_killed(
    rank: int, world_size: int, base: str, layout: ProtectionLayout, delays_s: list[float]
) -> None:
    """Every rank is killed at its own instant; what it has finished by then is in a file."""
    world = connect()
    snapshotter = snapshotter_of(node_arenas(Path(base), rank), rank, world_size)
    protector = Protector(snapshotter.arena, layout, world)
    if delays_s[0] < delays_s[1]:
        snapshotter.on_published = protector.prepare
    finished = os.open(Path(base) / f"finished{rank}", os.O_CREAT | os.O_WRONLY, 0o600)
    all_gather_json(0, world)
    threading.Timer(delays_s[rank], os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(1, 100_000):
        snapshot(snapshotter, rank, world_size, step)
        assert protector.start(step)
        if step % 2:  # otherwise the next start waits for it
            report = protector.finish()
            os.pwrite(finished, struct.pack("<q", report.step), 0)


def survive(seed: int, base: Path) -> tuple[int, int]:
    """(version that was protected everywhere, version that was recovered)"""
    rng = random.Random(seed)
    layout = rng.choice([aec_layout(range(RANKS)), arc_layout(range(RANKS))])
    first = rng.uniform(0.02, 0.4)
    delays_s = [first + rng.uniform(0.0, 0.01) for _ in range(RANKS)]
    with pytest.raises(RankFailure, match=r"died without a word|onnection"):
        run_ranks(RANKS, protect_until_killed, str(base), layout, delays_s)
    marks = [(base / f"finished{rank}").read_bytes() for rank in range(RANKS)]
    everywhere = min(struct.unpack("<q", mark)[0] if mark else 0 for mark in marks)
    lost = rng.randrange(RANKS)
    shutil.rmtree(base / f"node{lost}")
    plan = run_pooled(RANKS - 1, recover, str(base), [node for node in range(RANKS) if node != lost])[0]
    return everywhere, plan.version if plan.level == "memory" else 0


def check(seed: int, base: Path) -> int:
    everywhere, recovered = survive(seed, base)
    assert everywhere <= recovered <= everywhere + 3, f"schedule {seed}"
    return recovered


@pytest.mark.slow
def test_kills_at_random_instants(tmp_path: Path) -> None:
    recovered = []
    for seed in range(5):
        (tmp_path / str(seed)).mkdir()
        recovered.append(check(seed, tmp_path / str(seed)))
    assert max(recovered) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(100, 110), *map(soak, range(110, 200))])
def test_many_kills_at_random_instants(tmp_path: Path, seed: int) -> None:
    check(seed, tmp_path)
