"""The greedy search for shadows: relieve the busiest rank of its heaviest expert, keep what is predicted fastest.

Pro-Prophet's Alg. 1 with its gaps filled: several experts per rank, replicas, and the number n of ranks that get no
shadow of a moved expert, which the paper leaves to the user, is searched too. The effect of moving an expert does not
depend on what was moved before, so all effects for all n are tabulated once and the searches for all n run side by
side.

Shapes: B values of n searched at once, E experts, N ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moe_lightning.algorithms.performance_model import (
    BlockCosts,
    BoolArray,
    FloatArray,
    copy_volumes,
    predict_block,
    row_volumes,
)
from moe_lightning.algorithms.placement import IntArray, Placement
from moe_lightning.algorithms.quota import balanced_quota
from moe_lightning.algorithms.shadows import ShadowPlan, choose_homes, no_shadows, predict_plan
from moe_lightning.errors import ConfigurationError

_MAX_VALUES = 16


def search_shadows(
    tokens: IntArray,
    placement: Placement,
    costs: BlockCosts,
    *,
    skipped_ranks: int | None = None,
    alpha: float = 0.1,
    scheduled: bool = True,
) -> ShadowPlan:
    """The plan with the least predicted time among those that the greedy search visits; no shadows where none helps.

    Args:
        tokens: int64 [E, N], expected assignments of the next step.
        placement: residents.
        costs: constants of the performance model.
        skipped_ranks: n, how many non-holders with fewest tokens for a moved expert get no shadow of it; None tries
            them all (at most 16 values, evenly spread, on large clusters).
        alpha: balanced enough when the ranks' loads differ by less than alpha times their mean. The paper leaves
            it open; a large value stops before the model's best plan, 0 costs a little more time to plan.
        scheduled: whether Trans and Agg will run under computations.

    Raises:
        ConfigurationError: tokens of another shape than the placement, or a negative alpha or skipped_ranks.
    """
    _check(tokens, placement, skipped_ranks, alpha)
    num_ranks = placement.num_ranks
    if num_ranks == 1 or not tokens.any():
        return no_shadows(tokens, placement)
    values = np.array([skipped_ranks]) if skipped_ranks is not None else np.arange(num_ranks - 1)
    if len(values) > _MAX_VALUES:
        values = np.unique(np.linspace(0, num_ranks - 2, _MAX_VALUES).astype(np.int64))
    homes = choose_homes(placement, tokens.sum(axis=1))
    shadows_BEN = _candidate_shadows(tokens, placement, values)
    chosen_BE, chosen_s = _greedy_moves(tokens, placement, costs, shadows_BEN, homes, alpha, scheduled)
    chosen_BEN = shadows_BEN & chosen_BE[:, :, None]

    def predicted_s(plan: ShadowPlan) -> float:
        return float(predict_plan(tokens, placement, plan, costs, scheduled).total_s)

    best = ShadowPlan(shadows=chosen_BEN[np.argmin(chosen_s)], homes=homes, quota_rule="local")
    # Balanced quotas cost more to find, so only two plans are tried with them: the best and the one with most shadows.
    widest = replace(best, shadows=chosen_BEN[np.argmax(chosen_BEN.sum(axis=(1, 2)))])
    balanced = (replace(plan, quota_rule="balanced") for plan in (best, widest))
    return min((no_shadows(tokens, placement), best, *balanced), key=predicted_s)


def _check(tokens: IntArray, placement: Placement, skipped_ranks: int | None, alpha: float) -> None:
    if tokens.shape != placement.replicas.shape:
        raise ConfigurationError(
            f"tokens {tokens.shape} do not fit a placement of {placement.replicas.shape} (experts, ranks)"
        )
    if alpha < 0:
        raise ConfigurationError(f"alpha={alpha} can never be met: use 0 or more")
    if skipped_ranks is not None and skipped_ranks < 0:
        raise ConfigurationError(
            f"skipped_ranks={skipped_ranks} is no number of ranks: use 0 or more, or None to search it"
        )


def _candidate_shadows(tokens: IntArray, placement: Placement, values_B: IntArray) -> BoolArray:
    """bool [B, E, N]: where an expert goes if it is moved: to all ranks that lack it but the n with fewest tokens."""
    resident = placement.replicas > 0
    order = np.argsort(np.where(resident, tokens.max() + 1, tokens), axis=1, kind="stable")
    position = np.empty_like(order)
    np.put_along_axis(position, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), axis=1)
    return ~resident & (position >= values_B[:, None, None])


def _greedy_moves(
    tokens: IntArray,
    placement: Placement,
    costs: BlockCosts,
    shadows_BEN: BoolArray,
    homes: IntArray,
    alpha: float,
    scheduled: bool,
) -> tuple[BoolArray, FloatArray]:
    """For each n: bool [B, E], the experts whose moves led to the least predicted time, and that time [B]."""
    base_EN = balanced_quota(tokens.sum(axis=1), placement.replicas)
    before = row_volumes(tokens, base_EN)
    change = row_volumes(tokens, _moved_quota(tokens, base_EN, shadows_BEN)) - before
    copies = copy_volumes(shadows_BEN, homes, costs.transfer)
    every = np.arange(len(shadows_BEN))
    volumes = np.repeat(before.sum(axis=0)[None], len(every), axis=0)
    copied = np.zeros((len(every), *copies.shape[2:]))
    used_BE: BoolArray = np.logical_not(shadows_BEN.any(axis=2))  # experts without a target are never moved
    moved_BE, best_BE = np.zeros_like(used_BE), np.zeros_like(used_BE)
    best_s = predict_block(volumes, copied, costs, scheduled).total_s
    limit = alpha * tokens.sum() / placement.num_ranks
    active = np.ones(len(every), dtype=np.bool_)
    for _ in range(placement.num_experts):
        computed = volumes[:, 0]
        relief_BE = np.where(used_BE, 0, base_EN[:, computed.argmax(axis=1)].T)
        expert = relief_BE.argmax(axis=1)
        active &= (np.ptp(computed, axis=1) >= limit) & (relief_BE[every, expert] > 0)
        if not active.any():
            break
        rows = every[active]
        volumes[rows] += change[rows, expert[rows]]
        copied[rows] += copies[rows, expert[rows]]
        used_BE[rows, expert[rows]] = moved_BE[rows, expert[rows]] = True
        total_s = predict_block(volumes, copied, costs, scheduled).total_s
        better = active & (total_s < best_s)
        best_s[better], best_BE[better] = total_s[better], moved_BE[better]
    return best_BE, best_s


def _moved_quota(tokens: IntArray, base_EN: IntArray, shadows_BEN: BoolArray) -> IntArray:
    """int64 [B, E, N]: quotas of a moved expert; shadows keep their rank's tokens, residents share the rest."""
    kept = tokens * shadows_BEN
    load = base_EN.sum(axis=1)[:, None]
    rest = (load.T - kept.sum(axis=2))[..., None]
    upto = np.cumsum(base_EN, axis=1)
    share = rest * upto // np.maximum(load, 1) - rest * (upto - base_EN) // np.maximum(load, 1)
    moved: IntArray = kept + share
    return moved
