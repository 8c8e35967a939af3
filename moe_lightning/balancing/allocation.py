"""Allocation of replicas to experts: Lazarus' eq. 1, and water-filling, which loads the busiest replica less.

Both fill all slots, give every expert at least `min_replicas` and never give a busier expert fewer replicas than an
idler one. Eq. 1 rounds down in ascending order of load, so all of its rounding goes to the hottest experts;
water-filling gives one replica at a time to the expert with most tokens per replica and is optimal for that measure
(Lazarus 4.1).
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from moe_lightning.arrays import IntArray
from moe_lightning.errors import ConfigurationError

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
        ConfigurationError: fewer slots than experts, a negative load, an unknown policy, or limits that contradict each
            other.
    """
    if policy not in get_args(AllocationPolicy):
        raise ConfigurationError(
            f"allocation policy {policy!r} is unknown: use one of {list(get_args(AllocationPolicy))}"
        )
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
