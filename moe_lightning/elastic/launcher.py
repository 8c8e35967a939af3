"""Starts one worker process for each local rank and sees to their end.

The workers meet in a folder that only their user can enter, so nobody else on the machine can take a rank's place;
the launcher removes it. Workers are sessions of their own: a Ctrl-C reaches the launcher alone, which passes it on. A
worker that loses its launcher is killed by the kernel.

Lightning's own launchers are not used: they kill the survivors of a failure from inside rank 0, and start the user's
command line once more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException

from moe_lightning.elastic import processes
from moe_lightning.elastic.failure import Interrupted, RankFailure
from moe_lightning.elastic.processes import WORKER_MODULE, Process, RanksFailed, WorkerLogs
from moe_lightning.files import PrivateFolder
from moe_lightning.parallel.context import STORE_VARIABLE

__all__ = ["LocalLauncher", "RanksFailed"]

_POLL_S = 0.05


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

    def run(self, arguments: Sequence[str]) -> None:
        """Start the ranks and return when all have ended well.

        Raises:
            RanksFailed: a rank exited with another code than 0, or died.
            Interrupted: a signal ended the run, with SIGINT and SIGTERM after the ranks have saved; a second one ends
                it at once.
        """
        with PrivateFolder() as folder:
            self._run(arguments, folder.path)

    def _run(self, arguments: Sequence[str], folder: Path) -> None:
        logs = WorkerLogs(self.log_dir, [f"rank{rank}" for rank in range(self.num_ranks)], terminal=0)
        environments = {
            rank: {
                **processes.rank_environment(rank, local=self.num_ranks, world=self.num_ranks),
                STORE_VARIABLE: str(folder),
            }
            for rank in range(self.num_ranks)
        }
        with processes.restored_signal_handlers():
            try:
                workers = processes.start(("-m", self.module, *arguments), environments, logs)
            except SignalException as stop:
                raise Interrupted(stop.sigval) from None
            try:
                self._watch(workers, logs)
            except SignalException as stop:
                processes.end_on_signal(workers.values(), stop.sigval, self.grace_s)
                raise Interrupted(stop.sigval) from None
            finally:
                processes.ignore_signals()
                processes.end(workers.values(), 0.0)

    def _watch(self, workers: Mapping[int, Process], logs: WorkerLogs) -> None:
        """Wait for the ranks; at the first failure end the others and say what came first."""
        while True:
            codes = {rank: process.poll() for rank, process in workers.items()}
            if any(codes.values()):
                ended_by_themselves = self._settle(workers)
                raise RanksFailed(_first_failure(ended_by_themselves, logs))
            if all(code == 0 for code in codes.values()):
                return
            time.sleep(_POLL_S)

    def _settle(self, workers: Mapping[int, Process]) -> dict[int, int]:
        """Exit codes of the ranks that ended by themselves; peers of a dead rank fail within moments, what is left
        then is ended.
        """
        deadline = time.monotonic() + min(1.0, self.grace_s)
        while any(p.poll() is None for p in workers.values()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        codes = {rank: code for rank, process in workers.items() if (code := process.poll()) is not None}
        processes.end(workers.values(), self.grace_s)
        return codes


def _first_failure(codes: Mapping[int, int], logs: WorkerLogs) -> RankFailure:
    """The failure that made the others fail: a death by signal, else a user's mistake, else the earliest exception."""
    order = {"death": 0, "mistake": 1, "crash": 2, "peer": 3}
    failures = [logs.failure(rank, code) for rank, code in codes.items() if code]
    return min(failures, key=lambda failure: (order[failure.kind], failure.time_s))
