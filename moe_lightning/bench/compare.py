"""moe-bench compare: the same small MoE GPT trained and saved by stock Lightning and by this project, in one run.

Two ranks of one core each; same first weights, same global batches, and the losses must agree. What a killed rank costs
is measured by moe-bench recovery.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from moe_lightning.arguments import Count, output_file, output_folder, value
from moe_lightning.bench.compare_contenders import BASES, SAVINGS, TRAININGS
from moe_lightning.bench.measure import machine
from moe_lightning.bench.model_options import add_model_arguments
from moe_lightning.bench.ranks import launch, own_cores
from moe_lightning.elastic.failure import Interrupted
from moe_lightning.errors import ConfigurationError

PARTS = ("training", "saving")
_RANKS = 2
_LOSS_TOLERANCE = 1e-3

Medians = Mapping[str, Mapping[str, float]]
"""Contender -> name of a figure -> its median over rounds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", default=list(PARTS), help="what to compare: training saving")
    parser.add_argument(
        "--rounds", type=value(Count), default=5, help="trainings of each, in turns (default: %(default)s)"
    )
    parser.add_argument("--steps", type=value(Count), default=10, help="measured steps of each (default: %(default)s)")
    parser.add_argument(
        "--every", type=value(Count), default=5, help="steps between stock checkpoints (default: %(default)s)"
    )
    parser.add_argument("--batch", type=value(Count), default=8, help="sequences of all ranks (default: %(default)s)")
    add_model_arguments(parser)
    parser.add_argument(
        "--directory", type=output_folder, help="where to write checkpoints (default: the temporary directory)"
    )
    parser.add_argument("--json", type=output_file, help="where to leave all measurements")


def run(options: argparse.Namespace) -> int:
    """Measure, print a table for each part; 0 on success."""
    _check(options)
    if options.directory is not None:
        options.directory.mkdir(parents=True, exist_ok=True)
    cores = own_cores(_RANKS)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-compare-", dir=options.directory) as folder:
            rows = _measure(Path(folder), options, cores)
    except Interrupted as stop:
        print(f"moe-bench: {stop}", file=sys.stderr)
        return 128 + stop.signal
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    medians = medians_of(rows)
    console = Console()
    pinned = f"pinned to cores {cores}" if cores else "not pinned: too few cores"
    console.print(f"{machine()}; {_RANKS} ranks, {pinned}; medians of {options.rounds} rounds of {options.steps} steps")
    console.print(f"all end at the same loss, within {loss_spread(medians):.1e}")
    if "training" in options.parts:
        console.print(training_table(medians, options.batch * options.context))
        console.print(
            "loop: over experts, as stock PyTorch code does; cpu: processor time of the busier rank; state: parameters "
            "and optimizer state on each rank"
        )
    if "saving" in options.parts:
        console.print(saving_table(medians, options.every))
        memory_mb = max(row.get("memory_bytes", 0.0) for row in medians.values()) / 1e6
        console.print(
            "every: steps between checkpoints; stall: of one checkpoint; step: the mean, over that without saving; MB: "
            f"one checkpoint on disk. Our snapshots keep {memory_mb:.0f} MB of shared memory for each rank"
        )
    return 0


def _check(options: argparse.Namespace) -> None:
    for part in options.parts:
        if part not in PARTS:
            raise ConfigurationError(f"--parts {part!r} is unknown: use some of {', '.join(PARTS)}")
    if options.steps < 2 * options.every or options.steps % options.every:
        raise ConfigurationError(
            f"--steps {options.steps} must be a multiple of --every {options.every}, and at least twice as many"
        )
    if options.batch % _RANKS:
        raise ConfigurationError(f"--batch {options.batch} must be even: stock DDP knows no uneven batches")
    if options.experts < _RANKS:
        raise ConfigurationError(f"--experts {options.experts} must be at least {_RANKS}: every token chooses so many")
    if options.d_model % 4:
        raise ConfigurationError(f"--d-model {options.d_model} must be a multiple of 4, the number of heads")


def _measure(folder: Path, options: argparse.Namespace, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of both ranks, as the slower one saw them."""
    names = list(TRAININGS) if "training" in options.parts else list(BASES.values())
    names += list(SAVINGS) if "saving" in options.parts else []
    keys = ("rounds", "steps", "every", "batch", "context", "d_model", "d_expert", "layers", "experts")
    settings = {key: getattr(options, key) for key in keys}
    settings |= {"contenders": names, "cores": list(cores), "ranks": _RANKS}
    (folder / "settings.json").write_text(json.dumps(settings))
    launch(
        "moe_lightning.bench.compare_worker",
        [str(folder / "settings.json"), str(folder)],
        num_ranks=_RANKS,
        log_dir=folder / "logs",
    )
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(_RANKS)]
    return [slowest(seen) for seen in zip(*ranks, strict=True)]


def slowest(seen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of what several ranks saw of the same training: the largest of each figure; the first rank has all."""
    return {name: max(row[name] for row in seen if name in row) for name in seen[0]}


def medians_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Over rounds."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["contender"] for row in rows):
        mine = [row for row in rows if row["contender"] == name]
        found[name] = {
            key: statistics.median(row[key] for row in mine) for key in mine[0] if key not in ("round", "contender")
        }
    return found


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


def training_table(medians: Medians, tokens: int) -> Table:
    """A line for each way to train on so many tokens a step."""
    table = Table(_name("training"), "step ms", "ratio", "cpu ms", "ratio", "tokens/s", "state MB")
    base = medians[next(iter(TRAININGS))]
    for name in TRAININGS:
        row = medians[name]
        table.add_row(
            name,
            _ms(row["step_s"]),
            f"{row['step_s'] / base['step_s']:.2f}",
            _ms(row["cpu_s"]),
            f"{row['cpu_s'] / base['cpu_s']:.2f}",
            f"{tokens / row['step_s']:.0f}",
            f"{row['state_bytes'] / 1e6:.1f}",
        )
    return table


def saving_table(medians: Medians, every: int) -> Table:
    """A line for each way to save; `every` is how often the stock ones do."""
    table = Table(_name("saving"), "every", "stall ms", "step ms", "ratio", "MB")
    for name, contender in SAVINGS.items():
        row, base = medians[name], medians[BASES[contender.strategy]]
        table.add_row(
            name,
            f"{contender.saves_every(every)}",
            _ms(row["stall_s"]),
            _ms(row["mean_step_s"]),
            f"{row['mean_step_s'] / base['mean_step_s']:.2f}",
            f"{row['disk_bytes'] / 1e6:.1f}",
        )
    return table


def _name(header: str) -> Column:
    return Column(header, no_wrap=True)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
