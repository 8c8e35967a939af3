"""Repair of damaged checkpoints: every value that is read comes from some step, and the cost is reported."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moe_lightning.checkpoint import directory
from moe_lightning.checkpoint.commit import prune
from moe_lightning.checkpoint.inspect import verify_all
from moe_lightning.checkpoint.loader import Checkpoint, Found, find_newest, find_usable, repaired
from moe_lightning.checkpoint.manifest import METADATA
from moe_lightning.checkpoint.memory import MemoryCheckpoint, RecoverySources, storage_inventory
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.recovery_plan import RecoveryPlan
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import is_expert_key
from moe_lightning.strategies.checkpoints import _leased
from tests.parameters import slow
from tests.unit.checkpoint_state import assert_holds, node, whole_state

STEPS = {1: None, 2: [0, 1], 3: [2]}
"""Step of each checkpoint -> the experts that it wrote; the first wrote all of them."""
VERSIONS = {0: 2, 1: 2, 2: 3, 3: 1}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with node(tmp_path, keep_last=9) as made:
        for step, fresh in STEPS.items():
            made.save(step, fresh=fresh)
        yield made.root


def places(root: Path, step: int, key: str) -> tuple[Any, int, int]:
    """(file, first byte, bytes) of a tensor in a checkpoint."""
    checkpoint = Checkpoint(root / f"step-{step:08d}")
    (item,) = checkpoint.stored(key)
    return checkpoint.path / checkpoint.manifest.files[item.at.file].path, item.at.data_offset, item.nbytes


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:  # in place: every link to the file is harmed
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 8]))


def assert_honest(found: Found) -> Checkpoint:
    """Every tensor is that of the version that the checkpoint states."""
    checkpoint = found.checkpoint
    assert checkpoint is not None
    for key, now in whole_state(checkpoint.step).items():
        version, actual = checkpoint.version(key), checkpoint.read(key)
        assert torch.equal(actual, whole_state(version)[key] if is_expert_key(key) else now), key
    return checkpoint


def test_an_undamaged_directory_needs_nothing(root: Path) -> None:
    found = find_usable(root)
    assert found.problems == ()
    assert found.checkpoint.substitutes == {}
    assert_holds(found.checkpoint, VERSIONS)


@pytest.mark.parametrize(("good", "found_step"), [(9, 3), (2, 2), (1, 1), (0, None)])
def test_what_was_saved_after_memory_was_damaged_is_passed_over(root: Path, good: int, found_step: int | None) -> None:
    session = Checkpoint(root / "step-00000003").manifest.session
    directory.mark_damaged(root, "another", 0)
    directory.mark_damaged(root, session, good + 1)
    directory.mark_damaged(root, session, good)
    found = find_usable(root)
    assert (None if found.checkpoint is None else found.checkpoint.step) == found_step
    assert len(found.problems) == max(0, 3 - good)
    assert all(f"may hold memory that was damaged after step {good}" in line for line in found.problems)


def test_a_checkpoint_of_damaged_memory_that_is_named_is_told_of_and_mends_no_other(root: Path, tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    with node(tmp_path / "later", root=root, session="2", keep_last=9) as later:
        later.save(4)
    directory.mark_damaged(root, "1", 1)
    found = repaired(root / "step-00000003")
    assert found.checkpoint.step == 3
    (sentence,) = found.problems
    assert sentence.endswith(f"damaged after step 1: name an older one, or give {root}")
    key = "expert/1/2/weight/w1"
    path, start, _ = places(root, 4, key)
    flip(path, start + 3)
    assert repaired(root / "step-00000004").checkpoint.substitutes == {key: "step-00000001"}


def test_snapshots_of_damaged_memory_are_passed_over_by_processes_that_have_not_seen_the_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path) as made:
        for step in (1, 2):
            made.snapshot(step)
        made.persist()
        sources = RecoverySources(root=made.root, name="run", node="0", fallback=tmp_path, report=print)
        monkeypatch.setattr(RecoverySources, "arenas", made.arenas)
        assert {saved.step for saved in sources.snapshots()} == {2}
        directory.mark_damaged(made.root, "1", 1)
        assert sources.snapshots() == []


def test_the_newest_that_was_saved_before_the_damage_is_not_pruned(root: Path) -> None:
    """The agent commits what was copied before the damage was found, and prunes."""
    directory.mark_damaged(root, Checkpoint(root / "step-00000003").manifest.session, 1)
    assert prune(root, 1) == ["step-00000002"]
    for found in (find_usable(root), find_newest(root)):
        assert found.checkpoint.step == 1
        assert found.problems == (f"{root}/step-00000003 may hold memory that was damaged after step 1",)


def test_an_expert_that_was_just_written_comes_back_older(root: Path) -> None:
    key = "expert/1/2/weight/w1"
    path, start, _ = places(root, 3, key)
    flip(path, start + 3)
    found = find_usable(root)
    checkpoint = assert_honest(found)
    assert checkpoint.step == 3
    assert checkpoint.substitutes == {key: "step-00000002"}
    assert checkpoint.version(key) == 1
    assert checkpoint.version("expert/1/2/exp_avg/w1") == 3
    assert checkpoint.expert_versions()[1].tolist() == [2, 2, 1, 1]
    assert storage_inventory(checkpoint).versions[1] == (2, 2, 1, 1)
    (sentence,) = found.problems
    assert sentence == (
        f"{path} is damaged: its checksum does not match; expert 2 of layer 1 is read from step-00000002; "
        "tokens are not counted"
    )


def test_a_second_copy_of_the_same_version_costs_nothing(root: Path) -> None:
    key = "expert/0/3/weight/b"
    path, start, _ = places(root, 3, key)
    other = places(root, 1, key)[0]
    copy = other.read_bytes()
    other.unlink()  # a file of its own, as where links cannot be made
    other.write_bytes(copy)
    flip(path, start)
    found = find_usable(root)
    assert_holds(found.checkpoint, VERSIONS)
    assert "expert 3 of layer 0 is read from step-00000001; " in found.problems[0]


def test_an_expert_whose_only_file_is_damaged_is_named(root: Path) -> None:
    path, start, _ = places(root, 3, "expert/0/3/weight/w1")  # carried: one file for all three checkpoints
    flip(path, start)
    found = find_usable(root)
    assert found.checkpoint is None
    sentence = "its checksum does not match, and no kept checkpoint has another version of expert 3 of layer 0"
    assert found.problems[0] == f"{path} is damaged: {sentence}"
    assert len(found.problems) == 3
    with pytest.raises(CheckpointError, match=rf"{sentence}; restore it from a copy"):
        repaired(root / "step-00000003")
    with pytest.raises(
        CheckpointError, match=rf"holds no complete checkpoint, as .*{sentence} \(2 more problems\): name"
    ):
        _leased(root, report=lambda _: None)


def test_an_older_checkpoint_gives_its_version(root: Path) -> None:
    """Files of their own, of which those of steps 2 and 3 are damaged."""
    flip(*places(root, 3, "expert/0/2/weight/w1")[:2])
    for step in (1, 2):
        path, start, _ = places(root, step, "expert/0/2/weight/w1")
        copy = path.read_bytes()
        path.unlink()
        path.write_bytes(copy)
        if step == 2:
            flip(path, start)
    assert assert_honest(find_usable(root)).substitutes == {"expert/0/2/weight/w1": "step-00000001"}


@pytest.mark.parametrize("kind", ["dense", "objects", MANIFEST])
def test_what_is_no_expert_is_read_from_the_checkpoint_before(root: Path, kind: str) -> None:
    path = next(p for p in (root / "step-00000003").iterdir() if p.name.startswith(kind))
    path.write_bytes(bytes(path.stat().st_size))
    found = find_usable(root)
    assert assert_honest(found).step == 2
    assert str(path) in found.problems[0]


def test_bytes_between_the_tensors_cost_nothing(root: Path) -> None:
    checkpoint = Checkpoint(root / "step-00000003")
    (item,) = checkpoint.stored("expert/1/2/weight/w1")
    flip(checkpoint.path / item.at.file, item.at.offset + 5)
    flip(checkpoint.path / METADATA, 100)
    found = find_usable(root)
    assert_holds(found.checkpoint, VERSIONS)
    assert len(found.problems) == 2
    assert all("nothing is lost" in problem for problem in found.problems)


def test_a_missing_file_costs_only_what_was_in_it(root: Path) -> None:
    places(root, 3, "expert/1/2/weight/w1")[0].unlink()
    checkpoint = assert_honest(find_usable(root))
    assert checkpoint.step == 3
    assert set(checkpoint.substitutes.values()) == {"step-00000002"}


def test_one_checkpoint_is_mended_from_those_beside_it(root: Path) -> None:
    flip(*places(root, 3, "expert/1/2/weight/w1")[:2])
    found = repaired(root / "step-00000003")
    assert found.checkpoint.version("expert/1/2/weight/w1") == 1
    assert len(found.problems) == 1
    flip(*places(root, 3, "dense/norm/weight")[:2])
    with pytest.raises(CheckpointError, match="is damaged"):
        repaired(root / "step-00000003")


def test_a_recovery_reads_what_was_mended(root: Path) -> None:
    key = "expert/1/2/weight/w1"
    flip(*places(root, 3, key)[:2])
    storage = find_usable(root).checkpoint
    plan = SimpleNamespace(
        version=3, resumes_at=3, versions=storage.expert_versions(), from_storage=[(1, 2)], level="memory"
    )
    snapshot = MemoryCheckpoint(cast(RecoveryPlan, plan), [], storage)
    assert torch.equal(snapshot.read(key), whole_state(1)[key])
    assert snapshot.expert_versions()[1, 2] == 1
    again = Checkpoint(storage.path, substitutes=json.loads(json.dumps(storage.substitutes)))
    assert torch.equal(again.read(key), storage.read(key))


def test_nobody_reads_a_newer_version_than_the_checkpoint_says(root: Path) -> None:
    """Were step 2 resumed from, expert 2 of step 3 would have seen samples that come again."""
    (root / "step-00000003" / MANIFEST).rename(root / "step-00000003" / "kept")
    flip(*places(root, 2, "expert/0/2/weight/w1")[:2])
    (root / "step-00000003" / "kept").rename(root / "step-00000003" / MANIFEST)
    with pytest.raises(CheckpointError, match="no kept checkpoint has another version of expert 2 of layer 0"):
        repaired(root / "step-00000002")


def test_a_damaged_run_record_is_told_by_the_checkpoints(root: Path) -> None:
    record = root / "run.json"
    whole = record.read_bytes()
    for position in range(len(whole)):
        record.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert directory.run_of(root) == "run"
        found = find_usable(root)
        assert found.checkpoint is not None
        assert "run.json is damaged" in found.problems[0]
        assert "run.json is damaged" in str(verify_all(root)[-1].problem)
    directory.claim(root, "run")
    assert record.read_bytes() == whole
    with pytest.raises(CheckpointError, match="holds the checkpoints of run run, not of other"):
        directory.claim(root, "other")


@pytest.mark.parametrize("flips", [20, slow(300)])
def test_every_flip_is_found_and_only_a_shared_file_ends_the_run(root: Path, flips: int) -> None:
    files = sorted({p.stat().st_ino: p for p in root.rglob("*") if p.is_file() and p.stat().st_size}.values())
    dice = random.Random(20)
    for _ in range(flips):
        path = dice.choice(files)
        position = dice.randrange(path.stat().st_size)
        flip(path, position)
        assert any(verdict.problem for verdict in verify_all(root)), (path, position)
        found = find_usable(root)
        if found.checkpoint is None:
            assert all("no kept checkpoint has another version of expert" in problem for problem in found.problems)
        else:
            assert_honest(found)
        flip(path, position)
    assert find_usable(root).problems == ()


def test_a_resume_names_the_file_where_nothing_is_left(root: Path, tmp_path: Path) -> None:
    damaged = [next(path.glob("dense*")) for path in sorted(root.glob("step-*"))]
    for path in damaged:
        path.unlink()
    told: list[str] = []
    with pytest.raises(CheckpointError, match=rf"as {re.escape(str(damaged[-1]))} is missing \(2 more"):
        _leased(root, report=told.append)
    assert told[0] == f"{damaged[-1]} is missing"
    (root / "step-00000001" / "MANIFEST.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"step-00000001 holds no complete checkpoint, as it has no MANIFEST.json"
    ):
        _leased(root / "step-00000001", report=told.append)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        _leased(tmp_path / "nowhere", report=told.append)
