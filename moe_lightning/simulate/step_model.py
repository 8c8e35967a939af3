"""Duration of one training step in a world of ranks.

Uses the placements, quotas, shadow plans and performance model of training, summed over the layers of the busiest
pipeline stage, with gradients, the optimizer's update and the costs of the mesh's axes.

Worlds beyond `REPRESENTATIVE_RANKS` are judged by so many of their ranks: dispatch divides rows alike in both, and the
placement repeats. Layers that route alike are judged once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
from numpy.typing import NDArray

from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.cost_model import BlockCosts
from moe_lightning.balancing.rules import BalanceReport, evaluate, plan_placement, plan_shadows
from moe_lightning.dispatch.placement import Placement, uniform_placement
from moe_lightning.dispatch.quota import shares, speeds_in_proportion
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.hardware import Hardware
from moe_lightning.simulate.memory import RankMemory, rank_memory
from moe_lightning.simulate.mesh import (
    Axes,
    MeshSpec,
    StageWork,
    axes_of,
    bubble_s,
    busiest_stage,
    link_bytes_per_s,
    passes,
)
from moe_lightning.simulate.policy import Policy
from moe_lightning.simulate.workload import RoutingScenario, Workload, footprint_of

REPRESENTATIVE_RANKS = 512


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of one step, and what travels.

    Attributes:
        step_s: all of it.
        dense_s, experts_s: forward and backward of the busiest rank.
        exchange_s: the four token exchanges of all layers.
        copies_s: Trans and Agg that nothing hides.
        gradients_s: sums of gradients that nothing hides.
        update_s: the optimizer.
        axes_s: what the axes of a mesh add that nothing hides, see `simulate.mesh`.
        bubble_s: that a rank waits in its pipeline.
        imbalance: busiest rank over mean, mean of layers.
        exchange_bytes: of all ranks.
        hiding: share of the passes that may hide copies.
    """

    step_s: float
    dense_s: float
    experts_s: float
    exchange_s: float
    copies_s: float
    gradients_s: float
    update_s: float
    imbalance: float
    exchange_bytes: float
    hiding: float
    axes_s: Axes
    bubble_s: float

    @property
    def passes_s(self) -> float:
        """Forward and backward passes, without the pipeline's bubbles."""
        return self.dense_s + self.experts_s + self.exchange_s + self.copies_s + self.axes_s.passes_s

    @property
    def overlap_s(self) -> float:
        """Bubbles and passes, in which a snapshot may hide (REFT 4.1)."""
        return self.bubble_s + self.hiding * self.passes_s


class StepModel:
    """Plans and times steps for worlds of any size; remembers what it was asked before.

    Args:
        workload, hardware, policy, routing: of the simulation.
        num_nodes: of the cluster when nothing has failed; fixes slots and expert-parallel groups that are not given.
        mesh: how the model lies over the ranks; experts over all those of a stage.

    Raises:
        ConfigurationError: a routing of other experts, experts that fit no world of this cluster, or a mesh that does
            not fit it or the model.
    """

    def __init__(
        self,
        workload: Workload,
        hardware: Hardware,
        policy: Policy,
        routing: RoutingScenario,
        num_nodes: int,
        mesh: MeshSpec | None = None,
    ) -> None:
        if num_nodes < 1:
            raise ConfigurationError(f"nodes={num_nodes} is not a cluster: use at least 1")
        if routing.shares_SLE.shape[2] != workload.num_experts:
            raise ConfigurationError(
                f"the routing has {routing.shares_SLE.shape[2]} experts, the model {workload.num_experts}: "
                "use the same number"
            )
        self.workload, self.hardware, self.policy, self.routing = workload, hardware, policy, routing
        self.mesh, self.num_nodes = mesh or MeshSpec(), num_nodes
        _check_mesh(self.mesh, workload, hardware, num_nodes)
        ranks = num_nodes * hardware.ranks_per_node // self.mesh.pp
        experts = workload.num_experts
        if policy.layout == "groups":
            divisors = [d for d in range(1, experts + 1) if experts % d == 0]
            if policy.slots is not None:
                self.slots = max(d for d in divisors if d <= policy.slots)
            else:
                self.slots = experts // max(d for d in divisors if d <= ranks)
            self.group_ranks = experts // self.slots
            unit = self.mesh.pp * lcm(self.group_ranks, self.mesh.cp * self.mesh.tp)
            self.unit_nodes = lcm(unit, hardware.ranks_per_node) // hardware.ranks_per_node
        else:
            wanted = -(-policy.min_replicas * experts // ranks) + 1
            self.slots = policy.slots if policy.slots is not None else min(experts, wanted)
            self.group_ranks, self.unit_nodes = 0, 1
        if not self.usable_nodes(num_nodes):
            raise ConfigurationError(
                f"{experts} experts do not fit {ranks} ranks of {self.slots} slots: add nodes or raise policy.slots"
            )
        self._plans: dict[tuple[int, int, int, bool], list[Placement]] = {}
        self._reports: dict[tuple[int, ...], list[BalanceReport]] = {}
        self._costs: dict[tuple[int, int, int, bool], StepCost] = {}

    def beside(self, mesh: MeshSpec) -> StepModel:
        """The same with another mesh; what both have in common is computed once."""
        other = StepModel(self.workload, self.hardware, self.policy, self.routing, self.num_nodes, mesh)
        other._plans, other._reports = self._plans, self._reports
        return other

    def usable_nodes(self, live: int) -> int:
        """Return the number of live nodes that can train; 0 where the experts do not fit them."""
        if self.policy.layout == "groups":
            return live - live % self.unit_nodes
        ranks = self.ranks(live)
        fits = ranks // self.mesh.pp * self.slots >= self.workload.num_experts
        return -(-ranks // self.hardware.ranks_per_node) if fits else 0

    def ranks(self, nodes: int) -> int:
        """Ranks of so many nodes that train: whole data slices of the mesh, the rest waits."""
        ranks = nodes * self.hardware.ranks_per_node
        return ranks - ranks % self.mesh.unit

    def stage_layers(self, stage: int) -> range:
        """The routed layers that stand for those of a stage."""
        routed, pp = self.routing.num_layers, self.mesh.pp
        first = stage * routed // pp
        return range(first, max(first + 1, (stage + 1) * routed // pp))

    def placements(self, nodes: int, sample: int) -> list[Placement]:
        """A placement of each routed layer on the ranks of a stage of a world, made from the loads of a sample."""
        ranks = self.ranks(nodes) // self.mesh.pp
        if self.policy.layout == "groups":
            placement = uniform_placement(self.workload.num_experts, ranks, ranks // self.group_ranks)
            return [placement] * self.routing.num_layers
        planned = self._judged_placements(ranks, sample)
        if planned[0].num_ranks == ranks:
            return planned
        repeated = np.arange(ranks) % planned[0].num_ranks
        return [Placement(replicas=placement.replicas[:, repeated]) for placement in planned]

    def over_stages(self, placements: Sequence[Placement], nodes: int) -> Sequence[Placement]:
        """Placements on the ranks of a stage as those on all ranks of a world, each layer on its own stage."""
        ranks, stage_ranks = nodes * self.hardware.ranks_per_node, placements[0].num_ranks
        if stage_ranks == ranks:
            return placements
        tables = np.zeros((len(placements), self.workload.num_experts, ranks), dtype=np.int64)
        for stage in range(self.mesh.pp):
            for layer in self.stage_layers(stage):
                columns = slice(stage * stage_ranks, (stage + 1) * stage_ranks)
                tables[layer, :, columns] = placements[layer].replicas
        return [Placement(replicas=table) for table in tables]

    def _judged_placements(self, ranks: int, sample: int, is_slow: bool = False) -> list[Placement]:
        """Those of the ranks of a stage that are judged; remembered, for worlds of like size need the same."""
        judged = self._judged_ranks(ranks)
        if self.policy.layout == "groups":
            return [uniform_placement(self.workload.num_experts, judged)] * self.routing.num_layers
        key = judged, self.slots, sample, is_slow
        if key not in self._plans:
            cluster = Cluster.of(judged, self.slots, self.hardware.ranks_per_node)
            speeds = speeds_in_proportion(self.hardware.rank_speeds(judged, is_slow=is_slow))
            if self.policy.by_speed and speeds is not None:
                cluster = replace(cluster, speeds=tuple(speeds.tolist()))
            placement = self.policy.balancing.placement
            first, same = self._distinct(sample)
            planned = plan_placement(self.routing.loads(sample)[first], cluster, placement)
            self._plans[key] = [planned[index] for index in same]
        return self._plans[key]

    def _distinct(self, *samples: int) -> tuple[list[int], list[int]]:
        """One of the layers of each kind, and the kind of every layer: those of a pipeline may repeat each other."""
        if self.mesh.pp == 1:
            everything = list(range(self.routing.num_layers))
            return everything, everything
        loads = np.concatenate([self.routing.loads(sample) for sample in samples], axis=1)
        _, first, kinds = np.unique(loads, axis=0, return_index=True, return_inverse=True)
        return first.tolist(), kinds.reshape(-1).tolist()

    def _judged_ranks(self, ranks: int) -> int:
        if self.policy.layout == "groups":
            return self.group_ranks
        most = REPRESENTATIVE_RANKS - REPRESENTATIVE_RANKS % self.hardware.ranks_per_node
        needed = -(-2 * self.workload.num_experts // self.slots)
        needed += -needed % self.hardware.ranks_per_node
        return min(ranks, max(most, needed))

    def cost(self, nodes: int, planned: int, now: int, *, is_slow: bool = False) -> StepCost:
        """A step of a world whose placement was planned from one sample, under the routing of another, while rank 0 is
        slow or not."""
        key = (nodes, planned, now, is_slow)
        if key not in self._costs:
            self._costs[key] = self._cost(*key)
        return self._costs[key]

    def _slices(self, ranks: int, speeds: NDArray[np.float64]) -> float:
        """Time of the rank that takes longest for its samples, over that of an even slice at speed 1."""
        known = speeds_in_proportion(speeds)
        if known is None or not self.policy.by_speed:
            return float(1 / speeds.min())
        samples = max(len(speeds), round(self.workload.samples_per_step(ranks) * len(speeds) / ranks))
        return float((shares(samples, known) / speeds).max() * len(speeds) / samples)

    def block_costs(self, ranks: int, *, is_slow: bool = False) -> BlockCosts:
        """The constants of the performance model for one MoE block and micro-batch of a world of so many ranks."""
        work, machine = self.workload, self.hardware
        judged = self._judged_ranks(ranks // self.mesh.pp)
        speeds, waiting = machine.rank_speeds(judged, is_slow=is_slow), machine.waiting(ranks)
        tokens = self._tokens(ranks) * self._slices(ranks // self.mesh.pp, speeds) * waiting
        forward_s = tokens * work.dense_flops_per_token / (machine.flops_per_s * machine.utilization) / work.num_layers
        rows_per_s = machine.flops_per_s * machine.expert_utilization / work.expert_flops_per_row / waiting
        backward = passes(self.mesh)
        return BlockCosts(
            row_bytes=float(work.d_model * work.activation_bytes),
            weight_bytes=float(work.expert_params * work.activation_bytes),
            gradient_bytes=float(work.expert_params * footprint_of(work).expert.gradient),
            bytes_per_s=self._bytes_per_s(judged),
            rows_per_s=rows_per_s * (float(speeds[0]) if (speeds == speeds[0]).all() else speeds),
            exchange_s=machine.latency_s,
            expert_s=machine.expert_s,
            backward_ratio=float(backward),
            dense_forward_s=forward_s,
            dense_backward_s=backward * forward_s,
            transfer=self.policy.balancing.transfer,
            scheduled=machine.overlap > 0,
        )

    def micro_batches(self, ranks: int) -> int:
        """Return the micro-batches of a step on each data slice of a world of so many ranks."""
        return self.mesh.micro_batches_of(self.workload.samples_per_step(ranks) * self.mesh.unit / ranks)

    def _tokens(self, ranks: int) -> float:
        """Return the tokens of one rank and micro-batch; each of a stage's ranks has others."""
        return self.workload.tokens_per_rank(ranks) * self.mesh.pp / self.micro_batches(ranks)

    def _judge(self, ranks: int, planned: int, now: int, is_slow: bool) -> list[BalanceReport]:
        """One micro-batch in each routed layer; remembered for meshes whose stages are alike."""
        key = (ranks, self.mesh.pp, self.slots, self.micro_batches(ranks), self.mesh.recompute, planned, now, is_slow)
        if key not in self._reports:
            stage_ranks = ranks // self.mesh.pp
            judged, (layers, same) = self._judged_ranks(stage_ranks), self._distinct(planned, now)
            costs, strategy = self.block_costs(ranks, is_slow=is_slow), self.policy.balancing
            placements = self._judged_placements(stage_ranks, planned, is_slow)
            assignments = max(1, round(self._tokens(ranks) * self.workload.top_k))
            tokens = [self.routing.tokens(now, layer, assignments, judged) for layer in layers]
            known = costs if strategy.by_speed else costs.at(None)
            placed = [placements[layer] for layer in layers]
            shadows = plan_shadows(np.stack(tokens), placed, [known] * len(layers), strategy.shadows)
            judged_layers = zip(tokens, placed, shadows, strict=True)
            reports = [evaluate(*layer, costs, strategy) for layer in judged_layers]
            self._reports[key] = [reports[index] for index in same]
        return self._reports[key]

    def _cost(self, nodes: int, planned: int, now: int, is_slow: bool) -> StepCost:
        work, machine, mesh = self.workload, self.hardware, self.mesh
        ranks, routed = self.ranks(nodes), self.routing.num_layers
        stage_ranks, micro = ranks // mesh.pp, self.micro_batches(ranks)
        judged, stage = self._judged_ranks(stage_ranks), busiest_stage(work, mesh.pp, mesh.chunks)
        costs = self.block_costs(ranks, is_slow=is_slow)
        everywhere = self._judge(ranks, planned, now, is_slow)
        placements = self._judged_placements(stage_ranks, planned, is_slow)
        layers = max(map(self.stage_layers, range(mesh.pp)), key=lambda of: sum(everywhere[i].block_s for i in of))
        reports, placements = [everywhere[i] for i in layers], [placements[i] for i in layers]
        scale = stage.moe_layers / len(layers)
        dense_s = micro * stage.share * (work.num_layers * (costs.dense_forward_s + costs.dense_backward_s))
        exchanges = 4 + 2 * mesh.recompute  # the forward pass once more has its own
        exchange_s = micro * scale * sum(exchanges * report.exchange_s for report in reports)
        blocks_s = micro * scale * sum(report.block_s for report in reports)
        blocks_s += micro * scale * sum(2 * mesh.recompute * report.exchange_s for report in reports)
        copies_s = micro * scale * sum(report.exposed_s for report in reports)
        done = StageWork(
            workload=work,
            machine=machine,
            mesh=mesh,
            stage=stage,
            num_ranks=ranks,
            tokens=micro * self._tokens(ranks),
            micro_batches=micro,
            dense_s=dense_s,
        )
        added = axes_of(done)
        waits_s = bubble_s(dense_s + blocks_s + added.passes_s, mesh.pp, micro, mesh.chunks)
        sums_s = added.sums_s + self._expert_sums_s(placements, stage_ranks, scale)
        resident = scale * max(sum((p.replicas > 0).sum(axis=0) for p in placements))
        dense_params = stage.dense_params / mesh.tp / mesh.state_shards(ranks, machine.ranks_per_node)
        dense, expert = footprint_of(work).dense, footprint_of(work).expert
        updated_bytes = dense_params * (dense.gradient + dense.optimizer)  # weights and moments of what is trained
        updated_bytes += float(resident) * work.expert_params * (expert.gradient + expert.optimizer)
        update_s = 2 * updated_bytes / machine.memory_bytes_per_s
        sent_bytes = work.num_layers / routed * sum(report.exchange_bytes for report in everywhere)
        return StepCost(
            step_s=machine.step_s + dense_s + blocks_s + sums_s + update_s + (added.passes_s + waits_s),
            dense_s=dense_s,
            experts_s=blocks_s - exchange_s - copies_s,
            exchange_s=exchange_s,
            copies_s=copies_s,
            gradients_s=sums_s,
            update_s=update_s,
            imbalance=float(np.mean([report.imbalance for report in everywhere])),
            hiding=machine.overlap,
            exchange_bytes=micro * (sent_bytes * stage_ranks / judged),
            axes_s=added,
            bubble_s=waits_s,
        )

    def _expert_sums_s(self, placements: list[Placement], ranks: int, scale: float) -> float:
        """Gradients of replicated experts, which are summed after the backward pass."""
        shared: NDArray[np.float64] = np.zeros(placements[0].num_ranks)
        copies = max(1, ranks // placements[0].num_ranks)
        for placement in placements:
            held = placement.replicas > 0
            holders = held.sum(axis=1) * copies
            shared += (2 * (holders - 1) / holders) @ held
        numbers = scale * float(shared.max()) * self.workload.expert_params
        return numbers * footprint_of(self.workload).expert.gradient / self._bytes_per_s(ranks)

    def _bytes_per_s(self, stage_ranks: int) -> float:
        return link_bytes_per_s(self.hardware, stage_ranks, stage_ranks * self.mesh.pp)

    def dense_cuts(self, ranks: int) -> int:
        """Parts in which the dense state lies over a world of so many ranks."""
        return self.mesh.pp * self.mesh.tp * self.mesh.state_shards(ranks, self.hardware.ranks_per_node)

    def memory(self) -> RankMemory:
        """Return the memory of one rank of the whole cluster, its slots full."""
        ranks, per_node = self.ranks(self.num_nodes), self.hardware.ranks_per_node
        return rank_memory(self.workload, self.mesh, ranks, slots=self.slots, ranks_per_node=per_node)


def _check_mesh(mesh: MeshSpec, workload: Workload, hardware: Hardware, num_nodes: int) -> None:
    mesh.check(workload, num_nodes * hardware.ranks_per_node)
    if mesh.unit > 1 and (hardware.changes_s or len(set(hardware.speeds or ())) > 1):
        raise ConfigurationError(
            f"mesh.pp={mesh.pp}, cp={mesh.cp} and tp={mesh.tp} are simulated on nodes of one speed: leave "
            "hardware.speeds and slow_speed out, or use data parallelism alone"
        )
