"""The least time in which ranks of given speeds can compute given tokens, exactly: the linear programme that quotas
are judged by.

Newton's method on cuts: a time that is too short leaves experts whose holders are all full, and those experts' tokens
over the speed of their holders are the next, longer time. Source: Radzik, Parametric flows, weighted means of cuts.
"""

from __future__ import annotations

from collections import deque
from fractions import Fraction

from moe_lightning.arrays import IntArray


def least_time(tokens: IntArray, replicas: IntArray, speeds: IntArray) -> Fraction:
    """Tokens over speed of the rank that takes longest, where tokens may be cut.

    Args:
        tokens: int64 [E].
        replicas: int64 [E, N], above 0 where a rank may compute an expert.
        speeds: int64 [N], positive.
    """
    demand, rates = tokens.tolist(), speeds.tolist()
    holders = [row.nonzero()[0].tolist() for row in replicas]
    time = Fraction(sum(demand), sum(rates))
    while True:
        stuck = _unserved(demand, holders, rates, time)
        if not stuck:
            return time
        ranks = {rank for expert in stuck for rank in holders[expert]}
        time = Fraction(sum(demand[expert] for expert in stuck), sum(rates[rank] for rank in ranks))


def _unserved(demand: list[int], holders: list[list[int]], rates: list[int], time: Fraction) -> set[int]:
    """Experts with more tokens than all their holders can compute in the time; empty where all tokens fit."""
    left = [tokens * time.denominator for tokens in demand]
    room = [rate * time.numerator for rate in rates]
    given: list[dict[int, int]] = [{} for _ in rates]  # of each rank, what it computes of each expert
    for expert in range(len(demand)):
        while left[expert]:
            came_from = {expert: (-1, -1)}
            queue, target = deque([expert]), -1
            seen: set[int] = set()
            while queue and target < 0:
                here = queue.popleft()
                for rank in holders[here]:
                    if rank in seen:
                        continue
                    seen.add(rank)
                    if room[rank]:
                        target = rank
                        last = here
                        break
                    for other in given[rank]:
                        if other not in came_from:
                            came_from[other] = (here, rank)
                            queue.append(other)
            if target < 0:
                return set(came_from)
            _push(expert, last, target, came_from, left, room, given)
    return set()


def _push(
    expert: int,
    last: int,
    target: int,
    came_from: dict[int, tuple[int, int]],
    left: list[int],
    room: list[int],
    given: list[dict[int, int]],
) -> None:
    """Let a rank with room take tokens of the last expert, whose holder then takes some of the one before it."""
    path, here = [], last
    while here != expert:
        before, rank = came_from[here]
        path.append((before, here, rank))
        here = before
    moved = min(left[expert], room[target], *(given[rank][there] for _, there, rank in path))
    given[target][last] = given[target].get(last, 0) + moved
    for before, there, rank in path:
        given[rank][before] = given[rank].get(before, 0) + moved
        given[rank][there] -= moved
        if not given[rank][there]:
            del given[rank][there]
    left[expert] -= moved
    room[target] -= moved
