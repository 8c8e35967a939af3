"""Launchers of several machines relay the messages of their workers: one connection each, whatever dies or stops."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.elastic.rendezvous_state import RECONNECT_S
from tests.chaos.test_launcher_elastic import Command
from tests.network.hosts import wait_for
from tests.programs import ROOT

SILENCE_S = 3.0
PATIENCE_S = 60.0


@dataclass
class Run:
    """Two launchers with two ranks each."""

    folder: Path
    stack: contextlib.ExitStack
    host: RendezvousServer
    nodes: list[Command] = field(default_factory=list)

    def start(self, name: str) -> None:
        options = ("--rdzv-endpoint", str(self.host.address), "--secret-file", str(self.host.secret_file))
        options += ("--log-dir", str(self.folder / f"logs-{name}"), "--ranks", "2", "--num-nodes", "2", "--node", name)
        command = Command(self.folder, *options, "--set", f"silence_timeout_s={SILENCE_S}", is_forked=True)
        self.stack.enter_context(command.program)
        self.nodes.append(command)

    def restart_host(self) -> None:
        self.host.close()
        self.host = self.stack.enter_context(
            RendezvousServer(bind=str(self.host.address), secret_file=self.host.secret_file)
        )

    def wait_for_connections(self, connections: int, carried: int) -> None:
        server = self.host._server
        wait_for(
            lambda: (len(server._connections), len(server._carriers)) == (connections, carried),
            PATIENCE_S,
            lambda: f"{len(server._connections)} connections carry {len(server._carriers)} more",
        )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(RendezvousServer(bind="127.0.0.1:0", secret_file=tmp_path / "secret"))
        made = Run(tmp_path, stack, host)
        stack.callback(lambda: made.host.close())
        for name in "ab":
            made.start(name)
        yield made


def test_a_rank_and_the_host_are_killed(run: Run) -> None:
    first = run.nodes[0].wait_for_world(4)
    run.wait_for_connections(2, 4)
    run.restart_host()
    run.wait_for_connections(2, 4)
    server = run.host._server
    wait_for(lambda: server._clock.now > RECONNECT_S, PATIENCE_S)  # no world forms before
    assert len(run.nodes[0].worlds()) == 4, "no rank has left its world"
    victim = first[3]
    os.kill(victim["pid"], signal.SIGKILL)
    three = run.nodes[0].wait_for_world(3, after=4)
    assert {each["pid"] for each in three} == {each["pid"] for each in first} - {victim["pid"]}
    assert {each["reason"] for each in three} == {f"rank 3 on node {victim['nodes'][3]} was killed by SIGKILL"}
    run.nodes[0].wait_for_world(4, after=7)
    run.wait_for_connections(2, 4)
    for node in run.nodes:
        node.end_well()


@pytest.mark.slow
def test_a_launcher_is_stopped_for_longer_than_a_member_may_be_silent(run: Run) -> None:
    """Its ranks train on while nothing fails. After a fault they count as lost, until it is continued."""
    first = run.nodes[0].wait_for_world(4)
    stopped = time.monotonic()
    os.kill(run.nodes[1].process.pid, signal.SIGSTOP)
    wait_for(lambda: time.monotonic() - stopped > SILENCE_S + 1.0, PATIENCE_S)
    assert len(run.nodes[0].worlds()) == 4, "nobody has been evicted"
    victim = next(each for each in first if each["nodes"][each["rank"]] == "a")
    os.kill(victim["pid"], signal.SIGKILL)
    two = run.nodes[0].wait_for_world(2, after=4)  # with the one that is started again
    assert {node for each in two for node in each["nodes"]} == {"a"}
    os.kill(run.nodes[1].process.pid, signal.SIGCONT)
    four = run.nodes[0].wait_for_world(4, after=4)
    assert {each["pid"] for each in first} - {victim["pid"]} < {each["pid"] for each in four}
    for node in run.nodes:
        node.end_well()
