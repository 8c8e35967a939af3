"""Dynamic-K: the staircase, the budget under many faults, and its state."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_moc import expected_plt
from moe_lightning.callbacks.lost_tokens import DynamicK as DynamicKCallback
from moe_lightning.checkpoint.policy import CheckpointLedger, Order
from moe_lightning.checkpoint.selection import (
    DynamicKRule,
    parse_scopes,
    worst_case_plt,
)
from tests.parameters import slow


def predictor(experts: int, interval: int, total_steps: int, model=worst_case_plt):
    return lambda k: model(num_experts=experts, k=k, interval=interval, total_steps=total_steps)


def test_staircase_under_uniform_routing() -> None:
    cost = predictor(16, 20, 100_000, expected_plt)
    dynamic = DynamicKRule(k0=1, num_experts=16, predicted_plt=cost)
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
    dynamic = DynamicKRule(k0=k0, num_experts=experts, predicted_plt=cost, threshold=0.05)
    for share in severity:
        assert k0 <= dynamic.k <= experts
        dynamic.after_fault(share * cost(dynamic.k))
    assert dynamic.total <= 0.05 + 1e-12


def test_state_survives_a_restart_and_a_smaller_model() -> None:
    cost = predictor(16, 5, 10_000, expected_plt)
    make = partial(DynamicKRule, k0=1, predicted_plt=cost)
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


def new_ledger(experts: int, order: Order, ranks: int = 1) -> CheckpointLedger:
    return CheckpointLedger(
        num_layers=2,
        num_experts=experts,
        planned_assignments=2000 * 64,
        owners=np.broadcast_to(np.arange(experts) % ranks, (2, experts)),
        num_ranks=ranks,
        scopes=parse_scopes("full"),
        order=order,
    )


@pytest.mark.parametrize("experts", [3, 4, 6, *(slow(n) for n in (7, 16))])
def test_the_bound_is_what_the_schedule_reaches_for_every_k(experts: int) -> None:
    for k_snapshot in range(1, experts + 1):
        for k_persist in range(1, k_snapshot + 1):
            kept, version, oldest = new_ledger(experts, "sequential"), np.zeros((2, experts), np.int64), 0
            kept.begin(0, kept.plan(k_snapshot, k_persist, full=True))
            for step in range(1, 2 * experts * experts + 1):
                plan = kept.plan(k_snapshot, k_persist)
                kept.begin(step, plan)
                version[plan.persist.mask()] = step
                oldest = max(oldest, step - int(version.min()))
            bound = worst_case_plt(num_experts=experts, k=k_persist, k_snapshot=k_snapshot, interval=1, total_steps=1)
            assert bound == oldest, (k_snapshot, k_persist)


@pytest.mark.parametrize("order", ["load_aware", "load_aware_global"])
@pytest.mark.parametrize("routing", ["random", "one expert is seldom chosen"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_budget_holds_under_load_aware_selection(order: Order, routing: str, ranks: int) -> None:
    """A restore after any checkpoint, and of any, keeps the losses below the threshold."""
    rng, experts, threshold = np.random.default_rng(0), 8, 0.02
    kept = new_ledger(experts, order, ranks)
    dynamic = DynamicKRule(k0=1, num_experts=experts, predicted_plt=lambda _: 0.0, threshold=threshold)
    kept.begin(0, kept.plan(1, 1, full=True))
    version, faults, rose = np.zeros((2, experts), np.int64), 0, False
    for step in range(1, 800):
        shares = rng.dirichlet(np.full(experts, 0.3))
        if routing != "random":
            shares[0] = 0.0 if step % 40 else 0.9
        counts = np.stack([rng.multinomial(64, shares / shares.sum()) for _ in range(2)])
        kept.ledger.record(counts)
        dynamic.before_checkpoint(lambda k, kept=kept: kept.cost(kept.plan(k, k)))  # type: ignore[misc]
        plan = kept.plan(dynamic.k, dynamic.k)
        kept.begin(step, plan)
        version[plan.persist.mask()] = step
        if rng.random() < 0.02:
            saved, plt = kept.state_dict(), kept.ledger.plt
            kept = new_ledger(experts, order, ranks)
            kept.restore(saved, step, version)
            dynamic.after_fault(kept.ledger.plt - plt)
            faults += 1
            kept.begin(step, kept.plan(1, 1, full=True))
            version[:] = step
        assert kept.ledger.plt <= threshold
        rose |= dynamic.k > 1
    assert faults > 5
    assert rose
    assert kept.ledger.plt > 0


def test_the_callback_keeps_what_was_spent_however_often_a_session_opens() -> None:
    cost = predictor(16, 5, 10_000, expected_plt)
    start = partial(DynamicKCallback.start, k0=1, num_experts=16, predicted_plt=cost)
    survivor, newcomer = DynamicKCallback(0.0375), DynamicKCallback(0.0375)
    rule = start(survivor)
    for _ in range(40):
        rule.after_fault(cost(1))
    state = survivor.state_dict()
    assert state["total"] > 0
    k = start(survivor).k
    assert survivor.state_dict() == state
    newcomer.load_state_dict(state)
    assert start(newcomer).k == k > 1
    start(survivor).after_fault(0.001)
    survivor.load_state_dict(state)  # a rollback
    assert start(survivor).k == k
    assert survivor.state_dict() == state


def test_a_longer_interval_after_a_resume_raises_k() -> None:
    before, after = DynamicKCallback(0.0375), DynamicKCallback(0.0375)
    k = before.start(k0=2, num_experts=16, predicted_plt=predictor(16, 5, 10_000)).k
    assert k == 2
    after.load_state_dict(before.state_dict())
    longer = predictor(16, 200, 10_000)
    k = after.start(k0=2, num_experts=16, predicted_plt=longer).k
    assert longer(2) > 0.0375 >= longer(k)
