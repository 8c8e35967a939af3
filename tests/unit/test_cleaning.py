"""moe-ckpt clean: what dead runs left in memory is listed, and deleted when asked for; nothing else is."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
from pathlib import Path

import pytest

from moe_lightning.checkpoint import inspect
from moe_lightning.checkpoint.agent import Agent
from moe_lightning.checkpoint.agent_handle import LOCK, agent_alive, request_stop
from moe_lightning.checkpoint.arena import Arena
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.inspect import orphans, remove
from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.checkpoint.memory import local_inventory
from moe_lightning.cli.ckpt import main
from tests.agents import fork_agent
from tests.forks import wait_until
from tests.parameters import slow, soak
from tests.unit.checkpoint_state import EXPERTS, Node, assert_holds, node


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of shared memory."""
    path = tmp_path / "memory"
    path.mkdir()
    monkeypatch.setattr(inspect, "MEMORY", path)
    return path


def abandoned(room: Path, name: str = "dead", root: str = "/data/run/checkpoints", saved: tuple[int, ...] = ()) -> Path:
    """Arenas of two ranks that died with a snapshot that was never written, after checkpoints of the steps `saved`."""
    made = Node(room / f"base-{name}", root=Path(root), keep_last=10)
    for step in saved:
        made.save(step)
    made.snapshot(7)
    made.close()
    arenas = room / f"moe-lightning-{name}"
    made.arenas.rename(arenas)
    (arenas / LOCK).write_text(json.dumps({"root": root}))
    return arenas


@pytest.fixture(autouse=True)
def bases(room: Path) -> None:
    for name in ("dead", "held", "served"):
        (room / f"base-{name}").mkdir()


def test_orphans_are_listed_and_deleted_only_with_yes(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean"]) == 0
    assert "no snapshots of dead runs" in capsys.readouterr().out
    arenas = abandoned(room)
    (arenas / "mine.txt").touch()
    assert main(["clean"]) == 0
    text = capsys.readouterr().out
    assert f"{arenas}: " in text
    assert "checkpoints in /data/run/checkpoints" in text
    assert "its snapshot of step 7 was never written" in text
    assert "nothing is deleted without --yes" in text
    assert len(list(arenas.glob("*.arena"))) == 2
    assert main(["clean", "--yes"]) == 0
    assert "deleted 1: " in capsys.readouterr().out
    assert [path.name for path in arenas.iterdir()] == ["mine.txt"], "somebody else's file stays"
    assert main(["clean", str(room / "nowhere")]) == 2


def test_what_was_never_written_is_written_by_the_command_that_is_named(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by the run, whose new world makes it void. It deletes no checkpoint: the run may keep any number."""
    root = room / "base-dead" / "my checkpoints"
    arenas = abandoned(room, root=str(root), saved=(1, 2, 3))
    assert main(["clean"]) == 0
    command = re.search(r"python -m moe_lightning\.checkpoint\.agent .*", capsys.readouterr().out)
    assert command is not None
    *_, first, served, second, written = shlex.split(command[0])
    assert (first, Path(served), second, Path(written)) == ("--arenas", arenas, "--checkpoints", root)
    agent = fork_agent(Path(served), Path(written), keep_last=None)
    wait_until(lambda: any(path.name == "step-00000007" for path, _ in checkpoints(root)), "it was not written")
    request_stop(arenas)
    agent.join()
    assert [path.name for path, _ in checkpoints(root)] == [f"step-{step:08}" for step in (7, 3, 2, 1)]


def test_what_lives_or_belongs_to_others_is_left_alone(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned(room)
    held = Node(room / "base-held")
    held.arenas.rename(room / "moe-lightning-held")
    served = room / "moe-lightning-served"
    served.mkdir(mode=0o700)
    agent = fork_agent(served, room / "base-served" / "checkpoints")
    wait_until(lambda: agent_alive(served), "the agent did not come up")
    (room / "moe-lightning-linked").symlink_to(room / "moe-lightning-dead")
    (room / "moe-lightning-else").mkdir()
    (room / "moe-lightning-else" / "thesis.tex").touch()
    try:
        assert [orphan.path.name for orphan in orphans([room])] == ["moe-lightning-dead"]
    finally:
        os.kill(agent.pid, signal.SIGKILL)  # type: ignore[arg-type]
        agent.join()
        held.close()
    found = orphans()
    assert [orphan.path.name for orphan in found] == [f"moe-lightning-{name}" for name in ("dead", "held", "served")]
    writer = Arena(found[1].path / "rank00000.arena", hold_alive=True)  # a rank comes back after the look
    assert [remove(orphan) for orphan in found] == [True, False, True]
    assert [orphan.path.exists() for orphan in found] == [False, True, False]
    writer.close()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert orphans() == []


def test_a_directory_that_another_process_deletes_is_no_orphan(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deleted(path: Path) -> bool:
        raise FileNotFoundError(path)

    abandoned(room)
    monkeypatch.setattr(inspect, "is_own", deleted)
    assert orphans() == []


@pytest.mark.parametrize("seed", [0, 1, 2, *map(slow, range(3, 10)), *map(soak, range(10, 60))])
def test_flips_anywhere_in_an_arena_end_nobody(room: Path, tmp_path: Path, seed: int) -> None:
    """The agent, the inventory, the list of orphans and a restart go on; what is written is whole."""
    rng = random.Random(seed)
    with node(tmp_path) as made:
        for step in (1, 2):
            made.snapshot(step)
        made.close()
        for path in made.arenas.glob("*.arena"):
            size = path.stat().st_size
            used = [rng.randrange(200), rng.randrange(4096 * 3), rng.randrange(4096 * 9), rng.randrange(size)]
            with open(path, "r+b") as file:
                for position in rng.sample(used, rng.randrange(1, 5)):
                    file.seek(position)
                    byte = file.read(1)[0]
                    file.seek(position)
                    file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        local_inventory(made.arenas, "run")
        agent = Agent(made.arenas, made.root, retry_s=0.0)
        for _ in range(20):
            agent.serve_once()
        made.ranks = []
    made.arenas.rename(room / "moe-lightning-flipped")
    (orphan,) = orphans()
    orphan.path.rename(made.arenas)
    with node(tmp_path, session="2") as made:
        made.save(3)
        found = find_newest(made.root)
        assert found.problems == ()
        assert_holds(found.checkpoint, dict.fromkeys(range(EXPERTS), 3))  # type: ignore[arg-type]
