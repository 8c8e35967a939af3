"""Placements for a changed world: replicas that are left stay, and as few as possible are added or moved.

Lazarus plans a new world from scratch and then permutes the nodes (4.3). Here the placement is repaired, because a
recovery is waited for: what a dead rank held is spread over the others, what a new rank needs comes from the fullest
ones. A load-aware placement may follow later, between steps.

How many nodes can hold each expert is exact: rows of f ones fit columns of at most u_n ones if and only if f * E is at
most the sum of min(u_n, E) (Gale and Ryser, for rows that are alike). What the greedy repair cannot place, augmenting
paths do (`repair_table`).

Shapes: L layers, E experts, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_lightning.algorithms.allocation import nodes_for_each
from moe_lightning.algorithms.repair_table import RepairTable
from moe_lightning.arrays import BoolArray, IntArray, Pairs
from moe_lightning.dispatch.placement import Placement
from moe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Placements of a new world.

    Attributes:
        placements: one for each layer.
        min_replicas: distinct nodes that each expert has now; fewer than asked for only where slots or nodes cannot
            give more.
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
    sizes = np.bincount(domains).astype(np.int64)
    room = num_experts if max_slots is None else min(max_slots, num_experts)
    if room * num_ranks < num_experts:
        raise ConfigurationError(
            f"{num_ranks} ranks of {room} slots cannot hold {num_experts} experts: "
            f"raise the strategy's slots to {-(-num_experts // num_ranks)}, or wait for more ranks"
        )
    floor = nodes_for_each(num_experts, node_slots=room * sizes, min_replicas=min_replicas)
    repaired: dict[bytes, Placement] = {}  # layers that hold the same need the same
    placements = []
    for layer in held:
        pairs = Pairs.of_table(layer)
        key = pairs.experts.tobytes() + pairs.ranks.tobytes()
        if key not in repaired:
            limit = _level_slots(num_experts, len(pairs.experts), sizes, floor, room)
            repaired[key] = _repair(pairs, domains, floor, limit)
        placements.append(repaired[key])
    slots = max((int(_residents(p.pairs).max()) for p in repaired.values()), default=0)
    return Repair(placements=tuple(placements), min_replicas=floor, slots=slots)


def repair_stages(
    held: BoolArray,
    ranks_of_layers: Sequence[Sequence[int]],
    *,
    nodes: Sequence[str],
    min_replicas: int = 1,
    max_slots: int | None = None,
) -> Repair:
    """As `repair_placements`, where some ranks only compute a layer: the others hold nothing of it from now on.

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


def _residents(held: Pairs) -> IntArray:
    """int64 [N]: experts on each rank."""
    return np.bincount(held.ranks, minlength=held.shape[1])


def _level_slots(num_experts: int, num_held: int, sizes: IntArray, floor: int, room: int) -> int:
    """Slots of each rank that a layer needs when all ranks hold about as many experts, `room` at most."""
    slots = min(room, -(-max(num_experts * floor, num_held) // int(sizes.sum())))
    while nodes_for_each(num_experts, node_slots=slots * sizes, min_replicas=floor) < floor:
        slots += 1  # small nodes fill up before large ones
    return slots


def _repair(held: Pairs, domains: IntArray, floor: int, slots: int) -> Placement:
    if _is_settled(held, domains, floor, slots):
        return Placement.of_pairs(held)
    table = RepairTable(held, domains.tolist(), floor=floor, slots=slots)
    table.drop_surplus()
    table.protect()
    table.level()
    return Placement.of_pairs(table.pairs())


def _is_settled(held: Pairs, domains: IntArray, floor: int, slots: int) -> bool:
    """Whether a layer needs no repair, as most do where experts have replicas to spare."""
    load = _residents(held)
    if load.max() > slots or np.ptp(load) > 1:
        return False
    num_domains = int(domains.max()) + 1
    on_node = np.unique(held.experts * num_domains + domains[held.ranks]) // num_domains
    return bool((np.bincount(on_node, minlength=held.shape[0]) >= floor).all())
