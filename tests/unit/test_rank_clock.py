"""What counts as a rank's own work, under a clock that the test turns."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_lightning.callbacks.rank_clock import RankClock
from moe_lightning.moe.layer import MoELayer, moe_layers
from moe_lightning.parallel.context import ExchangeClock


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
    (rates,) = clock.rates()
    rows = 2 * 2 * 6 * model.first.router.config.top_k
    assert rates.row_s == pytest.approx(2 * 2 * (1.0 + 2.0) / rows)
    assert rates.sample_s == pytest.approx(2 * (3.0 + 4.0 + 5.0) / 4)
    clock.end_step()
    (nothing,) = clock.rates()
    assert (nothing.row_s, nothing.sample_s) == (0.0, 0.0)


def test_in_a_pipeline_passes_alternate_and_bubbles_have_no_time(ticks: Ticks) -> None:
    model, bubbles, cpu = Model(ticks), ExchangeClock(), torch.device("cpu")
    clock = RankClock(moe_layers(model), cpu, bubbles)

    def wait() -> None:
        with bubbles.exchange(cpu):
            ticks.now += 500.0

    wait()
    losses = []
    for _ in range(2):
        losses.append(model(torch.randn(6, 8)).sum())
        wait()
    for loss in losses:
        loss.backward()
        wait()
    clock.turn()
    clock.end_micro_batch(4)
    with torch.no_grad():  # a validation
        wait()
        ticks.now += 500.0
        wait()
    clock.end_step()
    clock.close()
    (rates,) = clock.rates()
    assert rates.row_s == pytest.approx(3.0 / (6 * model.first.router.config.top_k))
    assert rates.sample_s == pytest.approx((50.0 + 3.0 + 70.0 + 5.0 + 4.0 + 60.0) / 2)
    assert bubbles.listener is None


def test_a_pass_that_is_computed_again_counts_no_rows_twice(ticks: Ticks) -> None:
    model = Model(ticks, recompute=True)
    clock = RankClock(moe_layers(model), torch.device("cpu"))
    step(model, clock)
    clock.end_step()
    (rates,) = clock.rates()
    assert rates.row_s == pytest.approx((2 * 3.0 + 1.0) / (2 * 6 * model.first.router.config.top_k))
    assert rates.sample_s < 100


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
    assert all((rates.row_s, rates.sample_s) == (0.0, 0.0) for rates in clock.rates())


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
    (rates,) = clock.rates()
    assert rates.row_s > 0
