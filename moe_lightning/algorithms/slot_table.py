"""The books of a placement in the making: who holds what, what is free, and how crowded every rank is.

Placing, protecting and filling change one replica at a time; the books follow each change in time that does not grow
with the size of the table, so that thousands of ranks can be planned between two steps.

Shapes: E experts, N ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from moe_lightning.algorithms.cluster import Cluster
from moe_lightning.algorithms.performance_model import BoolArray
from moe_lightning.algorithms.placement import IntArray
from moe_lightning.algorithms.replica_placement import ONE_TOKEN


class SlotTable:
    """At most one replica of an expert on a rank, and at most `cluster.slots_per_rank` experts on each.

    Args:
        load: int64 [E], tokens of each expert, each at least 1.
        cluster: ranks, nodes and slots.

    Attributes:
        replicas: int64 [E, N] of 0 and 1.
        holders: of each expert, how many ranks hold it.
        on_nodes: of each expert, how many of a node's ranks hold it, for the nodes where any does.
        free: int64 [N], free slots.
    """

    def __init__(self, load: IntArray, cluster: Cluster) -> None:
        self.replicas = np.zeros((len(load), cluster.num_ranks), dtype=np.int64)
        self.holders = [0] * len(load)
        self.on_nodes: list[dict[int, int]] = [{} for _ in load]
        self.free = np.full(cluster.num_ranks, cluster.slots_per_rank)
        self._load: list[int] = load.tolist()
        self._cluster = cluster
        self._node_of = cluster.node_of
        self._ranks_of = [np.array(ranks) for ranks in cluster.ranks_by_node()]

    def put(self, expert: int, rank: int) -> None:
        """Let a rank with a free slot hold an expert that it lacks."""
        node = self._node_of[rank]
        self.replicas[expert, rank] = 1
        self.holders[expert] += 1
        self.on_nodes[expert][node] = self.on_nodes[expert].get(node, 0) + 1
        self.free[rank] -= 1

    def take(self, expert: int, rank: int) -> None:
        """Undo `put`."""
        node, nodes = self._node_of[rank], self.on_nodes[expert]
        self.replicas[expert, rank] = 0
        self.holders[expert] -= 1
        nodes[node] -= 1
        if not nodes[node]:
            del nodes[node]
        self.free[rank] += 1

    def missing_nodes(self, floor: int) -> int:
        """Distinct nodes that are missing, over all experts, until each is on `floor` of them."""
        return sum(max(0, floor - len(nodes)) for nodes in self.on_nodes)

    def protect(self, floor: int) -> None:
        """Give experts on fewer than `floor` nodes a replica in a free slot or instead of a surplus one, hottest first.

        A free slot is taken on the rank that carries least; a surplus replica goes where it relieves its rank least.
        """
        short = [expert for expert, nodes in enumerate(self.on_nodes) if len(nodes) < floor]
        if not short:
            return
        crowd = np.array([self._share(expert) for expert in range(len(self._load))]) @ self.replicas
        for expert in sorted(short, key=lambda expert: (-self._load[expert], expert)):
            while len(self.on_nodes[expert]) < floor:
                elsewhere = np.ones(len(self.free), dtype=np.bool_)
                for node in self.on_nodes[expert]:
                    elsewhere[self._ranks_of[node]] = False
                open_ranks = np.flatnonzero(elsewhere & (self.free > 0))
                if open_ranks.size:
                    rank = int(open_ranks[np.argmin(crowd[open_ranks])])
                else:
                    surplus = self._surplus_replica(elsewhere, floor)
                    if surplus is None:
                        break
                    loser, rank = surplus
                    self._change(self.take, loser, rank, crowd)
                self._change(self.put, expert, rank, crowd)

    def _change(self, put_or_take: Callable[[int, int], None], expert: int, rank: int, crowd: IntArray) -> None:
        """Put or take a replica, and move the shares of all holders in the crowd int64 [N]."""
        crowd -= self.replicas[expert] * self._share(expert)
        put_or_take(expert, rank)
        crowd += self.replicas[expert] * self._share(expert)

    def _share(self, expert: int) -> int:
        """Tokens of an expert for each holder, in fixed point."""
        return self._load[expert] * ONE_TOKEN // max(1, self.holders[expert])

    def _surplus_replica(self, allowed: BoolArray, floor: int) -> tuple[int, int] | None:
        """(expert, rank) of the replica with the smallest share that protection can spare on the allowed ranks bool
        [N]; ties to the lowest expert, then the lowest rank."""
        spare = [
            (self._load[expert] / self.holders[expert], expert)
            for expert, nodes in enumerate(self.on_nodes)
            if len(nodes) > floor or self.holders[expert] > len(nodes)
        ]
        heapq.heapify(spare)
        while spare:
            expert = heapq.heappop(spare)[1]
            nodes = self.on_nodes[expert]
            for rank in np.flatnonzero(allowed & (self.replicas[expert] > 0)).tolist():
                if len(nodes) > floor or nodes[self._node_of[rank]] > 1:
                    return expert, rank
        return None

    def fill(self) -> None:
        """Every free slot takes the expert with most tokens per holder that its rank lacks; ties to the lowest."""
        books = enumerate(zip(self._load, self.holders, strict=True))
        need = [(-load / holders, expert) for expert, (load, holders) in books]
        heapq.heapify(need)
        for rank in np.flatnonzero(self.free).tolist():
            held = []
            while need and self.free[rank]:
                most = heapq.heappop(need)
                expert = most[1]
                if not self.replicas[expert, rank]:
                    self.put(expert, rank)
                    most = (-self._load[expert] / self.holders[expert], expert)
                held.append(most)
            for entry in held:
                heapq.heappush(need, entry)
