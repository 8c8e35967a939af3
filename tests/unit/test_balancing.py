"""The facade: every policy and baseline gives valid plans through one interface, and the judgement adds up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.balancing.cluster import Cluster, balance_ratio, imbalance
from moe_lightning.balancing.cost_model import BlockCosts
from moe_lightning.balancing.forecast import LoadForecast, ReplanRule
from moe_lightning.balancing.migration import align_placements, held_states, plan_migration
from moe_lightning.balancing.packing import longest_time
from moe_lightning.balancing.rules import (
    PLACEMENT_RULES,
    SHADOW_POLICIES,
    STRATEGIES,
    PlacementPolicy,
    evaluate,
    plan_placement,
    plan_shadows,
    replan_placement,
)
from moe_lightning.dispatch.quota import balanced_quota
from moe_lightning.errors import ConfigurationError

COSTS = BlockCosts(row_bytes=64, weight_bytes=2e4, gradient_bytes=2e4, bytes_per_s=1e8, rows_per_s=1e6)
CLUSTER = Cluster.of(8, 3, ranks_per_node=2)


def skewed(layers: int = 3, experts: int = 8, ranks: int = 8, seed: int = 0) -> np.ndarray:
    """int64 [L, E, N]: every rank routes 512 assignments by the same skewed popularity."""
    rng = np.random.default_rng(seed)
    popularity = rng.dirichlet(np.full(experts, 0.3), size=layers)
    return np.stack([rng.multinomial(512, p, size=ranks).T for p in popularity])


@pytest.mark.parametrize("rule", list(PLACEMENT_RULES))
def test_every_rule_places_within_slots_and_is_aligned_to_what_ranks_hold(rule: str) -> None:
    tokens = skewed()
    policy = PlacementPolicy(rule=rule)
    first = plan_placement(tokens.sum(axis=2), CLUSTER, policy)
    assert len(first) == 3
    for placement in first:
        assert placement.replicas.sum(axis=0).max() <= CLUSTER.slots_per_rank
        assert placement.replicas.sum(axis=1).min() >= 1
    again = align_placements(held_states(first), plan_placement(tokens.sum(axis=2), CLUSTER, policy), CLUSTER)
    assert not plan_migration(held_states(first), again)  # the same plan for the same loads: nothing moves


def test_replanning_moves_only_the_layers_that_gain() -> None:
    loads, policy = skewed(experts=16).sum(axis=2), PlacementPolicy(min_replicas=1)
    current = plan_placement(loads, CLUSTER, policy)
    assert replan_placement(loads, CLUSTER, [policy], current, tolerance=0.05) == current
    drifted = loads.copy()
    drifted[1] = np.roll(loads[1], 5)
    replanned = replan_placement(drifted, CLUSTER, [policy], current, tolerance=0.05)
    assert replanned[0] == current[0]
    assert replanned[2] == current[2]
    busiest = [balanced_quota(drifted[1], p[1].replicas).sum(axis=0).max() for p in (replanned, current)]
    assert busiest[0] < 0.9 * busiest[1]
    assert replan_placement(drifted, CLUSTER, [policy], current, tolerance=10.0) == current


def test_ranks_of_another_speed_do_not_carry_the_shares_that_were_planned_for_others() -> None:
    rng, even = np.random.default_rng(5), Cluster.of(4, 5)
    policy, num_moved = PlacementPolicy(rule="packed", min_replicas=1), 0
    for slow in range(4):
        speeds = tuple(2048 if rank == slow else 4096 for rank in range(4))
        cluster = replace(even, speeds=speeds)
        for _ in range(5):
            load = (rng.pareto(1.2, 16) * 1000 + 10).astype(np.int64)
            present, planned = policy.place(load, even), policy.place(load, cluster)
            (placed,) = replan_placement(load[None], cluster, [policy], [present], tolerance=0.02)
            num_moved += placed != present
            if placed != present:
                assert longest_time(placed, load, cluster) <= 1.02 * longest_time(planned, load, cluster)
    assert num_moved > 5


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_strategy_is_judged_by_the_same_measures(name: str) -> None:
    tokens, strategy = skewed(), STRATEGIES[name]
    placements = plan_placement(tokens.sum(axis=2), CLUSTER, strategy.placement)
    shadows = plan_shadows(tokens, placements, [COSTS] * 3, strategy.shadows)
    for layer, (placement, plan) in enumerate(zip(placements, shadows, strict=True)):
        report = evaluate(tokens[layer], placement, plan, COSTS, strategy)
        assert 1.0 <= report.imbalance <= CLUSTER.num_ranks
        assert report.block_s > 0
        assert (report.copy_bytes > 0) == (plan.num_copies > 0)
        if not plan.num_copies:
            assert report.exposed_s == 0.0


def test_ours_beats_plain_and_padding_only_costs_traffic() -> None:
    tokens = skewed(layers=1)
    reports = {}
    for name in ("plain", "padded", "packed", "prophet"):
        strategy = STRATEGIES[name]
        placement = plan_placement(tokens.sum(axis=2), CLUSTER, strategy.placement)
        plan = plan_shadows(tokens, placement, [COSTS], strategy.shadows)[0]
        reports[name] = evaluate(tokens[0], placement[0], plan, COSTS, strategy)
    assert reports["plain"].balance_ratio == 1.0
    assert reports["padded"].imbalance == reports["plain"].imbalance
    assert reports["padded"].exchange_bytes > 2 * reports["plain"].exchange_bytes
    for name in ("packed", "prophet"):
        assert reports[name].block_s < 0.6 * reports["plain"].block_s
        assert reports[name].balance_ratio > 3


def test_bytes_by_hand() -> None:
    tokens = np.array([[3, 1], [0, 4]])
    strategy = STRATEGIES["plain"]
    placements = plan_placement(tokens.sum(axis=1)[None], Cluster.of(2, 1), strategy.placement)
    plan = plan_shadows(tokens[None], placements, [COSTS])[0]
    top2 = SHADOW_POLICIES["top2"](tokens, placements[0], COSTS)
    report = evaluate(tokens, placements[0], plan, COSTS, strategy)
    assert report.exchange_bytes == 4 * 1 * 64
    assert report.imbalance == 1.0
    assert evaluate(tokens, placements[0], top2, COSTS, strategy).copy_bytes == 2 * (20_000 + 20_000)


def test_measures_by_hand() -> None:
    assert imbalance(np.array([6, 2, 1])) == 2.0
    assert imbalance(np.zeros(3, dtype=np.int64)) == 1.0
    assert balance_ratio(np.array([8, 0]), np.array([5, 3])) == 4.0
    assert balance_ratio(np.array([8, 0]), np.array([4, 4])) == float("inf")
    assert balance_ratio(np.array([4, 4]), np.array([4, 4])) == 1.0


def test_wrong_input_is_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match="24 slots cannot hold 25"):
        plan_placement(np.ones((1, 25), dtype=np.int64), CLUSTER, PlacementPolicy(rule="plain"))
    tokens = skewed()
    placements = plan_placement(tokens.sum(axis=2), CLUSTER, PlacementPolicy())
    with pytest.raises(ConfigurationError, match="after the world has changed"):
        replan_placement(tokens.sum(axis=2), Cluster.of(6, 3), [PlacementPolicy()], placements)


# ----------------------------------------------------------------------
# Forecasts of loads and the rule that decides when to plan again.


def test_without_decay_the_last_step_is_the_forecast() -> None:
    forecast = LoadForecast()
    assert forecast.predict() is None
    for counts in ([1, 2**31 - 1], [7, 0]):
        forecast.observe(np.array(counts))
        assert forecast.predict().tolist() == counts  # type: ignore[union-attr]


@settings(deadline=None, max_examples=80)
@given(steps=st.lists(st.integers(0, 10**6), min_size=1, max_size=30), decay=st.floats(0, 0.99))
def test_the_average_follows_the_real_one(steps: list[int], decay: float) -> None:
    forecast, exact = LoadForecast(decay), float(steps[0])
    for count, step in enumerate(steps):
        forecast.observe(np.array([step]))
        exact = decay * exact + (1 - decay) * step if count else exact
    predicted = int(forecast.predict()[0])  # type: ignore[index]
    assert abs(predicted - exact) <= 1.5 + len(steps) * 10**6 / 2**16
    assert min(steps) - 1 <= predicted <= max(steps) + 1


def test_another_shape_starts_afresh() -> None:
    forecast = LoadForecast(0.5)
    forecast.observe(np.array([4, 4]))
    forecast.observe(np.array([9]))
    assert forecast.predict().tolist() == [9]  # type: ignore[union-attr]
    forecast.observe(np.array([3]))
    assert forecast.predict().tolist() == [6]  # type: ignore[union-attr]
    assert LoadForecast().predict() is None


def searches(rule: ReplanRule, steps: int, replaced_until: int) -> list[int]:
    """Steps that searched, when fresh plans win until a step."""
    searched = []
    for step in range(steps):
        if rule.due():
            searched.append(step)
            rule.judge(current_s=2.0 if step < replaced_until else 1.0, fresh_s=1.0)
    return searched


def test_searches_are_dense_while_plans_age_and_rare_once_they_last() -> None:
    assert searches(ReplanRule(max_interval=8), 40, replaced_until=4) == [0, 1, 2, 3, 4, 6, 10, 18, 26, 34]


def test_a_plan_within_tolerance_is_kept_and_drift_resets_the_interval() -> None:
    rule = ReplanRule(tolerance=0.1, max_interval=16)
    assert not rule.judge(current_s=1.09, fresh_s=1.0)
    assert not rule.judge(current_s=1.0, fresh_s=1.0)
    assert [rule.due() for _ in range(4)] == [False, False, False, True]
    assert rule.judge(current_s=1.2, fresh_s=1.0)
    assert rule.due()
