"""The books of a placement in the making: who holds what, what is free, and how crowded every rank is.

Placing, protecting and filling change one replica at a time; the books follow each change in time that does not grow
with the size of the table, so that thousands of ranks can be planned between two steps.

Shapes: E experts, N ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import chain

import numpy as np

from moe_lightning.algorithms.cluster import Cluster
from moe_lightning.algorithms.replica_placement import ONE_TOKEN
from moe_lightning.arrays import IntArray, Pairs

_Change = tuple[Callable[[int, int], None], int, int]
"""`put` or `take`, an expert and a rank."""


class SlotTable:
    """At most one replica of an expert on a rank, and at most `cluster.slots_per_rank` experts on each.

    Args:
        load: int64 [E], tokens of each expert, each at least 1.
        cluster: ranks, nodes and slots.

    Attributes:
        holders: of each expert, the ranks that hold it.
        on_nodes: of each expert, how many of a node's ranks hold it, for the nodes where any does.
        free: of each rank, free slots.
    """

    def __init__(self, load: IntArray, cluster: Cluster) -> None:
        self.holders: list[set[int]] = [set() for _ in load]
        self.on_nodes: list[dict[int, int]] = [{} for _ in load]
        self.free = [cluster.slots_per_rank] * cluster.num_ranks
        self._load: list[int] = load.tolist()
        self._node_of = cluster.node_of

    @property
    def pairs(self) -> Pairs:
        """Who holds what."""
        experts = np.repeat(np.arange(len(self.holders)), [len(ranks) for ranks in self.holders])
        ranks = np.fromiter(chain.from_iterable(self.holders), dtype=np.int64, count=len(experts))
        return Pairs.of_replicas(experts, ranks, (len(self.holders), len(self.free)))

    def put(self, expert: int, rank: int) -> None:
        """Let a rank with a free slot hold an expert that it lacks."""
        node, nodes = self._node_of[rank], self.on_nodes[expert]
        self.holders[expert].add(rank)
        nodes[node] = nodes.get(node, 0) + 1
        self.free[rank] -= 1

    def take(self, expert: int, rank: int) -> None:
        """Undo `put`."""
        node, nodes = self._node_of[rank], self.on_nodes[expert]
        self.holders[expert].remove(rank)
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
        Where neither is on a node that lacks the expert, replicas of others move to other nodes: an augmenting path,
        so that in the end as few nodes are missing as the slots allow.
        """
        short = [expert for expert, nodes in enumerate(self.on_nodes) if len(nodes) < floor]
        if not short:
            return
        crowd = [0] * len(self.free)
        for expert, ranks in enumerate(self.holders):
            for rank in ranks:
                crowd[rank] += self._share(expert)
        idle = [(carried, rank) for rank, carried in enumerate(crowd) if self.free[rank]]
        heapq.heapify(idle)  # ranks with a free slot; entries with another crowd are out of date
        for expert in sorted(short, key=lambda expert: (-self._load[expert], expert)):
            while len(self.on_nodes[expert]) < floor:
                open_rank = self._open_rank(expert, crowd, idle)
                if open_rank is None:
                    surplus = self._surplus_replica(expert, floor)
                    if surplus is None:
                        chain = self._chain(expert, floor)
                        if not chain:
                            break
                        for put_or_take, moved, rank in chain:
                            self._change(put_or_take, moved, rank, crowd, idle)
                        continue
                    loser, open_rank = surplus
                    self._change(self.take, loser, open_rank, crowd, idle)
                self._change(self.put, expert, open_rank, crowd, idle)

    def _open_rank(self, expert: int, crowd: list[int], idle: list[tuple[int, int]]) -> int | None:
        """The rank that carries least of those with a free slot on a node without the expert; ties to the lowest."""
        passed: list[tuple[int, int]] = []
        found = None
        while idle and found is None:
            carried, rank = heapq.heappop(idle)
            if carried == crowd[rank] and self.free[rank] and (carried, rank) not in passed[-1:]:
                passed.append((carried, rank))
                if self._node_of[rank] not in self.on_nodes[expert]:
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
            if self.free[holder]:
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
                node = self._node_of[rank]
                if node not in avoided and (len(nodes) > floor or nodes[node] > 1):
                    return expert, rank
        return None

    def _chain(self, needy: int, floor: int) -> list[_Change]:
        """Changes that bring an expert to one more node, the shortest chain of replicas that make way for each other;
        none where the slots do not allow it."""
        on_node: dict[int, list[int]] = {node: [] for node in self._node_of}
        for expert, nodes in enumerate(self.on_nodes):
            for node in nodes:
                on_node[node].append(expert)
        left = [node for node in on_node if node not in self.on_nodes[needy]]
        comes = dict.fromkeys(left, (needy, -1))  # to each node: an expert, and the node that it leaves
        queue, left = left, [node for node in on_node if node not in comes]
        for node in queue:  # grows while it is walked
            vacant = self._vacant_rank(node, on_node[node], floor)
            if vacant is not None:
                return self._moves_to(vacant, node, comes)
            for expert in on_node[node]:
                found = [other for other in left if other not in self.on_nodes[expert]]
                comes |= dict.fromkeys(found, (expert, node))
                queue += found
                left = [other for other in left if other in self.on_nodes[expert]]
        return []

    def _vacant_rank(self, node: int, experts: list[int], floor: int) -> tuple[int, int] | None:
        """(rank, expert) on a node: a free slot, with -1, or that of the spare replica with the smallest share."""
        ranks = [rank for rank, home in enumerate(self._node_of) if home == node]
        if any(self.free[rank] for rank in ranks):
            return max(ranks, key=self.free.__getitem__), -1
        spare = [x for x in experts if len(self.on_nodes[x]) > floor or self.on_nodes[x][node] > 1]
        if not spare:
            return None
        expert = min(spare, key=self._share)
        return next(rank for rank in ranks if rank in self.holders[expert]), expert

    def _moves_to(self, vacant: tuple[int, int], node: int, comes: dict[int, tuple[int, int]]) -> list[_Change]:
        """The changes of a chain, from the slot that it ends in back to the expert that it is for."""
        rank, spare = vacant
        changes: list[_Change] = [] if spare < 0 else [(self.take, spare, rank)]
        while node >= 0:
            expert, node = comes[node]
            changes.append((self.put, expert, rank))
            if node >= 0:
                rank = next(holder for holder in self.holders[expert] if self._node_of[holder] == node)
                changes.append((self.take, expert, rank))
        return changes

    def fill(self) -> None:
        """Every free slot takes the expert with most tokens per holder that its rank lacks; ties to the lowest."""
        books = enumerate(zip(self._load, self.holders, strict=True))
        need = [(-load / len(ranks), expert) for expert, (load, ranks) in books]
        heapq.heapify(need)
        for rank, free in enumerate(self.free):
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
