"""The server process that tests fork ranks, workers, agents and commands from, in a tenth of a second each.

It has imported what they need, which costs every fresh interpreter seconds, but has run nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
_SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined]
PRELOADED = [
    "tests.uncollected",  # first
    "lightning.pytorch",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "torch.distributed.checkpoint",
    "moe_lightning.checkpoint.agent",
    "moe_lightning.cli.train",
    "moe_lightning.cli.training",
    "moe_lightning.elastic.rendezvous_client",
    "moe_lightning.elastic.launcher",
    "moe_lightning.parallel.pipeline",
    "moe_lightning.strategies",
    "moe_lightning.strategies.hangs",
    "moe_lightning.strategies.slow_ranks",
    "moe_lightning.callbacks.telemetry",
    "moe_lightning.simulate",
    "fsspec.implementations.local",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "wandb",
    "pandas",  # W&B imports it for tables
    "s3fs",  # Lightning looks for it when it saves
    "tests.agents",
    "tests.chaos.elastic_worker",
    "tests.distributed.same_training",
    "transformers.modeling_utils",
    "benchmarks.silent.catalogue",
    "benchmarks.silent.training",
    "moe_lightning.cli.huggingface",
    "moe_lightning.doctor.parity_doctor",
    "transformers.models.auto.modeling_auto",
    "pytest",  # a rank imports the module of its test, a tenth of a second of most of them
    "hypothesis",
    "tests.entry_points",
    "tests.frozen",  # last
]
"""Modules that the server imports. Python has one server: `benchmarks.silent` would have it import fewer."""
FORKS.set_forkserver_preload(PRELOADED)
PATIENCE_S = 240.0
"""How long tests wait for what takes a second: a machine may be busy with others, and pytest ends a test at 300."""


OWNER = "MOE_LIGHTNING_TESTS_OF"


def claim_processes() -> None:
    """Let everything that this process starts from now on be known as its own."""
    os.environ[OWNER] = str(os.getpid())


def fork(target: Callable[..., object], *args: Any, daemon: bool = False) -> BaseProcess:
    """Start target(*args) in a process of its own. Whoever starts it must `kill` it, unless it is a daemon, which may
    start none itself."""
    _SERVER.ensure_running()
    process = FORKS.Process(target=_main, args=(_SERVER._forkserver_address, target, args), daemon=daemon)
    process.start()
    return process


def _main(server: str, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Agents that this process or its forks start are forked, too, and from the same server: a fresh agent, or the
    server that Python starts in a process that does not know one, imports for seconds."""
    _SERVER._forkserver_address = server
    _SERVER.ensure_running = lambda: None
    from moe_lightning.checkpoint import agent_handle
    from tests.agents import ForkedAgent  # it forks by this module

    agent_handle.start_agent = ForkedAgent  # type: ignore[assignment]
    target(*args)


def kill(processes: Iterable[BaseProcess]) -> None:
    """End those that live, and wait until all have ended."""
    processes = list(processes)
    for process in processes:
        process.kill()
    for process in processes:
        process.join(PATIENCE_S)
        assert process.exitcode is not None, f"process {process.pid} outlives SIGKILL"


def wait_until(condition: Callable[[], object], complaint: str | Callable[[], str] = "it did not happen") -> None:
    """Look every hundredth of a second, for as long as tests wait, whether it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, complaint if isinstance(complaint, str) else complaint()
        time.sleep(0.01)


@contextlib.contextmanager
def forked(target: Callable[..., object], *args: Any) -> Iterator[BaseProcess]:
    """target(*args) in a process that ends with the block."""
    process = fork(target, *args)
    try:
        yield process
    finally:
        kill([process])
