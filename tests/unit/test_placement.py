"""Placements: every expert somewhere, even runs, groups that are complete, tables that fit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.arrays import Pairs, cut
from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.packing import packed_placement
from moe_lightning.dispatch.placement import (
    Placement,
    dispatch_groups,
    parse_placements,
    uniform_placement,
    uniform_slots,
)
from moe_lightning.dispatch.quota import balanced_quota
from moe_lightning.errors import ConfigurationError
from tests.traces import recorded


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 40), st.integers(1, 24))
def test_uniform_placement(data: st.DataObject, num_experts: int, num_ranks: int) -> None:
    copies = data.draw(st.integers(1, num_ranks))
    placement = uniform_placement(num_experts, num_ranks, copies)
    assert placement.replicas.shape == (num_experts, num_ranks)
    assert set(np.unique(placement.replicas)) <= {0, 1}
    assert placement.replicas.sum(axis=0).max() == uniform_slots(num_experts, num_ranks, copies)
    for first, last in itertools.pairwise(cut(num_ranks, copies)):
        block = placement.replicas[:, first:last]
        per_rank, per_expert = block.sum(axis=0), block.sum(axis=1)
        assert (per_rank >= 1).all()
        assert (per_expert >= 1).all()
        if last - first <= num_experts:  # each expert once, ranks as even as possible
            assert (per_expert == 1).all()
            assert per_rank.max() - per_rank.min() <= 1
        else:  # ranks share experts, as evenly as possible
            assert (per_rank == 1).all()
            assert per_expert.max() - per_expert.min() <= 1
        for rank in range(first, last):
            experts = placement.experts_on(rank)
            assert experts == tuple(range(experts[0], experts[-1] + 1))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_holders_owners_and_slots_agree(num_experts: int, num_ranks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 3, (num_experts, num_ranks))
    table[np.arange(num_experts), rng.integers(0, num_ranks, num_experts)] += 1
    placement = Placement(replicas=table)
    for expert in range(num_experts):
        holders = placement.holders(expert)
        assert holders == tuple(n for n in range(num_ranks) if table[expert, n] > 0)
        assert placement.owners()[expert] == holders[0]
        assert all(expert in placement.experts_on(n) for n in holders)
    assert sum(len(placement.experts_on(n)) for n in range(num_ranks)) == (table > 0).sum()


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_a_placement_is_the_same_from_a_table_and_from_its_replicas(
    num_experts: int, num_ranks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 3, (num_experts, num_ranks))
    table[:, 0] += 1
    cells = rng.permutation(np.repeat(np.arange(table.size), table.reshape(-1)))  # one for each replica, in any order
    listed = Placement.of_pairs(Pairs.of_replicas(cells // num_ranks, cells % num_ranks, table.shape))
    assert listed == Placement(replicas=table)
    assert hash(listed) == hash(Placement(replicas=table))
    assert (listed.replicas == table).all()
    assert not listed.replicas.flags.writeable
    order = rng.permutation(num_ranks)
    assert (listed.renamed(order).replicas == table[:, order]).all()
    visits = (rng.random(table.shape) < 0.4) & (table == 0)
    assert (listed.pairs.joined(visits).table() == table + visits).all()
    table[0, 0] += 1
    assert listed != Placement(replicas=table)


def test_placements_are_values() -> None:
    table = np.array([[1, 0], [2, 1]])
    one, other = Placement(replicas=table), Placement(replicas=table.copy())
    assert one == other
    assert hash(one) == hash(other)
    assert one != Placement(replicas=table[::-1])
    assert one != "a placement"
    table[0, 0] = 7
    assert one.replicas[0, 0] == 1, "the placement shares memory with the caller's table"
    with pytest.raises(ValueError, match="read-only"):
        one.replicas[0, 0] = 3


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 30), st.integers(1, 30))
def test_dispatch_groups(num_ranks: int, ep_size: int) -> None:
    if num_ranks % ep_size:
        with pytest.raises(ConfigurationError, match=rf"ep_size={ep_size} .* {num_ranks} ranks.*use one of"):
            dispatch_groups(num_ranks, ep_size)
        return
    groups = dispatch_groups(num_ranks, ep_size)
    assert [rank for group in groups for rank in group] == list(range(num_ranks))
    assert {len(group) for group in groups} == {ep_size}


def test_a_group_that_lacks_an_expert_is_named() -> None:
    placement = Placement(replicas=np.array([[1, 1, 1, 0], [1, 0, 0, 0]]))
    placement.check_groups([(0, 1, 2, 3)])
    with pytest.raises(ConfigurationError, match=r"ranks \[2, 3\] holds no replica of expert 1.*raise ep_size"):
        placement.check_groups(dispatch_groups(4, 2))


def test_one_table_serves_every_layer() -> None:
    table = [[1, 0], [0, 2], [1, 1]]
    options: dict[str, Any] = {"num_experts": 3, "num_ranks": 2, "origin": "placement"}
    placements = parse_placements(table, num_layers=2, **options)
    assert placements == [Placement(replicas=np.array(table))] * 2
    each = parse_placements([table, table[::-1]], num_layers=2, **options)
    assert each[1] == Placement(replicas=np.array(table[::-1]))


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (np.ones(3, dtype=int), r"table \[experts, ranks\].*shape \(3,\)"),
        (np.ones((0, 3), dtype=int), r"shape \(0, 3\)"),
        (np.ones((2, 2)), "in integers, not in float64"),
    ],
)
def test_wrong_placements(replicas: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Placement(replicas=replicas)


# ----------------------------------------------------------------------
# What protection costs in balance: counting replicas bounds every placement, and packing is near the bound.


def least_imbalance(load: np.ndarray, cluster: Cluster, min_replicas: int) -> float:
    """Busiest rank over mean that no placement can beat: at a capacity C an expert needs ceil(t / C) ranks to compute
    its tokens and `min_replicas` to be safe, and all of them need slots."""
    mean = load.sum() / cluster.num_ranks
    capacities = np.unique(np.concatenate([[mean], *(load / k for k in range(1, cluster.num_ranks + 1))]))
    for capacity in capacities[capacities >= mean]:
        if np.maximum(min_replicas, np.ceil(load / capacity - 1e-9)).sum() <= cluster.num_slots:
            return float(capacity / mean)
    raise AssertionError("even one rank for each expert's tokens is too much")


@pytest.mark.parametrize(
    ("num_experts", "bound", "reached"),
    [
        (32, 3.05, 1.01),  # 64 slots are two for each: the hottest third of the tokens lies on two of 16 ranks
        (30, 1.20, 1.06),
        (28, 1.01, 1.06),  # 8 slots to spare
        (24, 1.01, 1.01),
    ],
)
def test_two_replicas_in_four_slots_of_sixteen_ranks(num_experts: int, bound: float, reached: float) -> None:
    """On the recorded loads, less the coldest experts: the least imbalance there can be, and what packing reaches."""
    counts = np.load(recorded())["counts"]
    cluster = Cluster.of(16, 4)
    best, found = [], []
    for sample in range(60, 501, 110):
        for layer in range(0, 24, 3):
            load = np.sort(counts[sample, layer].sum(axis=0, dtype=np.int64))[-num_experts:]
            table = packed_placement(load, cluster, 2).replicas
            assert (table > 0).sum(axis=1).min() >= 2
            best.append(least_imbalance(load, cluster, 2))
            found.append(balanced_quota(load, table).sum(axis=0).max() / (load.sum() / 16))
    assert np.mean(best) == pytest.approx(bound, abs=0.06)
    assert np.mean(best) - 1e-9 <= np.mean(found) <= reached * np.mean(best)
