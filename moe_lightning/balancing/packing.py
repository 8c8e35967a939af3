"""Placement for balance by packing equal pieces of the loads.

MRO gathers cold experts on the same nodes, which is best for survival and costs balance. Here the loads are packed as
in the alias method: a rank gets the coldest remaining experts, whole, and is filled up to the mean, or to its share by
speed, with a piece of the hottest one. That needs at most E + N - 1 of the slots for a perfect split; the remaining
slots first protect the experts on fewer than `min_replicas` nodes, then help the experts with most tokens per holder,
so that the plan tolerates drifting loads. This is ours, not the papers'.

Loads are summed in fixed-point integers, so that ranks on different machines make the same plan. Packing, protecting
and filling change one replica at a time; the slot table follows each change in time that does not grow with its size,
so that thousands of ranks can be planned between two steps.

Shapes: E experts, N ranks.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from moe_lightning.arrays import IntArray, Pairs
from moe_lightning.balancing.cluster import Cluster, affordable_replicas, allocate_replicas
from moe_lightning.balancing.repair import ReplicaTable, protected
from moe_lightning.balancing.replica_placement import ONE_TOKEN
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.quota import balanced_split


class SlotTable(ReplicaTable):
    """At most `cluster.slots_per_rank` experts on each rank.

    Args:
        load: int64 [E], tokens of each expert, each at least 1.
        cluster: ranks, nodes and slots.
    """

    def __init__(self, load: IntArray, cluster: Cluster) -> None:
        super().__init__((len(load), cluster.num_ranks), cluster.node_of)
        self._slots = cluster.slots_per_rank
        self._load: list[int] = load.tolist()

    def free(self, rank: int) -> int:
        """Return the free slots of a rank."""
        return self._slots - len(self.experts[rank])

    def protect(self, floor: int) -> None:
        """Give experts on fewer than `floor` nodes a replica in a free slot or instead of a surplus one, hottest first.

        A free slot is taken on the rank that carries least; a surplus replica goes where it relieves its rank least.
        An expert stays on fewer nodes where neither is on one that lacks it.
        """
        short = [expert for expert, nodes in enumerate(self.on_nodes) if len(nodes) < floor]
        if not short:
            return
        crowd = [0] * len(self.experts)
        for expert, ranks in enumerate(self.holders):
            for rank in ranks:
                crowd[rank] += self._share(expert)
        idle = [(carried, rank) for rank, carried in enumerate(crowd) if self.free(rank)]
        heapq.heapify(idle)  # ranks with a free slot; entries with another crowd are out of date
        for expert in sorted(short, key=lambda expert: (-self._load[expert], expert)):
            while len(self.on_nodes[expert]) < floor:
                open_rank = self._open_rank(expert, crowd, idle)
                if open_rank is None:
                    surplus = self._surplus_replica(expert, floor)
                    if surplus is None:
                        break
                    loser, open_rank = surplus
                    self._change(self.take, loser, open_rank, crowd, idle)
                self._change(self.put, expert, open_rank, crowd, idle)

    def _open_rank(self, expert: int, crowd: list[int], idle: list[tuple[int, int]]) -> int | None:
        """The rank that carries least of those with a free slot on a node without the expert; ties to the lowest."""
        passed: list[tuple[int, int]] = []
        found = None
        while idle and found is None:
            carried, rank = heapq.heappop(idle)
            if carried == crowd[rank] and self.free(rank) and (carried, rank) not in passed[-1:]:
                passed.append((carried, rank))
                if self.node_of[rank] not in self.on_nodes[expert]:
                    found = rank
        for entry in passed:
            heapq.heappush(idle, entry)
        return found

    def _change(
        self,
        put_or_take: Callable[[int, int], None],
        expert: int,
        rank: int,
        crowd: list[int],
        idle: list[tuple[int, int]],
    ) -> None:
        """Put or take a replica, and move the shares of all holders in the crowd of each rank."""
        before = self._share(expert)
        touched = {*self.holders[expert], rank}
        for holder in self.holders[expert]:
            crowd[holder] -= before
        put_or_take(expert, rank)
        share = self._share(expert)
        for holder in self.holders[expert]:
            crowd[holder] += share
        for holder in touched:
            if self.free(holder):
                heapq.heappush(idle, (crowd[holder], holder))

    def _share(self, expert: int) -> int:
        """Tokens of an expert for each holder, in fixed point."""
        return self._load[expert] * ONE_TOKEN // max(1, len(self.holders[expert]))

    def _surplus_replica(self, needy: int, floor: int) -> tuple[int, int] | None:
        """(expert, rank) of the replica with the smallest share that protection can spare on nodes without the needy
        expert; ties to the lowest expert, then the lowest rank."""
        avoided = self.on_nodes[needy]
        spare = [
            (self._load[expert] / len(self.holders[expert]), expert)
            for expert, nodes in enumerate(self.on_nodes)
            if len(nodes) > floor or len(self.holders[expert]) > len(nodes)
        ]
        heapq.heapify(spare)
        while spare:
            expert = heapq.heappop(spare)[1]
            nodes = self.on_nodes[expert]
            for rank in sorted(self.holders[expert]):
                node = self.node_of[rank]
                if node not in avoided and (len(nodes) > floor or nodes[node] > 1):
                    return expert, rank
        return None

    def fill(self) -> None:
        """Every free slot takes the expert with most tokens per holder that its rank lacks; ties to the lowest."""
        books = enumerate(zip(self._load, self.holders, strict=True))
        need = [(-load / len(ranks), expert) for expert, (load, ranks) in books]
        heapq.heapify(need)
        for rank in range(len(self.experts)):
            free = self.free(rank)
            held = []
            while free and need:
                most = heapq.heappop(need)
                expert = most[1]
                if rank not in self.holders[expert]:
                    self.put(expert, rank)
                    free -= 1
                    most = (-self._load[expert] / len(self.holders[expert]), expert)
                held.append(most)
            for entry in held:
                heapq.heappush(need, entry)


_BALANCED = 1.01


def packed_placement(load: IntArray, cluster: Cluster, min_replicas: int = 2) -> Placement:
    """The packing, or a greedy deal of water-filled replicas where protection leaves no slack for it.

    Args:
        load: int64 [E], tokens of each expert; all zeros means unknown, which is treated as equal.
        cluster: ranks, nodes, slots and speeds.
        min_replicas: distinct nodes that must hold each expert, lowered to what the slots allow.

    Returns:
        A placement with at most one replica of an expert on a rank, and every expert on the promised number of distinct
        nodes, or where nodes differ in size on as many as every expert can have at once.

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
    packed = Placement.of_pairs(table.pairs)
    missing, longest = cluster.missing_nodes(packed.pairs, floor), longest_time(packed, load, cluster)
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
    missing, _, best = min(found, key=lambda entry: entry[:2])
    return protected(best, cluster, floor) if missing else best


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
    """Pop up to `count` entries (carried, -free, rank) off the heap, the first `floor` on distinct nodes where nodes
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
    """Return the longest time of a rank under a placement, for tokens int64 [E]."""
    pairs, pace = placement.pairs, cluster.pace
    quota = balanced_split(load, pairs, None if pace.is_even else pace.speeds)
    return int(pace.times(pairs.on_ranks(quota)).max())
