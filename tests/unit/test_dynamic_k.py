"""Dynamic-K: the staircase, the budget under many faults, and its state."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_moc import expected_plt
from moe_lightning.callbacks.lost_tokens import DynamicK as DynamicKCallback
from moe_lightning.checkpoint.policy import CheckpointLedger, Order
from moe_lightning.checkpoint.selection import DynamicKRule, parse_scopes


def uniform_cost(k: int) -> float:
    """PLT of a restore under uniform routing."""
    return expected_plt(num_experts=16, k=k, interval=20, total_steps=100_000)


def test_staircase_under_uniform_routing() -> None:
    dynamic = DynamicKRule(k0=1, num_experts=16)
    seen = []
    for _ in range(200):
        seen.append(dynamic.before_checkpoint(uniform_cost))
        dynamic.after_fault(uniform_cost(dynamic.k))
    assert seen == sorted(seen)
    assert set(seen) >= {1, 2, 4}
    assert dynamic.total <= 0.0375
    constant = 200 * uniform_cost(1)
    assert constant > 5 * 0.0375, "without it the loss grows with every fault"


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([(4, 1), (16, 1), (16, 3), (32, 2), (7, 2)]),
    st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 1)), min_size=1, max_size=200),
)
def test_budget_holds_whatever_a_restore_costs(shape: tuple[int, int], faults: list[tuple[float, float]]) -> None:
    experts, k0 = shape
    dynamic = DynamicKRule(k0=k0, num_experts=experts, threshold=0.05)
    for most, share in faults:
        k = dynamic.before_checkpoint(lambda k, most=most: most * (1 - k / experts))  # type: ignore[misc]
        assert k0 <= k <= experts
        dynamic.after_fault(share * most * (1 - k / experts))
    assert dynamic.total <= 0.05 + 1e-12


def test_without_looking_ahead_k_rises_after_faults_only() -> None:
    dynamic = DynamicKRule(k0=1, num_experts=16, looks_ahead=False)
    assert dynamic.before_checkpoint(lambda _: 1.0) == 1
    assert dynamic.after_fault(0.02) == 2


def test_state_survives_a_restart_and_a_smaller_model() -> None:
    dynamic = DynamicKRule(k0=1, num_experts=16)
    for _ in range(20):
        dynamic.after_fault(0.001)
    restored = DynamicKRule(k0=1, num_experts=16)
    restored.load_state_dict(dynamic.state_dict())
    assert restored.state_dict() == dynamic.state_dict()
    assert dynamic.k > 1
    small = DynamicKRule(k0=1, num_experts=dynamic.k - 1)
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


@pytest.mark.parametrize("order", ["sequential", "load_aware", "load_aware_global"])
@pytest.mark.parametrize("routing", ["random", "one expert is seldom chosen"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_budget_holds_under_every_order(order: Order, routing: str, ranks: int) -> None:
    """A restore after any checkpoint, and of any, keeps the losses below the threshold."""
    rng, experts, threshold = np.random.default_rng(0), 8, 0.02
    kept = new_ledger(experts, order, ranks)
    dynamic = DynamicKRule(k0=1, num_experts=experts, threshold=threshold)
    kept.begin(0, kept.plan(1, 1, full=True))
    version, faults, rose = np.zeros((2, experts), np.int64), 0, False
    for step in range(1, 800):
        shares = rng.dirichlet(np.full(experts, 0.3))
        if routing != "random":
            shares[0] = 0.0 if step % 40 else 0.9
        counts = np.stack([rng.multinomial(64, shares / shares.sum()) for _ in range(2)])
        kept.record(counts)
        dynamic.before_checkpoint(lambda k, kept=kept: kept.cost(kept.plan(k, k)))  # type: ignore[misc]
        plan = kept.plan(dynamic.k, dynamic.k)
        kept.begin(step, plan)
        version[plan.persist.mask()] = step
        if rng.random() < 0.02:
            saved, plt = kept.state_dict(), kept.plt
            kept = new_ledger(experts, order, ranks)
            kept.restore(saved, step, version)
            dynamic.after_fault(kept.plt - plt)
            faults += 1
            kept.begin(step, kept.plan(1, 1, full=True))
            version[:] = step
        assert kept.plt <= threshold
        rose |= dynamic.k > 1
    assert faults > 5
    assert rose
    assert kept.plt > 0


def test_the_callback_keeps_what_was_spent_however_often_a_session_opens() -> None:
    start = partial(DynamicKCallback.start, k0=1, num_experts=16)
    survivor, newcomer = DynamicKCallback(0.0375), DynamicKCallback(0.0375)
    rule = start(survivor)
    for _ in range(40):
        rule.after_fault(0.0008)
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


@pytest.mark.parametrize(("step", "is_kept"), [(0, False), (7, True)])
def test_only_a_fit_that_begins_anew_forgets_what_was_spent(step: int, is_kept: bool) -> None:
    dynamic, trainer = DynamicKCallback(0.0375), SimpleNamespace(global_step=step)
    dynamic.start(k0=1, num_experts=16).after_fault(0.02)
    spent, module = dynamic.state_dict(), pl.LightningModule()
    dynamic.setup(trainer, module, "validate")  # type: ignore[arg-type]
    assert dynamic.state_dict() == spent
    dynamic.setup(trainer, module, "fit")  # type: ignore[arg-type]
    assert dynamic.state_dict() == (spent if is_kept else {})
