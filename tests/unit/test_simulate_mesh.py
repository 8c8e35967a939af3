"""Meshes in the simulator: data parallelism alone is the plain step, memory falls with shards, more is not slower."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.mesh import STAGES_PER_RANK, ScheduleName
from moe_lightning.simulate.event_loop import simulate
from moe_lightning.simulate.failures import NS, Event, Failures
from moe_lightning.simulate.hardware import Hardware
from moe_lightning.simulate.memory import RankMemory, in_flight, rank_memory
from moe_lightning.simulate.mesh import (
    DENSE,
    MeshSpec,
    bubble_share,
    busiest_stage,
    link_bytes_per_s,
    parts_of_ranks,
    ring_s,
)
from moe_lightning.simulate.mesh_search import ROOM, search_mesh
from moe_lightning.simulate.policy import policy
from moe_lightning.simulate.scenario import Scenario, model_of
from moe_lightning.simulate.step_model import StepCost, StepModel
from moe_lightning.simulate.workload import Workload, footprint_of, make_routing
from tests.parameters import slow
from tests.unit.simulated import scenario, small_hardware, small_workload

RANKS = 16


def _workload(**changes: Any) -> Workload:
    anatomy = {"depth": 8, "num_layers": 8, "num_heads": 8, "kv_heads": 8, "rank_batch": 8, "dense_blocks": 0}
    return small_workload(**(anatomy | changes))


def _hardware(**changes: Any) -> Hardware:
    return replace(small_hardware(), **({"ranks_per_node": 4} | changes))


def _model(mesh: MeshSpec | None, *, work: Workload | None = None, hardware: Hardware | None = None) -> StepModel:
    work, hardware = work or _workload(), hardware or _hardware()
    routing = make_routing("zipf", num_experts=work.num_experts, num_layers=work.num_layers)
    return StepModel(work, hardware, policy("ours", slots=4), routing, RANKS // hardware.ranks_per_node, mesh)


def _cost(mesh: MeshSpec | None, *, work: Workload | None = None, hardware: Hardware | None = None) -> StepCost:
    model = _model(mesh, work=work, hardware=hardware)
    return model.cost(model.num_nodes, 0, 0)


def _memory(mesh: MeshSpec, work: Workload | None = None) -> RankMemory:
    return rank_memory(work or _workload(), mesh, RANKS, slots=4, ranks_per_node=4)


@pytest.mark.parametrize("overlap", [0.0, 0.37, 1.0])
def test_a_mesh_of_ones_is_data_parallelism_exactly(overlap: float) -> None:
    hardware = _hardware(overlap=overlap, link_bytes_per_s=3e8)
    ones = _cost(MeshSpec(pp=1, cp=1, tp=1, dense="ddp"), hardware=hardware)
    assert ones == _cost(None, hardware=hardware) == _cost(MeshSpec(micro_batches=1), hardware=hardware)
    assert (ones.bubble_s, ones.axes_s.passes_s) == (0.0, 0.0)
    assert ones.overlap_s == overlap * (ones.dense_s + ones.experts_s + ones.exchange_s + ones.copies_s)


@pytest.mark.parametrize(
    ("pp", "micro_batches", "chunks", "share"), [(1, 4, 1, 0.0), (4, 1, 1, 0.75), (4, 12, 1, 0.2), (4, 12, 2, 1 / 9)]
)
def test_bubbles_are_those_of_the_schedules(pp: int, micro_batches: int, chunks: int, share: float) -> None:
    assert bubble_share(pp, micro_batches, chunks) == pytest.approx(share)


@pytest.mark.parametrize("shards", [2, 4, 8, 16])
def test_memory_falls_as_one_over_the_shards(shards: int) -> None:
    work = _workload(expert_params=1)  # a few bytes
    whole = _memory(MeshSpec(), work)
    sharded = _memory(MeshSpec(dense="hsdp", shard_size=shards) if shards < RANKS else MeshSpec(dense="fsdp"), work)
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(sharded, name) == pytest.approx(getattr(whole, name) / shards, rel=1e-3), name
    zero1 = _memory(MeshSpec(dense="zero1"), work)
    assert zero1.optimizer == pytest.approx(whole.optimizer / RANKS, rel=1e-3)
    assert (zero1.parameters, zero1.gradients) == (whole.parameters, whole.gradients)
    if shards <= 8:
        cut = _memory(MeshSpec(tp=shards), work)
        assert cut.state == pytest.approx(whole.state / shards, rel=1e-3)
        assert _memory(MeshSpec(pp=shards, micro_batches=shards), work).state == pytest.approx(
            whole.state / shards, rel=1e-3
        )


def test_memory_of_a_rank_written_out() -> None:
    work = _workload(dense_params=1200, expert_params=100, d_model=10, embedding_params=200, context_length=64)
    memory = rank_memory(work, MeshSpec(pp=2, tp=2, dense="zero1", micro_batches=4), 16, slots=3, ranks_per_node=8)
    dense, experts = (800 / 2 + 200) / 2, 4 * 3 * 100  # half of the blocks and the embedding, cut in two; 4 layers
    assert memory.parameters == memory.gradients == 2 * (dense + experts)
    assert memory.optimizer == 12 * (dense / 4 + experts)
    tokens = 8 * 4 * 64 / (2 * 4)  # a slice of four ranks, cut in two along the sequence, a fourth at a time
    layers = 4 * (800 / 8 / 10 + 4 * 10) + 4 * 1 * (2 * 10 + 100 / 10)
    first, last = 2 * layers * 2, layers * 2 + 200 / 10 * 6
    assert memory.activations == tokens * max(first, last)
    redone = rank_memory(work, MeshSpec(pp=2, micro_batches=4, recompute=True), 16, slots=3, ranks_per_node=8)
    kept, working = 4 * 10, 800 / 8 / 10 + 4 * 10 + 2 * 10 + 100 / 10
    assert redone.activations == 8 * 2 * 64 / 4 * ((kept + working) * 2 + 200 / 10 * 6)


@pytest.mark.parametrize(("pp", "chunks", "expected"), [(1, 1, 1), (4, 1, 4), (4, 2, 5.5), (4, 4, 4.75)])
def test_micro_batches_on_their_way(pp: int, chunks: int, expected: float) -> None:
    assert in_flight(pp, chunks) == expected


def test_schedules_differ_in_their_stages() -> None:
    """By these alone training chooses the order of micro-batches, and the models choose bubbles and activations."""
    assert {*STAGES_PER_RANK} == {*get_args(ScheduleName)}
    assert len({*STAGES_PER_RANK.values()}) == len(STAGES_PER_RANK), "one would be computed and predicted as another"


def test_stages_get_whole_layers() -> None:
    work = _workload(depth=61, num_layers=58, embedding_params=1000, dense_blocks=61)
    stage = busiest_stage(work, 16, 1)
    assert (stage.blocks, stage.moe_layers, stage.dense_blocks) == (4, 4, 4)
    assert stage.dense_params == work.block_params * 4 / 61 + 1000
    assert busiest_stage(work, 1, 1).dense_params == work.dense_params
    assert busiest_stage(work, 4, 4).blocks == 16


MESHES = st.builds(
    MeshSpec,
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2]),
    dense=st.sampled_from(DENSE),
    micro_batches=st.sampled_from([1, 2, 4, 8]),
    recompute=st.booleans(),
)
RATES = ("link_bytes_per_s", "node_bytes_per_s", "flops_per_s", "memory_bytes_per_s")


@settings(deadline=None, max_examples=20)
@given(MESHES, st.sampled_from(RATES), st.floats(1.1, 100.0), st.sampled_from([0.0, 0.5, 1.0]))
def test_faster_parts_are_never_slower(mesh: MeshSpec, rate: str, factor: float, overlap: float) -> None:
    slow = _hardware(overlap=overlap, link_bytes_per_s=5e8, node_bytes_per_s=2e9)
    fast = replace(slow, **{rate: factor * getattr(slow, rate)})
    assert _cost(mesh, hardware=fast).step_s <= _cost(mesh, hardware=slow).step_s * (1 + 1e-9)


@settings(deadline=None, max_examples=15)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]), st.sampled_from(DENSE))
def test_more_micro_batches_make_smaller_bubbles(pp: int, tp: int, dense: Any) -> None:
    counts = (1, 2, 4, 8, 16)
    costs = [_cost(MeshSpec(pp=pp, tp=tp, dense=dense, micro_batches=count)) for count in counts]
    shares = [cost.bubble_s / (cost.bubble_s + cost.passes_s) for cost in costs]
    assert shares == pytest.approx([bubble_share(pp, count) for count in counts])
    assert all(later < earlier for earlier, later in pairwise(shares))
    activations = [_memory(MeshSpec(pp=pp, tp=tp, dense=dense, micro_batches=count)).activations for count in counts]
    assert all(later <= earlier for earlier, later in pairwise(activations))


def test_bubbles_hide_snapshots_first() -> None:
    cost = _cost(MeshSpec(pp=4, micro_batches=4), hardware=_hardware(overlap=0.0))
    assert cost.overlap_s == cost.bubble_s > 0


def test_each_axis_has_its_traffic() -> None:
    plain = {"tensor_s", "context_s", "hops_s", "gathers_s"}
    for mesh, kinds in (
        (MeshSpec(tp=2), {"tensor_s"}),
        (MeshSpec(cp=2), {"context_s"}),
        (MeshSpec(pp=2), {"hops_s"}),
        (MeshSpec(dense="fsdp"), {"gathers_s"}),
        (MeshSpec(dense="hsdp"), {"gathers_s"}),
        (MeshSpec(dense="zero1"), set[str]()),
    ):
        found = _cost(mesh).axes_s
        assert {name for name in plain if getattr(found, name) > 0} == kinds
        assert found.passes_s + found.sums_s == pytest.approx(sum(found))


def test_traffic_written_out() -> None:
    work = _workload(dense_blocks=3, kv_heads=2)
    hardware = _hardware(latency_s=0.0, overlap=0.0)
    tokens, row, inside = 8 * 512, 512 * 2, hardware.node_bytes_per_s
    tensor = _cost(MeshSpec(tp=4), work=work, hardware=hardware).axes_s.tensor_s
    assert tensor == pytest.approx(2 * 2 * (8 + 3) * 3 * tokens * row / inside)
    context = _cost(MeshSpec(cp=2), work=work, hardware=hardware).axes_s.context_s
    assert context == pytest.approx(2 * 8 * tokens * row * (2 + 2 * 2 / 8) / 2 / inside)
    gathered = _cost(MeshSpec(cp=4), work=work, hardware=hardware).axes_s.context_s  # 2 key heads do not divide by 4
    assert gathered == pytest.approx(2 * 8 * tokens * row * (2 * 3 / 4 + 2 * 2 / 8 * 3) / inside)
    sharded = _cost(MeshSpec(dense="fsdp"), work=work, hardware=hardware).axes_s.gathers_s
    assert sharded == pytest.approx(3 * ring_s(1, 16, work.dense_params, 2, hardware.link_bytes_per_s))
    hops = _cost(MeshSpec(pp=4, micro_batches=8), work=work, hardware=hardware).axes_s.hops_s
    hop_s = 4 * tokens / 8 * row / hardware.link_bytes_per_s
    assert hops == pytest.approx((2 * 3 + 2 * 8) * hop_s)


STATE = footprint_of(_workload()).dense


@pytest.mark.parametrize("dense", DENSE)
def test_gradients_travel_as_they_are_stored(dense: str) -> None:
    """moe-train sums gradients in float32 also where it computes in 16 bits, and frozen parameters have none."""
    hardware = _hardware(latency_s=0.0, overlap=0.0)

    def cost(gradient: float) -> StepCost:
        state = STATE._replace(gradient=gradient, optimizer=2 * gradient)
        work = _workload(footprint=replace(footprint_of(_workload()), dense=state, expert=state))
        return _cost(MeshSpec(dense=dense), work=work, hardware=hardware)  # type: ignore[arg-type]

    frozen, half, full = (cost(gradient) for gradient in (0.0, 2.0, 4.0))
    plain = _cost(MeshSpec(dense=dense), hardware=hardware)  # type: ignore[arg-type]
    assert half.gradients_s == plain.gradients_s > 0
    assert full.gradients_s == pytest.approx(2 * half.gradients_s)
    assert full.update_s == pytest.approx(2 * half.update_s)
    assert frozen.gradients_s == frozen.update_s == 0.0
    gathers = [found.axes_s.gathers_s for found in (frozen, half, full)]  # two of weights, and a scatter of gradients
    assert gathers == pytest.approx([2 * gathers[1] / 3, gathers[1], 4 * gathers[1] / 3])


def test_shadows_send_gradients_back_as_they_are_stored() -> None:
    state = STATE._replace(gradient=4.0)
    work = _workload(footprint=replace(footprint_of(_workload()), expert=state))
    costs = _model(None, work=work).block_costs(RANKS)
    assert (costs.weight_bytes, costs.gradient_bytes) == (2 * work.expert_params, 4 * work.expert_params)


def test_groups_within_a_node_have_its_bandwidth() -> None:
    machine = _hardware(ranks_per_node=8)
    inside, between = machine.node_bytes_per_s, machine.link_bytes_per_s
    found = [link_bytes_per_s(machine, span, ranks) for span, ranks in ((8, 16), (4, 16), (6, 6), (6, 12), (16, 16))]
    assert found == [inside, inside, inside, between, between]


def test_experts_lie_over_all_ranks_of_a_stage() -> None:
    work = _workload()
    routing = make_routing("zipf", num_experts=work.num_experts, num_layers=8).with_layers(2)
    model = StepModel(work, _hardware(), policy("ours", slots=4), routing, 4, MeshSpec(pp=2, tp=4, micro_batches=4))
    planned = model.placements(4, 0)
    assert {placement.num_ranks for placement in planned} == {8}
    held = [placement.replicas.any(axis=0) for placement in model.over_stages(planned, 4)]
    assert np.array_equal(held, [[True] * 8 + [False] * 8, [False] * 8 + [True] * 8])
    assert model.beside(MeshSpec(pp=2, tp=4, micro_batches=4)).cost(4, 0, 0) == model.cost(4, 0, 0)


REFUSED = [
    (MeshSpec(tp=3), {}, "a mesh of pp=1, cp=1, tp=3 needs a multiple of 3 ranks, not 16"),
    (MeshSpec(tp=16), {}, "mesh.tp=16 and cp=1 cut 8 heads into 16 parts: use divisors of them"),
    (MeshSpec(cp=2), {"context_length": 511}, "mesh.tp=1 and cp=2 cut 511 positions into 2 parts"),
    (MeshSpec(pp=16), {}, "mesh.pp=16 and chunks=1 need 16 parts of 8 layers: lower one of them"),
    (MeshSpec(pp=2), {"tied": True, "embedding_params": 10}, "set model.tie_embeddings=false"),
    (
        MeshSpec(dense="fsdp"),
        {"rank_batch": None, "global_batch": 8},
        "16 data slices are more than the 8 samples of a step",
    ),
    (MeshSpec(pp=2, micro_batches=5), {}, "mesh.micro_batches=5 do not divide the 16 samples of a data slice"),
    (MeshSpec(micro_batches=16), {}, "mesh.micro_batches=16 do not divide the 8 samples of a data slice"),
    (MeshSpec(pp=4, chunks=2, micro_batches=2), {}, "rounds of pp=4, which does not divide 2: change micro_batches"),
]


@pytest.mark.parametrize(("mesh", "changes", "sentence"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_trained_is_refused(mesh: MeshSpec, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        _model(mesh, work=_workload(**changes))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="are simulated on nodes of one speed"):
        _model(MeshSpec(tp=2), hardware=_hardware(speeds=[1.0, 0.5]))


# ----------------------------------------------------------------------
# The search over meshes against trying each of them by itself.


NODES, PER_NODE = 2, 4
CALM = Failures(kind="none")


def _scenario(*, failures: Failures = CALM, memory_bytes: float = 24e9, **changes: Any) -> Scenario:
    sizes: dict[str, Any] = {"num_layers": 4, "depth": 4, "num_heads": 4, "kv_heads": 2, "dense_blocks": 1}
    work = small_workload(**(sizes | {"embedding_params": 500_000, "rank_batch": 4} | changes))
    hardware = replace(small_hardware(), ranks_per_node=PER_NODE, memory_bytes=memory_bytes, link_bytes_per_s=1e9)
    return scenario(failures=failures, workload=work, hardware=hardware, nodes=NODES, slots=None)


def _brute_force(run: Scenario) -> tuple[float, int]:
    """Shortest step, and how many meshes fit: every combination of every value there could be, on its own."""
    sizes, best, fitting = (1, 2, 4, 8), float("inf"), 0
    flags = (False, True)
    for pp, cp, tp, dense, micro, chunks, redo in product(sizes, sizes, sizes, DENSE, range(1, 33), (1, 2, 4), flags):
        if micro & (micro - 1) or 8 % (pp * cp * tp) or (chunks > 1 and pp == 1):
            continue
        mesh = MeshSpec(pp=pp, cp=cp, tp=tp, dense=dense, micro_batches=micro, chunks=chunks, recompute=redo)
        try:
            model = model_of(replace(run, mesh=mesh))
        except ConfigurationError:
            continue
        if model.memory().total <= ROOM * run.hardware.memory_bytes:
            fitting += 1
            best = min(best, model.cost(NODES, 0, 0).step_s)
    return best, fitting


@pytest.mark.parametrize(("memory_bytes", "context_length"), [slow(24e9, 64), (0.8e9, 2048)])
def test_the_best_is_that_of_trying_all(memory_bytes: float, context_length: int) -> None:
    run = _scenario(memory_bytes=memory_bytes, context_length=context_length)
    found = search_mesh(run)
    best_s, fitting = _brute_force(run)
    assert found.best[0].step.step_s == best_s == model_of(replace(run, mesh=found.mesh)).cost(NODES, 0, 0).step_s
    assert found.fitting == fitting
    assert [each.step.step_s for each in found.best] == sorted(each.step.step_s for each in found.best)
    assert all(each.memory.total <= ROOM * memory_bytes for each in found.best)
    assert all(each.memory == model_of(replace(run, mesh=each.mesh)).memory() for each in found.best)


def test_what_is_fixed_stays() -> None:
    found = search_mesh(_scenario(), {"tp": 2, "dense": "hsdp", "shard_size": 2, "recompute": True})
    assert {(each.mesh.tp, each.mesh.dense, each.mesh.shard_size, each.mesh.recompute) for each in found.best} == {
        (2, "hsdp", 2, True)
    }
    assert search_mesh(_scenario(tied=True)).mesh.pp == 1
    uneven = search_mesh(_scenario(rank_batch=None, global_batch=31, num_heads=1), {"tp": 1, "cp": 1, "pp": 1})
    assert {each.mesh.micro_batches for each in uneven.best} == {1}


@pytest.mark.slow
def test_failures_decide_by_goodput() -> None:
    run = _scenario(failures=Failures(kind="exponential", node_mtbf_hours=0.5, repair_s=600.0), memory_bytes=24e9)
    found = search_mesh(run)
    goodput = [simulate(replace(run, mesh=each.mesh)).goodput for each in found.best]
    assert goodput == [each.report.goodput for each in found.best if each.report]
    assert goodput == sorted(goodput, reverse=True)
    assert "samples/s" in found.table()


def test_says_how_many_do_not_fit() -> None:
    found = search_mesh(_scenario(memory_bytes=0.8e9))
    said = f"{found.fitting} meshes fit the 720 MB that a rank may plan with, {found.refused} need more"
    assert found.table().splitlines()[-1] == said
    assert search_mesh(_scenario(memory_bytes=1e15)).refused == 0
    with pytest.raises(
        ConfigurationError, match=r"none of \d+ meshes of nodes=2 fits the 90 MB .* add nodes, or lower"
    ):
        search_mesh(_scenario(memory_bytes=1e8))
    with pytest.raises(ConfigurationError, match="no mesh divides the 8 ranks of nodes=2"):
        search_mesh(_scenario(), {"pp": 3})


def test_of_steps_alike_the_simplest_mesh_is_chosen() -> None:
    found = search_mesh(_scenario())
    shortest = min(candidate.step.step_s for candidate in found.best)
    assert found.best[0].step.step_s <= 1.01 * shortest
    alike = [candidate for candidate in found.best if candidate.rank[:2] == found.best[0].rank[:2]]
    assert found.best[0] == min(alike, key=lambda candidate: candidate.mesh.unit)


# ----------------------------------------------------------------------
# Nodes that are lost on a mesh: whole data slices train on, others wait, and who holds the dense state decides.


WORLD_NODES, WORLD_PER_NODE = 6, 4
START = Event(time_ns=0, joined=tuple(range(WORLD_NODES)))


def _world_scenario(mesh: MeshSpec, *events: Event, name: str = "ours", **changes: Any) -> Scenario:
    work = small_workload(num_layers=4, depth=4, num_heads=8, kv_heads=8, rank_batch=4)
    hardware = replace(small_hardware(), ranks_per_node=WORLD_PER_NODE)
    run = scenario(name, events=[START, *events], workload=work, hardware=hardware, nodes=WORLD_NODES, **changes)
    return replace(run, mesh=mesh)


@pytest.mark.parametrize(("pp", "cp", "tp"), [(1, 1, 2), (2, 1, 2), (2, 2, 2), (4, 1, 1), (1, 2, 4), (3, 1, 1)])
def test_survivors_form_whole_data_slices(pp: int, cp: int, tp: int) -> None:
    mesh = MeshSpec(pp=pp, cp=cp, tp=tp)
    model = model_of(_world_scenario(mesh))
    for nodes in range(1, WORLD_NODES + 1):
        ranks = model.ranks(nodes)
        assert ranks == nodes * WORLD_PER_NODE // (pp * cp * tp) * (pp * cp * tp)
        if model.usable_nodes(nodes):
            assert model.usable_nodes(nodes) == -(-ranks // WORLD_PER_NODE)


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
    report = simulate(_world_scenario(mesh, Event(time_ns=1800 * NS, failed=(2,))))
    assert [recovery.source for recovery in report.recoveries] == [source]


def test_snapshots_that_are_protected_bring_sharded_state_back() -> None:
    lost = Event(time_ns=1800 * NS, failed=(2,))
    run = _world_scenario(MeshSpec(dense="fsdp"), lost, protection="arc", memory_interval_steps=1)
    assert [recovery.source for recovery in simulate(run).recoveries] == ["protected memory"]


def test_a_stage_that_is_lost_is_not_live() -> None:
    """Six stages of a node each: nobody else has any of them."""
    work = small_workload(num_layers=6, num_heads=8, kv_heads=8, rank_batch=4)
    run = replace(
        _world_scenario(MeshSpec(), Event(time_ns=1800 * NS, failed=(5,))), workload=work, mesh=MeshSpec(pp=6)
    )
    report = simulate(run)
    assert [recovery.source for recovery in report.recoveries] == ["storage"]
    assert report.recoveries[0].nodes == 5  # 18 of the 20 ranks


def test_ranks_that_make_no_slice_wait() -> None:
    report = simulate(_world_scenario(MeshSpec(pp=2, tp=4), Event(time_ns=1800 * NS, failed=(5,))))
    spans = [span for span in report.spans if span.state == "train"]
    assert (spans[0].used_nodes, spans[-1].used_nodes, spans[-1].live_nodes) == (6, 4, 5)
    assert report.share("idle") > 0.05


def test_survivors_keep_their_stage() -> None:
    """Each stage has two nodes to spare: nothing moves but the slices' experts."""
    changes: dict[str, Any] = {"min_replicas": 2, "slots": 4}
    report = simulate(_world_scenario(MeshSpec(pp=2, tp=4), Event(time_ns=1800 * NS, failed=(1,)), **changes))
    plain = simulate(_world_scenario(MeshSpec(), Event(time_ns=1800 * NS, failed=(1,)), **changes))
    assert report.recoveries[0].source == plain.recoveries[0].source == "live replicas"
    assert report.recoveries[0].nodes == 4


@settings(deadline=None, max_examples=12)
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
    drawn = Failures(kind="exponential", node_mtbf_hours=mtbf_hours, repair_s=600.0).events(WORLD_NODES, 3600.0, seed)
    run = _world_scenario(MeshSpec(pp=pp, cp=cp, tp=tp, dense=dense), name=name, interval_steps=200)
    report = simulate(replace(run, events=drawn))
    parts = (report.useful_ns, report.lost_ns, report.overhead_ns, report.idle_ns)
    assert min(parts) >= 0
    assert sum(parts) == report.provided_ns


def test_parts_of_the_dense_state() -> None:
    """Stage, tensor part, shard, and the number of shards."""
    assert set(parts_of_ranks(MeshSpec(), 8, 4)) == {(0, 0, 0, 1)}
    assert parts_of_ranks(MeshSpec(pp=2), 4, 4) == ((0, 0, 0, 1),) * 2 + ((1, 0, 0, 1),) * 2
    assert parts_of_ranks(MeshSpec(pp=2, dense="fsdp"), 4, 4)[2:] == ((1, 0, 0, 2), (1, 0, 1, 2))
    assert parts_of_ranks(MeshSpec(tp=2), 4, 4) == ((0, 0, 0, 1), (0, 1, 0, 1)) * 2
    assert parts_of_ranks(MeshSpec(dense="hsdp"), 8, 2) == ((0, 0, 0, 2), (0, 0, 1, 2)) * 4
