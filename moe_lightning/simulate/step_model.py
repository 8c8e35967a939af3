"""How long one training step takes in a world of ranks: the same placements, quotas, shadow plans and performance model
that training uses, summed over layers, with gradients and the optimizer's update.

Worlds beyond `REPRESENTATIVE_RANKS` are judged by so many of their ranks: dispatch divides rows alike in both, and the
placement repeats. Layers that route alike are judged once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

import numpy as np
from numpy.typing import NDArray

from moe_lightning.algorithms.balancing import evaluate, plan_placement, plan_shadows
from moe_lightning.algorithms.cluster import Cluster
from moe_lightning.algorithms.performance_model import BlockCosts
from moe_lightning.algorithms.placement import Placement, uniform_placement
from moe_lightning.algorithms.speeds import shares, speeds_in_proportion
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.hardware import Hardware
from moe_lightning.simulate.policy import Policy
from moe_lightning.simulate.routing import RoutingScenario
from moe_lightning.simulate.workload import Workload

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
        imbalance: busiest rank over mean, mean of layers.
        balance_ratio: RB of Pro-Prophet, median of layers.
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
    balance_ratio: float
    exchange_bytes: float
    hiding: float = 1.0

    @property
    def overlap_s(self) -> float:
        """Forward and backward passes, under which a snapshot may hide."""
        return self.hiding * (self.dense_s + self.experts_s + self.exchange_s + self.copies_s)


class StepModel:
    """Plans and times steps for worlds of any size; remembers what it was asked before.

    Args:
        workload, hardware, policy, routing: of the simulation.
        num_nodes: of the cluster when nothing has failed; fixes slots and expert-parallel groups that are not given.

    Raises:
        ConfigurationError: a routing of other experts, or experts that fit no world of this cluster.
    """

    def __init__(
        self, workload: Workload, hardware: Hardware, policy: Policy, routing: RoutingScenario, num_nodes: int
    ) -> None:
        if num_nodes < 1:
            raise ConfigurationError(f"nodes={num_nodes} is no cluster: use at least 1")
        if routing.shares_SLE.shape[2] != workload.num_experts:
            raise ConfigurationError(
                f"the routing has {routing.shares_SLE.shape[2]} experts, the model {workload.num_experts}: "
                "use the same number"
            )
        self.workload, self.hardware, self.policy, self.routing = workload, hardware, policy, routing
        ranks = num_nodes * hardware.ranks_per_node
        experts = workload.num_experts
        if policy.layout == "groups":
            divisors = [d for d in range(1, experts + 1) if experts % d == 0]
            if policy.slots is not None:
                self.slots = max(d for d in divisors if d <= policy.slots)
            else:
                self.slots = experts // max(d for d in divisors if d <= ranks)
            self.group_ranks = experts // self.slots
            self.unit_nodes = lcm(self.group_ranks, hardware.ranks_per_node) // hardware.ranks_per_node
        else:
            wanted = -(-policy.min_replicas * experts // ranks) + 1
            self.slots = policy.slots if policy.slots is not None else min(experts, wanted)
            self.group_ranks, self.unit_nodes = 0, 1
        if not self.usable_nodes(num_nodes):
            raise ConfigurationError(
                f"{experts} experts do not fit {ranks} ranks of {self.slots} slots: add nodes or raise policy.slots"
            )
        self._plans: dict[tuple[int, int, bool], list[Placement]] = {}
        self._costs: dict[tuple[int, int, int, bool], StepCost] = {}

    def usable_nodes(self, live: int) -> int:
        """How many of the live nodes can train; 0 where the experts do not fit them."""
        if self.policy.layout == "groups":
            return live - live % self.unit_nodes
        return live if live * self.hardware.ranks_per_node * self.slots >= self.workload.num_experts else 0

    def placements(self, nodes: int, sample: int) -> list[Placement]:
        """A placement of each routed layer on the ranks of a world, made from the loads of a sample."""
        ranks = nodes * self.hardware.ranks_per_node
        if self.policy.layout == "groups":
            placement = uniform_placement(self.workload.num_experts, ranks, ranks // self.group_ranks)
            return [placement] * self.routing.num_layers
        planned = self._judged_placements(ranks, sample)
        if planned[0].num_ranks == ranks:
            return planned
        repeated = np.arange(ranks) % planned[0].num_ranks
        return [Placement(replicas=placement.replicas[:, repeated]) for placement in planned]

    def _judged_placements(self, ranks: int, sample: int, is_slow: bool = False) -> list[Placement]:
        """Those of the ranks that are judged; remembered, for worlds of like size need the same."""
        judged = self._judged_ranks(ranks)
        if self.policy.layout == "groups":
            return [uniform_placement(self.workload.num_experts, judged)] * self.routing.num_layers
        key = judged, sample, is_slow
        if key not in self._plans:
            cluster = Cluster.of(judged, self.slots, self.hardware.ranks_per_node)
            speeds = speeds_in_proportion(self.hardware.rank_speeds(judged, is_slow=is_slow))
            if self.policy.by_speed and speeds is not None:
                cluster = replace(cluster, speeds=tuple(speeds.tolist()))
            placement = self.policy.balancing.placement
            self._plans[key] = plan_placement(self.routing.loads(sample), cluster, placement)
        return self._plans[key]

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
        """The constants of the performance model for one MoE block of a world of so many ranks."""
        work, machine = self.workload, self.hardware
        judged = self._judged_ranks(ranks)
        speeds, waiting = machine.rank_speeds(judged, is_slow=is_slow), machine.waiting(ranks)
        tokens = work.tokens_per_rank(ranks) * self._slices(ranks, speeds) * waiting
        forward_s = tokens * work.dense_flops_per_token / (machine.flops_per_s * machine.utilization) / work.num_layers
        rows_per_s = machine.flops_per_s * machine.expert_utilization / work.expert_flops_per_row / waiting
        expert_bytes = float(work.expert_params * work.activation_bytes)
        return BlockCosts(
            row_bytes=float(work.d_model * work.activation_bytes),
            weight_bytes=expert_bytes,
            gradient_bytes=expert_bytes,
            bytes_per_s=self._bytes_per_s(judged),
            rows_per_s=rows_per_s * (float(speeds[0]) if (speeds == speeds[0]).all() else speeds),
            exchange_s=machine.latency_s,
            expert_s=machine.expert_s,
            dense_forward_s=forward_s,
            dense_backward_s=2 * forward_s,
        )

    def _cost(self, nodes: int, planned: int, now: int, is_slow: bool) -> StepCost:
        ranks = nodes * self.hardware.ranks_per_node
        judged = self._judged_ranks(ranks)
        costs = self.block_costs(ranks, is_slow=is_slow)
        strategy = self.policy.balancing
        placements = self._judged_placements(ranks, planned, is_slow)
        assignments = max(1, round(self.workload.tokens_per_rank(ranks) * self.workload.top_k))
        layers = range(self.routing.num_layers)
        tokens = [self.routing.tokens(now, layer, assignments, judged) for layer in layers]
        known = costs if strategy.by_speed else costs.at(None)
        shadows = plan_shadows(np.stack(tokens), placements, [known] * len(layers), strategy.shadows)
        reports = [
            evaluate(tokens[i], placements[i], shadows[i], costs, strategy, self.hardware.overlap > 0) for i in layers
        ]
        scale = self.workload.num_layers / len(layers)
        dense_s = self.workload.num_layers * (costs.dense_forward_s + costs.dense_backward_s)
        blocks_s = scale * sum(report.block_s for report in reports)
        exchange_s = scale * sum(4 * report.exchange_s for report in reports)
        copies_s = scale * sum(report.exposed_s for report in reports)
        gradients_s = self._gradients_s(placements, ranks, scale, dense_s)
        resident = scale * max(sum((p.replicas > 0).sum(axis=0) for p in placements))
        params = self.workload.dense_params + float(resident) * self.workload.expert_params
        update_s = params * 2 * self.workload.state_bytes / self.hardware.memory_bytes_per_s
        return StepCost(
            step_s=self.hardware.step_s + dense_s + blocks_s + gradients_s + update_s,
            dense_s=dense_s,
            experts_s=blocks_s - exchange_s - copies_s,
            exchange_s=exchange_s,
            copies_s=copies_s,
            gradients_s=gradients_s,
            update_s=update_s,
            imbalance=float(np.mean([report.imbalance for report in reports])),
            balance_ratio=float(np.median([report.balance_ratio for report in reports])),
            hiding=self.hardware.overlap,
            exchange_bytes=scale * sum(report.exchange_bytes for report in reports) * ranks / judged,
        )

    def _gradients_s(self, placements: list[Placement], ranks: int, scale: float, dense_s: float) -> float:
        """Dense gradients are summed under the backward pass, those of replicated experts after it."""
        bytes_per_s = self._bytes_per_s(ranks)
        numbers = self.workload.activation_bytes
        dense = 2 * (ranks - 1) / ranks * self.workload.dense_params * numbers / bytes_per_s
        shared: NDArray[np.float64] = np.zeros(placements[0].num_ranks)
        copies = max(1, ranks // placements[0].num_ranks)
        for placement in placements:
            held = placement.replicas > 0
            holders = held.sum(axis=1) * copies
            shared += (2 * (holders - 1) / holders) @ held
        experts = scale * float(shared.max()) * self.workload.expert_params * numbers / bytes_per_s
        return max(0.0, dense - self.hardware.overlap * dense_s * 2 / 3) + experts

    def _bytes_per_s(self, ranks: int) -> float:
        machine = self.hardware
        return machine.node_bytes_per_s if ranks <= machine.ranks_per_node else machine.link_bytes_per_s

    def rank_memory_bytes(self) -> float:
        """State of one rank: dense parameters and full slots."""
        work = self.workload
        return work.state_bytes * (work.dense_params + work.num_layers * self.slots * float(work.expert_params))
