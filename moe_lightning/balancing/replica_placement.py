"""Replica placement: maximum rank overlap (MRO), MRO+ and the baselines.

Placement works on nodes, the units that fail: it maps replicas int64 [E] and the slots of each node int64 [N] to a
table int64 [E, N]; `deal_to_ranks` then deals a node's replicas to its ranks. Source: Lazarus 4.1. Nodes may have
different numbers of slots, which the paper does not consider: MRO's groups are then as large as the smallest node, and
further slots of larger nodes are filled like any other vacancy.

A placement survives failures when every expert keeps a replica on a live node, that is when no expert's *support* (the
set of nodes that hold it) lies inside the failed set. Sets of nodes are bit masks.

Shapes: E experts, N nodes (M in `rules`, where N are ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from moe_lightning.arrays import IntArray, Pairs
from moe_lightning.balancing.cluster import Cluster
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.quota import Pace
from moe_lightning.errors import ConfigurationError


def supports(tables: Sequence[IntArray]) -> IntArray:
    """Distinct supports of all experts of all layers, ascending, from tables of replicas int64 [E, N], N <= 62."""
    bits = np.int64(1) << np.arange(tables[0].shape[1], dtype=np.int64)
    return np.unique(np.concatenate([(table > 0) @ bits for table in tables]))


def fatal_sets(masks: IntArray, num_nodes: int) -> NDArray[np.bool_]:
    """bool [..., 2^N]: whether failing exactly the nodes of an index loses an expert, for supports int64 [..., E].

    A support is fatal, and so is every superset of a fatal set: N passes over the table close it upwards.
    """
    fatal = np.zeros((*masks.shape[:-1], 1 << num_nodes), dtype=np.bool_)
    np.put_along_axis(fatal, masks, np.True_, axis=-1)
    for bit in range(num_nodes):
        halves = fatal.reshape(*masks.shape[:-1], -1, 2, 1 << bit)
        halves[..., 1, :] |= halves[..., 0, :]
    return fatal


def fatal_counts(fatal: NDArray[np.bool_]) -> IntArray:
    """int64 [..., N + 1]: how many sets of k failed nodes are fatal, k = 0..N, from bool [..., 2^N]."""
    by_size, starts = _sets_by_size(fatal.shape[-1].bit_length() - 1)
    counts: IntArray = np.add.reduceat(fatal[..., by_size], starts, axis=-1, dtype=np.int64)
    return counts


@cache
def _sets_by_size(num_nodes: int) -> tuple[IntArray, IntArray]:
    """All sets ordered by size, and where each size starts."""
    sizes = np.zeros(1, dtype=np.int64)
    for _ in range(num_nodes):
        sizes = np.concatenate((sizes, sizes + 1))
    starts = np.cumsum([0] + [comb(num_nodes, k) for k in range(num_nodes)])
    return np.argsort(sizes, kind="stable"), starts


MAX_SEARCH_NODES = 12
"""MRO+ searches up to this many nodes; every move needs a table of all failed sets."""

_BATCH_CELLS = 1 << 22

ONE_TOKEN = 720_720
"""Fixed-point unit of a replica's share of tokens: sums of integers are the same on every machine. Divisible by all
numbers up to 16, so that the shares of a few holders are exact and equal loads tie."""


def mro(replicas: IntArray, node_slots: IntArray) -> IntArray:
    """Maximum rank overlap: experts with similar replica counts share nodes, so that few node sets are fatal.

    Groups of consecutive experts (ascending by replicas) live on disjoint blocks of nodes, each as long as its rarest
    expert has replicas. Optimal for every number of failures unless the last block is truncated (`is_truncated`); see
    `mro_plus`. Unequal nodes, as a fault leaves them, may be fewer than the groups: their blocks are then by size.

    Returns:
        int64 [E, N] with row sums `replicas`.

    Raises:
        ConfigurationError: the replicas do not fit the slots.
    """
    _check(replicas, node_slots)
    if not _are_groups_few(replicas, node_slots):
        return _blocks_by_size(replicas, node_slots)
    order = np.lexsort((np.arange(len(replicas)), replicas))
    table = np.zeros((len(replicas), len(node_slots)), dtype=np.int64)
    size = int(node_slots.min())
    if len(order) <= size:
        for expert in order:
            table[expert, : replicas[expert]] = 1  # nested supports
    else:
        start = 0
        for group, length in enumerate(mro_blocks(replicas, node_slots)):
            table[order[group * size : (group + 1) * size], start : start + length] = 1
            start += length
    _fill_vacancies(table, replicas, node_slots, order)
    return table


def _are_groups_few(replicas: IntArray, node_slots: IntArray) -> bool:
    """True if MRO's groups are no more than the nodes, as on nodes of equal slots."""
    return len(replicas[:: int(node_slots.min())]) <= len(node_slots)


def mro_blocks(replicas: IntArray, node_slots: IntArray) -> tuple[int, ...]:
    """Lengths of MRO's node blocks, of few groups; one live node in each is enough to recover."""
    representatives = np.sort(replicas)[:: int(node_slots.min())]
    blocks: list[int] = []
    for group, count in enumerate(representatives):
        later = len(representatives) - 1 - group
        blocks.append(min(int(count), len(node_slots) - sum(blocks) - later))
    return tuple(blocks)


def is_truncated(replicas: IntArray, node_slots: IntArray) -> bool:
    """True if a block is shorter than its rarest expert has replicas: then Lazarus' Theorem 1 does not hold."""
    if len(replicas) <= node_slots.min():
        return False
    representatives = np.sort(replicas)[:: int(node_slots.min())]
    return int(representatives.sum()) > len(node_slots)


def mro_plus(replicas: IntArray, node_slots: IntArray) -> IntArray:
    """MRO where it is optimal, otherwise the best of MRO and spread after hill climbing.

    MRO is optimal where nodes have equal slots and no block is truncated. On unequal nodes the climb also starts from
    blocks of nodes by falling slots, each with as many experts as its smallest node holds.

    A move swaps a replica on one node with a replica, or a free slot, on another; the objective is the vector of fatal
    sets of 1, 2, ... failed nodes, smallest failures first. Beyond `MAX_SEARCH_NODES` nodes it is the number of
    distinct supports of 1, 2, ... nodes (the leading terms of the same vector) and there is no climbing. Either way
    fewer failures than the rarest expert has replicas are never fatal.
    """
    _check(replicas, node_slots)
    is_even = (node_slots == node_slots[0]).all()
    if is_even and not is_truncated(replicas, node_slots):
        return mro(replicas, node_slots)
    starts = [spread(replicas, node_slots)]
    if _are_groups_few(replicas, node_slots):
        starts.insert(0, mro(replicas, node_slots))
    if not is_even:
        starts.insert(0, _blocks_by_size(replicas, node_slots))
    if len(node_slots) <= MAX_SEARCH_NODES:
        starts = [_climb(table, node_slots) for table in starts]
    return min(starts, key=_vulnerability)


def _blocks_by_size(replicas: IntArray, node_slots: IntArray) -> IntArray:
    """MRO's groups on blocks of nodes by falling slots, each group as large as the smallest node of its block."""
    order = np.lexsort((np.arange(len(replicas)), replicas))
    nodes = np.argsort(-node_slots, kind="stable")
    table = np.zeros((len(replicas), len(nodes)), dtype=np.int64)
    first = grouped = 0
    while first < len(nodes) and grouped < len(order):
        block = nodes[first : first + int(replicas[order[grouped]])]
        size = int(node_slots[block].min())
        table[np.ix_(order[grouped : grouped + size], block)] = 1
        first, grouped = first + len(block), grouped + size
    _fill_vacancies(table, replicas, node_slots, order)
    return table


def spread(replicas: IntArray, node_slots: IntArray) -> IntArray:
    """Replicas by expert id to successive nodes with a running cursor that skips full nodes."""
    _check(replicas, node_slots)
    num_nodes = len(node_slots)
    table = np.zeros((len(replicas), num_nodes), dtype=np.int64)
    if (node_slots == node_slots[0]).all():  # no node is full before the last round: the cursor never skips
        np.add.at(table, (np.repeat(np.arange(len(replicas)), replicas), np.arange(replicas.sum()) % num_nodes), 1)
        return table
    free = node_slots.copy()
    cursor = 0
    for expert, count in enumerate(replicas):
        for _ in range(count):
            nodes = (cursor + np.arange(num_nodes)) % num_nodes
            nodes = nodes[free[nodes] > 0]
            node = nodes[np.argmin(table[expert, nodes])]  # the first of those that hold the expert least often
            table[expert, node] += 1
            free[node] -= 1
            cursor = int(node) + 1
    return table


def compact(replicas: IntArray, node_slots: IntArray) -> IntArray:
    """Replicas concatenated by expert id and cut into nodes: what a naive launcher does."""
    _check(replicas, node_slots)
    table = np.zeros((len(replicas), len(node_slots)), dtype=np.int64)
    experts = np.repeat(np.arange(len(replicas)), replicas)
    nodes = np.repeat(np.arange(len(node_slots)), node_slots)[: len(experts)]
    np.add.at(table, (experts, nodes), 1)
    return table


NODE_RULES: dict[str, Callable[[IntArray, IntArray], IntArray]] = {
    "mro": mro,
    "mro+": mro_plus,
    "spread": spread,
    "compact": compact,
}


def deal_to_ranks(table: IntArray, cluster: Cluster, load: IntArray | None = None) -> Placement:
    """Deal every node's replicas to its ranks, experts with most tokens per replica first, each to the rank that has
    least to do.

    Replicas of one expert go to different ranks where they can. Without loads all replicas weigh the same, which is
    round-robin by expert id.

    Args:
        table: int64 [E, nodes], at most `cluster.node_slots()` in each column.
        cluster: the ranks of each node, their slots and speeds.
        load: int64 [E] tokens of each expert, or None.
    """
    assert (table.sum(axis=0) <= cluster.node_slots()).all()
    held = np.zeros((len(table), cluster.num_ranks), dtype=np.int16)
    weight = np.full(len(table), ONE_TOKEN)
    if load is not None:  # a rank's time is at most the whole load at the fastest speed, and must fit into int64
        unit = max(1, min(ONE_TOKEN, (1 << 62) // max(1, int(load.sum()) * cluster.pace.fastest)))
        weight = load * unit // np.maximum(table.sum(axis=1), 1)
    order = np.argsort(-weight, kind="stable")
    nodes_of_size: dict[int, list[list[int]]] = {}
    dealt: list[tuple[IntArray, IntArray]] = []
    for ranks in cluster.ranks_by_node():
        nodes_of_size.setdefault(len(ranks), []).append(ranks)
    for nodes in nodes_of_size.values():
        ranks_MR = np.array(nodes)
        column = np.array(cluster.node_of)[ranks_MR[:, 0]]
        dealt += _deal_to_nodes(held, table[:, column], ranks_MR, cluster.slots_per_rank, order, weight, cluster.pace)
    experts_of, ranks_of = (np.concatenate(column) for column in zip(*dealt, strict=True))
    return Placement.of_pairs(Pairs.of_replicas(experts_of, ranks_of, (len(table), cluster.num_ranks)))


def _deal_to_nodes(
    held: NDArray[np.int16],
    table: IntArray,
    ranks_MR: IntArray,
    slots_per_rank: int,
    order: IntArray,
    weight: IntArray,
    pace: Pace,
) -> list[tuple[IntArray, IntArray]]:
    """Deal to M nodes of R ranks each at once: in every round, each node deals the next of its replicas; of each round,
    the experts and their ranks.

    Args:
        held: int16 [E, N], replicas so far, written to.
        table: int64 [E, M].
        ranks_MR: int64 [M, R], the nodes' ranks, ascending.
        slots_per_rank: room of each rank.
        order: int64 [E], experts in the order in which they are dealt.
        weight: int64 [E], what a replica of each adds to its rank's load.
        pace: of the ranks.
    """
    node, position = np.nonzero(table[order].T)
    experts = order[position]
    node, experts = (np.repeat(array, table[experts, node]) for array in (node, experts))
    turn = np.arange(len(node)) - np.searchsorted(node, node)
    used, times = np.zeros_like(ranks_MR), np.zeros_like(ranks_MR)
    dealt = []
    place = np.broadcast_to(np.arange(ranks_MR.shape[1]), ranks_MR.shape)
    for round_ in range(int(turn.max(initial=-1)) + 1):
        now = turn == round_
        dealing, expert = node[now], experts[now]
        full = used[dealing] >= slots_per_rank
        here = held[expert[:, None], ranks_MR[dealing]]
        first = np.lexsort((place[dealing], used[dealing], times[dealing], here, full), axis=1)[:, 0]
        rank = ranks_MR[dealing, first]
        held[expert, rank] += 1
        dealt.append((expert, rank))
        used[dealing, first] += 1
        times[dealing, first] += weight[expert] * pace.fastest // pace.speeds[rank]
    return dealt


def _check(replicas: IntArray, node_slots: IntArray) -> None:
    if (replicas < 1).any():
        raise ConfigurationError(f"every expert needs at least 1 replica, not {int(replicas.min())}")
    if replicas.sum() > node_slots.sum():
        raise ConfigurationError(f"{replicas.sum()} replicas do not fit {node_slots.sum()} slots: allocate fewer")


def _fill_vacancies(table: IntArray, replicas: IntArray, node_slots: IntArray, order: IntArray) -> None:
    """Free slots, nodes ascending, take the expert with most left-over replicas that is absent; ties to the idler."""
    left = replicas - table.sum(axis=1)
    for node in range(len(node_slots)):
        for _ in range(int(node_slots[node] - table[:, node].sum())):
            candidates = order[left[order] > 0]
            if not candidates.size:
                return
            absent = candidates[table[candidates, node] == 0]
            candidates = absent if absent.size else candidates
            expert = candidates[np.argmax(left[candidates])]
            table[expert, node] += 1
            left[expert] -= 1


def _vulnerability(table: IntArray) -> tuple[int, ...]:
    """Smaller is safer: fatal sets, or beyond MAX_SEARCH_NODES distinct supports, of 1, 2, ... nodes."""
    num_nodes = table.shape[1]
    if num_nodes <= MAX_SEARCH_NODES:
        return tuple(fatal_counts(fatal_sets(supports([table]), num_nodes)).tolist())
    sizes = np.unique(table > 0, axis=0).sum(axis=1)
    return tuple(np.bincount(sizes, minlength=num_nodes + 1).tolist())


def _climb(table: IntArray, node_slots: IntArray) -> IntArray:
    """Steepest descent over all swaps of two replicas, or of a replica and a free slot, on different nodes."""
    best, best_value = table, _vulnerability(table)
    while True:
        improved = False
        for candidates in _swaps(best, node_slots):
            masks = (candidates > 0) @ (np.int64(1) << np.arange(table.shape[1]))
            counts = fatal_counts(fatal_sets(masks, table.shape[1]))
            first = int(np.lexsort(counts.T[::-1])[0])
            value = tuple(counts[first].tolist())
            if value < best_value:
                step, best_value, improved = candidates[first], value, True
        if not improved:
            return best
        best = step


def _swaps(table: IntArray, node_slots: IntArray) -> Iterator[IntArray]:
    """Batches [M, E, N] of the tables that differ by one swap of expert x on node a with expert y on node b; y = E is
    a free slot. Of experts with the same replicas only the first moves, and the second in a swap with it."""
    num_experts, num_nodes = table.shape
    held = np.vstack([table, node_slots - table.sum(axis=0)])
    alike: dict[tuple[int, ...], list[int]] = {}
    for expert, row in enumerate(table.tolist()):
        alike.setdefault(tuple(row), []).append(expert)
    movers = [experts[0] for experts in alike.values()]
    partners = {x: [*sorted({*movers, *alike[tuple(table[x].tolist())][:2]} - {x}), num_experts] for x in movers}
    moves = [
        (x, a, y, b)
        for a in range(num_nodes)
        for b in range(num_nodes)
        for x in movers
        for y in (partners[x] if a < b else [num_experts])
        if a != b and held[x, a] and held[y, b]
    ]
    size = max(1, _BATCH_CELLS >> num_nodes)
    for start in range(0, len(moves), size):
        x, a, y, b = np.array(moves[start : start + size]).T
        index = np.arange(len(x))
        batch = np.repeat(held[None], len(x), axis=0)
        batch[index, x, a] -= 1
        batch[index, y, b] -= 1
        batch[index, x, b] += 1
        batch[index, y, a] += 1
        yield batch[:, :num_experts]
