"""Shadows: experts whose weights visit other ranks for one step and are computed where their tokens are.

A plan says which experts are copied to which ranks; how tokens then divide is a quota like any other. This file has the
plan, its quotas, its predicted time and the policies to compare with; `shadow_search` has the search.
Source: Pro-Prophet IV.

Shapes: E experts, N ranks.
"""

from __future__ import annotations

import numpy as np

from moe_lightning.algorithms.performance_model import BlockCosts, BlockTimes, pair_volumes, predict_block, total_copies
from moe_lightning.arrays import FloatArray, IntArray, Pairs
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.quota import balanced_quota, balanced_split
from moe_lightning.dispatch.shadow_plan import ShadowPlan, choose_homes


def predict_plan(
    tokens: IntArray, placement: Placement, plan: ShadowPlan, costs: BlockCosts, scheduled: bool = True
) -> BlockTimes:
    """Predicted seconds of a block under a plan, for tokens int64 [E, N]."""
    plan.check(placement)
    volumes = plan_volumes(tokens, placement.pairs, plan, tokens.sum(axis=1), tokens.sum(axis=0), costs.speeds)
    return predict_block(volumes, total_copies(plan.shadows, plan.homes, costs.transfer), costs, scheduled)


def plan_volumes(
    tokens: IntArray,
    residents: Pairs,
    plan: ShadowPlan,
    load: IntArray,
    own: IntArray,
    speeds: IntArray | None = None,
) -> IntArray:
    """int64 [4, N]: `total_volumes` of `shadow_quota`, without tables of all experts and ranks.

    Args:
        tokens: int64 [E, N].
        residents: of a placement that the plan was made for.
        plan: shadows.
        load: int64 [E], tokens of each expert.
        own: int64 [N], tokens of each rank.
        speeds: int64 [N], of the ranks; None: all alike.
    """
    if plan.quota_rule == "balanced" and plan.num_copies:
        holders = residents.joined(plan.shadows)
        return pair_volumes(tokens, holders, balanced_split(load, holders, speeds), own)
    moved = np.flatnonzero(plan.shadows.any(axis=1))
    kept = tokens[moved]
    kept *= plan.shadows[moved]
    rest = load.copy()
    rest[moved] -= kept.sum(axis=1)
    volumes = pair_volumes(tokens, residents, balanced_split(rest, residents, speeds), own)
    at_home = kept.sum(axis=0)
    volumes[0] += at_home
    volumes[1] -= at_home
    volumes[3] += np.count_nonzero(kept, axis=0)
    return volumes


def no_shadows(tokens: IntArray, placement: Placement) -> ShadowPlan:
    """Only residents compute."""
    return ShadowPlan(
        shadows=np.zeros(placement.pairs.shape, dtype=np.bool_), homes=choose_homes(placement, tokens.sum(axis=1))
    )


def top_shadows(tokens: IntArray, placement: Placement, count: int) -> ShadowPlan:
    """The `count` experts with most tokens, everywhere: the top-2 and top-3 policies that Pro-Prophet compares with."""
    shadows = np.zeros(placement.pairs.shape, dtype=np.bool_)
    shadows[np.argsort(-tokens.sum(axis=1), kind="stable")[:count]] = True
    shadows[placement.pairs.experts, placement.pairs.ranks] = False
    return ShadowPlan(shadows=shadows, homes=choose_homes(placement, tokens.sum(axis=1)))


def fastermoe_shadows(tokens: IntArray, placement: Placement, costs: BlockCosts) -> ShadowPlan:
    """FasterMoE's rule as published (Alg. 1): the hottest experts everywhere, one more while the estimate falls."""
    estimate_s = _fastermoe_estimates(tokens, placement, costs)
    rises = np.flatnonzero(np.diff(estimate_s) >= 0)
    return top_shadows(tokens, placement, int(rises[0]) if rises.size else len(estimate_s) - 1)


def fastermoe_best_shadows(tokens: IntArray, placement: Placement, costs: BlockCosts) -> ShadowPlan:
    """FasterMoE's estimate without its early end: the hottest k experts everywhere, for the best of all k.

    With one expert per rank the rows that are left fall with every k, and a rise is final; with several experts or
    replicas on a rank the next expert may relieve another rank than the busiest one, and the rule above stops there.
    """
    return top_shadows(tokens, placement, int(np.argmin(_fastermoe_estimates(tokens, placement, costs))))


def _fastermoe_estimates(tokens: IntArray, placement: Placement, costs: BlockCosts) -> FloatArray:
    """float64 [E + 1]: seconds with k = 0, 1, ... shadowed experts.

    The estimate is (3 compute + 4 transfer) * rows + k * copy, where rows are what the busiest rank computes of experts
    without shadows: shadowed rows and gradients are not counted. Measured constants take the place of its defaults.
    """
    order = np.argsort(-tokens.sum(axis=1), kind="stable")
    base = balanced_quota(tokens.sum(axis=1), placement.replicas)[order]
    left = base.sum(axis=0) - np.concatenate([np.zeros((1, base.shape[1]), dtype=np.int64), np.cumsum(base, axis=0)])
    bytes_per_s, rows_per_s = float(np.min(costs.bytes_per_s)), float(np.min(costs.rows_per_s))
    per_row_s = (1 + costs.backward_ratio) / rows_per_s + 4 * costs.row_bytes / bytes_per_s
    copies_s = np.arange(len(left)) * costs.weight_bytes / bytes_per_s
    return np.asarray(per_row_s * left.max(axis=1) + copies_s, dtype=np.float64)
