"""Node mapping and transfer schedules against brute force, and the promise that alignment keeps the plan."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from benchmarks.paper_recovery import greedy_assignment
from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.migration import (
    Transfer,
    align_placements,
    held_states,
    migration_s,
    optimal_assignment,
    plan_migration,
)
from moe_lightning.dispatch.placement import Placement
from tests.unit.planning_references import by_node


@settings(deadline=None, max_examples=75)
@given(
    cost=st.integers(1, 6).flatmap(lambda n: hnp.arrays(np.int64, (n, n), elements=st.integers(0, 12))),
)
def test_assignment_is_optimal(cost: np.ndarray) -> None:
    n = len(cost)
    columns, greedy = optimal_assignment(cost), greedy_assignment(cost)
    assert sorted(columns) == sorted(greedy) == list(range(n))
    best = min(cost[np.arange(n), list(order)].sum() for order in permutations(range(n)))
    assert cost[np.arange(n), columns].sum() == best
    assert cost[np.arange(n), greedy].sum() >= best


def test_assignment_of_many() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.permutation(60)
    cost = rng.integers(1, 100, (60, 60))
    cost[np.arange(60), hidden] = 0
    assert (optimal_assignment(cost) == hidden).all()


def test_greedy_takes_the_cheapest_pair_first() -> None:
    cost = np.array([[0, 1], [1, 9]])
    assert greedy_assignment(cost).tolist() == [0, 1]
    assert optimal_assignment(cost).tolist() == [1, 0]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[np.ndarray, list[Placement], Cluster]:
    nodes, ranks_per_node = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    num_ranks, layers, experts = nodes * ranks_per_node, draw(st.integers(1, 3)), draw(st.integers(1, 5))
    shape = (layers, experts, num_ranks)
    tables = draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 2)))
    tables[..., 0] = np.maximum(tables[..., 0], tables.sum(axis=2) == 0)
    held = draw(hnp.arrays(np.bool_, shape))
    return held, [Placement(replicas=table) for table in tables], Cluster.of(num_ranks, 5, ranks_per_node)


@settings(deadline=None, max_examples=50)
@given(world=worlds())
def test_alignment_renames_ranks_within_renamed_nodes_and_optimal_moves_least(
    world: tuple[np.ndarray, list[Placement], Cluster],
) -> None:
    held, planned, cluster = world
    moved = {}
    methods = {"none": None, "greedy": greedy_assignment, "optimal": optimal_assignment}
    for method, assign in methods.items():
        aligned = align_placements(held, planned, cluster, assign) if assign else planned
        for before, after in zip(planned, aligned, strict=True):
            columns = [sorted(map(tuple, by_node(cluster, p.replicas).T)) for p in (before, after)]
            assert columns[0] == columns[1]
            assert sorted(map(tuple, before.replicas.T)) == sorted(map(tuple, after.replicas.T))
        node_held = np.stack([by_node(cluster, layer.astype(np.int64)) > 0 for layer in held])
        needed = np.stack([by_node(cluster, p.replicas) > 0 for p in aligned])
        moved[method] = int((needed & ~node_held).sum())
    nodes = range(cluster.num_nodes)
    plan = np.stack([by_node(cluster, p.replicas) > 0 for p in planned])
    assert moved["optimal"] == min(int((plan[..., list(o)] & ~node_held).sum()) for o in permutations(nodes))
    assert moved["optimal"] <= min(moved["greedy"], moved["none"])


@st.composite
def small_nodes(draw: st.DrawFn) -> tuple[np.ndarray, list[Placement], Cluster]:
    experts = draw(st.integers(2, 5))
    tables = draw(hnp.arrays(np.int64, (1, experts, 4), elements=st.integers(0, 1)))
    tables[..., 0] = np.maximum(tables[..., 0], tables.sum(axis=2) == 0)
    return draw(hnp.arrays(np.bool_, tables.shape)), [Placement(replicas=tables[0])], Cluster.of(4, 5, 2)


@settings(deadline=None, max_examples=150)
@given(world=small_nodes())
def test_of_equal_moves_between_nodes_the_fewest_transfers_are_taken(
    world: tuple[np.ndarray, list[Placement], Cluster],
) -> None:
    """Against every renaming of two nodes of two ranks."""
    held, planned, cluster = world

    def moves(table: np.ndarray) -> tuple[int, int]:
        nodes = [by_node(cluster, side.astype(np.int64)) > 0 for side in (table > 0, held[0])]
        return int((nodes[0] & ~nodes[1]).sum()), int(((table > 0) & ~held[0]).sum())

    within = [(0, 1), (1, 0)]
    orders = [
        tuple([2 * nodes[0] + i for i in a] + [2 * nodes[1] + i for i in b])
        for nodes in within
        for a in within
        for b in within
    ]
    best = min(moves(planned[0].replicas[:, list(order)]) for order in orders)
    aligned = align_placements(held, planned, cluster)
    assert moves(aligned[0].replicas) == best
    assert len(plan_migration(held, aligned)) == best[1] - _lost(held, aligned)


def _lost(held: np.ndarray, placements: list[Placement]) -> int:
    """States that nobody can send."""
    return int((held_states(placements) & ~held.any(axis=2, keepdims=True)).sum())


def test_nodes_become_planned_nodes_of_their_size() -> None:
    cluster = Cluster(node_of=(0, 0, 1), slots_per_rank=2)
    planned = [Placement(replicas=np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]]))]
    held = np.array([[[False, False, True], [False, False, False], [True, True, False]]])
    assert align_placements(held, planned, cluster)[0].replicas[2].tolist() == [0, 0, 1]


@settings(deadline=None, max_examples=100)
@given(world=worlds())
def test_every_missing_state_arrives_once_from_a_holder(world: tuple[np.ndarray, list[Placement], Cluster]) -> None:
    held, planned, _ = world
    transfers = plan_migration(held, planned)
    after = held.copy()
    for transfer in transfers:
        assert held[transfer.layer, transfer.expert, transfer.source]
        assert not after[transfer.layer, transfer.expert, transfer.target]
        after[transfer.layer, transfer.expert, transfer.target] = True
    after[~held.any(axis=2)] = True
    assert (after | ~held_states(planned)).all()
    ends = [[transfer.source for transfer in transfers], [transfer.target for transfer in transfers]]
    busiest = max((at.count(rank) for at in ends for rank in at), default=0)
    assert migration_s(transfers, 100, 50.0) == pytest.approx(2.0 * busiest)


def test_sources_take_turns_and_rare_experts_choose_first() -> None:
    held = np.array([[[1, 1, 0, 0], [1, 0, 0, 0]]], dtype=np.bool_)
    planned = [Placement(replicas=np.array([[1, 1, 1, 0], [1, 0, 0, 1]]))]
    assert plan_migration(held, planned) == [
        Transfer(layer=0, expert=1, source=0, target=3),
        Transfer(layer=0, expert=0, source=1, target=2),
    ]
    assert migration_s(plan_migration(held_states(planned), planned), 10, 1.0, latency_s=5.0) == 0.0


def test_a_source_on_the_same_node_comes_before_an_idle_one_on_another() -> None:
    held = np.array([[[1, 0, 1, 0], [1, 0, 1, 0]]], dtype=np.bool_)
    planned = [Placement(replicas=np.array([[1, 1, 1, 0], [1, 1, 1, 0]]))]
    assert [t.source for t in plan_migration(held, planned)] == [0, 2]
    assert [t.source for t in plan_migration(held, planned, ["a", "a", "b", "b"])] == [0, 0]
    elsewhere = [Placement(replicas=np.array([[1, 0, 1, 1], [1, 0, 1, 1]]))]
    assert [t.source for t in plan_migration(held, elsewhere, ["a", "b", "c", "d"])] == [0, 2]
