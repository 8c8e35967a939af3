"""Placements for a changed world: replicas that are left stay, and as few as possible are added or moved.

Lazarus plans a new world from scratch and then permutes the nodes (4.3). Here the placement is repaired, because a
recovery is waited for: what a dead rank held is spread over the others, what a new rank needs comes from the fullest
ones. A load-aware placement may follow later, between steps.

Shapes: L layers, E experts, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_lightning.algorithms.allocation import affordable_replicas
from moe_lightning.algorithms.placement import Placement
from moe_lightning.errors import ConfigurationError

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Placements of a new world.

    Attributes:
        placements: one for each layer.
        min_replicas: distinct nodes that each expert has now; fewer than asked for where slots or nodes run out.
        slots: the most experts that a rank holds in any layer.
    """

    placements: tuple[Placement, ...]
    min_replicas: int
    slots: int


def repair_placements(
    held: BoolArray, *, nodes: Sequence[str], min_replicas: int = 1, max_slots: int | None = None
) -> Repair:
    """Give every expert replicas on `min_replicas` nodes and every rank about as many experts.

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
    num_nodes = int(domains.max()) + 1
    room = num_experts if max_slots is None else min(max_slots, num_experts)
    if room * num_ranks < num_experts:
        raise ConfigurationError(
            f"{num_ranks} ranks of {room} slots cannot hold {num_experts} experts: "
            f"raise the strategy's slots to {-(-num_experts // num_ranks)}, or wait for more ranks"
        )
    floor = affordable_replicas(num_experts, slots=room * num_ranks, num_nodes=num_nodes, min_replicas=min_replicas)
    tables = [_repair(layer, domains, floor, room) for layer in held]
    while any(table is None for table in tables) and floor > 1:  # nodes of unlike size may not fit what the sum allows
        floor -= 1
        tables = [_repair(layer, domains, floor, room) for layer in held]
    placements = tuple(Placement(replicas=table.astype(np.int64)) for table in tables if table is not None)
    assert len(placements) == len(held)
    slots = max((len(p.experts_on(rank)) for p in placements for rank in range(num_ranks)), default=0)
    return Repair(placements=placements, min_replicas=floor, slots=slots)


def _repair(held_EN: BoolArray, domains: NDArray[np.int64], floor: int, room: int) -> BoolArray | None:
    """One layer's table, or None where so many replicas do not fit."""
    table = held_EN.copy()
    num_experts, num_ranks = table.shape
    target = min(room, -(-max(num_experts * floor, int(table.sum())) // num_ranks))
    for rank in np.argsort(-table.sum(axis=0), kind="stable"):
        _drop_surplus(table, domains, int(rank), floor, target)
    for expert in np.argsort(_num_nodes(table, domains), kind="stable"):
        if not _add_replicas(table, domains, int(expert), floor, room):
            return None
    _level(table, domains, floor)
    return table if _shrink(table, domains, floor, room) else None


def _num_nodes(table: BoolArray, domains: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [E]: distinct nodes that hold each expert."""
    by_node = np.stack([table[:, domains == node].any(axis=1) for node in range(int(domains.max()) + 1)], axis=1)
    counts: NDArray[np.int64] = by_node.sum(axis=1).astype(np.int64)
    return counts


def _is_spare(table: BoolArray, domains: NDArray[np.int64], expert: int, rank: int, floor: int) -> bool:
    """Whether a replica may go: enough nodes hold the expert without it."""
    others = np.flatnonzero(table[expert])
    others = others[others != rank]
    return len(others) > 0 and len(set(domains[others].tolist())) >= floor


def _drop_surplus(table: BoolArray, domains: NDArray[np.int64], rank: int, floor: int, target: int) -> None:
    for expert in np.flatnonzero(table[:, rank])[::-1]:
        if table[:, rank].sum() <= target:
            return
        if _is_spare(table, domains, int(expert), rank, floor):
            table[expert, rank] = False


def _add_replicas(table: BoolArray, domains: NDArray[np.int64], expert: int, floor: int, room: int) -> bool:
    """Put an expert on further nodes, each time on the emptiest rank; False where no slot is left."""
    while len(set(domains[table[expert]].tolist())) < floor:
        load = table.sum(axis=0)
        taken = set(domains[table[expert]].tolist())
        free = [rank for rank in range(table.shape[1]) if domains[rank] not in taken and load[rank] < room]
        if not free and not _make_room(table, domains, taken, floor, room):
            return False
        if free:
            table[expert, min(free, key=lambda rank: (load[rank], rank))] = True
    return True


def _make_room(table: BoolArray, domains: NDArray[np.int64], taken: set[int], floor: int, room: int) -> bool:
    """Free a slot on a node outside `taken`: drop a spare replica, or move one to a rank with room."""
    load = table.sum(axis=0)
    full = [rank for rank in range(table.shape[1]) if domains[rank] not in taken and load[rank] >= room]
    for rank in full:
        for expert in np.flatnonzero(table[:, rank]):
            if _is_spare(table, domains, int(expert), rank, floor):
                table[expert, rank] = False
                return True
    for rank in full:
        for expert in np.flatnonzero(table[:, rank]):
            for other in np.flatnonzero((load < room) & ~table[expert]):
                if _may_move(table, domains, int(expert), rank, int(other), floor):
                    table[expert, rank], table[expert, other] = False, True
                    return True
    return False


def _shrink(table: BoolArray, domains: NDArray[np.int64], floor: int, room: int) -> bool:
    """Bring every rank down to its slots; False where that cannot be."""
    while (load := table.sum(axis=0)).max() > room:
        fullest = int(load.argmax())
        moves = [
            (int(expert), int(rank))
            for expert in np.flatnonzero(table[:, fullest])
            for rank in np.flatnonzero((load < room) & ~table[expert])
            if _may_move(table, domains, int(expert), fullest, int(rank), floor)
        ]
        if moves:
            expert, rank = moves[-1]
            table[expert, fullest], table[expert, rank] = False, True
            continue
        by_load = np.argsort(-load, kind="stable")
        spare = [
            (int(expert), int(rank))
            for rank in by_load
            for expert in np.flatnonzero(table[:, rank])
            if _is_spare(table, domains, int(expert), int(rank), floor)
        ]
        if not spare:
            return False
        table[spare[0]] = False
    return True


def _may_move(table: BoolArray, domains: NDArray[np.int64], expert: int, source: int, target: int, floor: int) -> bool:
    holders = set(np.flatnonzero(table[expert]).tolist()) - {source} | {target}
    return len({int(domains[rank]) for rank in holders}) >= min(floor, len(holders))


def _level(table: BoolArray, domains: NDArray[np.int64], floor: int) -> None:
    """Move replicas from the fullest to the emptiest rank until they differ by at most one, where nodes allow."""
    while True:
        load = table.sum(axis=0)
        fullest, emptiest = int(load.argmax()), int(load.argmin())
        if load[fullest] - load[emptiest] <= 1:
            return
        movable = [
            int(expert)
            for expert in np.flatnonzero(table[:, fullest] & ~table[:, emptiest])
            if _may_move(table, domains, int(expert), fullest, emptiest, floor)
        ]
        if not movable:
            return
        table[movable[-1], fullest], table[movable[-1], emptiest] = False, True
