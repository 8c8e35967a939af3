"""moe-bench step: a training step of one rank under the strategy against the same module under stock Lightning."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from benchmarks.measuring import interleaved
from moe_lightning.arguments import Count, option
from moe_lightning.cli.short_training import ModelOptions, StepClock, gpt, hush, machine, quiet_trainer, random_text
from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
from moe_lightning.strategies import ExpertParallelStrategy
from moe_lightning.text_table import table

_WARMUP_STEPS = 4
_STOCK = "stock Lightning"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    steps: Count = option("measured steps of a round", 20)
    rounds: Count = option("rounds of each, in turns", 5)
    batch: Count = option("sequences", 8)
    context: Count = option("tokens of a sequence", 128)
    d_model: Count = option("model width", 192)
    layers: Count = option("transformer layers", 4)


def run(options: Options) -> int:
    """Print median step milliseconds of both and their ratio."""
    hush()
    strategies: dict[str, Callable[[], Any]] = {_STOCK: lambda: "auto", "expert_parallel": ExpertParallelStrategy}
    times = interleaved(
        {name: partial(_median_step, make, options) for name, make in strategies.items()}, options.rounds
    )
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        (
            name,
            f"{1e3 * median:.2f}",
            f"{median / medians[_STOCK]:.3f}",
            " ".join(f"{1e3 * s:.1f}" for s in times[name]),
        )
        for name, median in medians.items()
    ]
    print(f"{machine()}; medians of {options.rounds} rounds of {options.steps} steps, in turns")
    print(table(("strategy", "step ms", "ratio", "rounds ms"), rows))
    return 0


def _median_step(make_strategy: Callable[[], Any], options: Options) -> float:
    pl.seed_everything(0, verbose=False)
    sizes = ModelOptions(
        context=options.context, d_model=options.d_model, d_expert=2 * options.d_model, layers=options.layers
    )
    steps, clock = options.steps + _WARMUP_STEPS, StepClock()
    data = DataLoader(random_text(options.batch * steps, options.context), options.batch, shuffle=True)
    trainer = quiet_trainer(
        make_strategy(), steps=steps, callbacks=[clock], plugins=[], devices=1, gradient_clip_val=1.0
    )
    trainer.fit(GPTModule(gpt(sizes), OptimizerConfig(warmup_steps=0)), data)
    return statistics.median(clock.step_s[_WARMUP_STEPS:])
