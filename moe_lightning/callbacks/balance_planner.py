"""What the load balancer decides: a state machine of counts and costs that all ranks share, so all decide alike.

Slow scale: placements, from the loads of the last steps, first after a few steps and then less and less often until
`rebalance_every`. Fast scale: shadows, from the forecast of the next step, searched again when the kept plan is due.

Shapes: L layers, E experts, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from moe_lightning.algorithms.allocation import AllocationPolicy
from moe_lightning.algorithms.balancing import (
    SHADOW_POLICIES,
    PlacementPolicy,
    replan_placement,
)
from moe_lightning.algorithms.cluster import Cluster
from moe_lightning.algorithms.forecast import LoadForecast, ReplanRule
from moe_lightning.algorithms.overlap import Timeline, predict_timeline, split_transfer
from moe_lightning.algorithms.performance_model import BlockCosts
from moe_lightning.algorithms.placement import IntArray, Placement
from moe_lightning.algorithms.shadow_search import search_shadows
from moe_lightning.algorithms.shadows import ShadowPlan, no_shadows, predict_plan
from moe_lightning.errors import ConfigurationError

FIRST_REBALANCE = 8
"""Steps before the first new placement; the interval then doubles, since routing drifts most at the start."""

_FADE = 4
"""Loads of earlier intervals count a quarter with every new placement."""

_AUTO_RULES = ("packed", "spread")

_DECAYS = {"last": 0.0, "ema": 0.5}


@dataclass(frozen=True, kw_only=True)
class BalancePolicy:
    """What to balance and how.

    Attributes:
        rebalance_every: steps between two placements once training has settled; 0: never.
        placement: rule of `algorithms.balancing`: "packed", "mro+", "mro", "spread", "compact" or "plain"; or "auto":
            for each layer what the performance model likes best of packed and spread, with few and with all slots,
            the sums of replica gradients counted in.
        allocation: replica counts for the rules that need them: "waterfill" or "eq1".
        min_replicas: distinct nodes that hold each expert, where slots allow.
        tolerance: relief of the busiest rank that is not worth moving experts.
        shadows: policy of `algorithms.balancing`: "search", "fastermoe", "top2", "top3" or "none".
        alpha: the search stops when loads differ by less than alpha times their mean.
        replan_threshold: a kept shadow plan is replaced when it is slower than a fresh one by more than this.
        max_replan_interval: most steps between two searches.
        forecast: of the next step's loads: "ema" of recent steps, or the "last" one.

    Raises:
        ConfigurationError: a value outside its range or an unknown name.
    """

    rebalance_every: int = 200
    placement: str = "auto"
    allocation: AllocationPolicy = "waterfill"
    min_replicas: int = 1
    tolerance: float = 0.02
    shadows: str = "search"
    alpha: float = 0.1
    replan_threshold: float = 0.1
    max_replan_interval: int = 32
    forecast: Literal["ema", "last"] = "ema"

    def __post_init__(self) -> None:
        if self.rebalance_every < 0:
            raise ConfigurationError(f"rebalance_every={self.rebalance_every} must be 0 (never) or more steps")
        if self.shadows not in SHADOW_POLICIES:
            raise ConfigurationError(f"shadows={self.shadows!r} is unknown: use one of {list(SHADOW_POLICIES)}")
        if self.forecast not in _DECAYS:
            raise ConfigurationError(f"forecast={self.forecast!r} is unknown: use one of {list(_DECAYS)}")
        if self.alpha < 0:
            raise ConfigurationError(f"alpha={self.alpha} can never be met: use 0 or more")
        if self.min_replicas < 1:
            raise ConfigurationError(f"min_replicas={self.min_replicas} would lose experts: use at least 1")
        self.placement_policies()
        self.replan_rule()

    def placement_policies(self) -> list[PlacementPolicy]:
        rules = _AUTO_RULES if self.placement == "auto" else (self.placement,)
        return [
            PlacementPolicy(rule=rule, allocation=self.allocation, min_replicas=self.min_replicas) for rule in rules
        ]

    def replan_rule(self) -> ReplanRule:
        return ReplanRule(tolerance=self.replan_threshold, max_interval=self.max_replan_interval)


class BalancePlanner:
    """Plans for all layers of one model on one world.

    Args:
        policy: what to do.
        cluster: ranks, nodes and slots.
        placements: of each layer at the start.
        costs: constants of each layer's block; may be replaced later.

    Attributes:
        plans: shadows of each layer in the next step; None where none are planned yet.
        forecast_error: of each layer, the part of the last step's assignments that the forecast had elsewhere; None
            before the first forecast.
    """

    def __init__(
        self, policy: BalancePolicy, cluster: Cluster, placements: Sequence[Placement], costs: Sequence[BlockCosts]
    ) -> None:
        self.policy = policy
        self.cluster = cluster
        self.costs = list(costs)
        self.plans: list[ShadowPlan | None] = [None] * len(placements)
        self.forecast_error: list[float | None] = [None] * len(placements)
        self._placements = list(placements)
        self._forecasts = [LoadForecast(_DECAYS[policy.forecast]) for _ in placements]
        self._rules = [policy.replan_rule() for _ in placements]
        self._loads = np.zeros((len(placements), placements[0].num_experts), dtype=np.int64)
        self._interval = min(FIRST_REBALANCE, policy.rebalance_every)
        self._wait = self._interval

    # ------------------------------------------------------------------ fast scale

    def observe(self, layer: int, tokens_EN: IntArray) -> None:
        """Take in the assignments of one step, int64 [E, N], and plan the next step's shadows."""
        forecast = self._forecasts[layer].predict()
        if forecast is not None and forecast.shape == tokens_EN.shape:
            missed = np.abs(forecast - tokens_EN).sum()
            self.forecast_error[layer] = float(missed) / max(1, 2 * int(tokens_EN.sum()))
        self._forecasts[layer].observe(tokens_EN)
        self._loads[layer] += tokens_EN.sum(axis=1)
        if self.policy.shadows != "none":
            self._plan_shadows(layer)

    def _plan_shadows(self, layer: int) -> None:
        tokens, placement, costs = self._forecasts[layer].predict(), self._placements[layer], self.costs[layer]
        assert tokens is not None
        kept, rule = self.plans[layer], self._rules[layer]
        if self.policy.shadows != "search":
            self.plans[layer] = SHADOW_POLICIES[self.policy.shadows](tokens, placement, costs)
        elif kept is None or rule.due():
            fresh = search_shadows(tokens, placement, costs, alpha=self.policy.alpha)
            kept = no_shadows(tokens, placement) if kept is None else kept
            seconds = [float(predict_plan(tokens, placement, plan, costs).total_s) for plan in (kept, fresh)]
            self.plans[layer] = fresh if rule.judge(*seconds) else kept

    def step_plans(self) -> list[ShadowPlan] | None:
        """The shadows of the next step; None where no expert is to visit any rank."""
        if not any(plan is not None and plan.num_copies for plan in self.plans):
            return None
        loads = zip(self.plans, self._placements, self._loads, strict=True)
        return [no_shadows(load[:, None], here) if plan is None else plan for plan, here, load in loads]

    def early_shares(self) -> list[float]:
        """For each layer, the part of its Trans that runs under the experts of the block before it."""
        shares = []
        for layer, plan in enumerate(self.plans):
            tokens = self._forecasts[layer].predict()
            if plan is None or tokens is None or not plan.num_copies:
                shares.append(1.0)
                continue
            costs = self.costs[max(layer - 1, 0)]
            trans_s = float(predict_plan(tokens, self._placements[layer], plan, self.costs[layer]).trans_s)
            precision = 1 << 20
            shares.append(split_transfer(precision, trans_s, costs.dense_forward_s)[0] / precision)
        return shares

    def predicted_step(self) -> Timeline | None:
        """The next step as the performance model sees it; None before the first observation of every layer."""
        tokens = [forecast.predict() for forecast in self._forecasts]
        times = []
        for load, placement, plan, costs in zip(tokens, self._placements, self.plans, self.costs, strict=True):
            if load is None:
                return None
            plan = no_shadows(load, placement) if plan is None else plan
            times.append(predict_plan(load, placement, plan, costs))
        return predict_timeline(times, self.costs)

    # ------------------------------------------------------------------ slow scale

    def rebalance(self) -> list[Placement] | None:
        """Count one step; new placements where they are due and any layer gains by them."""
        if not self.policy.rebalance_every:
            return None
        self._wait -= 1
        if self._wait > 0 or not self._loads.any():
            return None
        self._interval = min(2 * self._interval, self.policy.rebalance_every)
        self._wait = self._interval
        placements = self.fresh_placements()
        return placements if placements != self._placements else None

    def fresh_placements(self) -> list[Placement]:
        """What the loads since the last placement, and fading earlier ones, ask for."""
        candidates = [
            replan_placement(self._loads, cluster, policy, self._placements, self.policy.tolerance)
            for policy in self.policy.placement_policies()
            for cluster in self._clusters()
        ]
        if len(candidates) > 1:
            options = zip(self._placements, *candidates, strict=True)
            candidates = [[self._best(layer, *placements) for layer, placements in enumerate(options)]]
        self._loads //= _FADE
        return candidates[0]

    def _clusters(self) -> list[Cluster]:
        """The cluster with all slots and, to choose from, with as few as a balanced placement needs."""
        if self.policy.placement != "auto":
            return [self.cluster]
        num_experts, num_ranks = self._placements[0].replicas.shape
        few = -(-(num_experts * self.policy.min_replicas + num_ranks - 1) // num_ranks)
        slots = sorted({min(few, self.cluster.slots_per_rank), self.cluster.slots_per_rank})
        return [replace(self.cluster, slots_per_rank=number) for number in slots]

    def _best(self, layer: int, present: Placement, *fresh: Placement) -> Placement:
        """The placement with the least predicted time; the present one unless another is better by the tolerance."""
        tokens, costs = self._forecasts[layer].predict(), self.costs[layer]
        if tokens is None:  # a restart on other ranks: as if every rank had the same tokens
            tokens = np.repeat(self._loads[layer][:, None] // self.cluster.num_ranks, self.cluster.num_ranks, axis=1)
        seconds = [_block_s(tokens, placement, costs) for placement in fresh]
        best = int(np.argmin(seconds))
        gain = _block_s(tokens, present, costs) > (1 + self.policy.tolerance) * seconds[best]
        return fresh[best] if gain else present

    def moved(self, placements: Sequence[Placement]) -> None:
        """The experts have moved: shadows of layers with a new placement must be planned anew."""
        for layer, (old, new) in enumerate(zip(self._placements, placements, strict=True)):
            if old != new:
                self.plans[layer] = None
                self._rules[layer] = self.policy.replan_rule()
        self._placements = list(placements)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Plain values: loads and forecasts. Plans are made again after a restart."""
        averages = [forecast.state_dict()["average"] for forecast in self._forecasts]
        return {
            "loads": self._loads.tolist(),
            "averages": [None if average is None else average.tolist() for average in averages],
            "interval": self._interval,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, also one of another number of ranks: then only loads are taken over.

        New placements are due at once, since a restart begins with the first ones.

        Raises:
            ConfigurationError: the state of a model with other layers or experts.
        """
        loads = np.array(state["loads"], dtype=np.int64)
        if loads.shape != self._loads.shape:
            raise ConfigurationError(
                f"the balancer's state is of {loads.shape} (layers, experts), but the model has {self._loads.shape}: "
                "resume with the model that wrote the checkpoint"
            )
        self._loads = loads
        self._interval, self._wait = int(state["interval"]), 1
        shape = self._placements[0].replicas.shape
        for forecast, average in zip(self._forecasts, state["averages"], strict=True):
            known = None if average is None else np.array(average, dtype=np.int64)
            forecast.load_state_dict({"average": known if known is not None and known.shape == shape else None})


def _block_s(tokens_EN: IntArray, placement: Placement, costs: BlockCosts) -> float:
    """Predicted seconds of a block without shadows, and of the two exchanges that sum its replicas' gradients."""
    held = placement.replicas > 0
    holders = held.sum(axis=1, keepdims=True)
    shared_N = (held * (holders - 1) / holders).sum(axis=0)
    exchange_s = (shared_N * costs.gradient_bytes / costs.bytes_per_s).max()
    sum_s = 2 * (exchange_s + costs.exchange_s) if shared_N.any() else 0.0
    return float(predict_plan(tokens_EN, placement, no_shadows(tokens_EN, placement), costs).total_s) + float(sum_s)
