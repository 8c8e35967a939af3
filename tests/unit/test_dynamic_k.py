"""Dynamic-K: the staircase, the budget under many faults, and its state."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.algorithms.dynamic_k import DynamicK
from moe_lightning.algorithms.ledger import Ledger, Source, expected_plt, worst_case_plt
from moe_lightning.algorithms.selection import full_selection, sequential_selection
from moe_lightning.errors import ConfigurationError
from tests.unit.test_ledger import load_trace


def predictor(experts: int, interval: int, total_steps: int, model=worst_case_plt):
    return lambda k: model(num_experts=experts, k=k, interval=interval, total_steps=total_steps)


def test_staircase_under_uniform_routing() -> None:
    cost = predictor(16, 20, 100_000, expected_plt)
    dynamic = DynamicK(k0=1, num_experts=16, predicted_plt=cost)
    seen = [dynamic.k, *(dynamic.after_fault(cost(dynamic.k)) for _ in range(200))]
    assert seen == sorted(seen)
    assert set(seen) >= {1, 2, 4}
    assert dynamic.total <= 0.0375
    constant = 200 * cost(1)
    assert constant > 5 * 0.0375, "without it the loss grows with every fault"


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([(4, 1), (16, 1), (16, 3), (32, 2), (7, 2)]),
    st.integers(1, 200),
    st.lists(st.floats(0, 1), min_size=1, max_size=200),
)
def test_budget_holds_when_no_fault_costs_more_than_predicted(
    shape: tuple[int, int], interval: int, severity: list[float]
) -> None:
    experts, k0 = shape
    cost = predictor(experts, interval, 5000)
    dynamic = DynamicK(k0=k0, num_experts=experts, predicted_plt=cost, threshold=0.05)
    for share in severity:
        assert k0 <= dynamic.k <= experts
        dynamic.after_fault(share * cost(dynamic.k))
    assert dynamic.total <= 0.05 + 1e-12


@pytest.mark.parametrize(("k0", "interval"), [(1, 1), (2, 4), (4, 16)])
def test_budget_holds_for_200_faults_on_the_recorded_trace(k0: int, interval: int) -> None:
    trace = load_trace()
    samples, layers, experts = trace.shape
    repeats = 4
    total_steps = samples * repeats
    ledger = Ledger(num_layers=layers, num_experts=experts, planned_assignments=repeats * trace.sum(axis=(0, 2)))
    dynamic = DynamicK(k0=k0, num_experts=experts, predicted_plt=predictor(experts, interval, total_steps))
    faults = set(np.random.default_rng(interval).choice(total_steps, 200, replace=False).tolist())
    full = full_selection(layers, experts).mask()
    ledger.begin_checkpoint(0, snapshot=full, persist=full)
    ledger.complete_checkpoint(0)
    struck = 0
    for step in range(total_steps):
        ledger.record(trace[step // repeats])
        if (step + 1) % interval == 0:
            ordinal = (step + 1) // interval
            mask = sequential_selection(ordinal=ordinal, k=dynamic.k, num_layers=layers, num_experts=experts).mask()
            ledger.begin_checkpoint(step + 1, snapshot=mask, persist=mask)
            ledger.complete_checkpoint(step + 1)
        if step in faults:
            before = ledger.plt
            ledger.recover(Source.STORAGE)
            dynamic.after_fault(ledger.plt - before)
            struck += 1
    assert struck == 200
    assert 0 < ledger.plt <= 0.0375
    assert dynamic.total == pytest.approx(ledger.plt)


def test_state_survives_a_restart_and_a_smaller_model() -> None:
    cost = predictor(16, 5, 10_000, expected_plt)
    make = partial(DynamicK, k0=1, predicted_plt=cost)
    dynamic = make(num_experts=16)
    for _ in range(20):
        dynamic.after_fault(cost(dynamic.k))
    restored = make(num_experts=16)
    restored.load_state_dict(dynamic.state_dict())
    assert restored.state_dict() == dynamic.state_dict()
    assert dynamic.k > 1
    small = make(num_experts=dynamic.k - 1)
    small.load_state_dict(dynamic.state_dict())
    assert small.k == dynamic.k - 1


def test_wrong_input_is_named() -> None:
    with pytest.raises(ConfigurationError, match="k0=9"):
        DynamicK(k0=9, num_experts=8, predicted_plt=lambda k: 0.0)
    with pytest.raises(ConfigurationError, match="threshold=2"):
        DynamicK(k0=1, num_experts=8, predicted_plt=lambda k: 0.0, threshold=2)
