"""Routing of tokens: the share of every expert in every layer, as a function of the step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
from annotated_types import Interval

from moe_lightning.arrays import IntArray
from moe_lightning.config import require, shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import read_routing_trace

RoutingKind = Literal["uniform", "zipf", "trace"]
Exponent = Annotated[float, Interval(ge=0, le=100)]
_SCALE = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingScenario:
    """Popularity of experts over time; constant between the samples of a trace, and after its last one.

    Attributes:
        shares_SLE: int64 [samples, layers, experts], assignments in units that do not matter. Layers may be fewer than
            the model's: each then stands for several.
        steps: int64 [samples], ascending from 0.
    """

    shares_SLE: IntArray
    steps: IntArray

    @property
    def num_layers(self) -> int:
        return int(self.shares_SLE.shape[1])

    def with_layers(self, least: int) -> RoutingScenario:
        """The same with at least so many layers, each repeated where there are fewer."""
        times = -(-least // self.num_layers)
        return self if times == 1 else replace(self, shares_SLE=np.repeat(self.shares_SLE, times, axis=1))

    def sample(self, step: int) -> int:
        """The sample that holds at a step."""
        return max(0, int(np.searchsorted(self.steps, step, side="right")) - 1)

    def next_change(self, step: int) -> int | None:
        """The first step after this one at which another sample holds."""
        following = self.sample(step) + 1
        return int(self.steps[following]) if following < len(self.steps) else None

    def loads(self, sample: int) -> IntArray:
        """int64 [L, E] of a sample."""
        loads: IntArray = self.shares_SLE[sample]
        return loads

    def tokens(self, sample: int, layer: int, assignments_per_rank: int, num_ranks: int) -> IntArray:
        """int64 [E, N]: assignments of each rank; every rank routes alike, in whole tokens."""
        share = self.shares_SLE[sample, layer].astype(np.float64)
        bounds = np.round(np.concatenate(([0.0], np.cumsum(share))) / share.sum() * assignments_per_rank)
        return np.repeat(np.diff(bounds).astype(np.int64)[:, None], num_ranks, axis=1)


def make_routing(
    kind: RoutingKind, *, num_experts: int, num_layers: int, exponent: float = 1.0, path: str | None = None
) -> RoutingScenario:
    """Uniform or Zipf popularity, the same in every layer and step, or that of a recorded trace.

    Raises:
        ConfigurationError: an unknown kind, a negative exponent, a trace that is missing or too small.
    """
    if kind not in get_args(RoutingKind):
        raise ConfigurationError(f"routing.kind={kind!r} is unknown: use one of {', '.join(get_args(RoutingKind))}")
    if (kind == "trace") != (path is not None):
        raise ConfigurationError(
            f"routing.kind={kind} with routing.path={shown(path)}: give a path with kind=trace, and only with it"
        )
    require(exponent, Exponent, "routing.exponent")
    if path is not None:
        return trace_routing(Path(path), num_experts=num_experts, num_layers=num_layers)
    weights = (1.0 + np.arange(num_experts)) ** (-exponent if kind == "zipf" else 0.0)
    shares = np.maximum(1, np.round(_SCALE * weights / weights.sum())).astype(np.int64)
    return RoutingScenario(shares_SLE=shares[None, None], steps=np.zeros(1, dtype=np.int64))


def trace_routing(path: Path, *, num_experts: int, num_layers: int) -> RoutingScenario:
    """The first layers of a recorded run, each with its most used experts at the time (Lazarus 6.1).

    Raises:
        ConfigurationError: no such trace, or one with fewer experts than the model.
    """
    counts_SLNE, steps = read_routing_trace(path)
    counts = counts_SLNE.sum(axis=2)
    if counts.shape[2] < num_experts:
        raise ConfigurationError(
            f"{path} has {counts.shape[2]} experts, the model {num_experts}: use routing.kind=zipf, or fewer experts"
        )
    return RoutingScenario(shares_SLE=hottest(counts[:, :num_layers], num_experts), steps=steps - steps[0])


def hottest(counts_SLE: IntArray, num_experts: int) -> IntArray:
    """int64 [S, L, num_experts]: of each layer the experts with most tokens in that sample, in their own order, at
    least one token each."""
    chosen = np.sort(np.argsort(-counts_SLE, axis=2, kind="stable")[:, :, :num_experts], axis=2)
    return np.maximum(1, np.take_along_axis(counts_SLE, chosen, axis=2))


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """A recorded run.

    Attributes:
        counts: int64 [samples, L, N, E], assignments of each source rank to each expert.
        iteration: int64 [samples], ascending.
    """

    counts: IntArray
    iteration: IntArray


def load_trace(path: Path) -> RoutingTrace:
    """Read an .npz with `counts` [samples, layers, ranks, experts] and `iteration` [samples].

    Raises:
        ConfigurationError: no such file, or arrays that are missing or of another shape.
    """
    counts, iteration = read_routing_trace(path)
    return RoutingTrace(counts=counts, iteration=iteration)
