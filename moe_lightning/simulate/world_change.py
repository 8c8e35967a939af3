"""Cost of one change of the world: from the report of a lost node to a world whose ranks have all state.

All groups of a world are new, so its parts grow with the ranks, the axes and the communicators. Detection is
`Policy.detect_s`. Calibrated with processor times of this project on one core (`moe-bench members`, `moe-bench
planner`), and with published latencies of NCCL: the initialization of 8 ranks of a node (NVIDIA-NeMo/Automodel #3032)
and `ncclCommShrink` for 32 to 1,024 ranks (NVIDIA-NeMo/RL #3186), whose logarithmic trend is continued.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moe_lightning.simulate.mesh import MeshSpec
from moe_lightning.simulate.scenario import Scenario
from moe_lightning.text_table import table

_MEMBER_S = 42e-6  # of the rendezvous host for each member of a world that lost a node (4,096 of them)
_DECISION_S = 50e-6  # for each member, between two decisions of the host
_REQUEST_S = 36e-6  # of the host for each request of the store, relayed by a launcher
_GROUP_S = 11e-6  # of a rank for each group that it names and is not in (torch 2.13)
_REPAIR_S = 0.14  # of placements of 61 layers of 256 experts
_PLAN_S = 8.3e-5  # of the sources of their state, for each rank
_PLANNED_LAYERS, _PLANNED_EXPERTS = 61, 256
_WORLD_GROUPS = 3  # of all ranks of a world, and of each stage: dense sums, computations, background
_COMMUNICATORS = ((8, 0.51), (32, 1.35), (1024, 2.01))
"""Ranks and seconds; the second and third are those of the least squares line through the published ones."""


def communicator_s(ranks: int) -> float:
    """Return the seconds in which a communicator of so many ranks is made; 0 for one rank alone."""
    if ranks == 1:
        return 0.0
    logs, seconds = [math.log2(size) for size, _ in _COMMUNICATORS], [time for _, time in _COMMUNICATORS]
    beyond = max(0.0, math.log2(ranks) - logs[-1]) * (seconds[-1] - seconds[-2]) / (logs[-1] - logs[-2])
    return float(np.interp(math.log2(ranks), logs, seconds) + beyond)


@dataclass(frozen=True, kw_only=True)
class WorldGroups:
    """Groups of a world.

    Attributes:
        own: ranks of each group that a rank is in.
        named: groups that every rank names, its own and those of others.
    """

    own: tuple[int, ...]
    named: int


def world_groups(mesh: MeshSpec, ranks: int, ranks_per_node: int) -> WorldGroups:
    """Return the groups that `parallel.context.World.connect` builds.

    Raises:
        ConfigurationError: the axes do not divide the ranks.
    """
    mesh.shape(ranks)
    stage = ranks // mesh.pp
    own = [ranks] * _WORLD_GROUPS + [size for size in (mesh.pp, mesh.cp, mesh.tp) if size > 1]
    if mesh.pp > 1 and stage > 1:
        own += [stage] * _WORLD_GROUPS
    if mesh.dense in ("fsdp", "hsdp"):
        alike = stage // mesh.tp
        shard = mesh.weight_shards(ranks, ranks_per_node)
        own += [size for size in (shard, alike // shard) if 1 < size < stage]
    return WorldGroups(own=tuple(own), named=sum(ranks // size for size in own))


@dataclass(frozen=True, kw_only=True)
class WorldChange:
    """One change of a world.

    Attributes:
        ranks: of the new world.
        groups: of it.
        requests: to the store of the world, of all ranks.
        membership_s: of the rendezvous host, until all know the world.
        store_s: of the host for the requests.
        groups_s: of a rank, for naming the groups.
        communicators_s: of a rank's communicators, one after another.
        plans_s: of placements and sources of state.
        transfer_s: of the experts of the lost node, to the ranks that take their places.
    """

    ranks: int
    groups: WorldGroups
    requests: int
    membership_s: float
    store_s: float
    groups_s: float
    communicators_s: float
    plans_s: float
    transfer_s: float

    @property
    def total_s(self) -> float:
        """All of it, in turn."""
        parts = (self.membership_s, self.store_s, self.groups_s, self.communicators_s, self.plans_s, self.transfer_s)
        return sum(parts)


def world_change(scenario: Scenario, ranks: int) -> WorldChange:
    """Return the cost of a change to a world of so many ranks, on the mesh and machines of a scenario.

    Raises:
        ConfigurationError: the axes do not divide the ranks.
    """
    work, hardware, mesh = scenario.workload, scenario.hardware, scenario.mesh
    groups = world_groups(mesh, ranks, hardware.ranks_per_node)
    requests = ranks * (2 + len(groups.own))  # a barrier, then the address of each communicator
    planned = work.num_layers * work.num_experts / (_PLANNED_LAYERS * _PLANNED_EXPERTS)
    return WorldChange(
        ranks=ranks,
        groups=groups,
        requests=requests,
        membership_s=(_MEMBER_S + _DECISION_S) * ranks,
        store_s=_REQUEST_S * requests,
        groups_s=_GROUP_S * groups.named,
        communicators_s=sum(map(communicator_s, groups.own)),
        plans_s=planned * _REPAIR_S + work.num_layers / _PLANNED_LAYERS * _PLAN_S * ranks,
        transfer_s=_transfer_s(scenario, ranks),
    )


def _transfer_s(scenario: Scenario, ranks: int) -> float:
    """Seconds in which the experts of one node reach other ranks, evenly, by a link of each."""
    work, policy, hardware = scenario.workload, scenario.policy, scenario.hardware
    least = math.ceil(policy.min_replicas * work.num_experts / (ranks // scenario.mesh.pp))
    layers = math.ceil(work.num_layers / scenario.mesh.pp)
    lost = hardware.ranks_per_node * (policy.slots or least) * layers
    received = math.ceil(lost / max(1, ranks // scenario.mesh.pp))
    return received * work.expert_state_bytes / hardware.link_bytes_per_s + hardware.latency_s


def world_changes(scenario: Scenario, sizes: Iterable[int]) -> str:
    """Return the costs of changes to worlds of these sizes as a table."""
    headers = (
        *("world of", "groups of a rank", "named", "store requests", "membership s", "store s", "naming s"),
        *("communicators s", "plans s", "transfer s", "in all s"),
    )
    found = [world_change(scenario, ranks) for ranks in sizes]
    return table(
        headers,
        [
            (
                f"{change.ranks:,}",
                len(change.groups.own),
                f"{change.groups.named:,}",
                f"{change.requests:,}",
                f"{change.membership_s:.2f}",
                f"{change.store_s:.2f}",
                f"{change.groups_s:.3f}",
                f"{change.communicators_s:.1f}",
                f"{change.plans_s:.2f}",
                f"{change.transfer_s:.2f}",
                f"{change.total_s:.1f}",
            )
            for change in found
        ],
    )
