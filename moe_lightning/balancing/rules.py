"""Placement rules by name, and the comparison of placements and shadow plans under one cost model.

Slow scale: `plan_placement`, every few hundred steps or when the world changes. Fast scale: `plan_shadows`, every step
or when it pays. `STRATEGIES` names combinations of both, the baselines of the papers among them; `evaluate` judges one
on given tokens, so that one table can compare them.

Shapes: L layers, E experts, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from moe_lightning.arrays import IntArray
from moe_lightning.balancing.cluster import (
    AllocationPolicy,
    Cluster,
    affordable_replicas,
    allocate_replicas,
    balance_ratio,
    bounded_loads,
    imbalance,
)
from moe_lightning.balancing.cost_model import (
    ONE_COPY,
    BlockCosts,
    TransferMethod,
    predict_block,
    total_copies,
    total_volumes,
)
from moe_lightning.balancing.migration import align_placements
from moe_lightning.balancing.packing import longest_time, packed_placement
from moe_lightning.balancing.replica_placement import NODE_RULES, deal_to_ranks
from moe_lightning.balancing.shadow_search import (
    fastermoe_best_shadows,
    fastermoe_shadows,
    no_shadows,
    search_shadows,
    top_shadows,
)
from moe_lightning.config import validated
from moe_lightning.dispatch.placement import Placement, uniform_placement
from moe_lightning.dispatch.quota import ShadowPlan, balanced_quota, equal_quota, padded_rows, shadow_quota
from moe_lightning.errors import ConfigurationError
from moe_lightning.registry import Registry


class PlacementRule(Protocol):
    """Places a layer's experts. Every rank calls it for itself, so it must return the same on all of them: integers
    decide, not floating-point sums, random numbers or the time."""

    def __call__(self, load: IntArray, cluster: Cluster, min_replicas: int, /) -> Placement:
        """Replicas of every expert.

        Args:
            load: int64 [E], tokens of each expert; all zeros means unknown.
            cluster: ranks, nodes, slots, speeds; no rank may hold more experts than it has slots.
            min_replicas: distinct nodes for each expert, where slots allow.
        """


@dataclass(frozen=True, kw_only=True)
class NodeRule:
    """A `PlacementRule` in three steps: replicas are counted, placed on nodes, and dealt to the nodes' ranks.

    Attributes:
        table: from replicas int64 [E] and the slots of each node int64 [M] to a table int64 [E, M].
        allocation: how replicas are counted.
    """

    table: Callable[[IntArray, IntArray], IntArray]
    allocation: AllocationPolicy = "waterfill"

    def __call__(self, load: IntArray, cluster: Cluster, min_replicas: int, /) -> Placement:
        replicas = allocate_replicas(
            load,
            slots=cluster.num_slots,
            num_nodes=cluster.num_nodes,
            min_replicas=min_replicas,
            policy=self.allocation,
        )
        return deal_to_ranks(self.table(replicas, cluster.node_slots()), cluster, load)


def plain_placement(load: IntArray, cluster: Cluster, min_replicas: int, /) -> Placement:
    """Every expert once, whatever its load.

    Raises:
        ConfigurationError: fewer slots than experts.
    """
    if cluster.num_slots < len(load):
        raise ConfigurationError(f"{cluster.num_slots} slots cannot hold {len(load)} experts: add ranks or slots")
    return uniform_placement(len(load), cluster.num_ranks)


PLACEMENT_RULES: Registry[PlacementRule] = Registry(
    "placement",
    PlacementRule,
    {
        "packed": packed_placement,
        **{name: NodeRule(table=table) for name, table in NODE_RULES.items()},
        "plain": plain_placement,
    },
)
"""Placement rules by name, those of packages too: "packed" is balance first, "mro+" survival first, and "plain" every
expert once, without its load."""

ONE_NODE_RULES = ("plain", "compact")
"""Rules that leave experts on one node."""


def placed_by(rule: PlacementRule, load: IntArray, cluster: Cluster, min_replicas: int) -> Placement:
    """A layer's placement by a rule.

    Raises:
        ConfigurationError: the rule returns something else, or a placement that does not fit the cluster.
    """
    placement = rule(load, cluster, min_replicas)
    shape = (len(load), cluster.num_ranks)
    if not isinstance(placement, Placement) or placement.pairs.shape != shape:
        found = placement.pairs.shape if isinstance(placement, Placement) else f"a {type(placement).__name__}"
        raise ConfigurationError(
            f"the placement rule {_name(rule)} returned {found} where a Placement of {shape} (experts, ranks) is due: "
            "return Placement(replicas=table)"
        )
    held = np.bincount(placement.pairs.ranks, minlength=cluster.num_ranks)
    if held.max() > cluster.slots_per_rank:
        raise ConfigurationError(
            f"the placement rule {_name(rule)} put {held.max()} experts on rank {held.argmax()}, which has "
            f"{cluster.slots_per_rank} slots: place fewer there"
        )
    return placement


def _name(rule: object) -> str:
    return str(getattr(rule, "__qualname__", type(rule).__qualname__))


@validated
@dataclass(frozen=True, kw_only=True)
class PlacementPolicy:
    """Rules by which replicas are counted, placed and mapped.

    Attributes:
        rule: a name in `PLACEMENT_RULES`.
        allocation: replica counts for the rules of this package but "packed" and "plain", which need none.
        min_replicas: distinct nodes for each expert, where slots allow.
        slots: of each rank that are filled; None: all.

    Raises:
        ConfigurationError: an unknown rule.
    """

    rule: str = "packed"
    allocation: AllocationPolicy = "waterfill"
    min_replicas: int = 2
    slots: int | None = None

    def __post_init__(self) -> None:
        PLACEMENT_RULES.find(self.rule, "placement_rule")

    def place(self, load: IntArray, cluster: Cluster) -> Placement:
        """A layer's experts by their loads, int64 [E].

        Raises:
            ConfigurationError: slots that cannot hold the experts, or a rule's placement that does not fit the cluster.
        """
        rule = PLACEMENT_RULES[self.rule]
        if isinstance(rule, NodeRule):
            rule = replace(rule, allocation=self.allocation)
        if self.slots is not None:
            cluster = replace(cluster, slots_per_rank=self.slots)
        return placed_by(rule, bounded_loads(load), cluster, self.min_replicas)


def plan_placement(loads: IntArray, cluster: Cluster, policy: PlacementPolicy) -> list[Placement]:
    """A placement for every layer.

    Args:
        loads: int64 [L, E], tokens of each expert since the last plan.
        cluster: ranks, nodes, slots, speeds.
        policy: how to place.

    Raises:
        ConfigurationError: slots that cannot hold the experts.
    """
    return [policy.place(load, cluster) for load in loads]


def replan_placement(
    loads: IntArray,
    cluster: Cluster,
    candidates: Sequence[PlacementPolicy],
    current: Sequence[Placement],
    tolerance: float = 0.02,
    *,
    block_s: Callable[[int, Placement], float] | None = None,
) -> list[Placement]:
    """A placement for every layer of an unchanged world, which moves experts only where that relieves the busiest rank.

    A layer keeps its present placement if the busiest rank carries at most 1 + tolerance times the mean, or times what
    it would carry under a fresh plan: moving an expert moves all of its state, so plans that follow noise do not pay.
    On a real trace this cuts migrations to a quarter or less at the same balance. What the nodes protect comes first: a
    placement with experts on fewer nodes than promised is replaced by one with fewer missing, and never by one with
    more.

    Args:
        loads: int64 [L, E], tokens of each expert since the last plan.
        cluster: ranks, nodes, slots, speeds; the promise of the policies' min_replicas is meant for all its slots.
        candidates: policies to choose from.
        current: the present placement of each layer, made for the same cluster.
        tolerance: relative relief that is not worth a migration.
        block_s: predicted seconds of a layer under a placement: the candidate with the least is chosen, if it is
            faster than the present one by the tolerance; None: the first candidate that relieves most.

    Raises:
        ConfigurationError: placements that do not fit the loads or the cluster.
    """
    shapes = {placement.pairs.shape for placement in current}
    if len(current) != len(loads) or shapes != {(loads.shape[1], cluster.num_ranks)}:
        raise ConfigurationError(
            f"{len(current)} placements of {sorted(shapes)} (experts, ranks) do not fit loads {loads.shape} on "
            f"{cluster.num_ranks} ranks: use plan_placement after the world has changed"
        )
    loads = bounded_loads(loads)

    fresh: dict[int, Placement] = {}
    for layer, present in enumerate(current):
        predicted_s = None if block_s is None else partial(block_s, layer)
        better = _better_placement(loads[layer], cluster, candidates, present, tolerance, predicted_s)
        if better is not None:
            fresh[layer] = better
    if not fresh:
        return list(current)
    aligned = align_placements([current[layer] for layer in fresh], list(fresh.values()), cluster)
    for (layer, planned), renamed in zip(list(fresh.items()), aligned, strict=True):
        longest = partial(longest_time, load=loads[layer], cluster=cluster)
        if cluster.pace.is_even or longest(renamed) <= (1 + tolerance) * longest(planned):
            fresh[layer] = renamed  # else a slow rank would carry the share of a fast one
    return [fresh.get(layer, present) for layer, present in enumerate(current)]


def _better_placement(
    load: IntArray,
    cluster: Cluster,
    candidates: Sequence[PlacementPolicy],
    present: Placement,
    tolerance: float,
    block_s: Callable[[Placement], float] | None,
) -> Placement | None:
    """The candidate that is worth a migration, or None."""
    promised = affordable_replicas(
        len(load),
        slots=cluster.num_slots,
        num_nodes=cluster.num_nodes,
        min_replicas=max(policy.min_replicas for policy in candidates),
    )
    missing, longest = cluster.missing_nodes(present.pairs, promised), longest_time(present, load, cluster)
    if not missing and longest * cluster.pace.total <= (1 + tolerance) * int(load.sum()) * cluster.pace.fastest:
        return None
    placements = [policy.place(load, cluster) for policy in candidates]
    missing_then = [cluster.missing_nodes(placement.pairs, promised) for placement in placements]
    safest = min(missing_then)
    if safest > missing:
        return None
    safe = [placement for placement, number in zip(placements, missing_then, strict=True) if number == safest]
    if block_s is None:
        best = min(safe, key=partial(longest_time, load=load, cluster=cluster))
        faster = True
    else:
        seconds = [block_s(placement) for placement in safe]
        best = safe[int(np.argmin(seconds))]
        faster = block_s(present) > (1 + tolerance) * min(seconds)
    worth_it = safest < missing or (faster and longest > (1 + tolerance) * longest_time(best, load, cluster))
    return best if worth_it else None


SHADOW_POLICIES: dict[str, Callable[[IntArray, Placement, BlockCosts], ShadowPlan]] = {
    "none": lambda tokens, placement, costs: no_shadows(tokens, placement),
    "search": lambda tokens, placement, costs: search_shadows(tokens, placement, costs),
    "fastermoe": fastermoe_shadows,
    "fastermoe+": fastermoe_best_shadows,
    "top2": lambda tokens, placement, costs: top_shadows(tokens, placement, 2),
    "top3": lambda tokens, placement, costs: top_shadows(tokens, placement, 3),
}


def plan_shadows(
    tokens: IntArray, placements: Sequence[Placement], costs: Sequence[BlockCosts], policy: str = "search"
) -> list[ShadowPlan]:
    """A shadow plan for every layer.

    Args:
        tokens: int64 [L, E, N], expected assignments of the next step.
        placements, costs: of each layer.
        policy: a name in `SHADOW_POLICIES`.
    """
    choose = SHADOW_POLICIES[policy]
    return [choose(*layer) for layer in zip(tokens, placements, costs, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to train under skew.

    Attributes:
        placement: slow scale.
        shadows: fast scale, a name in `SHADOW_POLICIES`.
        balanced: whether the holders' quotas are balanced over ranks, or merely equal per replica.
        padded: whether every (expert, rank) buffer travels padded to the fullest, as in DeepSpeed-MoE without drops.
        by_speed: whether balanced quotas follow the ranks' speeds.
        transfer: how shadows travel, see `TransferMethod`; "direct" is what training does.
    """

    placement: PlacementPolicy
    shadows: str = "none"
    balanced: bool = True
    padded: bool = False
    by_speed: bool = True
    transfer: TransferMethod = "direct"


_PLAIN = PlacementPolicy(rule="plain", min_replicas=1)

STRATEGIES: dict[str, Strategy] = {
    "plain": Strategy(placement=_PLAIN),
    "padded": Strategy(placement=_PLAIN, padded=True),
    "top2": Strategy(placement=_PLAIN, shadows="top2", transfer="average"),
    "top3": Strategy(placement=_PLAIN, shadows="top3", transfer="average"),
    "fastermoe": Strategy(placement=_PLAIN, shadows="fastermoe", transfer="average"),
    "fastermoe+": Strategy(placement=_PLAIN, shadows="fastermoe+", transfer="average"),
    "prophet": Strategy(placement=_PLAIN, shadows="search", transfer="average"),
    "search": Strategy(placement=_PLAIN, shadows="search"),
    "compact": Strategy(placement=PlacementPolicy(rule="compact", allocation="eq1"), balanced=False),
    "spread": Strategy(placement=PlacementPolicy(rule="spread", allocation="eq1"), balanced=False),
    "lazarus": Strategy(placement=PlacementPolicy(rule="mro", allocation="eq1"), balanced=False),
    "resilient": Strategy(placement=PlacementPolicy(rule="mro+")),
    "packed": Strategy(placement=PlacementPolicy(rule="packed")),
    "packed+search": Strategy(placement=PlacementPolicy(rule="packed"), shadows="search"),
}


@dataclass(frozen=True, kw_only=True)
class BalanceReport:
    """One layer and step under a strategy, as the performance model sees it.

    Attributes:
        imbalance: busiest rank over mean, in rows computed; of ranks of unlike speed, the longest time over that of a
            perfect division.
        balance_ratio: RB against one uniform copy of every expert.
        exchange_bytes: what all ranks send in the four token exchanges of a step.
        copy_bytes: what all ranks send in Trans and Agg.
        exchange_s: one of the four token exchanges.
        exposed_s: Trans and Agg that nothing hides.
        block_s: T', without dense layers.
    """

    imbalance: float
    balance_ratio: float
    exchange_bytes: int
    copy_bytes: int
    exchange_s: float
    exposed_s: float
    block_s: float


def evaluate(
    tokens: IntArray,
    placement: Placement,
    plan: ShadowPlan,
    costs: BlockCosts,
    strategy: Strategy,
) -> BalanceReport:
    """Judge a placement and a shadow plan, made from whatever was known, on the tokens int64 [E, N] that came."""
    load = tokens.sum(axis=1)
    if strategy.balanced:
        quota = shadow_quota(tokens, placement, plan, costs.speeds if strategy.by_speed else None)
    else:
        plan.check(placement)
        quota = equal_quota(load, placement.replicas + plan.shadows)
    volumes = total_volumes(tokens, quota)
    if strategy.padded:
        volumes[1:3] = padded_rows(tokens) * (placement.num_ranks - 1) // placement.num_ranks
    copies = total_copies(plan.shadows, plan.homes, costs.transfer)
    times = predict_block(volumes, copies, costs)
    plain = balanced_quota(load, uniform_placement(placement.num_experts, placement.num_ranks).replicas)
    return BalanceReport(
        imbalance=imbalance(quota.sum(axis=0), costs.speeds),
        balance_ratio=balance_ratio(plain.sum(axis=0), quota.sum(axis=0)),
        exchange_bytes=round(4 * int(volumes[1].sum()) * costs.row_bytes),
        copy_bytes=round(int(copies[0].sum()) / ONE_COPY * (costs.weight_bytes + costs.gradient_bytes)),
        exchange_s=float(times.exchange_s),
        exposed_s=float(times.exposed_trans_s + times.exposed_agg_s),
        block_s=float(times.total_s),
    )
