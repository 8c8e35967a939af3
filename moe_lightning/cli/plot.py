"""`moe-bench plot RUN`: pictures of a run from its CSV metrics and its expert_load.csv, or of a routing trace.

One SVG each, where the run logged the data: load of every layer's experts over time, imbalance before and after
balancing, milliseconds and bytes of checkpoints, lost tokens, numbers of experts saved, and phases of every recovery.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_lightning.arguments import OutputFolder, option
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import replace_text
from moe_lightning.moe.forced_routing import read_loads
from moe_lightning.plots import bar_chart, heat_map, line_chart, phase_lines, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metrics = Mapping[str, Mapping[int, float]]  # {name: {step: value}}, steps ascending

_IMBALANCES = {
    "busiest expert": ("moe", "expert_imbalance_ratio"),
    "ranks, plain EP": ("balance", "imbalance_before_ratio"),
    "ranks, as trained": ("moe", "rank_imbalance_ratio"),
}
_TIMES = {"training waits": "stall_ms", "copy to memory": "snapshot_ms", "write to storage": "persist_ms"}
_SIZES = {"copied to memory by a rank": "snapshot_bytes", "written to storage by its node": "persist_bytes"}
_MAX_RECOVERIES = 30
_BY_STEPS_MADE = ("checkpoint/", "recovery/")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `moe-bench plot`."""

    run: Path = option("a run directory, outputs/NAME, or loads alone: a routing trace (.npz), or an expert_load.csv")
    out: OutputFolder | None = option("folder for the pictures (default: pictures/ in or beside it)", None)


def run(options: Options) -> int:
    """Draw what the run logged; 0 on success."""
    pictures = dict(draw(options.run))
    if not pictures:
        raise ConfigurationError(f"{options.run} logged nothing to draw: train with callbacks=load_balancer or so")
    out = options.out or (options.run.parent if options.run.is_file() else options.run) / "pictures"
    if options.out is None and out.is_symlink():
        raise ConfigurationError(f"{out} is a link, which a run of others may have set: give --out FOLDER")
    out.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        replace_text(out / f"{name}.svg", svg(picture))  # not through a link that the run has there
        print(out / f"{name}.svg")
    return 0


def draw(directory: Path) -> Iterator[tuple[str, Figure]]:
    """Names and pictures of a run, or of a file of loads.

    Raises:
        ConfigurationError: it has neither metrics nor loads, or a file that cannot be read.
    """
    files = metrics_files(directory)
    loads = directory if directory.is_file() else directory / "expert_load.csv"
    if not files and not loads.is_file():
        raise ConfigurationError(f"{directory} has no csv/version_*/metrics.csv: give a run directory, outputs/NAME")
    if loads.is_file():
        steps, shares_LSE = read_loads(loads)
        for layer, shares_SE in enumerate(shares_LSE):
            yield f"expert_load_layer{layer:02d}", heat_map(shares_SE, steps, f"experts of MoE layer {layer}")
    metrics = read_metrics(files)
    yield from balance_pictures(metrics)
    yield from checkpoint_pictures(metrics)
    lanes = recovery_lanes(metrics)
    if lanes:
        yield "recovery", phase_lines(lanes, "changes of ranks: from the loss or join until training goes on")


def metrics_files(directory: Path, name: str = "metrics.csv") -> list[Path]:
    """Return the CSV files of loggers in a run directory, in the order of the run's starts."""
    starts = {path: path.parent.name.removeprefix("version_") for path in directory.glob(f"csv/version_*/{name}")}
    return sorted((path for path in starts if starts[path].isdecimal()), key=lambda path: int(starts[path]))


def read_metrics(files: list[Path]) -> Metrics:
    """The finite numbers that a run logged, see `read_all_metrics`."""
    return finite(read_all_metrics(files))


def finite(metrics: Metrics) -> Metrics:
    """Without NaN and infinities, which no picture can show."""
    found = {name: {s: v for s, v in values.items() if math.isfinite(v)} for name, values in metrics.items()}
    return {name: values for name, values in found.items() if values}


def read_all_metrics(files: list[Path]) -> Metrics:
    """Read the metrics of all starts of a run, by the number of steps done: where steps were repeated, the later start
    counts.

    Lightning logs a step's metrics under the number of steps before it; what callbacks write of a checkpoint or a
    recovery, and the loads of experts, carry the number of steps made.

    Raises:
        ConfigurationError: a file that is not a table of numbers with a column `step`.
    """
    found: dict[str, dict[int, float]] = {}
    for path in files:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            try:
                for row in rows:
                    values = {name: float(text) for name, text in row.items() if text and name != "step"}
                    for name, value in values.items():
                        made = int(row["step"]) + (not name.startswith(_BY_STEPS_MADE))
                        found.setdefault(name, {})[made] = value
            except (ValueError, KeyError, TypeError, csv.Error) as error:
                raise ConfigurationError(
                    f"{path} is not a table of metrics by step (see line {rows.line_num}): repair it, move it away, or "
                    "give a run directory"
                ) from error
    return {name: dict(sorted(values.items())) for name, values in found.items()}


def balance_pictures(metrics: Metrics) -> Iterator[tuple[str, Figure]]:
    """Name and picture of the imbalance, where it was logged."""
    lines = {title: list(_over_layers(metrics, area, name).items()) for title, (area, name) in _IMBALANCES.items()}
    lines = {title: line for title, line in lines.items() if line}
    if lines:
        title = "busiest over mean, average of the MoE layers; 1 is even"
        yield "imbalance", line_chart(lines, title, "step", "busiest / mean")


def _over_layers(metrics: Metrics, area: str, name: str) -> dict[int, float]:
    """Mean over the layers of a metric AREA/layerNN/NAME, at the steps that all of them have."""
    layers = [values for key, values in metrics.items() if key.startswith(f"{area}/layer") and key.endswith(f"/{name}")]
    steps = set.intersection(*(set(values) for values in layers)) if layers else set()
    return {step: statistics.fmean(values[step] for values in layers) for step in sorted(steps)}


def checkpoint_pictures(metrics: Metrics) -> Iterator[tuple[str, Figure]]:
    """Names and pictures of what checkpoints cost, where it was logged."""
    times, sizes = _bars(metrics, _TIMES, 1.0), _bars(metrics, _SIZES, 1e6)
    if times:
        yield "checkpoint_ms", bar_chart(times, "what a checkpoint costs", "ms")
    if sizes:
        yield "checkpoint_mb", bar_chart(sizes, "parts of a checkpoint", "MB")
    plt = metrics.get("checkpoint/plt")
    if plt:
        line = {"lost": [(step, 100 * value) for step, value in plt.items()]}
        yield "plt", line_chart(line, "proportion of lost tokens (PLT)", "step", "percent", steps=True)
    saved = {"copied (K_snapshot)": "checkpoint/k_snapshot", "written (K_persist)": "checkpoint/k_persist"}
    ks = {title: list(metrics[name].items()) for title, name in saved.items() if name in metrics}
    if ks:
        yield "k", line_chart(ks, "experts of a layer that a checkpoint saves", "step", "experts", steps=True)


def _bars(metrics: Metrics, names: Mapping[str, str], unit: float) -> dict[str, dict[str, float]]:
    bars = {}
    for title, name in names.items():
        values = [value / unit for value in metrics.get(f"checkpoint/{name}", {}).values()]
        if values:
            bars[title] = {"median": statistics.median(values), "largest": max(values)}
    return bars


def recovery_lanes(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Seconds of the phases of the last recoveries, each named by its step and the ranks that went on."""
    from moe_lightning.strategies.recovery import PHASES  # imports torch

    lanes = {}
    for step, total_ms in list(metrics.get("recovery/total_ms", {}).items())[-_MAX_RECOVERIES:]:
        phases = {phase: metrics.get(f"recovery/{phase}_ms", {}).get(step, 0.0) / 1e3 for phase in PHASES}
        phases["other"] = max(0.0, total_ms / 1e3 - sum(phases.values()))
        ranks = metrics.get("recovery/ranks", {}).get(step)
        lanes[f"step {step}" + (f", {ranks:.0f} ranks" if ranks else "")] = phases
    return lanes
