"""Runs a function on several gloo ranks in real processes, in a fraction of a second.

Ranks are forked from a server process that has imported everything, so a world starts in about 0.1 s. Each world
meets in a file store of its own: no ports are chosen by the tests.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_lightning.parallel.context import World
from tests.forks import FORKS, PATIENCE_S, fork, kill

_LEAVE_S = 5.0


class RankFailure(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S) -> list[Any]:
    """function(rank, world_size, *args) on every rank of a gloo world; the results in rank order.

    The function must be importable (defined at the top level of a module); results are pickled.

    Raises:
        RankFailure: with the traceback of the first rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="moe-ranks-") as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = FORKS.Pipe()
            processes.append(fork(_rank_main, rank, world_size, folder, sender, function, args))
            sender.close()
            pipes.append(receiver)
        try:
            return _collect(pipes, time.monotonic() + timeout_s)
        finally:
            for pipe in pipes:
                pipe.close()  # the ranks may leave now
            for process in processes:
                process.join(_LEAVE_S)
            kill(processes)


def connect() -> World:
    """Inside a rank: the world of all ranks that `run_ranks` started."""
    return World.connect(torch.device("cpu"), timedelta(seconds=60))


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    pending: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(f"ranks {sorted(pending.values())} did not finish in time")
        for pipe in ready:
            rank = pending.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]  # noqa: S301
            except EOFError:
                raise RankFailure(f"rank {rank} died without a word") from None
            if not ok:
                raise RankFailure(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int, world_size: int, folder: str, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    os.chdir(folder)
    try:
        if world_size > 1:
            store = dist.FileStore(str(Path(folder) / "store"), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        _send(pipe, (True, function(rank, world_size, *args)))
    except BaseException:
        _send(pipe, (False, traceback.format_exc()))
    finally:
        _wait_for_leave(pipe)
        os._exit(0)  # no atexit handlers: a failed peer must not hold this rank up


def _wait_for_leave(pipe: Connection) -> None:
    """Stay until all ranks are done: a rank that leaves early would break the connections that others still build."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()


def _send(pipe: Connection, outcome: tuple[bool, Any]) -> None:
    """By value: Connection.send would leave tensors in shared memory of a process that ends."""
    pipe.send_bytes(pickle.dumps(outcome))
