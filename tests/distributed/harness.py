"""Runs a function on several gloo ranks in real processes, in a fraction of a second.

Ranks are forked from a server process that has imported everything, so a world starts in about 0.1 s. Each world
meets in a file store of its own: no ports are chosen by the tests. Half of what a small training takes on a rank is
taken once a process: pooled ranks run one world after the other.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import random
import re
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_lightning.errors import UserError
from moe_lightning.parallel.context import World
from tests.forks import FORKS, PATIENCE_S, fork, kill

_LEAVE_S = 5.0
_MEETINGS = 3
_LOST_CONNECTION = re.compile(r"connectFullMesh failed .*Connection closed by peer")
"""Error of gloo in fresh processes that make their first group, about once in thousands of worlds."""


class RankFailure(AssertionError):
    """A rank raised, died or did not finish in time."""


class LostConnection(RankFailure):
    """The ranks could not meet: gloo closed a connection while it made the first group."""


@dataclass(frozen=True)
class Rank:
    """A process that runs jobs, one after the other, and its pipe."""

    process: BaseProcess
    pipe: Connection


IDLE: list[Rank] = []
"""Ranks that wait for the next pooled world."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S, pooled: bool = False
) -> list[Any]:
    """function(rank, world_size, *args) on every rank of a gloo world; the results in rank order.

    The function must be importable (defined at the top level of a module); results are pickled.

    Args:
        pooled: see `run_pooled`.

    Raises:
        RankFailure: with the traceback of the first rank that failed.
    """
    for _ in range(_MEETINGS - 1):
        try:
            return _run_ranks(world_size, function, args, timeout_s, pooled)
        except LostConnection as lost:
            warnings.warn(f"the ranks meet again, as gloo has lost a connection: {lost}", stacklevel=2)
    return _run_ranks(world_size, function, args, timeout_s, pooled)


def _run_ranks(
    world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, pooled: bool
) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="moe-ranks-") as folder:
        ranks = [IDLE.pop() if pooled and IDLE else _start_rank() for _ in range(world_size)]
        pipes = [rank.pipe for rank in ranks]
        kept: list[Rank] = []
        try:
            for number, rank in enumerate(ranks):
                assert rank.process.is_alive(), "a pooled rank has ended"
                rank.pipe.send_bytes(pickle.dumps((number, world_size, folder)))
            try:
                _collect(pipes, time.monotonic() + timeout_s)
            except RankFailure as failure:
                if _LOST_CONNECTION.search(str(failure)):
                    raise LostConnection(str(failure)) from None
                raise
            for pipe in pipes:
                pipe.send_bytes(pickle.dumps((function, args)))
            results = _collect(pipes, time.monotonic() + timeout_s)
            if pooled:
                kept = _release(ranks)
            return results
        finally:
            IDLE.extend(kept)
            ended = [rank for rank in ranks if rank not in kept]
            for rank in ended:
                rank.pipe.close()  # the ranks may leave now
            for rank in ended:
                rank.process.join(_LEAVE_S)
            kill(rank.process for rank in ended)


def run_pooled(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """As `run_ranks`, in processes that other worlds have used and will use.

    The function replaces no part of a module and breaks no training off but where all ranks refuse it alike. Its
    process groups, and what it sets in the environment and for warnings, end with it. A rank that failed or keeps a
    thread is not used again.
    """
    return run_ranks(world_size, function, *args, pooled=True)


def run_refused(world_size: int, function: Callable[..., Any], *args: Any) -> list[str]:
    """Sentences with which pooled ranks refuse function(rank, world_size, *args), as all of them must."""
    return run_pooled(world_size, _refusal, function, *args)


def _refusal(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> str:
    try:
        function(rank, world_size, *args)
    except UserError as error:
        return str(error)
    raise AssertionError(f"rank {rank} refuses nothing")


@atexit.register
def end_pool() -> None:
    """End the ranks that wait; multiprocessing would wait for them."""
    kill(rank.process for rank in IDLE)
    IDLE.clear()


def _start_rank() -> Rank:
    mine, theirs = FORKS.Pipe()
    process = fork(_rank_main, theirs)
    theirs.close()
    return Rank(process, mine)


def _release(ranks: list[Rank]) -> list[Rank]:
    """Let ranks whose jobs are all done clean up, and return those that can be used again."""
    clean = []
    for rank in ranks:
        rank.pipe.send_bytes(b"")
    for rank in ranks:
        with contextlib.suppress(EOFError):
            if rank.pipe.poll(_LEAVE_S) and rank.pipe.recv_bytes() == b"clean":
                clean.append(rank)
    return clean


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


def _rank_main(pipe: Connection) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    environment = dict(os.environ)
    try:
        while True:
            place = pipe.recv_bytes()
            with warnings.catch_warnings():
                _run_job(pipe, place)
            pipe.recv_bytes()  # all ranks are done: one that leaves early breaks connections that others still build
            _send_clean(pipe, environment)
    except (EOFError, OSError):
        pass  # the world, or the pool, has ended
    finally:
        os._exit(0)  # no atexit handlers: a failed peer must not hold this rank up


def _run_job(pipe: Connection, place: bytes) -> None:
    """Meet the other ranks, say so, and run what then comes: no rank has begun where they have to meet again."""
    try:
        rank, world_size, folder = pickle.loads(place)  # noqa: S301
        os.chdir(folder)
        torch.manual_seed(0)  # as in a fresh process: the same on all ranks of all worlds
        random.seed(0)
        if world_size > 1:
            store = dist.FileStore(str(Path(folder) / "store"), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        _send(pipe, (True, None))
        function, args = pickle.loads(pipe.recv_bytes())  # noqa: S301
        _send(pipe, (True, function(rank, world_size, *args)))
    except BaseException:
        _send(pipe, (False, traceback.format_exc()))


def _send_clean(pipe: Connection, environment: dict[str, str]) -> None:
    """Remove what a job has left in this process, and state whether it is as before."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.chdir("/")
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()
    pipe.send_bytes(b"clean" if threading.active_count() == 1 else b"threads")


def _send(pipe: Connection, outcome: tuple[bool, Any]) -> None:
    """By value: Connection.send would leave tensors in shared memory of a process that ends."""
    pipe.send_bytes(pickle.dumps(outcome))
