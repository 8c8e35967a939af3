"""moe-bench compare: the same small MoE GPT trained and saved by stock Lightning and by this project, in one run.

Two ranks of one core each; same first weights, same global batches, and the losses must agree. What a killed rank costs
is measured by moe-bench recovery.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare_contenders import BASES, SAVINGS, TRAININGS
from benchmarks.measuring import medians_of, own_cores, pinning
from moe_lightning.arguments import Count, OutputFile, OutputFolder, option
from moe_lightning.cli.short_training import ModelOptions, machine, on_ranks
from moe_lightning.errors import ConfigurationError
from moe_lightning.text_table import table

PARTS = ("training", "saving")
_RANKS = 2
_LOSS_TOLERANCE = 1e-3

Medians = Mapping[str, Mapping[str, float]]
"""Contender -> name of a figure -> its median over rounds."""


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of this benchmark."""

    parts: list[str] = option("what to compare", PARTS, choices=PARTS)
    rounds: Count = option("trainings of each, in turns", 5)
    steps: Count = option("measured steps of each", 10)
    every: Count = option("steps between stock checkpoints", 5)
    batch: Count = option("sequences of all ranks", 8)
    memory: bool = option("give freed memory back at once: true peaks, and slower steps", False)
    directory: OutputFolder | None = option("where to write checkpoints (default: the temporary directory)", None)
    json: OutputFile | None = option("where to leave all measurements", None)


def run(options: Options) -> int:
    """Measure, print a table for each part; 0 on success."""
    _check(options)
    if options.directory is not None:
        options.directory.mkdir(parents=True, exist_ok=True)
    cores = own_cores(_RANKS)
    with tempfile.TemporaryDirectory(prefix="moe-compare-", dir=options.directory) as folder:
        rows = _measure(Path(folder), options, cores)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    medians = {
        name: medians_of([row for row in rows if row["contender"] == name], but=("round", "contender"))
        for name in dict.fromkeys(row["contender"] for row in rows)
    }
    print(f"{machine()}; {_RANKS} ranks, {pinning(cores)}; medians of {options.rounds} rounds of {options.steps} steps")
    print(f"all end at the same loss, within {loss_spread(medians):.1e}")
    if "training" in options.parts:
        print(training_table(medians, options.batch * options.context))
        print(
            "loop: over experts, as stock PyTorch code does; cpu: processor time of the busier rank; state: parameters "
            "and optimizer state on each rank; peak: resident memory in the measured steps, over that before the model "
            "was built; embedding and output matrix are untied everywhere, because a pipeline needs it"
        )
    if "saving" in options.parts:
        print(saving_table(medians, options.every))
        memory_mb = max(row.get("memory_bytes", 0.0) for row in medians.values()) / 1e6
        print(
            "every: steps between checkpoints; stall: of one checkpoint; step: the mean, over that without saving; MB: "
            f"one checkpoint on disk. Our snapshots keep {memory_mb:.0f} MB of shared memory for each rank"
        )
    return 0


def _check(options: Options) -> None:
    if options.steps < 2 * options.every or options.steps % options.every:
        raise ConfigurationError(
            f"--steps {options.steps} must be a multiple of --every {options.every}, and at least twice as many"
        )
    if options.batch % _RANKS:
        raise ConfigurationError(f"--batch {options.batch} must be even: stock DDP does not support uneven batches")
    if options.experts < _RANKS:
        raise ConfigurationError(f"--experts {options.experts} must be at least {_RANKS}: every token chooses so many")
    if "training" in options.parts and options.layers < _RANKS:
        raise ConfigurationError(f"--layers {options.layers} must be at least {_RANKS}: a pipeline has so many stages")
    if options.d_model % 4:
        raise ConfigurationError(f"--d-model {options.d_model} must be a multiple of 4, the number of heads")


def _measure(folder: Path, options: Options, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of both ranks, as the slower one saw them."""
    names = list(TRAININGS) if "training" in options.parts else list(BASES.values())
    names += list(SAVINGS) if "saving" in options.parts else []
    settings = asdict(options) | {"contenders": names, "directory": None, "json": None, "folder": str(folder)}
    ranks = on_ranks("benchmarks.compare_worker:measure_all", settings, num_ranks=_RANKS, folder=folder, cores=cores)
    return [slowest(seen) for seen in zip(*ranks, strict=True)]


def slowest(seen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of what several ranks saw of the same training: the largest of each figure; the first rank has all."""
    return {name: max(row[name] for row in seen if name in row) for name in seen[0]}


def loss_spread(medians: Medians) -> float:
    """Largest difference between the last losses.

    Raises:
        ConfigurationError: it is so large that not all have done the same work.
    """
    losses = {name: row["loss"] for name, row in medians.items()}
    low, high = min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)
    spread = losses[high] - losses[low]
    if not spread <= _LOSS_TOLERANCE:
        raise ConfigurationError(
            f"{high!r} ends at loss {losses[high]:.5f}, {low!r} at {losses[low]:.5f}: more than {_LOSS_TOLERANCE} "
            "apart, so the comparison is void; try fewer steps"
        )
    return spread


def training_table(medians: Medians, tokens: int) -> str:
    """A line for each way to train on so many tokens a step."""
    base = medians[next(iter(TRAININGS))]
    rows = []
    for name in TRAININGS:
        row = medians[name]
        times = [cell for kind in ("step_s", "cpu_s") for cell in (_ms(row[kind]), f"{row[kind] / base[kind]:.2f}")]
        peak = f"{row['peak_bytes'] / 1e6:.1f}" if "peak_bytes" in row else "-"
        rows.append((name, *times, f"{tokens / row['step_s']:.0f}", f"{row['state_bytes'] / 1e6:.1f}", peak))
    return table(("training", "step ms", "ratio", "cpu ms", "ratio", "tokens/s", "state MB", "peak MB"), rows)


def saving_table(medians: Medians, every: int) -> str:
    """A line for each way to save; `every` is how often the stock ones do."""
    rows = []
    for name, contender in SAVINGS.items():
        row, base = medians[name], medians[BASES[contender.strategy]]
        times = (_ms(row["stall_s"]), _ms(row["mean_step_s"]), f"{row['mean_step_s'] / base['mean_step_s']:.2f}")
        rows.append((name, contender.saves_every(every), *times, f"{row['disk_bytes'] / 1e6:.1f}"))
    return table(("saving", "every", "stall ms", "step ms", "ratio", "MB"), rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
