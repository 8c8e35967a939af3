"""The last step of a quota: whole tokens move from crowded ranks to roomy ones, through the experts that they share.

Which tokens of an expert its holders compute is a transportation problem, and a split is best when no path of shared
experts leads from the busiest rank to one with less work. Tokens are pushed along shortest paths, all paths of one
length together (Dinic), until every rank is within 0.8 percent of a lower bound of the busiest. Where no path is left,
the ranks that can be reached share tokens that nobody else holds: their mean is a better bound of every split, and the
search goes on from there. The busiest rank is the one that takes longest: limits are times, and a rank's limit in
tokens follows its speed. Integers throughout, so every rank finds the same split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moe_lightning.algorithms.speeds import Pace
from moe_lightning.arrays import IntArray

SLACK = 128
"""1 over the part of a bound within which moving single tokens does not pay."""

_SINGLE_VISITS, _JOINT_VISITS = 1 << 13, 1 << 15
"""Pairs that the search may look at from single ranks, one or two milliseconds, and then from all together."""

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
        visits_left=_SINGLE_VISITS,
    )
    singly = True
    while (longest := int(pace.times(np.array(flow.load)).max())) > with_slack(bound) + (
        0 if singly else bound // SLACK
    ):
        if flow.visits_left <= 0:
            if not singly:
                break
            singly, flow.visits_left = False, _JOINT_VISITS
        if singly:
            stuck = flow.relieve_each(pace.loads(with_slack(bound)))
        else:
            stuck = flow.relieve_all(pace.loads(max(with_slack(bound), (longest + bound) // 2)))
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
        visits_left: pairs that may still be looked at.
    """

    tokens: list[int]
    load: list[int]
    experts: list[int]
    ranks: list[int]
    starts: list[int]
    by_rank: list[int]
    rank_starts: list[int]
    visits_left: int

    def relieve_each(self, limits: list[int]) -> list[int]:
        """Push tokens away from every rank above its limit, one after the other; the ranks that share them where no
        more can go."""
        for rank in self._crowded(limits):
            while self.load[rank] > limits[rank] and self.visits_left > 0:
                path, reached = self._path(rank, limits)
                if not path:
                    return reached
                self._push(path, limits)
        return []

    def relieve_all(self, limits: list[int]) -> list[int]:
        """Push tokens away from all ranks above their limits; the ranks that share them where no more can go."""
        while self.visits_left > 0 and (crowded := self._crowded(limits)):
            depths = self._depths(crowded, limits)
            for rank in crowded:
                if depths[rank] < 0:
                    return self._path(rank, limits)[1]
            self._push_all(crowded, depths, limits)
        return []

    def _crowded(self, limits: list[int]) -> list[int]:
        """Ranks above its limit, the busiest first."""
        crowded = [rank for rank, load in enumerate(self.load) if load > limits[rank]]
        return sorted(crowded, key=lambda rank: limits[rank] - self.load[rank])

    def _path(self, source: int, limits: list[int]) -> tuple[list[Step], list[int]]:
        """The shortest path to a rank below its limit; empty where there is none. And the ranks that were reached."""
        step_to: dict[int, Step | None] = {source: None}
        used: set[int] = set()
        queue = [source]
        for rank in queue:  # grows while it is walked
            first, last = self.rank_starts[rank : rank + 2]
            self.visits_left -= last - first
            for giver in self.by_rank[first:last]:
                expert = self.experts[giver]
                if not self.tokens[giver] or expert in used:
                    continue
                used.add(expert)
                first, last = self.starts[expert : expert + 2]
                self.visits_left -= last - first
                for taker in range(first, last):
                    other = self.ranks[taker]
                    if other in step_to:
                        continue
                    step_to[other] = giver, taker
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

    def _depths(self, crowded: list[int], limits: list[int]) -> list[int]:
        """Of each rank, the length of the shortest path to a rank below its limit; -1 where there is none, or where it
        is longer than that of any crowded rank."""
        depths = [0 if load < limit else -1 for load, limit in zip(self.load, limits, strict=True)]
        queue = [rank for rank, depth in enumerate(depths) if not depth]
        waiting, used = set(crowded), [False] * (len(self.starts) - 1)
        for rank in queue:  # grows while it is walked
            first, last = self.rank_starts[rank : rank + 2]
            self.visits_left -= last - first
            for taker in self.by_rank[first:last]:
                expert = self.experts[taker]
                if used[expert]:
                    continue
                used[expert] = True
                first, last = self.starts[expert : expert + 2]
                self.visits_left -= last - first
                for giver in range(first, last):
                    other = self.ranks[giver]
                    if depths[other] < 0 and self.tokens[giver]:
                        depths[other] = depths[rank] + 1
                        queue.append(other)
                        waiting.discard(other)
            if not waiting:
                break
        return depths

    def _push_all(self, crowded: list[int], depths: list[int], limits: list[int]) -> None:
        """Push tokens along paths on which every step is one nearer to a roomy rank, until none is left."""
        steps: dict[int, Iterator[Step]] = {}
        current: dict[int, Step | None] = {}
        for source in crowded:
            path: list[Step] = []
            rank = source
            while self.load[source] > limits[source] and self.visits_left > 0:
                if self.load[rank] < limits[rank]:
                    self._push(path, limits)
                    path, rank = [], source
                    continue
                if rank not in steps:
                    steps[rank] = self._steps(rank, depths)
                    current[rank] = next(steps[rank], None)
                step = current[rank]
                while step is not None and (not self.tokens[step[0]] or self._is_dead(step[1], depths, limits)):
                    current[rank] = step = next(steps[rank], None)
                if step is not None:
                    path.append(step)
                    rank = self.ranks[step[1]]
                    continue
                depths[rank] = -1
                if not path:
                    break
                rank = self.ranks[path.pop()[0]]

    def _is_dead(self, taker: int, depths: list[int], limits: list[int]) -> bool:
        """Whether no path leads on from a pair's rank."""
        rank = self.ranks[taker]
        return depths[rank] < 0 or (not depths[rank] and self.load[rank] >= limits[rank])

    def _steps(self, rank: int, depths: list[int]) -> Iterator[Step]:
        """The steps from a rank to those that are one nearer to a roomy rank."""
        nearer = depths[rank] - 1
        for giver in self.by_rank[self.rank_starts[rank] : self.rank_starts[rank + 1]]:
            if self.tokens[giver]:
                first, last = self.starts[self.experts[giver] : self.experts[giver] + 2]
                self.visits_left -= last - first
                for taker in range(first, last):
                    if depths[self.ranks[taker]] == nearer:
                        yield giver, taker

    def _push(self, path: list[Step], limits: list[int]) -> None:
        """Move what the path allows."""
        source, target = self.ranks[path[0][0]], self.ranks[path[-1][1]]
        room = min(self.load[source] - limits[source], limits[target] - self.load[target])
        moved = min(room, *(self.tokens[giver] for giver, _ in path))
        for giver, taker in path:
            self.tokens[giver] -= moved
            self.tokens[taker] += moved
        self.load[source] -= moved
        self.load[target] += moved
