"""Ranks of a gloo world, forked in a tenth of a second each from a process that has imported everything."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch._subclasses.fake_tensor",
        "torch.distributed.checkpoint",
        "benchmarks.silent.catalogue",
        "benchmarks.silent.training",
        "moe_lightning.cli.huggingface",
        "transformers.models.auto.modeling_auto",
        "moe_lightning.doctor.parity_doctor",
        "moe_lightning.strategies",
    ]
)
_LEAVE_S = 5.0


def describe_rank(rank: int, size: int) -> None:
    """Name this process's place in a world to Lightning."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


class RankFailure(Exception):
    """A rank raised, died or did not finish in time.

    Attributes:
        sentence: what a user would be told, or the error's own words.
        is_mistake: the error is a user's mistake.
    """

    def __init__(self, message: str, sentence: str = "", *, is_mistake: bool = False) -> None:
        super().__init__(message)
        self.sentence, self.is_mistake = sentence or message, is_mistake


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """Return what function(rank, size, *args) returns on each rank of a new world. Processes are never used again, so
    whatever a function changes in its own ends with it.

    Raises:
        RankFailure: with the traceback of a rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="moe-silent-") as folder:
        pipes, processes = [], []
        try:
            for rank in range(size):
                receiver, sender = _FORKS.Pipe()
                process = _FORKS.Process(target=_rank_main, args=(rank, size, folder, sender, function, args))
                process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
            return _results(pipes, time.monotonic() + timeout_s)
        finally:
            for pipe in pipes:
                pipe.close()  # the ranks may leave now
            for process in processes:
                process.join(_LEAVE_S)
                process.kill()
                process.join()


def _results(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    pending: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(f"ranks {sorted(pending.values())} did not finish in time")
        for pipe in ready:
            rank = pending.pop(pipe)
            try:
                is_done, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]  # noqa: S301
            except EOFError:
                raise RankFailure(f"rank {rank} died") from None
            if not is_done:
                trace, sentence, is_mistake = value
                raise RankFailure(f"rank {rank} failed:\n{trace}", sentence, is_mistake=is_mistake)
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int, size: int, folder: str, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    from moe_lightning.user_errors import sentence_of

    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    os.chdir(folder)
    for stream in (1, 2):  # what is to be known comes through the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        if size > 1:
            store = dist.FileStore(  # type: ignore[attr-defined]
                str(Path(folder) / "store"), size
            )
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        outcome = True, function(rank, size, *args)
    except BaseException as error:
        told = sentence_of(error) if isinstance(error, Exception) else None
        outcome = False, (traceback.format_exc(), told or f"{type(error).__name__}: {error}", told is not None)
    with contextlib.suppress(EOFError, OSError):
        pipe.send_bytes(pickle.dumps(outcome))
        pipe.recv_bytes()  # one that leaves early would break connections that others still build
    os._exit(0)
