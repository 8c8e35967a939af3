"""moe-bench step: a training step of one rank under the strategy against the same module under stock Lightning."""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from moe_lightning.arguments import Count, value
from moe_lightning.bench.measure import machine, synchronize
from moe_lightning.models.gpt_config import GPTConfig
from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
from moe_lightning.strategies import ExpertParallelStrategy

_WARMUP_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=value(Count), default=20, help="measured steps of a round (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=value(Count), default=5, help="rounds of each, in turns (default: %(default)s)"
    )
    parser.add_argument("--batch", type=value(Count), default=8, help="sequences (default: %(default)s)")
    parser.add_argument("--context", type=value(Count), default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--d-model", type=value(Count), default=192, help="model width (default: %(default)s)")
    parser.add_argument("--layers", type=value(Count), default=4, help="transformer layers (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Print median step milliseconds of both and their ratio."""
    torch.set_num_threads(options.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.pytorch")
    strategies: dict[str, Callable[[], Any]] = {
        "stock Lightning": lambda: "auto",
        "expert_parallel": ExpertParallelStrategy,
    }
    times: dict[str, list[float]] = {name: [] for name in strategies}
    for _ in range(options.rounds):
        for name, make in strategies.items():
            times[name].append(_median_step(make(), options))
    medians = {name: statistics.median(values) for name, values in times.items()}
    console = Console()
    console.print(f"{machine()}; medians of {options.rounds} rounds of {options.steps} steps, in turns")
    table = Table("strategy", "step ms", "ratio", "rounds ms")
    for name, median in medians.items():
        rounds = " ".join(f"{1e3 * value:.1f}" for value in times[name])
        table.add_row(name, f"{1e3 * median:.2f}", f"{median / medians['stock Lightning']:.3f}", rounds)
    console.print(table)
    return 0


def _median_step(strategy: Any, options: argparse.Namespace) -> float:
    pl.seed_everything(0, verbose=False)
    config = GPTConfig(
        vocab_size=256,
        context_length=options.context,
        num_layers=options.layers,
        num_heads=4,
        d_model=options.d_model,
        d_expert=2 * options.d_model,
        moe_every=1,
    )
    samples = options.batch * (options.steps + _WARMUP_STEPS + 1)
    ids = torch.randint(0, 256, (samples, options.context + 1))
    clock = StepClock()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=options.steps + _WARMUP_STEPS + 1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    data = TensorDataset(ids[:, :-1], ids[:, 1:])
    trainer.fit(GPTModule(config, OptimizerConfig(warmup_steps=0)), DataLoader(data, options.batch, shuffle=True))
    return statistics.median(clock.durations_s()[_WARMUP_STEPS:])


class StepClock(pl.Callback):
    """Notes the end of every step; durations hold all that lies between two ends, the data loader included."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        synchronize()
        self._ends.append(time.perf_counter())

    def durations_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self._ends, self._ends[1:], strict=False)]
