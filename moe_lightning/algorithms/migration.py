"""From the states that ranks hold to a planned placement: who becomes which planned node, who sends what to whom.

A plan names nodes arbitrarily, so it is first renamed to fit what the nodes already hold, by one mapping for all
layers: separate mappings would move a little less and make the layers' fatal node sets unrelated (Lazarus 4.3).

Shapes: L layers, E experts, N ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moe_lightning.algorithms.assignment import greedy_assignment, optimal_assignment
from moe_lightning.algorithms.cluster import Cluster
from moe_lightning.algorithms.placement import IntArray, Placement
from moe_lightning.errors import ConfigurationError

MappingMethod = Literal["optimal", "greedy", "none"]

_MAX_COMPARED_NODES = 8
"""Comparing the ranks of all pairs of nodes takes an assignment for each pair."""

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, order=True)
class Transfer:
    """One expert's whole state, from one rank to another."""

    layer: int
    expert: int
    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class Migration:
    """What must move before a plan can be used.

    Attributes:
        transfers: between live ranks.
        lost: (layer, expert) that no live rank holds; their state must come from a checkpoint.
        num_ranks: ranks of the world.
    """

    transfers: tuple[Transfer, ...]
    lost: tuple[tuple[int, int], ...]
    num_ranks: int

    def sends(self) -> IntArray:
        """int64 [N]: states that each rank sends."""
        sources = np.array([transfer.source for transfer in self.transfers], dtype=np.int64)
        return np.bincount(sources, minlength=self.num_ranks).astype(np.int64)

    def receives(self) -> IntArray:
        """int64 [N]: states that each rank receives."""
        targets = np.array([transfer.target for transfer in self.transfers], dtype=np.int64)
        return np.bincount(targets, minlength=self.num_ranks).astype(np.int64)

    def predicted_s(self, state_bytes: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
        """Seconds for one exchange: the busiest rank's sends or receives, both directions at once."""
        if not self.transfers:
            return 0.0
        return latency_s + max(int(self.sends().max()), int(self.receives().max())) * state_bytes / bytes_per_s


def held_states(placements: Sequence[Placement]) -> BoolArray:
    """bool [L, E, N]: which rank holds the state of which expert under these placements."""
    return np.stack([placement.replicas > 0 for placement in placements])


def align_placements(
    held: BoolArray, planned: Sequence[Placement], cluster: Cluster, method: MappingMethod = "optimal"
) -> list[Placement]:
    """Rename the planned nodes, and the ranks within each, so that few states have to move.

    The cost of letting node p become planned node q is the number of (layer, expert) states that q needs and p lacks; a
    second replica on a node costs nothing. Of mappings that move as little between nodes, the optimal method takes one
    that moves least between ranks, on up to `_MAX_COMPARED_NODES` nodes. Nodes only become planned nodes with as many
    ranks.

    Args:
        held: bool [L, E, N], what the ranks of the new world hold now; all false for a rank that has just joined.
        planned: one placement per layer.
        cluster: nodes of the ranks.
        method: "optimal" (assignment problem), "greedy" (Lazarus: cheapest pair first) or "none".

    Raises:
        ConfigurationError: an unknown method, or shapes that do not fit each other.
    """
    if method not in get_args(MappingMethod):
        raise ConfigurationError(f"mapping method {method!r} is unknown: use one of {list(get_args(MappingMethod))}")
    needed = held_states(planned)
    if held.shape != needed.shape or held.shape[2] != cluster.num_ranks:
        raise ConfigurationError(
            f"held states {held.shape} and planned states {needed.shape} (layers, experts, ranks) do not fit "
            f"{cluster.num_ranks} ranks: build them for the same world"
        )
    if method == "none":
        return list(planned)
    assign = optimal_assignment if method == "optimal" else greedy_assignment
    ranks = [cluster.ranks_of(node) for node in range(cluster.num_nodes)]
    held_by_node = np.stack([held[..., list(group)].any(axis=2) for group in ranks], axis=2)
    needed_by_node = np.stack([needed[..., list(group)].any(axis=2) for group in ranks], axis=2)
    cost = missing_states(held_by_node, needed_by_node)
    size = np.array([len(group) for group in ranks])
    if method == "optimal" and size.max() > 1 and 1 < len(ranks) <= _MAX_COMPARED_NODES:
        # Between nodes first: a rank's need counts less than any state that changes its node.
        cost = cost * (needed.size + 1) + _missing_within(held, needed, ranks)
    cost[size[:, None] != size[None, :]] = (needed.size + 1) ** 2
    planned_rank = np.empty(cluster.num_ranks, dtype=np.int64)
    for node, planned_node in enumerate(assign(cost)):
        mine, theirs = list(ranks[node]), np.array(ranks[planned_node])
        assert len(mine) == len(theirs)
        planned_rank[mine] = theirs[assign(missing_states(held[..., mine], needed[..., theirs]))]
    return [Placement(replicas=placement.replicas[:, planned_rank]) for placement in planned]


def _missing_within(held: BoolArray, needed: BoolArray, ranks: Sequence[tuple[int, ...]]) -> IntArray:
    """int64 [nodes, nodes]: states that the ranks of node p lack when they become those of planned node q, at best; 0
    for nodes of different sizes."""
    missing = missing_states(held, needed)
    cost = np.zeros((len(ranks), len(ranks)), dtype=np.int64)
    for (p, mine), (q, theirs) in product(enumerate(ranks), enumerate(ranks)):
        if len(mine) == len(theirs):
            between = missing[np.ix_(mine, theirs)]
            cost[p, q] = between[np.arange(len(mine)), optimal_assignment(between)].sum()
    return cost


def missing_states(held: BoolArray, needed: BoolArray) -> IntArray:
    """int64 [P, Q]: states that planned holder q needs and present holder p lacks, from [L, E, P] and [L, E, Q]."""
    lacks = (~held).reshape(-1, held.shape[2]).astype(np.float64)
    wants = needed.reshape(-1, needed.shape[2]).astype(np.float64)
    return (lacks.T @ wants).astype(np.int64)  # exact: counts are far below 2^53, and float products use the fast path


def plan_migration(held: BoolArray, planned: Sequence[Placement], nodes: Sequence[Hashable] | None = None) -> Migration:
    """Choose a source for every state that a rank needs and lacks, so that few cross nodes and sends are even.

    Experts with fewest owners choose first; the source is an owner on the target's node where there is one, of those
    the one with fewest sends so far, ties to the lowest rank. Every rank computes the same schedule from the same
    `held`.

    Args:
        held: bool [L, E, N], what live ranks hold.
        planned: one placement per layer, already aligned.
        nodes: of each rank; None: every rank is as far from every other.
    """
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
    lost = tuple((int(layer), int(expert)) for layer, expert in np.argwhere(owners == 0))
    return Migration(transfers=tuple(transfers), lost=lost, num_ranks=held.shape[2])
