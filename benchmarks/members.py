"""moe-bench members: cost of the rendezvous service for worlds of many ranks.

A rendezvous host of its own process serves simulated launchers, whose connections carry the messages of their members
(`benchmarks/members_clients.py`), several per process, over loopback. They share this machine's cores with the host, so
seconds depend on both; the host's processor time does not.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from benchmarks.measuring import goal
from benchmarks.members_clients import Plan, Report, idle, serve
from moe_lightning.arguments import Count, OutputFile, option
from moe_lightning.cli.short_training import machine
from moe_lightning.config import Seconds
from moe_lightning.errors import ConfigurationError
from moe_lightning.text_table import table

SCENARIOS = ("form", "steady", "lost", "back", "crowd", "stopped", "restart")
_GOALS_S = {"form": 5.0, "lost": 1.0, "restart": 5.0}
_GOAL_MB = 50.0
_GOAL_CORE = 0.1
_STOP_S = 3.0
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    members: list[Annotated[int, Interval(ge=2, le=100_000)]] = option("ranks", [64, 256, 1024])
    per_node: Count = option("ranks of a node", 8)
    processes: Count = option("processes of simulated clients", 2)
    scenarios: list[str] = option("what to measure after the first world", SCENARIOS, choices=SCENARIOS)
    rounds: Count = option("lost nodes in turn, and restarts of the host", 3)
    seconds: Seconds = option("of the steady state", 10.0)
    unauthenticated: Count = option("connections of the crowd that never authenticate", 500)
    patience: Seconds = option("longest wait for one world", 120.0)
    json: OutputFile | None = option("where to leave all measurements", None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measurement of one scenario.

    Attributes:
        members: ranks of the world.
        scenario: one of `SCENARIOS`.
        seconds: until all clients knew the result.
        megabytes: sent to and by all clients.
        host_cpu_s: processor time of the host meanwhile.
        clients_cpu_s: that of all processes of clients.
        evicted: members that were evicted although none had been stopped or lost.
        connections: made meanwhile.
        note: figures that only this scenario has.
    """

    members: int
    scenario: str
    seconds: float
    megabytes: float
    host_cpu_s: float
    clients_cpu_s: float
    evicted: int
    connections: int
    note: str = ""


def run(options: Options) -> int:
    """Measure, print a table and the goals beside what was reached; 0 on success."""
    for members in options.members:
        if members % options.per_node or members < 2 * options.per_node:
            raise ConfigurationError(
                f"--members {members} must be a multiple of --per-node {options.per_node}, of two nodes at least"
            )
    print(f"{machine()}; {options.processes} processes of clients share the cores with the host", flush=True)
    rows: list[Row] = []
    for members in options.members:
        with tempfile.TemporaryDirectory(prefix="moe-members-") as folder:
            rows += _measure(members, options, Path(folder))
    print(_table(rows))
    for line in _goals([row for row in rows if row.members == max(options.members)]):
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


def _table(rows: list[Row]) -> str:
    names = ("members", "scenario", "s", "MB", "host cpu s", "of a core", "clients cpu s", "evicted", "connections", "")
    return table(
        names,
        [
            (
                row.members,
                row.scenario,
                f"{row.seconds:.2f}",
                f"{row.megabytes:.1f}",
                f"{row.host_cpu_s:.2f}",
                f"{row.host_cpu_s / row.seconds:.0%}",
                f"{row.clients_cpu_s:.2f}",
                row.evicted,
                row.connections,
                row.note,
            )
            for row in rows
        ],
    )


def _goals(rows: list[Row]) -> Iterator[str]:
    """Yield a line for each goal of a world of 4,096 ranks."""
    for scenario, most in _GOALS_S.items():
        worst = [row.seconds for row in rows if row.scenario == scenario]
        if worst:
            yield goal(f"{scenario} of {rows[0].members} members", max(worst), most, "{:.2f} s")
    for row in rows:
        if row.scenario == "form":
            yield goal("sent for the first world", row.megabytes, _GOAL_MB, "{:.1f} MB")
        if row.scenario == "steady":
            yield goal("steady state of the host", row.host_cpu_s / row.seconds, _GOAL_CORE, "{:.2f} of a core")
    yield goal("evictions in error", sum(row.evicted for row in rows), 0, "{:.0f}")


class Host:
    """Rendezvous host in a process of its own.

    Args:
        folder: for its secret.

    Attributes:
        address: for clients; the same after a restart.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.address = folder, "127.0.0.1:0"
        self._ended_cpu_s = 0.0
        self.start()

    @property
    def secret_file(self) -> Path:
        """File with the run's secret."""
        return self._folder / "secret"

    def start(self) -> None:
        """Start it, again at the address that it had, and wait until it listens."""
        command = [sys.executable, "-m", "moe_lightning.elastic.rendezvous_host", "--bind", self.address]
        with (self._folder / "host.err").open("ab") as err:
            self._process = subprocess.Popen(
                [*command, "--secret-file", str(self.secret_file)], stdout=subprocess.PIPE, stderr=err, text=True
            )
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split()
        if words[:2] != ["listening", "on"]:
            raise ConfigurationError(f"the host did not start: {(self._folder / 'host.err').read_text()[-500:]}")
        self.address = words[2].rstrip(",")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a lost machine would."""
        self._ended_cpu_s = self.cpu_s()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def cpu_s(self) -> float:
        """Processor time of it and of those before it."""
        with suppress(OSError):
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return self._ended_cpu_s + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return self._ended_cpu_s


class Clients:
    """Processes of simulated clients.

    Args:
        plan: see there.
        processes: number of them; node n belongs to process n modulo it.
        patience_s: longest wait for a state of them.
    """

    def __init__(self, plan: Plan, processes: int, patience_s: float) -> None:
        self.plan, self._patience_s = plan, patience_s
        self._pipes: list[Connection] = []
        self._processes = []
        self._requests = 0
        self._reports = [Report() for _ in range(processes)]
        for _ in range(processes):
            mine, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=serve, args=(plan, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.refresh()

    @property
    def total(self) -> Report:
        """Sum over all processes, of their last reports."""
        return sum(self._reports[1:], self._reports[0])

    def start(self, nodes: range) -> None:
        """Start the members of these nodes."""
        for index, pipe in enumerate(self._pipes):
            pipe.send(("start", [node for node in nodes if node % len(self._pipes) == index]))

    def lose(self, node: int, *, is_whole: bool = False) -> None:
        """Kill all members of a node; its launcher, too, if the node is lost as a whole."""
        self._pipes[node % len(self._pipes)].send(("lose", node, is_whole))

    def admit(self) -> None:
        """Let rank 0 break its world for newcomers."""
        for pipe in self._pipes:
            pipe.send(("admit",))

    def refresh(self) -> Report:
        """Return the sum of a new report of each process."""
        self._requests += 1
        for index, pipe in enumerate(self._pipes):
            pipe.send(("report", self._requests))
            while self._reports[index].answers < self._requests:
                self._reports[index] = pipe.recv()
        return self.total

    def wait(self, is_reached: Callable[[Report], bool], what: str) -> float:
        """Return the time at which the clients reached a state.

        Raises:
            ConfigurationError: they did not within the patience.
        """
        deadline = time.monotonic() + self._patience_s
        while not is_reached(self.total):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ConfigurationError(f"{what} did not happen within {self._patience_s:g} s: {self.total}")
            wait(self._pipes, min(remaining, 0.5))
            self._read()
        return self.total.at

    def _read(self) -> None:
        for index, pipe in enumerate(self._pipes):
            while pipe.poll():
                self._reports[index] = pipe.recv()

    def close(self) -> None:
        """End all processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with suppress(BrokenPipeError):
                pipe.send(("end",))
            process.join(10.0)
            if process.is_alive():
                process.kill()
            pipe.close()


class Measurement:
    """Host and clients of one size, and the rows that they yield."""

    def __init__(self, members: int, options: Options, host: Host, clients: Clients) -> None:
        self.members, self.options, self.host, self.clients = members, options, host, clients
        self.rows: list[Row] = []
        self._nodes = members // options.per_node
        self._last = range(self._nodes - 1, self._nodes)  # the node that is lost
        self._world = 0

    def run(self) -> None:
        """Measure all scenarios, in an order in which each finds a world of all members."""
        self.form()
        if "steady" in self.options.scenarios:
            self.steady()
        for number in range(self.options.rounds if {"lost", "back"} & set(self.options.scenarios) else 0):
            last = self._nodes - 1 - number % self._nodes
            self._last = range(last, last + 1)
            self.lost()
            self.back()
        for scenario in ("crowd", "stopped"):
            if scenario in self.options.scenarios:
                getattr(self, scenario)()
        for _ in range(self.options.rounds if "restart" in self.options.scenarios else 0):
            self.restart()

    def form(self) -> None:
        """All clients connect at once; the first world forms."""
        with self._row("form") as done:
            self.clients.start(range(self._nodes))
            done["seconds"] = self._wait_for_world(self.members)

    def steady(self) -> None:
        """Members send heartbeats and steps."""
        with self._row("steady"):
            time.sleep(self.options.seconds)

    def lost(self) -> None:
        """The launcher of a node reports its members dead; the others form a world."""
        with self._row("lost") as done:
            self.clients.lose(self._last[0])
            done["seconds"] = self._wait_for_world(self.members - self.options.per_node)

    def back(self) -> None:
        """The lost node's members come back, and are admitted as soon as one of the others knows of them."""
        with self._row("back") as done:
            began = time.monotonic()
            self.clients.start(self._last)
            self._wait_for_newcomers()
            done["note"] = f"of them {time.monotonic() - began:.2f} s until the others know of it"
            done["seconds"] = self._admit(began)

    def crowd(self) -> None:
        """A lost node comes back while unauthenticated connections fill all places for such."""
        mine, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(
            target=idle, args=(self.host.address, self.options.unauthenticated, theirs), daemon=True
        )
        self.clients.lose(self._last[0], is_whole=True)
        self._wait_for_world(self.members - self.options.per_node)
        process.start()
        try:
            time.sleep(_STOP_S)
            with self._row("crowd") as done:
                began = time.monotonic()
                self.clients.start(self._last)
                done["seconds"] = self._wait_for_clients() - began
                mine.send("end")
                done["note"] = f"{mine.recv()} unauthenticated connections in all"
        finally:
            process.join(10.0)
            if process.is_alive():
                process.kill()
            mine.close()
        self._wait_for_newcomers()
        self._admit(time.monotonic())

    def stopped(self) -> None:
        """The host is stopped for a while, and continued."""
        with self._row("stopped"):
            self.host.send(signal.SIGSTOP)
            time.sleep(_STOP_S)
            self.host.send(signal.SIGCONT)
            time.sleep(_STOP_S)
        self._wait_for_clients()

    def restart(self) -> None:
        """The host is killed and started again; all clients reconnect."""
        self.host.kill()
        self.clients.wait(lambda report: report.registered == 0, "the loss of the host")
        self.host.start()
        began = time.monotonic()
        with self._row("restart") as done:
            done["seconds"] = self._wait_for_clients() - began

    def _wait_for_clients(self) -> float:
        """Return the time at which all clients were registered."""
        count = self.members + self._nodes
        return self.clients.wait(lambda report: report.registered == report.clients == count, "a connection of all")

    def _wait_for_newcomers(self) -> None:
        self.clients.wait(lambda report: report.waiting == self.options.per_node, "word of the newcomers")

    def _admit(self, began: float) -> float:
        """Form a world with the newcomers; return the seconds since then."""
        self.clients.admit()
        waited = time.monotonic() - began
        return waited + self._wait_for_world(self.members)

    def _wait_for_world(self, size: int) -> float:
        """Return the seconds from now until all clients are in one new world of this size."""
        began, former = time.monotonic(), self._world

        def worlds(report: Report) -> list[tuple[int, int]]:
            return [(number, count) for number, count in report.worlds.items() if count > 0]

        at = self.clients.wait(
            lambda report: (
                [count for number, count in worlds(report) if number > former] == [size] and len(worlds(report)) == 1
            ),
            f"a world of {size}",
        )
        self._world = worlds(self.clients.total)[0][0]
        return at - began

    @contextmanager
    def _row(self, scenario: str) -> Iterator[dict[str, Any]]:
        """Add a row with what is measured in the block; "seconds" is the block's length unless it is given."""
        before, cpu_s, began = self.clients.refresh(), self.host.cpu_s(), time.monotonic()
        given: dict[str, Any] = {}
        yield given
        given.setdefault("seconds", time.monotonic() - began)
        after = self.clients.refresh()
        sent = after.sent + after.received - before.sent - before.received
        row = Row(
            members=self.members,
            scenario=scenario,
            megabytes=sent / 1e6,
            host_cpu_s=self.host.cpu_s() - cpu_s,
            clients_cpu_s=after.cpu_s - before.cpu_s,
            evicted=after.evicted - before.evicted,
            connections=after.connections - before.connections,
            **given,
        )
        self.rows.append(row)
        print(f"{self.members} members, {scenario}: {row.seconds:.2f} s", file=sys.stderr, flush=True)


def _measure(members: int, options: Options, folder: Path) -> list[Row]:
    """Return the rows of one size; after a scenario that does not end those before it."""
    host = Host(folder)
    try:
        plan = Plan(
            address=host.address, secret_file=str(host.secret_file), expected=members, per_node=options.per_node
        )
        clients = Clients(plan, options.processes, options.patience)
        measurement = Measurement(members, options, host, clients)
        try:
            measurement.run()
        except ConfigurationError as error:
            print(f"{members} members: {error}", flush=True)
        finally:
            clients.close()
    finally:
        host.kill()
    return measurement.rows
