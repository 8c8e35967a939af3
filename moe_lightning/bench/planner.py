"""moe-bench planner: how long plans for large clusters take, and how much memory they need.

Loads are drawn: popularities of experts from a Dirichlet distribution, each rank's own drift around them, as skewed as
in recorded traces. Every row plans all layers as in training, side by side in the planner's threads.

Shapes: L layers, E experts, N ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import chain

import numpy as np
from rich.console import Console
from rich.table import Table

from moe_lightning.algorithms.balancing import replan_placement
from moe_lightning.algorithms.cluster import Cluster
from moe_lightning.algorithms.performance_model import BlockCosts
from moe_lightning.algorithms.placement import IntArray, Placement, uniform_placement
from moe_lightning.algorithms.shadow_search import search_shadows
from moe_lightning.bench.planner_recovery import recovery_rows
from moe_lightning.bench.planner_row import PlannerRow, measured
from moe_lightning.callbacks.balance_planner import BalancePolicy, block_with_sums_s
from moe_lightning.callbacks.planning_threads import PlanningThreads
from moe_lightning.errors import ConfigurationError

_TOKENS = 4096 * 8
"""Assignments of a rank: 4096 tokens, 8 choices each."""

_RANKS_PER_NODE = 8
_TIMEOUT_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes", nargs="+", default=["1024x256", "4096x512"], help="ranks x experts (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=61, help="MoE layers (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=2, help="resident experts of a rank (default: %(default)s)")
    parser.add_argument("--min-replicas", type=int, default=2, help="nodes for every expert (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Print the table; 0 on success."""
    table = Table("plan", "ranks", "experts", "layers", "seconds", "processor s", "peak MiB")
    sizes = [_size(text) for text in options.sizes]
    if options.layers < 1:
        raise ConfigurationError(f"--layers {options.layers} leaves nothing to plan: use at least 1")
    for ranks, experts in sizes:
        plans = planner_rows(ranks, experts, options.layers, options.slots, options.min_replicas)
        for row in chain(plans, recovery_rows(ranks, experts, options.layers)):
            table.add_row(
                row.name,
                *map(str, (row.ranks, row.experts, row.layers)),
                f"{row.seconds:.2f}",
                f"{row.processor_s:.2f}",
                f"{row.peak_mib:.0f}",
            )
            print(f"planner: {row.name} at {ranks} x {experts} done", file=sys.stderr)
    Console().print(table)
    return 0


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

    for name, call in (("shadows", search), ("placements", place)):
        yield measured(name, call, ranks, experts, layers)
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
