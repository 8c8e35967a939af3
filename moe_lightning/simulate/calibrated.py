"""Measured machines: files that `moe-bench calibrate` writes, one set of numbers for each number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_lightning.bounded_files import read_text
from moe_lightning.config import build_config
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.hardware import Hardware


def save_hardware(path: Path, machines: Mapping[int, Hardware], where: str) -> None:
    """Write what was measured with each number of ranks on one node."""
    data = {"machine": where, "ranks": {str(ranks): vars(machine) for ranks, machine in machines.items()}}
    path.write_text(json.dumps(data, indent=1) + "\n")


def load_hardware(path: Path, ranks: int | None = None) -> Hardware:
    """The numbers that were measured with so many ranks on the node; None: with the most.

    Raises:
        ConfigurationError: no such file, one that holds something else, or a number of ranks that was not measured.
    """
    try:
        data = json.loads(read_text(path))
        machines: dict[int, dict[str, Any]] = {int(number): dict(values) for number, values in data["ranks"].items()}
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}): run moe-bench calibrate") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"{path} is no calibration: run moe-bench calibrate") from error
    chosen = max(machines, default=0) if ranks is None else ranks
    if chosen not in machines:
        raise ConfigurationError(
            f"{path} was measured with {sorted(machines)} ranks, not {chosen}: set hardware.ranks_per_node to one of "
            f"them, or run moe-bench calibrate --ranks {chosen}"
        )
    return build_config(Hardware, machines[chosen], key=str(path))
