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

from moe_lightning.algorithms.pairs import IntArray, Pairs
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
class _Demand:
    """What the holders of experts share, by pairs of an expert and a rank; all int64 [P] unless said otherwise.

    Attributes:
        pairs: who holds what.
        demand: tokens of the pair's expert.
        starts: [experts with a holder], the first pair of each.
        segment: which of these experts the pair belongs to.
    """

    pairs: Pairs
    demand: IntArray
    starts: IntArray
    segment: IntArray

    @property
    def shares(self) -> IntArray:
        """Replicas of the pair."""
        return self.pairs.replicas

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
    pairs = Pairs.of_table(replicas)
    demand = _demand(tokens, pairs)
    return pairs.dense(demand.split(demand.shares))


def balanced_quota(tokens: IntArray, replicas: IntArray) -> IntArray:
    """Split each expert's tokens over its holders so that the busiest rank carries as little as possible.

    Args:
        tokens: int64 [E], tokens of each expert over the whole dispatch group, each below 2^31.
        replicas: int64 [E, N].

    Returns:
        int64 [E, N] with row sums `tokens` and zeros where `replicas` is zero. The busiest rank carries at most 0.8
        percent more than it must, 1.6 percent where hundreds of ranks are links of long chains; on clusters of
        thousands, where proving that may take longer than the tokens are worth, it is merely never worse than
        `equal_quota`.

    Raises:
        ConfigurationError: an expert has tokens but no replica.
    """
    pairs = Pairs.of_table(replicas)
    return pairs.dense(balanced_split(tokens, pairs))


def balanced_split(tokens: IntArray, pairs: Pairs) -> IntArray:
    """int64 [P]: `balanced_quota` of holders that are given as pairs; the same arguments, limits and errors."""
    demand = _demand(tokens, pairs)
    num_ranks = pairs.shape[1]
    if len(demand.starts) == len(pairs.experts) or num_ranks == 1:
        return demand.demand  # one holder each: nothing to choose
    mean = max(1, -(-int(tokens.sum()) // num_ranks))
    num_holders = np.diff(demand.starts, append=len(pairs.ranks))
    bound = max(mean, int((-(-demand.demand[demand.starts] // num_holders)).max()))
    pull, equal_load = _balancing_pull(demand, mean, bound)
    best = demand.split(pull)
    load = pairs.on_ranks(best)
    if int(load.max()) > equal_load:
        equal = demand.split(demand.shares)
        load_then = pairs.on_ranks(equal)
        if load_then.max() < load.max():
            best, load = equal, load_then
    return relieve(best, load, bound, experts=demand.segment, ranks=pairs.ranks, demand=demand.demand)


def _balancing_pull(demand: _Demand, mean: int, bound: int) -> tuple[IntArray, int]:
    """weight of the rank * shares of the pair, for the best weights found, and a load that the busiest rank of an equal
    split does not fall short of.

    Args:
        demand: what is to be split.
        mean: tokens of a rank, at least 1.
        bound: a load that no split can beat.
    """
    pairs, starts = demand.pairs, demand.starts
    # Products of a weight with an expert's tokens, summed over its holders, must stay inside int64.
    largest = int((np.add.reduceat(pairs.replicas, starts) * demand.demand[starts]).max())
    one = max(1, min(_ONE, (1 << 62) // max(1, largest)))
    weights = np.full(pairs.shape[1], one)
    patience = _LITTLE_PATIENCE if len(pairs.experts) <= _FEW_PAIRS else _PATIENCE
    best_pull, best_load, best_round, equal_load = pairs.replicas, np.iinfo(np.int64).max, 0, 0
    for index in range(_ROUNDS):
        pull = weights[pairs.ranks] * pairs.replicas
        norm = np.add.reduceat(pull, starts)
        load = pairs.on_ranks(demand.demand * pull // norm[demand.segment])
        busiest = int(load.max())
        if not index:
            equal_load = busiest  # of weights that are all the same, rounded down
        if busiest < best_load:
            best_pull, best_load, best_round = pull, busiest, index
        if busiest <= bound * _GOOD_ENOUGH or index - best_round >= patience:
            break
        weights = weights * mean // np.maximum(load, max(1, mean // 64))
        weights = np.maximum(weights * one // max(1, int(weights.max())), 1)
    return best_pull, equal_load


def _demand(tokens: IntArray, pairs: Pairs) -> _Demand:
    if len(tokens) != pairs.shape[0]:
        raise ConfigurationError(f"{len(tokens)} token counts do not fit a placement of {pairs.shape[0]} experts")
    held = pairs.num_holders > 0
    homeless = (tokens > 0) & ~held
    if homeless.any():
        expert = int(homeless.argmax())
        raise ConfigurationError(f"expert {expert} has {tokens[expert]} tokens but no replica: place it on a rank")
    return _Demand(
        pairs=pairs,
        demand=tokens[pairs.experts],
        starts=pairs.starts[:-1][held],
        segment=pairs.experts if held.all() else (np.cumsum(held) - 1)[pairs.experts],
    )
