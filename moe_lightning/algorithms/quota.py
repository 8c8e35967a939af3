"""How many tokens of each expert every holder computes: balanced over ranks, in integers, the same on every rank.

An equal split per replica balances each expert for itself; ranks that hold two hot experts stay overloaded. Here the
holders of an expert share its tokens in proportion to a weight per rank, and the weights fall on overloaded ranks and
rise on idle ones (multiplicative weights); the best split met is then finished token by token (`quota_flow`), for
weights converge slowly where a few ranks hold what nobody else does. Where ranks differ in speed, what is balanced is
their time. The search runs on the list of (expert, rank)
pairs, not on the dense table, and in fixed-point integers, so that every rank of a heterogeneous cluster finds the same
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_lightning.algorithms.quota_flow import SLACK, relieve, with_slack
from moe_lightning.algorithms.speeds import Pace
from moe_lightning.arrays import IntArray, Pairs
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

    @property
    def has_choice(self) -> bool:
        """Whether any expert has several holders."""
        return len(self.starts) < len(self.pairs.experts) and self.pairs.shape[1] > 1

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


def balanced_quota(tokens: IntArray, replicas: IntArray, speeds: IntArray | None = None) -> IntArray:
    """Split each expert's tokens over its holders so that the longest time of a rank is as short as possible.

    Args:
        tokens: int64 [E], tokens of each expert over the whole dispatch group, each below 2^31.
        replicas: int64 [E, N].
        speeds: int64 [N], tokens of a rank in a time, see `algorithms.speeds`; None: all ranks are equally fast.

    Returns:
        int64 [E, N] with row sums `tokens` and zeros where `replicas` is zero. The longest time is at most 0.8 percent
        longer than it must be, 1.6 percent where hundreds of ranks are links of long chains; on clusters of thousands,
        where proving that may take longer than the tokens are worth, it is merely never longer than that of
        `equal_quota`, or of a split in proportion to speed where speeds differ.

    Raises:
        ConfigurationError: an expert has tokens but no replica, or speeds of other ranks.
    """
    pairs = Pairs.of_table(replicas)
    return pairs.dense(balanced_split(tokens, pairs, speeds))


def settled_quota(tokens: IntArray, replicas: IntArray) -> IntArray:
    """`balanced_quota` for equally fast ranks without its search token by token, whose length nobody knows: where
    the weights have not come within 0.8 percent of the bound, they go on instead, for 48 rounds.

    Args:
        tokens: int64 [E], as for `balanced_quota`.
        replicas: int64 [E, N].

    Returns:
        int64 [E, N]: those of `balanced_quota` wherever that has nothing to search for.

    Raises:
        ConfigurationError: an expert has tokens but no replica.
    """
    pairs = Pairs.of_table(replicas)
    demand = _demand(tokens, pairs)
    if not demand.has_choice:
        return pairs.dense(demand.demand)
    return pairs.dense(_weighted_split(demand, Pace.of(None, pairs.shape[1]), tokens, is_last=True)[0])


def sharing_rounds(num_pairs: int) -> tuple[int, int, int, int]:
    """What `settled_quota` does with so many pairs of an expert and a rank: (rounds, rounds of patience, 1 over the
    part of the bound that is good enough, unit of the weights).
    """
    return _ROUNDS, _patience(num_pairs), SLACK, _ONE


def _patience(num_pairs: int) -> int:
    return _LITTLE_PATIENCE if num_pairs <= _FEW_PAIRS else _PATIENCE


def balanced_split(tokens: IntArray, pairs: Pairs, speeds: IntArray | None = None) -> IntArray:
    """int64 [P]: `balanced_quota` of holders that are given as pairs; the same arguments, limits and errors."""
    demand = _demand(tokens, pairs)
    pace = Pace.of(speeds, pairs.shape[1])
    if not demand.has_choice:
        return demand.demand
    best, load, bound = _weighted_split(demand, pace, tokens, is_last=False)
    return relieve(best, load, bound, pace, experts=demand.segment, ranks=pairs.ranks, demand=demand.demand)


def _weighted_split(demand: _Demand, pace: Pace, tokens: IntArray, *, is_last: bool) -> tuple[IntArray, IntArray, int]:
    """Tokens of each pair by the best weights, of each rank, and a time that no split can beat.

    Args:
        is_last: nothing will be moved after this.
    """
    pairs = demand.pairs
    mean = max(1, pace.least_time(int(tokens.sum())))
    together = np.add.reduceat(pace.speeds[pairs.ranks], demand.starts)
    bound = max(mean, int((-(-demand.demand[demand.starts] * pace.fastest // together)).max()))
    enough = with_slack(bound) if is_last else np.iinfo(np.int64).max
    pull, first_pull, first_time = _balancing_pull(demand, pace, mean, bound, enough)
    best = demand.split(pull)
    load = pairs.on_ranks(best)
    if int(pace.times(load).max()) > first_time:
        first = demand.split(first_pull)
        load_then = pairs.on_ranks(first)
        if pace.times(load_then).max() < pace.times(load).max():
            best, load = first, load_then
    return best, load, bound


def _balancing_pull(demand: _Demand, pace: Pace, mean: int, bound: int, enough: int) -> tuple[IntArray, IntArray, int]:
    """weight of the rank * shares of the pair, for the best weights found and for those of speed alone, and a time that
    the latter's longest does not fall short of.

    Args:
        demand: what is to be split.
        pace: of the ranks.
        mean: time of a rank, at least 1.
        bound: a time that no split can beat.
        enough: patience ends only below this time.
    """
    pairs, starts = demand.pairs, demand.starts
    # Products of a weight with an expert's tokens, summed over its holders, and with a time must stay inside int64.
    largest = max(mean, int((np.add.reduceat(pairs.replicas, starts) * demand.demand[starts]).max()))
    one = max(1, min(_ONE, (1 << 62) // largest))
    weights = np.maximum(one * pace.speeds // pace.fastest, 1)
    patience = _patience(len(pairs.experts))
    best_pull, best_time, best_round = pairs.replicas, np.iinfo(np.int64).max, 0
    first_pull, first_time = best_pull, 0
    for index in range(_ROUNDS):
        pull = weights[pairs.ranks] * pairs.replicas
        norm = np.add.reduceat(pull, starts)
        times = pace.times(pairs.on_ranks(demand.demand * pull // norm[demand.segment]))
        longest = int(times.max())
        if not index:
            first_pull, first_time = pull, longest  # rounded down
        if longest < best_time:
            best_pull, best_time, best_round = pull, longest, index
        if longest <= bound * _GOOD_ENOUGH or (index - best_round >= patience and best_time <= enough):
            break
        weights = weights * mean // np.maximum(times, max(1, mean // 64))
        weights = np.maximum(weights * one // max(1, int(weights.max())), 1)
    return best_pull, first_pull, first_time


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
