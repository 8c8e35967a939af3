"""The greedy search for shadows: relieve the busiest rank of its heaviest expert, keep what is predicted fastest.

Pro-Prophet's Alg. 1 with its gaps filled: several experts per rank, replicas, and the number n of ranks that get no
shadow of a moved expert, which the paper leaves to the user, is searched too. `shadow_moves` makes the moves of all n
side by side.

Shapes: B values of n searched at once, E experts, N ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moe_lightning.algorithms.performance_model import BlockCosts
from moe_lightning.algorithms.shadow_moves import GreedyMoves, Layer
from moe_lightning.algorithms.shadows import no_shadows
from moe_lightning.arrays import IntArray
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.shadow_plan import ShadowPlan
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
    if placement.num_ranks == 1 or not tokens.any():
        return no_shadows(tokens, placement)
    layer = Layer(tokens=tokens, placement=placement, speeds=costs.speeds)
    moves = GreedyMoves(layer, costs, _values(placement.num_ranks, skipped_ranks), scheduled)
    moves.make(alpha)
    chosen = int(np.argmin(moves.best_s))
    nothing = ShadowPlan(shadows=np.zeros(tokens.shape, dtype=np.bool_), homes=layer.homes)
    plans = [nothing, replace(nothing, shadows=moves.shadows(chosen))]
    seconds = [float(moves.unmoved_s), layer.predict_s(plans[1], costs, scheduled)]
    # Balanced quotas cost more to find, so only two plans are tried with them: the best and the one with most shadows.
    widest = int(np.argmax(moves.num_copies))
    for index in dict.fromkeys((chosen, widest)):
        plan = replace(nothing, shadows=moves.shadows(index), quota_rule="balanced")
        if layer.least_s(plan, costs, scheduled) < min(seconds):
            plans.append(plan)
            seconds.append(layer.predict_s(plan, costs, scheduled))
    return plans[int(np.argmin(seconds))]


def _values(num_ranks: int, skipped_ranks: int | None) -> IntArray:
    """int64 [B]: the n to try."""
    if skipped_ranks is not None:
        return np.array([skipped_ranks])
    if num_ranks - 1 <= _MAX_VALUES:
        return np.arange(num_ranks - 1)
    return np.unique(np.linspace(0, num_ranks - 2, _MAX_VALUES).astype(np.int64))


def _check(tokens: IntArray, placement: Placement, skipped_ranks: int | None, alpha: float) -> None:
    if tokens.shape != placement.pairs.shape:
        raise ConfigurationError(
            f"tokens {tokens.shape} do not fit a placement of {placement.pairs.shape} (experts, ranks)"
        )
    if alpha < 0:
        raise ConfigurationError(f"alpha={alpha} can never be met: use 0 or more")
    if skipped_ranks is not None and skipped_ranks < 0:
        raise ConfigurationError(
            f"skipped_ranks={skipped_ranks} is no number of ranks: use 0 or more, or None to search it"
        )
