"""Failures that are drawn, periodic or read: their rates, their order, and traces that cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.simulate.failures import NS, Event, Failures, cap_nodes, read_trace
from tests.traces import recorded
from tests.unit.simulated import require_possible

HOUR_S = 3600.0


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["exponential", "weibull", "periodic"]),
    st.floats(0.05, 50.0),
    st.floats(0.5, 3.0),
    st.integers(1, 4),
    st.sampled_from([None, 1.0, 5000.0]),
    st.integers(0, 9),
    st.integers(0, 4),
)
def test_drawn_events_can_happen(
    kind: str, mtbf_hours: float, shape: float, together: int, repair_s: float | None, seed: int, least: int
) -> None:
    failures = Failures(
        kind=kind,  # type: ignore[arg-type]
        node_mtbf_hours=mtbf_hours,
        shape=shape,
        simultaneous=together,
        repair_s=repair_s,
        min_nodes=least,
    )
    events = failures.events(8, 10 * HOUR_S, seed)
    require_possible(events)
    assert events == failures.events(8, 10 * HOUR_S, seed)
    live = 0
    for event in events:
        live += len(event.joined) - len(event.failed)
        assert len(event.failed) <= together
        assert least <= live <= 8
        assert event.time_ns < 10 * HOUR_S * NS


@pytest.mark.parametrize(("kind", "shape"), [("exponential", 1.0), ("weibull", 0.7), ("weibull", 2.0)])
def test_mean_time_between_failures(kind: str, shape: float) -> None:
    failures = Failures(kind=kind, node_mtbf_hours=10.0, shape=shape, repair_s=1e-3)  # type: ignore[arg-type]
    strikes = sum(len(event.failed) for event in failures.events(50, 2000 * HOUR_S, 1))
    assert strikes == pytest.approx(50 * 2000 / 10, rel=0.05)


def test_periodic_failures_choose_different_nodes() -> None:
    events = Failures(kind="periodic", period_s=300.0, min_nodes=5).events(10, HOUR_S, 0)
    assert [event.time_ns // NS for event in events] == [0, 300, 600, 900, 1200, 1500]
    assert len({event.failed for event in events[1:]}) == 5


def test_full_cluster_turns_nodes_away() -> None:
    events = [Event(time_ns=0, joined=(0, 1, 2)), Event(time_ns=1, failed=(1, 2)), Event(time_ns=2, joined=(3, 4))]
    assert cap_nodes(events, 2) == [
        Event(time_ns=0, joined=(0, 1)),
        Event(time_ns=1, failed=(1,)),
        Event(time_ns=2, joined=(3,)),
    ]


def test_trace_begins_where_it_is_asked_to(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n0,add,b\n4000,remove,a\n5000,add,c\n9000,remove,b\n")
    assert read_trace(path, start_ms=5000) == [
        Event(time_ns=0, joined=(1, 2)),
        Event(time_ns=4 * NS, failed=(1,)),
    ]
    events = Failures(kind="trace", path=str(path)).events(8, 5.0, 0)
    assert [event.time_ns // NS for event in events] == [0, 4]


def test_recorded_spot_instances() -> None:
    events = read_trace(recorded("spot_trace_p3.csv"))
    require_possible(events)
    live = np.cumsum([len(event.joined) - len(event.failed) for event in events])
    assert (live[0], live.max(), len(events)) == (18, 32, 163)
    assert max(len(event.failed) for event in events) == 6  # 19 percent of 32 (Lazarus 6.4)
