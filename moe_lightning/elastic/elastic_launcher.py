"""Starts workers that survive each other's deaths, and starts dead ones again.

A dead worker is told to the others at once, with how it died; they go on in a new world while a fresh process takes
its place and waits to be let in. Nothing is asked of torchrun, which would kill the survivors.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from annotated_types import Interval
from torch.distributed.elastic.multiprocessing import SignalException

from moe_lightning.config import NonNegativeInt, PositiveInt, build_config, validated
from moe_lightning.elastic import processes
from moe_lightning.elastic.address import Address, interface_towards
from moe_lightning.elastic.clock import OwnClock
from moe_lightning.elastic.failure import Interrupted, RankFailure
from moe_lightning.elastic.launcher_link import LauncherLink
from moe_lightning.elastic.preemption import EXIT_PREEMPTED
from moe_lightning.elastic.processes import WORKER_MODULE, Process, RanksFailed, WorkerLogs
from moe_lightning.elastic.rendezvous_host import RendezvousHost
from moe_lightning.elastic.settings import ElasticSettings, ElasticTask, new_token
from moe_lightning.errors import ConfigurationError

_ELASTIC_POLL_S = 0.01
_MOST_REPEATS = 3  # of one crash in a row


@validated
@dataclass(kw_only=True)
class ElasticLauncher:
    """Runs `python -m module arguments...` in `num_ranks` workers of this machine, as long as one of them lives.

    Args:
        num_ranks: workers of this machine.
        log_dir: gets the output of all but the first worker; a worker started again has files of its own.
        settings: how long workers wait for whom.
        module: the workers' main module.
        max_restarts: workers started again in the whole run; one death more ends it.
        cool_down_s: from a death to the start of the next process in its place.
        lighthouse: "host:port" of `moe_lightning.elastic.rendezvous_host` for several machines; None hosts it here,
            where nobody else reaches it.
        secret_file: a copy of the file that the rendezvous host has made; with `lighthouse` only.
        num_nodes: machines that run this command; the first world waits for the workers of all.
        node: this machine's name as a failure domain; its host name, or "local" without a `lighthouse`.
        ranks_are_nodes: let every worker be a failure domain of its own, to try the loss of nodes on one machine.
        grace_s: how long workers may take to end before they are killed.
    """

    num_ranks: PositiveInt
    log_dir: Path
    settings: ElasticSettings = field(default_factory=ElasticSettings)
    module: str = WORKER_MODULE
    max_restarts: NonNegativeInt = 20
    cool_down_s: Annotated[float, Interval(ge=0, le=1e9)] = 1.0
    lighthouse: str | None = None
    secret_file: str | Path | None = None
    num_nodes: PositiveInt = 1
    node: str | None = None
    ranks_are_nodes: bool = False
    grace_s: float = 10.0

    def __post_init__(self) -> None:
        self.settings = build_config(ElasticSettings, self.settings, key="settings")
        if self.settings.min_ranks > self.num_ranks * self.num_nodes:
            raise ConfigurationError(
                f"min_ranks={self.settings.min_ranks} is above the {self.num_ranks * self.num_nodes} ranks that are "
                "started: lower it"
            )
        if self.lighthouse is None and self.num_nodes > 1:
            raise ConfigurationError(
                f"num_nodes={self.num_nodes} needs a lighthouse that all nodes reach: run "
                "`python -m moe_lightning.elastic.rendezvous_host` on a safe host and give its host:port"
            )
        if self.lighthouse is not None and self.secret_file is None:
            raise ConfigurationError(
                f"lighthouse={self.lighthouse} needs secret_file=FILE: copy the file that the rendezvous host has made "
                "to every machine"
            )

    def run(self, arguments: Sequence[str]) -> None:
        """Start the workers and return when all that live have ended well.

        Raises:
            RanksFailed: a user's mistake, an exception in the last worker, or more deaths than `max_restarts`.
            Interrupted: a signal ended the run, or a notice of preemption all workers; a second signal ends it at once.
            ConfigurationError: the lighthouse's address is wrong, or it does not answer while nobody trains here.
        """
        processes.append_to_outputs()
        with processes.restored_signal_handlers(), self._meeting_point() as (task, link):
            workers = _Workers(self, task, link, ("-m", self.module, *arguments))
            try:
                workers.run()
            except RanksFailed:
                workers.end(self.grace_s)
                raise
            except SignalException as stop:
                if stop.sigval == signal.SIGTERM and self.settings.notice_on_sigterm:
                    workers.ask_to_leave(self.grace_s)
                workers.end_on_signal(stop.sigval, self.grace_s)
                raise Interrupted(stop.sigval) from None
            finally:
                processes.ignore_signals()
                workers.end(0.0)

    @contextmanager
    def _meeting_point(self) -> Iterator[tuple[ElasticTask, LauncherLink]]:
        """What all workers are told, and this launcher's own connection."""
        with ExitStack() as stack:
            if self.lighthouse is None:
                host = stack.enter_context(RendezvousHost())
                address, secret_file, node = host.address, host.secret_file, "local"
            else:
                assert self.secret_file is not None
                address, secret_file = Address.parse(self.lighthouse), Path(self.secret_file).absolute()
                node = socket.gethostname()
            task = ElasticTask(
                address=str(address),
                secret_file=str(secret_file),
                node=self.node or node,
                expected=self.num_ranks * self.num_nodes,
                settings=self.settings,
            )
            yield task, stack.enter_context(closing(LauncherLink(address, secret_file, self.settings)))


@dataclass(kw_only=True)
class _Worker:
    """A process in its slot.

    Attributes:
        token: names it among the members.
        silent_since: when the others gave it up as silent; None while they did not.
    """

    process: Process
    logs: WorkerLogs
    token: str
    silent_since: float | None = None


class _Workers:
    """The workers of one run."""

    def __init__(
        self, launcher: ElasticLauncher, task: ElasticTask, link: LauncherLink, program: Sequence[str]
    ) -> None:
        self._launcher, self._task, self._link, self._program = launcher, task, link, program
        self._interface = interface_towards(Address.parse(task.address)) if launcher.lighthouse is not None else None
        self._clock = OwnClock()
        self._alone_since = 0.0
        self._running: dict[int, _Worker] = {}
        self._due: dict[int, float] = {}  # slot -> when it is started again
        self._began_ns = time.time_ns()
        self._starts = dict.fromkeys(range(launcher.num_ranks), 0)
        self._restarts = 0
        self._finished = 0
        self._world: frozenset[str] = frozenset()  # tokens of the last world
        self._crash: RankFailure | None = None  # the first since the last world
        self._last_signature, self._repeats = "", 0  # of crashes

    def run(self) -> None:
        """Until all that live have ended well."""
        for slot in self._starts:
            self._start(slot)
        while self._running or self._due:
            for slot, worker in list(self._running.items()):
                code = worker.process.poll()
                if code is not None:
                    del self._running[slot]
                    self._take_end(slot, worker, code)
            self._follow_world()
            if self._finished:
                self._let_finish()
            self._start_due()
            time.sleep(_ELASTIC_POLL_S)
        if not self._finished:
            raise Interrupted(signal.SIGTERM)  # all left on notice

    def _start_due(self) -> None:
        """Start again who is due, where there is a rendezvous host that would let them in.

        Raises:
            ConfigurationError: nobody runs here, and the host has not answered for too long.
        """
        now, link = self._clock.tick(), self._link
        if self._running or link.is_connected:
            self._alone_since = now
        limit = self._launcher.settings.rendezvous_timeout_s
        if now - self._alone_since > limit:
            raise ConfigurationError(
                f"no worker is left on this machine, and the rendezvous host at {self._task.address} has not answered "
                f"for {limit:g} s ({link.trouble}): see that it runs and can be reached, then give the same command "
                "again, which resumes"
            )
        for slot, due in list(self._due.items()):
            if time.monotonic() >= due and link.is_connected:
                del self._due[slot]
                self._start(slot)

    def ask_to_leave(self, grace_s: float) -> None:
        """Hand a notice of preemption on, and wait until the workers have handed over and left."""
        for worker in self._running.values():
            worker.process.terminate()
        deadline = time.monotonic() + grace_s
        while any(w.process.poll() is None for w in self._running.values()) and time.monotonic() < deadline:
            time.sleep(_ELASTIC_POLL_S)

    def end_on_signal(self, received: signal.Signals, grace_s: float) -> None:
        """End all that run as a signal asks."""
        processes.end_on_signal([worker.process for worker in self._running.values()], received, grace_s)

    def end(self, grace_s: float) -> None:
        """End all that run."""
        processes.end([worker.process for worker in self._running.values()], grace_s)

    def _start(self, slot: int) -> None:
        launcher = self._launcher
        self._starts[slot] += 1
        starts = self._starts[slot]
        name = f"rank{slot}" if starts == 1 else f"rank{slot}.{starts}"
        logs = WorkerLogs(launcher.log_dir, [name], terminal=0 if slot == 0 and starts == 1 else None)
        task = replace(
            self._task,
            node=f"{self._task.node}-{slot}" if launcher.ranks_are_nodes else self._task.node,
            slot=slot,
            starts=starts,
            birth_ns=self._began_ns + slot if starts == 1 else None,
            token=new_token(),
        )
        environment = {
            **processes.rank_environment(
                slot, local=launcher.num_ranks, world=task.expected, interface=self._interface
            ),
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),  # cut connections print stacks
            **task.to_environment(),
        }
        started = processes.start(self._program, {0: environment}, logs)
        self._running[slot] = _Worker(process=started[0], logs=logs, token=task.token)

    def _take_end(self, slot: int, worker: _Worker, code: int) -> None:
        """Tell the others of a death, and decide whether a fresh process takes the place."""
        processes.kill_orphans(worker.process)
        if code in (0, EXIT_PREEMPTED):
            self._finished += code == 0
            return
        failure = worker.logs.failure(0, code, called=slot)
        is_told = failure.kind == "death" and failure.time_s > 0  # by itself: of another's
        why = f" ({failure.message})" if failure.kind in ("mistake", "crash") or is_told else ""
        self._link.tell_death(worker.token, processes.how_it_ended(code) + why)
        if failure.kind == "mistake":
            raise RanksFailed(failure)
        if failure.kind == "crash":
            failure = self._count_crash(failure)
            self._crash = self._crash or failure
        if failure.kind == "peer" or (failure.kind == "crash" and not self._running):
            raise RanksFailed(self._crash or failure)  # it would come again
        if self._finished:
            return
        limit = self._launcher.max_restarts
        if self._restarts >= limit:
            raise RanksFailed(replace(failure, message=f"{failure.message}, after {limit} restarts (max_restarts)"))
        if failure.kind == "crash" and failure.details:
            print(failure.details, file=sys.stderr)
            if self._crash is failure:
                self._crash = replace(failure, details="")  # it has been shown
        self._restarts += 1
        self._due[slot] = time.monotonic() + self._launcher.cool_down_s
        print(
            f"moe-train: {failure.message}; started again in {self._launcher.cool_down_s:g} s "
            f"({self._restarts} of {self._launcher.max_restarts})",
            file=sys.stderr,
        )

    def _count_crash(self, failure: RankFailure) -> RankFailure:
        """The failure with its traceback only where that is new.

        Raises:
            RanksFailed: it has come so often in a row that it would come again.
        """
        is_known = bool(failure.signature) and failure.signature == self._last_signature
        self._last_signature, self._repeats = failure.signature, self._repeats + 1 if is_known else 1
        if not is_known:
            return failure
        failure = replace(failure, details="")
        if self._repeats < _MOST_REPEATS:
            return failure
        message = f"{failure.message}, {_MOST_REPEATS} times in the same way: see its traceback above"
        raise RanksFailed(replace(failure, message=message))

    def _follow_world(self) -> None:
        """Hear who is in it, and end a worker that the others gave up and that runs on without a word."""
        for message in self._link.read():
            match message:
                case {"t": "formed", "tokens": list(tokens)}:
                    self._world = frozenset(tokens)
                    self._mark(self._world, None)
                    self._crash = None
                case {"t": "arrived", "token": str(token)}:
                    self._mark({token}, None)
                case {"t": "expelled", "token": str(token)}:
                    self._mark({token}, time.monotonic())
        for worker in self._running.values():
            since = worker.silent_since
            if since is not None and time.monotonic() - since > self._launcher.settings.hang_timeout_s:
                if not _is_stopped(worker.process.pid):
                    worker.process.kill()
                worker.silent_since = None

    def _mark(self, tokens: frozenset[str] | set[str], silent_since: float | None) -> None:
        for worker in self._running.values():
            if worker.token in tokens:
                worker.silent_since = silent_since

    def _let_finish(self) -> None:
        """A worker ended well, so the training is done: nobody is started again, and who was not in the last world
        has nothing to wait for.
        """
        self._due.clear()
        if not self._world:
            return
        late = {slot for slot, worker in self._running.items() if worker.token not in self._world}
        processes.end([self._running.pop(slot).process for slot in late], 0.0)


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal: it may go on, and come back as a new member."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
