"""One layer's replicas while they are repaired: which rank holds what, who may leave, who may come.

Experts, the nodes that hold them and the ranks of these nodes form a flow network: every expert sends `floor` units, at
most one through each node, and every rank takes as many as it has slots. Where no slot is free for an expert, a
search finds a chain of replicas that make way for each other; those that travel anyway are asked before those that
would have to be copied.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np

from moe_lightning.arrays import Pairs

_Found = TypeVar("_Found")


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """A replica that looks for a place, because its rank is claimed by another one.

    Attributes:
        expert: whose replica it is.
        leaves: the rank that it leaves; -1: it is new.
        cause: the claim that takes its place.
    """

    expert: int
    leaves: int
    cause: _Claim | None


class RepairTable:
    """Replicas of one layer.

    Args:
        held: the present replicas, one of an expert on a rank.
        domains: node of each rank.
        floor: nodes that shall hold each expert; the slots must allow it.
        slots: experts that a rank may hold.
    """

    def __init__(self, held: Pairs, domains: Sequence[int], *, floor: int, slots: int) -> None:
        self._shape, self._domains, self._floor, self._slots = held.shape, domains, floor, slots
        present = list(zip(held.experts.tolist(), held.ranks.tolist(), strict=True))
        self._held = set(present)
        self._on: list[set[int]] = [set() for _ in domains]
        self._nodes: list[dict[int, int]] = [{} for _ in range(held.shape[0])]  # of each expert: replicas on each node
        self._by_load: list[tuple[int, int]] = []  # a heap of (load, rank); entries of other loads are out of date
        for expert, rank in present:
            self._hold(expert, rank)
        self._by_load = [(len(experts), rank) for rank, experts in enumerate(self._on)]
        heapq.heapify(self._by_load)

    def pairs(self) -> Pairs:
        """The replicas as they are now."""
        ranks = np.repeat(np.arange(len(self._on)), [len(experts) for experts in self._on])
        experts = np.fromiter(chain.from_iterable(self._on), dtype=np.int64, count=len(ranks))
        return Pairs.of_replicas(experts, ranks, self._shape)

    def drop_surplus(self) -> None:
        """Ranks above their slots, the fullest first, drop replicas that enough nodes hold without them."""
        for rank in sorted(range(len(self._on)), key=lambda rank: -len(self._on[rank])):
            surplus = len(self._on[rank]) - self._slots
            if surplus <= 0:
                return
            for expert in sorted(self._on[rank], reverse=True):
                if surplus and self._is_spare(expert, rank):
                    self._remove(expert, rank)
                    surplus -= 1

    def protect(self) -> None:
        """Bring every expert to `floor` nodes, each time on the emptiest rank, and every rank down to its slots."""
        for expert in sorted(range(len(self._nodes)), key=lambda expert: len(self._nodes[expert])):
            while len(self._nodes[expert]) < self._floor:
                rank = self._emptiest(expert)
                if rank is not None:
                    self._add(expert, rank)
                else:
                    self._make_way([_Claim(expert=expert, leaves=-1, cause=None)])
        for rank, experts in enumerate(self._on):
            while len(experts) > self._slots:
                self._make_way([_Claim(expert=x, leaves=rank, cause=None) for x in sorted(experts, reverse=True)])

    def level(self) -> None:
        """Move replicas from full to empty ranks until they differ by at most one, where nodes allow."""
        fullest = [(-len(experts), rank) for rank, experts in enumerate(self._on)]
        heapq.heapify(fullest)
        while fullest:
            load, source = heapq.heappop(fullest)
            if -load != len(self._on[source]):
                continue
            move = self._first_below(len(self._on[source]) - 1, partial(self._movable, source))
            if move is not None:
                expert, target = move
                self._remove(expert, source)
                self._add(expert, target)
                for rank in (source, target):
                    heapq.heappush(fullest, (-len(self._on[rank]), rank))

    # ------------------------------------------------------------------ what may be

    def _is_spare(self, expert: int, rank: int) -> bool:
        """Whether a replica may go: enough nodes hold the expert without it."""
        nodes = self._nodes[expert]
        return nodes[self._domains[rank]] > 1 or len(nodes) > self._floor

    def _may_move(self, expert: int, source: int, target: int) -> bool:
        nodes = self._nodes[expert]
        old, new = self._domains[source], self._domains[target]
        return len(nodes) - (nodes[old] == 1) + (new not in nodes or (new == old and nodes[old] == 1)) >= self._floor

    def _movable(self, source: int, target: int) -> tuple[int, int] | None:
        """(expert, target) of a replica that may move between two ranks."""
        experts = sorted(self._on[source] - self._on[target], reverse=True)
        return next(((x, target) for x in experts if self._may_move(x, source, target)), None)

    # ------------------------------------------------------------------ where to

    def _emptiest(self, expert: int) -> int | None:
        """The emptiest rank with a slot on a node that lacks the expert."""
        nodes = self._nodes[expert]
        return self._first_below(self._slots, lambda rank: None if self._domains[rank] in nodes else rank)

    def _first_below(self, limit: int, choose: Callable[[int], _Found | None]) -> _Found | None:
        """What `choose` finds on the emptiest rank with fewer experts where it finds anything; it changes nothing."""
        walked: list[tuple[int, int]] = []
        found: _Found | None = None
        while found is None and self._by_load and self._by_load[0][0] < limit:
            entry = heapq.heappop(self._by_load)
            if entry[0] == len(self._on[entry[1]]) and entry not in walked[-1:]:
                walked.append(entry)
                found = choose(entry[1])
        for entry in walked:
            heapq.heappush(self._by_load, entry)
        return found

    def _make_way(self, claims: Sequence[_Claim]) -> None:
        """Satisfy one of the claims by a chain of replicas that give way to each other."""
        queue = deque(claims)
        asked = {claim.leaves for claim in claims}
        left_node: set[int] = set()  # experts whose other nodes have been tried
        while queue:
            claim = queue.popleft()
            for rank in self._places(claim, asked, claim.expert not in left_node):
                spare = [x for x in sorted(self._on[rank], reverse=True) if self._is_spare(x, rank)]
                if len(self._on[rank]) < self._slots or spare:
                    if len(self._on[rank]) >= self._slots:
                        self._remove(spare[0], rank)
                    self._settle(claim, rank)
                    return
                asked.add(rank)
                for x in sorted(self._on[rank]):
                    follow = _Claim(expert=x, leaves=rank, cause=claim)
                    if (x, rank) in self._held:
                        queue.append(follow)
                    else:
                        queue.appendleft(follow)
            left_node.add(claim.expert)
        raise AssertionError("the slots allow what was asked for")

    def _places(self, claim: _Claim, asked: set[int], other_nodes: bool) -> list[int]:
        """Ranks that may take the replica and have not been asked, the emptiest first."""
        nodes = self._nodes[claim.expert]
        home = self._domains[claim.leaves] if claim.leaves >= 0 else -1
        ranks = [
            rank
            for rank, node in enumerate(self._domains)
            if (node == home or (other_nodes and node not in nodes))
            and rank not in asked
            and claim.expert not in self._on[rank]
        ]
        return sorted(ranks, key=lambda rank: len(self._on[rank]))

    def _settle(self, claim: _Claim | None, rank: int) -> None:
        """The replica moves to the rank, and into its place the one that claimed it, and so on."""
        while claim is not None:
            if claim.leaves >= 0:
                self._remove(claim.expert, claim.leaves)
            self._add(claim.expert, rank)
            rank, claim = claim.leaves, claim.cause

    # ------------------------------------------------------------------ bookkeeping

    def _hold(self, expert: int, rank: int) -> None:
        self._on[rank].add(expert)
        nodes, node = self._nodes[expert], self._domains[rank]
        nodes[node] = nodes.get(node, 0) + 1

    def _add(self, expert: int, rank: int) -> None:
        self._hold(expert, rank)
        heapq.heappush(self._by_load, (len(self._on[rank]), rank))

    def _remove(self, expert: int, rank: int) -> None:
        self._on[rank].remove(expert)
        nodes, node = self._nodes[expert], self._domains[rank]
        nodes[node] -= 1
        if not nodes[node]:
            del nodes[node]
        heapq.heappush(self._by_load, (len(self._on[rank]), rank))
