"""kill -9 of workers, agent or both at random instants: the newest named checkpoint is whole and training goes on from
it.

A seed is a schedule: who is killed after which delay. Processes are forked from one that has imported everything, so
that a schedule takes a fraction of a second and the kills fall into snapshot, persist, commit and prune rather than
into imports.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from moe_lightning.checkpoint.agent import main as agent_main
from moe_lightning.checkpoint.agent_handle import request_stop
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.loader import Checkpoint, find_newest
from tests.agents import START_AGENT
from tests.chaos.checkpoint_worker import main as worker_main
from tests.forks import PATIENCE_S, fork, kill
from tests.parameters import slow, soak
from tests.unit.checkpoint_state import assert_holds, node

WORLD = 2
STEPS = 40


def run_entry(entry: Callable[[], int], arguments: list[str]) -> None:
    """What an entry point does with a command line, in a session of its own and without a word."""
    os.setsid()
    sys.argv = ["process", *arguments]
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.exit(entry())


class Processes:
    """Processes of a test, killed at its end whatever happens."""

    def __init__(self) -> None:
        self.named: dict[str, BaseProcess] = {}

    def start(self, name: str, entry: Callable[[], int], *arguments: object) -> None:
        self.named[name] = fork(run_entry, entry, [str(a) for a in arguments])

    def kill(self, name: str) -> None:
        if name in self.named:
            kill([self.named.pop(name)])

    def wait(self, name: str) -> int | None:
        """Exit code of a process that ends by itself."""
        process = self.named.pop(name)
        process.join(PATIENCE_S)
        kill([process])
        return process.exitcode


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    kill(made.named.values())


def start_agent(processes: Processes, base: Path) -> None:
    processes.start(
        "agent", agent_main, "--arenas", base / "arenas", "--checkpoints", base / "checkpoints", "--poll-s", 0.001,
        "--retry-s", 0.01, "--grace-s", 60,
    )  # fmt: skip


def start_workers(processes: Processes, base: Path, session: int, first: int, last: int) -> None:
    for rank in range(WORLD):
        processes.start(f"rank{rank}", worker_main, base, rank, WORLD, f"{session:04d}", first, last)


def assert_whole(root: Path) -> int:
    """Every named checkpoint verifies and holds exactly what the model was; returns the step of the newest, 0 without
    one."""
    for path in root.glob("step-*"):
        if (path / "MANIFEST.json").exists():
            checkpoint = Checkpoint(path, run="chaos")
            checkpoint.verify()
            table = checkpoint.expert_versions()
            assert (table == table[0]).all(), "an expert has one version in all layers"
            assert_holds(checkpoint, dict(enumerate(table[0].tolist())))
    found = find_newest(root, run="chaos")
    assert found.problems == ()
    return 0 if found.checkpoint is None else found.checkpoint.manifest.step


def run_schedule(base: Path, seed: int, processes: Processes) -> None:
    """Rounds of training under kills, each resumed from the newest checkpoint; then a quiet round to the end."""
    rng = random.Random(seed)
    root = base / "checkpoints"
    (base / "arenas").mkdir(mode=0o700)
    step, session = 0, 1
    start_agent(processes, base)
    for _ in range(2):
        start_workers(processes, base, session, step + 1, STEPS)
        victims = rng.choice([["rank0"], ["rank1"], ["agent"], ["agent", "rank0", "rank1"], ["rank0", "rank1"]])
        time.sleep(rng.uniform(0.0, 0.25))  # the schedule itself: the instant of the kill
        for victim in victims:
            processes.kill(victim)
            time.sleep(rng.choice([0.0, 0.0, rng.uniform(0, 0.01)]))
        if "agent" in victims:
            assert_whole(root)
            start_agent(processes, base)
        for rank in range(WORLD):  # a lost rank ends the session for everybody
            processes.kill(f"rank{rank}")
        if rng.random() < 0.5:
            processes.kill("agent")
            newest = assert_whole(root)
            assert newest >= step, "the last committed checkpoint never goes back"
            start_agent(processes, base)
        named = checkpoints(root) if root.is_dir() else []
        step = named[0][1].step if named else 0
        session += 1
    start_workers(processes, base, session, step + 1, step + 5)
    for rank in range(WORLD):
        assert processes.wait(f"rank{rank}") == 0
    request_stop(base / "arenas")
    assert processes.wait("agent") == 0
    assert assert_whole(root) == step + 5, "training went on, and its last snapshot was persisted"
    assert not list(root.glob(".staging*"))
    assert not list((base / "arenas").glob("*.arena"))


@pytest.mark.parametrize("seed", [2, 3, *map(slow, [0, 1, *range(4, 12)]), *map(soak, range(1000, 1988))])
def test_kill_9_at_random_instants(tmp_path: Path, seed: int, processes: Processes) -> None:
    run_schedule(tmp_path, seed, processes)  # asserts after every kill


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_a_worker_killed_right_after_its_snapshot_is_persisted(tmp_path: Path, seed: int, processes: Processes) -> None:
    """Both workers die at once after the snapshot of step 1; an agent that starts only then commits it."""
    (tmp_path / "arenas").mkdir(mode=0o700)
    start_workers(processes, tmp_path, 1, 1, 1)
    for rank in range(WORLD):
        processes.wait(f"rank{rank}")
    start_agent(processes, tmp_path)
    request_stop(tmp_path / "arenas")
    assert processes.wait("agent") == 0
    assert assert_whole(tmp_path / "checkpoints") == 1


def test_a_scheduler_ends_an_agent_after_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signal goes to all processes of a job, and workers save once more."""
    with node(tmp_path) as made:
        serve, idle = made.agent.serve_once, count()

        def serve_once() -> bool:
            if not (is_busy := serve()) and next(idle) == 1:
                made.snapshot(1)
            elif is_committed(made.root, 1):
                made.close()
            return is_busy

        monkeypatch.setattr(made.agent, "serve_once", serve_once)
        made.agent.end_with_workers()
        assert made.agent.run(poll_s=0.0, grace_s=PATIENCE_S) == 0
    assert is_committed(made.root, 1)


def test_a_signal_of_a_scheduler_may_come_while_the_agent_starts(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        made.snapshot(1)
        agent = START_AGENT(made.arenas, made.root, grace_s=2 * PATIENCE_S)
        agent.send_signal(signal.SIGTERM)
    assert agent.wait(PATIENCE_S) == 0
    assert is_committed(made.root, 1)


def is_committed(root: Path, step: int) -> bool:
    return root.is_dir() and any(manifest.step == step for _, manifest in checkpoints(root))
