"""Quotas: exact row sums, near the best possible balance, the same numbers everywhere."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.packing import longest_time, packed_placement
from moe_lightning.balancing.rules import PLACEMENT_RULES, PlacementPolicy
from moe_lightning.dispatch.quota import ONE_SPEED, SPEED_RANGE, Pace, balanced_quota, equal_quota, given_speeds, shares
from moe_lightning.errors import ConfigurationError
from tests.unit.flows import max_flow


@st.composite
def loads(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [E], replicas [E, N]) with a holder for each expert that has tokens."""
    num_experts, num_ranks = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    rows = st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks)
    replicas = np.array(draw(st.lists(rows, min_size=num_experts, max_size=num_experts)), dtype=np.int64)
    sizes = st.one_of(st.integers(0, 9), st.integers(0, 2**31 - 1))
    tokens = np.array(draw(st.lists(sizes, min_size=num_experts, max_size=num_experts)), dtype=np.int64)
    tokens[replicas.sum(axis=1) == 0] = 0
    return tokens, replicas


def lowest_peak(tokens: np.ndarray, replicas: np.ndarray) -> int:
    """The busiest rank under the best split: the experts that most fill their holders (max-flow min-cut)."""
    experts = np.flatnonzero(tokens)
    subsets = itertools.chain.from_iterable(
        itertools.combinations(experts, size) for size in range(1, len(experts) + 1)
    )
    return max((-(-int(tokens[list(s)].sum()) // int(_holders(replicas, s))) for s in subsets), default=0)


def _holders(replicas: np.ndarray, experts: tuple[int, ...]) -> int:
    return (replicas[list(experts)] > 0).any(axis=0).sum()


def fits(tokens: np.ndarray, replicas: np.ndarray, capacity: int | list[int]) -> bool:
    """Whether all tokens flow to holders of their experts, by maximum flow, where ranks carry so many at most."""
    capacities = np.broadcast_to(capacity, replicas.shape[1]).tolist()
    edges: dict[Any, int] = {("source", ("expert", e)): int(t) for e, t in enumerate(tokens)}
    edges |= {(("expert", int(e)), ("rank", int(n))): int(tokens[e]) for e, n in np.argwhere(replicas)}
    edges |= {(("rank", n), "sink"): capacities[n] for n in range(replicas.shape[1])}
    return max_flow(edges, "source", "sink") == tokens.sum()


@st.composite
def uneven_loads(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [E], replicas [E, N], speeds [N])."""
    tokens, replicas = draw(loads())
    num_ranks = replicas.shape[1]
    speeds = draw(st.lists(st.integers(64, 4096), min_size=num_ranks, max_size=num_ranks))
    return tokens, replicas, np.array(speeds)


def shortest_time(tokens: np.ndarray, replicas: np.ndarray, speeds: np.ndarray) -> int:
    """In units of the fastest rank's tokens, the least in which all tokens fit: bisection over maximum flows."""
    low, high = 0, int(tokens.sum()) * int(speeds.max())
    while low < high:
        middle = (low + high) // 2
        if fits(tokens, replicas, (middle * speeds // speeds.max()).tolist()):
            high = middle
        else:
            low = middle + 1
    return low


@settings(max_examples=60, deadline=None)
@given(uneven_loads())
def test_with_speeds_the_longest_time_is_the_optimum(load):
    tokens, replicas, speeds = load
    quota = balanced_quota(tokens, replicas, speeds)
    assert (quota >= 0).all()
    assert (quota.sum(axis=1) == tokens).all()
    assert (quota[replicas == 0] == 0).all()
    longest = int((-(-quota.sum(axis=0) * speeds.max() // speeds)).max())
    best = shortest_time(tokens, replicas, speeds)
    assert best <= longest <= best + best // 128


@settings(max_examples=60, deadline=None)
@given(loads(), st.integers(1, 65536))
def test_equal_speeds_give_the_integers_of_ranks_without_speeds(load, speed):
    tokens, replicas = load
    alike = np.full(replicas.shape[1], speed)
    assert (balanced_quota(tokens, replicas, alike) == balanced_quota(tokens, replicas)).all()


@pytest.mark.parametrize(
    ("speeds", "said"),
    [([1, 2], "fit 3 ranks"), ([1, 0, 1], "1 to 65536"), ([1, -1, 1], "1 to 65536"), ([1, 1, 1 << 17], "1 to 65536")],
)
def test_speeds_that_are_none_are_one_sentence(speeds, said):
    with pytest.raises(ConfigurationError, match=said):
        balanced_quota(np.array([5, 5]), np.ones((2, 3), dtype=np.int64), np.array(speeds))


@settings(max_examples=80, deadline=None)
@given(loads())
def test_equal_quota_is_within_one_of_the_share(load):
    tokens, replicas = load
    quota = equal_quota(tokens, replicas)
    for (e, n), count in np.ndenumerate(replicas):
        if count:
            share = Fraction(int(tokens[e]) * int(count), int(replicas[e].sum()))
            assert abs(int(quota[e, n]) - share) < 1


@settings(max_examples=60, deadline=None)
@example((np.array([3]), np.array([[1, 1, 1, 2]])))
@example(
    (
        np.array([873367, 122743, 528902, 905332, 418117, 937569]),
        np.array(
            [
                [1, 0, 0, 0, 0, 0],
                [0, 2, 0, 2, 0, 0],
                [0, 0, 0, 0, 1, 0],
                [2, 2, 0, 1, 0, 0],
                [0, 1, 0, 1, 0, 1],
                [2, 1, 0, 0, 0, 0],
            ]
        ),
    )
)
@given(loads())
def test_balanced_quota_is_the_optimum_and_never_worse_than_equal(load):
    tokens, replicas = load
    peak, best = balanced_quota(tokens, replicas).sum(axis=0).max(), lowest_peak(tokens, replicas)
    assert peak <= equal_quota(tokens, replicas).sum(axis=0).max()
    assert best <= peak <= best + best // 128


def _popular(generator: np.random.Generator, num_experts: int) -> np.ndarray:
    return generator.zipf(1.3, num_experts).clip(max=1000) * 1000 + generator.integers(0, 999, num_experts)


def _ring(generator: np.random.Generator, num_experts: int, num_ranks: int) -> np.ndarray:
    """Neighbours share an expert: the longest paths that there are."""
    replicas = np.zeros((num_experts, num_ranks), dtype=np.int64)
    first = np.arange(num_experts) % num_ranks
    replicas[np.arange(num_experts), first] = replicas[np.arange(num_experts), (first + 1) % num_ranks] = 1
    return replicas


def _scattered(generator: np.random.Generator, num_experts: int, num_ranks: int) -> np.ndarray:
    replicas = (generator.random((num_experts, num_ranks)) < 2.5 / num_ranks).astype(np.int64)
    replicas[np.arange(num_experts), generator.integers(0, num_ranks, num_experts)] = 1
    return replicas


@pytest.mark.parametrize("place", [_ring, _scattered])
@pytest.mark.parametrize("seed", range(2))
def test_hot_neighbours_are_relieved_to_the_optimum_at_256_experts_on_64_ranks(place, seed):
    generator = np.random.default_rng(seed)
    tokens, replicas = _popular(generator, 256), place(generator, 256, 64)
    peak = int(balanced_quota(tokens, replicas).sum(axis=0).max())
    assert not fits(tokens, replicas, peak * 128 // 129 - 1)


@pytest.mark.parametrize(("seed", "num_experts", "slots"), [(2, 400, 4), (3, 400, 4), (5, 256, 4)])
def test_loads_that_drifted_since_they_were_packed_on_256_ranks_are_split_to_two_percent(
    seed: int, num_experts: int, slots: int
) -> None:
    """Packed experts are cut by one rank after the other: relief has to travel along chains of dozens of ranks."""
    generator = np.random.default_rng(seed)
    packed = (generator.dirichlet(np.full(num_experts, 0.3)) * 2**26).astype(np.int64)
    replicas = packed_placement(packed, Cluster.of(256, slots, 8), 2).replicas
    tokens = (packed * generator.lognormal(0.0, 0.3, num_experts)).astype(np.int64)
    peak = int(balanced_quota(tokens, replicas).sum(axis=0).max())
    assert not fits(tokens, replicas, peak * 100 // 102 - 1)


@settings(max_examples=50, deadline=None)
@given(loads(), st.randoms(use_true_random=False))
def test_the_order_of_experts_does_not_matter(load, random):
    tokens, replicas = load
    tokens = np.array([10 * t + e for e, t in enumerate(tokens)]) * (replicas.sum(axis=1) > 0)  # no two alike
    order = random.sample(range(len(tokens)), len(tokens))
    assert (balanced_quota(tokens[order], replicas[order]) == balanced_quota(tokens, replicas)[order]).all()


def test_large_counts_and_many_holders_do_not_overflow():
    tokens = np.full(4, 2**31 - 1)
    replicas = np.full((4, 2048), 64)
    quota = balanced_quota(tokens, replicas)
    assert (quota.sum(axis=1) == tokens).all()
    assert quota.min() >= 2**31 // 2048 - 1


def test_no_tokens_need_no_holder():
    replicas = np.array([[0, 0], [1, 0]])
    assert balanced_quota(np.array([0, 5]), replicas).tolist() == [[0, 0], [5, 0]]
    assert balanced_quota(np.zeros(2, np.int64), np.zeros((2, 3), np.int64)).sum() == 0


@pytest.mark.parametrize("function", [equal_quota, balanced_quota])
def test_wrong_input_is_one_sentence(function):
    with pytest.raises(ConfigurationError, match="expert 1 has 5 tokens but no replica"):
        function(np.array([0, 5]), np.array([[1, 1], [0, 0]]))
    with pytest.raises(ConfigurationError, match="3 token counts do not fit a placement of 2 experts"):
        function(np.array([1, 2, 3]), np.array([[1], [1]]))


# ----------------------------------------------------------------------
# Speeds: integers from what was measured or given, and the times and loads that follow.


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
        packed_placement(np.ones(4, dtype=np.int64), Cluster(node_of=(0, 1), slots_per_rank=2, speeds=(1, 2, 3)), 1)


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
