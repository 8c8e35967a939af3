"""Starts one worker process for each local rank and sees to their end.

The launcher hosts the TCPStore in which its workers meet, so the store outlives them, and it listens on the loopback
interface only. Workers are sessions of their own: a Ctrl-C reaches the launcher alone, which passes it on. A worker
that loses its launcher is killed by the kernel.

Lightning's own launchers are not used: they kill the survivors of a failure from inside rank 0, and start the user's
command line once more.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from typing_extensions import override

from moe_lightning.comm.world import STORE_VARIABLE
from moe_lightning.elastic.failure import FAILURE_FILE_VARIABLE, Interrupted, RankFailure, read_failure
from moe_lightning.elastic.lifeline import LAUNCHER_PID_VARIABLE

WORKER_MODULE = "moe_lightning.cli.worker"


_LOOPBACK = "127.0.0.1"
_POLL_S = 0.05
_TAIL_LINES = 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class RanksFailed(Exception):
    """A worker failed, and the others were ended.

    Attributes:
        failure: the one that came first.
    """

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(kw_only=True)
class LocalLauncher:
    """Runs `python -m WORKER_MODULE arguments...` once for each of `num_ranks` ranks of this machine.

    Args:
        num_ranks: ranks to start.
        log_dir: gets the output of the ranks above 0 and, after a failure, what failed; readable by its owner only.
        module: the workers' main module.
        grace_s: how long workers may take to end before they are killed.
    """

    num_ranks: int
    log_dir: Path
    module: str = WORKER_MODULE
    grace_s: float = 10.0
    _attempt: int = field(default=0, init=False)

    def run(self, arguments: Sequence[str]) -> None:
        """Start the ranks and return when all have ended well.

        Raises:
            RanksFailed: a rank exited with another code than 0, or died.
            Interrupted: a signal ended the run; a second one ends it at once.
        """
        self._attempt += 1
        store, port = loopback_store()
        logs = _RankLogs(self.log_dir, self._attempt)
        environments = {rank: self._environment(rank, port) for rank in range(self.num_ranks)}
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # failures are reported here
        with _restored_signal_handlers():
            try:
                workers = start_processes(
                    name="moe-train",
                    entrypoint=sys.executable,
                    args=dict.fromkeys(range(self.num_ranks), ("-m", self.module, *arguments)),
                    envs=environments,
                    logs_specs=logs,
                )
            except SignalException as stop:
                raise Interrupted(stop.sigval) from None
            assert isinstance(workers, SubprocessContext)
            try:
                self._watch(workers, logs)
            except SignalException as stop:
                self._end(workers, self.grace_s)
                raise Interrupted(stop.sigval) from None
            finally:
                for number in _SIGNALS:
                    signal.signal(number, signal.SIG_IGN)  # what is left takes moments
                self._end(workers, 0.0)
        del store

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """What a rank finds in its environment, in the names that torch and Lightning read."""
        threads = max(1, (os.cpu_count() or 1) // self.num_ranks)
        defaults = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": _loopback_interface()}
        return {
            **{name: value for name, value in defaults.items() if value and name not in os.environ},
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
            STORE_VARIABLE: f"{_LOOPBACK}:{port}/attempt-{self._attempt}",
            LAUNCHER_PID_VARIABLE: str(os.getpid()),
        }

    def _watch(self, workers: SubprocessContext, logs: _RankLogs) -> None:
        """Wait for the ranks; at the first failure end the others and say what came first."""
        while True:
            codes = _exit_codes(workers)
            failed = {rank for rank, code in codes.items() if code}
            if failed:
                ended_by_themselves = self._settle(workers)
                raise RanksFailed(_first_failure(ended_by_themselves, logs))
            if all(code == 0 for code in codes.values()):
                return
            time.sleep(_POLL_S)

    def _settle(self, workers: SubprocessContext) -> dict[int, int]:
        """Exit codes of the ranks that ended by themselves; peers of a dead rank fail within moments, what is left
        then is ended.
        """
        deadline = time.monotonic() + min(1.0, self.grace_s)
        while None in _exit_codes(workers).values() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        codes = {rank: code for rank, code in _exit_codes(workers).items() if code is not None}
        self._end(workers, self.grace_s)
        return codes

    def _end(self, workers: SubprocessContext, grace_s: float) -> None:
        """Interrupt the workers that still run (and their children), then kill them; a second signal kills at once."""
        try:
            _signal_groups(workers, signal.SIGINT if grace_s else signal.SIGKILL)
            deadline = time.monotonic() + grace_s
            while None in _exit_codes(workers).values() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        except SignalException:
            print("moe-train: ending at once", file=sys.stderr)
        _signal_groups(workers, signal.SIGKILL)
        for handler in workers.subprocess_handlers.values():
            handler.proc.wait()


class _RankLogs(LogsSpecs):
    """Rank 0 writes to the terminal, the others to rankN.out and rankN.err; all leave their failure in
    rankN.failure.json.
    """

    def __init__(self, folder: Path, attempt: int) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._attempt = attempt
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
                if rank:
                    path.touch(mode=0o600)
            self.path(rank, "failure.json").unlink(missing_ok=True)
            environment[FAILURE_FILE_VARIABLE] = str(self.path(rank, "failure.json"))
        return LogsDest(
            stdouts={rank: str(self.path(rank, "out")) if rank else "" for rank in envs},
            stderrs={rank: str(self.path(rank, "err")) if rank else "" for rank in envs},
            error_files={rank: str(self.path(rank, "failure.json")) for rank in envs},
        )

    def path(self, rank: int, kind: Literal["out", "err", "failure.json"]) -> Path:
        return self._folder.absolute() / f"rank{rank}.{kind}"


def _first_failure(codes: Mapping[int, int], logs: _RankLogs) -> RankFailure:
    """The failure that made the others fail: a death by signal, else a user's mistake, else the earliest exception."""
    failures = []
    for rank, code in codes.items():
        if code:
            reported = read_failure(logs.path(rank, "failure.json")) if code > 0 else None
            failures.append(reported or _silent_failure(rank, code, logs))
    order = {"death": 0, "mistake": 1, "crash": 2}
    return min(failures, key=lambda failure: (order[failure.kind], failure.time_s))


def _silent_failure(rank: int, code: int, logs: _RankLogs) -> RankFailure:
    """What can be said of a rank that left no word: its exit code or signal, and the end of its log."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    err = logs.path(rank, "err")
    tail = err.read_text(errors="replace").splitlines()[-_TAIL_LINES:] if err.is_file() else []
    return RankFailure(rank=rank, kind="death", message=f"rank {rank} {how}", details="\n".join(tail), time_s=0.0)


def _exit_codes(workers: SubprocessContext) -> dict[int, int | None]:
    return {rank: handler.proc.poll() for rank, handler in workers.subprocess_handlers.items()}


def _signal_groups(workers: SubprocessContext, number: signal.Signals) -> None:
    """Signal the process groups of the ranks that still run; their leaders' children (data loaders) get it too."""
    for handler in workers.subprocess_handlers.values():
        if handler.proc.poll() is None:
            os.killpg(handler.proc.pid, number)


def loopback_store() -> tuple[TCPStore, int]:
    """A store that listens on 127.0.0.1 and nowhere else: torch would bind every interface, so it is handed a bound
    socket.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((_LOOPBACK, 0))
        listener.listen()
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # the store closes it
    except BaseException:
        listener.close()
        raise
    store = TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    return store, port


def _loopback_interface() -> str:
    """Name of the loopback interface; empty where it cannot be told."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")


@contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    """torch's elastic processes install handlers and leave them; put the former ones back."""
    former: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
