"""How many tokens of each expert every holder computes: balanced over ranks, in integers, the same on every rank.

An equal split per replica balances each expert for itself; ranks that hold two hot experts stay overloaded. Here the
holders of an expert share its tokens in proportion to a weight per rank, and the weights fall on overloaded ranks and
rise on idle ones (multiplicative weights); the best split met is then finished token by token (`quota_flow`), for
weights converge slowly where a few ranks hold what nobody else does. The search runs on the list of (expert, rank)
pairs, not on the dense table, and in fixed-point integers, so that every rank of a heterogeneous cluster finds the same
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_lightning.algorithms.placement import IntArray
from moe_lightning.algorithms.quota_flow import relieve
from moe_lightning.errors import ConfigurationError

_ONE = 1 << 20
"""Fixed-point unit of the weights."""

_ROUNDS = 48
_GOOD_ENOUGH = 1.002

_PATIENCE = 12
"""Rounds without a gain after which the weights have done what they can."""

_FEW_PAIRS, _LITTLE_PATIENCE = 1024, 4
"""Where pairs are few, finishing token by token is faster than more rounds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pairs:
    """The (expert, rank) pairs of a placement in expert-major order; all int64 [pairs] unless said otherwise.

    Attributes:
        experts, ranks: of each pair.
        shares: replicas of the pair.
        demand: tokens of the pair's expert.
        starts: [experts with a holder], the first pair of each.
        segment: which of these experts the pair belongs to.
    """

    experts: IntArray
    ranks: IntArray
    shares: IntArray
    demand: IntArray
    starts: IntArray
    segment: IntArray

    def split(self, pull: IntArray) -> IntArray:
        """Tokens of each pair in proportion to its pull, by cumulative rounding: pair j gets
        floor(t * cum[j+1] / sum) - floor(t * cum[j] / sum), so that the pairs of an expert sum exactly."""
        upto = np.cumsum(pull)
        base = (upto - pull)[self.starts]
        norm = np.maximum(np.add.reduceat(pull, self.starts), 1)[self.segment]
        upto -= base[self.segment]
        bound = self.demand * upto // norm
        before = np.concatenate(([0], bound[:-1]))
        before[self.starts] = 0
        return bound - before


def equal_quota(tokens: IntArray, replicas: IntArray) -> IntArray:
    """Split each expert's tokens evenly over its replicas (Lazarus 4.2; ours in integers).

    Args:
        tokens: int64 [E], tokens of each expert over the whole dispatch group.
        replicas: int64 [E, N].

    Returns:
        int64 [E, N] with row sums `tokens`; entries differ from tokens * share by less than one.

    Raises:
        ConfigurationError: an expert has tokens but no replica.
    """
    pairs = _pairs(tokens, replicas)
    return _dense(pairs, pairs.split(pairs.shares), replicas.shape)


def balanced_quota(tokens: IntArray, replicas: IntArray) -> IntArray:
    """Split each expert's tokens over its holders so that the busiest rank carries as little as possible.

    Args:
        tokens: int64 [E], tokens of each expert over the whole dispatch group, each below 2^31.
        replicas: int64 [E, N].

    Returns:
        int64 [E, N] with row sums `tokens` and zeros where `replicas` is zero. The busiest rank carries at most 0.8
        percent more than it must; on clusters of hundreds of ranks, where proving that would take longer than the
        tokens are worth, it is merely never worse than `equal_quota`.

    Raises:
        ConfigurationError: an expert has tokens but no replica.
    """
    pairs = _pairs(tokens, replicas)
    num_ranks = replicas.shape[1]
    equal = pairs.split(pairs.shares)
    if len(pairs.starts) == len(pairs.experts) or num_ranks == 1:
        return _dense(pairs, equal, replicas.shape)  # one holder each: nothing to choose
    mean = max(1, -(-int(tokens.sum()) // num_ranks))
    num_holders = np.diff(pairs.starts, append=len(pairs.ranks))
    bound = max(mean, int((-(-pairs.demand[pairs.starts] // num_holders)).max()))
    balanced = pairs.split(_balancing_pull(pairs, num_ranks, mean, bound))
    best = min(balanced, equal, key=lambda quota: int(_load(pairs, quota, num_ranks).max()))
    best = relieve(best, bound, experts=pairs.segment, ranks=pairs.ranks, demand=pairs.demand)
    return _dense(pairs, best, replicas.shape)


def _balancing_pull(pairs: _Pairs, num_ranks: int, mean: int, bound: int) -> IntArray:
    """weight of the rank * shares of the pair, for the best weights found; `bound`: a load that no split can beat."""
    # Products of a weight with an expert's tokens, summed over its holders, must stay inside int64.
    largest = int((np.add.reduceat(pairs.shares, pairs.starts) * pairs.demand[pairs.starts]).max())
    one = max(1, min(_ONE, (1 << 62) // max(1, largest)))
    weights = np.full(num_ranks, one)
    patience = _LITTLE_PATIENCE if len(pairs.experts) <= _FEW_PAIRS else _PATIENCE
    best_pull, best_load, best_round = pairs.shares, np.iinfo(np.int64).max, 0
    for index in range(_ROUNDS):
        pull = weights[pairs.ranks] * pairs.shares
        norm = np.add.reduceat(pull, pairs.starts)
        load = _load(pairs, pairs.demand * pull // norm[pairs.segment], num_ranks)
        busiest = int(load.max())
        if busiest < best_load:
            best_pull, best_load, best_round = pull, busiest, index
        if busiest <= bound * _GOOD_ENOUGH or index - best_round >= patience:
            break
        weights = weights * mean // np.maximum(load, max(1, mean // 64))
        weights = np.maximum(weights * one // max(1, int(weights.max())), 1)
    return best_pull


def _pairs(tokens: IntArray, replicas: IntArray) -> _Pairs:
    if tokens.shape != replicas.shape[:1]:
        raise ConfigurationError(f"{len(tokens)} token counts do not fit a placement of {len(replicas)} experts")
    experts, ranks = np.divmod(np.flatnonzero(replicas != 0), replicas.shape[1])
    held, starts = np.unique(experts, return_index=True)
    homeless = tokens > 0
    homeless[held] = False
    if homeless.any():
        expert = int(homeless.argmax())
        raise ConfigurationError(f"expert {expert} has {tokens[expert]} tokens but no replica: place it on a rank")
    return _Pairs(
        experts=experts,
        ranks=ranks,
        shares=replicas[experts, ranks],
        demand=tokens[experts],
        starts=starts,
        segment=np.repeat(np.arange(len(held)), np.diff(starts, append=len(experts))),
    )


def _load(pairs: _Pairs, tokens: IntArray, num_ranks: int) -> IntArray:
    """int64 [N]: tokens on each rank; bincount sums in doubles, exactly below 2^53."""
    return np.bincount(pairs.ranks, weights=tokens, minlength=num_ranks).astype(np.int64)


def _dense(pairs: _Pairs, tokens: IntArray, shape: tuple[int, ...]) -> IntArray:
    quota = np.zeros(shape, dtype=np.int64)
    quota[pairs.experts, pairs.ranks] = tokens
    return quota
