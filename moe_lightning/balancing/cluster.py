"""Shape of a world of ranks for planning (nodes, expert slots, speeds), and the field's measures of balance."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_lightning.arrays import IntArray, Pairs
from moe_lightning.dispatch.quota import Pace
from moe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks, their nodes (failure domains), their slots and their speeds.

    Attributes:
        node_of: node of each rank, [N]; nodes are numbered 0..max without gaps, and may have different numbers of
            ranks.
        slots_per_rank: resident experts that every rank has room for.
        speeds: of each rank, [N], see `dispatch.quota`; None: all are equally fast.

    Raises:
        ConfigurationError: no ranks, a gap in the node numbers, fewer than one slot, or speeds of other ranks.
    """

    node_of: tuple[int, ...]
    slots_per_rank: int
    speeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.node_of:
            raise ConfigurationError("a cluster of 0 ranks holds no experts: give at least 1 rank")
        if set(self.node_of) != set(range(max(self.node_of) + 1)):
            raise ConfigurationError(
                f"node numbers {sorted(set(self.node_of))} have gaps: number the nodes 0, 1, 2, ..."
            )
        if self.slots_per_rank < 1:
            raise ConfigurationError(f"slots_per_rank={self.slots_per_rank} leaves no room for experts: use at least 1")
        Pace.of(None if self.speeds is None else np.array(self.speeds), self.num_ranks)  # refuses those of other ranks

    @classmethod
    def of(cls, num_ranks: int, slots_per_rank: int, ranks_per_node: int = 1) -> Cluster:
        """Consecutive ranks share a node; the last node may have fewer."""
        if ranks_per_node < 1:
            raise ConfigurationError(f"ranks_per_node={ranks_per_node} is not a node: use at least 1")
        return cls(node_of=tuple(n // ranks_per_node for n in range(num_ranks)), slots_per_rank=slots_per_rank)

    @cached_property
    def pace(self) -> Pace:
        """Throughput of the ranks, for loads and times."""
        return Pace.of(None if self.speeds is None else np.array(self.speeds), self.num_ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.node_of)

    @cached_property
    def num_nodes(self) -> int:
        return max(self.node_of) + 1

    @property
    def num_slots(self) -> int:
        return self.num_ranks * self.slots_per_rank

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The ranks of a node, ascending."""
        return tuple(rank for rank, home in enumerate(self.node_of) if home == node)

    def ranks_by_node(self) -> list[list[int]]:
        """The ranks of every node, ascending."""
        ranks: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for rank, node in enumerate(self.node_of):
            ranks[node].append(rank)
        return ranks

    def ranks_across_nodes(self) -> list[int]:
        """All ranks: the first of every node, then the second of every node, and so on."""
        return [rank for row in itertools.zip_longest(*self.ranks_by_node()) for rank in row if rank is not None]

    def missing_nodes(self, held: Pairs, wanted: int) -> int:
        """Distinct nodes that are missing, over all experts, until each is on `wanted` of them."""
        holds = np.zeros((held.shape[0], self.num_nodes), dtype=np.bool_)
        holds[held.experts, np.array(self.node_of)[held.ranks]] = True
        return int(np.maximum(wanted - holds.sum(axis=1), 0).sum())

    def node_slots(self) -> IntArray:
        """int64 [nodes]: slots of all ranks of each node together."""
        return np.bincount(self.node_of, minlength=self.num_nodes).astype(np.int64) * self.slots_per_rank

    def by_node(self, per_rank: IntArray) -> IntArray:
        """Sum the last axis from ranks to nodes: int64 [..., N] -> int64 [..., nodes]."""
        order = np.argsort(self.node_of, kind="stable")
        starts = np.searchsorted(np.array(self.node_of)[order], np.arange(self.num_nodes))  # every node has a rank
        per_node: IntArray = np.add.reduceat(per_rank[..., order], starts, axis=-1, dtype=np.int64)
        return per_node


def imbalance(rows: IntArray, speeds: IntArray | None = None) -> float:
    """Busiest rank over mean, 1 is perfect; rows are int64 [N]. Without any rows: 1.

    With speeds, int64 [N]: the longest time over that of a perfect division.
    """
    total, pace = int(rows.sum()), Pace.of(speeds, len(rows))
    return float(pace.times(rows).max()) * pace.total / (total * pace.fastest) if total else 1.0


def balance_ratio(before: IntArray, after: IntArray) -> float:
    """RB: standard deviation of the ranks' rows before balancing over that after it (Pro-Prophet VI).

    Infinite where the division after is perfect and the one before was not, 1 where both are.
    """
    spread_before, spread_after = float(np.std(before)), float(np.std(after))
    if spread_after == 0:
        return float("inf") if spread_before > 0 else 1.0
    return spread_before / spread_after
