"""moe-bench report RUN: a run as one HTML page to read and to send, with everything in the file itself.

Loss and speed, loads of experts, imbalance, placements, recoveries, checkpoints and the configuration, from what
moe-train leaves in the run directory. A section without data says what to turn on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moe_lightning.arguments import OutputFile, option
from moe_lightning.cli import report_sections as sections
from moe_lightning.cli.plot import Metrics, finite, metrics_files, read_all_metrics
from moe_lightning.cli.report_html import cards, page
from moe_lightning.errors import ConfigurationError

_CARDS = {
    "steps": ("steps", "{:,.0f}"),
    "val_loss": ("held-out loss", "{:.4g} nats"),
    "val_perplexity": ("perplexity", "{:,.4g}"),
    "val_accuracy": ("accuracy", "{:.2%}"),
    "tokens_per_s": ("speed", "{:,.0f} tokens/s"),
    "images_per_s": ("speed", "{:,.0f} images/s"),
    "expert_imbalance_ratio": ("busiest expert over mean", "{:.2f}"),
    "rank_imbalance_ratio": ("busiest rank over mean", "{:.2f}"),
    "wall_s": ("time", "{:,.0f} s"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of this benchmark."""

    run: Path = option("a run directory, outputs/NAME")
    out: OutputFile | None = option("the page (default: RUN/report.html)", None)


def run(options: Options) -> int:
    """Write the page; 0 on success."""
    text = render(options.run)
    out = options.out or options.run / "report.html"
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{out} cannot be written ({error.strerror}): give another place with --out"
        ) from error
    print(out)
    return 0


def render(directory: Path) -> str:
    """The page of a run as HTML.

    Raises:
        ConfigurationError: no run directory, or a file in it that cannot be read.
    """
    config_file, files = directory / "config.yaml", metrics_files(directory)
    if not config_file.is_file() and not files:
        raise ConfigurationError(f"{directory} has no config.yaml and no metrics: give a run directory, outputs/NAME")
    config = _mapping(config_file, yaml.safe_load)
    summary = _mapping(directory / "summary.json", json.loads)
    logged = _counted(read_all_metrics(files), summary.get("steps"))
    metrics = finite(logged)
    body = [
        sections.training(metrics, logged),
        sections.loads(directory),
        sections.imbalance(metrics),
        sections.placements(directory, metrics),
        sections.recoveries(directory, metrics),
        sections.checkpoints(directory, metrics),
        sections.configuration(config, config_file),
    ]
    name = str(config.get("run_name") or directory.resolve().name)
    return page(name, f"a run of moe-lightning, {_size(config, metrics)}", [cards(_numbers(summary, metrics))], body)


def _mapping(path: Path, read: Any) -> dict[str, Any]:
    """A file's mapping; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        found = read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} cannot be read: move it away, and the report leaves it out") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} is no mapping: move it away, and the report leaves it out")
    return found


def _counted(metrics: Metrics, steps: object) -> Metrics:
    """The metrics with those of a validation after the last of so many steps at that step: Lightning logs them under
    the number of steps made, where a validation between steps has the number before."""
    if not isinstance(steps, int):
        return metrics
    return {
        name: {step - (name.startswith("val/") and step == steps + 1): value for step, value in values.items()}
        for name, values in metrics.items()
    }


def _size(config: Mapping[str, Any], metrics: Metrics) -> str:
    steps = max((step for values in metrics.values() for step in values), default=0)
    ranks = config.get("ranks")
    return f"{steps:,} steps" + (f" on {ranks} ranks" if ranks is not None else "")


def _numbers(summary: Mapping[str, Any], metrics: Metrics) -> list[tuple[str, str]]:
    """What the run's summary says; of a run that has not ended, its last values."""
    numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    last = {name: list(values.values())[-1] for name, values in metrics.items()}
    for name, metric in (("val_loss", "val/loss"), ("tokens_per_s", "train/tokens_per_s")):
        if name not in numbers and metric in last:
            numbers[name] = last[metric]
    found = [(title, form.format(numbers[name])) for name, (title, form) in _CARDS.items() if name in numbers]
    found.append(("recoveries", f"{len(metrics.get('recovery/total_ms', {})):,}"))
    if "checkpoint/plt" in last:
        found.append(("lost tokens (PLT)", f"{100 * last['checkpoint/plt']:.4g} %"))
    return found
