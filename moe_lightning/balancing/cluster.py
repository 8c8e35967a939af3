"""Shape of a cluster, number of replicas of each expert, and the measures of balance.

The shape is nodes, expert slots and speeds of ranks. Replicas are allocated by Lazarus' eq. 1 or by water-filling. Both
fill all slots, give every expert at least `min_replicas` and never give a busier expert fewer replicas than an
idler one. Eq. 1 rounds down in ascending order of load, so all of its rounding goes to the hottest experts;
water-filling gives one replica at a time to the expert with most tokens per replica and is optimal for that measure
(Lazarus 4.1).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

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
    """

    node_of: tuple[int, ...]
    slots_per_rank: int
    speeds: tuple[int, ...] | None = None

    @classmethod
    def of(cls, num_ranks: int, slots_per_rank: int, ranks_per_node: int = 1) -> Cluster:
        """Consecutive ranks share a node; the last node may have fewer."""
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


AllocationPolicy = Literal["eq1", "waterfill"]

_LOAD_BITS = 42


def allocate_replicas(
    load: IntArray,
    *,
    slots: int,
    num_nodes: int,
    min_replicas: int = 2,
    policy: AllocationPolicy = "waterfill",
    max_replicas: int | None = None,
) -> IntArray:
    """Replicas of each expert of one layer.

    Args:
        load: int64 [E], tokens of each expert since the last rebalance; all zeros means unknown, which is treated as
            equal.
        slots: room for replicas in the whole cluster.
        num_nodes: failure domains; no expert is promised more than this many distinct ones.
        min_replicas: fault-tolerance threshold f; lowered to what the slots allow (see `affordable_replicas`).
        policy: "waterfill" or "eq1".
        max_replicas: most replicas of one expert, for callers that hold at most one per rank ("waterfill" only).

    Returns:
        int64 [E] that sums to `slots`, or to E * max_replicas where that is less.

    Raises:
        ConfigurationError: fewer slots than experts, a negative load, or limits that contradict each other.
    """
    if load.ndim != 1 or not load.size or (load < 0).any():
        raise ConfigurationError(f"loads must be non-negative token counts [experts], not {load.tolist()}")
    if max_replicas is not None and policy == "eq1":
        raise ConfigurationError('max_replicas has no meaning in eq. 1: use policy="waterfill"')
    floor = affordable_replicas(len(load), slots=slots, num_nodes=num_nodes, min_replicas=min_replicas)
    if max_replicas is not None and max_replicas < floor:
        raise ConfigurationError(f"max_replicas={max_replicas} is below the {floor} replicas that each expert needs")
    if policy == "eq1":
        return _proportional(load, slots, floor)
    return _water_filling(load, slots, floor, slots if max_replicas is None else max_replicas)


def bounded_loads(loads: IntArray) -> IntArray:
    """Return loads int64 [..., E] in a larger unit where those of a layer might sum to 2^42 or more.

    Only ratios of loads matter to placements, and below that bound their products with speeds and fixed-point units
    stay inside int64. A load above 0 stays above 0.
    """
    bits = int(loads.max(initial=0)).bit_length() + loads.shape[-1].bit_length()
    bounded: IntArray = -(-loads >> max(0, bits - _LOAD_BITS))
    return bounded


def affordable_replicas(num_experts: int, *, slots: int, num_nodes: int, min_replicas: int) -> int:
    """The fault-tolerance threshold that the slots allow: at least 1, at most min_replicas and one per node.

    Raises:
        ConfigurationError: fewer slots than experts, or min_replicas below 1.
    """
    if min_replicas < 1:
        raise ConfigurationError(f"min_replicas={min_replicas} would lose experts: use at least 1")
    if slots < num_experts:
        raise ConfigurationError(
            f"{slots} slots cannot hold {num_experts} experts: add ranks or slots, or restore elsewhere"
        )
    return min(min_replicas, slots // num_experts, num_nodes)


def nodes_for_each(num_experts: int, *, node_slots: IntArray, min_replicas: int) -> int:
    """The most distinct nodes, up to min_replicas, on which every expert can have a replica at once; 0 where not even
    one fits.

    Exact for nodes of any sizes: a node holds at most min(slots, E) different experts, and f of E such rows fit if
    their sum does (Gale and Ryser).

    Args:
        num_experts: E.
        node_slots: int64 [nodes].
        min_replicas: what is asked for.
    """
    return min(min_replicas, int(np.minimum(node_slots, num_experts).sum()) // num_experts)


def _proportional(load: IntArray, slots: int, floor: int) -> IntArray:
    """Eq. 1, ascending by load: a share of the remaining slots as of the remaining tokens, but at least floor."""
    replicas = np.zeros(len(load), dtype=np.int64)
    order = np.lexsort((np.arange(len(load)), load))
    remaining, suffix = slots, int(load.sum())
    for position, expert in enumerate(order):
        tokens = int(load[expert])
        share = tokens * remaining // suffix if suffix else remaining // (len(load) - position)
        replicas[expert] = max(share, floor)
        remaining -= int(replicas[expert])
        suffix -= tokens
    assert remaining == 0
    return replicas


def _water_filling(load: IntArray, slots: int, floor: int, cap: int) -> IntArray:
    """One replica at a time to the expert with most tokens per replica; ties to fewer replicas, then the lower id.

    An expert with r replicas asks for one more at the price t / r: the highest prices of all experts are met, wherever
    their replicas come in the sequence.
    """
    replicas = np.full(len(load), floor, dtype=np.int64)
    wanted = min(slots, cap * len(load)) - floor * len(load)
    if not wanted:
        return replicas
    if not load.any():
        load = np.ones_like(load)
    most = np.full(len(load), min(cap, floor + wanted))  # replicas that each expert may ask for
    price, cheapest = int(load.sum()) / slots, int(load[load > 0].min()) / slots
    while price > cheapest / 2:  # where experts without tokens are needed, everybody asks
        affordable = np.clip(np.minimum(load / price, most).astype(np.int64) + 1, floor, most)
        if int(affordable.sum()) - floor * len(load) >= wanted:
            most = affordable
            break
        price /= 2
    asking = most - floor
    experts = np.repeat(np.arange(len(load)), asking)
    counts = floor + np.arange(len(experts)) - np.repeat(np.cumsum(asking) - asking, asking)
    first = np.lexsort((experts, counts, -load[experts] / counts))[:wanted]
    return replicas + np.bincount(experts[first], minlength=len(load))
