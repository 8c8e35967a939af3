"""Trainings that must be the same on every world, and what that means (laws L1 and L3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.training import BRIEF, BRIEF_ACCUMULATION, train

TOLERANCE = 1e-5
PARAMETER_TOLERANCE = 5e-5
SKEWED = {"router": {"forced": {"kind": "zipf", "exponent": 2.0}}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "uneven": {"batch_size": 13},
    "accumulate": BRIEF_ACCUMULATION,
    "own": {"own_module": True},
    "noisy": {
        "model": {
            "dropout": 0.1,
            "router": {"noisy_top_k": True, "jitter": 0.1, "z_loss_coef": 0.01, "bias_update_rate": 0.01},
        }
    },
    "llama": {
        "model": {
            "norm": "rmsnorm",
            "position": "rope",
            "activation": "swiglu",
            "bias": False,
            "num_shared_experts": 1,
            "router": {"score": "sigmoid", "num_groups": 3, "top_groups": 2, "scale": 1.5},
        },
        "validate": True,
        "trainer": {"val_check_interval": 2},
    },
    "swiglu": {"model": {"activation": "swiglu", "bias": False, "norm": "rmsnorm", "position": "rope"}},
    "top_1": {"model": {"router": {"top_k": 1}}},
    "two_experts": {"model": {"num_experts": 2}},
    "skewed": {"model": SKEWED},
    "skewed_top_1": {"model": {"router": {"top_k": 1, **SKEWED["router"]}}},
    "skewed_accumulate": {"model": SKEWED, **BRIEF_ACCUMULATION},
    "bf16": {"model": SKEWED, "trainer": {"precision": "bf16-mixed"}},
}
"""What is trained, as arguments of `train`."""


@cache
def reference(key: str) -> dict[str, Any]:
    """One of the cases on one rank, by stock means."""
    result: dict[str, Any] = run_pooled(1, partial(train, **BRIEF | CASES[key]))[0]
    return result


def on_one_world(
    world_size: int, function: Callable[..., dict[str, Any]], cases: Sequence[dict[str, Any]], *, pooled: bool = True
) -> list[list[dict[str, Any]]]:
    """What a training function returns of every case, one after the other in the same processes: results by rank."""
    ranks = run_ranks(world_size, _several, function, cases, pooled=pooled)
    return [list(results) for results in zip(*ranks, strict=True)]


def _several(
    rank: int, world_size: int, function: Callable[..., dict[str, Any]], cases: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    return [function(rank, world_size, **BRIEF | case) for case in cases]


def assert_same_training(reference: dict[str, Any], ranks: list[dict[str, Any]], what: str = "") -> None:
    assert len(reference["losses"]) > 0
    for result in ranks:
        for series in ("losses", "validations"):
            np.testing.assert_allclose(result[series], reference[series], rtol=0, atol=TOLERANCE, err_msg=what)
        assert result["gradient_norms"] == ranks[0]["gradient_norms"], what
    np.testing.assert_allclose(ranks[0]["gradient_norms"], reference["gradient_norms"], rtol=1e-4, err_msg=what)
    for name, values in reference["state"].items():
        assert_same_parameter(ranks[0]["state"][name], values, f"{what} {name}")
    assert_replicas_identical(ranks)


def assert_same_parameter(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], what: str) -> None:
    """Compare a trained parameter.

    Adam divides a gradient by its own size, so an element whose gradient is of the size of rounding may differ by a
    share of an update: one element in a thousand may, by a tenth of the learning rate of `train`.
    """
    differing = np.abs(actual - expected) > PARAMETER_TOLERANCE
    atol = 3e-4 if differing.mean() < 1e-3 else PARAMETER_TOLERANCE
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=what)


def assert_replicas_identical(ranks: list[dict[str, Any]]) -> None:
    for name in ranks[0]["replicas"]:
        seen: dict[int, bytes] = {}
        for result in ranks:
            for expert, content in result["replicas"][name].items():
                assert seen.setdefault(expert, content) == content, f"expert {expert} of {name} differs between ranks"
