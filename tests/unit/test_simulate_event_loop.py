"""The simulator's laws: every node-nanosecond is booked, equal scenarios give equal reports, and more is not less."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.checkpoint.recovery_plan import RecoveryPlan, plan_recovery
from moe_lightning.checkpoint.schedule import OverheadModel
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.checkpoint_cost import save_cost
from moe_lightning.simulate.cluster import Accounts, Mark, SavedState, inventories
from moe_lightning.simulate.event_loop import simulate
from moe_lightning.simulate.failures import NS, Event, Failures
from moe_lightning.simulate.hardware import Hardware
from moe_lightning.simulate.policy import POLICIES, Policy, policy
from moe_lightning.simulate.recommend import _checkpoints, mixture_of, recommend
from moe_lightning.simulate.scenario import Report
from moe_lightning.simulate.step_model import StepCost, StepModel
from moe_lightning.simulate.workload import RoutingScenario, make_routing
from tests.unit.planning_references import survives
from tests.unit.simulated import HOUR_S, NODES, scenario, small_hardware, small_workload

RATES = st.floats(0.1, 20.0)
START = Event(time_ns=0, joined=tuple(range(NODES)))


def _provided_ns(events: list[Event], end_ns: int) -> int:
    """Node-nanoseconds of a list of events, counted in the plainest way."""
    live: set[int] = set()
    total, last = 0, 0
    for event in [*events, Event(time_ns=end_ns)]:
        total += (min(event.time_ns, end_ns) - last) * len(live)
        last = min(event.time_ns, end_ns)
        live = (live - set(event.failed)) | set(event.joined)
    return total


@settings(deadline=None, max_examples=12)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(["exponential", "weibull", "periodic"]),
    RATES,
    st.integers(1, 3),
    st.sampled_from([None, 30.0, 900.0]),
    st.integers(0, 5),
)
def test_node_seconds_are_conserved(
    name: str, kind: str, mtbf_hours: float, together: int, repair_s: float | None, seed: int
) -> None:
    failures = Failures(
        kind=kind,  # type: ignore[arg-type]
        node_mtbf_hours=mtbf_hours,
        shape=1.4,
        simultaneous=together,
        repair_s=repair_s,
    )
    run = scenario(name, failures=failures, seed=seed, interval_steps=200)
    report = simulate(run)
    parts = (report.useful_ns, report.lost_ns, report.overhead_ns, report.idle_ns)
    assert min(parts) >= 0
    assert sum(parts) == report.provided_ns == _provided_ns(list(run.events), round(HOUR_S * NS))
    assert 0.0 <= report.plt <= 1.0
    assert simulate(run) == report


def test_a_quiet_cluster_only_trains_and_saves() -> None:
    report = simulate(scenario("blocking", interval_steps=100))
    assert (report.lost_ns < report.step_s * NS * NODES, report.idle_ns, report.recoveries) == (True, 0, ())
    assert report.overhead_ns == pytest.approx(report.stall_s * NS * NODES, rel=1e-9)
    assert report.steps == pytest.approx((HOUR_S - report.stall_s) / report.step_s, abs=1.5)
    assert report.samples == report.steps * 8 * NODES
    assert report.checkpoints == report.steps // 100


def test_checkpoints_that_wait_for_storage_are_reported_as_they_come() -> None:
    report = simulate(scenario(hardware=small_hardware(storage_bytes_per_s=2e7), interval_steps=5))
    assert report.interval_steps > 100
    assert report.checkpoints == pytest.approx(report.steps / report.interval_steps, abs=2)


def test_a_checkpoint_on_its_way_is_not_counted() -> None:
    given = scenario("base_async", hardware=small_hardware(storage_bytes_per_s=2e7), interval_steps=5)
    report = simulate(given)
    early = simulate(replace(given, duration_s=2.5 * report.interval_steps * report.step_s))
    assert early.checkpoints == 1, "the second one has begun"
    assert early.written_bytes == pytest.approx(report.written_bytes / report.checkpoints)


def test_nothing_but_steps_without_saving() -> None:
    tight = small_hardware(host_memory_bytes=1e9)
    report = simulate(scenario("ours", saving="none", memory_interval_steps=None, hardware=tight))
    assert (report.host_bytes, report.warnings) == (0.0, ())
    assert report.useful_ns + report.lost_ns == report.provided_ns
    assert report.steps == int(HOUR_S / report.step_s)


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(["blocking", "base_async", "moc", "reft"]),
    st.lists(st.tuples(st.floats(1.0, 3500.0), st.integers(0, NODES - 1)), max_size=8),
    st.tuples(st.floats(1.0, 3500.0), st.integers(0, NODES - 1)),
)
def test_a_further_failure_never_raises_goodput(
    name: str, faults: list[tuple[float, int]], further: tuple[float, int]
) -> None:
    """With nodes that are replaced at once, so that only the faults differ, and after all others: two nodes that fail
    at once lose less than one that fails before what protects it is whole again.
    """
    further = (max([1.0, *(time_s for time_s, _ in faults)]) + further[0], further[1])

    def events(strikes: list[tuple[float, int]]) -> list[Event]:
        times = {round(time_s * NS): node for time_s, node in strikes}
        return [START, *(Event(time_ns=t, failed=(n,), joined=(n,)) for t, n in sorted(times.items()))]

    fewer = simulate(scenario(name, events=events(faults), interval_steps=240))
    more = simulate(scenario(name, events=events([*faults, further]), interval_steps=240))
    assert more.samples <= fewer.samples


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["ours", "ds", "moc"]),
    st.sampled_from(["link_bytes_per_s", "storage_bytes_per_s", "host_copy_bytes_per_s", "flops_per_s"]),
    st.floats(1.1, 10.0),
    st.integers(0, 4),
)
def test_more_bandwidth_never_lowers_goodput(name: str, what: str, factor: float, seed: int) -> None:
    failures = Failures(kind="exponential", node_mtbf_hours=3.0, repair_s=600.0)
    slow = small_hardware()
    fast = small_hardware(**{what: factor * getattr(slow, what)})
    runs = [scenario(name, failures=failures, seed=seed, hardware=h, interval_steps=600) for h in (slow, fast)]
    before, after = (simulate(run) for run in runs)
    assert after.samples >= before.samples


def test_agrees_with_youngs_model() -> None:
    """Blocking saves, nodes replaced at once: overhead is save / interval + rate * (restart + half an interval)."""
    run = scenario(
        "blocking",
        failures=Failures(kind="exponential", node_mtbf_hours=6.0, repair_s=1e-6),
        duration_s=40 * HOUR_S,
        interval_steps=400,
        join_wait_s=0.0,
    )
    # A node that is away for a microsecond must not shrink the world: fold its return into its failure.
    events = [
        Event(time_ns=e.time_ns, failed=e.failed, joined=e.failed or e.joined)
        for e in run.events
        if e.failed or e.time_ns == 0
    ]
    report = simulate(replace(run, events=events))
    stall_s = report.stall_s / report.checkpoints
    restart_s = float(np.mean([recovery.seconds for recovery in report.recoveries]))
    model = OverheadModel(
        step_s=report.step_s,
        overlap_s=0.0,
        snapshot_s=stall_s,
        persist_s=0.0,
        restart_s=restart_s,
        failure_rate_per_s=(len(events) - 1) / run.duration_s,
    )
    overhead = (report.provided_ns - report.useful_ns) / report.useful_ns
    assert overhead == pytest.approx(model.overhead_share(400), rel=0.1)


def test_live_replicas_lose_no_step_and_storage_does() -> None:
    events = [START, Event(time_ns=1000 * NS, failed=(2,))]
    live = simulate(scenario("lazarus", events=events))
    assert [(r.source, r.lost_steps, r.nodes) for r in live.recoveries] == [("live replicas", 0, 5)]
    assert live.recoveries[0].seconds > policy("lazarus").detect_s + policy("lazarus").regroup_s, "experts move"
    stored = simulate(scenario("blocking", events=events, interval_steps=77))
    (recovery,) = stored.recoveries
    assert recovery.source == "storage"
    assert 0 < recovery.lost_steps <= 77
    assert stored.lost_steps == recovery.lost_steps


def test_whole_groups_only() -> None:
    report = simulate(scenario("ds", events=[START, Event(time_ns=1800 * NS, failed=(0,))]))
    assert {span.used_nodes for span in report.spans if span.state == "train"} == {6, 4}
    assert report.idle_ns > 0


def test_too_few_nodes_wait_for_others() -> None:
    lost = Event(time_ns=600 * NS, failed=(0, 1, 2, 3, 4))
    back = Event(time_ns=1200 * NS, joined=(0, 1, 2))
    report = simulate(scenario("lazarus", events=[START, lost, back]))
    assert [span.state for span in report.spans if span.state != "stall"] == ["train", "idle", "recover", "train"]
    assert report.recoveries[0].source == "storage"


def test_nodes_that_join_are_taken_in_together() -> None:
    events = [
        Event(time_ns=0, joined=(0, 1, 2)),
        *(Event(time_ns=t * NS, joined=(n,)) for t, n in ((500, 3), (560, 4))),
    ]
    report = simulate(scenario("ours", events=events, join_wait_s=120.0))
    assert [(r.source, r.time_s, r.nodes) for r in report.recoveries] == [("join", 620.0, 5)]


def test_a_failure_during_a_recovery_begins_it_anew() -> None:
    events = [START, Event(time_ns=1000 * NS, failed=(1,)), Event(time_ns=1005 * NS, failed=(2,))]
    report = simulate(scenario("lazarus", events=events))
    assert [r.source for r in report.recoveries] in (["live replicas"] * 2, ["live replicas", "storage"])
    assert report.recoveries[1].time_s == 1005.0


def test_partial_checkpoints_lose_tokens_and_dynamic_k_limits_them() -> None:
    failures = Failures(kind="periodic", period_s=200.0, repair_s=1.0)
    kept = {"failures": failures, "interval_steps": 20, "k_snapshot": 1, "k_persist": 1}
    constant = simulate(replace(s := scenario("moc", **kept), policy=replace(s.policy, plt_threshold=None)))
    limited = simulate(scenario("moc", **kept, plt_threshold=constant.plt / 4, plt_lookahead=True))
    full = simulate(scenario("base_async", failures=failures, interval_steps=20))
    assert constant.plt > 0
    assert limited.plt <= constant.plt / 4
    assert limited.k_persist > constant.k_persist == 1
    assert full.plt == 0
    assert constant.written_bytes / constant.checkpoints < full.written_bytes / full.checkpoints


def test_tokens_since_the_last_checkpoint_are_lost_with_an_expert() -> None:
    """One of nine nodes had the only copy of an expert, which was written with the first checkpoint."""
    events = [Event(time_ns=0, joined=tuple(range(9))), Event(time_ns=1800 * NS, failed=(8,))]
    one_layer = small_workload(num_layers=1)
    given = scenario(
        events=events,
        nodes=9,
        workload=one_layer,
        routing=make_routing("uniform", num_experts=8, num_layers=1),
        slots=1,
        min_replicas=1,
        k_snapshot=1,
        k_persist=1,
        interval_steps=20_000,
    )
    report = simulate(replace(given, policy=replace(given.policy, plt_threshold=None)))
    steps, planned = int(1800 / report.step_s), round(HOUR_S / report.step_s)
    assert 40_000 < steps < 60_000, "two checkpoints were written"
    assert [(r.source, r.lost_steps) for r in report.recoveries] == [("live replicas", 0)]
    assert report.plt == pytest.approx((steps - 20_000) / planned / 8, rel=1e-4)


def test_too_few_nodes_lose_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are trained again from storage are no lost tokens of the experts that had no replica."""
    levels = []
    restore = SavedState.restore

    def seen(saved: SavedState, plan: RecoveryPlan, now: Mark) -> Mark:
        levels.append(plan.level)
        return restore(saved, plan, now)

    monkeypatch.setattr(SavedState, "restore", seen)
    events = [Event(time_ns=0, joined=tuple(range(8))), Event(time_ns=1800 * NS, failed=(0, 1, 2, 3, 4))]
    partial = {"slots": 2, "min_replicas": 1, "k_snapshot": 2, "k_persist": 1, "interval_steps": 50}
    report = simulate(scenario(events=events, nodes=8, **partial))
    assert levels == ["storage"]
    assert not report.recoveries
    assert report.plt > 0
    assert 0 < report.lost_steps <= 50
    assert f"rolled back  {report.lost_steps} steps" in report.table()


def test_drifting_routing_is_rebalanced() -> None:
    shares = np.ones((3, 1, 8), dtype=np.int64)
    shares[1, 0, 0] = shares[2, 0, 5] = 40
    routing = RoutingScenario(shares_SLE=shares, steps=np.array([0, 1000, 3000]))
    moving = simulate(scenario("ours", routing=routing, rebalance_every=100))
    staying = simulate(scenario("ours", routing=routing, rebalance_every=0))
    assert moving.rebalance_s > 0
    assert moving.samples > staying.samples


def test_a_rebalancing_in_a_step_that_saves_takes_its_time() -> None:
    shares = np.ones((100, 1, 8), dtype=np.int64)
    shares[np.arange(100), 0, np.arange(100) % 8] = 40
    routing = RoutingScenario(shares_SLE=shares, steps=10 * np.arange(100))

    def booked_s(rebalance_every: int) -> tuple[float, float]:
        """Seconds of rebalancing, and of all other overhead but stalls."""
        every = {"rebalance_every": rebalance_every, "interval_steps": 10, "saving": "blocking"}
        report = simulate(scenario("ours", events=[START], duration_s=600.0, routing=routing, **every))
        return report.rebalance_s, report.overhead_ns / NS / NODES - report.stall_s - report.rebalance_s

    (moving_s, others_s), (_, expected_s) = booked_s(10), booked_s(0)
    assert moving_s > 1
    assert others_s == pytest.approx(expected_s, abs=1)  # the end cuts what runs


@pytest.mark.slow
def test_month_of_ten_thousand_ranks_is_simulated_in_seconds() -> None:
    workload = small_workload(num_experts=256, num_layers=24, top_k=8, rank_batch=None, global_batch=20_000)
    run = scenario(
        "ours",
        workload=workload,
        hardware=small_hardware(),
        nodes=10_000,
        slots=None,
        duration_s=30 * 86_400.0,
        failures=Failures(kind="exponential", node_mtbf_hours=600_000.0, repair_s=4 * HOUR_S),
        interval_steps=2000,
    )
    report = simulate(run)
    assert len(report.recoveries) > 10
    assert report.useful_ns > 0.5 * report.provided_ns


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"duration_s": 0.0}, "duration_s=0.0 must be above 0"),
        ({"nodes": 1, "slots": 4}, "8 experts do not fit 1 ranks of 4 slots"),
        ({"events": [Event(time_ns=0)]}, "no node ever joins"),
        ({"name": "theirs"}, "policy.name='theirs' is unknown"),
        ({"strategy": "magic"}, "policy.strategy='magic' is unknown"),
        ({"k_snapshot": 2, "k_persist": 3}, "k_persist=3 exceeds k_snapshot=2"),
        ({"interval_steps": 0}, "policy.interval_steps=0 must be an integer of at least 1"),
        ({"name": "reft", "saving": "none"}, "protects snapshots"),
    ],
)
def test_mistakes_are_one_sentence(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        simulate(scenario(**changes))  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_accounts_roll_back_to_a_mark() -> None:
    books = Accounts()
    books.work(10, 3, 4)
    books.finish_steps(2, 6)
    mark = books.mark()
    books.work(7, 3, 4)
    books.finish_steps(1, 3)
    books.work(2, 3, 4)
    books.roll_back(mark)
    books.wait(5, 2, 4)
    books.close()
    assert (books.useful_ns, books.lost_ns, books.overhead_ns, books.idle_ns) == (30, 27, 10, 29)
    assert (books.step, books.samples, books.lost_steps) == (2, 6, 1)


# ----------------------------------------------------------------------
# Lossless windows in the simulator: what they cost, and that they lose steps but no token.


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


def test_the_first_checkpoint_of_a_session_costs_all_experts() -> None:
    work, hardware, kept = small_workload(), small_hardware(), policy("ours", k_snapshot=1, k_persist=1)
    whole, some = (save_cost(work, hardware, kept, NODES, k, k) for k in (work.num_experts, 1))
    report = simulate(scenario(k_snapshot=1, k_persist=1, plt_threshold=None, interval_steps=200))
    assert report.checkpoints > 2
    assert report.written_bytes == pytest.approx(whole.persist_bytes + (report.checkpoints - 1) * some.persist_bytes)
    assert report.host_bytes == simulate(scenario(interval_steps=200)).host_bytes


def test_a_snapshot_that_is_only_protected_costs_all_experts() -> None:
    kept = {"saving": "async", "interval_steps": 1000, "memory_interval_steps": 1, "protection": "arc"}
    slow = small_hardware(host_copy_bytes_per_s=small_hardware().host_copy_bytes_per_s / 100)
    some = simulate(scenario(**kept, hardware=slow, k_snapshot=1, k_persist=1, plt_threshold=None))
    assert some.steps == pytest.approx(simulate(scenario(**kept, hardware=slow)).steps, rel=0.01)


def test_a_recommended_interval_is_that_of_the_given_k() -> None:
    slow = small_hardware(storage_bytes_per_s=2e7)
    for fixed in ({"k_persist": 8}, {"k_snapshot": 8, "k_persist": 8}, {"k_snapshot": 2, "k_persist": 2}):
        given = scenario("ours", failures=ALL_FAIL, hardware=slow, **fixed)
        found = _checkpoints(given, fixed)
        k = fixed["k_persist"]
        assert (found.k_persist, found.k_snapshot) == (k, fixed.get("k_snapshot", k))
        model = StepModel(given.workload, slow, given.policy, given.routing, NODES)
        written_s = save_cost(given.workload, slow, given.policy, NODES, k, k).persist_s
        shortest = written_s / model.cost(NODES, 0, 0).step_s
        assert shortest <= found.interval_steps
        assert found.interval_steps < 1.5 * shortest


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


# ----------------------------------------------------------------------
# Simulated clusters whose nodes differ in speed, jitter, or become slow for a while.


BATCH = {"rank_batch": None, "global_batch": 960}


def cost(hardware: Hardware, name: str = "ours", **changes: object) -> StepCost:
    work = small_workload(**BATCH)
    routing = make_routing("zipf", num_experts=work.num_experts, num_layers=4)
    plan = policy(name, **({"slots": 4} | changes))
    return StepModel(work, hardware, plan, routing, NODES).cost(NODES, 0, 0)


def slow_hardware(**changes: object) -> Hardware:
    return small_hardware(latency_s=0.0, expert_s=0.0, **changes)


def test_equal_speeds_are_no_speeds() -> None:
    assert cost(small_hardware(speeds=[1.0, 1.0])) == cost(small_hardware())


@pytest.mark.parametrize("speeds", [[0.5, 1, 1, 1, 1, 1], [1.0, 0.5], [0.8, 1.0, 1.0]])
def test_work_that_follows_speed_takes_its_mean_and_even_work_the_slowest(speeds: list[float]) -> None:
    calm, mean = cost(slow_hardware()), sum(speeds) / len(speeds)
    followed = cost(slow_hardware(speeds=speeds))
    even = cost(slow_hardware(speeds=speeds), by_speed=False)
    for part in ("dense_s", "experts_s"):
        assert getattr(followed, part) == pytest.approx(getattr(calm, part) / mean, rel=0.03)
        assert getattr(even, part) == pytest.approx(getattr(calm, part) / min(speeds), rel=0.03)
    assert followed.imbalance < 1.02 < even.imbalance


def test_baselines_divide_evenly() -> None:
    assert cost(slow_hardware(speeds=[1.0, 0.5]), "lazarus").dense_s == pytest.approx(
        2 * cost(slow_hardware(), "lazarus").dense_s
    )


def test_jitter_makes_others_wait_for_the_slowest() -> None:
    hardware = small_hardware(jitter=0.2)
    assert hardware.waiting(1) == 1
    assert 1.1 < hardware.waiting(8) < hardware.waiting(64) < 1.7
    assert cost(hardware).dense_s == pytest.approx(hardware.waiting(NODES) * cost(small_hardware()).dense_s)


def test_a_rank_is_slow_for_a_while() -> None:
    work = small_workload(**BATCH)
    calm = simulate(scenario(workload=work, events=None, failures=None)).samples
    hardware = small_hardware(slow_speed=0.5, slow_from_s=HOUR_S / 4, slow_until_s=HOUR_S / 2)
    for by_speed, expected in ((True, 1 / (5.5 / 6)), (False, 2.0)):
        run = simulate(scenario(workload=work, hardware=hardware, by_speed=by_speed))
        spans = [span for span in run.spans if span.state == "train"]
        assert len({round(span.samples_per_s) for span in spans}) >= 2
        part = 1 - run.samples / calm
        assert 0 < part < (1 - 1 / expected) / 4 + 0.05
    forever = simulate(scenario(workload=work, hardware=small_hardware(slow_speed=0.5, slow_from_s=HOUR_S / 2)))
    assert forever.samples < calm
    later = simulate(scenario(workload=work, hardware=small_hardware(slow_speed=0.5, slow_from_s=2 * HOUR_S)))
    assert later.samples == calm


def test_a_rank_that_slows_down_during_a_stall_is_slow() -> None:
    work = small_workload(**BATCH)
    kept = {"workload": work, "saving": "blocking", "interval_steps": 200, "by_speed": False}
    calm = simulate(scenario(**kept))
    stall_s = calm.stall_s / calm.checkpoints
    begin_s = 200 * calm.step_s
    during = [round(begin_s + part * stall_s, 6) for part in (-0.5, 0.5, 1.5)]
    steps = [simulate(scenario(**kept, hardware=small_hardware(slow_speed=0.5, slow_from_s=at))).steps for at in during]
    assert sorted(steps) == steps
    assert steps[-1] < 0.7 * calm.steps
    until = [
        simulate(scenario(**kept, hardware=small_hardware(slow_speed=0.5, slow_from_s=0.0, slow_until_s=at))).steps
        for at in during
    ]
    assert sorted(until, reverse=True) == until
    assert until[-1] > 0.9 * calm.steps


@pytest.mark.slow
def test_recommend_says_what_mixing_costs() -> None:
    run = scenario(workload=small_workload(**BATCH), hardware=small_hardware(speeds=[1.0, 0.5]))
    mixture = mixture_of(run)
    mixed, even = (float(cost) for cost in re.findall(r"(\S+) %", mixture))
    assert -1 <= mixed < even
    assert "speeds       mixing costs" in recommend(run).table()
    assert mixture_of(scenario()) is None


@pytest.mark.parametrize(("changes", "said"), [({"speeds": []}, "names no node"), ({"speeds": [1.0, 0.0]}, "speeds")])
def test_wrong_speeds_are_one_sentence(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        small_hardware(**changes)


# ----------------------------------------------------------------------
# Where a simulated recovery takes state from: the library's own recovery plan, fed with what the nodes hold.


EXPERTS = 8


def _saved(chosen: Policy) -> SavedState:
    return SavedState(small_workload(), chosen, num_layers=1, planned_assignments=10**6, interval_steps=10)


def _level(chosen: Policy, failed: tuple[int, ...]) -> str:
    """Of the plan after six nodes took a snapshot at step 20, wrote it, took one at 30 and lost some at 35."""
    saved = _saved(chosen)
    writers = (np.arange(EXPERTS) % NODES)[None]
    nodes = tuple(range(NODES))
    saved.begin(Mark(step=20), nodes, writers, done_ns=5, nbytes=1.0)
    saved.commit_written(5)
    saved.begin(Mark(step=30), nodes, writers, done_ns=50, nbytes=1.0)
    saved.lose(failed)
    holders = {node: tuple((0, e) for e in range(EXPERTS) if node in (e % NODES, (e + 1) % NODES)) for node in nodes}
    left = [node for node in nodes if node not in failed]
    found = inventories(left, {n: holders[n] for n in left}, 35, chosen, newest=saved.newest, stored=saved.stored)
    plan = plan_recovery(found, saved.on_storage(), num_layers=1, num_experts=EXPERTS)
    mark = saved.restore(plan, Mark(step=35))
    assert mark.step == {"live": 35, "memory": 30, "storage": 20}[plan.level]
    return plan.level


@pytest.mark.parametrize("count", [1, 2, 3])
def test_protection_survives_what_its_layout_says(count: int) -> None:
    for name, method in (("reft", "aec"), ("reft", "arc"), ("gemini", None)):
        chosen = policy(name, protection_group=6, **({"protection": method} if method else {}))
        for failed in combinations(range(NODES), count):
            expected = "memory" if survives(chosen.layout_of(NODES), failed) else "storage"
            assert _level(chosen, failed) == expected, (name, method, failed)


def test_live_replicas_come_first_and_storage_last() -> None:
    assert _level(policy("lazarus"), (0,)) == "live"
    assert _level(policy("lazarus"), (0, 1)) == "storage"  # both replicas of an expert
    assert _level(policy("ours", protection="arc"), (0, 2)) == "live"
    assert _level(policy("ours", protection="arc", protection_copies=2), (0, 1)) == "memory"
    assert _level(policy("ds"), (0,)) == "storage"


def test_partial_snapshots_are_found_stale() -> None:
    """Two-level recovery: what survivors hold is as new as memory, the rest as old as storage; the ledger counts it."""
    chosen = policy("moc", k_snapshot=4, k_persist=1, plt_threshold=None)
    plt = {}
    for failed in ((), tuple(range(NODES))):
        saved = _saved(chosen)
        writers = (np.arange(EXPERTS) % NODES)[None]
        nodes = tuple(range(NODES))
        for step in (10, 20, 30):
            saved.record(np.full((1, EXPERTS), 100))
            saved.begin(Mark(step=step), nodes, writers, done_ns=step, nbytes=1.0)
            saved.commit_written(step)
        saved.lose(failed)
        left = [node for node in nodes if node not in failed] or [NODES]
        found = inventories(left, {}, 30, chosen, newest=saved.newest, stored=saved.stored)
        plan = plan_recovery(found, saved.on_storage(), num_layers=1, num_experts=EXPERTS)
        assert plan.version == 30
        saved.restore(plan, Mark(step=35))
        plt[len(failed)] = saved.plt
    # Storage lacks 6 experts by 200 tokens and 1 by 100; memory, where 4 of 8 are taken at a time, 4 by 100.
    assert plt[NODES] == pytest.approx(1300 / 10**6)
    assert plt[0] == pytest.approx(400 / 10**6)


def test_the_first_checkpoint_of_each_world_holds_all_experts() -> None:
    saved = _saved(policy("moc", k_snapshot=1, k_persist=1, plt_threshold=None))
    writers = np.zeros((1, EXPERTS), dtype=np.int64)
    for step in (10, 20, 30):
        if step == 30:
            saved.begin_session()
        saved.begin(Mark(step=step), (0,), writers, done_ns=step, nbytes=1.0)
    saved.commit_written(30)
    assert saved.on_storage().versions == ((30,) * EXPERTS,)


def test_a_checkpoint_that_is_skipped_leaves_its_turn_to_the_next() -> None:
    """As agents commit: each checkpoint holds what was due by then."""
    saved = _saved(policy("moc", k_snapshot=2, k_persist=1, plt_threshold=None))
    writers = np.zeros((1, EXPERTS), dtype=np.int64)
    for step in (10, 20, 30):
        saved.begin(Mark(step=step), (0,), writers, done_ns=40 - step, nbytes=1.0)
    saved.commit_written(10)
    assert sorted(saved.on_storage().versions[0]) == [10] * 6 + [20, 30]
    assert len(saved.committed_bytes) == 1


def test_a_node_that_comes_back_brings_no_memory() -> None:
    away = Event(time_ns=1000 * NS, failed=(2,), joined=(2,))
    again = Event(time_ns=1001 * NS, failed=(3,))
    report = simulate(scenario("reft", events=[START, away, again], protection_group=6, interval_steps=50))
    assert [recovery.source for recovery in report.recoveries] == ["protected memory", "storage"]
