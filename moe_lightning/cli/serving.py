"""Placements of experts for SGLang, planned from measured loads.

Format of the file (v0.5, `--init-expert-location FILE`): JSON of a mapping with `physical_to_logical_map` [layers,
slots of all ranks]. Its layers are all of the model, those without experts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_lightning.arrays import IntArray
from moe_lightning.balancing.cluster import Cluster, allocate_replicas, imbalance
from moe_lightning.balancing.replica_placement import deal_to_ranks
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import read_loads, read_routing_trace

_SHARES = 10**5
"""Telemetry writes shares with so many steps."""


@dataclass(frozen=True, kw_only=True)
class ServingPlacement:
    """Experts in the slots of a serving cluster.

    Attributes:
        slots_LP: int64 [layers, slots of all ranks], the expert of each; rank r has the r-th of equal parts.
        imbalance_before: busiest rank over mean of plain expert parallelism with as many ranks, mean of the layers.
        imbalance_after: the same of this placement, every replica with an equal share of its expert's tokens.
    """

    slots_LP: IntArray
    imbalance_before: float
    imbalance_after: float


def measured_counts(path: Path) -> IntArray:
    """Assignments of each expert, int64 [layers, experts], of a routing trace (.npz) or in proportion to an
    expert_load.csv.

    Raises:
        ConfigurationError: a file that is neither.
    """
    if path.suffix == ".npz":
        counts, _ = read_routing_trace(path)
        whole: IntArray = counts.sum(axis=(0, 2))
        return whole
    _, shares_LSE = read_loads(path)
    scaled: IntArray = np.rint(shares_LSE.sum(axis=1) * _SHARES).astype(np.int64)
    return scaled


def plan_serving(counts_LE: IntArray, num_ranks: int, slots_per_rank: int) -> ServingPlacement:
    """Replicas by water-filling, dealt so that ranks carry alike where engines split tokens equally over replicas.

    Raises:
        ConfigurationError: fewer slots than experts, or more slots of a rank than experts.
    """
    num_experts = counts_LE.shape[1]
    if num_ranks * slots_per_rank < num_experts:
        raise ConfigurationError(
            f"{num_ranks} ranks with {slots_per_rank} slots cannot hold {num_experts} experts: raise --ranks or --slots"
        )
    if slots_per_rank > num_experts:
        raise ConfigurationError(
            f"--slots={slots_per_rank} is more than the {num_experts} experts, and a second copy on a rank is of no "
            "use: lower it"
        )
    cluster = Cluster.of(num_ranks, slots_per_rank, ranks_per_node=num_ranks)
    slots, after, before = [], [], []
    for load_E in counts_LE:
        replicas_E = allocate_replicas(
            load_E, slots=cluster.num_slots, num_nodes=1, min_replicas=1, max_replicas=num_ranks
        )
        held_EN = deal_to_ranks(replicas_E[:, None], cluster, load_E).replicas
        slots.append(np.concatenate([np.repeat(np.arange(num_experts), held_N) for held_N in held_EN.T]))
        after.append(imbalance((load_E / held_EN.sum(axis=1)) @ held_EN))
        before.append(imbalance(np.array([part.sum() for part in np.array_split(load_E, num_ranks)])))
    return ServingPlacement(
        slots_LP=np.stack(slots),
        imbalance_before=float(np.mean(before)),
        imbalance_after=float(np.mean(after)),
    )


def form_of(plan: ServingPlacement, num_experts: int, dense_layers: Sequence[int] = ()) -> dict[str, list[list[int]]]:
    """Return the content of the engine's file.

    Args:
        num_experts: of a layer.
        dense_layers: places of the model's layers without experts: their rows are the plain placement.

    Raises:
        ConfigurationError: a place that the model does not have.
    """
    slots_LP = plan.slots_LP
    for place in sorted(set(dense_layers)):
        if not 0 <= place <= len(slots_LP):
            raise ConfigurationError(f"--dense-layers {place} is no place in a model of {len(slots_LP) + 1} layers")
        plain_P = np.arange(slots_LP.shape[1]) % num_experts
        slots_LP = np.insert(slots_LP, place, plain_P, axis=0)
    return {"physical_to_logical_map": slots_LP.tolist()}
