"""Lossless windows in the simulator: what they cost, and that they lose steps but no token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.checkpoint_cost import save_cost
from moe_lightning.simulate.event_loop import simulate
from moe_lightning.simulate.failures import Failures
from moe_lightning.simulate.policy import Policy, policy
from moe_lightning.simulate.recommend import recommend
from moe_lightning.simulate.scenario import Report
from tests.unit.simulated import NODES, scenario, small_hardware, small_workload

ALL_FAIL = Failures(kind="exponential", node_mtbf_hours=0.5, simultaneous=NODES, repair_s=30.0)


def run(policy: Policy, **changes: object) -> Report:
    return simulate(replace(scenario("ours", failures=ALL_FAIL), policy=policy, **changes))  # type: ignore[arg-type]


def test_a_window_costs_what_its_snapshots_hold() -> None:
    work, hardware = small_workload(), small_hardware()
    experts = work.num_experts
    whole = save_cost(work, hardware, policy("ours"), NODES, experts, experts)
    for k in range(1, experts + 1):
        window = save_cost(work, hardware, policy("ours", lossless=True, k_snapshot=k), NODES, experts, experts)
        assert len(window.copies_s) == -(-experts // k)
        expert, dense = 14 * work.expert_params, 14 * work.dense_params
        frozen = sum(max(0, experts - (turn + 1) * k) for turn in range(len(window.copies_s))) * 2 * work.expert_params
        full = dense + work.num_layers * experts * expert
        assert window.persist_bytes == pytest.approx(whole.persist_bytes * (full + work.num_layers * frozen) / full)
        assert window.snapshot_s == max(window.copies_s) <= whole.snapshot_s


def test_windows_stall_less_and_lose_no_token() -> None:
    slow = replace(small_hardware(), host_copy_bytes_per_s=small_hardware().host_copy_bytes_per_s / 10)
    common = policy("ours", interval_steps=20)
    full = run(common, hardware=slow)
    window = run(replace(common, lossless=True, k_snapshot=1), hardware=slow)
    partial = run(replace(common, k_snapshot=1, k_persist=1, plt_threshold=None), hardware=slow)
    assert window.plt == 0 < partial.plt
    assert window.window is not None
    assert full.window is None
    assert window.stall_s / window.checkpoints < full.stall_s / full.checkpoints
    assert "s of replay" in window.table()


def test_what_windows_cannot_be_combined_with() -> None:
    for changes in ({"k_persist": 1}, {"scopes": "moc"}, {"saving": "blocking"}):
        with pytest.raises(ConfigurationError, match=r"policy\.lossless=true"):
            policy("ours", lossless=True, **changes)


@pytest.mark.slow
def test_recommend_chooses_windows_where_tokens_would_be_lost() -> None:
    slow = replace(small_hardware(), host_copy_bytes_per_s=small_hardware().host_copy_bytes_per_s / 10)
    often = replace(scenario("ours", failures=ALL_FAIL), hardware=slow)
    advice = recommend(often, simultaneous=2)
    assert advice.policy.lossless
    assert advice.report.plt == 0
    calm = recommend(scenario("ours"))
    assert not calm.policy.lossless
