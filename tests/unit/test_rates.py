"""Speeds that ranks agree on: they follow what changes, and not what merely jitters."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.balancing.forecast import AgreedSpeeds, RateMeter, Reading, decode_readings, encode_readings
from moe_lightning.dispatch.quota import ONE_SPEED, shares

EVERY = 8


def follow(seconds: np.ndarray, samples_per_rank: int = 8) -> tuple[AgreedSpeeds, list[int]]:
    """Steps [T, N] of seconds a sample; what is agreed in the end, and the steps at which slices changed."""
    num_ranks = seconds.shape[1]
    meters, agreed = [RateMeter() for _ in range(num_ranks)], AgreedSpeeds(range(num_ranks))
    slices, changed = shares(samples_per_rank * num_ranks, agreed.speeds), []
    for step, row in enumerate(seconds):
        if step % EVERY == 0:
            agreed.take([meter.reading for meter in meters])
            after = shares(samples_per_rank * num_ranks, agreed.speeds)
            if (slices / agreed.speeds).max() > 1.02 * (after / agreed.speeds).max():
                changed.append(step)
                slices = after
        for meter, value in zip(meters, row, strict=True):
            meter.add(float(value))
    return agreed, changed


def jittering(seed: int, steps: int, num_ranks: int, jitter: float = 0.2) -> np.ndarray:
    return 1e-3 * np.random.default_rng(seed).lognormal(0.0, jitter, (steps, num_ranks))


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**9), num_ranks=st.sampled_from([2, 4, 16]))
def test_jitter_of_a_fifth_does_not_move_slices(seed: int, num_ranks: int) -> None:
    assert len(follow(jittering(seed, 100, num_ranks))[1]) <= 1


def test_under_jitter_of_a_fifth_slices_change_less_than_once_in_a_hundred_steps() -> None:
    changes = [len(follow(jittering(seed, 100, ranks))[1]) for seed in range(60) for ranks in (2, 4, 16)]
    assert np.mean(changes) < 0.1


@pytest.mark.parametrize("factor", [2.0, 1.25])
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_slows_down_and_recovers_is_followed(factor: float, seed: int) -> None:
    seconds = jittering(seed, 160, 4, 0.05)
    seconds[40:100, 2] *= factor
    for last, expected in ((40, 1.0), (73, 1 / factor), (160, 1.0)):
        agreed, changed = follow(seconds[:last])
        assert agreed.speeds[2] / np.median(agreed.speeds) == pytest.approx(expected, rel=0.1)
    assert 2 <= len(changed) <= 5


def test_half_the_speed_from_the_start_is_followed_at_the_first_agreed_point() -> None:
    seconds = jittering(0, 9, 2, 0.05) * np.array([1.0, 2.0])
    agreed, changed = follow(seconds)
    assert changed == [EVERY]
    assert agreed.speeds[1] / agreed.speeds[0] == pytest.approx(0.5, rel=0.1)


def test_a_pause_is_no_speed() -> None:
    seconds = jittering(1, 100, 4, 0.02)
    seconds[20::10, 1] *= 50
    agreed, changed = follow(seconds)
    assert not changed
    assert agreed.speeds[1] / np.median(agreed.speeds) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_no_measurement(seconds: float) -> None:
    meter = RateMeter()
    for _ in range(5):
        meter.add(seconds)
    assert meter.reading == Reading()
    for _ in range(3):
        meter.add(1e-3)
        meter.add(seconds)
    assert meter.reading.femtoseconds == 10**12


@given(
    rates=st.lists(st.tuples(st.integers(0, 10**18), st.integers(0, 10**9)), min_size=2, max_size=2),
)
def test_readings_travel_as_62_bits(rates: list[tuple[int, int]]) -> None:
    experts, samples = (Reading(femtoseconds=femtoseconds, error=error) for femtoseconds, error in rates)
    number = encode_readings(experts, samples)
    assert 0 <= number < 1 << 62
    for sent, (back,) in zip((experts, samples), decode_readings([number]), strict=True):
        assert abs(back.femtoseconds - sent.femtoseconds) <= sent.femtoseconds * 2e-4
        assert back.error == min(sent.error, 2047)


def readings(*femtoseconds: int) -> list[Reading]:
    return [Reading(femtoseconds=value, error=10) for value in femtoseconds]


def test_newcomers_start_from_their_node_or_the_median() -> None:
    agreed = AgreedSpeeds([0, 0, 1, 1, 2])
    assert agreed.take(readings(1000, 1000, 2000, 0, 0))
    assert agreed.speeds.tolist() == [ONE_SPEED, ONE_SPEED, ONE_SPEED // 2, ONE_SPEED // 2, ONE_SPEED]


def test_nothing_is_agreed_before_anything_is_known() -> None:
    agreed = AgreedSpeeds([0, 1])
    assert not agreed.take(readings(0, 0))
    assert not agreed.take(readings(1000, 1020))  # within its noise
    assert agreed.speeds.tolist() == [ONE_SPEED] * 2


def test_a_rank_that_is_ill_has_a_least_speed() -> None:
    agreed = AgreedSpeeds([0, 1, 2])
    agreed.take(readings(1000, 1000, 10**12))
    assert agreed.speeds.tolist() == [ONE_SPEED, ONE_SPEED, ONE_SPEED // 64]
