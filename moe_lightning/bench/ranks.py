"""The ranks of a benchmark: started together on this machine, each on a core of its own where there are enough."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from moe_lightning.cli.capacity import check_processes
from moe_lightning.elastic.launcher import LocalLauncher, RanksFailed
from moe_lightning.elastic.lifeline import end_with_launcher
from moe_lightning.errors import ConfigurationError


def own_cores(num_ranks: int) -> list[int]:
    """A core for each rank; empty where this process may use fewer, or cores cannot be chosen."""
    cores = sorted(os.sched_getaffinity(0))[:num_ranks] if hasattr(os, "sched_setaffinity") else []
    return cores if len(cores) == num_ranks else []


def launch(module: str, arguments: Sequence[str], *, num_ranks: int, log_dir: Path) -> None:
    """Run `python -m module arguments...` on every rank until all have ended well.

    Raises:
        ConfigurationError: a rank failed.
        Interrupted: a signal ended the run.
    """
    check_processes(num_ranks)
    launcher = LocalLauncher(num_ranks=num_ranks, log_dir=log_dir, module=module, grace_s=5.0)
    try:
        launcher.run(arguments)
    except RanksFailed as error:
        raise ConfigurationError(f"a rank of the benchmark failed: {error} {error.failure.details}") from error


def enter(cores: Sequence[int] = ()) -> int:
    """What a rank does first: it ends with its launcher, keeps to its core and one thread, and lets libraries be
    quiet.

    Returns:
        This process's rank.
    """
    end_with_launcher()
    rank = int(os.environ["RANK"])
    if cores:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.pytorch")
    return rank
