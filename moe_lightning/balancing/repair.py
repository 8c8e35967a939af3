"""Repair of placements for a changed world: surviving replicas stay, few are added or moved.

Lazarus plans a new world from scratch and then permutes the nodes (4.3). Here the placement is repaired, because a
recovery is waited for: replicas of a dead rank are spread over the others, those of a new rank come from the fullest
ones. A load-aware placement may follow later, between steps.

The number of nodes that can hold each expert is exact: rows of f ones fit columns of at most u_n ones if and only if
f * E is at most the sum of min(u_n, E) (Gale and Ryser, for rows that are alike). What the greedy repair cannot place,
augmenting paths do. Experts, the nodes that hold them and the ranks of these nodes form a flow network: every expert
sends `floor` units, at most one through each node, and every rank receives as many as it has slots. Where no slot is
free for an expert, a search finds a chain of replicas to move; those that are sent anyway come before those that would
have to be copied.

Where there are fewer nodes than replicas wanted, as on one machine, the replicas that nodes cannot take go to other
ranks of the same nodes: a lost process then costs no more state than a lost node does elsewhere.

Shapes: L layers, E experts, N ranks.
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
from typing_extensions import override

from moe_lightning.arrays import BoolArray, IntArray, Pairs
from moe_lightning.balancing.cluster import Cluster, nodes_for_each
from moe_lightning.dispatch.placement import Placement
from moe_lightning.errors import ConfigurationError

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


class ReplicaTable:
    """Replicas of one layer, at most one of an expert on a rank.

    Args:
        shape: experts and ranks.
        node_of: node of each rank.

    Attributes:
        holders: of each expert, the ranks that hold it.
        experts: of each rank, the experts that it holds.
        on_nodes: of each expert, how many of a node's ranks hold it, for the nodes where any does.
    """

    def __init__(self, shape: tuple[int, int], node_of: Sequence[int]) -> None:
        self._shape, self.node_of = shape, node_of
        self.holders: list[set[int]] = [set() for _ in range(shape[0])]
        self.experts: list[set[int]] = [set() for _ in range(shape[1])]
        self.on_nodes: list[dict[int, int]] = [{} for _ in range(shape[0])]

    @property
    def pairs(self) -> Pairs:
        """Pairs of an expert and a rank that holds it."""
        experts = np.repeat(np.arange(len(self.holders)), [len(ranks) for ranks in self.holders])
        ranks = np.fromiter(chain.from_iterable(self.holders), dtype=np.int64, count=len(experts))
        return Pairs.of_replicas(experts, ranks, self._shape)

    def put(self, expert: int, rank: int) -> None:
        """Add an expert to a rank that lacks it."""
        self.holders[expert].add(rank)
        self.experts[rank].add(expert)
        nodes, node = self.on_nodes[expert], self.node_of[rank]
        nodes[node] = nodes.get(node, 0) + 1

    def take(self, expert: int, rank: int) -> None:
        """Undo `put`."""
        self.holders[expert].remove(rank)
        self.experts[rank].remove(expert)
        nodes, node = self.on_nodes[expert], self.node_of[rank]
        nodes[node] -= 1
        if not nodes[node]:
            del nodes[node]


class RepairTable(ReplicaTable):
    """Replicas of one layer that is repaired.

    Args:
        held: the present replicas.
        domains: node of each rank.
        floor: nodes that shall hold each expert; the slots must allow it.
        replicas: ranks that shall, at least `floor`.
        slots: experts that a rank may hold.
    """

    def __init__(self, held: Pairs, domains: Sequence[int], *, floor: int, replicas: int, slots: int) -> None:
        super().__init__(held.shape, domains)
        self._slots, self._floor, self._replicas = slots, floor, replicas
        self._by_load = [(0, rank) for rank in range(len(domains))]  # a heap; entries of other loads are out of date
        self._held = set(zip(held.experts.tolist(), held.ranks.tolist(), strict=True))
        for expert, rank in self._held:
            self.put(expert, rank)

    @override
    def put(self, expert: int, rank: int) -> None:
        super().put(expert, rank)
        heapq.heappush(self._by_load, (len(self.experts[rank]), rank))

    @override
    def take(self, expert: int, rank: int) -> None:
        super().take(expert, rank)
        heapq.heappush(self._by_load, (len(self.experts[rank]), rank))

    def drop_surplus(self) -> None:
        """Ranks above their slots, the fullest first, drop replicas that enough others hold."""
        for rank in sorted(range(len(self.experts)), key=lambda rank: -len(self.experts[rank])):
            surplus = len(self.experts[rank]) - self._slots
            if surplus <= 0:
                return
            for expert in sorted(self.experts[rank], reverse=True):
                if surplus and self._is_spare(expert, rank):
                    self.take(expert, rank)
                    surplus -= 1

    def protect(self) -> None:
        """Bring every expert to `floor` nodes and `replicas` ranks, each time on the emptiest rank, and every rank down
        to its slots.
        """
        for expert in sorted(range(len(self.on_nodes)), key=lambda expert: len(self.on_nodes[expert])):
            while len(self.on_nodes[expert]) < self._floor or len(self.holders[expert]) < self._replicas:
                rank = self._first_below(self._slots, partial(self._addable, expert))
                if rank is not None:
                    self.put(expert, rank)
                else:
                    self._make_way([_Claim(expert=expert, leaves=-1, cause=None)])
        for rank, experts in enumerate(self.experts):
            while len(experts) > self._slots:
                self._make_way([_Claim(expert=x, leaves=rank, cause=None) for x in sorted(experts, reverse=True)])

    def level(self) -> None:
        """Move replicas from full to empty ranks until they differ by at most one, where nodes allow."""
        fullest = [(-len(experts), rank) for rank, experts in enumerate(self.experts)]
        heapq.heapify(fullest)
        while fullest:
            load, source = heapq.heappop(fullest)
            if -load != len(self.experts[source]):
                continue
            move = self._first_below(len(self.experts[source]) - 1, partial(self._movable, source))
            if move is not None:
                expert, target = move
                self.take(expert, source)
                self.put(expert, target)
                for rank in (source, target):
                    heapq.heappush(fullest, (-len(self.experts[rank]), rank))

    # ------------------------------------------------------------------ what may be

    def _is_spare(self, expert: int, rank: int) -> bool:
        """Return True if a replica may be removed: enough nodes and ranks hold the expert without it."""
        nodes = self.on_nodes[expert]
        if nodes[self.node_of[rank]] == 1 and len(nodes) <= self._floor:
            return False
        return len(self.holders[expert]) - min(len(nodes), self._floor) > self._replicas - self._floor

    def _may_add(self, expert: int, rank: int) -> bool:
        """Return True if a new replica on a rank brings the expert nearer to its nodes, and then to its ranks."""
        lacks_nodes = len(self.on_nodes[expert]) < self._floor
        return self.node_of[rank] not in self.on_nodes[expert] if lacks_nodes else expert not in self.experts[rank]

    def _addable(self, expert: int, rank: int) -> int | None:
        return rank if self._may_add(expert, rank) else None

    def _may_move(self, expert: int, source: int, target: int) -> bool:
        """Return True if a move costs no node that the expert needs."""
        nodes = self.on_nodes[expert]
        old, new = self.node_of[source], self.node_of[target]
        moved = len(nodes) - (nodes[old] == 1) + (new not in nodes or (new == old and nodes[old] == 1))
        return moved >= min(self._floor, len(nodes))

    def _movable(self, source: int, target: int) -> tuple[int, int] | None:
        """(expert, target) of a replica that may move between two ranks."""
        experts = sorted(self.experts[source] - self.experts[target], reverse=True)
        return next(((x, target) for x in experts if self._may_move(x, source, target)), None)

    # ------------------------------------------------------------------ where to

    def _first_below(self, limit: int, choose: Callable[[int], _Found | None]) -> _Found | None:
        """Return the first result of `choose`, from the emptiest rank upwards; changes nothing."""
        walked: list[tuple[int, int]] = []
        found: _Found | None = None
        while found is None and self._by_load and self._by_load[0][0] < limit:
            entry = heapq.heappop(self._by_load)
            if entry[0] == len(self.experts[entry[1]]) and entry not in walked[-1:]:
                walked.append(entry)
                found = choose(entry[1])
        for entry in walked:
            heapq.heappush(self._by_load, entry)
        return found

    def _make_way(self, claims: Sequence[_Claim]) -> None:
        """Satisfy one of the claims by a chain of replicas that give way to each other."""
        queue = deque(claims)
        asked = {claim.leaves for claim in claims}
        left_node: set[tuple[int, bool]] = set()  # experts whose other nodes have been tried, from such a node
        while queue:
            claim = queue.popleft()
            nodes, leaves = self.on_nodes[claim.expert], claim.leaves
            way = claim.expert, leaves >= 0 and nodes[self.node_of[leaves]] > 1
            for rank in self._places(claim, asked, way not in left_node):
                spare = [x for x in sorted(self.experts[rank], reverse=True) if self._is_spare(x, rank)]
                if len(self.experts[rank]) < self._slots or spare:
                    if len(self.experts[rank]) >= self._slots:
                        self.take(spare[0], rank)
                    self._fill_claim(claim, rank)
                    return
                asked.add(rank)
                for x in sorted(self.experts[rank]):
                    follow = _Claim(expert=x, leaves=rank, cause=claim)
                    if (x, rank) in self._held:
                        queue.append(follow)
                    else:
                        queue.appendleft(follow)
            left_node.add(way)
        raise AssertionError("the slots allow what was asked for")

    def _places(self, claim: _Claim, asked: set[int], other_nodes: bool) -> list[int]:
        """Ranks that may take the replica and have not been asked, the emptiest first."""
        leaves = claim.leaves
        home = self.node_of[leaves] if leaves >= 0 else -1
        ranks = [
            rank
            for rank, node in enumerate(self.node_of)
            if (node == home or other_nodes)
            and rank not in asked
            and claim.expert not in self.experts[rank]
            and (self._may_move(claim.expert, leaves, rank) if leaves >= 0 else self._may_add(claim.expert, rank))
        ]
        return sorted(ranks, key=lambda rank: len(self.experts[rank]))

    def _fill_claim(self, claim: _Claim | None, rank: int) -> None:
        """The replica moves to the rank, and into its place the one that claimed it, and so on."""
        while claim is not None:
            if claim.leaves >= 0:
                self.take(claim.expert, claim.leaves)
            self.put(claim.expert, rank)
            rank, claim = claim.leaves, claim.cause


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Placements of a new world.

    Attributes:
        placements: one for each layer.
        min_replicas: distinct nodes that each expert has now, or distinct ranks where there are fewer nodes than asked
            for; fewer than that only where slots or ranks cannot give more.
        slots: the most experts that a rank holds in any layer.
    """

    placements: tuple[Placement, ...]
    min_replicas: int
    slots: int


def repair_placements(
    held: BoolArray, *, nodes: Sequence[str], min_replicas: int = 1, max_slots: int | None = None
) -> Repair:
    """Give every expert replicas on `min_replicas` nodes and every rank about as many experts. Where there are fewer
    nodes, every one holds each expert, and so many ranks.

    Args:
        held: bool [L, E, N], what the ranks hold now; nothing in a new rank's column.
        nodes: failure domain of each rank.
        min_replicas: nodes that shall hold each expert.
        max_slots: experts that a rank can hold; None: no limit.

    Raises:
        ConfigurationError: the slots cannot hold every expert once.
    """
    _, num_experts, num_ranks = held.shape
    domains = np.unique(np.asarray(nodes), return_inverse=True)[1]
    sizes = np.bincount(domains).astype(np.int64)
    room = num_experts if max_slots is None else min(max_slots, num_experts)
    if room * num_ranks < num_experts:
        raise ConfigurationError(
            f"{num_ranks} ranks of {room} slots cannot hold {num_experts} experts: "
            f"raise the strategy's slots to {-(-num_experts // num_ranks)}, or wait for more ranks"
        )
    floor = nodes_for_each(num_experts, node_slots=room * sizes, min_replicas=min_replicas)
    replicas = floor
    if len(sizes) < min_replicas:
        replicas = nodes_for_each(num_experts, node_slots=np.full(num_ranks, room), min_replicas=min_replicas)
    repaired: dict[bytes, Placement] = {}  # layers that hold the same need the same
    placements = []
    for layer in held:
        pairs = Pairs.of_table(layer)
        key = pairs.experts.tobytes() + pairs.ranks.tobytes()
        if key not in repaired:
            limit = _level_slots(num_experts, max(num_experts * replicas, len(pairs.experts)), sizes, floor, room)
            repaired[key] = _repair(pairs, domains, floor, replicas, limit)
        placements.append(repaired[key])
    slots = max((int(_residents(p.pairs).max()) for p in repaired.values()), default=0)
    return Repair(placements=tuple(placements), min_replicas=replicas, slots=slots)


def repair_stages(
    held: BoolArray,
    ranks_of_layers: Sequence[Sequence[int]],
    *,
    nodes: Sequence[str],
    min_replicas: int = 1,
    max_slots: int | None = None,
) -> Repair:
    """Variant of `repair_placements` where only some ranks compute a layer: the others lose their replicas of it.

    Args:
        ranks_of_layers: that compute each layer, ascending, [L].
    """
    placements: dict[int, Placement] = {}
    repairs = []
    for ranks in dict.fromkeys(map(tuple, ranks_of_layers)):
        layers = [layer for layer, own in enumerate(ranks_of_layers) if tuple(own) == ranks]
        own_nodes = [nodes[rank] for rank in ranks]
        part = held[layers][..., list(ranks)]
        repairs.append(repair_placements(part, nodes=own_nodes, min_replicas=min_replicas, max_slots=max_slots))
        wide = (placement.over(ranks, len(nodes)) for placement in repairs[-1].placements)
        placements |= dict(zip(layers, wide, strict=True))
    return Repair(
        placements=tuple(placements[layer] for layer in range(len(held))),
        min_replicas=min((repair.min_replicas for repair in repairs), default=min_replicas),
        slots=max((repair.slots for repair in repairs), default=0),
    )


def protected(placement: Placement, cluster: Cluster, min_replicas: int) -> Placement:
    """Return a placement with replicas added or moved so that every expert is on `min_replicas` nodes, or on as many as
    every expert can have at once.

    Args:
        placement: every expert once or more, one replica of an expert on a rank, no more of them than its slots.
        cluster: ranks, nodes and slots.
        min_replicas: distinct nodes for each expert.
    """
    held = placement.pairs
    floor = nodes_for_each(held.shape[0], node_slots=cluster.node_slots(), min_replicas=min_replicas)
    table = RepairTable(held, cluster.node_of, floor=floor, replicas=floor, slots=cluster.slots_per_rank)
    table.protect()
    return Placement.of_pairs(table.pairs)


def _residents(held: Pairs) -> IntArray:
    """int64 [N]: experts on each rank."""
    return np.bincount(held.ranks, minlength=held.shape[1])


def _level_slots(num_experts: int, num_replicas: int, sizes: IntArray, floor: int, room: int) -> int:
    """Slots of each rank that a layer needs when all ranks hold about as many experts, `room` at most."""
    slots = min(room, -(-num_replicas // int(sizes.sum())))
    while nodes_for_each(num_experts, node_slots=slots * sizes, min_replicas=floor) < floor:
        slots += 1  # small nodes fill up before large ones
    return slots


def _repair(held: Pairs, domains: IntArray, floor: int, replicas: int, slots: int) -> Placement:
    if _needs_no_repair(held, domains, floor, replicas, slots):
        return Placement.of_pairs(held)
    table = RepairTable(held, domains.tolist(), floor=floor, replicas=replicas, slots=slots)
    table.drop_surplus()
    table.protect()
    table.level()
    return Placement.of_pairs(table.pairs)


def _needs_no_repair(held: Pairs, domains: IntArray, floor: int, replicas: int, slots: int) -> bool:
    """Return True if a layer needs no repair, as most do where experts have replicas to spare."""
    load = _residents(held)
    if load.max() > slots or np.ptp(load) > 1:
        return False
    num_experts, num_domains = held.shape[0], int(domains.max()) + 1
    on_node = np.unique(held.experts * num_domains + domains[held.ranks]) // num_domains
    nodes, ranks = (np.bincount(experts, minlength=num_experts) for experts in (on_node, held.experts))
    return bool((nodes >= floor).all() and (ranks >= replicas).all())
