"""Hardware of a cluster in a dozen numbers: presets of the papers' machines, and results of `moe-bench calibrate`.

Peak rates are the vendors'; utilization, copy and storage rates are those that the papers report for their clusters,
and are assumptions elsewhere: replace them by your own measurements (`moe-bench calibrate` measures this machine).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np
import yaml
from annotated_types import Interval
from numpy.typing import NDArray

from moe_lightning.config import Fraction, build_config, build_variant, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import read_text

Rate = Annotated[float, Interval(gt=0, le=1e20)]
"""Bytes or operations per second, or a number of bytes."""
Cost = Annotated[float, Interval(ge=0, le=1e6)]
"""Seconds of what a step does many times."""
Share = Annotated[float, Interval(gt=0, le=1)]
Speed = Annotated[float, Interval(ge=0.02, le=50)]
"""Speed of a rank, relative to others."""
Duration = Annotated[float, Interval(ge=0, le=1e10)]


@validated
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One rank (a GPU, or a process on CPU cores), its links and its node's storage.

    Attributes:
        ranks_per_node: ranks that share a host, and fail together.
        flops_per_s: peak of one rank in the precision of training.
        utilization: share of the peak that dense layers reach.
        expert_utilization: share of the peak that the experts' grouped matrix products reach.
        link_bytes_per_s: of one rank between nodes, in each direction.
        node_bytes_per_s: of one rank inside a node, in each direction.
        latency_s: of one exchange.
        expert_s: fixed forward cost of each expert that a rank computes.
        step_s: fixed cost of a step: launching, data, logging.
        overlap: share of the computations' time that may hide copies and transfers: 1 where engines of their own move
            data, 0 where that takes the cores that compute.
        memory_bytes_per_s: of the rank's own memory; bounds the optimizer's update.
        host_copy_bytes_per_s: of one rank into host memory, for snapshots.
        storage_bytes_per_s: of one node to storage.
        storage_total_bytes_per_s: of the storage that all nodes share; None: never the bottleneck.
        memory_bytes: of one rank.
        host_memory_bytes: of one node.
        speeds: relative speeds of the nodes, repeated over all of them: [1.0, 0.5] is a cluster of which half is a
            generation older. The rates above are those of speed 1. None: all alike.
        jitter: standard deviation of the logarithm of a rank's time of a step; others wait for the slowest rank.
        slow_speed: factor of the speed of rank 0 from slow_from_s to slow_until_s (None: the end) of the simulation.

    Raises:
        ConfigurationError: a rate that is not positive, a utilisation outside (0, 1], a negative time, or what no
            machine has.
    """

    ranks_per_node: Annotated[int, Interval(ge=1, le=1024)] = 8
    flops_per_s: Rate
    utilization: Share = 0.3
    expert_utilization: Share = 0.3
    link_bytes_per_s: Rate
    node_bytes_per_s: Rate
    latency_s: Cost = 20e-6
    expert_s: Cost = 5e-6
    step_s: Cost = 0.0
    overlap: Fraction = 1.0
    memory_bytes_per_s: Rate
    host_copy_bytes_per_s: Rate
    storage_bytes_per_s: Rate = 1e9
    storage_total_bytes_per_s: Rate | None = None
    memory_bytes: Rate
    host_memory_bytes: Rate = 512e9
    speeds: Sequence[Speed] | None = None
    jitter: Fraction = 0.0
    slow_speed: Speed = 1.0
    slow_from_s: Duration = 0.0
    slow_until_s: Duration | None = None

    def __post_init__(self) -> None:
        if self.speeds is not None and not self.speeds:
            raise ConfigurationError("speeds=[] names no node: give the nodes' relative speeds, or null")
        if self.speeds is not None:
            object.__setattr__(self, "speeds", tuple(self.speeds))  # costs are remembered by their machine

    def rank_speeds(self, num_ranks: int, *, is_slow: bool = False) -> NDArray[np.float64]:
        """Return the speed of each rank, [num_ranks]; `is_slow`: while rank 0 is slow."""
        nodes = np.arange(num_ranks) // self.ranks_per_node
        speeds = np.array(self.speeds or [1.0], dtype=np.float64)
        found: NDArray[np.float64] = speeds[nodes % len(speeds)]
        if is_slow:
            found[0] *= self.slow_speed
        return found

    def waiting(self, num_ranks: int) -> float:
        """Mean time of the slowest of equal ranks over that of a rank: the median of the largest of so many times."""
        share = (num_ranks - 0.375) / (num_ranks + 0.25)  # Blom
        return max(1.0, math.exp(self.jitter * NormalDist().inv_cdf(share) - self.jitter**2 / 2))

    @property
    def changes_s(self) -> tuple[float, ...]:
        """Return the times at which rank 0 slows down and recovers, ascending; empty where it never does."""
        until = math.inf if self.slow_until_s is None else self.slow_until_s
        return (self.slow_from_s, until) if self.slow_speed != 1 and self.slow_from_s < until else ()


PRESETS: dict[str, Hardware] = {
    name: Hardware(**numbers)
    for name, numbers in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}


def preset(name: str, **changes: Any) -> Hardware:
    """A preset with some numbers replaced; those given as None stay.

    Raises:
        ConfigurationError: an unknown preset, or a number that cannot be.
    """
    return build_variant(PRESETS, name, changes, "hardware.preset")


def save_hardware(path: Path, machines: Mapping[int, Hardware], where: str) -> None:
    """Write what was measured with each number of ranks on one node."""
    data = {"machine": where, "ranks": {str(ranks): vars(machine) for ranks, machine in machines.items()}}
    path.write_text(json.dumps(data, indent=1) + "\n")


def load_hardware(path: Path, ranks: int) -> Hardware:
    """The numbers that were measured with so many ranks on the node.

    Raises:
        ConfigurationError: no such file, one that holds something else, or a number of ranks that was not measured.
    """
    try:
        data = json.loads(read_text(path))
        machines: dict[int, dict[str, Any]] = {int(number): dict(values) for number, values in data["ranks"].items()}
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}): run moe-bench calibrate") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not a calibration: run moe-bench calibrate") from error
    if ranks not in machines:
        raise ConfigurationError(
            f"{path} was measured with {sorted(machines)} ranks, not {ranks}: set hardware.ranks_per_node to one of "
            f"them, or run moe-bench calibrate --ranks {ranks}"
        )
    return build_config(Hardware, machines[ranks], key=str(path))
