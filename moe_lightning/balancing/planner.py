"""Planner of the load balancer: state machines of counts and costs, equal on every rank.

Slow scale: placements, from the loads of the last steps, first after a few steps and then less and less often until
`rebalance_every`. Fast scale: each layer's shadow experts, from the forecast of the next step, searched again when the
current plan is due.

Planning runs in a thread beside the training, one task after the other in the order given. The plan of a step does not
depend on the thread's speed: it is the one made from the counts of the step before, and a step waits for it.

Shapes: L layers, E experts, N ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from moe_lightning.arrays import IntArray
from moe_lightning.balancing.cluster import AllocationPolicy, Cluster, bounded_loads
from moe_lightning.balancing.cost_model import (
    BlockCosts,
    BlockTimes,
    Timeline,
    pair_volumes,
    predict_block,
    predict_timeline,
    share_under_experts,
)
from moe_lightning.balancing.forecast import LoadForecast, ReplanRule
from moe_lightning.balancing.rules import (
    ONE_NODE_RULES,
    PLACEMENT_RULES,
    SHADOW_POLICIES,
    PlacementPolicy,
    replan_placement,
)
from moe_lightning.balancing.shadow_search import no_shadows, predict_plan, search_shadows
from moe_lightning.config import NonNegativeInt, PositiveInt, validated
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.quota import ShadowPlan, balanced_split, uneven
from moe_lightning.errors import ConfigurationError

_T = TypeVar("_T")

State = dict[str, Any]
"""Plain values that a balancer goes on from, of all MoE layers of a model that are known, whatever the mesh:
{"layers": {"NUMBER": {"load": [E], "average": [E][N] or None}}, "interval": steps, "num_layers": L}."""


def merged(states: Iterable[State | None]) -> State | None:
    """Merge states of layers; where several know a layer the first one counts."""
    known = [state for state in states if state]
    layers = {number: own for state in reversed(known) for number, own in state["layers"].items()}
    return known[0] | {"layers": layers} if known else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """Decision after one observation.

    Attributes:
        plan: the layer's shadows; None where none are planned.
        trans_s: predicted seconds of its Trans.
        forecast_error: part of the assignments that the forecast had elsewhere; None before the first forecast.
    """

    plan: ShadowPlan | None
    trans_s: float
    forecast_error: float | None


_UNDECIDED = Decision(plan=None, trans_s=0.0, forecast_error=None)


class LayerPlanner:
    """Forecasts a layer's tokens and plans its shadows.

    Args:
        policy: how to plan.
        placement: the layer's.
    """

    def __init__(self, policy: BalancePolicy, placement: Placement) -> None:
        self._policy = policy
        self._plan: ShadowPlan | None = None
        self._trans_s = 0.0
        self.forecast = LoadForecast(_DECAY)
        self.move(placement)
        self.load = np.zeros(placement.num_experts, dtype=np.int64)

    def observe(self, counts_EN: Sequence[IntArray], costs: BlockCosts) -> Decision:
        """Record the assignments of a step's micro-batches, int64 [E, N] each, and plan the next step's shadows."""
        tokens = np.ascontiguousarray(counts_EN[0] if len(counts_EN) == 1 else np.sum(counts_EN, axis=0))
        forecast, error = self.forecast.predict(), None
        if forecast is not None and forecast.shape == tokens.shape:
            error = float(np.abs(forecast - tokens).sum()) / max(1, 2 * int(tokens.sum()))
        self.forecast.observe(tokens)
        self.load += tokens.sum(axis=1)
        if self._policy.shadows != "none":
            self._replan(costs)
        return Decision(plan=self._plan, trans_s=self._trans_s, forecast_error=error)

    def _replan(self, costs: BlockCosts) -> None:
        tokens, placement, policy = self.forecast.predict(), self._placement, self._policy
        assert tokens is not None

        def predict(plan: ShadowPlan) -> BlockTimes:
            return predict_plan(tokens, placement, plan, costs)

        if policy.shadows != "search":
            self._plan = SHADOW_POLICIES[policy.shadows](tokens, placement, costs)
            self._trans_s = float(predict(self._plan).trans_s)
        elif self._plan is None or self._rule.due():
            fresh = search_shadows(tokens, placement, costs)
            kept = no_shadows(tokens, placement) if self._plan is None else self._plan
            current_s, fresh_s = predict(kept), predict(fresh)
            replaces = self._rule.judge(float(current_s.total_s), float(fresh_s.total_s))
            self._plan = fresh if replaces else kept
            self._trans_s = float((fresh_s if replaces else current_s).trans_s)

    def move(self, placement: Placement) -> None:
        """The layer's experts have moved: its shadows must be planned anew."""
        self._placement, self._plan = placement, None
        self._rule = ReplanRule(_REPLAN_THRESHOLD)

    def take_load(self, fade: int) -> tuple[IntArray, IntArray | None]:
        """The tokens of each expert so far int64 [E] and the forecast int64 [E, N]; loads then count 1 / fade."""
        load = self.load.copy()
        self.load //= fade
        return load, self.forecast.predict()

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the load and the forecast's average."""
        average = self.forecast.average
        return {"load": self.load.tolist(), "average": None if average is None else average.tolist()}

    def load_state(self, load: list[int], average: list[list[int]] | None) -> None:
        """Continue from a state; the average only if it is of as many experts and ranks."""
        self.load = np.array(load, dtype=np.int64)
        known = None if average is None else np.array(average, dtype=np.int64)
        fits = known is not None and known.shape == self._placement.pairs.shape
        self.forecast.average = known if fits else None


FIRST_REBALANCE = 8
"""Steps before the first new placement; the interval then doubles, since routing drifts most at the start."""

_FADE = 4
"""Loads of earlier intervals count a quarter with every new placement."""

_PARTS = 1 << 32
"""Fixed-point unit of parts of an expert's gradients."""

_DECAY = 0.5
"""Weight of the past in the forecast of a step's loads."""

_REPLAN_THRESHOLD = 0.1
"""A kept shadow plan is replaced when it is slower than a fresh one by more than this."""


@validated
@dataclass(frozen=True, kw_only=True)
class BalancePolicy:
    """Policy of the load balancer: replicas, placement, shadows and their schedule.

    Attributes:
        rebalance_every: steps between two placements once training has settled; 0: never.
        placement_rule: a name in `rules.PLACEMENT_RULES`, or "auto": for each layer what the performance model likes
            best of packed and spread, with few and with all slots, the sums of replica gradients counted in.
        allocation: replica counts for the rules that need them: "waterfill" or "eq1".
        min_replicas: distinct nodes that hold each expert, where slots allow.
        shadows: a name in `rules.SHADOW_POLICIES`; "none" plans none.

    Raises:
        ConfigurationError: a value outside its range or an unknown name.
    """

    rebalance_every: NonNegativeInt = 200
    placement_rule: str = "auto"
    allocation: AllocationPolicy = "waterfill"
    min_replicas: PositiveInt = 1
    shadows: str = "search"

    def __post_init__(self) -> None:
        if self.shadows not in SHADOW_POLICIES:
            raise ConfigurationError(f"shadows={self.shadows!r} is unknown: use one of {list(SHADOW_POLICIES)}")
        if self.placement_rule != "auto":
            PLACEMENT_RULES.find(self.placement_rule, "placement_rule")

    def require_protection(self) -> None:
        """
        Raises:
            ConfigurationError: the rule leaves experts on one node, and more are asked for.
        """
        if self.placement_rule in ONE_NODE_RULES and self.rebalance_every and self.min_replicas > 1:
            raise ConfigurationError(
                f"placement_rule={self.placement_rule} leaves experts on one node, and min_replicas="
                f"{self.min_replicas} asks for more: use packed or auto, or the same min_replicas=1 in LoadBalancer "
                "and FaultRecovery"
            )

    def candidates(self, cluster: Cluster, num_experts: int) -> list[PlacementPolicy]:
        """Every rule on all slots and, where the model is to choose, on as few as a balanced placement needs."""
        rules, slots = [self.placement_rule], [cluster.slots_per_rank]
        if self.placement_rule == "auto":
            rules = ["packed", "spread"]
            few = -(-(num_experts * self.min_replicas + cluster.num_ranks - 1) // cluster.num_ranks)
            slots = sorted({min(few, cluster.slots_per_rank), cluster.slots_per_rank})
        return [
            PlacementPolicy(rule=rule, allocation=self.allocation, min_replicas=self.min_replicas, slots=number)
            for rule in rules
            for number in slots
        ]


class BalancePlanner:
    """Plans for the MoE layers of one rank, in a pipeline those of its stages, on one world.

    Args:
        policy: what to do.
        cluster: ranks, nodes and slots.
        placements: of each layer at the start.
        costs: constants of each layer's block.
        timeout_s: longest wait for a plan.
        numbers: of the layers among those of the whole model; None: they are all.
        num_layers: of the whole model; None: as many as planned for.

    Attributes:
        costs: as given, with the speeds and times that were measured since.
        numbers: as given.
    """

    def __init__(
        self,
        policy: BalancePolicy,
        cluster: Cluster,
        placements: Sequence[Placement],
        costs: Sequence[BlockCosts],
        timeout_s: float = 600.0,
        *,
        numbers: Sequence[int] | None = None,
        num_layers: int | None = None,
    ) -> None:
        self.policy = policy
        self.cluster = cluster
        self.costs = list(costs)
        self.numbers = range(len(placements)) if numbers is None else numbers
        self._num_layers = len(placements) if num_layers is None else num_layers
        self._placements = list(placements)
        self._layers = [LayerPlanner(policy, placement) for placement in placements]
        self._timeout_s = timeout_s
        # One thread: a search is thousands of short numpy calls; two would hand the interpreter to and fro.
        self._pool = ThreadPoolExecutor(1, "moe-plan")
        self._decisions: list[Future[Decision] | None] = [None] * len(placements)
        self._observed = 0  # layers in this step
        self._placing: Future[list[Placement]] | None = None
        self._interval = min(FIRST_REBALANCE, policy.rebalance_every)
        self._wait = self._interval

    def set_dense_times(self, forward_s: Sequence[float], backward_s: Sequence[float]) -> None:
        """Plan with these times of each block's dense layers; the same on every rank, after the same step."""
        self.costs = [
            replace(costs, dense_forward_s=forward, dense_backward_s=backward)
            for costs, forward, backward in zip(self.costs, forward_s, backward_s, strict=True)
        ]

    def set_speeds(self, speeds: IntArray | None) -> None:
        """Plan for ranks of these speeds, int64 [N], from now on, and soon for new placements; the same on every rank,
        after the same step."""
        speeds = uneven(speeds)
        self.costs = [costs.at(speeds) for costs in self.costs]
        self.cluster = replace(self.cluster, speeds=None if speeds is None else tuple(speeds.tolist()))
        self._wait = min(self._wait, FIRST_REBALANCE)

    def _result(self, future: Future[_T]) -> _T:
        """Return the result of a task, waited for.

        Raises:
            ConfigurationError: it took longer than the timeout.
        """
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            raise ConfigurationError(
                f"planning has not ended within {self._timeout_s:g} s: raise the strategy's timeout_s, or plan less "
                "with shadows=none or a larger rebalance_every"
            ) from error

    def close(self) -> None:
        """Drop waiting tasks and the results of running ones; the planner is of no use afterwards."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ fast scale

    def observe(self, layer: int, *counts_EN: IntArray) -> None:
        """Record the assignments of one step's micro-batches, int64 [E, N] each, and start planning from them."""
        self._decisions[layer] = self._pool.submit(self._layers[layer].observe, counts_EN, self.costs[layer])
        self._observed += 1
        if self._observed == len(self._layers):
            self._observed = 0
            if self.policy.rebalance_every and self._wait <= 1 and self._placing is None:
                self._placing = self._place()

    @property
    def decisions(self) -> list[Decision]:
        """Decision of each layer for the next step, from the counts of the step before it."""
        return [_UNDECIDED if made is None else self._result(made) for made in self._decisions]

    @property
    def plans(self) -> list[ShadowPlan | None]:
        """Shadows of each layer in the next step; None where none are planned yet."""
        return [decision.plan for decision in self.decisions]

    def step_plans(self) -> list[ShadowPlan] | None:
        """The shadows of the next step; None where no expert is to visit any rank."""
        plans = self.plans
        if not any(plan is not None and plan.num_copies for plan in plans):
            return None
        nothing = np.zeros((self._placements[0].num_experts, 1), dtype=np.int64)
        layers = zip(plans, self._placements, strict=True)
        return [no_shadows(nothing, placement) if plan is None else plan for plan, placement in layers]

    def early_shares(self) -> list[float]:
        """For each layer, the part of its Trans that runs under the experts of the block before it."""
        shares = []
        for layer, decision in enumerate(self.decisions):
            if decision.plan is None or not decision.plan.num_copies:
                shares.append(1.0)
                continue
            shares.append(share_under_experts(decision.trans_s, self.costs[max(layer - 1, 0)].dense_forward_s))
        return shares

    def predicted_step(self) -> Timeline | None:
        """The next step as the performance model sees it; None before the first observation of every layer."""
        times = []
        for layer, (placement, plan, costs) in enumerate(zip(self._placements, self.plans, self.costs, strict=True)):
            tokens = self._result(self._pool.submit(self._layers[layer].forecast.predict))
            if tokens is None:
                return None
            plan = no_shadows(tokens, placement) if plan is None else plan
            times.append(predict_plan(tokens, placement, plan, costs))
        return predict_timeline(times, self.costs)

    # ------------------------------------------------------------------ slow scale

    def due_placements(self) -> list[Placement] | None:
        """Count one step; the placements of all layers where new ones are due, those that gain nothing as they are."""
        self._observed = 0
        if not self.policy.rebalance_every:
            return None
        self._wait -= 1
        if self._wait > 0:
            return None
        placing = self._placing or self._place()
        self._placing = None
        self._interval = min(2 * self._interval, self.policy.rebalance_every)
        self._wait = self._interval
        return self._result(placing)

    def _place(self) -> Future[list[Placement]]:
        """Have placements made from the loads up to here."""
        return self._pool.submit(self._placements_for, self.cluster, list(self._placements), list(self.costs))

    def _placements_for(self, cluster: Cluster, present: list[Placement], costs: list[BlockCosts]) -> list[Placement]:
        all_loads, forecasts = zip(*(layer.take_load(_FADE) for layer in self._layers), strict=True)
        loads = bounded_loads(np.stack(all_loads))  # they grow for as long as nothing is placed
        if not loads.any():
            return present

        def predicted_s(layer: int, placement: Placement) -> float:
            tokens = forecasts[layer]
            if tokens is None:  # a restart on other ranks: as if every rank had the same tokens
                shape = placement.pairs.shape
                tokens = np.ascontiguousarray(np.broadcast_to(loads[layer][:, None] // shape[1], shape))
            return block_with_sums_s(tokens, placement, costs[layer])

        candidates = self.policy.candidates(cluster, len(loads[0]))
        return replan_placement(
            loads,
            cluster,
            candidates,
            present,
            block_s=predicted_s if len(candidates) > 1 else None,
        )

    def moved(self, placements: Sequence[Placement]) -> None:
        """The experts have moved: shadows of layers with a new placement must be planned anew."""
        for layer, (old, new) in enumerate(zip(self._placements, placements, strict=True)):
            if old != new:
                self._pool.submit(self._layers[layer].move, new)
                self._decisions[layer] = None
        self._placements = list(placements)
        self._placing = None  # what is under way moves experts from where they no longer are

    # ------------------------------------------------------------------ state

    def state_dict(self) -> State:
        """Loads and forecasts of the layers here. Plans are made again after a restart."""
        states = [self._result(self._pool.submit(layer.state_dict)) for layer in self._layers]
        layers = dict(zip(map(str, self.numbers), states, strict=True))
        return {"layers": layers, "interval": self._interval, "num_layers": self._num_layers}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state, also one of another number of ranks: then only loads are taken over. Layers that it
        lacks stay as they are.

        New placements are due at once, since a restart begins with the first ones.

        Raises:
            ConfigurationError: the state of a model with other layers or experts.
        """
        if state["num_layers"] != self._num_layers:
            raise ConfigurationError(
                f"the balancer's state is of {state['num_layers']} MoE layers, but the model has {self._num_layers}: "
                "resume with the model that wrote the checkpoint"
            )
        states = [state["layers"].get(str(number)) for number in self.numbers]
        num_experts, known = self._placements[0].num_experts, [own for own in states if own is not None]
        if other := next((len(own["load"]) for own in known if len(own["load"]) != num_experts), None):
            raise ConfigurationError(
                f"the balancer's state is of {other} experts, but the model has {num_experts}: resume with the model "
                "that wrote the checkpoint"
            )
        # 0 comes from a run that placed nothing
        self._interval, self._wait = int(state["interval"]) or min(FIRST_REBALANCE, self.policy.rebalance_every), 1
        for layer, own in zip(self._layers, states, strict=True):
            if own is not None:
                self._result(self._pool.submit(layer.load_state, own["load"], own["average"]))


def block_with_sums_s(tokens_EN: IntArray, placement: Placement, costs: BlockCosts) -> float:
    """Predicted seconds of a block without shadows, and of the two exchanges that sum its replicas' gradients."""
    pairs = placement.pairs
    # Of an expert with h holders each exchanges (h - 1) / h of its gradients; summed in integers, alike everywhere.
    parts = (_PARTS - _PARTS // pairs.num_holders)[pairs.experts]
    shared_N = pairs.on_ranks(parts) / _PARTS
    sum_s = 0.0
    if shared_N.any():
        sum_s = 2 * (float((shared_N * costs.gradient_bytes / costs.bytes_per_s).max()) + costs.exchange_s)
    volumes = pair_volumes(tokens_EN, pairs, balanced_split(tokens_EN.sum(axis=1), pairs, costs.speeds))
    nothing = np.zeros((2, placement.num_ranks), dtype=np.int64)
    return float(predict_block(volumes, nothing, costs).total_s) + sum_s
