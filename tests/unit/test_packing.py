"""Packing for balance: valid, protected, and balanced wherever the slots allow it."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from moe_lightning.balancing import packing
from moe_lightning.balancing import packing as slot_table
from moe_lightning.balancing.cluster import Cluster, affordable_replicas, nodes_for_each
from moe_lightning.balancing.packing import SlotTable, packed_placement
from moe_lightning.dispatch.quota import balanced_quota
from moe_lightning.errors import ConfigurationError
from tests.unit.planning_references import by_node, missing_nodes


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, Cluster]:
    ranks_per_node = draw(st.integers(1, 3))
    cluster = Cluster.of(
        ranks_per_node * draw(st.integers(1, 6)), draw(st.integers(1, 5)), ranks_per_node=ranks_per_node
    )
    load = draw(st.lists(st.integers(0, 10**5), min_size=1, max_size=min(cluster.num_slots, 24)))
    return np.array(load, dtype=np.int64), cluster


@settings(deadline=None, max_examples=75)
@example(problem=(np.array([238, 602, 837, 504]), Cluster.of(12, 1, ranks_per_node=3)), floor=3)  # neither way packs it
@example(problem=(np.array([692, 324, 968]), Cluster.of(6, 2, ranks_per_node=3)), floor=2)  # more replicas than room
@given(problem=problems(), floor=st.integers(1, 3))
def test_slots_distinct_nodes_and_coverage_hold(problem: tuple[np.ndarray, Cluster], floor: int) -> None:
    load, cluster = problem
    table = packed_placement(load, cluster, floor).replicas
    assert table.max() == 1
    assert table.sum(axis=0).max() <= cluster.slots_per_rank
    promised = affordable_replicas(len(load), slots=cluster.num_slots, num_nodes=cluster.num_nodes, min_replicas=floor)
    assert ((by_node(cluster, table) > 0).sum(axis=1) >= promised).all()


@settings(deadline=None, max_examples=60)
@given(problem=problems(), floor=st.integers(1, 3))
def test_a_plan_does_not_depend_on_how_fractions_are_summed(problem: tuple[np.ndarray, Cluster], floor: int) -> None:
    """Python 3.12 sums fractions otherwise than 3.11: ranks must not place experts otherwise."""
    load, cluster = problem
    expected = packed_placement(load, cluster, floor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "sum", sum_of_integers, raising=False)
        patch.setattr(slot_table, "sum", sum_of_integers, raising=False)
        assert packed_placement(load, cluster, floor) == expected


def sum_of_integers(terms: Iterable[int]) -> int:
    """The built-in, for terms whose order does not matter."""
    listed = list(terms)
    assert {type(term) for term in listed} <= {int}, "sums of fractions depend on the version of Python"
    return sum(listed)


@settings(deadline=None, max_examples=100)
@given(problem=problems(), floor=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_the_books_of_a_table_are_those_of_its_replicas(
    problem: tuple[np.ndarray, Cluster], floor: int, seed: int
) -> None:
    load, cluster = np.maximum(problem[0], 1), problem[1]
    table = SlotTable(load, cluster)
    rng = np.random.default_rng(seed)
    for expert in range(len(load)):  # everybody once, the rest by chance
        table.put(expert, int(rng.choice(np.flatnonzero([table.free(rank) for rank in range(cluster.num_ranks)]))))
    table.protect(floor)
    table.fill()
    held = table.pairs.table()
    assert [set(np.flatnonzero(row)) for row in held] == table.holders
    assert [set(np.flatnonzero(column)) for column in held.T] == table.experts
    free = cluster.slots_per_rank - held.sum(axis=0)
    assert free.min() >= 0
    assert held.max() == 1
    assert cluster.missing_nodes(table.pairs, floor) == missing_nodes(held, cluster, floor)
    assert ((free == 0) | held.all(axis=0)).all(), "a slot is left though its rank lacks an expert"


def test_a_large_cluster_is_planned_between_two_steps() -> None:
    """A minute a layer where the whole table is looked at for every replica."""
    load = (np.random.default_rng(0).dirichlet(np.full(512, 0.3)) * 2**27).astype(np.int64)
    cluster = Cluster.of(4096, 1, ranks_per_node=8)
    began = time.process_time()
    placement = packed_placement(load, cluster, 2)
    assert time.process_time() - began < 5.0
    assert not cluster.missing_nodes(placement.pairs, 2)


@settings(deadline=None, max_examples=100)
@given(problem=problems())
def test_loads_that_can_be_cut_evenly_are(problem: tuple[np.ndarray, Cluster]) -> None:
    """Enough slots for E + N - 1 pieces: the busiest rank computes the mean, up to the quota's slack of 1/128."""
    load, cluster = problem
    assume(cluster.num_slots >= len(load) + cluster.num_ranks - 1 and load.sum() > 1000 * cluster.num_ranks)
    quota = balanced_quota(load, packed_placement(load, cluster, 1).replicas)
    assert quota.sum(axis=0).max() <= 1.01 * load.sum() / cluster.num_ranks + 1


@st.composite
def uneven_problems(draw: st.DrawFn) -> tuple[np.ndarray, Cluster]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=5))
    node_of = tuple(np.repeat(np.arange(len(sizes)), sizes).tolist())
    cluster = Cluster(node_of=node_of, slots_per_rank=draw(st.integers(1, 3)))
    load = draw(st.lists(st.integers(0, 600), min_size=1, max_size=cluster.num_slots))
    return np.array(load, dtype=np.int64), cluster


@settings(deadline=None, max_examples=150)
@given(problem=uneven_problems(), floor=st.integers(1, 3))
@example(problem=(np.array([1, 0, 1, 408, 386, 505]), Cluster(node_of=(0, 1, 1, 2, 2, 2), slots_per_rank=2)), floor=2)
@example(problem=(np.array([288, 379, 78, 282]), Cluster(node_of=(0, 1, 1, 2, 2, 2), slots_per_rank=3)), floor=3)
@example(problem=(np.array([216, 186]), Cluster(node_of=(0, 1, 2, 3, 3, 3), slots_per_rank=1)), floor=3)
def test_unequal_nodes_keep_as_many_as_every_expert_can_have(problem: tuple[np.ndarray, Cluster], floor: int) -> None:
    load, cluster = problem
    placement = packed_placement(load, cluster, floor)
    possible = nodes_for_each(len(load), node_slots=cluster.node_slots(), min_replicas=floor)
    assert not cluster.missing_nodes(placement.pairs, possible)
    assert placement.replicas.max() == 1
    assert placement.replicas.sum(axis=0).max() <= cluster.slots_per_rank


def test_too_few_slots_say_so() -> None:
    with pytest.raises(ConfigurationError, match="3 slots cannot hold 4 experts"):
        packed_placement(np.ones(4, dtype=np.int64), Cluster.of(3, 1))
