"""Migration: the cheapest mapping of planned to present nodes, and the states to move.

A plan names nodes arbitrarily, so it is first renamed to fit the present placement, by one mapping for all layers (an
assignment problem): separate mappings would move a little less and make the layers' fatal node sets unrelated
(Lazarus 4.3).

Shapes: L layers, E experts, N ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.balancing.cluster import Cluster
from moe_lightning.dispatch.placement import Placement

_FAR = np.iinfo(np.int64).max


def optimal_assignment(cost: IntArray) -> IntArray:
    """int64 [n]: the column of each row, at the least total cost, for int64 costs [n, n].

    Rows take columns at which they are cheapest, the lowest first, as long as there are any; the others are assigned by
    shortest augmenting paths with row and column prices (Jonker and Volgenant), O(n^3), vectorised over columns.
    Integer costs keep it exact.
    """
    n = len(cost)
    row_price = cost.min(axis=1)
    reduced = cost - row_price[:, None]
    column_price = reduced.min(axis=0)
    cheapest = reduced == column_price
    row_of, column_of = np.full(n, -1), np.full(n, -1)
    for row in range(n):
        (free,) = (cheapest[row] & (row_of < 0)).nonzero()
        if free.size:
            column_of[row], row_of[free[0]] = free[0], row
    for row in np.flatnonzero(column_of < 0).tolist():
        _augment(cost, row, row_price, column_price, row_of, column_of)
    return column_of


def _augment(
    cost: IntArray, root: int, row_price: IntArray, column_price: IntArray, row_of: IntArray, column_of: IntArray
) -> None:
    """Assign one more row along the path that raises the cost least; changes all but the cost."""
    distance = cost[root] - row_price[root] - column_price
    open_distance, before = distance.copy(), np.full(len(cost), root)
    visited = []
    while True:
        column = int(open_distance.argmin())
        length = distance[column]
        if row_of[column] < 0:
            break
        visited.append(column)
        open_distance[column] = _FAR
        row = row_of[column]
        through = cost[row] - column_price
        through += length - row_price[row]
        (closer,) = (through < distance).nonzero()  # no column that was visited is
        distance[closer] = open_distance[closer] = through[closer]
        before[closer] = row
    row_price[root] += length
    row_price[row_of[visited]] += length - distance[visited]
    column_price[visited] -= length - distance[visited]
    while True:  # flip the path back to the root
        row = before[column]
        row_of[column], column_of[row], column = row, column, column_of[row]
        if row == root:
            return


_BLOCK_CELLS = 1 << 11
"""(layer, expert) cells that are compared at once: 4 MiB a side on 512 nodes."""

_MAX_COMPARED_NODES = 8
"""Comparing the ranks of all pairs of nodes takes an assignment for each pair."""


@dataclass(frozen=True, kw_only=True, order=True)
class Transfer:
    """One expert's whole state, from one rank to another."""

    layer: int
    expert: int
    source: int
    target: int


def migration_s(transfers: Sequence[Transfer], state_bytes: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Return the seconds of one exchange: the busiest rank's sends or receives, both directions at once."""
    if not transfers:
        return 0.0
    sends, receives = Counter(way.source for way in transfers), Counter(way.target for way in transfers)
    return latency_s + max(*sends.values(), *receives.values()) * state_bytes / bytes_per_s


def held_states(placements: Sequence[Placement]) -> BoolArray:
    """bool [L, E, N]: which rank holds the state of which expert under these placements."""
    pairs = [placement.pairs for placement in placements]
    held = np.zeros((len(pairs), *pairs[0].shape), dtype=np.bool_)
    for layer, own in zip(held, pairs, strict=True):
        layer[own.experts, own.ranks] = True
    return held


@dataclass(frozen=True, kw_only=True, eq=False)
class _States:
    """States that ranks hold, or need, as a list.

    Attributes:
        cells: int64 [S], layer * E + expert, ascending.
        places: int64 [S], the rank or node of each.
        num_cells, num_places: how many there are.
    """

    cells: IntArray
    places: IntArray
    num_cells: int
    num_places: int

    @classmethod
    def of(cls, held: BoolArray | Sequence[Placement]) -> _States:
        """Build from bool [L, E, N], or from placements, one for each layer."""
        if isinstance(held, np.ndarray):
            num_layers, num_experts, num_ranks = held.shape
            cells, ranks = np.divmod(np.flatnonzero(held), num_ranks)
        else:
            num_layers, (num_experts, num_ranks) = len(held), held[0].pairs.shape
            cells = np.concatenate([p.pairs.experts + layer * num_experts for layer, p in enumerate(held)])
            ranks = np.concatenate([p.pairs.ranks for p in held])
        return cls(cells=cells, places=ranks, num_cells=num_layers * num_experts, num_places=num_ranks)

    def by_node(self, cluster: Cluster) -> _States:
        """Return the same by nodes instead of ranks; a state on several ranks of a node counts once."""
        nodes = cluster.num_nodes
        keys = np.unique(self.cells * nodes + np.array(cluster.node_of)[self.places])
        return _States(cells=keys // nodes, places=keys % nodes, num_cells=self.num_cells, num_places=nodes)

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        """float32 [cells, places] of 0 and 1, the cells of all blocks one after the other."""
        starts = np.arange(0, self.num_cells, _BLOCK_CELLS)
        bounds = np.searchsorted(self.cells, [*starts, self.num_cells]).tolist()
        for start, first, last in zip(starts.tolist(), bounds, bounds[1:], strict=False):
            block = np.zeros((min(_BLOCK_CELLS, self.num_cells - start), self.num_places), dtype=np.float32)
            block[self.cells[first:last] - start, self.places[first:last]] = 1
            yield block


def align_placements(
    held: BoolArray | Sequence[Placement],
    planned: Sequence[Placement],
    cluster: Cluster,
    assign: Callable[[IntArray], IntArray] = optimal_assignment,
) -> list[Placement]:
    """Rename the planned nodes, and the ranks within each, so that few states have to move.

    The cost of letting node p become planned node q is the number of (layer, expert) states that q needs and p lacks; a
    second replica on a node costs nothing. Of mappings that move as little between nodes, it is one that moves least
    between ranks, on up to `_MAX_COMPARED_NODES` nodes. Nodes only become planned nodes with as many
    ranks.

    Args:
        held: what the ranks of the new world hold now: bool [L, E, N], all false for a rank that has just joined, or
            one placement per layer.
        planned: one placement per layer.
        cluster: nodes of the ranks.
        assign: see `optimal_assignment`; another one compares no ranks.
    """
    have, need = _States.of(held), _States.of(planned)
    ranks = cluster.ranks_by_node()
    size = np.array([len(group) for group in ranks])
    too_much = need.num_cells * cluster.num_ranks + 1  # more than all states
    cost = _missing(have.by_node(cluster), need.by_node(cluster))
    if assign is optimal_assignment and size.max() > 1 and 1 < len(ranks) <= _MAX_COMPARED_NODES:
        # Between nodes first: a rank's need counts less than any state that changes its node.
        cost = cost * too_much + _missing_within(_missing(have, need), ranks)
    cost[size[:, None] != size[None, :]] = (int(cost.max()) + 1) * len(ranks)  # more than any whole assignment
    planned_node = assign(cost)
    kept = _replicas_staying(have, need, cluster, planned_node)
    needs = np.bincount(need.places, minlength=cluster.num_ranks)
    planned_rank = np.empty(cluster.num_ranks, dtype=np.int64)
    for node, mine in enumerate(ranks):
        theirs = np.array(ranks[planned_node[node]])
        assert len(mine) == len(theirs)
        planned_rank[mine] = theirs[assign(needs[theirs] - kept[node, : len(mine), : len(mine)])]
    return [placement.renamed(planned_rank) for placement in planned]


def _replicas_staying(have: _States, need: _States, cluster: Cluster, planned_node: IntArray) -> IntArray:
    """int64 [nodes, R, R]: states that the i-th rank of each node holds and the j-th of its planned node needs, in
    nodes of up to R ranks."""
    num_nodes, node_of = cluster.num_nodes, np.array(cluster.node_of)
    becomes = np.argsort(planned_node)  # the node that becomes each planned one
    position = np.empty(cluster.num_ranks, dtype=np.int64)
    for group in cluster.ranks_by_node():
        position[group] = np.arange(len(group))
    width = int(position.max()) + 1
    mine = have.cells * num_nodes + node_of[have.places]
    theirs = need.cells * num_nodes + becomes[node_of[need.places]]
    order = np.argsort(mine, kind="stable")
    mine = mine[order]
    first, last = (np.searchsorted(mine, theirs, side=side) for side in ("left", "right"))
    matches = last - first  # ranks of the node that hold what a planned rank needs
    needed = np.repeat(np.arange(len(theirs)), matches)
    holding = order[np.arange(len(needed)) - np.repeat(np.cumsum(matches) - matches - first, matches)]
    node = node_of[have.places[holding]]
    flat = (node * width + position[have.places[holding]]) * width + position[need.places[needed]]
    return np.bincount(flat, minlength=num_nodes * width * width).reshape(num_nodes, width, width)


def _missing_within(missing: IntArray, ranks: Sequence[Sequence[int]]) -> IntArray:
    """int64 [nodes, nodes]: states that the ranks of node p lack when they become those of planned node q, at best; 0
    for nodes of different sizes. From int64 [N, N], the same of ranks."""
    cost = np.zeros((len(ranks), len(ranks)), dtype=np.int64)
    for (p, mine), (q, theirs) in product(enumerate(ranks), enumerate(ranks)):
        if len(mine) == len(theirs):
            between = missing[np.ix_(mine, theirs)]
            cost[p, q] = between[np.arange(len(mine)), optimal_assignment(between)].sum()
    return cost


def _missing(have: _States, need: _States) -> IntArray:
    common = np.zeros((have.num_places, need.num_places), dtype=np.int64)
    for mine, theirs in zip(have.blocks(), need.blocks(), strict=True):
        common += (mine.T @ theirs).astype(np.int64)  # exact: counts of a block, and floats use the fast path
    missing: IntArray = np.bincount(need.places, minlength=need.num_places) - common
    return missing


def plan_migration(
    held: BoolArray, planned: Sequence[Placement], nodes: Sequence[Hashable] | None = None
) -> list[Transfer]:
    """Choose a source for every state that a rank needs and lacks, so that few cross nodes and sends are even.

    Experts with fewest owners choose first; the source is an owner on the target's node where there is one, of those
    the one with fewest sends so far, ties to the lowest rank. Every rank computes the same schedule from the same
    `held`.

    Args:
        held: bool [L, E, N], what live ranks hold.
        planned: one placement per layer, already aligned.
        nodes: of each rank; None: every rank is as far from every other.
    """
    if not planned:
        return []
    needed = held_states(planned)
    owners = held.sum(axis=2)
    wanted = np.argwhere(needed & ~held)
    wanted = wanted[np.argsort(owners[wanted[:, 0], wanted[:, 1]], kind="stable")]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes or range(held.shape[2])))}
    node_of = np.array([numbers[node] for node in nodes or range(held.shape[2])])
    sends = np.zeros(held.shape[2], dtype=np.int64)
    transfers: list[Transfer] = []
    for layer, expert, target in wanted.tolist():
        sources = np.flatnonzero(held[layer, expert])
        if not sources.size:
            continue
        near = sources[node_of[sources] == node_of[target]]
        sources = near if near.size else sources
        source = int(sources[np.argmin(sends[sources])])
        sends[source] += 1
        transfers.append(Transfer(layer=layer, expert=expert, source=source, target=target))
    return transfers
