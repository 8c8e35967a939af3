"""Trainings of benchmarks: ranks on this machine that run one function each, and the small GPT that they train."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset
from typing_extensions import override

from moe_lightning.arguments import Count, option
from moe_lightning.bench.measure import synchronize
from moe_lightning.cli.capacity import check_processes
from moe_lightning.elastic.launcher import LocalLauncher, RanksFailed
from moe_lightning.elastic.lifeline import leave
from moe_lightning.elastic.work import work
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt_config import GPTConfig

MODULE = "moe_lightning.bench.training"
_VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes of the GPT that is measured."""

    context: Count = option("tokens of a sequence", 128)
    d_model: Count = option("model width", 192)
    d_expert: Count = option("expert width", 768)
    layers: Count = option("transformer layers, all MoE", 2)
    experts: Count = option("experts of a layer", 8)


def gpt(sizes: Any, **changes: Any) -> GPTConfig:
    """The GPT of these sizes (attributes as of ModelOptions)."""
    return GPTConfig(
        vocab_size=_VOCABULARY,
        context_length=sizes.context,
        num_layers=sizes.layers,
        num_heads=4,
        d_model=sizes.d_model,
        d_expert=sizes.d_expert,
        num_experts=sizes.experts,
        moe_every=1,
        **changes,
    )


def random_text(samples: int, context: int, generator: torch.Generator | None = None) -> TensorDataset:
    """Sequences of random tokens, and what follows each token."""
    ids = torch.randint(0, _VOCABULARY, (samples, context + 1), generator=generator)
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def quiet_trainer(strategy: Any, *, steps: int, callbacks: Sequence[pl.Callback], **changes: Any) -> pl.Trainer:
    """A trainer of all ranks, on the CPU, that trains and says nothing."""
    settings: dict[str, Any] = {
        "plugins": [LightningEnvironment()],
        "accelerator": "cpu",
        "devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": steps + 1,
    }
    return pl.Trainer(strategy=strategy, max_steps=steps, callbacks=list(callbacks), **settings | changes)


def hush() -> None:
    """Lightning keeps its advice to itself."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.pytorch")


class StepClock(pl.Callback):
    """Notes the seconds of every step, from the end of the one before, by the clock and by this rank's processor.

    The processor time, threads of the exchanges included, is what a step would take on a machine that does nothing else
    and never waits.
    """

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.cpu_s: list[float] = []
        self._last = time.perf_counter(), time.process_time()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        synchronize()
        self.step_s.append(time.perf_counter() - self._last[0])
        self.cpu_s.append(time.process_time() - self._last[1])
        self.note(trainer)
        self._last = time.perf_counter(), time.process_time()

    def note(self, trainer: pl.Trainer) -> None:
        """What else is to be written down of the step; it does not count as the next one's time."""


# --- ranks ----------------------------------------------------------------------------------------------------------


def own_cores(num_ranks: int) -> list[int]:
    """A core for each rank; empty where this process may use fewer, or cores cannot be chosen."""
    cores = sorted(os.sched_getaffinity(0))[:num_ranks] if hasattr(os, "sched_setaffinity") else []
    return cores if len(cores) == num_ranks else []


def pinning(cores: Sequence[int]) -> str:
    """In words, where the ranks run."""
    return f"pinned to cores {list(cores)}" if cores else "not pinned: too few cores"


def write_job(folder: Path, function: str, settings: Mapping[str, Any], cores: Sequence[int] = ()) -> list[str]:
    """The arguments of a rank that calls `function` ("module:name") with settings that JSON can say, pinned to its turn
    of the cores where there are any.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps({"function": function, "settings": settings, "cores": list(cores)}))
    return [str(path)]


def on_ranks(
    function: str, settings: Mapping[str, Any], *, num_ranks: int, folder: Path, cores: Sequence[int] = ()
) -> list[Any]:
    """What a function returns on every rank; see `write_job`.

    Raises:
        ConfigurationError: a rank failed.
        Interrupted: a signal ended the run.
    """
    check_processes(num_ranks)
    launcher = LocalLauncher(num_ranks=num_ranks, log_dir=folder / "logs", module=MODULE, grace_s=5.0)
    with failing_as_mistakes():
        launcher.run(write_job(folder, function, settings, cores))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


@contextlib.contextmanager
def failing_as_mistakes() -> Iterator[None]:
    """A failed rank of a benchmark is told in one sentence."""
    try:
        yield
    except RanksFailed as error:
        raise ConfigurationError(f"a rank of the benchmark failed: {error} {error.failure.details}") from error


def do_job(path: Path) -> None:
    """One rank's part of a job; what it found stays beside the job."""
    job, rank = json.loads(path.read_text()), int(os.environ["LOCAL_RANK"])
    if job["cores"]:
        os.sched_setaffinity(0, {job["cores"][rank % len(job["cores"])]})
    torch.set_num_threads(1)
    hush()
    module, _, name = job["function"].partition(":")
    found = getattr(importlib.import_module(module), name)(job["settings"])
    (path.parent / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    leave(work("moe-bench", partial(do_job, Path(sys.argv[1]))))
