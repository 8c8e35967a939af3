"""MRO, MRO+, spread and compact: validity, optimality against every placement where the theorem holds, the repair where
it does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.recovery_probability import block_recovery, recovery_probabilities, sampled_recovery
from moe_lightning.balancing.cluster import AllocationPolicy, Cluster, affordable_replicas, allocate_replicas
from moe_lightning.balancing.replica_placement import (
    NODE_RULES,
    compact,
    deal_to_ranks,
    fatal_counts,
    fatal_sets,
    is_truncated,
    mro,
    mro_blocks,
    mro_plus,
    spread,
    supports,
)
from moe_lightning.balancing.rules import PlacementPolicy
from moe_lightning.errors import ConfigurationError
from tests.unit.planning_references import dealt_one_by_one, spread_one_by_one


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def fatal(table: np.ndarray) -> list[int]:
    """Fatal sets of 0..N failed nodes, by definition rather than by the closure under test."""
    num_nodes = table.shape[1]
    return [
        sum(
            not (np.delete(table, list(dead), axis=1) > 0).any(axis=1).all()
            for dead in combinations(range(num_nodes), k)
        )
        for k in range(num_nodes + 1)
    ]


@st.composite
def instances(draw: st.DrawFn, max_nodes: int = 6, max_slots: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Replicas that fill equal nodes, each expert at least once."""
    num_nodes, size = draw(st.integers(1, max_nodes)), draw(st.integers(1, max_slots))
    total = num_nodes * size
    num_experts = draw(st.integers(1, total))
    extra = draw(st.lists(st.integers(0, num_experts - 1), min_size=total - num_experts, max_size=total - num_experts))
    return 1 + np.bincount(extra, minlength=num_experts).astype(np.int64), np.full(num_nodes, size)


@pytest.mark.parametrize("rule", sorted(NODE_RULES))
@settings(deadline=None, max_examples=60)
@given(instance=instances())
def test_every_replica_gets_one_slot(rule: str, instance: tuple[np.ndarray, np.ndarray]) -> None:
    replicas, node_slots = instance
    table = NODE_RULES[rule](replicas, node_slots)
    assert table.min() >= 0
    assert (table.sum(axis=1) == replicas).all()
    assert (table.sum(axis=0) == node_slots).all()


@pytest.mark.parametrize("rule", sorted(NODE_RULES))
def test_nodes_of_different_sizes_are_filled(rule: str) -> None:
    table = NODE_RULES[rule](ints(2, 2, 3, 4), ints(2, 4, 3, 2))
    assert table.sum(axis=1).tolist() == [2, 2, 3, 4]
    assert table.sum(axis=0).tolist() == [2, 4, 3, 2]


def every_placement(replicas: np.ndarray, size: int, num_nodes: int) -> Iterator[np.ndarray]:
    """All ways to support each expert by min(r_e, N) distinct nodes with at most `size` experts on a node.

    Doubling up on a node only shrinks supports, so these contain an optimum.
    """
    choices = [list(combinations(range(num_nodes), min(r, num_nodes))) for r in replicas]
    for nodes in product(*choices):
        table = np.zeros((len(replicas), num_nodes), dtype=np.int64)
        for expert, held in enumerate(nodes):
            table[expert, list(held)] = 1
        if (table.sum(axis=0) <= size).all():
            yield table


@settings(deadline=None, max_examples=40)
@given(instance=instances(max_nodes=4, max_slots=3))
def test_theorem_holds_where_the_last_block_is_whole(instance: tuple[np.ndarray, np.ndarray]) -> None:
    replicas, node_slots = instance
    assume(len(replicas) <= 5 and not is_truncated(replicas, node_slots))
    reached = fatal(mro(replicas, node_slots))
    for table in every_placement(replicas, int(node_slots[0]), len(node_slots)):
        assert all(ours <= theirs for ours, theirs in zip(reached, fatal(table), strict=True))


@settings(deadline=None, max_examples=60)
@given(instance=instances())
def test_experts_that_divide_into_nodes_are_never_truncated(instance: tuple[np.ndarray, np.ndarray]) -> None:
    replicas, node_slots = instance
    assume(len(replicas) % int(node_slots[0]) == 0)
    assert not is_truncated(replicas, node_slots)


def test_truncated_mro_breaks_the_guarantee_and_the_repair_keeps_it() -> None:
    replicas, node_slots = ints(2, 2, 2), ints(2, 2, 2)
    assert is_truncated(replicas, node_slots)
    assert fatal(mro(replicas, node_slots)) == [0, 1, 3, 1]  # node 2 holds both replicas of expert 2
    assert fatal(mro_plus(replicas, node_slots)) == [0, 0, 3, 1]


def test_mro_plus_reaches_the_optimum_of_nearly_all_small_truncated_instances() -> None:
    total = reached = better_than_mro = 0
    for num_nodes, size in ((3, 2), (4, 2), (5, 2), (3, 3)):
        for num_experts in range(size + 1, min(num_nodes * size, 4) + 1):
            for replicas in product(range(1, num_nodes + 1), repeat=num_experts):
                counts, node_slots = np.array(replicas), np.full(num_nodes, size)
                if sum(replicas) != num_nodes * size or list(replicas) != sorted(replicas):
                    continue
                if not is_truncated(counts, node_slots):
                    continue
                best = min(fatal(table) for table in every_placement(counts, size, num_nodes))
                ours = fatal(mro_plus(counts, node_slots))
                total += 1
                reached += ours == best
                better_than_mro += ours < fatal(mro(counts, node_slots))
    assert total >= 10
    assert reached >= 0.98 * total
    assert better_than_mro >= 1


def supports_that_fit(replicas: tuple[int, ...], free: tuple[int, ...]) -> Iterator[frozenset[frozenset[int]]]:
    """The supports of all tables: every way to put each expert's replicas into free slots, several on a node too."""
    if not replicas:
        yield frozenset()
        return
    for row in product(*(range(min(replicas[0], slots) + 1) for slots in free)):
        if sum(row) == replicas[0]:
            left = tuple(slots - used for slots, used in zip(free, row, strict=True))
            support = frozenset(node for node, used in enumerate(row) if used)
            for others in supports_that_fit(replicas[1:], left):
                yield others | {support}


@pytest.mark.slow
def test_mro_plus_reaches_the_optimum_of_all_small_instances_on_unequal_nodes() -> None:
    total = 0
    sizes = [(*slots,) for nodes in (2, 3, 4) for slots in combinations_with_replacement(range(1, 4), nodes)]
    for slots in sizes:
        for num_experts, vacant in product(range(1, 5), range(2)):
            for replicas in combinations_with_replacement(range(1, len(slots) + 1), num_experts):
                if len(set(slots)) == 1 or sum(slots) > 7 or sum(replicas) != sum(slots) - vacant:
                    continue
                found = set(supports_that_fit(replicas, slots))
                best = min(fatal(as_table(held, len(slots))) for held in found)
                assert fatal(mro_plus(np.array(replicas), np.array(slots))) == best, (replicas, slots)
                total += 1
    assert total > 80


def as_table(held: frozenset[frozenset[int]], num_nodes: int) -> np.ndarray:
    return np.array([[node in support for node in range(num_nodes)] for support in held], dtype=np.int64)


@pytest.mark.parametrize(
    ("replicas", "slots", "best"),
    [
        (ints(1, 1, 2, 2), ints(1, 1, 2, 2), [0, 1, 5, 4, 1]),
        (ints(1, 1), ints(1, 2), [0, 1, 1]),  # not truncated, and MRO's blocks are as small as the smallest node
        (ints(2, 2), ints(1, 2, 2), [0, 0, 1, 1]),  # a slot is free
    ],
)
def test_mro_plus_uses_larger_nodes(replicas: np.ndarray, slots: np.ndarray, best: list[int]) -> None:
    assert fatal(mro_plus(replicas, slots)) == best


def test_beyond_the_search_limit_the_repair_still_keeps_the_guarantee() -> None:
    replicas, node_slots = np.full(19, 2), np.full(13, 3)  # seven blocks of two nodes do not fit thirteen nodes
    assert is_truncated(replicas, node_slots)
    assert ((mro(replicas, node_slots) > 0).sum(axis=1) == 1).any()
    assert ((mro_plus(replicas, node_slots) > 0).sum(axis=1) == 2).all()


@settings(deadline=None, max_examples=60)
@given(instance=instances(max_nodes=5))
def test_exact_counts_agree_with_the_definition(instance: tuple[np.ndarray, np.ndarray]) -> None:
    for rule in (mro, spread, compact):
        table = rule(*instance)
        assert fatal_counts(fatal_sets(supports([table]), table.shape[1])).tolist() == fatal(table)


@settings(deadline=None, max_examples=60)
@given(instance=instances())
def test_closed_form_of_mro(instance: tuple[np.ndarray, np.ndarray]) -> None:
    replicas, node_slots = instance
    num_nodes = len(node_slots)
    assume(len(replicas) > node_slots[0] and not is_truncated(replicas, node_slots))
    exact = recovery_probabilities([mro(replicas, node_slots)])
    blocks = mro_blocks(replicas, node_slots)
    assert exact == pytest.approx([block_recovery(blocks, num_nodes, k) for k in range(num_nodes + 1)])


@pytest.mark.parametrize("failures", [0, 1, 3, 5, 6])
def test_sampled_sets_are_drawn_uniformly_and_judged_exactly(failures: int) -> None:
    """Against every failed set; 100 samples are no whole number of words."""
    table = np.array([[1, 1, 0, 0, 0, 0], [0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 1, 1]])
    exact = recovery_probabilities([table, table[::-1]])[failures]
    found = [sampled_recovery([table, table[::-1]], failures, samples=100, seed=seed) for seed in range(40)]
    assert np.mean(found) == pytest.approx(exact, abs=0.03)
    assert sampled_recovery([table], failures, samples=5000, seed=3) == pytest.approx(exact, abs=0.04)


def test_an_expert_that_nobody_holds_never_recovers() -> None:
    assert sampled_recovery([np.array([[1, 1], [0, 0]])], 0, samples=64) == 0.0


def test_thousands_of_nodes_are_sampled_within_a_time_that_a_planner_has() -> None:
    """Integer products of all samples with all experts would take minutes."""
    table = np.zeros((512, 4096), dtype=np.int64)
    table[np.arange(8192) % 512, np.arange(8192) // 2] = 1
    began = time.process_time()
    assert sampled_recovery([table] * 4, 64) == 1.0
    assert time.process_time() - began < 5


def test_too_many_nodes_to_enumerate_says_so() -> None:
    with pytest.raises(ConfigurationError, match="use sampled_recovery"):
        recovery_probabilities([np.ones((2, 24), dtype=np.int64)])


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_spreading_and_dealing_at_once_are_what_one_by_one_makes(data: st.DataObject) -> None:
    domains = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    cluster = Cluster(node_of=tuple(np.unique(domains, return_inverse=True)[1].tolist()), slots_per_rank=3)
    num_experts = data.draw(st.integers(1, cluster.num_slots))
    load = np.array(data.draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts)))
    replicas = allocate_replicas(load, slots=cluster.num_slots, num_nodes=cluster.num_nodes, min_replicas=1)
    table = spread(replicas, cluster.node_slots())
    assert (table == spread_one_by_one(replicas, cluster.node_slots())).all()
    assert (deal_to_ranks(table, cluster, load).replicas == dealt_one_by_one(table, cluster, load)).all()


def test_nodes_that_a_fault_has_left_too_small_for_the_groups_have_blocks_by_size() -> None:
    cluster = Cluster(node_of=(0, 0, 0, 0, 1, 1, 1), slots_per_rank=10)
    table = PlacementPolicy(rule="mro").place(np.arange(64), cluster).replicas
    assert (table.sum(axis=1) >= 1).all()
    assert (table.sum(axis=0) <= 10).all()
    assert (mro(ints(1, 1, 1, 1), ints(1, 3)).sum(axis=1) == 1).all()


def test_wrong_input_is_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match="5 replicas do not fit 4 slots"):
        mro(ints(2, 3), ints(2, 2))
    with pytest.raises(ConfigurationError, match="at least 1 replica"):
        spread(ints(0, 3), ints(2, 2))
    assert mro_plus(ints(1, 1, 1, 1), ints(1, 3)).sum() == 4  # falls back to spread
    with pytest.raises(ConfigurationError, match="7 failed nodes"):
        sampled_recovery([spread(ints(2, 3, 3, 4), np.full(6, 2))], 7)


# ----------------------------------------------------------------------
# Replica counts: sums, floors, monotonicity, optimality of water-filling, and the edge cases.


POLICIES: tuple[AllocationPolicy, ...] = ("eq1", "waterfill")


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int]:
    num_nodes = draw(st.integers(1, 9))
    slots = num_nodes * draw(st.integers(1, 6))
    load = draw(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 10**6)), min_size=1, max_size=slots))
    return np.array(load, dtype=np.int64), slots, num_nodes, draw(st.integers(1, 4))


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=80)
@given(problem=problems())
def test_all_slots_are_used_floors_hold_and_busier_experts_get_no_fewer(
    policy: AllocationPolicy, problem: tuple[np.ndarray, int, int, int]
) -> None:
    load, slots, num_nodes, floor = problem
    replicas = allocate_replicas(load, slots=slots, num_nodes=num_nodes, min_replicas=floor, policy=policy)
    assert replicas.sum() == slots
    assert replicas.min() >= affordable_replicas(len(load), slots=slots, num_nodes=num_nodes, min_replicas=floor)
    order = np.argsort(load, kind="stable")
    busier = np.flatnonzero(np.diff(load[order]) > 0)
    assert (np.diff(replicas[order])[busier] >= 0).all()


@settings(deadline=None, max_examples=80)
@given(problem=problems(), spare=st.integers(0, 5))
def test_water_filling_gives_what_giving_one_at_a_time_does(
    problem: tuple[np.ndarray, int, int, int], spare: int
) -> None:
    """Limits included: experts without tokens are filled where all others are full."""
    load, slots, num_nodes, wanted = problem
    floor = affordable_replicas(len(load), slots=slots, num_nodes=num_nodes, min_replicas=wanted)
    replicas, cap = np.full(len(load), floor), floor + spare
    for _ in range(slots - floor * len(load)):
        open_experts = [expert for expert in range(len(load)) if replicas[expert] < cap]
        if open_experts:
            first = min(open_experts, key=lambda e: (-int(load[e]) / int(replicas[e]), replicas[e], e))
            replicas[first] += 1
    found = allocate_replicas(load, slots=slots, num_nodes=num_nodes, min_replicas=wanted, max_replicas=cap)
    assert found.tolist() == replicas.tolist()


def test_eq1_by_hand() -> None:
    load = np.array([5, 15, 80])  # 5*12//100=0 -> 2; 15*10//95=1 -> 2; all 8 that are left
    assert allocate_replicas(load, slots=12, num_nodes=6, min_replicas=2, policy="eq1").tolist() == [2, 2, 8]


@pytest.mark.parametrize("policy", POLICIES)
def test_unknown_loads_are_equal_loads(policy: AllocationPolicy) -> None:
    assert allocate_replicas(np.zeros(4, dtype=np.int64), slots=10, num_nodes=5, policy=policy).max() == 3


@pytest.mark.parametrize(("num_experts", "slots", "expected"), [(16, 30, 1), (12, 30, 2), (8, 30, 2)])
def test_five_nodes_of_six_slots_lose_the_guarantee_only_for_sixteen_experts(
    num_experts: int, slots: int, expected: int
) -> None:
    assert affordable_replicas(num_experts, slots=slots, num_nodes=5, min_replicas=2) == expected


def test_one_node_promises_one_replica() -> None:
    assert affordable_replicas(2, slots=8, num_nodes=1, min_replicas=2) == 1
