"""Damaged files that checkpoints share are found and rewritten during training; commits never wait for it."""

from __future__ import annotations

import errno
import os
import random
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities import rank_zero_warn

from moe_lightning.checkpoint import agent, commit, directory
from moe_lightning.checkpoint.agent import CarriedFileVerifier
from moe_lightning.checkpoint.agent_handle import AgentStatus, read_status, warnings_of
from moe_lightning.checkpoint.commit import PRUNED, prune
from moe_lightning.checkpoint.directory import Superseded, checkpoints, enter_world, headings
from moe_lightning.checkpoint.loader import Checkpoint, find_newest
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.storage.posix import PosixStorage
from tests.parameters import slow, soak
from tests.unit.checkpoint_state import EXPERTS, Node, assert_holds, node


def flip(path: Path, position: int | None = None) -> None:
    """Change a byte of an inode, in all checkpoints that link to it."""
    with open(path, "r+b") as file:
        data = file.read()
        at = len(data) // 2 if position is None else position
        file.seek(at)
        file.write(bytes([data[at] ^ 0x10]))


def commits(made: Node, steps: range) -> None:
    """A partial checkpoint after every step, each of another expert; then the agent reads what it is to read."""
    for step in steps:
        made.save(step, fresh=[step % EXPERTS], persist=[step % EXPERTS])
        while made.agent.verify_carried():
            pass


def newest(root: Path) -> Checkpoint:
    return Checkpoint(checkpoints(root)[0][0])


def file_of(root: Path, expert: int) -> Any:
    """The file that the newest checkpoint has an expert in."""
    checkpoint = newest(root)
    return next(
        checkpoint.path / i.at.file for i in checkpoint.manifest.stored if i.key.startswith(f"expert/0/{expert}/")
    )


def carried(root: Path) -> list[Path]:
    """Data files of the newest checkpoint that an earlier one wrote."""
    checkpoint = newest(root)
    return sorted(p for p in checkpoint.path.glob("*.distcp") if f".step{checkpoint.step:08d}." not in p.name)


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("within", [1, 2, 5])
def test_every_carried_file_is_read_once_within_so_many_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: int, *, is_busy: bool
) -> None:
    """Also where the agent never comes to rest in between."""
    monkeypatch.setattr(agent, "VERIFY_WITHIN", within)
    read_after: dict[str, list[int]] = {}
    read = CarriedFileVerifier._read

    def reading(self: CarriedFileVerifier, directory: Any, name: str, record: Any) -> Any:
        yield from read(self, directory, name, record)
        read_after.setdefault(name, []).append(self._commits)

    monkeypatch.setattr(CarriedFileVerifier, "_read", reading)
    with node(tmp_path, keep_last=3) as made:
        made.save(1)
        for step in range(2, 14):
            made.snapshot(step, fresh=[0], persist=[0])  # all other experts are carried from the first on
            made.persist()
            while not is_busy and made.agent.verify_carried():
                pass
        assert read_after.keys() == {path.name for path in carried(made.root)}
        assert {b - a for after in read_after.values() for a, b in pairwise(after)} == {within}


def test_a_storage_that_fails_while_it_is_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(agent, "VERIFY_WITHIN", 1)
    with node(tmp_path) as made:
        commits(made, range(1, 3))
        made.save(3, fresh=[0], persist=[0])
        for path in carried(made.root):
            path.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(PosixStorage, "is_dir", fail)
            while made.agent.verify_carried():
                pass
        assert "cannot be read (Input/output error)" in str(made.agent.status.damage)


@pytest.mark.parametrize("seed", [0, 1, *map(slow, range(2, 10)), *map(soak, range(10, 40))])
def test_a_damaged_file_is_written_anew_within_so_many_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    within = rng.choice([1, 3, 8])
    monkeypatch.setattr(agent, "VERIFY_WITHIN", within)
    with node(tmp_path, keep_last=3) as made:
        made.save(1)
        commits(made, range(2, 4))
        victim = file_of(made.root, rng.choice([1, 2]))
        flip(victim, rng.randrange(victim.stat().st_size))
        for step in range(4, 5 + within):  # the last one writes what was found by then
            made.save(step, fresh=[0], persist=[0])
            while made.agent.verify_carried():
                pass
        checkpoint = newest(made.root)
        checkpoint.verify()
        assert victim.name not in checkpoint.manifest.files
        found = find_newest(made.root)
        assert found.problems == ()
        versions = dict(enumerate(checkpoint.expert_versions()[0].tolist()))
        assert all(version >= 1 for version in versions.values())
        status = read_status(made.arenas)
        assert status.damaged == 1
        assert victim.name in str(status.damage)
        assert "is damaged: the next checkpoint writes its experts again" in str(status.damage)
        commits(made, range(5 + within, 9 + within))
        newest(made.root).verify()


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_lost_file_does_not_stop_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    monkeypatch.setattr(agent, "VERIFY_WITHIN", 1000)
    with node(tmp_path) as made:
        made.save(1)
        victim = file_of(made.root, 1)
        victim.unlink() if harm == "gone" else victim.write_bytes(b"")
        for step in (2, 3):
            made.save(step, fresh=[0], persist=[0])
            assert made.agent.status.error is None
            assert newest(made.root).step == step
            newest(made.root).verify()
        assert victim.name not in newest(made.root).manifest.files


def test_a_file_that_is_lost_between_its_look_and_its_link_is_written_with_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path) as made:
        made.save(1)
        victim = file_of(made.root, 1)
        link = commit.os.link

        def lose(source: Any, target: Any) -> None:
            victim.unlink(missing_ok=True)
            link(source, target)

        monkeypatch.setattr(commit.os, "link", lose)
        made.save(2, fresh=[0], persist=[0])
        assert made.agent.status.errors == 1
        assert newest(made.root).step == 2
        newest(made.root).verify()


@pytest.mark.parametrize("harm", ["loop", "folder", "flip", "mark"])
def test_an_unreadable_old_manifest_does_not_stop_commits(tmp_path: Path, harm: str) -> None:
    with node(tmp_path, keep_last=2) as made:
        made.save(1)
        commits(made, range(2, 4))
        path = made.root / "step-00000002" / MANIFEST
        if harm == "flip":
            flip(path)
        else:
            path.unlink()
        if harm == "loop":
            path.symlink_to(path.name)
        elif harm == "folder":
            path.mkdir()
        elif harm == "mark":
            (path.parent / PRUNED).symlink_to(PRUNED)
        commits(made, range(4, 8))
        assert made.agent.status.error is None
        assert made.agent.status.errors == 0
        assert [manifest.step for _, manifest in checkpoints(made.root)] == [7, 6]
        newest(made.root).verify()


def test_many_checkpoints_cost_no_more_time_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = directory.read_manifest
    monkeypatch.setattr(directory, "read_manifest", lambda path: reads.append(path) or read(path))
    with node(tmp_path, keep_last=200, world_size=1) as made:
        made.save(1)
        first = newest(made.root).manifest
        for step in range(100, 190):
            path = made.root / f"step-{step:08d}"
            path.mkdir()
            (path / MANIFEST).write_bytes(replace(first, step=step, sequence=step).dump())
        assert len(headings(made.root)) == 91
        reads.clear()
        for step in range(200, 204):
            made.save(step)
        assert len(reads) <= 4 * 2, "each manifest is read when it is new, and not again"


def test_what_is_read_is_not_pruned_and_goes_with_a_later_prune(tmp_path: Path) -> None:
    with node(tmp_path, keep_last=1) as made:
        made.save(1)
        restored = newest(made.root)
        with PosixStorage().lease(restored.path):
            with PosixStorage().lease(restored.path):
                commits(made, range(2, 5))
                assert made.agent.status.error is None
                restored.verify()
                assert_holds(restored, dict.fromkeys(range(EXPERTS), 1))
            commits(made, range(5, 6))
            restored.verify()
        commits(made, range(6, 7))
        assert [path.name for path in made.root.glob("step-*")] == ["step-00000006"]
        with pytest.raises(FileNotFoundError), PosixStorage().lease(restored.path):
            pass


def test_an_older_world_prunes_nothing(tmp_path: Path) -> None:
    with node(tmp_path, keep_last=10, world=1) as made:
        for step in (1, 2):
            made.save(step)
    enter_world(made.root, 2)
    with pytest.raises(Superseded):
        prune(made.root, 1, world=1)
    assert len(checkpoints(made.root)) == 2
    assert prune(made.root, 1, world=2) == ["step-00000001"]


def test_the_warning_comes_again_with_the_count() -> None:
    statuses = [AgentStatus(error="the disk is full", errors=count) for count in (1, 1, 2, 3)]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for status in statuses:
            for warning in warnings_of(status):
                rank_zero_warn(warning)
    assert [str(w.message) for w in shown] == [
        f"checkpoints could not be written {count} times so far: the disk is full" for count in (1, 2, 3)
    ]
    assert warnings_of(AgentStatus(error="a newer world saves here")) == ["a newer world saves here"]
