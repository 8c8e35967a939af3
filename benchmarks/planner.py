"""moe-bench planner: how long plans for large clusters take, and how much memory they need.

Loads are drawn: popularities of experts from a Dirichlet distribution, each rank's own drift around them, as skewed as
in recorded traces. Every row plans all layers as in training, in the planner's thread; quotas are split anew for every
layer of every step, here on placements on which that is hard.

Shapes: L layers, E experts, N ranks.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from benchmarks.recovery_probability import sampled_recovery
from moe_lightning.arguments import Count, option
from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.cost_model import BlockCosts
from moe_lightning.balancing.planner import BalancePolicy, block_with_sums_s
from moe_lightning.balancing.repair import repair_placements
from moe_lightning.balancing.rules import replan_placement
from moe_lightning.balancing.shadow_search import search_shadows
from moe_lightning.checkpoint.recovery_plan import (
    HeldExpert,
    Origin,
    RankInventory,
    SnapshotInventory,
    plan_recovery,
)
from moe_lightning.dispatch.placement import Placement, uniform_placement
from moe_lightning.dispatch.quota import balanced_quota
from moe_lightning.errors import ConfigurationError
from moe_lightning.text_table import table

_TOKENS = 4096 * 8
"""Assignments of a rank: 4096 tokens, 8 choices each."""

_GOALS_S = {(1024, 256): 1.0, (4096, 512): 10.0}
"""Seconds for shadows, and for placements, of up to `_GOAL_LAYERS` layers on so many ranks and experts."""

_GOAL_LAYERS = 61
_RANKS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    sizes: list[str] = option("ranks x experts", ["1024x256", "4096x512"])
    layers: Count = option("MoE layers", 61)
    slots: Count = option("resident experts of a rank", 2)
    min_replicas: Count = option("nodes for every expert", 2)


@dataclass(frozen=True, kw_only=True)
class PlannerRow:
    """One plan of all layers.

    Attributes:
        name: what was planned.
        ranks, experts, layers: how large.
        seconds: on the clock.
        processor_s: processor time of all threads, which other work on the machine lengthens less.
        peak_mib: memory that planning needed beside its inputs, at its peak.
        goal_s: what processor_s shall stay below; None where nothing is promised for this size.
    """

    name: str
    ranks: int
    experts: int
    layers: int
    seconds: float
    processor_s: float
    peak_mib: float
    goal_s: float | None = None


def measured(
    name: str, call: Callable[[], object], ranks: int, experts: int, layers: int, goal_s: float | None = None
) -> PlannerRow:
    """Time a call, then trace the memory of another."""
    began, processor = time.perf_counter(), time.process_time()
    call()
    seconds, processor_s = time.perf_counter() - began, time.process_time() - processor
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return PlannerRow(
        name=name,
        ranks=ranks,
        experts=experts,
        layers=layers,
        seconds=seconds,
        processor_s=processor_s,
        peak_mib=peak / 2**20,
        goal_s=goal_s,
    )


def run(options: Options) -> int:
    """Print the table; 0 on success."""
    sizes = [_size(text) for text in options.sizes]
    planned = [quota_rows()]
    for ranks, experts in sizes:
        planned.append(planner_rows(ranks, experts, options.layers, options.slots, options.min_replicas))
        planned.append(recovery_rows(ranks, experts, options.layers))
    rows = []
    for row in chain.from_iterable(planned):
        figures = ("" if figure is None else f"{figure:.3g}" for figure in (row.seconds, row.processor_s, row.goal_s))
        rows.append((row.name, row.ranks, row.experts, *figures, f"{row.peak_mib:.0f}"))
        print(f"planner: {row.name} at {row.ranks} x {row.experts} done", file=sys.stderr)
    title = f"Plans of {options.layers} layers; goals are processor seconds"
    print(table(("plan", "ranks", "experts", "seconds", "cpu s", "goal s", "MiB"), rows, title))
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
        raise ConfigurationError(f"--sizes {text!r} is not a size: give ranks x experts, such as 1024x256")
    return int(ranks), int(experts)


def planner_rows(ranks: int, experts: int, layers: int, slots: int, min_replicas: int) -> Iterator[PlannerRow]:
    """Shadows and placements of all layers: what LoadBalancer plans in a step and when it rebalances."""
    rng = np.random.default_rng(0)
    cluster = Cluster.of(ranks, slots, _RANKS_PER_NODE)
    popularity = rng.dirichlet(np.full(experts, 0.3), size=layers)
    tokens = [_tokens(rng, row, ranks) for row in popularity]
    start = uniform_placement(experts, ranks, min(max(min_replicas, ranks // experts), ranks))
    costs = _costs()

    def search() -> None:
        for layer in range(layers):
            search_shadows(tokens[layer], start, costs)

    def place() -> None:
        _placed(tokens, cluster, min_replicas, [start] * layers, costs)

    goal_s = _GOALS_S.get((ranks, experts)) if layers <= _GOAL_LAYERS else None
    for name, call in (("shadows", search), ("placements", place)):
        yield measured(name, call, ranks, experts, layers, goal_s)


def _placed(
    tokens: list[IntArray],
    cluster: Cluster,
    min_replicas: int,
    present: list[Placement],
    costs: BlockCosts,
) -> list[Placement]:
    loads = np.stack([layer.sum(axis=1) for layer in tokens])
    policy = BalancePolicy(min_replicas=min_replicas)
    return replan_placement(
        loads,
        cluster,
        policy.candidates(cluster, loads.shape[1]),
        present,
        block_s=lambda layer, placement: block_with_sums_s(tokens[layer], placement, costs),
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


# --- recoveries -----------------------------------------------------------------------------------------------------

_SLOTS = 2
_STEPS = (18, 19)
_LIVE_VERSION = 20


def recovery_rows(num_ranks: int, num_experts: int, num_layers: int) -> Iterator[PlannerRow]:
    """The plans of a recovery on nodes of 8 ranks with 2 slots each, one of which is lost."""
    held = _held(num_ranks, num_experts, num_layers)
    left = held[..., _RANKS_PER_NODE:]
    nodes = [str(rank // _RANKS_PER_NODE) for rank in range(num_ranks)]
    survivors = nodes[_RANKS_PER_NODE:]
    live = _inventories(left, survivors, live_version=_LIVE_VERSION)
    fresh = _inventories(held, nodes, live_version=-1)
    shape = {"num_layers": num_layers, "num_experts": num_experts}
    tables = [layer.astype(np.int64) for layer in held[:4]]
    layered = [tables[index % len(tables)] for index in range(num_layers)]
    calls: dict[str, Callable[[], object]] = {
        "repair, nothing live": lambda: repair_placements(np.zeros_like(held), nodes=nodes, min_replicas=2),
        "repair, a node lost": lambda: repair_placements(left, nodes=survivors, min_replicas=2, max_slots=_SLOTS),
        "plan_recovery, live": lambda: plan_recovery(live, None, **shape),
        "plan_recovery, snapshots": lambda: plan_recovery(fresh, None, **shape),
        "sampled_recovery, 8 of N": lambda: sampled_recovery(layered, 8),
        "sampled_recovery, N/2 of N": lambda: sampled_recovery(layered, num_ranks // 2),
    }
    for name, call in calls.items():
        yield measured(name, call, num_ranks, num_experts, num_layers, goal_s=1.0)


def _held(num_ranks: int, num_experts: int, num_layers: int) -> BoolArray:
    """bool [L, E, N]: every rank's slots under a placement that differs from layer to layer."""
    held = np.zeros((num_layers, num_experts, num_ranks), dtype=np.bool_)
    ranks = np.arange(num_ranks)
    for layer in range(num_layers):
        for slot in range(_SLOTS):
            held[layer, (ranks * (2 * slot + 1) + 7 * slot + layer) % num_experts, ranks] = True
    return held


def _inventories(held: BoolArray, nodes: list[str], live_version: int) -> list[RankInventory]:
    """What the ranks report: live experts or none, and two whole snapshots of every rank in its node's memory."""
    num_layers, num_experts, num_ranks = held.shape
    written: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for number in range(num_layers * num_experts):
        written[number % num_ranks].append(divmod(number, num_experts))
    experts: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for layer, expert, rank in np.argwhere(held).tolist() if live_version >= 0 else ():
        experts[rank].append((layer, expert))
    return [
        RankInventory(
            rank=rank,
            node=nodes[rank],
            live_version=live_version,
            experts=tuple(experts[rank]),
            snapshots=tuple(
                SnapshotInventory(
                    kind=Origin.ARENA,
                    writer=rank,
                    session="1",
                    step=step,
                    resumes_at=step,
                    world_size=num_ranks,
                    experts=tuple(HeldExpert(layer, expert, step, step) for layer, expert in written[rank]),
                )
                for step in _STEPS
            ),
        )
        for rank in range(num_ranks)
    ]
