"""An agent that is stopped in the middle of a commit and wakes up in the time of a newer world does not commit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moe_lightning.checkpoint import agent, commit, directory
from moe_lightning.checkpoint import commit as part_writer
from moe_lightning.checkpoint.agent import main as agent_main
from moe_lightning.checkpoint.directory import checkpoints, enter_world
from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.checkpoint.manifest import METADATA
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.storage import posix
from moe_lightning.checkpoint.storage.posix import PosixStorage
from tests.forks import PATIENCE_S, forked, wait_until
from tests.parameters import slow
from tests.unit.checkpoint_state import EXPERTS, Node, assert_holds

PHASES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "before its staging directory": (part_writer, "make_staging", lambda *_: True),
    "before it looks for marks": (directory, "check_world", lambda *_: True),
    "before its data": (PosixStorage, "write", lambda *_: True),
    "before its part": (PosixStorage, "put", lambda _, path, __: path.name.startswith("part-")),
    "before it assembles": (commit, "_assemble", lambda *_: True),
    "before .metadata": (PosixStorage, "put_once", lambda _, path, __: path.name == METADATA),
    "before the manifest": (posix, "write_durably", lambda path, _: path.name == MANIFEST),
    "before it names": (PosixStorage, "_free_name", lambda *_: True),
    "at the rename": (os, "rename", lambda _, target: "/step-" in str(target)),
    "after the rename": (posix, "sync_directory", lambda path: path.name == "checkpoints"),
    "before it prunes": (agent, "prune", lambda *_: True),
}
COMMITTED = ("after the rename", "before it prunes")
FEW = ("before its part", "before the manifest", "at the rename", "after the rename")
"""Phases of the default run."""


def stopping_agent(arenas: str, root: str, phase: str, log: str) -> None:
    """An agent that stops itself, once, when it comes to a phase of step 2."""
    owner, name, is_meant = PHASES[phase]
    function, stops = getattr(owner, name), [signal.SIGSTOP]

    def stop_first(*arguments: Any, **options: Any) -> Any:
        if stops and is_meant(*arguments):
            os.kill(os.getpid(), stops.pop())
        return function(*arguments, **options)

    setattr(owner, name, stop_first)
    os.setsid()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
    sys.exit(agent_main(["--arenas", arenas, "--checkpoints", root, "--poll-s", "0.01", "--grace-s", "0.05"]))


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


@pytest.mark.parametrize("phase", [phase if phase in FEW else slow(phase) for phase in PHASES])
def test_who_wakes_in_a_newer_world_commits_nothing(phase: str, tmp_path: Path) -> None:
    newer_base = tmp_path / "newer"
    newer_base.mkdir()
    older = Node(tmp_path, world=1, session="1")
    older.root.mkdir()
    enter_world(older.root, 1)
    older.snapshot(1)
    older.persist()
    older.snapshot(2)
    log = tmp_path / "log"
    with forked(stopping_agent, str(older.arenas), str(older.root), phase, str(log)) as process:
        assert process.pid is not None
        wait_until(partial(is_stopped, process.pid), f"the agent did not stop {phase}")
        enter_world(older.root, 2)
        resumed = find_newest(older.root).checkpoint
        assert resumed is not None
        assert resumed.step == (2 if phase in COMMITTED else 1)
        newer = Node(newer_base, world=2, session="2", root=older.root)
        newer.snapshot(3)
        newer.persist()
        newer.close()
        older.close()
        os.kill(process.pid, signal.SIGCONT)
        process.join(PATIENCE_S)
        assert process.exitcode == 0
    found = checkpoints(older.root)
    assert [(m.world, m.step) for _, m in found] == [(2, 3), (1, resumed.step)]
    assert_holds(find_newest(older.root).checkpoint, dict.fromkeys(range(EXPERTS), 3))  # type: ignore[arg-type]
    assert phase in COMMITTED or "world 1 may not write" in log.read_text()
    assert not [path for path in older.root.glob(".staging-*") if any(path.iterdir())]
