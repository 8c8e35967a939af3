"""moe-bench planner: how long plans for large clusters take, and how much memory they need.

Loads are drawn: popularities of experts from a Dirichlet distribution, each rank's own drift around them, as skewed as
in recorded traces. Every row plans all layers as in training, in the planner's threads; quotas are split anew for every
layer of every step, here on placements on which that is hard.

Shapes: L layers, E experts, N ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain

import numpy as np
from rich.console import Console
from rich.table import Table

from moe_lightning.algorithms.balancing import replan_placement
from moe_lightning.algorithms.cluster import Cluster
from moe_lightning.algorithms.performance_model import BlockCosts
from moe_lightning.algorithms.placement import IntArray, Placement, uniform_placement
from moe_lightning.algorithms.quota import balanced_quota
from moe_lightning.algorithms.shadow_search import search_shadows
from moe_lightning.arguments import Count, value
from moe_lightning.bench.planner_recovery import recovery_rows
from moe_lightning.bench.planner_row import PlannerRow, measured
from moe_lightning.callbacks.balance_planner import BalancePolicy, block_with_sums_s
from moe_lightning.callbacks.planning_threads import PlanningThreads
from moe_lightning.errors import ConfigurationError

_TOKENS = 4096 * 8
"""Assignments of a rank: 4096 tokens, 8 choices each."""

_GOALS_S = {(1024, 256): 1.0, (4096, 512): 10.0}
"""Seconds for shadows, and for placements, of up to `_GOAL_LAYERS` layers on so many ranks and experts."""

_GOAL_LAYERS = 61
_RANKS_PER_NODE = 8
_TIMEOUT_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes", nargs="+", default=["1024x256", "4096x512"], help="ranks x experts (default: %(default)s)"
    )
    parser.add_argument("--layers", type=value(Count), default=61, help="MoE layers (default: %(default)s)")
    parser.add_argument(
        "--slots", type=value(Count), default=2, help="resident experts of a rank (default: %(default)s)"
    )
    parser.add_argument(
        "--min-replicas", type=value(Count), default=2, help="nodes for every expert (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Print the table; 0 on success."""
    title = f"Plans of {options.layers} layers; goals are processor seconds"
    table = Table("plan", "ranks", "experts", "seconds", "cpu s", "goal s", "MiB", title=title, box=None)
    sizes = [_size(text) for text in options.sizes]
    rows = [quota_rows()]
    for ranks, experts in sizes:
        rows.append(planner_rows(ranks, experts, options.layers, options.slots, options.min_replicas))
        rows.append(recovery_rows(ranks, experts, options.layers))
    for row in chain.from_iterable(rows):
        table.add_row(
            row.name,
            *map(str, (row.ranks, row.experts)),
            *("" if figure is None else f"{figure:.3g}" for figure in (row.seconds, row.processor_s, row.goal_s)),
            f"{row.peak_mib:.0f}",
        )
        print(f"planner: {row.name} at {row.ranks} x {row.experts} done", file=sys.stderr)
    Console().print(table)
    return 0


def quota_rows() -> Iterator[PlannerRow]:
    """Splits of one layer's tokens where a few experts are hot and neighbours, or ranks by chance, share them."""
    ranks, experts = 64, 256
    for seed in range(2):
        rng = np.random.default_rng(seed)
        tokens = rng.zipf(1.3, experts).clip(max=1000) * 1000 + rng.integers(0, 999, experts)
        first = np.arange(experts) % ranks
        ring, scattered = np.zeros((experts, ranks), np.int64), rng.random((experts, ranks)) < 2.5 / ranks
        for neighbour in (first, (first + 1) % ranks):
            ring[np.arange(experts), neighbour] = 1
        scattered[np.arange(experts), first] = True
        for name, held in (("ring", ring), ("scattered", scattered.astype(np.int64))):
            balanced_quota(tokens, held)
            call = partial(balanced_quota, tokens, held)
            tries = [measured(f"quota of 1 layer, {name}", call, ranks, experts, 1, goal_s=1e-3) for _ in range(5)]
            yield min(tries, key=lambda row: row.processor_s)


def _size(text: str) -> tuple[int, int]:
    ranks, _, experts = text.partition("x")
    if not (ranks.isdecimal() and experts.isdecimal() and min(int(ranks), int(experts)) > 1):
        raise ConfigurationError(f"--sizes {text!r} is no size: give ranks x experts, such as 1024x256")
    return int(ranks), int(experts)


def planner_rows(ranks: int, experts: int, layers: int, slots: int, min_replicas: int) -> Iterator[PlannerRow]:
    """Shadows and placements of all layers: what LoadBalancer plans in a step and when it rebalances."""
    rng = np.random.default_rng(0)
    cluster = Cluster.of(ranks, slots, _RANKS_PER_NODE)
    popularity = rng.dirichlet(np.full(experts, 0.3), size=layers)
    tokens = [_tokens(rng, row, ranks) for row in popularity]
    start = uniform_placement(experts, ranks, min(max(min_replicas, ranks // experts), ranks))
    costs = _costs()
    threads = PlanningThreads(_TIMEOUT_S)

    def search() -> None:
        layered = [threads.chain().then(search_shadows, tokens[layer], start, costs) for layer in range(layers)]
        for plan in layered:
            threads.result(plan)

    def place() -> None:
        threads.result(threads.combine(_placed, tokens, cluster, min_replicas, [start] * layers, costs, threads))

    goal_s = _GOALS_S.get((ranks, experts)) if layers <= _GOAL_LAYERS else None
    for name, call in (("shadows", search), ("placements", place)):
        yield measured(name, call, ranks, experts, layers, goal_s)
    threads.close()


def _placed(
    tokens: list[IntArray],
    cluster: Cluster,
    min_replicas: int,
    present: list[Placement],
    costs: BlockCosts,
    threads: PlanningThreads,
) -> list[Placement]:
    loads = np.stack([layer.sum(axis=1) for layer in tokens])
    policy = BalancePolicy(min_replicas=min_replicas)
    return replan_placement(
        loads,
        cluster,
        policy.candidates(cluster, loads.shape[1]),
        present,
        policy.tolerance,
        block_s=lambda layer, placement: block_with_sums_s(tokens[layer], placement, costs),
        over_layers=threads.map,
    )


def _tokens(rng: np.random.Generator, popularity: np.ndarray, ranks: int) -> IntArray:
    """int64 [E, N]: every rank draws its tokens from its own drift around the layer's popularity."""
    drift = popularity[:, None] * rng.lognormal(0.0, 0.5, size=(len(popularity), ranks))
    tokens: IntArray = (_TOKENS * drift / drift.sum(axis=0)).astype(np.int64)
    return tokens


def _costs() -> BlockCosts:
    """An expert of 7168 x 2048 in 8 bits, gradients in 16, 50 GB/s and 400 TFLOP/s a rank."""
    numbers = 3 * 7168 * 2048
    return BlockCosts(
        row_bytes=7168 * 2,
        weight_bytes=numbers,
        gradient_bytes=2 * numbers,
        bytes_per_s=50e9,
        rows_per_s=400e12 / (2 * numbers),
    )
