"""What a search optimizes: a metric that the trained run logged last. The rank that logs leaves the metrics in the run
directory, where the command that started the ranks reads them, whichever launcher it used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import suggestion

_MOST_NAMED = 12


def write_metrics(path: Path, metrics: Mapping[str, float]) -> None:
    """Leave the last value of every logged metric: the whole file or none."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(dict(metrics), indent=2) + "\n")
    fresh.replace(path)


def objective_of(path: Path, name: str) -> float:
    """The metric of this name in a file that `write_metrics` has left.

    Raises:
        ConfigurationError: no run has left its metrics, the name is none of them, or its value is not finite.
    """
    try:
        metrics: dict[str, float] = json.loads(path.read_text())
    except (OSError, ValueError):
        raise ConfigurationError(
            f"objective={name} cannot be told, because the run has left no metrics in {path}: give the same command "
            "with task=validate for metrics of the validation, or with resume=false"
        ) from None
    if name not in metrics:
        near = suggestion(name, metrics)
        some = ", ".join(sorted(metrics)[:_MOST_NAMED]) or "none"
        raise ConfigurationError(
            f"objective={name} is no metric that the run logged{near}: it logged {some}"
            f"{', ...' if len(metrics) > _MOST_NAMED else ''}; the same command with one of them need not train again"
        )
    if not math.isfinite(metrics[name]):
        raise ConfigurationError(
            f"objective={name} came out as {metrics[name]}, which nothing can be compared with: "
            "narrow the search to values at which training stays finite, such as lower learning rates"
        )
    return metrics[name]
