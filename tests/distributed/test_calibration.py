"""The constants of the performance model: alike on all ranks, and dense times that are those of the dense layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_lightning.callbacks import calibration
from moe_lightning.callbacks.calibration import DenseClock, assumed_costs, calibrate, measure_exchange
from moe_lightning.moe.layer import MoELayer
from tests.distributed.harness import connect, run_pooled, run_ranks


def measure(rank: int, world_size: int) -> tuple[list[dict[str, Any]], dict[str, float], float]:
    world = connect()
    torch.manual_seed(0)
    layers = [MoELayer(16, 32, 4, bias=True), MoELayer(16, 8, 4)]
    costs, errors = calibrate(layers, world, torch.float32)
    return [dataclasses.asdict(block) for block in costs], errors, measure_exchange(world).predict_s(1e6)


@pytest.mark.slow
def test_all_ranks_get_the_same_positive_constants() -> None:
    (costs, errors, million_bytes_s), other = run_pooled(2, measure)
    assert (costs, errors) == (other[0], other[1])
    for block in costs:
        assert block["bytes_per_s"] > 0
        assert block["rows_per_s"] > 0
        assert block["weight_bytes"] > 0
        assert block["row_bytes"] == 16 * 4
    assert set(errors) == {"exchange", "experts_forward", "experts_backward", "trans", "agg"}
    assert all(0 <= error < float("inf") for error in errors.values())
    assert 0 < million_bytes_s < 10


def measure_on_other_processors(rank: int, world_size: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    stock = calibration.fit_line

    def fitted(amounts: Any, times: Any) -> Any:
        line = stock(amounts, times)
        return dataclasses.replace(line, per_unit_s=line.per_unit_s * (1 + 1e-12 * rank), mean_error=float(rank))

    calibration.fit_line = fitted  # type: ignore[assignment]
    layer = MoELayer(16, 32, 4)
    generator = torch.get_rng_state()
    costs, errors = calibrate([layer], connect(), torch.float32)
    assert torch.equal(generator, torch.get_rng_state()), "a resumed run would draw other numbers"
    return [dataclasses.asdict(block) for block in costs], errors


def test_all_ranks_take_the_lines_of_one() -> None:
    first, second = run_ranks(2, measure_on_other_processors)
    assert first == second
    assert first[1]["exchange"] == 0.0


def test_assumed_costs_follow_the_sizes() -> None:
    layer = MoELayer(16, 32, 4, activation="swiglu", bias=True)
    layer.experts.w_down.requires_grad_(False)
    (costs,) = assumed_costs([layer], torch.bfloat16, bytes_per_s=1e9, flops_per_s=1e12)
    matrices, biases = 16 * 64 + 32 * 16, 64 + 16
    assert costs.weight_bytes == 2 * (matrices + biases)
    assert costs.gradient_bytes == 4 * (16 * 64 + biases)
    assert costs.rows_per_s == pytest.approx(1e12 / (2 * matrices))
    assert costs.bytes_per_s == pytest.approx(1e9)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    """A dense layer that takes a stated time in each pass, by a clock of its own."""

    def __init__(self, clock: FakeClock, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.forward_s
        middle = x * 1.0
        if middle.requires_grad:
            middle.register_hook(self._spend)
        return middle * 1.0

    def _spend(self, _: Tensor) -> None:
        self.clock.now += self.backward_s


class Recomputed(nn.Module):
    """A layer whose outputs the backward pass computes again."""

    def __init__(self, layer: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.use_reentrant = layer, use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize(
    "wrapped",
    [lambda layer: layer, partial(Recomputed, use_reentrant=False), partial(Recomputed, use_reentrant=True)],
    ids=["kept", "computed again", "computed again, reentrant"],
)
def test_dense_layers_are_timed_between_the_moe_layers(
    wrapped: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(calibration, "time", clock)
    layers = [MoELayer(4, 4, 2), MoELayer(4, 4, 2)]
    first, second = map(wrapped, layers)
    model = nn.Sequential(Slow(clock, 100.0, 100.0), first, Slow(clock, 1.0, 2.0), second, Slow(clock, 3.0, 5.0))
    watch = DenseClock(layers, torch.device("cpu"))
    for _ in range(4):  # two of them warm up
        out = model(torch.randn(5, 4, requires_grad=True))
        watch.turn()
        out.sum().backward()
        watch.end_micro_batch()
        assert not watch.end_step()
    model(torch.randn(5, 4))
    watch.end_micro_batch()  # no backward pass: nothing to keep
    assert not watch.end_step()
    assert watch.end_step()
    assert watch.close() == ([1.0, 3.0], [2.0, 5.0])
    assert not layers[0]._forward_hooks
    assert DenseClock(layers, torch.device("cpu")).close() == ([0.0, 0.0], [0.0, 0.0])
