"""Speeds: integers from what was measured or given, and the times and loads that follow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.packing import longest_time, packed_placement
from moe_lightning.balancing.rules import PLACEMENT_RULES, PlacementPolicy, plan_placement
from moe_lightning.dispatch.quota import ONE_SPEED, SPEED_RANGE, Pace, given_speeds, shares
from moe_lightning.errors import ConfigurationError


def test_given_speeds_are_relative_to_the_fastest():
    assert given_speeds([2.0, 1, 4], 3).tolist() == [ONE_SPEED // 2, ONE_SPEED // 4, ONE_SPEED]
    assert given_speeds([1.0, 1e-9], 2).tolist() == [ONE_SPEED, ONE_SPEED // SPEED_RANGE]


@given(st.lists(st.integers(1, 65536), min_size=1, max_size=6), st.integers(0, 10**6))
def test_in_the_least_time_the_load_fits_and_in_a_shorter_one_it_does_not(speeds, load):
    pace = Pace.of(np.array(speeds), len(speeds))
    time = pace.least_time(load)
    assert sum(pace.loads(time)) >= load
    assert time == 0 or sum(pace.loads(time - 1)) < load
    loads = np.array(pace.loads(time))
    assert (pace.times(loads) <= time).all()
    assert (pace.times(loads + 1) > time).all()
    assert [pace.time(rank, int(load)) for rank, load in enumerate(loads)] == pace.times(loads).tolist()


@pytest.mark.parametrize("rule", list(PLACEMENT_RULES))
def test_equal_speeds_place_as_no_speeds_do(rule):
    generator = np.random.default_rng(1)
    load = generator.integers(0, 10**6, 24)
    plain = Cluster.of(8, 4, 2)
    alike = Cluster(node_of=plain.node_of, slots_per_rank=4, speeds=(7,) * 8)
    policy = PlacementPolicy(rule=rule, min_replicas=1)
    assert policy.place(load, plain) == policy.place(load, alike)


@pytest.mark.parametrize("seed", range(5))
def test_packing_weighs_capacity_by_speed(seed):
    generator = np.random.default_rng(seed)
    load = (generator.dirichlet(np.full(32, 0.3)) * 10**6).astype(np.int64)
    speeds = tuple(generator.integers(ONE_SPEED // 4, ONE_SPEED, 16).tolist())
    cluster = Cluster(node_of=tuple(range(16)), slots_per_rank=4, speeds=speeds)
    blind = packed_placement(load, Cluster.of(16, 4), 1)
    seeing = packed_placement(load, cluster, 1)
    ideal = int(load.sum()) * max(speeds) / sum(speeds)
    assert longest_time(seeing, load, cluster) <= 1.01 * ideal
    assert longest_time(seeing, load, cluster) <= 1.005 * longest_time(blind, load, cluster)


def test_a_cluster_refuses_speeds_of_other_ranks():
    with pytest.raises(ConfigurationError, match="do not fit 2 ranks"):
        Cluster(node_of=(0, 1), slots_per_rank=2, speeds=(1, 2, 3))


def test_every_rule_places_on_uneven_ranks():
    cluster = Cluster(node_of=(0, 0, 1, 1), slots_per_rank=4, speeds=(4096, 1024, 4096, 2048))
    for rule in PLACEMENT_RULES:
        (placement,) = plan_placement(np.array([[5, 40, 100, 3]]), cluster, PlacementPolicy(rule=rule))
        assert placement.num_ranks == 4


@given(st.lists(st.integers(64, 4096), min_size=1, max_size=5), st.integers(0, 40), st.integers(1, 20))
def test_shares_are_whole_and_no_move_of_one_unit_shortens_the_longest_time(speeds, total, most):
    rates, num_ranks = np.array(speeds), len(speeds)
    units = shares(total, rates, most)
    most = max(most, -(-total // num_ranks))
    assert units.sum() == total
    assert units.min() >= min(1, total // num_ranks)
    assert units.max() <= most
    longest = (units / rates).max()
    for giver in range(num_ranks):
        for taker in np.flatnonzero(units < most):
            other = units.copy()
            other[giver] -= 1
            other[taker] += 1
            assert other[giver] < min(1, total // num_ranks) or (other / rates).max() >= longest - 1e-12
