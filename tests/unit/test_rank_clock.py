"""What counts as a rank's own work, under a clock that the test turns."""

from __future__ import annotations

import copy
import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_lightning.balancing.forecast import AgreedSpeeds, RateMeter, Reading
from moe_lightning.callbacks.rank_clock import RankClock
from moe_lightning.dispatch.quota import ONE_SPEED, shares
from moe_lightning.moe.layer import MoELayer, moe_layers


class Ticks:
    """Seconds that pass in chosen places only."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Passes(nn.Module):
    """Lets so many seconds pass in its forward and its backward pass."""

    def __init__(self, ticks: Ticks, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.ticks, self.seconds = ticks, (forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Pass.apply(x, self.ticks, self.seconds)
        return out


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ticks: Ticks, seconds: tuple[float, float]) -> Tensor:
        ctx.kept = ticks, seconds
        ticks.now += seconds[0]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ticks, seconds = ctx.kept
        ticks.now += seconds[1]
        return grad, None, None


class Model(nn.Module):
    """Two MoE layers; waits inside the layers, work before, between and behind them."""

    def __init__(self, ticks: Ticks, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Linear(8, 8)
        self.first, self.second = MoELayer(8, 8, 2), MoELayer(8, 8, 2)
        self.before, self.between, self.head = (Passes(ticks, *s) for s in ((50.0, 60.0), (3.0, 4.0), (70.0, 5.0)))
        for layer in (self.first, self.second):
            inner = layer.experts.forward
            layer.experts.forward = _timed(inner, Passes(ticks, 1.0, 2.0))  # type: ignore[method-assign]
            layer.router.forward = _timed(layer.router.forward, Passes(ticks, 0.0, 0.0), ticks, 1000.0)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self.embed(x))
        x = checkpoint(self.first, x, use_reentrant=False) if self.recompute else self.first(x)
        return self.head(self.second(self.between(x)))


def _timed(inner: Any, passes: Passes, ticks: Ticks | None = None, wait_s: float = 0.0) -> Any:
    def forward(x: Tensor, *rest: Any) -> Any:
        if ticks is not None:
            ticks.now += wait_s
            return inner(x, *rest)
        return passes(inner(x, *rest))

    return forward


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    ticks = Ticks()
    monkeypatch.setattr(time, "perf_counter", ticks.perf_counter)
    return ticks


def step(model: nn.Module, clock: RankClock, rows: int = 6, samples: int = 2) -> None:
    loss = model(torch.randn(rows, 8)).sum()
    clock.turn()
    loss.backward()
    clock.end_micro_batch(samples)


def test_rows_and_samples_have_their_times_and_waits_have_none(ticks: Ticks) -> None:
    model = Model(ticks)
    clock = RankClock(moe_layers(model), torch.device("cpu"))
    step(model, clock)
    step(model, clock)
    assert not list(clock.rates())
    clock.end_step()
    ((row_s, sample_s),) = clock.rates()
    rows = 2 * 2 * 6 * model.first.router.config.top_k
    assert row_s == pytest.approx(2 * 2 * (1.0 + 2.0) / rows)
    assert sample_s == pytest.approx(2 * (3.0 + 4.0 + 5.0) / 4)
    clock.end_step()
    assert list(clock.rates()) == [(0.0, 0.0)]


@pytest.mark.parametrize("recompute", [False, True])
def test_dense_layers_are_timed_in_the_first_steps(ticks: Ticks, recompute: bool) -> None:
    model = Model(ticks, recompute)
    clock = RankClock(moe_layers(model), torch.device("cpu"))
    for number in range(8):
        assert clock.dense_times() == ([0.0, 0.0], [0.0, 0.0]) or number > 2
        step(model, clock)
        step(model, clock)
        if number in (0, 7):
            ticks.now += 1000.0  # of the optimizer
        clock.end_step()
        list(clock.rates())
    forward_s, backward_s = clock.dense_times()
    assert forward_s == pytest.approx([3.0, 70.0])
    assert backward_s == pytest.approx([4.0, 5.0])


def test_a_pass_that_is_computed_again_counts_no_rows_twice(ticks: Ticks) -> None:
    model = Model(ticks, recompute=True)
    clock = RankClock(moe_layers(model), torch.device("cpu"))
    step(model, clock)
    clock.end_step()
    ((row_s, sample_s),) = clock.rates()
    assert row_s == pytest.approx((2 * 3.0 + 1.0) / (2 * 6 * model.first.router.config.top_k))
    assert sample_s < 100


def test_evaluation_copies_and_closed_clocks_leave_no_time(ticks: Ticks) -> None:
    model = Model(ticks)
    clock = RankClock(moe_layers(model), torch.device("cpu"))
    copied = copy.deepcopy(model.first)
    copied(torch.randn(4, 8)).sum().backward()
    model.eval()(torch.randn(4, 8))
    with torch.no_grad():
        model.train()(torch.randn(4, 8))
    clock.end_step()
    clock.close()
    step(model, clock)
    clock.end_step()
    assert all(rates == (0.0, 0.0) for rates in clock.rates())


class Event:
    """Of a device that has come so far."""

    passed = 0.0
    made = 0.0

    def __init__(self, device: object, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        Event.made += 1.0
        self.at = Event.made

    def query(self) -> bool:
        return self.at <= Event.passed

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


def test_on_a_gpu_events_are_read_when_the_device_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    model = nn.Sequential(nn.Linear(8, 8), MoELayer(8, 8, 2))
    clock = RankClock(moe_layers(model), torch.device("cuda"))
    for _ in range(2):
        step(model, clock)
        clock.end_step()
    assert not list(clock.rates())
    Event.passed = Event.made / 2
    assert len(list(clock.rates())) == 1
    Event.passed = Event.made
    ((row_s, _),) = clock.rates()
    assert row_s > 0


# ----------------------------------------------------------------------
# Speeds that ranks agree on: they follow what changes, and not what merely jitters.


EVERY = 8


def follow(seconds: np.ndarray, samples_per_rank: int = 8) -> tuple[AgreedSpeeds, list[int]]:
    """Steps [T, N] of seconds a sample; what is agreed in the end, and the steps at which slices changed."""
    num_ranks = seconds.shape[1]
    meters, agreed = [RateMeter() for _ in range(num_ranks)], AgreedSpeeds(range(num_ranks))
    slices, changed = shares(samples_per_rank * num_ranks, agreed.speeds), []
    for step, row in enumerate(seconds):
        if step % EVERY == 0:
            agreed.update([meter.reading for meter in meters])
            after = shares(samples_per_rank * num_ranks, agreed.speeds)
            if (slices / agreed.speeds).max() > 1.02 * (after / agreed.speeds).max():
                changed.append(step)
                slices = after
        for meter, value in zip(meters, row, strict=True):
            meter.add(float(value))
    return agreed, changed


def jittering(seed: int, steps: int, num_ranks: int, jitter: float = 0.2) -> np.ndarray:
    return 1e-3 * np.random.default_rng(seed).lognormal(0.0, jitter, (steps, num_ranks))


def test_under_jitter_of_a_fifth_slices_change_less_than_once_in_a_hundred_steps() -> None:
    changes = [len(follow(jittering(seed, 100, ranks))[1]) for seed in range(30) for ranks in (2, 4, 16)]
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


def readings(*femtoseconds: int) -> list[Reading]:
    return [Reading(femtoseconds=value, error=10) for value in femtoseconds]


def test_newcomers_start_from_their_node_or_the_median() -> None:
    agreed = AgreedSpeeds([0, 0, 1, 1, 2])
    assert agreed.update(readings(1000, 1000, 2000, 0, 0))
    assert agreed.speeds.tolist() == [ONE_SPEED, ONE_SPEED, ONE_SPEED // 2, ONE_SPEED // 2, ONE_SPEED]


def test_nothing_is_agreed_before_anything_is_known() -> None:
    agreed = AgreedSpeeds([0, 1])
    assert not agreed.update(readings(0, 0))
    assert not agreed.update(readings(1000, 1020))  # within its noise
    assert agreed.speeds.tolist() == [ONE_SPEED] * 2


def test_a_rank_that_is_ill_has_a_least_speed() -> None:
    agreed = AgreedSpeeds([0, 1, 2])
    agreed.update(readings(1000, 1000, 10**12))
    assert agreed.speeds.tolist() == [ONE_SPEED, ONE_SPEED, ONE_SPEED // 64]
