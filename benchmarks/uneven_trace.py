"""What ranks of unlike speed cost on a recorded routing trace, with plans as old as they would be in training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from benchmarks.least_time import least_time
from moe_lightning.arrays import IntArray
from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.rules import PlacementPolicy, plan_placement
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.quota import balanced_quota, given_speeds
from moe_lightning.errors import ConfigurationError
from moe_lightning.text_table import table


@dataclass(frozen=True, kw_only=True)
class UnevenRow:
    """Experts' time over that of a perfectly divisible load, means over samples and layers.

    Attributes:
        speeds: as they were given.
        even: quotas and placements for equal ranks.
        quota, quota_bound: quotas by speed on placements for equal ranks, and the best that such quotas can do.
        both, both_bound: the same on placements by speed.
    """

    speeds: str
    even: float
    quota: float
    quota_bound: float
    both: float
    both_bound: float


_FASTEST = 1000.0
"""Limit of a speed: beyond, one rank computes everything."""


def speeds_argument(text: str) -> str:
    """As argparse's `type`: speeds of the first ranks, separated by commas; AxB is B ranks of speed A."""
    try:
        for part in text.split(","):
            if ":" in part:
                first, last = map(float, part.split(":"))
                _require(0 < first <= _FASTEST and 0 < last <= _FASTEST and "," not in text)
                continue
            speed, _, count = part.partition("x")
            _require(0 < float(speed) <= _FASTEST and int(count or 1) > 0)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} must be positive speeds of the first ranks, at most {_FASTEST:g} (the others have 1), such "
            "as 0.5 or 0.5x8 or 0.5,0.8, or 1:0.7 for all ranks from 1 down to 0.7"
        ) from None
    return text


Speeds = Annotated[str, speeds_argument]


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError


def listed_speeds(text: str, num_ranks: int) -> list[float]:
    """[N] from `speeds_argument`.

    Raises:
        ConfigurationError: more speeds than ranks.
    """
    if ":" in text:
        first, last = map(float, text.split(":"))
        return [float(speed) for speed in np.linspace(first, last, num_ranks)]
    parts = [part.partition("x") for part in text.split(",")]
    listed = [float(speed) for speed, _, count in parts for _ in range(int(count or 1))]
    if len(listed) > num_ranks:
        raise ConfigurationError(
            f"--speeds {text} gives {len(listed)} speeds, but the trace has {num_ranks} ranks: give at most {num_ranks}"
        )
    return listed + [1.0] * (num_ranks - len(listed))


def judge_speeds(
    counts: IntArray,
    samples: Sequence[tuple[int, int]],
    text: str,
    *,
    cluster: Cluster,
    policy: PlacementPolicy,
) -> UnevenRow:
    """One line of the table.

    Args:
        counts: int64 [samples, L, N, E] of a trace.
        samples: those to judge, and what their placements are planned from: (present, planned).
        text: the speeds, see `speeds_argument`.
        cluster: the ranks, without speeds.
        policy: of the placements.
    """
    speeds = given_speeds(listed_speeds(text, cluster.num_ranks), cluster.num_ranks)
    timed = replace(cluster, speeds=tuple(speeds.tolist()))
    found: dict[str, list[float]] = {name: [] for name in ("even", "quota", "quota_bound", "both", "both_bound")}
    for now, planned in samples:
        loads = counts[planned].sum(axis=1)
        layers = zip(plan_placement(loads, cluster, policy), plan_placement(loads, timed, policy), strict=True)
        for layer, (blind, seeing) in enumerate(layers):
            tokens = counts[now, layer].sum(axis=0)
            found["even"].append(_over_ideal(balanced_quota(tokens, blind.replicas), speeds))
            for name, placement in (("quota", blind), ("both", seeing)):
                quota = balanced_quota(tokens, placement.replicas, speeds)
                found[name].append(_over_ideal(quota, speeds))
                found[f"{name}_bound"].append(_bound(tokens, placement, speeds))
    return UnevenRow(speeds=text, **{name: float(np.mean(values)) for name, values in found.items()})


def _over_ideal(quota: IntArray, speeds: IntArray) -> float:
    rows = quota.sum(axis=0)
    return float((rows / speeds).max() * speeds.sum() / max(1, rows.sum()))


def _bound(tokens: IntArray, placement: Placement, speeds: IntArray) -> float:
    return float(least_time(tokens, placement.replicas, speeds)) * float(speeds.sum()) / max(1, int(tokens.sum()))


def format_speeds(rows: Sequence[UnevenRow]) -> str:
    """One line for each row."""
    cells = [
        (row.speeds, *(f"{ratio:.3f}" for ratio in (row.even, row.quota, row.quota_bound, row.both, row.both_bound)))
        for row in rows
    ]
    return table(("speeds", "even", "quotas", "LP", "and placements", "LP"), cells)
