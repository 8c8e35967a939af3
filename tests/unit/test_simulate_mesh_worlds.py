"""Nodes that are lost on a mesh: whole data slices train on, others wait, and who holds the dense state decides."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.simulate.event_loop import simulate
from moe_lightning.simulate.failures import NS, Event, Failures
from moe_lightning.simulate.mesh import DENSE, NOTHING, WHOLE, MeshSpec, is_whole, missing, parts_of_ranks
from moe_lightning.simulate.mesh_search import mesh_report
from moe_lightning.simulate.scenario import Scenario, model_of
from tests.unit.simulated import scenario, small_hardware, small_workload

NODES, PER_NODE = 6, 4
START = Event(time_ns=0, joined=tuple(range(NODES)))


def _scenario(mesh: MeshSpec, *events: Event, name: str = "ours", **changes: Any) -> Scenario:
    work = small_workload(num_layers=4, depth=4, num_heads=8, kv_heads=8, rank_batch=4)
    hardware = replace(small_hardware(), ranks_per_node=PER_NODE)
    run = scenario(name, events=[START, *events], workload=work, hardware=hardware, nodes=NODES, **changes)
    return replace(run, mesh=mesh)


@pytest.mark.parametrize(("pp", "cp", "tp"), [(1, 1, 2), (2, 1, 2), (2, 2, 2), (4, 1, 1), (1, 2, 4), (3, 1, 1)])
def test_survivors_form_whole_data_slices(pp: int, cp: int, tp: int) -> None:
    mesh = MeshSpec(pp=pp, cp=cp, tp=tp)
    model = model_of(_scenario(mesh))
    for nodes in range(1, NODES + 1):
        ranks = model.ranks(nodes)
        assert ranks == nodes * PER_NODE // (pp * cp * tp) * (pp * cp * tp)
        if model.usable_nodes(nodes):
            assert model.usable_nodes(nodes) == -(-ranks // PER_NODE)


@pytest.mark.parametrize(
    ("mesh", "source"),
    [
        (MeshSpec(tp=2), "live replicas"),
        (MeshSpec(pp=2, tp=4), "live replicas"),
        (MeshSpec(dense="hsdp"), "live replicas"),
        (MeshSpec(pp=2, dense="hsdp", shard_size=4), "live replicas"),
        (MeshSpec(dense="fsdp"), "storage"),
        (MeshSpec(dense="zero1"), "storage"),
        (MeshSpec(dense="hsdp", shard_size=24), "storage"),  # one copy
    ],
)
def test_what_a_lost_node_takes_with_it(mesh: MeshSpec, source: str) -> None:
    report = simulate(_scenario(mesh, Event(time_ns=1800 * NS, failed=(2,))))
    assert [recovery.source for recovery in report.recoveries] == [source]
    found = mesh_report(_scenario(mesh))
    assert found is not None
    assert found.is_live == (source == "live replicas")
    assert ("has all of the dense state" in found.table()) == found.is_live
    assert (found.dp_after, found.waiting) == divmod((NODES - 1) * PER_NODE, mesh.unit)


def test_snapshots_that_are_protected_bring_sharded_state_back() -> None:
    lost = Event(time_ns=1800 * NS, failed=(2,))
    run = _scenario(MeshSpec(dense="fsdp"), lost, protection="arc", memory_interval_steps=1)
    assert [recovery.source for recovery in simulate(run).recoveries] == ["protected memory"]


def test_a_stage_that_is_lost_is_not_live() -> None:
    """Six stages of a node each: nobody else has any of them."""
    work = small_workload(num_layers=6, num_heads=8, kv_heads=8, rank_batch=4)
    run = replace(_scenario(MeshSpec(), Event(time_ns=1800 * NS, failed=(5,))), workload=work, mesh=MeshSpec(pp=6))
    report = simulate(run)
    assert [recovery.source for recovery in report.recoveries] == ["storage"]
    assert report.recoveries[0].nodes == 5  # 18 of the 20 ranks


def test_ranks_that_make_no_slice_wait() -> None:
    report = simulate(_scenario(MeshSpec(pp=2, tp=4), Event(time_ns=1800 * NS, failed=(5,))))
    spans = [span for span in report.spans if span.state == "train"]
    assert (spans[0].used_nodes, spans[-1].used_nodes, spans[-1].live_nodes) == (6, 4, 5)
    assert report.share("idle") > 0.05


def test_survivors_keep_their_stage() -> None:
    """Each stage has two nodes to spare: nothing moves but the slices' experts."""
    changes: dict[str, Any] = {"min_replicas": 2, "slots": 4}
    report = simulate(_scenario(MeshSpec(pp=2, tp=4), Event(time_ns=1800 * NS, failed=(1,)), **changes))
    plain = simulate(_scenario(MeshSpec(), Event(time_ns=1800 * NS, failed=(1,)), **changes))
    assert report.recoveries[0].source == plain.recoveries[0].source == "live replicas"
    assert report.recoveries[0].nodes == 4


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([(1, 1, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1)]),
    st.sampled_from(DENSE),
    st.sampled_from(["ours", "lazarus", "moc", "reft", "gemini"]),
    st.floats(0.2, 5.0),
    st.integers(0, 5),
)
def test_node_seconds_are_conserved(
    axes: tuple[int, int, int], dense: Any, name: str, mtbf_hours: float, seed: int
) -> None:
    pp, cp, tp = axes
    drawn = Failures(kind="exponential", node_mtbf_hours=mtbf_hours, repair_s=600.0).events(NODES, 3600.0, seed)
    run = _scenario(MeshSpec(pp=pp, cp=cp, tp=tp, dense=dense), name=name)
    report = simulate(replace(run, events=drawn))
    parts = (report.useful_ns, report.lost_ns, report.overhead_ns, report.idle_ns)
    assert min(parts) >= 0
    assert sum(parts) == report.provided_ns


def test_parts_of_the_dense_state() -> None:
    half, quarter = Fraction(1, 2), Fraction(1, 4)
    assert set(parts_of_ranks(MeshSpec(), 8, 4)) == {WHOLE}
    assert parts_of_ranks(MeshSpec(pp=2), 4, 4) == ((0, half), (0, half), (half, 1), (half, 1))
    assert parts_of_ranks(MeshSpec(pp=2, dense="fsdp"), 4, 4)[2] == (half, 3 * quarter)
    assert parts_of_ranks(MeshSpec(tp=2), 4, 4) == ((0, half), (half, 1)) * 2
    assert parts_of_ranks(MeshSpec(dense="hsdp"), 8, 2) == ((0, half), (half, 1)) * 4
    for dense in DENSE:
        assert is_whole(parts_of_ranks(MeshSpec(pp=2, cp=2, tp=2, dense=dense), 32, 8))
    assert not is_whole([(Fraction(0), half), (Fraction(2, 3), Fraction(1))])
    assert not is_whole([])
    assert missing(WHOLE, NOTHING) == 1
    assert missing((quarter, half), (Fraction(1, 3), Fraction(1))) == Fraction(1, 12)
    assert missing((quarter, half), (half, Fraction(1))) == quarter
