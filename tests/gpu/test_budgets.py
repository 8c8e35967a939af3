"""What a layer asks of its device, counted on a fake one with real values: host waits, blocking copies, launches."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from benchmarks.roofline import SHAPES
from benchmarks.roofline_layer import DESIGNS, backward_kernels, forward_kernels
from benchmarks.roofline_model import DEVICES
from tests.gpu.interpreted import run_interpreted

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this starts the interpreter's processes"),
]


def counts(ranks: int, aux_loss_coef: float, plan: str = "host", dtype: str = "float32") -> list[dict[str, Any]]:
    """Of each rank; the layer's values and gradients on the fake device are those of the CPU, or this fails."""
    return run_interpreted(ranks, "tests.gpu.fake_layer", aux_loss_coef, plan, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_waits_once_and_launches_few_kernels(ranks: int) -> None:
    for found in counts(ranks, aux_loss_coef=0.0):
        forward, backward = found["forward"], found["backward"]
        assert len(forward["waits"]) == 1, forward
        assert not backward["waits"]
        assert not forward["uploads"] + backward["uploads"]
        assert forward["launches"] <= 30, forward["kernels"]
        assert backward["launches"] <= 30, backward["kernels"]
        exchanges = ["all_to_all_single"] * 2 * (ranks - 1)
        assert forward["collectives"][ranks - 1 :] == exchanges, "beside the counts, one exchange there and one back"
        assert backward["collectives"] == exchanges


@pytest.mark.slow
def test_the_balancing_loss_adds_no_wait() -> None:
    for found in counts(2, aux_loss_coef=0.01):
        assert len(found["forward"]["waits"]) == 1
        assert not found["forward"]["uploads"]
        assert found["forward"]["launches"] <= 30, found["forward"]["kernels"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_on_the_device_waits_for_nothing(ranks: int) -> None:
    for found in counts(ranks, aux_loss_coef=0.01, plan="device"):
        forward, backward = found["forward"], found["backward"]
        assert not forward["waits"] + backward["waits"]
        assert not forward["uploads"] + backward["uploads"]
        assert forward["launches"] <= 40, forward["kernels"]
        assert backward["launches"] <= 30, backward["kernels"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused", "rows"])
def test_the_model_has_all_launches_of_a_layer(name: str) -> None:
    """In bf16, where the router is one operation, with the balancing loss that is on by default."""
    design, device = DESIGNS[name], DEVICES["h100"]
    forward, backward = (len(kernels(SHAPES[0], design, device)) - 1 for kernels in (forward_kernels, backward_kernels))
    for found in counts(1 if name == "fused" else 2, aux_loss_coef=0.01, dtype="bfloat16"):
        assert found["forward"]["kernels"]["_route_kernel"] == 1
        assert found["forward"]["launches"] <= forward + 2 + design.launches[0], "the sort has three"
        assert found["backward"]["launches"] <= backward + design.launches[1]
