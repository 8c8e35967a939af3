"""Any process of a run may die while its launchers elect the rendezvous host in etcd: the others go on."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moe_lightning.elastic.etcd import get, is_empty
from moe_lightning.elastic.etcd_rendezvous import _Term
from moe_lightning.elastic.membership import ElasticSettings, launcher_of, node_of, token_of
from moe_lightning.elastic.rendezvous_state import CurrentWorld
from tests.chaos.test_launcher_elastic import Command, is_gone
from tests.commands import SMALL_MODEL, WORDS, ForkedProgram, moe_train, run_script, write_words
from tests.etcd import EtcdCluster, needs_etcd
from tests.forks import PATIENCE_S
from tests.network.hosts import wait_for
from tests.network.trainings import COMPARED_STEPS, TOLERANCE, Step, set_pace, steps_in
from tests.network.trainings import SCRIPT as TRAINING_SCRIPT
from tests.parameters import soak
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
        command = self.command(*options, *here)
        self.stack.enter_context(command.program)
        self.launchers[node] = command

    def command(self, *options: str) -> Command:
        return Command(self.folder, *options, is_forked=True)

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
        assert world is not None
        token = json.loads(leader.value)["launcher"]
        ids = json.loads(world.value)["members"]
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


@pytest.mark.slow
def test_the_leader_is_paused_for_longer_than_its_lease(runs: Callable[..., Run]) -> None:
    """Its ranks count as lost after a fault, until it is continued."""
    run = runs("ab", ranks=2)
    first = run.wait_for_world(4)
    leader, client, key = run.leader, run.cluster.client(), get("/moe-lightning/run/leader")
    before = client.transact([], [key]).found
    os.kill(run.launchers[leader].process.pid, signal.SIGSTOP)
    wait_for(lambda: client.transact([], [key]).found not in (before, (None,)), PATIENCE_S)
    victim = next(each for each in first if each["nodes"][each["rank"]] != leader)
    os.kill(victim["pid"], signal.SIGKILL)
    two = run.wait_for_world(2)  # with the one that is started again
    assert leader not in {node for each in two for node in each["nodes"]}
    os.kill(run.launchers[leader].process.pid, signal.SIGCONT)
    four = run.wait_for_world(4)
    assert {each["pid"] for each in first} - {victim["pid"]} < {each["pid"] for each in four}
    run.end_well()


@pytest.mark.slow
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


@pytest.mark.slow
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


# ----------------------------------------------------------------------
# moe-train: two launchers with two ranks each, and the losses of a run that nobody disturbs.

STEPS = 40
RUN_NAME = f"etcd-{os.getpid()}"
TRAINING = (
    *(
        "model=llama_moe_tiny",
        f"run_name={RUN_NAME}",
        *SMALL_MODEL,
        *WORDS,
        "data.global_batch_size=8",
        "data.val_samples=4",
    ),
    *("logger=csv", "logger.csv.flush_logs_every_n_steps=1", "trainer.log_every_n_steps=1", "ranks=2"),
    *(f"trainer.max_steps={STEPS}", "callbacks=fault_recovery", "elastic.settings.join_window_s=0.3"),
    "elastic.check_health=false",  # one machine is both nodes, and is measured while ranks of the other compute
)


def be(node: str, dies: Path) -> None:
    """Name this process's machine, and kill it once, if the file is there, when it has written the record of a world
    that nobody knows of yet.
    """
    commit = _Term._commit

    def dying(term: _Term, world: CurrentWorld) -> bool:
        is_done = commit(term, world)
        with contextlib.suppress(FileNotFoundError):
            dies.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return is_done

    _Term._commit = dying  # type: ignore[method-assign]
    socket.gethostname = lambda: node


def losses(folder: Path) -> dict[int, float]:
    """The loss of every step, whoever wrote it."""
    found: dict[int, float] = {}
    for path in sorted(folder.glob(f"outputs/{RUN_NAME}/csv/*/metrics.csv")):
        for row in csv.DictReader(path.open()):
            if row.get("train/loss"):
                found[int(row["step"])] = float(row["train/loss"])
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_words(folder, 2000)
    ran = moe_train(folder, *TRAINING, "elastic.enabled=false", "ranks=1")
    assert ran.returncode == 0, ran.stderr
    return losses(folder)


@pytest.fixture
def _no_snapshots(tmp_path: Path) -> Iterator[None]:
    """A node that is lost leaves its own."""
    yield
    for name in (RUN_NAME, tmp_path.name):
        for path in Path("/dev/shm").glob(f"moe-lightning-{name}-*"):
            shutil.rmtree(path, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_snapshots")
@pytest.mark.parametrize("what", ["a rank", "the leader", "the leader between commit and announcement", "etcd"])
def test_moe_train_goes_on_after_a_death(what: str, tmp_path: Path, undisturbed: dict[int, float]) -> None:
    write_words(tmp_path, 2000)
    dies = tmp_path / "dies"
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(EtcdCluster(tmp_path, members=3 if what == "etcd" else 1))
        cluster.wait()
        launchers: dict[str, ForkedProgram] = {}

        def start(node: str) -> None:
            where = ("elastic.settings.membership=etcd", "elastic.rdzv_id=run", "elastic.num_nodes=2")
            endpoints = f"elastic.rdzv_endpoint='{cluster.endpoints}'"
            launchers[node] = stack.enter_context(
                ForkedProgram(
                    *("moe_lightning.cli.train", *TRAINING, *where, endpoints),
                    folder=tmp_path,
                    before=partial(be, node, dies),
                )
            )

        for node in "ab":
            start(node)
        launchers["a"].wait_for(lambda: max(losses(tmp_path), default=0) >= 5)
        leader = Run(cluster, tmp_path, 2, stack).leader
        other = "ab".replace(leader, "")
        (pid,) = re.findall(r"worker 1: (\d+)", launchers[other].err)
        match what:
            case "the leader":
                launchers.pop(leader).process.kill()
            case "the leader between commit and announcement":
                dies.touch()
                os.kill(int(pid), signal.SIGKILL)
                launchers.pop(leader).process.wait(PATIENCE_S)
            case _:
                if what == "etcd":
                    cluster.signal(0, signal.SIGKILL)
                os.kill(int(pid), signal.SIGKILL)
        if leader not in launchers:
            start(leader)
        for launcher in launchers.values():
            done = launcher.end()
            assert done.returncode == 0, done.stderr
    found = losses(tmp_path)
    assert found.keys() == undisturbed.keys()
    assert max(abs(found[step] - undisturbed[step]) for step in found) <= 1e-5
    assert list(tmp_path.glob(f"outputs/{RUN_NAME}/csv/*/recoveries.csv"))


# ----------------------------------------------------------------------
# Schedules: four ranks of two launchers that train, three members of etcd, deaths and pauses in a random order.


class Trained(Run):
    """Launchers of a training, whose ranks write a line for each step."""

    @property
    def diary(self) -> list[Step]:
        return steps_in(self.folder / f"diary-{socket.gethostname()}.jsonl")

    def command(self, *options: str) -> Command:
        return Command(self.folder, *options, is_forked=True, script=TRAINING_SCRIPT)

    def go_on(self) -> None:
        """Wait for a step of all four ranks in one world that is made from now on."""
        step = max((each.step for each in self.diary), default=0)

        def is_made() -> bool:
            made = [each for each in self.diary if each.step > step and each.size == 4]
            return any(len({each.rank for each in made if each.world == one.world}) == 4 for one in made[-8:])

        next(iter(self.launchers.values())).program.wait_for(is_made)

    def victim(self, rng: random.Random) -> int:
        """The process id of one of the ranks of the newest world."""
        newest = self.diary[-1].world
        return rng.choice(sorted({each.pid for each in self.diary if each.world == newest}))

    def disturb(self, rng: random.Random) -> None:
        """Let something happen to some process."""
        what = rng.choice(["rank", "launcher", "leader", "etcd", "paused etcd", "paused leader", "paused launcher"])
        match what:
            case "rank":
                os.kill(self.victim(rng), signal.SIGKILL)
            case "launcher" | "leader":
                node = self.leader if what == "leader" else rng.choice(sorted(self.launchers))
                self.kill(node)
                self.start(node, 2)
            case "etcd" | "paused etcd":
                member = rng.randrange(3)
                self.cluster.signal(member, signal.SIGKILL if what == "etcd" else signal.SIGSTOP)
                os.kill(self.victim(rng), signal.SIGKILL)
                self.go_on()
                if what == "etcd":
                    self.cluster.start(member)
                else:
                    self.cluster.signal(member, signal.SIGCONT)
            case "paused leader" | "paused launcher":
                leader = self.leader
                node = leader if what == "paused leader" else "ab".replace(leader, "")
                pid = self.launchers[node].process.pid
                os.kill(pid, signal.SIGSTOP)
                time.sleep(rng.uniform(0.5, 4.0))  # around the lease
                os.kill(self.victim(rng), signal.SIGKILL)
                time.sleep(rng.uniform(0.0, 2.0))
                os.kill(pid, signal.SIGCONT)
        self.go_on()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The loss of each step of the training alone."""
    folder = tmp_path_factory.mktemp("calm")
    (folder / "end").write_text(str(COMPARED_STEPS))
    done = run_script(TRAINING_SCRIPT, str(folder), variables={})
    assert done.returncode == 0, done.stderr
    return {step.step: step.loss for step in steps_in(folder / f"diary-{socket.gethostname()}.jsonl")}


@pytest.mark.slow
@pytest.mark.usefixtures("_no_snapshots")
@pytest.mark.parametrize("seed", [*range(12), *map(soak, range(12, 200))])
def test_any_process_may_die(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: dict[int, float]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    rng = random.Random(seed)
    set_pace(tmp_path, 0.1)
    with contextlib.ExitStack() as stack:
        run = Trained(stack.enter_context(EtcdCluster(tmp_path, members=3)), tmp_path, 2, stack)
        run.cluster.wait()
        for node in "ab":
            run.start(node, 2)
        run.go_on()
        for _ in range(3):
            run.disturb(rng)
        (tmp_path / "end").write_text(str(run.diary[-1].step + 5))
        for command in run.launchers.values():
            done = command.program.end()
            assert done.returncode == 0, done.stderr
    made = [step for step in run.diary if step.step <= COMPARED_STEPS]
    assert {step.step for step in made} == set(range(1, min(run.diary[-1].step, COMPARED_STEPS) + 1))
    assert max(abs(step.loss - calm[step.step]) for step in made) <= TOLERANCE
