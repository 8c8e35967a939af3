"""What launchers share: worker processes with their logs, how they end, and what they leave behind."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from typing_extensions import override

from moe_lightning.elastic.failure import FAILURE_FILE_VARIABLE, KILLED, RankFailure, read_failure
from moe_lightning.elastic.lifeline import LAUNCHER_PID_VARIABLE
from moe_lightning.parallel.context import loopback_variables

WORKER_MODULE = "moe_lightning.cli.worker"
"""What launchers start unless told otherwise."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a run."""

_POLL_S = 0.05
_INSIST_S = 1.0
_SAVING_S = 600.0
_TAIL_LINES = 20

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


class WorkerLogs(LogsSpecs):
    """Where workers write: one to the terminal, the others to NAME.out and NAME.err; all leave their failure in
    NAME.failure.json. Readable by their owner only.

    Args:
        folder: for the files.
        names: of each worker that is started together.
        terminal: the worker that writes to the terminal; None for none of them.
    """

    def __init__(self, folder: Path, names: Sequence[str], *, terminal: int | None) -> None:
        super().__init__(str(folder))
        self._folder, self._names, self._terminal = folder, names, terminal
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    @override
    def root_log_dir(self) -> str:
        return str(self._folder)

    @override
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for rank, environment in envs.items():
            for path in (self.path(rank, "out"), self.path(rank, "err")):
                path.unlink(missing_ok=True)
                if rank != self._terminal:
                    path.touch(mode=0o600)
            self.path(rank, "failure.json").unlink(missing_ok=True)
            environment[FAILURE_FILE_VARIABLE] = str(self.path(rank, "failure.json"))
        return LogsDest(
            stdouts={rank: self._output(rank, "out") for rank in envs},
            stderrs={rank: self._output(rank, "err") for rank in envs},
            error_files={rank: str(self.path(rank, "failure.json")) for rank in envs},
        )

    def path(self, rank: int, kind: Literal["out", "err", "failure.json"]) -> Path:
        """A worker's file."""
        return self._folder.absolute() / f"{self._names[rank]}.{kind}"

    def failure(self, rank: int, code: int, *, called: int | None = None) -> RankFailure:
        """Why a worker ended with a code other than 0: its own word, else the code or signal and its last lines.

        Args:
            called: the rank to name, where it is not the index among those that were started together.
        """
        told = read_failure(self.path(rank, "failure.json")) if code > 0 else None
        return told or self._silent(rank, code, rank if called is None else called)

    def _output(self, rank: int, kind: Literal["out", "err"]) -> str:
        return "" if rank == self._terminal else str(self.path(rank, kind))

    def _silent(self, rank: int, code: int, called: int) -> RankFailure:
        err = self.path(rank, "err")
        tail = err.read_text(errors="replace").splitlines()[-_TAIL_LINES:] if err.is_file() else []
        message = f"rank {called} {how_it_ended(code)}"
        return RankFailure(rank=called, kind="death", message=message, details="\n".join(tail), time_s=0.0)


def append_to_outputs() -> None:
    """Let this process write at the end of the files that its output may go to: a worker that takes the terminal over
    writes there, too.
    """
    for number in (1, 2):
        if stat.S_ISREG(os.fstat(number).st_mode):
            fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_APPEND)


def how_it_ended(code: int) -> str:
    """A process's exit code in words."""
    return f"{KILLED} {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def start(program: Sequence[str], environments: Mapping[int, dict[str, str]], logs: LogsSpecs) -> dict[int, Process]:
    """Start the same Python program once for each environment, as sessions of their own.

    Raises:
        SignalException: a signal came meanwhile; from now on signals raise it in the main thread.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # failures are reported by us
    workers = start_processes(
        name="moe-train",
        entrypoint=sys.executable,
        args=dict.fromkeys(environments, tuple(program)),
        envs=dict(environments),
        logs_specs=logs,
    )
    assert isinstance(workers, SubprocessContext)
    return {rank: handler.proc for rank, handler in workers.subprocess_handlers.items()}


def end(processes: Collection[Process], grace_s: float, *, is_wish: bool = False) -> None:
    """Interrupt the workers that still run, then kill them and their children; a second signal kills at once.

    Args:
        grace_s: how long they may take; 0: none.
        is_wish: the user's or the scheduler's, after which workers may finish a step and save; otherwise they are
            interrupted again every second, which is no wish any more.
    """
    try:
        deadline, next_s = time.monotonic() + grace_s, 0.0
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if time.monotonic() >= next_s:
                _interrupt(processes)
                next_s = math.inf if is_wish else time.monotonic() + _INSIST_S
            time.sleep(_POLL_S)
    except SignalException:
        print("moe-train: ending at once", file=sys.stderr)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def end_on_signal(processes: Collection[Process], received: signal.Signals, grace_s: float) -> None:
    """End the workers as a signal to their launcher asks: after SIGINT and SIGTERM they may take minutes to save, since
    a second one, or the scheduler's own patience, ends them at once; other signals leave them the grace.
    """
    end(processes, _SAVING_S if received in (signal.SIGINT, signal.SIGTERM) else grace_s, is_wish=True)


def _interrupt(processes: Collection[Process]) -> None:
    """Signal those that still run, not their children: data loaders are needed until the last step."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)


def kill_orphans(process: Process) -> None:
    """Kill what a dead worker left in its group: its data loaders hold its connections open."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def rank_environment(rank: int, *, local: int, world: int, interface: str | None = None) -> dict[str, str]:
    """What a rank finds in its environment, in the names that torch and Lightning read; what the user has set stays.

    Args:
        rank: of this machine's.
        local, world: ranks of this machine, and of all.
        interface: through which ranks talk to each other; the loopback interface unless there are other machines.
    """
    threads = max(1, (os.cpu_count() or 1) // local)
    meeting = {"GLOO_SOCKET_IFNAME": interface} if interface else loopback_variables()
    defaults = {"OMP_NUM_THREADS": str(threads), **meeting}
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
    """torch's elastic processes install handlers and leave them; put the former ones back."""
    former: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """For the moments that the rest of an end takes."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
