"""Metrics of a run, read back from the CSV files of its loggers."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from moe_lightning.errors import ConfigurationError

Metrics = Mapping[str, Mapping[int, float]]  # {name: {step: value}}, steps ascending

_BY_STEPS_MADE = ("checkpoint/", "recovery/")


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
