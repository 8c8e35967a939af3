"""Launchers of worker processes: `LocalLauncher` for a fixed number of ranks, `ElasticLauncher` with restarts.

Workers are sessions of their own: a Ctrl-C reaches the launcher alone, which passes it on. A worker that loses its
launcher is killed by the kernel. Ranks of a fixed run meet in a folder that only their user can enter, so no other user
can take a rank's place; the launcher removes it. The elastic launcher reports a dead worker to the others at once, with
how it died; they go on in a new world, while a new process takes its place and joins.

Lightning's own launchers are not used: they kill the survivors of a failure from inside rank 0, and start the user's
command line once more. torchrun kills the survivors, too.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import Interval
from torch.distributed.elastic.multiprocessing import SignalException

from moe_lightning.config import NonNegativeInt, PositiveInt, build_config, validated
from moe_lightning.cores import usable_cores
from moe_lightning.elastic.connection import LauncherClient
from moe_lightning.elastic.etcd import EtcdAccess
from moe_lightning.elastic.etcd_rendezvous import EtcdRendezvous
from moe_lightning.elastic.health import check_node, write_health
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask, worker_token
from moe_lightning.elastic.preemption import EXIT_PREEMPTED, EXIT_STOPPED
from moe_lightning.elastic.protocol import Address, ProcessClock, interface_towards, loopback_of_name, read_secret
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.elastic.worker import (
    FAILURE_FILE_VARIABLE,
    KILLED,
    LAUNCHER_PID_VARIABLE,
    TERMINAL_VARIABLE,
    Interrupted,
    RankFailure,
    outlive_readers,
    read_failure,
)
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import PrivateFolder
from moe_lightning.parallel.context import STORE_VARIABLE, loopback_variables

WORKER_MODULE = "moe_lightning.cli.worker"
"""Main module of workers by default."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a run."""

_POLL_S = 0.05
_INSIST_S = 1.0
_KILLED_S = 30.0
_SAVING_S = 600.0
_TAIL_LINES, _TAIL_BYTES = 20, 1 << 16

Process = subprocess.Popen[bytes]


class RanksFailed(Exception):
    """A worker failed, and the others were ended.

    Attributes:
        failure: the one that came first.
    """

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    def __reduce__(self) -> tuple[type[Self], tuple[RankFailure]]:  # launchers of searches pickle what a job raised
        return type(self), (self.failure,)


class WorkerLogs:
    """Log files of one worker: its output in NAME.out and NAME.err, its failure in NAME.failure.json. Readable by their
    owner only.

    Args:
        folder: for the files.
        name: of its files.
        on_terminal: it writes its output to the terminal instead.
    """

    def __init__(self, folder: Path, name: str, *, on_terminal: bool = False) -> None:
        self._folder, self._name, self._on_terminal = folder, name, on_terminal
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def begin(self) -> dict[str, str]:
        """Remove what a former worker has left, make the files of the output, and return the worker's variables."""
        for path in (self.path("out"), self.path("err")):
            path.unlink(missing_ok=True)
            if not self._on_terminal:
                path.touch(mode=0o600)
        self.path("failure.json").unlink(missing_ok=True)
        return {FAILURE_FILE_VARIABLE: str(self.path("failure.json"))}

    def path(self, kind: Literal["out", "err", "failure.json"]) -> Path:
        """Return the path of a file."""
        return self._folder.absolute() / f"{self._name}.{kind}"

    def failure(self, code: int, kind: Literal["rank", "worker"], number: int) -> RankFailure:
        """Return the failure of the worker: its own report, else its exit code or signal and its last lines.

        Args:
            code: its exit code.
            kind, number: its name in messages; where ranks change, a process is a worker.
        """
        if code > 0 and (reported := read_failure(self.path("failure.json"))) is not None:
            return reported
        message, details = f"{kind} {number} {how_it_ended(code)}", "\n".join(_last_lines(self.path("err")))
        return RankFailure(rank=number, kind="death", message=message, details=details, time_s=0.0)


def _last_lines(path: Path) -> list[str]:
    """Return the end of a log, which may be larger than the memory; nothing if it is missing."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    return []


def how_it_ended(code: int) -> str:
    """Describe the exit code of a process."""
    if code >= 0:
        return f"exited with code {code}"
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")  # some have no names
    return f"{KILLED} {name}"


def start(program: Sequence[str], environment: Mapping[str, str], logs: WorkerLogs) -> Process:
    """Start a Python program as a session of its own.

    Args:
        environment: added to that of this process.
    """
    environment = {**os.environ, **environment, **logs.begin()}
    with ExitStack() as files:
        terminal = list[int]()
        with suppress(OSError):  # closed
            for number in (1, 2):
                terminal.append(os.dup(number))
                files.callback(os.close, terminal[-1])
        environment[TERMINAL_VARIABLE] = " ".join(map(str, terminal))
        paths = [logs.path("out"), logs.path("err")]
        out, err = [files.enter_context(path.open("wb")) if path.exists() else None for path in paths]
        command = (sys.executable, *program)
        return Process(command, env=environment, stdout=out, stderr=err, pass_fds=terminal, start_new_session=True)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Let signals raise `SignalException` from now on, but not before the end of the block: a worker that it starts is
    registered by then, and is ended. SIGHUP stays ignored where it is, by nohup.
    """
    received: list[int] = []
    is_deferred = True

    def handle(number: int, _: object) -> None:
        received.append(number)
        if not is_deferred:
            name = signal.Signals(number)
            raise SignalException(f"received {name.name}", name)

    try:
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handle)
        yield
    finally:
        is_deferred = False
        if received:
            handle(received[0], None)


def end(processes: Collection[Process], grace_s: float, *, is_request: bool = False) -> None:
    """Interrupt the workers that still run, then kill them and their children; a second signal kills at once. Nothing
    waits for a worker that a driver or a file system still holds after half a minute: it counts as killed.

    Args:
        grace_s: time that they have; 0: none.
        is_request: of the user or the scheduler: workers are interrupted once, and may finish a step and save;
            otherwise they are interrupted every second.
    """
    try:
        deadline, next_s = time.monotonic() + grace_s, 0.0
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if time.monotonic() >= next_s:
                _interrupt(processes)
                next_s = math.inf if is_request else time.monotonic() + _INSIST_S
            time.sleep(_POLL_S)
    except SignalException:
        print("ending at once", file=sys.stderr)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILLED_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.returncode = -signal.SIGKILL
            print(
                f"process {process.pid} still runs {_KILLED_S:g} s after SIGKILL, in a driver or a file system: "
                "restart this machine if it stays",
                file=sys.stderr,
            )


def end_on_signal(processes: Collection[Process], received: signal.Signals, grace_s: float) -> None:
    """End the workers after a signal to their launcher: after SIGINT and SIGTERM they may take minutes to save, since a
    second signal, or the scheduler's own limit, ends them at once; after other signals `grace_s`.
    """
    may_save = received in (signal.SIGINT, signal.SIGTERM)
    if may_save and any(process.poll() is None for process in processes):
        _print_line(f"{received.name}: the ranks end their step and save; another signal ends them at once")
    end(processes, _SAVING_S if may_save else grace_s, is_request=True)


def _interrupt(processes: Collection[Process]) -> None:
    """Interrupt the workers that still run, not their children: data loaders are needed until the last step."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)


def kill_orphans(process: Process) -> None:
    """Kill the process group of a dead worker: its data loaders keep its connections open."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def rank_environment(rank: int, *, local: int, world: int, interface: str | None = None) -> dict[str, str]:
    """Return a rank's environment, in the names that torch and Lightning read; variables of the user take precedence.

    Args:
        rank: of this machine's.
        local, world: ranks of this machine, and of all.
        interface: for connections between ranks; the loopback interface unless there are other machines.
    """
    threads = max(1, usable_cores() // local)
    network = {"GLOO_SOCKET_IFNAME": interface} if interface else loopback_variables()
    defaults = {"OMP_NUM_THREADS": str(threads), **network}
    return {
        **{name: value for name, value in defaults.items() if name not in os.environ},
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local),
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
    }


@contextmanager
def restored_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that `deferred_signals` replaces."""
    former: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore further signals while the launcher ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@dataclass(kw_only=True)
class LocalLauncher:
    """Launcher of `python -m WORKER_MODULE arguments...`, once for each of `num_ranks` ranks of this machine.

    Args:
        num_ranks: ranks to start.
        log_dir: for the output of the ranks above 0 and for failures; readable by its owner only.
        module: the workers' main module.
        grace_s: time that workers have to end before they are killed.
    """

    num_ranks: int
    log_dir: Path
    module: str = WORKER_MODULE
    grace_s: float = 10.0

    def run(self, arguments: Sequence[str]) -> None:
        """Start the ranks and return when all have ended well.

        Raises:
            RanksFailed: a rank exited with another code than 0, or died.
            Interrupted: a signal ended the run, with SIGINT and SIGTERM after the ranks have saved; a second one ends
                it at once.
        """
        outlive_readers()
        with PrivateFolder() as folder:
            self._run(arguments, folder.path)

    def _run(self, arguments: Sequence[str], folder: Path) -> None:
        logs = [WorkerLogs(self.log_dir, f"rank{rank}", on_terminal=rank == 0) for rank in range(self.num_ranks)]
        workers: dict[int, Process] = {}
        with restored_signal_handlers():
            try:
                for rank in range(self.num_ranks):
                    environment = rank_environment(rank, local=self.num_ranks, world=self.num_ranks)
                    environment[STORE_VARIABLE] = str(folder)
                    with deferred_signals():
                        workers[rank] = start(("-m", self.module, *arguments), environment, logs[rank])
                self._watch(workers, logs)
            except SignalException as stop:
                end_on_signal(workers.values(), stop.sigval, self.grace_s)
                raise Interrupted(stop.sigval) from None
            finally:
                ignore_signals()
                end(workers.values(), 0.0)

    def _watch(self, workers: Mapping[int, Process], logs: Sequence[WorkerLogs]) -> None:
        """Wait for the ranks; at the first failure end the others and raise what came first."""
        while True:
            codes = {rank: process.poll() for rank, process in workers.items()}
            if any(codes.values()):
                ended_by_themselves = self._collect_exit_codes(workers)
                raise RanksFailed(_first_failure(ended_by_themselves, logs))
            if all(code == 0 for code in codes.values()):
                return
            time.sleep(_POLL_S)

    def _collect_exit_codes(self, workers: Mapping[int, Process]) -> dict[int, int]:
        """Return exit codes of the ranks that ended by themselves: peers of a dead rank fail within a second; the rest
        is ended.
        """
        deadline = time.monotonic() + min(1.0, self.grace_s)
        while any(p.poll() is None for p in workers.values()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        codes = {rank: code for rank, process in workers.items() if (code := process.poll()) is not None}
        end(workers.values(), self.grace_s)
        return codes


def _first_failure(codes: Mapping[int, int], logs: Sequence[WorkerLogs]) -> RankFailure:
    """Return the first cause: a death by signal, else a user error, else the earliest exception."""
    order = {"death": 0, "mistake": 1, "crash": 2, "peer": 3}
    failures = [logs[rank].failure(code, "rank", rank) for rank, code in codes.items() if code]
    return min(failures, key=lambda failure: (order[failure.kind], failure.time_s))


_ELASTIC_POLL_S = 0.01
_MOST_REPEATS = 3  # of one crash in a row
_RETRY_S = 1.0


@validated
@dataclass(kw_only=True)
class ElasticLauncher:
    """Launcher of `python -m module arguments...` in `num_ranks` workers of this machine, as long as one of them lives.

    Args:
        num_ranks: workers of this machine.
        log_dir: for the output of all but the first worker, with `rdzv_endpoint` in a folder of this machine's name; a
            worker started again has files of its own.
        settings: timeouts.
        module: the workers' main module.
        program: name of the user's command, for messages.
        max_restarts: workers started again in the whole run; one death more ends it.
        cool_down_s: from a death to the start of the next process in its place.
        rdzv_endpoint: "host:port" of `moe_lightning.elastic.rendezvous_host` for several machines, or with
            `settings.membership="etcd"` the addresses of etcd, see `EtcdAccess`; None hosts it here, behind a private
            Unix socket.
        rdzv_id: name of the run in etcd, the same on all machines and for no other run.
        secret_file: a copy of the file that the rendezvous host has made; with `rdzv_endpoint` only. With etcd any
            secret; without one etcd keeps it.
        num_nodes: machines that run this command; the first world waits for the workers of all.
        node: this machine's name as a failure domain, which no other one has; its host name, or "local" without
            `rdzv_endpoint`.
        ranks_are_nodes: make every worker a failure domain of its own, as if it were a node; "auto": on one machine,
            whose processes die one by one.
        check_health: check this machine before it joins, see `elastic.health`, and let the rendezvous host compare it
            with the others.
        grace_s: time that workers have to end before they are killed.
    """

    num_ranks: PositiveInt
    log_dir: Path
    settings: ElasticSettings = field(default_factory=ElasticSettings)
    module: str = WORKER_MODULE
    program: str = "moe-train"
    max_restarts: NonNegativeInt = 20
    cool_down_s: Annotated[float, Interval(ge=0, le=1e9)] = 1.0
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    secret_file: str | Path | None = None
    num_nodes: PositiveInt = 1
    node: str | None = None
    ranks_are_nodes: bool | Literal["auto"] = "auto"
    check_health: bool = True
    grace_s: float = 10.0

    def __post_init__(self) -> None:
        self.settings = build_config(ElasticSettings, self.settings, key="settings")
        if self.settings.min_ranks > self.num_ranks * self.num_nodes:
            raise ConfigurationError(
                f"min_ranks={self.settings.min_ranks} is above the {self.num_ranks * self.num_nodes} ranks that are "
                "started: lower it"
            )
        if self.rdzv_endpoint is None and self.num_nodes > 1:
            raise ConfigurationError(
                f"num_nodes={self.num_nodes} needs rdzv_endpoint=HOST:PORT, which all nodes reach: run "
                "`python -m moe_lightning.elastic.rendezvous_host` on a safe host and give its host:port"
            )
        if self.uses_etcd:
            if self.rdzv_endpoint is None or not self.rdzv_id or not self.rdzv_id.isprintable():
                raise ConfigurationError(
                    f"membership=etcd needs rdzv_endpoint=http(s)://HOST:PORT and rdzv_id=NAME, not "
                    f"{self.rdzv_endpoint} and {self.rdzv_id}: give etcd's addresses and a name of this run alone"
                )
        elif self.rdzv_endpoint is not None and self.secret_file is None:
            raise ConfigurationError(
                f"rdzv_endpoint={self.rdzv_endpoint} needs secret_file=FILE: copy the file that the rendezvous host "
                "has made to every machine"
            )

    def check(self) -> None:
        """Refuse an address or a secret that nothing can be reached with.

        Raises:
            ConfigurationError: one sentence about it.
        """
        if self.rdzv_endpoint is None:
            return
        if self.uses_etcd:
            EtcdAccess.parse(self.rdzv_endpoint, os.environ).check(self.secret_file)
        else:
            Address.parse(self.rdzv_endpoint)
        if self.secret_file is not None:
            read_secret(Path(self.secret_file))

    @property
    def uses_etcd(self) -> bool:
        """True if launchers elect the rendezvous host in etcd."""
        return self.settings.membership == "etcd"

    @property
    def splits_node(self) -> bool:
        """True if every worker of this machine is a failure domain of its own."""
        return self.num_nodes == 1 if self.ranks_are_nodes == "auto" else self.ranks_are_nodes

    def run(self, arguments: Sequence[str]) -> None:
        """Start the workers and return when all that live have ended well.

        Raises:
            RanksFailed: a user error (in a worker started again once it has joined), an exception in the last worker,
                or in any after the training, or more deaths than `max_restarts`.
            Interrupted: a signal ended the run, or a notice of preemption all workers; a second signal ends it at once.
            ConfigurationError: the endpoint's address is wrong or a loopback address by name, it does not answer while
                nobody trains here, no network interface leads there, or this machine is refused for its health.
        """
        outlive_readers()
        with restored_signal_handlers(), self._open_rendezvous() as (task, link, etcd):
            workers = _Workers(self, task, link, ("-m", self.module, *arguments))
            try:
                has_finished = workers.run()
            except RanksFailed:
                end(workers.processes, self.grace_s)
                raise
            except SignalException as stop:
                with suppress(SignalException):  # a second signal ends them at once
                    if stop.sigval == signal.SIGTERM and self.settings.notice_on_sigterm:
                        workers.ask_to_leave()
                    end_on_signal(workers.processes, stop.sigval, self.grace_s)
                raise Interrupted(stop.sigval) from None
            finally:
                ignore_signals()
                end(workers.processes, 0.0)
            if has_finished and etcd is not None:
                etcd.record_end()

    @contextmanager
    def _open_rendezvous(self) -> Iterator[tuple[ElasticTask, LauncherClient, EtcdRendezvous | None]]:
        """Yield the task common to all workers, this launcher's own client, and its side of etcd."""
        with ExitStack() as stack:
            etcd: EtcdRendezvous | None = None
            node = socket.gethostname()
            if self.rdzv_endpoint is None:
                host = stack.enter_context(RendezvousServer())
                address, secret_file, node = host.address, host.secret_file, "local"
            elif self.uses_etcd:
                endpoints = EtcdAccess.parse(self.rdzv_endpoint, os.environ).endpoints if self.num_nodes > 1 else ()
                for endpoint in endpoints:  # a leader publishes its address on the way to etcd
                    _check_name(Address.parse(endpoint.partition("://")[2]))
                etcd = EtcdRendezvous(self.rdzv_endpoint, self.rdzv_id or "", self.settings, self.secret_file)
                stack.enter_context(etcd)
                address, secret_file = etcd.address, etcd.secret_file
            else:
                assert self.secret_file is not None
                address, secret_file = Address.parse(self.rdzv_endpoint), Path(self.secret_file).absolute()
            expected, node = self.num_ranks * self.num_nodes, self.node or node
            health = check_node(node, self.log_dir) if self.check_health else None
            client = LauncherClient(
                address,
                secret_file,
                self.settings,
                expected,
                None if etcd is None else etcd.token,
                locate=None if etcd is None else lambda: etcd.address,
                relays=self.rdzv_endpoint is not None,
                health=None if self.rdzv_endpoint is None else health,
            )
            stack.enter_context(closing(client))
            if etcd is not None:
                etcd.attend(lambda: client.connected)
            task = ElasticTask(
                address=str(address if client.relay is None else client.relay.address),
                secret_file=str(secret_file),
                node=node,
                expected=expected,
                settings=self.settings,
            )
            if client.health is not None:
                write_health(client.health, self.log_dir)  # for `moe-train --health`
                if client.health.refused:
                    raise ConfigurationError(client.health.refused)
            yield task, client, etcd


@dataclass(kw_only=True)
class _Worker:
    """Worker process in its slot.

    Attributes:
        token: its name among the members.
        silent_since: time of its eviction; None while it is a member.
    """

    process: Process
    logs: WorkerLogs
    token: str
    silent_since: float | None = None


class _Failures:
    """Failures of the workers of a run, and whether another worker is started after one.

    Args:
        max_restarts: of the run.

    Attributes:
        restarts: workers that were started again.
        crash: the first of a member of the last world, from which the others have not recovered; None without one.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.restarts = 0
        self.crash: RankFailure | None = None
        self._last_signature, self._repeats = "", 0  # of crashes

    def begin_world(self) -> None:
        """Forget the crash before a world: the others have recovered from it."""
        self.crash = None

    def add(self, failure: RankFailure, *, is_last: bool, is_member: bool) -> RankFailure:
        """Return a failure, a crash with its traceback only if that is new.

        Args:
            is_last: no other worker runs.
            is_member: its worker was in the last world.

        Raises:
            RanksFailed: it would come again.
        """
        if failure.kind == "mistake":
            raise RanksFailed(failure)
        if failure.kind == "crash":
            failure = self._count_crash(failure)
            if is_member:
                self.crash = self.crash or failure
        if failure.kind == "peer" or (failure.kind == "crash" and is_last):
            raise RanksFailed(self.crash or failure)
        return failure

    def restart(self, failure: RankFailure) -> None:
        """Count a worker that is started again.

        Raises:
            RanksFailed: there were as many as `max_restarts` before.
        """
        if self.restarts >= self._max_restarts:
            message = f"{failure.message}, after {self._max_restarts} restarts (max_restarts)"
            raise RanksFailed(replace(failure, message=message))
        self.restarts += 1

    def show(self, failure: RankFailure) -> None:
        """Print the traceback of a crash, once."""
        if failure.kind == "crash" and failure.details:
            _print_line(failure.details)
            if self.crash is failure:
                self.crash = replace(failure, details="")

    def _count_crash(self, failure: RankFailure) -> RankFailure:
        is_known = bool(failure.signature) and failure.signature == self._last_signature
        self._last_signature, self._repeats = failure.signature, self._repeats + 1 if is_known else 1
        if not is_known:
            return failure
        failure = replace(failure, details="")
        if self._repeats < _MOST_REPEATS:
            return failure
        message = f"{failure.message}, {_MOST_REPEATS} times in the same way: see its traceback above"
        raise RanksFailed(replace(failure, message=message))


def _check_name(address: Address) -> None:
    """Raise if a host's name stands for a loopback address, as /etc/hosts gives it to a machine's own.

    Raises:
        ConfigurationError: one sentence about it.
    """
    if (loopback := loopback_of_name(address)) is not None:
        raise ConfigurationError(
            f"{address.host} is {loopback} on this machine (/etc/hosts), where other machines do not reach its "
            "ranks: give the host's address in rdzv_endpoint"
        )


class _Workers:
    """Workers of one run."""

    def __init__(
        self, launcher: ElasticLauncher, task: ElasticTask, link: LauncherClient, program: Sequence[str]
    ) -> None:
        self._launcher, self._task, self._connection, self._program = launcher, task, link, program
        address = link.address
        self._interface = interface_towards(address) if launcher.rdzv_endpoint is not None else None
        if launcher.num_nodes > 1:
            _check_name(address)
        if launcher.num_nodes > 1 and self._interface is None and "GLOO_SOCKET_IFNAME" not in os.environ:
            raise ConfigurationError(
                f"the network interface towards {address} cannot be determined: set GLOO_SOCKET_IFNAME to the one "
                "that leads to the other machines"
            )
        self._clock = ProcessClock()
        self._alone_since = 0.0
        self._running: dict[int, _Worker] = {}
        self._due: dict[int, float] = {}  # slot -> when it is started again
        self._began_ns = task.now_ns
        self._starts = dict.fromkeys(range(launcher.num_ranks), 0)
        self._failures = _Failures(launcher.max_restarts)
        self._ends: set[int] = set()  # codes of workers that ended in order, but for those too late for a training
        self._world: frozenset[str] | None = None  # tokens of this machine's workers in the last world

    def run(self) -> bool:
        """Run until all that live have ended well.

        Returns:
            True if one of them was in the last world, which has finished; False if all came too late for a training.
        """
        for slot in self._starts:
            self._start(slot)
        self._print_processes(self._starts)
        warn_at = self._launcher.settings.rendezvous_timeout_s
        while self._running or self._due:
            for slot, worker in list(self._running.items()):
                code = worker.process.poll()
                if code is not None:
                    del self._running[slot]
                    self._handle_exit(slot, worker, code)
            self._read_messages()
            if self._is_over:
                self._end_late_workers()
            warn_at = self._warn_of_silent_host(warn_at)
            self._start_due()
            time.sleep(_ELASTIC_POLL_S)
        if self._failures.crash is not None:  # after the training
            raise RanksFailed(self._failures.crash)
        if EXIT_STOPPED in self._ends or self._ends == {EXIT_PREEMPTED}:
            raise Interrupted(signal.SIGTERM)  # all stopped on a signal to another machine, or left on notice
        return 0 in self._ends

    @property
    def _is_over(self) -> bool:
        """True if a member ended well or stopped with all others, so the training is over."""
        return not self._ends.isdisjoint({0, EXIT_STOPPED})

    def _warn_of_silent_host(self, warn_at: float) -> float:
        """Warn once if the host does not answer while workers run: one in this process may have ended for a defect.

        Args:
            warn_at: time of the warning, if there is no answer before.

        Returns:
            The same for the next call.
        """
        now, link, limit = self._clock.tick(), self._connection, self._launcher.settings.rendezvous_timeout_s
        if link.is_connected:
            return now + limit
        if not self._running or now <= warn_at:
            return warn_at
        cure = "see that it runs and can be reached"
        if self._launcher.rdzv_endpoint is None:
            cure = "it ended with the error above, so end this command and give it again, which resumes"
        _print_line(
            f"{self._launcher.program}: the rendezvous host at {link.address} has not answered for {limit:g} s "
            f"({link.error}): the ranks train on until one fails or leaves; {cure}"
        )
        return math.inf

    def _start_due(self) -> None:
        """Start the workers that are due again, if there is a rendezvous host that would admit them.

        Raises:
            ConfigurationError: no worker runs here, and the host has not answered for too long.
        """
        now, link = self._clock.tick(), self._connection
        if self._running or link.is_connected:
            self._alone_since = now
        limit = self._launcher.settings.rendezvous_timeout_s
        if now - self._alone_since > limit:
            raise ConfigurationError(
                f"no worker is left on this machine, and the rendezvous host at {link.address} has not answered "
                f"for {limit:g} s ({link.error}): see that it runs and can be reached, then give the same command "
                "again, which resumes"
            )
        for slot in [slot for slot, due in self._due.items() if time.monotonic() >= due and link.is_connected]:
            del self._due[slot]
            try:
                self._start(slot)
                self._print_processes([slot])
            except OSError as error:
                if not self._running:
                    raise
                self._due[slot] = time.monotonic() + max(_RETRY_S, self._launcher.cool_down_s)
                _print_line(
                    f"{self._launcher.program}: worker {slot} cannot be started ({error.strerror or error}): free "
                    "memory, processes or disk for it; it is tried again"
                )

    def _print_processes(self, slots: Iterable[int]) -> None:
        """Print the process ids of workers, for a user who looks at one or ends one."""
        named = ", ".join(f"worker {slot}: {self._running[slot].process.pid}" for slot in slots)
        _print_line(f"{self._launcher.program}: process ids: {named}")

    def ask_to_leave(self) -> None:
        """Pass a notice of preemption on, and wait until the workers have finished their step, transferred their state
        and left; the scheduler has a limit of its own.
        """
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + _SAVING_S
        while any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
            time.sleep(_ELASTIC_POLL_S)

    @property
    def processes(self) -> list[Process]:
        """Those of all running workers."""
        return [worker.process for worker in self._running.values()]

    def _start(self, slot: int) -> None:
        launcher = self._launcher
        self._starts[slot] += 1
        starts = self._starts[slot]
        name = f"rank{slot}" if starts == 1 else f"rank{slot}.{starts}"
        folder = launcher.log_dir
        if launcher.rdzv_endpoint is not None:  # several machines may share it
            folder = folder / self._task.node.replace(os.sep, "_")
        logs = WorkerLogs(folder, name, on_terminal=slot == 0 and starts == 1)
        task = replace(
            self._task,
            node=f"{self._task.node}-{slot}" if launcher.splits_node else self._task.node,
            slot=slot,
            starts=starts,
            birth_ns=self._began_ns + slot if starts == 1 else None,
            token=worker_token(self._connection.token, slot, starts),
        )
        environment = {
            **rank_environment(slot, local=launcher.num_ranks, world=task.expected, interface=self._interface),
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),  # cut connections print stacks
            **task.to_environment(),
        }
        with deferred_signals():
            process = start(self._program, environment, logs)
            self._running[slot] = _Worker(process=process, logs=logs, token=task.token)

    def _handle_exit(self, slot: int, worker: _Worker, code: int) -> None:
        """Report a death to the others, and start a new process in its place if the limits allow."""
        kill_orphans(worker.process)
        is_outside = self._world is not None and worker.token not in self._world
        if code in (0, EXIT_PREEMPTED, EXIT_STOPPED):
            if code != 0 or not is_outside:  # the others may begin another training of the script
                self._ends.add(code)
            return
        failure = worker.logs.failure(code, "worker", slot)
        is_reported = failure.kind == "death" and failure.time_s > 0  # by the worker itself
        why = f" ({failure.message})" if failure.kind in ("mistake", "crash") or is_reported else ""
        self._connection.report_death(worker.token, how_it_ended(code) + why)
        if failure.kind == "mistake" and is_outside and self._starts[slot] > 1 and self._running:
            failure = replace(failure, kind="death")  # it was none when this run began, and the others train
        is_member = self._world is not None and not is_outside
        failure = self._failures.add(failure, is_last=not self._running, is_member=is_member)
        if self._is_over:
            return
        self._failures.restart(failure)
        self._failures.show(failure)
        self._due[slot] = time.monotonic() + self._launcher.cool_down_s
        _print_line(
            f"{self._launcher.program}: {failure.message}; started again in {self._launcher.cool_down_s:g} s "
            f"({self._failures.restarts} of {self._launcher.max_restarts})"
        )

    def _read_messages(self) -> None:
        """Handle messages of the host, and kill an evicted worker that does not register again.

        Raises:
            ConfigurationError: this machine is refused before the first world.
        """
        for message in self._connection.read():
            match message:
                case {"t": "health", "refused": str(refused)} if refused and self._world is None:
                    raise ConfigurationError(refused)  # for its name, or beside nodes that came later
                case {"t": "formed", "tokens": list(tokens)} if self._world != frozenset(tokens):
                    self._world = frozenset(tokens)
                    self._mark(self._world, None)
                    self._failures.begin_world()
                case {"t": "arrived", "token": str(token)}:
                    self._mark({token}, None)
                case {"t": "evicted", "token": str(token)}:
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

    def _end_late_workers(self) -> None:
        """End the workers outside the last world and start none again."""
        self._due.clear()
        if self._world is None:
            return
        late = {slot: worker for slot, worker in self._running.items() if worker.token not in self._world}
        end([worker.process for worker in late.values()], 0.0)
        for slot in late:  # a signal until here ends those that still run
            del self._running[slot]


def _print_line(text: str) -> None:
    """Print to stderr, on a terminal in the place of the progress bar that rank 0 draws there."""
    erase = "\r\x1b[2K" if sys.stderr.isatty() else ""
    print(erase + text, file=sys.stderr)


def _is_stopped(pid: int) -> bool:
    """Return True if a process is stopped by a signal: it may be continued, and join as a new member."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
