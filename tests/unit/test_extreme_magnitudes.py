"""Integer paths at the largest loads, speeds and times that can come: products stay inside int64, or are no int64."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.balancing.cluster import Cluster, allocate_replicas, bounded_loads
from moe_lightning.balancing.cost_model import BlockCosts
from moe_lightning.balancing.forecast import AgreedSpeeds, LoadForecast, RateMeter, Reading
from moe_lightning.balancing.packing import longest_time
from moe_lightning.balancing.replica_placement import deal_to_ranks
from moe_lightning.balancing.rules import PLACEMENT_RULES, PlacementPolicy, plan_placement, replan_placement
from moe_lightning.balancing.shadow_search import no_shadows, predict_plan, search_shadows
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.dispatch.quota import ONE_SPEED, Pace, balanced_quota, dispatch_splits, equal_quota, shares

MOST_TOKENS = (1 << 31) - 1
"""Of an expert in one step."""

SPEEDS = st.lists(st.sampled_from([64, 1000, ONE_SPEED, 1 << 16]), min_size=4, max_size=4)


def magnitudes(most: int) -> st.SearchStrategy[int]:
    """Integers up to a limit whose numbers of digits are all as likely."""
    return st.integers(0, most.bit_length()).flatmap(lambda bits: st.integers(0, min(most, 1 << bits)))


# ---------------------------------------------------------------- times become speeds


@given(st.lists(magnitudes(10**30), min_size=1, max_size=6))
def test_speeds_follow_times_of_any_length(femtoseconds: list[int]) -> None:
    agreed = AgreedSpeeds(range(len(femtoseconds)))
    agreed.update([Reading(femtoseconds=value) for value in femtoseconds])
    known = sorted(value for value in femtoseconds if value)
    for speed, value in zip(agreed.speeds.tolist(), femtoseconds, strict=True):
        ratio = Fraction(known[(len(known) - 1) // 2], value) if value else Fraction(1)
        due = min(max(ratio, Fraction(1, 64)), Fraction(16)) * ONE_SPEED
        if abs(due - ONE_SPEED) * 1000 > 30 * ONE_SPEED + 1000:
            assert abs(speed - due) <= 1


@pytest.mark.parametrize("seconds", [2.24, 2.26, 10.0, 3600.0, 1e6])
def test_a_sample_may_take_any_time_outside_the_experts(seconds: float) -> None:
    meters = [RateMeter(), RateMeter()]
    for _ in range(30):
        meters[0].add(seconds)
        meters[1].add(seconds / 2)
    agreed = AgreedSpeeds(range(2))
    assert agreed.update([meter.reading for meter in meters])
    assert agreed.speeds[0] / agreed.speeds[1] == pytest.approx(0.5, rel=1e-3)


@given(st.lists(st.floats(), min_size=3, max_size=12))
def test_readings_of_any_times_are_bounded(seconds: list[float]) -> None:
    meter = RateMeter()
    for value in seconds:
        meter.add(value)
    assert 0 <= meter.reading.femtoseconds <= 10**23
    assert 0 <= meter.reading.error <= 1000


@given(SPEEDS, magnitudes(1 << 50))
def test_shares_of_any_total_are_whole(speeds: list[int], total: int) -> None:
    units = shares(total, np.array(speeds), total)
    assert int(units.sum()) == total
    assert int(units.min()) >= 0
    assert max(map(Fraction, units.tolist(), speeds)) <= Fraction(total, sum(speeds)) + 1


# ---------------------------------------------------------------- loads become placements


@settings(deadline=None)
@given(st.lists(magnitudes(1 << 62), min_size=1, max_size=8))
def test_bounded_loads_keep_their_ratios(load: list[int]) -> None:
    bounded = bounded_loads(np.array([load]))[0].tolist()
    assert sum(bounded) < 1 << 42
    assert [value > 0 for value in bounded] == [value > 0 for value in load]
    if sum(load) < 1 << 38:
        assert bounded == load
    most, kept = max(load), max(bounded)
    assert all(abs(small * most - value * kept) <= 2 * most for small, value in zip(bounded, load, strict=True))


@settings(deadline=None)
@given(st.lists(magnitudes(1 << 62), min_size=6, max_size=6), SPEEDS, st.sampled_from(list(PLACEMENT_RULES)))
def test_any_load_is_placed_on_ranks_of_any_speed(load: list[int], speeds: list[int], rule: str) -> None:
    cluster = Cluster(node_of=(0, 0, 1, 1), slots_per_rank=4, speeds=tuple(speeds))
    policy = PlacementPolicy(rule=rule)
    (placement,) = plan_placement(np.array([load]), cluster, policy)
    assert all(placement.holders(expert) for expert in range(6))
    bounded = bounded_loads(np.array(load))
    longest = longest_time(placement, bounded, cluster)
    assert longest * cluster.pace.total >= int(bounded.sum()) * cluster.pace.fastest
    (again,) = replan_placement(np.array([load]), cluster, [policy], [placement])
    assert longest_time(again, bounded, cluster) <= longest


@given(st.lists(magnitudes(10**12), min_size=5, max_size=5), SPEEDS)
def test_replicas_go_to_the_rank_with_least_to_do_at_any_speed(load: list[int], speeds: list[int]) -> None:
    # One node, one replica each: the deal is "heaviest first, to the rank that is idle longest".
    cluster = Cluster(node_of=(0, 0, 0, 0), slots_per_rank=2, speeds=tuple(speeds))
    fastest = max(speeds)
    dealt = deal_to_ranks(np.ones((5, 1), dtype=np.int64), cluster, np.array(load))
    times, used = [Fraction(0)] * 4, [0] * 4
    for expert in sorted(range(5), key=lambda expert: (-load[expert], expert)):
        (rank,) = dealt.holders(expert)
        least = min(time for time, slots in zip(times, used, strict=True) if slots < 2)
        assert times[rank] <= least * (1 + Fraction(1, 1000)) + 1
        times[rank] += Fraction(load[expert] * fastest, speeds[rank])
        used[rank] += 1


@given(st.lists(magnitudes(1 << 62), min_size=3, max_size=3))
def test_replicas_of_any_load_are_counted(load: list[int]) -> None:
    replicas = allocate_replicas(np.array(load), slots=12, num_nodes=4, min_replicas=1)
    assert int(replicas.sum()) == 12
    assert all(replicas[a] + 1 >= replicas[b] for a in range(3) for b in range(3) if load[a] >= load[b])


# ---------------------------------------------------------------- tokens become quotas and routes

TOKENS = st.lists(magnitudes(MOST_TOKENS), min_size=8, max_size=8)


@settings(deadline=None)
@given(TOKENS, SPEEDS, st.integers(0, 2**32 - 1))
def test_quotas_of_the_most_tokens_are_exact(tokens: list[int], speeds: list[int], seed: int) -> None:
    replicas = np.random.default_rng(seed).integers(0, 4, (8, 4))
    replicas[:, 0] += replicas.sum(axis=1) == 0
    for quota in (
        equal_quota(np.array(tokens), replicas),
        balanced_quota(np.array(tokens), replicas),
        balanced_quota(np.array(tokens), replicas, np.array(speeds)),
    ):
        assert quota.dtype == np.int64
        assert quota.min() >= 0
        assert quota.sum(axis=1).tolist() == tokens
        assert not quota[replicas == 0].any()
    even = _longest(equal_quota(np.array(tokens), replicas), [1] * 4)
    assert _longest(balanced_quota(np.array(tokens), replicas), [1] * 4) <= even
    pace = Pace.of(np.array(speeds), 4)
    assert pace.times(quota.sum(axis=0)).max() >= Fraction(sum(tokens) * pace.fastest, pace.total)


def _longest(quota: np.ndarray, speeds: list[int]) -> Fraction:
    return max(map(Fraction, quota.sum(axis=0).tolist(), speeds))


@settings(deadline=None)
@given(TOKENS, st.integers(0, 2**32 - 1))
def test_routes_and_shadows_of_the_most_tokens_add_up(tokens: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    on_ranks = np.stack([generator.multinomial(total, np.full(4, 0.25)) for total in tokens]).astype(np.int64)
    placement = uniform_placement(8, 4, 2)
    quota = balanced_quota(on_ranks.sum(axis=1), placement.replicas)
    for rank in range(4):
        send, recv = dispatch_splits(on_ranks, quota, rank)
        assert send.sum(axis=1).tolist() == on_ranks[:, rank].tolist()
        assert recv.sum(axis=1).tolist() == quota[:, rank].tolist()
    costs = BlockCosts(row_bytes=4096.0, weight_bytes=1e6, gradient_bytes=1e6, bytes_per_s=1e10, rows_per_s=1e6)
    searched = search_shadows(on_ranks, placement, costs)
    with_shadows, without = (
        float(predict_plan(on_ranks, placement, plan, costs).total_s)
        for plan in (searched, no_shadows(on_ranks, placement))
    )
    assert 0 <= with_shadows <= without


@given(st.lists(st.lists(magnitudes(MOST_TOKENS), min_size=2, max_size=2), min_size=1, max_size=8))
def test_forecasts_lie_between_what_was_observed(steps: list[list[int]]) -> None:
    forecast = LoadForecast(decay=0.9)
    for step in steps:
        forecast.observe(np.array(step))
    predicted = forecast.predict()
    for index, value in enumerate(predicted.tolist()):
        assert min(step[index] for step in steps) - 1 <= value <= max(step[index] for step in steps)
