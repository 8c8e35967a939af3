"""Planning beside the training: the step never waits for a plan that is not due, and threads decide nothing."""

from __future__ import annotations

from dataclasses import replace
from threading import Event, Lock
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.balancing import planner as layer_planner
from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.cost_model import BlockCosts
from moe_lightning.balancing.planner import BalancePlanner, BalancePolicy, LayerPlanner
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.dispatch.quota import ShadowPlan
from moe_lightning.errors import ConfigurationError
from tests.unit.planning_references import rebalance

EXPERTS, RANKS, LAYERS = 8, 4, 5
COSTS = BlockCosts(
    row_bytes=100, weight_bytes=10_000, gradient_bytes=10_000, bytes_per_s=1e9, rows_per_s=1e6, transfer="direct"
)


def make(timeout_s: float = 60.0, **policy: Any) -> BalancePlanner:
    placements = [uniform_placement(EXPERTS, RANKS)] * LAYERS
    return BalancePlanner(BalancePolicy(**policy), Cluster.of(RANKS, 3), placements, [COSTS] * LAYERS, timeout_s)


def counts(step: int, layer: int) -> np.ndarray:
    rng = np.random.default_rng([step // 3, layer])  # what is hot changes every third step
    return rng.multinomial(1000, rng.dirichlet(np.full(EXPERTS, 0.3)), size=RANKS).T


class Gate:
    """A search that waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = Event()
        self._search = layer_planner.search_shadows
        monkeypatch.setattr(layer_planner, "search_shadows", self)

    def __call__(self, *arguments: Any, **options: Any) -> ShadowPlan:
        assert self.open.wait(60)
        return self._search(*arguments, **options)


def test_the_training_thread_does_not_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    planner = make(rebalance_every=1)
    for layer in range(LAYERS):
        planner.observe(layer, counts(0, layer))  # returns, though no search has ended
    gate.open.set()
    assert any(plan is not None and plan.num_copies for plan in planner.plans)
    assert rebalance(planner) is not None
    planner.close()


def test_a_plan_that_never_comes_ends_the_step_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    planner = make(timeout_s=0.05, rebalance_every=0)
    for layer in range(LAYERS):
        planner.observe(layer, counts(0, layer))
    with pytest.raises(
        ConfigurationError, match=r"planning has not ended within 0.05 s: raise the strategy's timeout_s"
    ):
        planner.step_plans()
    gate.open.set()
    planner.close()


def test_plans_are_those_of_a_planner_that_nobody_waits_for() -> None:
    """What a step uses is what a planner in the same thread decides from the counts of the step before."""
    planner = make(rebalance_every=0)
    alone = [LayerPlanner(BalancePolicy(), uniform_placement(EXPERTS, RANKS)) for _ in range(LAYERS)]
    for step in range(12):
        expected = [planned.observe([counts(step, layer)], COSTS).plan for layer, planned in enumerate(alone)]
        for layer in range(LAYERS):
            planner.observe(layer, counts(step, layer))
        for plan, other in zip(planner.plans, expected, strict=True):
            assert (plan is None) == (other is None)
            if plan is not None and other is not None:
                assert (plan.shadows == other.shadows).all()
                assert plan.quota_rule == other.quota_rule
    planner.close()


@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 2**31))
def test_ranks_whose_threads_run_otherwise_decide_alike(seed: int) -> None:
    """One planner whose threads run freely, one whose layers are held up by chance: the same moves and visits."""
    histories = []
    for held_up in (False, True):
        rng, lock = np.random.default_rng(seed), Lock()
        planner = make(rebalance_every=3)
        if held_up:
            for layer in planner._layers:
                layer.observe = after_random_work(layer.observe, rng, lock)  # type: ignore[method-assign]
        history: list[Any] = []
        for step in range(10):
            placements = rebalance(planner)
            if placements is not None:
                planner.moved(placements)
                history.append([placement.replicas.tobytes() for placement in placements])
            plans = planner.step_plans()
            history.append(None if plans is None else [plan.shadows.tobytes() for plan in plans])
            for index in range(LAYERS):
                planner.observe(index, counts(step, index))
                if step == 5:
                    planner.costs[index] = replace(planner.costs[index], dense_forward_s=1e-3)
        history.append(planner.state_dict())
        histories.append(history)
        planner.close()
    assert histories[0] == histories[1]


def after_random_work(observe: Any, rng: np.random.Generator, lock: Lock) -> Any:
    """The same function, after work of random length."""

    def held(*arguments: Any) -> Any:
        with lock:
            size = int(rng.integers(1, 64))
        np.linalg.svd(np.ones((size, size)))
        return observe(*arguments)

    return held
