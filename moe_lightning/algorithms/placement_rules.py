"""The rules that place one layer's experts by their loads, by name.

Shapes: E experts, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moe_lightning.algorithms.allocation import AllocationPolicy, allocate_replicas
from moe_lightning.algorithms.cluster import Cluster
from moe_lightning.algorithms.packing import packed_placement
from moe_lightning.algorithms.replica_placement import NODE_RULES, deal_to_ranks
from moe_lightning.arrays import IntArray
from moe_lightning.dispatch.placement import Placement, uniform_placement
from moe_lightning.errors import ConfigurationError
from moe_lightning.registry import Registry


class PlacementRule(Protocol):
    """Places a layer's experts. Every rank calls it for itself, so it must return the same on all of them: integers
    decide, not floating-point sums, random numbers or the time."""

    def __call__(self, load: IntArray, cluster: Cluster, min_replicas: int, /) -> Placement:
        """Replicas of every expert.

        Args:
            load: int64 [E], tokens of each expert; all zeros means unknown.
            cluster: ranks, nodes, slots, speeds; no rank may hold more experts than it has slots.
            min_replicas: distinct nodes for each expert, where slots allow.
        """


@dataclass(frozen=True, kw_only=True)
class NodeRule:
    """A `PlacementRule` in three steps: replicas are counted, placed on nodes, and dealt to the nodes' ranks.

    Attributes:
        table: from replicas int64 [E] and the slots of each node int64 [M] to a table int64 [E, M].
        allocation: how replicas are counted.
    """

    table: Callable[[IntArray, IntArray], IntArray]
    allocation: AllocationPolicy = "waterfill"

    def __call__(self, load: IntArray, cluster: Cluster, min_replicas: int, /) -> Placement:
        replicas = allocate_replicas(
            load,
            slots=cluster.num_slots,
            num_nodes=cluster.num_nodes,
            min_replicas=min_replicas,
            policy=self.allocation,
        )
        return deal_to_ranks(self.table(replicas, cluster.node_slots()), cluster, load)


def plain_placement(load: IntArray, cluster: Cluster, min_replicas: int, /) -> Placement:
    """Every expert once, whatever its load.

    Raises:
        ConfigurationError: fewer slots than experts.
    """
    if cluster.num_slots < len(load):
        raise ConfigurationError(f"{cluster.num_slots} slots cannot hold {len(load)} experts: add ranks or slots")
    return uniform_placement(len(load), cluster.num_ranks)


PLACEMENT_RULES: Registry[PlacementRule] = Registry(
    "placement",
    PlacementRule,
    {
        "packed": packed_placement,
        **{name: NodeRule(table=table) for name, table in NODE_RULES.items()},
        "plain": plain_placement,
    },
)


def placed_by(rule: PlacementRule, load: IntArray, cluster: Cluster, min_replicas: int) -> Placement:
    """A layer's placement by a rule.

    Raises:
        ConfigurationError: the rule returns something else, or a placement that does not fit the cluster.
    """
    placement = rule(load, cluster, min_replicas)
    shape = (len(load), cluster.num_ranks)
    if not isinstance(placement, Placement) or placement.pairs.shape != shape:
        found = placement.pairs.shape if isinstance(placement, Placement) else f"a {type(placement).__name__}"
        raise ConfigurationError(
            f"the placement rule {_name(rule)} returned {found} where a Placement of {shape} (experts, ranks) is due: "
            "return Placement(replicas=table)"
        )
    held = np.bincount(placement.pairs.ranks, minlength=cluster.num_ranks)
    if held.max() > cluster.slots_per_rank:
        raise ConfigurationError(
            f"the placement rule {_name(rule)} put {held.max()} experts on rank {held.argmax()}, which has "
            f"{cluster.slots_per_rank} slots: place fewer there"
        )
    return placement


def _name(rule: object) -> str:
    return str(getattr(rule, "__qualname__", type(rule).__qualname__))
