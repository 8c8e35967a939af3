"""Placement for balance: the loads are cut into equal pieces, one per rank, and every expert keeps distinct nodes.

MRO gathers cold experts on the same nodes, which is best for survival and costs balance. Here the loads are packed as
in the alias method: a rank takes the coldest experts that are left, whole, and tops up to the mean, or to what its
speed makes of it, with a piece of the hottest one. That needs at most E + N - 1 of the slots for a perfect split (a hot
expert is cut by the next ranks, a cold one by nobody); the slots that are left first protect the experts on fewer than
`min_replicas` nodes, then help the experts with most tokens per holder, so that the plan tolerates drifting loads. This
is ours, not the papers'; on a real trace it balances better than every other rule here (bench/balance_trace.py prints
the comparison).

Loads are summed in fixed-point integers, so that ranks on different machines make the same plan. `slot_table` has the
books that protecting and filling need.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moe_lightning.algorithms.allocation import affordable_replicas, allocate_replicas
from moe_lightning.algorithms.cluster import Cluster
from moe_lightning.algorithms.replica_placement import ONE_TOKEN, deal_to_ranks, spread
from moe_lightning.algorithms.slot_table import SlotTable
from moe_lightning.arrays import IntArray, Pairs
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.quota import balanced_split

_BALANCED = 1.01


def packed_placement(load: IntArray, cluster: Cluster, min_replicas: int = 2) -> Placement:
    """The packing, or a greedy deal of water-filled replicas where protection leaves no slack for it.

    Args:
        load: int64 [E], tokens of each expert; all zeros means unknown, which is treated as equal.
        cluster: ranks, nodes, slots and speeds.
        min_replicas: distinct nodes that must hold each expert, lowered to what the slots allow.

    Returns:
        A placement with at most one replica of an expert on a rank, and every expert on the promised number of distinct
        nodes. Where nodes differ in size the promise may be impossible: then as few are missing as the slots allow.

    Raises:
        ConfigurationError: fewer slots than experts.
    """
    floor = affordable_replicas(
        len(load), slots=cluster.num_slots, num_nodes=cluster.num_nodes, min_replicas=min_replicas
    )
    load = np.maximum(load, 1)
    table = _pack(load, cluster)
    table.protect(floor)
    table.fill()
    packed, missing = Placement.of_pairs(table.pairs), table.missing_nodes(floor)
    longest = longest_time(packed, load, cluster)
    if not missing and longest * cluster.pace.total <= _BALANCED * load.sum() * cluster.pace.fastest:
        return packed
    replicas = allocate_replicas(
        load,
        slots=cluster.num_slots,
        num_nodes=cluster.num_nodes,
        min_replicas=floor,
        max_replicas=cluster.num_ranks,
    )
    greedy = _deal_greedily(replicas, load, cluster, floor)
    missing_greedily = cluster.missing_nodes(greedy.pairs, floor)
    found = [(missing, longest, packed), (missing_greedily, longest_time(greedy, load, cluster), greedy)]
    if missing_greedily:
        dealt = deal_to_ranks(spread(replicas, cluster.node_slots()), cluster, load).pairs
        dealt_evenly = Placement.of_pairs(replace(dealt, replicas=np.ones_like(dealt.replicas)))
        missing_evenly = cluster.missing_nodes(dealt, floor)
        found.append((missing_evenly, longest_time(dealt_evenly, load, cluster), dealt_evenly))
    return min(found, key=lambda entry: entry[:2])[2]


def _pack(load: IntArray, cluster: Cluster) -> SlotTable:
    """For every rank the coldest experts whole and a piece of the hottest, up to its share.

    An expert is cut only while the later slots suffice for all experts that are left. Ranks are filled across nodes, so
    that the pieces of an expert land on different ones.
    """
    table = SlotTable(load, cluster)
    left = sorted((tokens * ONE_TOKEN, expert) for expert, tokens in enumerate(load.tolist()))
    tokens_left, speed_left = sum(tokens for tokens, _ in left), cluster.pace.total
    for position, rank in enumerate(cluster.ranks_across_nodes()):
        later_slots = (cluster.num_ranks - position - 1) * cluster.slots_per_rank
        speed = int(cluster.pace.speeds[rank])
        room = -(-tokens_left * speed // speed_left)
        speed_left -= speed
        for slot in range(cluster.slots_per_rank, 0, -1):
            if not left:
                return table
            must_take_whole = len(left) > later_slots + slot - 1
            tokens, expert = left.pop(-1 if slot == 1 and not must_take_whole else 0)  # the hottest or the coldest
            table.put(expert, rank)
            if tokens > room and not must_take_whole:
                insort(left, (tokens - room, expert))
                tokens_left -= room
                break
            room -= tokens
            tokens_left -= tokens
    return table


def _deal_greedily(replicas: IntArray, load: IntArray, cluster: Cluster, floor: int) -> Placement:
    """Replicas with most tokens first, each to the rank that has least to do, an expert's first `floor` on distinct
    nodes."""
    holders: list[list[int]] = [[] for _ in replicas]
    free = [cluster.slots_per_rank] * cluster.num_ranks
    idle = [(0, -cluster.slots_per_rank, rank) for rank in range(cluster.num_ranks)]  # a heap: time, -free, rank
    share = load / replicas
    for expert in np.argsort(-share, kind="stable").tolist():
        piece = int(load[expert]) * ONE_TOKEN // int(replicas[expert])
        taken, aside = _take_ranks(idle, int(replicas[expert]), cluster.node_of, floor)
        for carried, _, rank in taken:
            holders[expert].append(rank)
            free[rank] -= 1
            if free[rank]:
                aside.append((carried + cluster.pace.time(rank, piece), -free[rank], rank))
        for entry in aside:
            heapq.heappush(idle, entry)
    experts = np.repeat(np.arange(len(holders)), [len(ranks) for ranks in holders])
    ranks = np.array([rank for ranks in holders for rank in ranks], dtype=np.int64)
    return Placement.of_pairs(Pairs.of_replicas(experts, ranks, (len(holders), cluster.num_ranks)))


def _take_ranks(
    idle: list[tuple[int, int, int]], count: int, node_of: Sequence[int], floor: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Take up to `count` entries (carried, -free, rank) off the heap, the first `floor` on distinct nodes where nodes
    are left; also those that were passed over for it."""
    taken: list[tuple[int, int, int]] = []
    passed: deque[tuple[int, int, int]] = deque()  # ascending, and below the rest of the heap
    used_nodes: set[int] = set()
    while len(taken) < min(floor, count) and idle:
        entry = heapq.heappop(idle)
        if node_of[entry[2]] in used_nodes:
            passed.append(entry)
        else:
            used_nodes.add(node_of[entry[2]])
            taken.append(entry)
    while len(taken) < count and (passed or idle):
        taken.append(passed.popleft() if passed else heapq.heappop(idle))
    return taken, list(passed)


def longest_time(placement: Placement, load: IntArray, cluster: Cluster) -> int:
    """Of the ranks under a placement, if tokens int64 [E] come."""
    pairs, pace = placement.pairs, cluster.pace
    quota = balanced_split(load, pairs, None if pace.is_even else pace.speeds)
    return int(pace.times(pairs.on_ranks(quota)).max())
