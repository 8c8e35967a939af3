"""Forecasts of loads and the rule that decides when to plan again."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.balancing.forecast import LoadForecast, ReplanRule


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
