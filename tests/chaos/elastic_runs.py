"""Elastic trainings of small models on real processes that a test may kill: their host, and what they left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from moe_lightning.checkpoint.arena import arenas_name
from moe_lightning.checkpoint.directory import claim
from moe_lightning.elastic.connection import LauncherClient
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from tests.agents import fork_agent
from tests.chaos.elastic_worker import Hold, Kill, checkpoints_of, gate_of, worker_main
from tests.distributed.harness import run_pooled, run_ranks
from tests.forks import PATIENCE_S, fork, kill, wait_until

__all__ = ["SETTINGS", "ElasticRun", "Hold", "Kill", "assert_same_losses", "elastic_run", "finish", "reference"]

SETTINGS = ElasticSettings(
    heartbeat_timeout_s=0.5, silence_timeout_s=3.0, hang_timeout_s=12.0, join_timeout_s=60.0, join_window_s=0.1
)
_MEMORY = Path("/dev/shm")
_POLL_S = 0.02


@dataclass
class ElasticRun:
    """A host and its workers.

    Attributes:
        folder: what the workers leave.
        expected: workers of the first world.
        steps: of the training.
        options: for `train_elastically`.
        host: that the workers meet at.
        link: to say who died, as a launcher does; without, the others must find out.
        workers_a_node: consecutive workers that share a node, and with it memory.
        stores_late: let agents write to storage only when training ends.
        processes: the newest of each worker.
    """

    folder: Path
    expected: int
    steps: int
    options: dict[str, Any]
    host: RendezvousServer
    link: LauncherClient | None = None
    workers_a_node: int = 1
    stores_late: bool = False
    settings: ElasticSettings = SETTINGS
    processes: dict[int, BaseProcess] = field(default_factory=dict)
    _starts: dict[int, int] = field(default_factory=dict)
    _tokens: dict[int, str] = field(default_factory=dict)
    _agents: dict[str, BaseProcess] = field(default_factory=dict)
    _run: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def saves(self) -> bool:
        """Whether snapshots are taken."""
        return self.options.get("saving") is not None

    def start(self, worker: int) -> None:
        """Start a worker, for the first time or again, with an agent for its node."""
        if self.saves:
            self._start_agent(worker)
        self._starts[worker] = self._starts.get(worker, 0) + 1
        task = ElasticTask(
            address=str(self.host.address),
            secret_file=str(self.host.secret_file),
            node=self.node(worker),
            slot=worker,
            expected=self.expected,
            starts=self._starts[worker],
            settings=self.settings,
        )
        self._tokens[worker] = task.token
        arguments = (worker, self.expected, task.to_environment(), str(self.folder), self.steps, self.options)
        self.processes[worker] = fork(worker_main, *arguments)

    def node(self, worker: int) -> str:
        """The name of a worker's node."""
        return f"node{worker // self.workers_a_node}"

    def _start_agent(self, worker: int) -> None:
        """Fork the node's agent, which a worker would start by importing everything anew."""
        node = self.node(worker)
        if node in self._agents and self._agents[node].is_alive():
            return
        root = checkpoints_of(self.folder)
        claim(root, self._run)
        self.arenas(worker).mkdir(mode=0o700, exist_ok=True)
        gate = gate_of(self.folder) if self.stores_late else None
        self._agents[node] = fork_agent(self.arenas(worker), root, gate=gate)

    def arenas(self, worker: int) -> Path:
        """The memory of a worker's node."""
        named = arenas_name("chaos", self._run, self.node(worker), checkpoints_of(self.folder))
        return _MEMORY / f"moe-lightning-{named}"

    def lose_node(self, worker: int) -> None:
        """What a node takes with it, beside its worker: the agent and the arenas."""
        agent = self._agents.pop(self.node(worker), None)
        if agent is not None:
            kill([agent])
        if checkpoints_of(self.folder).exists():  # otherwise nobody made arenas
            shutil.rmtree(self.arenas(worker), ignore_errors=True)

    def signal(self, worker: int, number: int) -> None:
        """Send a signal to a worker."""
        pid = self.processes[worker].pid
        assert pid is not None
        os.kill(pid, number)

    def reap(self, workers: Collection[int]) -> dict[int, int]:
        """Exit codes of those workers that have ended; deaths are told to the others."""
        codes = {w: code for w in workers if (code := self.processes[w].exitcode) is not None}
        for worker in (w for w, code in codes.items() if code and w in self._tokens):
            if self.link is not None:
                self.link.report_death(self._tokens.pop(worker), "died")
        return codes

    def supervise(
        self,
        *,
        restart: Collection[int] = (),
        lose: Collection[int] = (),
        together: bool = False,
        after: int = 0,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        """Play the launcher until all that live have ended well.

        Args:
            restart: workers that are started again whenever they are killed.
            lose: workers whose node's memory goes with them.
            together: only start them again when none lives any more.
            after: only start them again when the others have made this step, at which a `Hold` keeps them.
        """
        deadline = time.monotonic() + timeout_s
        alive, due = set(self.processes), set()
        while alive:
            assert time.monotonic() < deadline, f"workers {sorted(alive)} did not end: {self.words()}"
            for worker, code in self.reap(alive).items():
                alive.discard(worker)
                if code == 0:
                    continue
                assert code < 0, f"worker {worker} ended with {code}: {self.words()}"
                if worker in lose:
                    self.lose_node(worker)
                if worker in restart:
                    due.add(worker)
            if due and not (together and alive) and max(self.losses(), default=0) >= after:
                for worker in sorted(due):
                    self.start(worker)
                alive |= due
                due = set()
            if any(self.processes[w].exitcode == 0 for w in self.processes):
                deadline = self._let_go(alive, deadline)
            time.sleep(_POLL_S)
        assert any(p.exitcode == 0 for p in self.processes.values()), self.words()

    def _let_go(self, alive: set[int], deadline: float) -> float:
        """The run is over: those that were started too late to join it have nobody to train with."""
        for worker in list(alive):
            if self._starts[worker] > 1 and not self.has_joined(worker):
                kill([self.processes[worker]])
                alive.discard(worker)
        return deadline

    def has_joined(self, worker: int) -> bool:
        """Whether the worker's present process has come into a world."""
        pid = self.processes[worker].pid
        return any(line["pid"] == pid for line in self.recoveries(worker))

    def words(self) -> str:
        """What workers left as their last word."""
        return "\n".join(f"{p.name}: {p.read_text()[-2500:]}" for p in sorted(self.folder.glob("error-*"))) or "no word"

    # ------------------------------------------------------------------ what they left

    def kills_done(self) -> int:
        """How many kills of the schedule have happened."""
        return len(list(self.folder.glob("kill-*")))

    def losses(self) -> dict[int, float]:
        """The loss of every step, from all diaries; those of one step must agree."""
        found: dict[int, float] = {}
        for path in sorted(self.folder.glob("diary-*.jsonl")):
            for step, loss, _, _ in _lines(path):
                assert abs(found.setdefault(step, loss) - loss) < 1e-5, (step, path.name)
        return found

    def wait_for_step(self, step: int) -> None:
        """Until somebody has made it."""
        wait_until(lambda: max(self.losses(), default=0) >= step, self.words)

    def validations(self) -> dict[int, float]:
        """step -> loss of the validation after it."""
        return {step: loss for path in self.folder.glob("validations-*.jsonl") for step, loss in _lines(path)}

    def epochs(self) -> dict[int, int]:
        """epoch -> step at which it ended."""
        return {epoch: step for path in self.folder.glob("epochs-*.jsonl") for epoch, step in _lines(path)}

    def world_sizes(self) -> dict[int, int]:
        """step -> ranks that made it, at its last run."""
        made = [line for path in self.folder.glob("diary-*.jsonl") for line in _lines(path)]
        return {step: size for step, _, size, _ in sorted(made, key=lambda line: line[3])}

    def recoveries(self, worker: int) -> list[dict[str, Any]]:
        """The recoveries of a worker, those of its dead processes too."""
        path = self.folder / f"recoveries-{worker}.jsonl"
        return list(_lines(path)) if path.exists() else []

    def reports(self) -> list[dict[str, Any]]:
        """Reports of all recoveries of ranks that were in the world before, in time order."""
        lines = [line["report"] for worker in self.processes for line in self.recoveries(worker)]
        return sorted(lines, key=lambda report: report["began_at"])

    def result(self, worker: int) -> dict[str, Any]:
        return json.loads((self.folder / f"result-{worker}.json").read_text())  # type: ignore[no-any-return]

    def counts(self) -> dict[int, list[list[int]]]:
        """step -> assignments of each expert of each layer, as they were when the step was last made."""
        found: dict[int, tuple[float, list[list[int]]]] = {}
        for path in self.folder.glob("states-*.jsonl"):
            for line in _lines(path):
                if "counts" in line and line["time"] >= found.get(line["step"], (0.0,))[0]:
                    found[line["step"]] = (line["time"], line["counts"])
        return {step: counts for step, (_, counts) in sorted(found.items())}

    def units(self) -> set[str]:
        """Names of all units of state that ranks had."""
        return {
            unit for path in self.folder.glob("states-*.jsonl") for line in _lines(path) for unit in line["digests"]
        }

    def assert_replicas_equal(self) -> int:
        """Law L3 after every step and recovery of every world; the number of comparisons."""
        digests: dict[tuple[str, int, str], str] = {}
        compared = 0
        for path in self.folder.glob("states-*.jsonl"):
            for line in _lines(path):
                for unit, digest in line["digests"].items():
                    key = (line["world"], line["step"], unit)
                    compared += key in digests
                    assert digests.setdefault(key, digest) == digest, (path.name, *key)
        return compared


@contextlib.contextmanager
def elastic_run(
    folder: Path,
    *,
    workers: int,
    steps: int,
    tells: bool = True,
    workers_a_node: int = 1,
    stores_late: bool = False,
    settings: ElasticSettings = SETTINGS,
    **options: Any,
) -> Iterator[ElasticRun]:
    """Start the workers of a run; whatever lives at the end is killed, and its memory freed."""
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(RendezvousServer())
        link = LauncherClient(host.address, host.secret_file, settings) if tells else None
        if link is not None:
            stack.enter_context(contextlib.closing(link))
        run = ElasticRun(
            folder=folder,
            expected=workers,
            steps=steps,
            options=options,
            host=host,
            link=link,
            workers_a_node=workers_a_node,
            stores_late=stores_late,
            settings=settings,
        )
        try:
            for worker in range(workers):
                run.start(worker)
            yield run
        finally:
            kill(run.processes.values())
            for worker in run.processes:
                run.lose_node(worker)


def finish(run: ElasticRun, workers: Sequence[int], timeout_s: float = PATIENCE_S) -> None:
    """Wait until these workers have ended well."""
    deadline = time.monotonic() + timeout_s
    while len(codes := run.reap(workers)) < len(workers) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for worker in workers:
        assert worker in codes, f"worker {worker} has not ended in {timeout_s:g} s: {run.words()}"
        assert codes[worker] == 0, f"worker {worker} ended with {codes[worker]}: {run.words()}"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """By step."""

    training: dict[int, float]
    validation: dict[int, float]


def reference(steps: int, *, ranks: int = 1, **options: Any) -> Losses:
    """The losses of a run that nobody disturbs, of one process by default.

    One without options serves for all shorter ones: all their steps are in the warm-up.
    """
    made = max(steps, _PLAIN_STEPS) if ranks == 1 and not options else steps
    key = repr((made, ranks, sorted(options.items())))
    if key not in _REFERENCES:
        run = run_ranks if "callbacks" in options else run_pooled  # callbacks replace what they like
        with tempfile.TemporaryDirectory() as name:
            run(ranks, _train_alone, name, made, options)
            _REFERENCES[key] = Losses(
                training={step: loss for step, loss, _, _ in _lines(Path(name) / "diary-0.jsonl")},
                validation=dict(_lines(Path(name) / "validations-0.jsonl")),
            )
    found = _REFERENCES[key]
    return replace(found, training={step: loss for step, loss in found.training.items() if step <= steps})


_PLAIN_STEPS = 31
"""As many as any test of the default run compares."""
_REFERENCES: dict[str, Losses] = {}


def _train_alone(rank: int, world_size: int, folder: str, steps: int, options: dict[str, Any]) -> None:
    from tests.chaos.elastic_worker import train_elastically

    train_elastically(rank, world_size, Path(folder), steps, **options)


def assert_same_losses(
    run: ElasticRun, expected: Losses, tolerance: float = 1e-5, *, has_replicas: bool = False
) -> None:
    """Law L1: every step and every validation was made, and its loss is that of a run without faults.

    Args:
        has_replicas: experts had some, which were alike (law L3).
    """
    for found, wanted in ((run.losses(), expected.training), (run.validations(), expected.validation)):
        assert found.keys() == wanted.keys(), sorted(wanted.keys() ^ found.keys())
        wrong = {step: (loss, wanted[step]) for step, loss in found.items() if abs(loss - wanted[step]) > tolerance}
        assert not wrong, wrong
    assert not has_replicas or run.assert_replicas_equal() > 0


def _lines(path: Path) -> Iterator[Any]:
    """The JSON lines of a file; the last one may be cut off by a kill."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
