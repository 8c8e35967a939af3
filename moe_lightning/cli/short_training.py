"""Short measured trainings of a small GPT on this machine, with interleaved rounds and medians.

Contenders take turns and are compared by ratios inside one run, so that noise of the machine affects all alike.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from moe_lightning.balancing.cluster import balance_ratio, imbalance
from moe_lightning.balancing.rules import Strategy
from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.cli.capacity import check_processes
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.dispatch.quota import balanced_quota
from moe_lightning.elastic.launcher import LocalLauncher, RanksFailed
from moe_lightning.elastic.worker import leave, work
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt import GPTConfig
from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
from moe_lightning.moe.forced_routing import ForcedRouting
from moe_lightning.moe.router import RouterConfig
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.simulate.workload import load_trace
from moe_lightning.strategies import ExpertParallelStrategy
from moe_lightning.strategies.placed_experts import PlacedExperts


def interleaved(contenders: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 0) -> dict[str, list[float]]:
    """Run the contenders in turns and return the results of each by round; so a slow spell of the machine affects all.

    Args:
        contenders: functions that measure a whole unit of work.
        rounds: measurements of each.
        warmup: calls of each before, which do not count.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(warmup + rounds):
        for name, measure in contenders.items():
            found[name].append(measure())
    return {name: values[warmup:] for name, values in found.items()}


def interleaved_medians(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2
) -> dict[str, float]:
    """Median seconds that each contender takes, in turns."""
    seconds = interleaved({name: partial(timed, call) for name, call in contenders.items()}, rounds, warmup)
    return {name: statistics.median(values) for name, values in seconds.items()}


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call, until the accelerator has done it."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Wait for the accelerator, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def medians_of(rows: Sequence[Mapping[str, Any]], *, but: Iterable[str] = ()) -> dict[str, float]:
    """The median of every figure over rows that all have it, those left out that are named."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0] if name not in but}


def goal(what: str, reached: float, most: float, form: str = "{:.2f}", note: str = "") -> str:
    """Return a line that says whether a value is at most its goal."""
    verdict = "met   " if reached <= most else "missed"
    return f"{verdict}  {what}: {form.format(reached)}, goal at most {most:.2f}{note}"


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
    trace = load_trace(path)
    settled = trace.counts[trace.iteration >= _SETTLED].sum(axis=2)
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


class BalanceWatch(StepClock):
    """Notes, after the warm-up, the time of each step, and what travelled and was waited for in it."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[dict[str, float]] = []

    @override
    def note(self, trainer: pl.Trainer) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ExpertParallelStrategy)
        if trainer.global_step > WARMUP_STEPS:
            times = {"step_s": self.step_s[-1], "cpu_s": self.cpu_s[-1]}
            self._rows.append(times | _layers(strategy.experts) | _copies(trainer))

    def summary(
        self, strategy: ExpertParallelStrategy, over_steps: Callable[[Sequence[float]], float]
    ) -> dict[str, float]:
        """Over steps; of the slowest rank for times, summed over ranks for bytes. Collective."""
        mine = {name: over_steps([row[name] for row in self._rows]) for name in self._rows[0]}
        ranks = all_gather_json(mine, strategy.world)
        return {name: (sum if name.endswith("_bytes") else max)(rank[name] for rank in ranks) for name in mine}


def _layers(experts: PlacedExperts) -> dict[str, float]:
    """Means over layers of the balance, and the bytes that left this rank in the four exchanges of each."""
    before, after, quotients, sent_bytes = [], [], [], 0
    for layer in experts.layers:
        assert layer.statistics is not None
        tokens = layer.statistics.computed_NE.numpy().sum(axis=0)
        loads = layer.dispatcher.last_rank_loads
        if loads is None:  # a world of one rank
            loads = tokens.sum(keepdims=True)
        plain = balanced_quota(tokens, uniform_placement(len(tokens), len(loads)).replicas).sum(axis=0)
        before.append(imbalance(plain))
        after.append(imbalance(loads))
        quotients.append(min(balance_ratio(plain, loads), 1e3))
        sent_bytes += 4 * layer.dispatcher.last_sent_bytes
    return {
        "imbalance_before": statistics.mean(before),
        "imbalance_after": statistics.mean(after),
        "balance_ratio": statistics.mean(quotients),
        "exchange_bytes": sent_bytes,
    }


def _copies(trainer: pl.Trainer) -> dict[str, float]:
    """Return the measured and the predicted cost of the last step's shadows."""
    balancer = next((c for c in trainer.callbacks if isinstance(c, LoadBalancer)), None)  # type: ignore[attr-defined]
    shadow_transfers = balancer.last_shadow_transfers if balancer is not None else None
    planner = balancer.planner if shadow_transfers is not None and balancer is not None else None
    expected = planner.predicted_step() if planner is not None else None
    return {
        "copy_bytes": shadow_transfers.sent_bytes if shadow_transfers else 0,
        "exposed_trans_s": shadow_transfers.trans_wait_s if shadow_transfers else 0.0,
        "exposed_agg_s": shadow_transfers.agg_wait_s if shadow_transfers else 0.0,
        "expected_copy_s": expected.transfer_s if expected else 0.0,
        "expected_exposed_s": expected.exposed_s if expected else 0.0,
    }


def train(
    strategy: ExpertParallelStrategy,
    callbacks: Sequence[pl.Callback],
    trace: str,
    options: Any,
    *,
    over_steps: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, float]:
    """Train under one recorded popularity of experts and return figures of a step after the warm-up. Collective.

    Args:
        strategy: strategy of the training; its world is closed at the end.
        callbacks: callbacks that work beside the one that measures.
        trace: path of the routing trace.
        options: sizes, `batch` (sequences of a rank) and `steps` (measured steps).
        over_steps: reduction of each figure over the measured steps.
    """
    pl.seed_everything(0, verbose=False)
    watch = BalanceWatch()
    steps = WARMUP_STEPS + options.steps
    trainer = quiet_trainer(strategy, steps=steps, callbacks=[watch, *callbacks])
    batch = options.batch * trainer.world_size
    module = GPTModule(trace_gpt(options, trace), OptimizerConfig(lr=1e-4, warmup_steps=0))
    trainer.fit(module, DataLoader(random_text(batch * steps, options.context), batch))
    found = watch.summary(strategy, over_steps)
    strategy.world.close()
    return found


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
