"""Placement for balance: the loads are cut into equal pieces, one per rank, and every expert keeps distinct nodes.

MRO gathers cold experts on the same nodes, which is best for survival and costs balance. Here the loads are packed as
in the alias method: a rank takes the coldest experts that are left, whole, and tops up to the mean with a piece of the
hottest one. That needs at most E + N - 1 of the slots for a perfect split (a hot expert is cut by the next ranks, a
cold one by nobody); the slots that are left first protect the experts on fewer than `min_replicas` nodes, then help the
experts with most tokens per holder, so that the plan tolerates drifting loads. This is ours, not the papers'; on a real
trace it balances better than every other rule here (bench/balance_trace.py prints the comparison).
"""

from __future__ import annotations

import numpy as np

from moe_lightning.algorithms.allocation import affordable_replicas, allocate_replicas
from moe_lightning.algorithms.cluster import Cluster
from moe_lightning.algorithms.placement import IntArray, Placement
from moe_lightning.algorithms.quota import balanced_quota
from moe_lightning.algorithms.replica_placement import deal_to_ranks, spread

_BALANCED = 1.01


def packed_placement(load: IntArray, cluster: Cluster, min_replicas: int = 2) -> Placement:
    """The packing, or a greedy deal of water-filled replicas where protection leaves no slack for it.

    Args:
        load: int64 [E], tokens of each expert; all zeros means unknown, which is treated as equal.
        cluster: ranks, nodes and slots.
        min_replicas: distinct nodes that must hold each expert, lowered to what the slots allow.

    Returns:
        A placement with at most one replica of an expert on a rank, and every expert on the promised number of distinct
        nodes (on as many as were found where nodes differ in size, for then the promise may be impossible).

    Raises:
        ConfigurationError: fewer slots than experts.
    """
    floor = affordable_replicas(
        len(load), slots=cluster.num_slots, num_nodes=cluster.num_nodes, min_replicas=min_replicas
    )
    load = np.maximum(load, 1)
    table = _pack(load, cluster)
    _protect(table, load, cluster, floor)
    _fill(table, load, cluster)
    missing, busiest = _missing_nodes(table, cluster, floor), _busiest(table, load)
    if not missing and busiest * cluster.num_ranks <= _BALANCED * load.sum():
        return Placement(replicas=table)
    replicas = allocate_replicas(
        load,
        slots=cluster.num_slots,
        num_nodes=cluster.num_nodes,
        min_replicas=floor,
        max_replicas=cluster.num_ranks,
    )
    greedy = _deal_greedily(replicas, load, cluster, floor)
    missing_greedily = _missing_nodes(greedy, cluster, floor)
    if missing and missing_greedily:
        # On nodes of equal size spread always keeps the promise: its running cursor visits distinct nodes before any
        # node twice.
        return Placement(
            replicas=deal_to_ranks(spread(replicas, cluster.node_slots()), cluster, load).replicas.clip(max=1)
        )
    better = (missing_greedily, _busiest(greedy, load)) < (missing, busiest)
    return Placement(replicas=greedy if better else table)


def _pack(load: IntArray, cluster: Cluster) -> IntArray:
    """int64 [E, N] of 0 and 1: for every rank the coldest experts whole and a piece of the hottest, up to its share.

    An expert is cut only while the later slots suffice for all experts that are left. Ranks are filled across nodes, so
    that the pieces of an expert land on different ones.
    """
    table = np.zeros((len(load), cluster.num_ranks), dtype=np.int64)
    left = {
        int(e): float(load[e]) for e in np.argsort(load, kind="stable")
    }  # ascending; only the last piece ever shrinks
    place_in_node = [cluster.ranks_of(node).index(rank) for rank, node in enumerate(cluster.node_of)]
    order = sorted(range(cluster.num_ranks), key=lambda rank: (place_in_node[rank], cluster.node_of[rank]))
    for position, rank in enumerate(order):
        later_slots = (len(order) - 1 - position) * cluster.slots_per_rank
        room = sum(left.values()) / (len(order) - position)
        for slot in range(cluster.slots_per_rank, 0, -1):
            if not left:
                break
            coldest, hottest = min(left, key=lambda e: (left[e], e)), max(left, key=lambda e: (left[e], e))
            must_take_whole = len(left) > later_slots + slot - 1
            expert = hottest if slot == 1 and not must_take_whole else coldest
            table[expert, rank] = 1
            if left[expert] <= room * (1 + 1e-9) or must_take_whole:
                room -= left.pop(expert)
            else:
                left[expert] -= room
                break
    return table


def _protect(table: IntArray, load: IntArray, cluster: Cluster, floor: int) -> None:
    """Give experts on fewer than `floor` nodes a replica in a free slot or instead of a surplus one, hottest first."""
    node_of = np.array(cluster.node_of)
    short = np.flatnonzero((cluster.by_node(table) > 0).sum(axis=1) < floor)  # stealing never adds to these
    for expert in short[np.argsort(-load[short], kind="stable")]:
        for _ in range(floor):
            nodes = cluster.by_node(table) > 0
            if nodes[expert].sum() >= floor:
                break
            allowed = ~nodes[expert][node_of]
            free = np.flatnonzero(allowed & (table.sum(axis=0) < cluster.slots_per_rank))
            if free.size:
                crowd = (table * (load / table.sum(axis=1).clip(1))[:, None]).sum(axis=0)
                table[expert, free[np.argmin(crowd[free])]] = 1
                continue
            held = cluster.by_node(table)[:, node_of]
            spare = (table > 0) & allowed & ((nodes.sum(axis=1) > floor)[:, None] | (held > 1))
            if not spare.any():
                break
            relief = np.where(spare, (load / table.sum(axis=1).clip(1))[:, None], np.inf)
            loser, rank = np.unravel_index(np.argmin(relief), relief.shape)
            table[loser, rank], table[expert, rank] = 0, 1


def _fill(table: IntArray, load: IntArray, cluster: Cluster) -> None:
    """Every free slot takes the expert with most tokens per holder that its rank lacks."""
    holders = table.sum(axis=1)
    for rank in range(cluster.num_ranks):
        for _ in range(int(cluster.slots_per_rank - table[:, rank].sum())):
            need = np.where(table[:, rank] == 0, load / holders, -1.0)
            expert = int(np.argmax(need))
            if need[expert] < 0:
                break
            table[expert, rank] = 1
            holders[expert] += 1


def _deal_greedily(replicas: IntArray, load: IntArray, cluster: Cluster, floor: int) -> IntArray:
    """Replicas with most tokens first, each to the least loaded rank, an expert's first `floor` on distinct nodes."""
    node_of = np.array(cluster.node_of)
    table = np.zeros((len(replicas), cluster.num_ranks), dtype=np.int64)
    carried, free = np.zeros(cluster.num_ranks), np.full(cluster.num_ranks, cluster.slots_per_rank)
    share = load / replicas
    for expert in np.argsort(-share, kind="stable"):
        used_nodes = np.zeros(cluster.num_nodes, dtype=np.bool_)
        for copy in range(replicas[expert]):
            open_ranks = (free > 0) & (table[expert] == 0)
            fresh = open_ranks & ~used_nodes[node_of]
            choice = np.flatnonzero(fresh if copy < floor and fresh.any() else open_ranks)
            if not choice.size:
                break
            rank = int(choice[np.lexsort((-free[choice], carried[choice]))[0]])
            table[expert, rank], used_nodes[node_of[rank]] = 1, True
            carried[rank] += share[expert]
            free[rank] -= 1
    return table


def _missing_nodes(table: IntArray, cluster: Cluster, floor: int) -> int:
    """Distinct nodes that are missing, over all experts, to keep the promise."""
    nodes = (cluster.by_node(table) > 0).sum(axis=1)
    return int(np.maximum(floor - nodes, 0).sum())


def _busiest(table: IntArray, load: IntArray) -> int:
    assert table.any(axis=1).all()
    return int(balanced_quota(load, table).sum(axis=0).max())
