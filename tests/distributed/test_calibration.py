"""The constants of the performance model: alike on all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moe_lightning.callbacks import calibration
from moe_lightning.callbacks.calibration import assumed_costs, calibrate, measure_exchange
from moe_lightning.moe.layer import MoELayer
from tests.distributed.harness import connect, run_pooled


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

    layer = MoELayer(16, 32, 4)
    generator = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "fit_line", fitted)
        costs, errors = calibrate([layer], connect(), torch.float32)
    assert torch.equal(generator, torch.get_rng_state()), "a resumed run would draw other numbers"
    return [dataclasses.asdict(block) for block in costs], errors


def test_all_ranks_take_the_lines_of_one() -> None:
    first, second = run_pooled(2, measure_on_other_processors)
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
