"""Memory and storage together make a checkpoint: which of them gives what, read like one directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_lightning.checkpoint.loader import Checkpoint, find_newest
from moe_lightning.checkpoint.memory import DamagedSnapshots, MemoryCheckpoint, fetch, local_inventory
from moe_lightning.checkpoint.recovery_plan import Origin, RankInventory, RecoveryPlan, StorageInventory, plan_recovery
from moe_lightning.errors import CheckpointError
from moe_lightning.parallel.context import World
from moe_lightning.state.pieces import is_expert_key
from tests.unit.checkpoint_state import EXPERTS, LAYERS, node, whole_state

ALL = {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}


def recover(arenas: Path, storage: Checkpoint | None) -> tuple[RecoveryPlan, MemoryCheckpoint]:
    """A world of one rank recovers from a node's arenas and from storage."""
    inventory = RankInventory(rank=0, node="0").with_snapshots(local_inventory(arenas, "run"))
    committed = None
    if storage is not None:
        versions = tuple(tuple(row) for row in storage.expert_versions().tolist())
        committed = StorageInventory(
            session=storage.manifest.session, step=storage.step, resumes_at=storage.step, versions=versions
        )
    plan = plan_recovery([inventory], committed, num_layers=LAYERS, num_experts=EXPERTS)
    return plan, fetch(plan, World.single(), arenas, ALL, storage=storage)


def assert_state(found: MemoryCheckpoint, step: int, versions: list[int]) -> None:
    assert found.step == step
    assert found.expert_versions().tolist() == [versions] * LAYERS
    for key, then in whole_state(step).items():
        expected = whole_state(versions[int(key.split("/")[2])])[key] if is_expert_key(key) else then
        assert torch.equal(found.read(key), expected), key
        out = torch.empty_like(expected)
        found.read_into(key, out)
        assert torch.equal(out, expected), key


def test_everything_from_memory(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        made.snapshot(1)
        made.snapshot(2)
    plan, found = recover(tmp_path / "arenas", None)
    assert (plan.level, plan.counts()) == ("memory", {Origin.ARENA: LAYERS * EXPERTS})
    assert_state(found, 2, [2] * EXPERTS)
    assert [found.read_object(key)["state"].tolist() for key in found.keys("rng/")] == [[0, 2], [1, 2]]


def test_a_lost_arena_is_made_up_for_by_storage(tmp_path: Path) -> None:
    """Writer 1 and its experts 1 and 3 are lost; storage has step 2, with expert 1 of step 2 and the others of step 1;
    the arena of writer 0 has expert 2 of step 2, which was copied but not written."""
    with node(tmp_path) as made:
        made.save(1)
        made.save(2, fresh=[1, 2], persist=[1])
        made.snapshot(3, fresh=[0, 1])
        made.ranks[1].arena.path.unlink()
    storage = find_newest(made.root).checkpoint
    assert storage is not None
    plan, found = recover(made.arenas, storage)
    assert (plan.level, plan.version) == ("storage", 2)
    assert plan.from_storage == ((0, 1), (0, 3), (1, 1), (1, 3))
    assert plan.describe() == "4 experts from arenas, 4 from storage, 4 stale"
    assert_state(found, 2, [1, 2, 2, 1])
    assert found.keys("rng/") == storage.keys("rng/")


def test_a_whole_version_in_memory_is_preferred_to_a_newer_stale_one(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        made.save(1)
        made.snapshot(2)
        made.snapshot(3, fresh=[0])
    plan, found = recover(made.arenas, find_newest(made.root).checkpoint)
    assert (plan.level, plan.version, plan.stale) == ("memory", 2, {})
    assert_state(found, 2, [2] * EXPERTS)


def test_experts_carried_over_keep_their_versions(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        made.save(1)
        made.save(2, fresh=[0, 1], persist=[0])
        made.snapshot(3, fresh=[2], persist=[2])
        held = [
            (s.step, e.expert, e.version)
            for s in local_inventory(made.arenas, "run")
            for e in s.experts
            if e.layer == 0
        ]
        assert sorted(held) == [(2, 0, 2), (2, 1, 2), (2, 2, 1), (2, 3, 1), (3, 0, 2), (3, 1, 2), (3, 2, 3), (3, 3, 1)]
        plan, found = recover(made.arenas, None)
        assert plan.describe() == "8 experts from arenas, 6 stale"
        assert_state(found, 3, [2, 2, 3, 1])


def test_damaged_memory_is_named(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        made.snapshot(1)
        newest = made.ranks[1].arena.tables()[0].placed[0]
        made.ranks[1].arena.payload(newest)[0] ^= 1
        with pytest.raises(DamagedSnapshots, match="the arena snapshot of writer 1 at step 1 on node 0 is damaged"):
            recover(made.arenas, None)


def test_tensors_can_be_let_go_and_objects_stay(tmp_path: Path) -> None:
    with node(tmp_path, world_size=1) as made:
        made.snapshot(1)
        _, found = recover(made.arenas, None)
        for step in (2, 3, 4):
            made.snapshot(step)
    with pytest.raises(CheckpointError, match="expert/0/0/weight/w1 of the snapshot of step 1 is damaged"):
        found.read("expert/0/0/weight/w1")
    assert found.read_object("rng/0")["state"].tolist() == [0, 1]
    found.release()
    with pytest.raises(CheckpointError, match="another rank"):
        found.read("expert/0/0/weight/w1")
    assert found.read_object("rng/0")["state"].tolist() == [0, 1]
    with pytest.raises(CheckpointError, match="has no 'nonsense'"):
        found.read("nonsense")
    with pytest.raises(CheckpointError, match="is an object"):
        found.read("rng/0")


def test_what_is_no_arena_or_of_another_run_is_passed_over(tmp_path: Path) -> None:
    with node(tmp_path, world_size=1) as made:
        made.snapshot(1)
        (made.arenas / "rank00007.arena").write_bytes(b"x")
        (made.arenas / "held00000-00001.1.copy").write_bytes(b"")
        assert [s.place for s in local_inventory(made.arenas, "run")] == [("arena", 0, 1)]
        assert local_inventory(made.arenas, "another") == []
