"""Replica counts: sums, floors, monotonicity, optimality of water-filling, and the edge cases."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.balancing.cluster import AllocationPolicy, affordable_replicas, allocate_replicas

POLICIES: tuple[AllocationPolicy, ...] = ("eq1", "waterfill")


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int]:
    num_nodes = draw(st.integers(1, 9))
    slots = num_nodes * draw(st.integers(1, 6))
    load = draw(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 10**6)), min_size=1, max_size=slots))
    return np.array(load, dtype=np.int64), slots, num_nodes, draw(st.integers(1, 4))


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=200)
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


@settings(deadline=None, max_examples=200)
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


@settings(deadline=None, max_examples=60)
@given(
    load=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    slots=st.integers(1, 9),
    floor=st.integers(1, 2),
    cap=st.one_of(st.none(), st.integers(2, 5)),
)
def test_water_filling_minimises_the_busiest_replica(load: list[int], slots: int, floor: int, cap: int | None) -> None:
    if slots < len(load):
        return
    tokens = np.array(load, dtype=np.int64)
    replicas = allocate_replicas(tokens, slots=slots, num_nodes=slots, min_replicas=floor, max_replicas=cap)
    least = affordable_replicas(len(load), slots=slots, num_nodes=slots, min_replicas=floor)
    most = cap or slots
    total = min(slots, most * len(load))
    assert replicas.sum() == total
    choices = (np.array(r) for r in product(range(least, most + 1), repeat=len(load)) if sum(r) == total)
    assert (tokens / replicas).max() == min((tokens / r).max() for r in choices)


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
