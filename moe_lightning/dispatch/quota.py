"""Quotas: tokens of each expert that every holder computes, with and without shadow experts.

Integers throughout, so that every rank of a heterogeneous cluster finds the same numbers. A speed is a fixed-point
number with the unit `ONE_SPEED`; only ratios matter. A rank's *time* is its load at the speed of the fastest rank: with
equal speeds, times are loads.

An equal split per replica leaves ranks with two hot experts overloaded. Here the holders of an expert share its tokens
in proportion to a weight per rank, and the weights fall on overloaded ranks and rise on idle ones (multiplicative
weights). The best split found is then finished token by token, because weights converge slowly where a few ranks are
the only holders of some experts. That is a transportation problem: tokens are pushed along the shortest path of shared
experts from one crowded rank after the other, until every rank is within 0.8 percent of a lower bound of the busiest.
Where no path is left, the reachable ranks share tokens without other holders: their mean is a better bound, and the
search continues with it. The search runs on the list of (expert, rank) pairs, not on the dense table.

`dispatch_splits` then matches senders and receivers such that as few tokens as possible are sent.

Shapes: E experts, N ranks, P pairs of an expert and a rank that holds it.
Source of shadow plans (experts whose weights are copied to other ranks for one step): Pro-Prophet IV.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_lightning.arrays import BoolArray, IntArray, Pairs
from moe_lightning.dispatch.placement import Placement
from moe_lightning.errors import ConfigurationError

ONE_SPEED = 1 << 12
"""Fixed-point unit of a speed."""

SPEED_RANGE = 64
"""The fastest rank counts as at most so many times as fast as the slowest: one beyond that is ill, not slow."""

_TIME_BITS = 24
"""Of fractions of the time of a unit."""


def given_speeds(speeds: Sequence[float] | IntArray, num_ranks: int, name: str = "speeds") -> IntArray:
    """int64 [N] from relative speeds that somebody gives, the fastest ONE_SPEED.

    Args:
        speeds: [N], positive; any unit.
        num_ranks: N.
        name: what to call them in a message.

    Raises:
        ConfigurationError: another number of them, or one that is not positive and finite.
    """
    if len(speeds) != num_ranks or not num_ranks:
        raise ConfigurationError(f"{name} lists {len(speeds)} speeds for {num_ranks} ranks: give one for each")
    for rank, speed in enumerate(speeds):
        if not (math.isfinite(speed) and speed > 0):
            raise ConfigurationError(
                f"{name} gives rank {rank} the speed {speed}: use positive numbers, such as 0.5 for half of the others'"
            )
    rates = np.array(speeds, dtype=np.float64)
    return _in_range(np.rint(ONE_SPEED * (rates / rates.max())).astype(np.int64))


def speeds_in_proportion(rates: NDArray[np.float64]) -> IntArray | None:
    """int64 [N] from positive rates float64 [N], such as rows in a second; None where they are all the same."""
    return uneven(_in_range(np.rint(ONE_SPEED * (rates / rates.max())).astype(np.int64)))


def _in_range(speeds: IntArray) -> IntArray:
    return np.maximum(speeds, -(-int(speeds.max()) // SPEED_RANGE))


def uneven(speeds: IntArray | None) -> IntArray | None:
    """The speeds, or None where they are all the same."""
    return None if speeds is None or (speeds == speeds[0]).all() else speeds


@dataclass(frozen=True, kw_only=True, eq=False)
class Pace:
    """Times of loads, and loads of times; loads are below 2^46, so that their products with speeds fit into int64.

    Attributes:
        speeds: int64 [N]; all 1 where ranks are equally fast.
        is_even: whether they are.
    """

    speeds: IntArray
    is_even: bool

    @classmethod
    def of(cls, speeds: IntArray | None, num_ranks: int) -> Pace:
        """Build from int64 [N] speeds, each from 1 to 2^16; None: all equal.

        Raises:
            ConfigurationError: speeds of another number of ranks, or outside of that range.
        """
        if speeds is None:
            return cls(speeds=np.ones(num_ranks, dtype=np.int64), is_even=True)
        if len(speeds) != num_ranks or speeds.dtype.kind != "i" or speeds.min() < 1 or speeds.max() > 1 << 16:
            raise ConfigurationError(
                f"speeds {speeds.tolist()} do not fit {num_ranks} ranks: give an integer from 1 to 65536 for each"
            )
        if uneven(speeds) is None:
            return cls.of(None, num_ranks)
        return cls(speeds=speeds.astype(np.int64), is_even=False)

    @cached_property
    def fastest(self) -> int:
        """Speed in whose time unit times are expressed."""
        return int(self.speeds.max())

    @cached_property
    def total(self) -> int:
        """Sum over all ranks."""
        return int(self.speeds.sum())

    def times(self, load: IntArray) -> IntArray:
        """int64 [..., N] of loads int64 [..., N], rounded up."""
        return load if self.is_even else -(-load * self.fastest // self.speeds)

    def time(self, rank: int, load: int) -> int:
        """Return the time of one rank for a load, rounded up."""
        return -(-load * self.fastest // int(self.speeds[rank]))

    def loads(self, time: int) -> list[int]:
        """[N]: the most that each rank can carry in a time."""
        return [time] * len(self.speeds) if self.is_even else (time * self.speeds // self.fastest).tolist()

    def least_time(self, load: int, ranks: Sequence[int] | None = None) -> int:
        """In which some ranks, or all, can carry a load that may be shared out among them in whole tokens."""
        if self.is_even:
            return -(-load // (len(self.speeds) if ranks is None else len(ranks)))
        speeds = self.speeds if ranks is None else self.speeds[list(ranks)]
        total = int(speeds.sum())
        low, high = -(-load * self.fastest // total), -(-(load + len(speeds)) * self.fastest // total)
        return bisect_left(range(high), load, low, key=lambda time: int((time * speeds // self.fastest).sum()))


def shares(total: int, speeds: IntArray, most: int | None = None) -> IntArray:
    """int64 [N]: a whole number of units for each rank, so that the longest time is as short as it can be.

    Args:
        total: units to share out.
        speeds: int64 [N].
        most: units of a rank; an even share is allowed in any case. None: twice that. Where there are enough, every
            rank gets one.
    """
    num_ranks = len(speeds)
    least, even = min(1, total // num_ranks), -(-total // num_ranks)
    most = 2 * even if most is None else max(most, even)

    low, high = 0, -(-(total << _TIME_BITS) // int(speeds.min()))
    fits = high * int(speeds.max()) < 1 << 63
    rates = speeds if fits else speeds.astype(np.object_)  # Python's integers

    def within(time: int) -> IntArray:
        units: IntArray = np.clip(time * rates >> _TIME_BITS, least, most)
        return units

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if int(within(middle).sum()) >= total else (middle + 1, high)
    units = within(low)
    for rank in np.argsort((units << _TIME_BITS) // rates, kind="stable")[::-1]:  # who is last gets one less
        if int(units.sum()) > total and units[rank] > least:
            units[rank] -= 1
    assert int(units.sum()) == total
    return units.astype(np.int64, copy=False)


SLACK = 128
"""1 over the part of a bound within which moving single tokens does not pay."""

_MOST_LOOKUPS = 1 << 16
"""Pairs that the search may look at: a few milliseconds."""

Step = tuple[int, int]
"""The pair that gives tokens of an expert, and the pair of the same expert that takes them."""


def with_slack(bound: int) -> int:
    """The time at which moving single tokens stops to pay: 1/128 above a bound."""
    return bound + bound // SLACK


def relieve(
    tokens: IntArray, load: IntArray, bound: int, pace: Pace, *, experts: IntArray, ranks: IntArray, demand: IntArray
) -> IntArray:
    """Move tokens between the holders of each expert until the busiest rank takes as short as it can.

    Args:
        tokens: int64 [pairs], a split; pairs of an expert and a rank, in expert-major order.
        load: int64 [N], tokens of each rank.
        bound: a time below which no split brings the busiest rank.
        pace: of the ranks.
        experts: int64 [pairs], from 0 without gaps.
        ranks: int64 [pairs].
        demand: int64 [pairs], tokens of the pair's expert: order of the search, so that experts' numbers do not matter.
    """
    if int(pace.times(load).max()) <= with_slack(bound):
        return tokens
    flow = _Flow(
        tokens=tokens.tolist(),
        load=load.tolist(),
        experts=experts.tolist(),
        ranks=ranks.tolist(),
        starts=np.searchsorted(experts, np.arange(experts[-1] + 2)).tolist(),
        by_rank=(order := np.lexsort((demand, ranks))).tolist(),
        rank_starts=np.searchsorted(ranks[order], np.arange(len(load) + 1)).tolist(),
        lookups_left=_MOST_LOOKUPS,
    )
    while flow.lookups_left > 0 and int(pace.times(np.array(flow.load)).max()) > with_slack(bound):
        stuck = flow.relieve(pace.loads(with_slack(bound)))
        if stuck:
            bound = max(bound, pace.least_time(sum(flow.load[rank] for rank in stuck), stuck))
    return np.array(flow.tokens, dtype=np.int64)


@dataclass(kw_only=True)
class _Flow:
    """A split as lists, which short searches read faster than arrays.

    Attributes:
        tokens, experts, ranks: of each pair.
        load: tokens of each rank.
        starts: the first pair of each expert.
        by_rank, rank_starts: pairs by rank, and where each rank's begin.
        lookups_left: pairs that may still be looked at.
    """

    tokens: list[int]
    load: list[int]
    experts: list[int]
    ranks: list[int]
    starts: list[int]
    by_rank: list[int]
    rank_starts: list[int]
    lookups_left: int

    def relieve(self, limits: list[int]) -> list[int]:
        """Push tokens away from every rank above its limit, one after the other; the ranks that share them where no
        more can go."""
        crowded = [rank for rank, load in enumerate(self.load) if load > limits[rank]]
        for rank in sorted(crowded, key=lambda rank: limits[rank] - self.load[rank]):  # the busiest first
            while self.load[rank] > limits[rank] and self.lookups_left > 0:
                path, reached = self._path(rank, limits)
                if not path:
                    return reached
                self._push(path, limits)
        return []

    def _path(self, source: int, limits: list[int]) -> tuple[list[Step], list[int]]:
        """The shortest path to a rank below its limit; empty where there is none. And the ranks that were reached."""
        step_to: dict[int, Step | None] = {source: None}
        used: set[int] = set()
        queue = [source]
        for rank in queue:  # grows while it is walked
            first, last = self.rank_starts[rank : rank + 2]
            self.lookups_left -= last - first
            for sender in self.by_rank[first:last]:
                expert = self.experts[sender]
                if not self.tokens[sender] or expert in used:
                    continue
                used.add(expert)
                first, last = self.starts[expert : expert + 2]
                self.lookups_left -= last - first
                for receiver in range(first, last):
                    other = self.ranks[receiver]
                    if other in step_to:
                        continue
                    step_to[other] = sender, receiver
                    if self.load[other] < limits[other]:
                        return self._back_to_source(other, step_to), queue
                    queue.append(other)
        return [], queue

    def _back_to_source(self, target: int, step_to: dict[int, Step | None]) -> list[Step]:
        path = []
        while (step := step_to[target]) is not None:
            path.append(step)
            target = self.ranks[step[0]]
        return path[::-1]

    def _push(self, path: list[Step], limits: list[int]) -> None:
        """Move what the path allows."""
        source, target = self.ranks[path[0][0]], self.ranks[path[-1][1]]
        room = min(self.load[source] - limits[source], limits[target] - self.load[target])
        moved = min(room, *(self.tokens[sender] for sender, _ in path))
        for sender, receiver in path:
            self.tokens[sender] -= moved
            self.tokens[receiver] += moved
        self.load[source] -= moved
        self.load[target] += moved


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
    """Tokens that the holders of experts share, by pairs of an expert and a rank; all int64 [P] unless said otherwise.

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
    def has_choice(self) -> bool:
        """True if any expert has several holders."""
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
    return pairs.dense(equal_split(tokens, pairs))


def equal_split(tokens: IntArray, pairs: Pairs, speeds: IntArray | None = None) -> IntArray:
    """int64 [P]: `equal_quota` of holders that are given as pairs, which does not depend on their speeds."""
    demand = _demand(tokens, pairs)
    return demand.split(pairs.replicas)


def balanced_quota(tokens: IntArray, replicas: IntArray, speeds: IntArray | None = None) -> IntArray:
    """Split each expert's tokens over its holders so that the longest time of a rank is as short as possible.

    Args:
        tokens: int64 [E], tokens of each expert over the whole dispatch group, each below 2^31.
        replicas: int64 [E, N].
        speeds: int64 [N], tokens of a rank in a time, see `dispatch.quota`; None: all ranks are equally fast.

    Returns:
        int64 [E, N] with row sums `tokens` and zeros where `replicas` is zero. The longest time is at most 0.8 percent
        longer than it must be on up to 64 ranks. On more, where proving that may take longer than the tokens are worth,
        it is a few percent longer where ranks are links of long chains, and never longer than that of `equal_quota`, or
        of a split in proportion to speed where speeds differ.

    Raises:
        ConfigurationError: an expert has tokens but no replica, or speeds of other ranks.
    """
    pairs = Pairs.of_table(replicas)
    return pairs.dense(balanced_split(tokens, pairs, speeds))


def sharing_rounds(num_pairs: int) -> tuple[int, int, int, int]:
    """Return the constants of the weights for so many pairs of an expert and a rank, see `kernels.QuotaRounds`: rounds,
    rounds of patience, 1 over the part of the bound that is good enough, unit.
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
    best, load, bound = _weighted_split(demand, pace, tokens)
    return relieve(best, load, bound, pace, experts=demand.segment, ranks=pairs.ranks, demand=demand.demand)


def _weighted_split(demand: _Demand, pace: Pace, tokens: IntArray) -> tuple[IntArray, IntArray, int]:
    """Tokens of each pair by the best weights, of each rank, and a time that no split can beat."""
    pairs = demand.pairs
    mean = max(1, pace.least_time(int(tokens.sum())))
    together = np.add.reduceat(pace.speeds[pairs.ranks], demand.starts)
    bound = max(mean, int((-(-demand.demand[demand.starts] * pace.fastest // together)).max()))
    pull, first_pull, first_time = _balancing_pull(demand, pace, mean, bound)
    best = demand.split(pull)
    load = pairs.on_ranks(best)
    if int(pace.times(load).max()) > first_time:
        first = demand.split(first_pull)
        load_then = pairs.on_ranks(first)
        if pace.times(load_then).max() < pace.times(load).max():
            best, load = first, load_then
    return best, load, bound


def _balancing_pull(demand: _Demand, pace: Pace, mean: int, bound: int) -> tuple[IntArray, IntArray, int]:
    """weight of the rank * shares of the pair, for the best weights found and for those of speed alone, and a time that
    the latter's longest does not fall short of.

    Args:
        demand: what is to be split.
        pace: of the ranks.
        mean: time of a rank, at least 1.
        bound: a time that no split can beat.
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
        if longest <= bound * _GOOD_ENOUGH or index - best_round >= patience:
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


def dispatch_splits(tokens: IntArray, quota: IntArray, rank: int) -> tuple[IntArray, IntArray]:
    """Return one rank's row and column of the dispatch tensor D[e, i, j], tokens of expert e that rank i sends to rank
    j.

    Interval plan: tokens stay where they are up to the quota, then surplus intervals are matched to residual intervals.

    Order the surplus of all ranks on a line and the residual quota of all ranks on another: rank i sends to rank j what
    its interval and j's interval share (Lazarus Alg. 1 with its denominator corrected, in integers). The volume is the
    smallest possible. O(E * N), no communication.

    Args:
        tokens: int64 [E, N], tokens of expert e on rank n before dispatch.
        quota: int64 [E, N], tokens of expert e that rank n shall compute; row sums equal those of `tokens`.
        rank: the rank i of the row and j of the column.

    Returns:
        send_EN: int64, D[e, rank, j]; row sums are this rank's tokens of each expert.
        recv_EN: int64, D[e, i, rank]; row sums are this rank's quota.
    """
    # An expert has few holders: only the pairs with a quota and the rows of this rank's experts are touched.
    num_ranks = tokens.shape[1]
    pairs = np.flatnonzero(quota != 0)
    experts, ranks = np.divmod(pairs, num_ranks)
    quotas = quota.reshape(-1)[pairs]
    local = np.minimum(tokens[experts, ranks], quotas)
    send, recv = (np.zeros(tokens.shape, dtype=np.int64) for _ in range(2))  # unlike zeros_like, touches no page yet

    residual = quotas - local
    total = np.cumsum(residual)
    starts = np.searchsorted(experts, np.arange(len(tokens)))
    residual_end = total - np.concatenate(([0], total))[starts][experts]
    mine = tokens[:, rank].copy()
    here = ranks == rank
    mine[experts[here]] -= local[here]
    kept_upto = np.bincount(experts, weights=np.where(ranks <= rank, local, 0), minlength=len(tokens)).astype(np.int64)
    mine_end = tokens[:, : rank + 1].sum(axis=1) - kept_upto
    send[experts, ranks] = _overlap(mine_end[experts], mine[experts], residual_end, residual)
    send[experts[here], rank] = local[here]

    held = experts[here]
    surplus = tokens[held] - np.minimum(tokens[held], quota[held])
    recv[held] = _overlap(residual_end[here, None], residual[here, None], np.cumsum(surplus, axis=1), surplus)
    recv[held, rank] = local[here]
    return send, recv


def _overlap(end: IntArray, length: IntArray, other_end: IntArray, other_length: IntArray) -> IntArray:
    """Length of what the intervals [end - length, end) and [other_end - other_length, other_end) share."""
    shared: IntArray = np.minimum(end, other_end) - np.maximum(end - length, other_end - other_length)
    return np.maximum(shared, 0, out=shared)


def padded_rows(tokens: IntArray) -> int:
    """Rows that a rank sends when each (expert, rank) buffer is padded to the fullest (DeepSpeed-MoE without drops)."""
    return int(tokens.max()) * int(tokens.shape[0])


QuotaRule = Literal["local", "balanced"]
"""How tokens divide over residents and shadows. "local" (Pro-Prophet): a shadow computes its own rank's tokens,
residents the rest.
"balanced": residents and shadows are holders alike, as even as possible."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShadowPlan:
    """Shadow experts of a layer: copies of weights on other ranks for the next step.

    Attributes:
        shadows: bool [E, N], never where the expert is resident.
        homes: int64 [E], the resident rank that sends each expert's weights and collects its gradients.
        quota_rule: how tokens divide.
    """

    shadows: BoolArray
    homes: IntArray
    quota_rule: QuotaRule = "local"

    @property
    def num_copies(self) -> int:
        return int(self.shadows.sum())

    def check(self, placement: Placement) -> None:
        """Raise ConfigurationError where the plan was made for another placement."""
        pairs = placement.pairs
        if self.shadows.shape != pairs.shape:
            raise ConfigurationError(
                f"a shadow plan for {self.shadows.shape} (experts, ranks) does not fit a placement of "
                f"{pairs.shape}: plan again after a new placement"
            )
        at_home = np.unique(pairs.experts[pairs.ranks == self.homes[pairs.experts]])
        if self.shadows[pairs.experts, pairs.ranks].any() or len(at_home) < len(self.homes):
            raise ConfigurationError(
                "the shadow plan names homes of another placement: plan again after a new placement"
            )


def choose_homes(placement: Placement, load: IntArray) -> IntArray:
    """Return int64 [E], the home of each expert: hot experts first, to the holder that is home of fewest."""
    homes = np.zeros(placement.num_experts, dtype=np.int64)
    duties = np.zeros(placement.num_ranks, dtype=np.int64)
    ranks, starts = placement.pairs.ranks, placement.pairs.starts.tolist()
    for expert in np.argsort(-load, kind="stable").tolist():
        holders = ranks[starts[expert] : starts[expert + 1]]
        home = holders[duties[holders].argmin()]
        homes[expert] = home
        duties[home] += 1
    return homes


def shadow_quota(tokens: IntArray, placement: Placement, plan: ShadowPlan, speeds: IntArray | None = None) -> IntArray:
    """Tokens of each expert that each rank computes, residents and shadows together.

    Args:
        tokens: int64 [E, N], assignments on each rank before dispatch.
        placement: residents.
        plan: shadows.
        speeds: int64 [N], of the ranks; None: all alike.

    Returns:
        int64 [E, N] with the row sums of `tokens`.

    Raises:
        ConfigurationError: the plan was made for another placement.
    """
    plan.check(placement)
    return divide(tokens, placement.pairs, plan, partial(balanced_split, speeds=speeds))


def divide(
    tokens: IntArray, pairs: Pairs, plan: ShadowPlan | None, split: Callable[[IntArray, Pairs], IntArray]
) -> IntArray:
    """int64 [E, N]: tokens of each expert that each rank computes, shadows included.

    Args:
        tokens: int64 [E, N].
        pairs: residents.
        plan: shadows; None: there are none.
        split: how holders share tokens int64 [E], such as `balanced_split`.
    """
    if plan is None:
        return pairs.dense(split(tokens.sum(axis=1), pairs))
    if plan.quota_rule == "balanced":
        holders = pairs.joined(plan.shadows)
        return holders.dense(split(tokens.sum(axis=1), holders))
    kept = tokens * plan.shadows
    return kept + pairs.dense(split((tokens - kept).sum(axis=1), pairs))
