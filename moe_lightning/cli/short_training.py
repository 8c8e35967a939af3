"""Short measured trainings of a small GPT on ranks of this machine."""

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
import numpy as np
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from moe_lightning.arguments import Count, option
from moe_lightning.arrays import FloatArray
from moe_lightning.balancing.cluster import imbalance
from moe_lightning.balancing.rules import Strategy
from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.cli.capacity import check_processes
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.elastic.launcher import LocalLauncher, RanksFailed
from moe_lightning.elastic.worker import leave, work
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt import GPTConfig
from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
from moe_lightning.moe.forced_routing import ForcedRouting, read_routing_trace
from moe_lightning.moe.router import RouterConfig
from moe_lightning.strategies import ExpertParallelStrategy


def synchronize() -> None:
    """Wait for the accelerator, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> str:
    """One line that says where and how something was measured."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "unpinned"
    return f"{device}, torch {torch.__version__}, {torch.get_num_threads()} thread(s), cores {affinity}"


MODULE = "moe_lightning.cli.short_training"
_VOCABULARY = 256

WARMUP_STEPS = 12
"""Steps before the measured ones: a balancer places experts at step 8 and has measured dense layers before."""

_SETTLED = 600
"""Iteration of a trace from which its layers are looked at: before, routing has not settled."""


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
        """Record further values of the step; the time for it does not count as the next step's."""


# --- measured trainings ---------------------------------------------------------------------------------------------


def most_skewed(path: Path, num_experts: int) -> FloatArray:
    """Shares [E] of the settled layer of a trace that loads two ranks least evenly, of its most used experts."""
    counts, iteration = read_routing_trace(path)
    settled = counts[iteration >= _SETTLED].sum(axis=2)
    if not settled.size or settled.shape[2] < num_experts:
        raise ConfigurationError(
            f"{path} holds no {num_experts} experts after iteration {_SETTLED}: use a longer trace, or fewer experts"
        )
    plain = uniform_placement(num_experts, 2).replicas
    best, worst = np.full(num_experts, 1.0), 0.0
    for load in settled.reshape(-1, settled.shape[2]):
        kept = load[np.sort(np.argsort(-load, kind="stable")[:num_experts])]
        skew = imbalance(kept @ plain)
        if skew > worst:
            best, worst = kept.astype(np.float64), skew
    shares: FloatArray = best / best.sum()
    return shares


def write_trace(path: Path, shares_E: FloatArray) -> Path:
    """A trace whose routing has these shares at every iteration."""
    counts = np.round(shares_E * 1e6).astype(np.int64)[None, None, None]
    np.savez(path, counts=counts, iteration=np.array([1], dtype=np.int64))
    return path


def train(
    strategy: ExpertParallelStrategy, clock: StepClock, callbacks: Sequence[pl.Callback], trace: str, options: Any
) -> None:
    """Train under one recorded popularity of experts: the warm-up, and then the measured steps. Collective.

    Args:
        strategy: strategy of the training; its world stays open.
        clock: callback that measures.
        callbacks: callbacks that work beside it.
        trace: path of the routing trace.
        options: sizes, `batch` (sequences of a rank) and `steps` (measured steps).
    """
    pl.seed_everything(0, verbose=False)
    steps = WARMUP_STEPS + options.steps
    trainer = quiet_trainer(strategy, steps=steps, callbacks=[clock, *callbacks])
    batch = options.batch * trainer.world_size
    module = GPTModule(trace_gpt(options, trace), OptimizerConfig(lr=1e-4, warmup_steps=0))
    trainer.fit(module, DataLoader(random_text(batch * steps, options.context), batch))


def balancer_of(ways: Strategy) -> LoadBalancer:
    """Return the callback that balances as a strategy of `balancing.rules` says."""
    return LoadBalancer(
        rebalance_every=0 if ways.placement.rule == "plain" else 200,
        placement_rule=ways.placement.rule,
        allocation=ways.placement.allocation,
        shadows=ways.shadows,
    )


def trace_gpt(sizes: Any, trace: str | None = None) -> GPTConfig:
    """Return the GPT that is measured, routed as a trace says."""
    forced = ForcedRouting(kind="trace", path=trace) if trace else None
    return gpt(sizes, router=RouterConfig(top_k=2, aux_loss_coef=0.0, forced=forced))


# --- ranks ----------------------------------------------------------------------------------------------------------


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
    """Run a function on every rank and return the results; see `write_job`.

    Raises:
        ConfigurationError: a rank failed.
        Interrupted: a signal ended the run.
    """
    check_processes(num_ranks)
    launcher = LocalLauncher(num_ranks=num_ranks, log_dir=folder / "logs", module=MODULE, grace_s=5.0)
    with rank_failures_as_user_errors():
        launcher.run(write_job(folder, function, settings, cores))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


@contextlib.contextmanager
def rank_failures_as_user_errors() -> Iterator[None]:
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
