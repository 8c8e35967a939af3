"""The simulator's laws: every node-nanosecond is booked, equal scenarios give equal reports, and more is not less."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.checkpoint.schedule import OverheadModel
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.cluster import Accounts
from moe_lightning.simulate.event_loop import simulate
from moe_lightning.simulate.failures import NS, Event, Failures
from moe_lightning.simulate.policy import POLICIES
from moe_lightning.simulate.workload import RoutingScenario
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


@settings(deadline=None, max_examples=25)
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
    run = scenario(name, failures=failures, seed=seed)
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


def test_nothing_but_steps_without_saving() -> None:
    report = simulate(scenario("ours", saving="none"))
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

    fewer = simulate(scenario(name, events=events(faults), interval_steps=60))
    more = simulate(scenario(name, events=events([*faults, further]), interval_steps=60))
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
    runs = [scenario(name, failures=failures, seed=seed, hardware=h, interval_steps=200) for h in (slow, fast)]
    before, after = (simulate(run) for run in runs)
    assert after.samples >= before.samples


def test_goodput_falls_with_the_failure_rate() -> None:
    def goodput(hours: float, name: str) -> float:
        failures = Failures(kind="exponential", node_mtbf_hours=hours, repair_s=60.0)
        return float(np.mean([simulate(scenario(name, failures=failures, seed=seed)).goodput for seed in range(2)]))

    for name in ("ours", "ds_ft", "gemini"):
        assert goodput(1.0, name) < goodput(8.0, name) < goodput(1e6, name), name


def test_agrees_with_youngs_model() -> None:
    """Blocking saves, nodes replaced at once: overhead is save / interval + rate * (restart + half an interval)."""
    run = scenario(
        "blocking",
        failures=Failures(kind="exponential", node_mtbf_hours=6.0, repair_s=1e-6),
        duration_s=100 * HOUR_S,
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
    assert live.recoveries[0].moved_states > 0
    stored = simulate(scenario("blocking", events=events, interval_steps=77))
    (recovery,) = stored.recoveries
    assert recovery.source == "storage"
    assert 0 < recovery.lost_steps <= 77


def test_protection_decides_how_many_nodes_may_fail() -> None:
    one = [START, Event(time_ns=1000 * NS, failed=(2,))]
    two = [START, Event(time_ns=1000 * NS, failed=(2, 3))]
    far = [START, Event(time_ns=1000 * NS, failed=(1, 4))]

    def source(name: str, events: list[Event]) -> str:
        return simulate(scenario(name, events=events, protection_group=6)).recoveries[0].source

    assert source("reft", one) == "protected memory"
    assert source("reft", two) == source("reft", far) == "storage"
    assert source("gemini", one) == source("gemini", far) == "protected memory"  # copies on the next node
    assert source("gemini", two) == "storage"


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
    kept = {"failures": failures, "duration_s": 4 * HOUR_S, "interval_steps": 20, "k_snapshot": 1, "k_persist": 1}
    constant = simulate(replace(s := scenario("moc", **kept), policy=replace(s.policy, plt_threshold=None)))
    limited = simulate(scenario("moc", **kept, plt_threshold=constant.plt / 4, plt_lookahead=True))
    full = simulate(scenario("base_async", failures=failures, duration_s=4 * HOUR_S, interval_steps=20))
    assert constant.plt > 0
    assert limited.plt <= constant.plt / 4
    assert limited.k_persist > constant.k_persist == 1
    assert full.plt == 0
    assert constant.written_bytes / constant.checkpoints < full.written_bytes / full.checkpoints


def test_drifting_routing_is_rebalanced() -> None:
    shares = np.ones((3, 1, 8), dtype=np.int64)
    shares[1, 0, 0] = shares[2, 0, 5] = 40
    routing = RoutingScenario(shares_SLE=shares, steps=np.array([0, 1000, 3000]))
    moving = simulate(scenario("ours", routing=routing, rebalance_every=100))
    staying = simulate(scenario("ours", routing=routing, rebalance_every=0))
    assert moving.rebalance_s > 0
    assert moving.samples > staying.samples


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
        ({"events": [Event(time_ns=0, failed=(0,))]}, "nodes (0,) leave and () come"),
        ({"events": [START, Event(time_ns=5), Event(time_ns=4)]}, "follows one at 5 ns: sort them"),
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
