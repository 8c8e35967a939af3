"""Any process of a run may die while its launchers elect the rendezvous host in etcd: the others go on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moe_lightning.elastic.etcd import get, is_empty
from moe_lightning.elastic.membership import ElasticSettings, launcher_of, node_of, token_of, unpack_ids
from tests.chaos.test_launcher_elastic import Command, is_gone
from tests.etcd import EtcdCluster, needs_etcd
from tests.programs import ROOT

pytestmark = needs_etcd
LIMIT_S = ElasticSettings().silence_timeout_s + 1.0


@dataclass
class Run:
    """Launchers of one run, each with ranks of its own, around a cluster of etcd."""

    cluster: EtcdCluster
    folder: Path
    ranks: int
    stack: contextlib.ExitStack
    launchers: dict[str, Command] = field(default_factory=dict)
    seen: int = 0

    def start(self, node: str, num_nodes: int) -> None:
        options = ("--set", "membership=etcd", "--rdzv-endpoint", self.cluster.endpoints, "--rdzv-id", "run")
        here = ("--ranks", str(self.ranks), "--num-nodes", str(num_nodes), "--node", node)
        command = Command(self.folder, *options, *here, is_forked=True)
        self.stack.enter_context(command.program)
        self.launchers[node] = command

    def worlds(self) -> list[dict[str, Any]]:
        return next(iter(self.launchers.values())).worlds()

    def wait_for_world(self, size: int) -> list[dict[str, Any]]:
        """The next whole world of that size, by rank."""
        first = next(iter(self.launchers.values()))
        found = first.wait_for_world(size, after=self.seen)
        self.seen = len(self.worlds())
        return found

    @property
    def leader(self) -> str:
        """The node whose launcher hosts the rendezvous."""
        keys = [get("/moe-lightning/run/leader"), get("/moe-lightning/run/world")]
        leader, world = self.cluster.client().transact([], keys).found
        assert leader is not None
        assert world is not None
        token = json.loads(leader.value)["launcher"]
        ids = unpack_ids(json.loads(world.value)["members"])
        (node,) = {node_of(each) for each in ids if launcher_of(token_of(each)) == token}
        return node

    def kill(self, node: str) -> None:
        """Kill a launcher; the kernel kills its ranks."""
        self.launchers.pop(node).process.kill()

    def end_well(self) -> None:
        (self.folder / "stop").touch()
        for command in self.launchers.values():
            done = command.program.end()
            assert done.returncode == 0, done.stderr
        assert all(is_gone(world["pid"]) for world in self.worlds())


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with contextlib.ExitStack() as stack:

        def start(nodes: str, *, ranks: int = 1, members: int = 1) -> Run:
            cluster = stack.enter_context(EtcdCluster(tmp_path, members=members))
            cluster.wait()
            run = Run(cluster, tmp_path, ranks, stack)
            for node in nodes:
                run.start(node, len(nodes))
            return run

        yield start


def test_the_leader_is_killed(runs: Callable[..., Run]) -> None:
    """With its ranks: another launcher hosts the rendezvous, and the others go on."""
    run = runs("ab")
    first = run.wait_for_world(2)
    assert sorted(first[0]["nodes"]) == ["a", "b"]
    leader = run.leader
    killed = time.monotonic()
    run.kill(leader)
    (alone,) = run.wait_for_world(1)
    assert time.monotonic() - killed < LIMIT_S
    assert alone["nodes"] != [leader]
    assert "ended with its launcher" in alone["reason"]
    run.start(leader, 2)
    run.wait_for_world(2)
    run.end_well()


def test_etcd_is_away_while_nothing_fails(runs: Callable[..., Run]) -> None:
    run = runs("ab")
    run.wait_for_world(2)
    run.cluster.signal(0, signal.SIGKILL)
    one = next(iter(run.launchers.values()))
    one.program.wait_for(lambda: "cannot change its world before etcd answers" in one.program.err)
    assert len(run.worlds()) == run.seen, "the run goes on"
    run.cluster.start(0)
    run.cluster.wait()
    victim = run.worlds()[0]
    os.kill(victim["pid"], signal.SIGKILL)
    (alone,) = run.wait_for_world(1)
    assert f"rank {victim['rank']} on node" in alone["reason"]
    run.wait_for_world(2)
    run.end_well()


def test_all_launchers_are_killed_and_started_again(runs: Callable[..., Run]) -> None:
    run = runs("ab")
    run.wait_for_world(2)
    commands = list(run.launchers.values())
    for node in "ab":
        run.kill(node)
    for command in commands:
        command.process.wait()
    client = run.cluster.client()
    while client.transact([is_empty("/moe-lightning/run/launchers/")], []).succeeded is False:
        time.sleep(0.1)
    for node in "ab":
        run.start(node, 2)
    assert [world["reason"] for world in run.wait_for_world(2)] == [None, None], "a run of its own"
    run.end_well()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_any_process_may_die(seed: int, runs: Callable[..., Run]) -> None:
    """Three launchers with a rank each, three members of etcd, deaths and pauses in a random order."""
    rng, run = random.Random(seed), runs("abc", members=3)
    run.wait_for_world(3)
    for _ in range(4):
        match rng.choice(["rank", "launcher", "leader", "etcd", "paused etcd", "paused leader"]):
            case "rank":
                os.kill(rng.choice(run.worlds()[run.seen - 3 :])["pid"], signal.SIGKILL)
            case ("launcher" | "leader") as which:
                node = run.leader if which == "leader" else rng.choice(sorted(run.launchers))
                run.kill(node)
                run.wait_for_world(2)
                run.start(node, 3)
            case "etcd":
                member = rng.randrange(3)
                run.cluster.signal(member, signal.SIGKILL)
                os.kill(rng.choice(run.worlds()[run.seen - 3 :])["pid"], signal.SIGKILL)
                run.wait_for_world(3)
                run.cluster.start(member)
                continue
            case "paused etcd":
                member = rng.randrange(3)
                run.cluster.signal(member, signal.SIGSTOP)
                os.kill(rng.choice(run.worlds()[run.seen - 3 :])["pid"], signal.SIGKILL)
                run.wait_for_world(3)
                run.cluster.signal(member, signal.SIGCONT)
                continue
            case "paused leader":
                leader = run.launchers[run.leader].process.pid
                os.kill(leader, signal.SIGSTOP)
                time.sleep(rng.uniform(0.5, 4.0))  # around the lease
                os.kill(leader, signal.SIGCONT)
                os.kill(rng.choice(run.worlds()[run.seen - 3 :])["pid"], signal.SIGKILL)
        run.wait_for_world(3)
    run.end_well()
