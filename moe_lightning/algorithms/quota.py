"""How many tokens of each expert every holder computes: balanced over ranks, in integers, the same on every rank.

An equal split per replica balances each expert for itself; ranks that hold two hot experts stay overloaded. Here the holders of an expert
share its tokens in proportion to a weight per rank, and the weights fall on overloaded ranks and rise on idle ones (multiplicative
weights) until the busiest rank no longer improves. The search runs on the list of (expert, rank) pairs, not on the dense table, and in
fixed-point integers, so that every rank of a heterogeneous cluster finds the same numbers.
"""

from __future__ import annotations

import numpy as np

from moe_lightning.algorithms.placement import IntArray
from moe_lightning.errors import ConfigurationError

_ONE = np.int64(1 << 20)
"""Fixed-point unit of the weights: products with token counts up to 2^31 and a few hundred holders stay inside int64."""

_ROUNDS = 48
_GOOD_ENOUGH = 1.002


def equal_quota(tokens: IntArray, replicas: IntArray) -> IntArray:
    """Split each expert's tokens evenly over its replicas (ALGORITHMS 2, step 1; Lazarus 4.2).

    Args:
        tokens: int64 [E], tokens of each expert over the whole dispatch group.
        replicas: int64 [E, N].

    Returns:
        int64 [E, N] with row sums `tokens`; entries differ from tokens * share by less than one.

    Raises:
        ConfigurationError: an expert has tokens but no replica.
    """
    _check(tokens, replicas)
    experts, ranks = np.nonzero(replicas)
    return _round(tokens, experts, ranks, replicas[experts, ranks], replicas.shape)


def balanced_quota(tokens: IntArray, replicas: IntArray, rounds: int = _ROUNDS) -> IntArray:
    """Split each expert's tokens over its holders so that the busiest rank carries as little as possible.

    Args:
        tokens: int64 [E], tokens of each expert over the whole dispatch group, each below 2^31.
        replicas: int64 [E, N].
        rounds: most rounds of multiplicative weights; fewer are used once the busiest rank is within 0.2 percent of the mean.

    Returns:
        int64 [E, N] with row sums `tokens` and zeros where `replicas` is zero. Never worse than `equal_quota`.

    Raises:
        ConfigurationError: an expert has tokens but no replica.
    """
    _check(tokens, replicas)
    num_experts, num_ranks = replicas.shape
    experts, ranks = np.nonzero(replicas)
    shares = replicas[experts, ranks]
    best = _round(tokens, experts, ranks, shares, replicas.shape)
    if len(experts) == num_experts or num_ranks == 1:
        return best  # one holder each: nothing to choose
    total = int(tokens.sum())
    mean = max(1, -(-total // num_ranks))
    best_load = int(best.sum(axis=0).max())
    weights = np.full(num_ranks, _ONE)
    demand = tokens[experts]
    for _ in range(rounds):
        if best_load <= mean * _GOOD_ENOUGH:
            break
        pull = weights[ranks] * shares
        norm = np.bincount(experts, weights=pull, minlength=num_experts).astype(np.int64)  # exact: below 2^53
        flow = demand * pull // np.maximum(norm[experts], 1)
        load = np.bincount(ranks, weights=flow, minlength=num_ranks).astype(np.int64)
        weights = weights * mean // np.maximum(load, max(1, mean // 64))
        weights = np.maximum(weights * _ONE // max(1, int(weights.max())), 1)
        quota = _round(tokens, experts, ranks, weights[ranks] * shares, replicas.shape)
        quota_load = int(quota.sum(axis=0).max())
        if quota_load < best_load:
            best, best_load = quota, quota_load
    return best


def _check(tokens: IntArray, replicas: IntArray) -> None:
    if tokens.shape != replicas.shape[:1]:
        raise ConfigurationError(f"{len(tokens)} token counts do not fit a placement of {len(replicas)} experts")
    homeless = np.flatnonzero((tokens > 0) & (replicas.sum(axis=1) == 0))
    if homeless.size:
        expert = int(homeless[0])
        raise ConfigurationError(f"expert {expert} has {tokens[expert]} tokens but no replica: place it on a rank")


def _round(tokens: IntArray, experts: IntArray, ranks: IntArray, pull: IntArray, shape: tuple[int, ...]) -> IntArray:
    """Cumulative rounding: entry j gets floor(t * cum_{j+1} / sum) - floor(t * cum_j / sum), so that rows sum exactly."""
    upto = np.cumsum(pull)
    last = np.searchsorted(experts, np.arange(shape[0]), side="right")
    ends = np.where(last > 0, upto[last - 1], 0)
    base = np.concatenate(([0], ends[:-1]))
    norm = np.maximum(ends - base, 1)[experts]
    demand = tokens[experts]
    high = demand * (upto - base[experts]) // norm
    low = demand * (upto - pull - base[experts]) // norm
    quota = np.zeros(shape, dtype=np.int64)
    quota[experts, ranks] = high - low
    return quota
