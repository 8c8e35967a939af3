"""Cost of one change of the world: from the report of a lost node to a world whose ranks have all state.

All groups of a world are new, so its parts grow with the ranks, the axes and the communicators. Detection is
`Policy.detect_s`. Calibrated with processor times of this project on one core (`moe-bench members`, `moe-bench
planner`), and with published latencies of NCCL: the initialization of 8 ranks of a node (NVIDIA-NeMo/Automodel #3032)
and `ncclCommShrink` for 32 to 1,024 ranks (NVIDIA-NeMo/RL #3186), whose logarithmic trend is continued.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def world_groups(mesh: MeshSpec, ranks: int, ranks_per_node: int) -> list[int]:
    """Return the sizes of the groups of a rank that `parallel.context.World.connect` builds.

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
    return own


def named_groups(own: Sequence[int], ranks: int) -> int:
    """Return the number of groups that every rank names: its own and, of the same sizes, those of others."""
    return sum(ranks // size for size in own)


def store_requests(own: Sequence[int], ranks: int) -> int:
    """Return the requests of all ranks to the store of a world: a barrier, then the address of each communicator."""
    return ranks * (2 + len(own))


def world_change_s(scenario: Scenario, ranks: int) -> dict[str, float]:
    """Return the seconds of each part of a change to a world of so many ranks, on the mesh and machines of a scenario.

    The parts follow one another: the host announces the world (membership) and serves its store, ranks name the
    groups and make their communicators one after another, placements and sources of state are planned, and the experts
    of the lost node are transferred.

    Raises:
        ConfigurationError: the axes do not divide the ranks.
    """
    work = scenario.workload
    own = world_groups(scenario.mesh, ranks, scenario.hardware.ranks_per_node)
    planned = work.num_layers * work.num_experts / (_PLANNED_LAYERS * _PLANNED_EXPERTS)
    return {
        "membership": (_MEMBER_S + _DECISION_S) * ranks,
        "store": _REQUEST_S * store_requests(own, ranks),
        "naming": _GROUP_S * named_groups(own, ranks),
        "communicators": sum(map(communicator_s, own)),
        "plans": planned * _REPAIR_S + work.num_layers / _PLANNED_LAYERS * _PLAN_S * ranks,
        "transfer": _transfer_s(scenario, ranks),
    }


def _transfer_s(scenario: Scenario, ranks: int) -> float:
    """Seconds in which the experts of one node reach other ranks, evenly, by a link of each."""
    work, policy, hardware = scenario.workload, scenario.policy, scenario.hardware
    least = math.ceil(policy.min_replicas * work.num_experts / (ranks // scenario.mesh.pp))
    layers = math.ceil(work.num_layers / scenario.mesh.pp)
    lost = hardware.ranks_per_node * (policy.slots or least) * layers
    received = math.ceil(lost / max(1, ranks // scenario.mesh.pp))
    return received * work.expert_state_bytes / hardware.link_bytes_per_s + hardware.latency_s


def world_changes(scenario: Scenario, sizes: Sequence[int]) -> str:
    """Return the costs of changes to worlds of these sizes as a table."""
    found = {ranks: world_change_s(scenario, ranks) for ranks in sizes}
    rows = []
    for ranks, parts_s in found.items():
        own = world_groups(scenario.mesh, ranks, scenario.hardware.ranks_per_node)
        counts = (ranks, len(own), named_groups(own, ranks), store_requests(own, ranks))
        seconds = (*parts_s.values(), sum(parts_s.values()))
        rows.append((*(f"{count:,}" for count in counts), *(f"{value:.2f}" for value in seconds)))
    parts = [f"{part} s" for part in next(iter(found.values()))]
    return table(("world of", "groups of a rank", "named", "store requests", *parts, "in all s"), rows)
