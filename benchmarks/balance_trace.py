"""How evenly each strategy divides a recorded routing trace, with plans as old as they would be in training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.uneven_trace import Speeds, format_speeds, judge_speeds
from moe_lightning.arguments import Count, InputFile, option
from moe_lightning.arrays import IntArray
from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.cost_model import BlockCosts
from moe_lightning.balancing.rules import STRATEGIES, PlacementPolicy, Strategy, evaluate, plan_placement, plan_shadows
from moe_lightning.config import NonNegativeInt
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import read_routing_trace
from moe_lightning.text_table import table

_WIDTH = 2048
_FLOPS = 11.5e12
_BYTES_PER_S = 6.25e9


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


@dataclass(frozen=True, kw_only=True)
class TraceRow:
    """One strategy at one number of slots and of nodes for each expert: means over samples and layers.

    plan_s is the processor time of one placement of all layers, which is its duration where a core is free.
    """

    strategy: str
    slots_per_rank: int
    min_replicas: int
    imbalance: float
    worst_imbalance: float
    balance_ratio: float
    exchange_bytes: float
    copy_bytes: float
    block_s: float
    plan_s: float


def reference_costs() -> BlockCosts:
    """The constants of FasterMoE's cost model: 2048 wide, 4096 in the experts, 4 bytes, 11.5 TFLOP/s, 6.25 GB/s."""
    weight_bytes = 2.0 * 2 * _WIDTH * _WIDTH * 4
    return BlockCosts(
        row_bytes=_WIDTH * 4,
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes,
        bytes_per_s=_BYTES_PER_S,
        rows_per_s=_FLOPS / (4 * 2 * _WIDTH * _WIDTH),
    )


def judge(
    trace: RoutingTrace,
    strategy_name: str,
    *,
    slots_per_rank: int,
    age: int = 50,
    first: int = 600,
    step: int = 10,
    min_replicas: int = 1,
    ranks_per_node: int = 1,
) -> TraceRow:
    """Plan from the newest sample that is at least `age` iterations old, judge on the present one.

    Shadows are planned from the sample just before the present one, as they are in training.

    Args:
        trace: the recorded run.
        strategy_name: a name in `STRATEGIES`; its min_replicas is replaced by the argument.
        slots_per_rank: room for resident experts; strategies without replicas use what they need.
        age: iterations between the plan and its use.
        first: first iteration to judge.
        step: samples between two judged ones.
        min_replicas: distinct nodes for each expert.
        ranks_per_node: failure domain.

    Raises:
        ConfigurationError: no sample is left to judge.
    """
    strategy = _with_min_replicas(STRATEGIES[strategy_name], min_replicas)
    num_layers, num_ranks = trace.counts.shape[1:3]
    cluster = Cluster.of(num_ranks, slots_per_rank, ranks_per_node)
    costs = [replace(reference_costs(), transfer=strategy.transfer)] * num_layers
    reports, plan_s = [], []
    for now, planned in judged_samples(trace, age=age, first=first, step=step):
        tokens = trace.counts[now].transpose(0, 2, 1)
        start = time.process_time()
        placements = plan_placement(trace.counts[planned].sum(axis=1), cluster, strategy.placement)
        plan_s.append(time.process_time() - start)
        shadows = plan_shadows(trace.counts[now - 1].transpose(0, 2, 1), placements, costs, strategy.shadows)
        reports += [evaluate(*layer, strategy) for layer in zip(tokens, placements, shadows, costs, strict=True)]
    return TraceRow(
        strategy=strategy_name,
        slots_per_rank=slots_per_rank,
        min_replicas=min_replicas,
        imbalance=float(np.mean([report.imbalance for report in reports])),
        worst_imbalance=float(np.percentile([report.imbalance for report in reports], 95)),
        balance_ratio=float(np.median([report.balance_ratio for report in reports])),
        exchange_bytes=float(np.mean([report.exchange_bytes for report in reports])),
        copy_bytes=float(np.mean([report.copy_bytes for report in reports])),
        block_s=float(np.mean([report.block_s for report in reports])),
        plan_s=float(np.median(plan_s)),
    )


def judged_samples(trace: RoutingTrace, *, age: int, first: int, step: int) -> list[tuple[int, int]]:
    """Every `step`-th sample from iteration `first` on, and the newest that is at least `age` iterations older.

    Raises:
        ConfigurationError: there is none.
    """
    planned = np.searchsorted(trace.iteration, trace.iteration - age, side="right") - 1
    samples = [now for now in range(1, len(trace.iteration)) if trace.iteration[now] >= first and planned[now] >= 0]
    if not samples:
        raise ConfigurationError(
            f"no sample from --first={first} on has a plan {age} iterations old: lower one of them"
        )
    return [(now, int(planned[now])) for now in samples[::step]]


def _with_min_replicas(strategy: Strategy, min_replicas: int) -> Strategy:
    return replace(strategy, placement=replace(strategy.placement, min_replicas=min_replicas))


def format_table(rows: Sequence[TraceRow]) -> str:
    """One line for each row."""
    headers = ("strategy", "slots", "max/mean", "p95", "RB", "tokens MB", "copies MB", "block ms", "plan ms")
    cells = [
        (
            row.strategy,
            row.slots_per_rank,
            f"{row.imbalance:.3f}",
            f"{row.worst_imbalance:.3f}",
            f"{row.balance_ratio:.2f}",
            f"{row.exchange_bytes / 1e6:.1f}",
            f"{row.copy_bytes / 1e6:.1f}",
            f"{row.block_s * 1e3:.2f}",
            f"{row.plan_s * 1e3:.1f}",
        )
        for row in rows
    ]
    return table(headers, cells)


def format_protection(rows: Sequence[TraceRow]) -> str:
    """What slots and protection do to the balance, one line for each number of slots and nodes: rows of "packed" and of
    "packed+search"."""
    shadowed = {(row.slots_per_rank, row.min_replicas): row for row in rows if row.strategy == "packed+search"}
    cells = []
    for row in (row for row in rows if row.strategy == "packed"):
        key = (row.slots_per_rank, row.min_replicas)
        ratios = [ratio for of in (row, shadowed[key]) for ratio in (of.imbalance, of.worst_imbalance)]
        cells.append((*key, *(f"{ratio:.3f}" for ratio in ratios), f"{shadowed[key].copy_bytes / 1e6:.1f}"))
    return table(("slots", "nodes", "max/mean", "p95", "with shadows", "p95", "copies MB a layer"), cells)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    trace: InputFile = option("routing trace (.npz with counts and iteration)")
    slots: list[Count] = option("resident experts per rank", [3, 4])
    strategies: list[str] = option("names of strategies to compare", list(STRATEGIES), choices=list(STRATEGIES))
    age: Count = option("iterations between a placement and its use", 50)
    first: NonNegativeInt = option("first iteration to judge; routing drifts fast before", 600)
    step: Count = option("samples between two judged ones", 10)
    min_replicas: Count = option("distinct nodes for every expert, in the first table", 1)
    protection_slots: tuple[Count, ...] = option(
        "slots of the second table, which has every expert on one node and on two; none: no such table", [3, 4, 5]
    )
    ranks_per_node: Count = option("ranks that fail together", 1)
    speeds: list[Speeds] | None = option(
        "instead of the tables, what unlike ranks cost: speeds of the first ranks, such as 0.5 or 0.5x8, or 1:0.7",
        None,
        metavar="SPEEDS",
    )


def _print_speeds(trace: RoutingTrace, args: Options) -> None:
    samples = judged_samples(trace, age=args.age, first=args.first, step=args.step)
    for slots in args.slots:
        cluster = Cluster.of(trace.counts.shape[2], slots, args.ranks_per_node)
        policy = PlacementPolicy(min_replicas=args.min_replicas)
        rows = [judge_speeds(trace.counts, samples, text, cluster=cluster, policy=policy) for text in args.speeds or ()]
        print(
            f"experts' time over a perfectly divisible load, {cluster.num_ranks} ranks of {slots} slots, placements "
            f"{args.age} iterations old; LP: the least that quotas can reach on the same placements"
        )
        print(format_speeds(rows))


def run(args: Options) -> int:
    """Print the table; 0 on success."""
    trace = load_trace(args.trace)
    if args.speeds:
        _print_speeds(trace, args)
        return 0
    choose = partial(judge, trace, age=args.age, first=args.first, step=args.step, ranks_per_node=args.ranks_per_node)
    rows = [
        choose(name, slots_per_rank=slots, min_replicas=args.min_replicas)
        for slots in args.slots
        for name in args.strategies
    ]
    _, layers, ranks, experts = trace.counts.shape
    print(
        f"{experts} experts on {ranks} ranks, {layers} layers; placements {args.age} iterations old, judged from "
        f"iteration {args.first} on; plan ms is processor time of one placement of all layers"
    )
    print(format_table(rows))
    protection = [
        choose(name, slots_per_rank=slots, min_replicas=nodes)
        for slots in args.protection_slots
        for nodes in (1, 2)
        for name in ("packed", "packed+search")
    ]
    if protection:
        print("\nbusiest rank over mean of LoadBalancer's packing, each expert on so many nodes where slots allow:")
        print(format_protection(protection))
    return 0
