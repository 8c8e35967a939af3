"""The last step of a quota: whole tokens move from crowded ranks to roomy ones, through the experts that they share.

Which tokens of an expert its holders compute is a transportation problem, and a split is best when no path of shared
experts leads from the busiest rank to one with less work. Tokens are pushed along shortest paths until every rank is
below a limit, half way between the busiest rank and a lower bound of it. Where no path is left, the ranks that can be
reached share tokens that nobody else holds: their mean is a bound of every split. Either way the gap halves, until the
busiest rank is within 0.8 percent of the bound. Integers throughout, so every rank finds the same split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_lightning.algorithms.placement import IntArray

_SLACK = 128
_MAX_VISITS = 1 << 13
"""Pairs that the search may look at, one or two milliseconds: larger clusters keep what is reached by then."""

Step = tuple[int, int]
"""The pair that gives tokens of an expert, and the pair of the same expert that takes them."""


def with_slack(bound: int) -> int:
    """The load at which moving single tokens stops to pay: 1/128 above a bound."""
    return bound + bound // _SLACK


def relieve(tokens: IntArray, bound: int, *, experts: IntArray, ranks: IntArray, demand: IntArray) -> IntArray:
    """Move tokens between the holders of each expert until the busiest rank carries as little as it can.

    Args:
        tokens: int64 [pairs], a split; pairs of an expert and a rank, in expert-major order.
        bound: a load below which no split brings the busiest rank.
        experts: int64 [pairs], from 0 without gaps.
        ranks: int64 [pairs].
        demand: int64 [pairs], tokens of the pair's expert: order of the search, so that experts' numbers do not matter.
    """
    load = np.bincount(ranks, weights=tokens).astype(np.int64)
    if int(load.max()) <= with_slack(bound):
        return tokens
    flow = _Flow(
        tokens=tokens.tolist(),
        load=load.tolist(),
        experts=experts.tolist(),
        ranks=ranks.tolist(),
        starts=np.searchsorted(experts, np.arange(experts[-1] + 2)).tolist(),
        by_rank=(order := np.lexsort((demand, ranks))).tolist(),
        rank_starts=np.searchsorted(ranks[order], np.arange(len(load) + 1)).tolist(),
    )
    while (busiest := max(flow.load)) > with_slack(bound) and flow.visits < _MAX_VISITS:
        limit = max(bound, (busiest + bound) // 2)
        stuck = flow.bring_below(limit)
        if stuck:
            bound = max(bound, -(-sum(flow.load[rank] for rank in stuck) // len(stuck)))
    return np.array(flow.tokens, dtype=np.int64)


@dataclass(kw_only=True)
class _Flow:
    """A split as lists, which short searches read faster than arrays.

    Attributes:
        tokens, experts, ranks: of each pair.
        load: tokens of each rank.
        starts: the first pair of each expert.
        by_rank, rank_starts: pairs by rank, and where each rank's begin.
        visits: pairs looked at so far.
    """

    tokens: list[int]
    load: list[int]
    experts: list[int]
    ranks: list[int]
    starts: list[int]
    by_rank: list[int]
    rank_starts: list[int]
    visits: int = 0

    def bring_below(self, limit: int) -> list[int]:
        """Push tokens away from every rank above the limit; the ranks that share them where no more can go."""
        for rank, load in enumerate(self.load):
            while load > limit and self.visits < _MAX_VISITS:
                path, reached = self._path(rank, limit)
                if not path:
                    return reached
                load = self._push(path, limit)
        return []

    def _push(self, path: list[Step], limit: int) -> int:
        """Move what the path allows, last step first; the load that the first rank is left with."""
        target, source = self.ranks[path[0][1]], self.ranks[path[-1][0]]
        moved = min(self.load[source] - limit, limit - self.load[target], *(self.tokens[giver] for giver, _ in path))
        for giver, taker in path:
            self.tokens[giver] -= moved
            self.tokens[taker] += moved
        self.load[source] -= moved
        self.load[target] += moved
        return self.load[source]

    def _path(self, source: int, limit: int) -> tuple[list[Step], list[int]]:
        """The shortest path to a rank below the limit, its last step first; empty where there is none. And the ranks
        that were reached."""
        step_to: dict[int, Step | None] = {source: None}
        used: set[int] = set()
        queue = [source]
        for rank in queue:  # grows while it is walked
            first, last = self.rank_starts[rank : rank + 2]
            self.visits += last - first
            for giver in self.by_rank[first:last]:
                expert = self.experts[giver]
                if not self.tokens[giver] or expert in used:
                    continue
                used.add(expert)
                first, last = self.starts[expert : expert + 2]
                self.visits += last - first
                for taker in range(first, last):
                    other = self.ranks[taker]
                    if other in step_to:
                        continue
                    step_to[other] = giver, taker
                    if self.load[other] < limit:
                        return self._steps(other, step_to), queue
                    queue.append(other)
        return [], queue

    def _steps(self, target: int, step_to: dict[int, Step | None]) -> list[Step]:
        steps = []
        while (step := step_to[target]) is not None:
            steps.append(step)
            target = self.ranks[step[0]]
        return steps
