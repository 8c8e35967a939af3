"""Whoever copies or moves the directory of a run has another run: neither agent nor arenas of the original serve it."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_lightning.checkpoint.agent import OwnRoot
from moe_lightning.checkpoint.agent_handle import STOP, AgentHandle, agent_alive, served_root
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.loader import find_newest
from tests.agents import ForkedAgent
from tests.forks import wait_until
from tests.parameters import slow, soak
from tests.unit.checkpoint_state import EXPERTS, assert_holds, node


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ForkedAgent]]:
    """Agents start in no time; what they leave behind is ended."""
    started: list[ForkedAgent] = []

    def start(arenas: Path, root: Path, **options: float) -> ForkedAgent:
        started.append(ForkedAgent(arenas, root))
        return started[-1]

    monkeypatch.setattr("moe_lightning.checkpoint.agent_handle.start_agent", start)
    yield started
    for agent in started:
        agent._process.kill()
        agent._process.join()


def listing(root: Path) -> dict[str, int]:
    """Every file of a directory with its inode."""
    return {str(path.relative_to(root)): path.stat().st_ino for path in root.rglob("*")}


def _made(path: Path) -> Path:
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_directory_of_checkpoints_is_in_use_while_an_agent_serves(tmp_path: Path) -> None:
    """Or an automounter unmounts it between two checkpoints."""

    def is_open() -> bool:
        return str(tmp_path) in {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}

    own = OwnRoot(tmp_path, None)
    own.check(may_make=True)
    assert is_open()
    del own
    assert not is_open()


def test_an_agent_writes_to_no_directory_that_took_the_place_of_its_own(tmp_path: Path) -> None:
    run, moved, copy = (tmp_path / name for name in ("run", "moved", "copy"))
    run.mkdir()
    with node(tmp_path, root=run / "checkpoints") as made:
        made.save(1)
        shutil.copytree(run, copy)
        run.rename(moved)
        made.snapshot(2)
        made.persist_attempts(3)
        assert "the run's directory was moved or deleted" in (made.agent.status.error or "")
        assert not run.exists(), "nothing is made in its place"
        copy.rename(run)
        before = listing(made.root)
        made.persist_attempts(5)
        assert "another directory took the place" in (made.agent.status.error or "")
        assert listing(made.root) == before
        run.rename(copy)
        moved.rename(run)
        made.persist()
        assert made.agent.status.error is None
        assert_holds(find_newest(made.root).checkpoint, dict.fromkeys(range(EXPERTS), 2))  # type: ignore[arg-type]


def test_the_agent_of_a_dead_run_makes_no_checkpoints_of_a_run_that_took_its_place(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    with node(tmp_path, root=run / "checkpoints") as made:
        made.save(1)
        made.snapshot(2)
        made.close()
        run.rename(moved)
        run.mkdir()  # of a run that has not saved yet
        made.persist_attempts(3)
        assert "the run's directory was moved or deleted" in (made.agent.status.error or "")
        assert not made.root.exists()
        run.rmdir()
        moved.rename(run)
        made.persist()
        assert [manifest.step for _, manifest in checkpoints(made.root)] == [2, 1]


def test_a_living_agent_is_taken_only_where_its_path_leads_to_the_same_directory(
    tmp_path: Path, forked: list[ForkedAgent]
) -> None:
    root, moved, arenas = tmp_path / "checkpoints", tmp_path / "moved", _made(tmp_path / "arenas")
    root.mkdir()
    first = AgentHandle(arenas, root)
    first.begin()
    wait_until(lambda: served_root(arenas) == root, "the agent did not say what it serves")
    again = AgentHandle(arenas, tmp_path / "arenas" / ".." / "checkpoints")
    again.begin()
    assert len(forked) == 1, "another path to the same directory"
    root.rename(moved)
    shutil.copytree(moved, root)
    elsewhere = AgentHandle(arenas, moved)
    elsewhere.begin()
    assert len(forked) == 2
    wait_until(lambda: served_root(arenas) == moved, "the new agent did not say what it serves")
    assert not (arenas / STOP).exists()
    elsewhere.leave(30.0)
    assert not agent_alive(arenas)


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 10)), *map(soak, range(10, 160))])
def test_nobody_writes_into_anothers_root(tmp_path: Path, seed: int) -> None:
    """An agent works on a run while its directory is copied, moved, replaced by a copy and moved back."""
    rng = random.Random(seed)
    with node(tmp_path, keep_last=3) as made:
        made.save(1)
        spare, copies, step = tmp_path / "spare", [], 1
        for turn in range(6):
            action = rng.choice(["copy", "replace", "symlink", "work"])
            copied = tmp_path / f"copy{turn}"
            if action == "copy":
                shutil.copytree(made.root, copied)
                copies.append((copied, listing(copied)))
            elif action in ("replace", "symlink"):
                shutil.copytree(made.root, copied)
                before = listing(copied)
                made.root.rename(spare)
                copied.rename(made.root) if action == "replace" else made.root.symlink_to(copied)
                step += 1
                made.snapshot(step, fresh=[rng.randrange(EXPERTS)])
                made.persist_attempts(rng.randrange(1, 4))
                os.rename(made.root, copied) if action == "replace" else made.root.unlink()
                spare.rename(made.root)
                copies.append((copied, before))
            step += 1
            made.save(step, fresh=[rng.randrange(EXPERTS)])
            assert checkpoints(made.root)[0][1].step == step
        assert all(listing(copied) == before for copied, before in copies)
