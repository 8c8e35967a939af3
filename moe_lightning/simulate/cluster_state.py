"""Worlds of nodes that train together: who is in one, where its experts go, and what forming it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_lightning.algorithms.cluster import Cluster
from moe_lightning.algorithms.migration import BoolArray, align_placements, held_states, plan_migration
from moe_lightning.algorithms.placement import IntArray, Placement
from moe_lightning.simulate.checkpoint_cost import save_cost
from moe_lightning.simulate.dense_parts import NOTHING, Part, is_whole, missing, parts_of_ranks
from moe_lightning.simulate.scenario import Scenario
from moe_lightning.simulate.step_model import StepModel

_MAX_PLANNED_CELLS = 1 << 21
"""Layers x experts x ranks up to which migrations are planned in detail; above, the busiest receiver counts."""

_MAX_ALIGNED_NODES = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedWorld:
    """Nodes that train together, in the order of their ranks, and where their experts are.

    Attributes:
        nodes: of the cluster.
        placements: of each routed layer, on the ranks of the nodes.
        writers_LE: int64 [L, E], the node, by its place in the world, that snapshots each expert.
        sample: of the routing from which they were planned.
    """

    nodes: tuple[int, ...]
    placements: Sequence[Placement]
    writers_LE: IntArray
    sample: int


class ClusterState:
    """Which rank of the cluster holds the state of which expert now, and the worlds that could come next.

    Args:
        scenario: of the simulation.
        model: plans placements.
    """

    def __init__(self, scenario: Scenario, model: StepModel) -> None:
        self._model = model
        self._policy, self._hardware, self._workload = scenario.policy, scenario.hardware, scenario.workload
        self._scale = scenario.workload.num_layers / scenario.routing.num_layers
        nodes = max(node for event in scenario.events for node in event.joined) + 1
        shape = (scenario.routing.num_layers, scenario.workload.num_experts, nodes * scenario.hardware.ranks_per_node)
        self._held: BoolArray = np.zeros(shape, dtype=np.bool_)
        self._parts: dict[int, Part] = {}  # of the dense state, by rank; not kept where every rank has all of it
        self._last_nodes: tuple[int, ...] = ()

    # ---------------------------------------------------------------- what is held

    def hold(self, world: SimulatedWorld) -> None:
        """The world trains: its ranks hold what its placements say, nobody else holds anything."""
        self.forget()
        self._held[:, :, self._ranks(world.nodes)] = held_states(world.placements)
        self._parts = dict(zip(self._ranks(world.nodes), self._needed_parts(world), strict=False))
        self._last_nodes = world.nodes

    def forget(self) -> None:
        """No live state counts any more."""
        self._held[:] = False
        self._parts = {}

    def drop(self, nodes: Sequence[int]) -> None:
        """These nodes have failed."""
        ranks = self._ranks(nodes)
        self._held[:, :, ranks] = False
        for rank in ranks:
            self._parts.pop(rank, None)

    def experts_by_node(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """The nodes with live state, none where a part of the dense state is lost; each expert that is held is named at
        one of its holders, which is enough to know that it is."""
        if not self._model.mesh.is_plain and not is_whole(self._parts.values()):
            return {}
        found: dict[int, list[tuple[int, int]]] = {node: [] for node in sorted(self.holders())}
        first = self._held.argmax(axis=2) // self._hardware.ranks_per_node
        for layer, expert in np.argwhere(self._held.any(axis=2)).tolist():
            found[int(first[layer, expert])].append((layer, expert))
        return {node: tuple(pairs) for node, pairs in found.items()}

    def holders(self) -> set[int]:
        """Nodes with any live state."""
        by_node = self._held.any(axis=(0, 1)).reshape(-1, self._hardware.ranks_per_node).any(axis=1)
        return {int(node) for node in np.flatnonzero(by_node)}

    # ---------------------------------------------------------------- what could be next

    def choose(self, available: Sequence[int]) -> tuple[int, ...]:
        """As many of these nodes as can train, those that hold state first; those of the last world keep their place in
        it as far as there is one."""
        holders = self.holders()
        count = self._model.usable_nodes(len(available))
        nodes = sorted(available, key=lambda node: (node not in holders, node))
        kept = self._kept_places(nodes, count)
        left = [node for node in nodes if node not in kept.values()]
        others = iter(sorted(left[: count - len(kept)]))
        return tuple(kept[index] if index in kept else next(others) for index in range(count))

    def _kept_places(self, nodes: Sequence[int], count: int) -> dict[int, int]:
        """Node by place in the next world, of those that keep theirs, or on a pipeline their stage."""
        pp = self._model.mesh.pp
        if pp == 1:
            place = {node: index for index, node in enumerate(self._last_nodes)}
            return {place[node]: node for node in nodes[:count] if place.get(node, count) < count}
        before, after = len(self._last_nodes) // pp, count // pp
        if len(self._last_nodes) % pp or count % pp:
            return {}  # stages end within nodes
        kept: dict[int, int] = {}
        for stage in range(pp):
            mates = [node for node in self._last_nodes[stage * before : (stage + 1) * before] if node in nodes]
            kept |= {stage * after + index: node for index, node in enumerate(mates[:after])}
        return kept

    def plan(self, nodes: tuple[int, ...], sample: int) -> SimulatedWorld:
        """A placement for these nodes that fits what they hold, where the world is small enough to look for one."""
        planned: Sequence[Placement] = self._model.placements(len(nodes), sample)
        held = self._held[:, :, self._ranks(nodes)]
        if self._policy.layout == "replicated" and len(nodes) <= _MAX_ALIGNED_NODES and held.any():
            planned = self._aligned(held, planned)
        planned = self._model.over_stages(planned, len(nodes))
        writers = np.stack([placement.owners() for placement in planned]) // self._hardware.ranks_per_node
        return SimulatedWorld(nodes=nodes, placements=planned, writers_LE=writers, sample=sample)

    def _aligned(self, held: BoolArray, planned: Sequence[Placement]) -> list[Placement]:
        """Placements of which the ranks of each stage hold much already."""
        ranks, mapping = planned[0].num_ranks, self._policy.balancing.placement.mapping
        cluster = Cluster.of(ranks, self._model.slots, self._hardware.ranks_per_node)
        found = []
        for stage in range(self._model.mesh.pp):
            layers = self._model.stage_layers(stage)
            own = held[layers.start : layers.stop, :, stage * ranks : (stage + 1) * ranks]
            found += align_placements(own, planned[layers.start : layers.stop], cluster, mapping)
        return found

    def migration(self, world: SimulatedWorld) -> tuple[float, int]:
        """Seconds and states of what the world's ranks need and do not hold; a rank without any state needs the dense
        state too."""
        held = self._held[:, :, self._ranks(world.nodes)]
        lacking = held_states(world.placements) & ~held
        state_bytes = self._workload.expert_state_bytes
        bytes_per_s, latency_s = self._hardware.link_bytes_per_s, self._hardware.latency_s
        if lacking.size <= _MAX_PLANNED_CELLS:
            nodes = np.repeat(world.nodes, self._hardware.ranks_per_node).tolist()
            planned = plan_migration(held, world.placements, nodes)
            seconds = self._scale * planned.predicted_s(state_bytes, bytes_per_s, latency_s)
        else:
            receives = int(lacking.sum(axis=(0, 1)).max())
            seconds = self._scale * receives * state_bytes / bytes_per_s + latency_s
        dense = self._missing_dense(world, held) * self._workload.dense_params
        seconds += dense * self._workload.state_bytes / bytes_per_s
        return seconds, round(self._scale * int(lacking.sum()))

    def _missing_dense(self, world: SimulatedWorld, held: BoolArray) -> float:
        """The largest share of the dense state that a rank of the world needs and does not hold."""
        if self._model.mesh.is_plain:
            return float(not held.any(axis=(0, 1)).all())
        pairs = zip(self._ranks(world.nodes), self._needed_parts(world), strict=False)
        return float(max(missing(needed, self._parts.get(rank, NOTHING)) for rank, needed in pairs))

    def _needed_parts(self, world: SimulatedWorld) -> tuple[Part, ...]:
        """Of the dense state, for each rank that trains; nothing where every rank has all of it."""
        if self._model.mesh.is_plain:
            return ()
        ranks = self._model.ranks(len(world.nodes))
        return parts_of_ranks(self._model.mesh, ranks, self._hardware.ranks_per_node)

    def forming_s(self, world: SimulatedWorld, source: str) -> tuple[float, int]:
        """Seconds until the world trains with state from a source, and the states that move for it."""
        policy, hardware = self._policy, self._hardware
        if source == "start":
            return 0.0, 0
        if source in ("live replicas", "join") and policy.live_recovery:
            moving_s, moved = self.migration(world)
            return (policy.detect_s if source != "join" else 0.0) + policy.regroup_s + moving_s, moved
        ranks, experts = self._model.ranks(len(world.nodes)), self._workload.num_experts
        save = save_cost(self._workload, hardware, policy, ranks, experts, experts)
        if source == "join":
            return save.snapshot_s + save.persist_s + policy.restart_s + save.load_s, 0
        if source == "protected memory":
            fetched_s = save.snapshot_bytes / hardware.host_copy_bytes_per_s
            dense_bytes = self._workload.dense_params * self._workload.state_bytes
            fetched_s += dense_bytes / self._model.dense_cuts(ranks) / hardware.link_bytes_per_s
            return policy.detect_s + policy.restart_s + fetched_s, 0
        return policy.detect_s + policy.restart_s + save.load_s, 0

    def _ranks(self, nodes: Sequence[int]) -> list[int]:
        size = self._hardware.ranks_per_node
        return [node * size + rank for node in nodes for rank in range(size)]
