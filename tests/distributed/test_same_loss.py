"""Law L1: the loss sequence depends on neither ranks nor placement, replicas, slicing or resuming; law L3: replicas
stay bit-identical.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.training import train

TOLERANCE = 1e-5
STEPS = 12  # an epoch and a half
NOISY = {
    "dropout": 0.1,
    "router": {"noisy_top_k": True, "jitter": 0.1, "z_loss_coef": 0.01, "bias_update_rate": 0.01},
}
LLAMA = {
    "norm": "rmsnorm",
    "position": "rope",
    "activation": "swiglu",
    "bias": False,
    "num_shared_experts": 1,
    "router": {"score": "sigmoid", "num_groups": 3, "top_groups": 2, "scale": 1.5},
}
TOP_1 = {"router": {"top_k": 1}}
TWO_EXPERTS = {"num_experts": 2}
FORCED = {"router": {"forced": {"kind": "zipf", "exponent": 2.0}}}


def run(world_size: int, *, steps: int = STEPS, **options: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_ranks(world_size, partial(train, steps=steps, **options))
    return results


@cache
def _reference(key: str) -> dict[str, Any]:
    result: dict[str, Any] = run(1, **_OPTIONS[key])[0]
    return result


_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "uneven": {"batch_size": 13},
    "accumulate": {"batch_size": 7, "steps": 8, "trainer": {"accumulate_grad_batches": 3}},
    "own": {"own_module": True},
    "noisy": {"model": NOISY},
    "llama": {"model": LLAMA, "validate": True, "trainer": {"val_check_interval": 4}},
    "top_1": {"model": TOP_1},
    "two_experts": {"model": TWO_EXPERTS},
    "forced": {"model": FORCED},
}


def random_placement(seed: int, ranks: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 3, (2, 6, ranks))
    table[table.sum(axis=2) == 0, rng.integers(ranks)] = 1
    placement: list[Any] = table.tolist()
    return placement


def assert_same_training(reference: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    assert len(reference["losses"]) > 0
    for result in ranks:
        np.testing.assert_allclose(result["losses"], reference["losses"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(result["validations"], reference["validations"], rtol=0, atol=TOLERANCE)
        assert result["gradient_norms"] == ranks[0]["gradient_norms"]
    np.testing.assert_allclose(ranks[0]["gradient_norms"], reference["gradient_norms"], rtol=1e-4)
    for name, values in reference["state"].items():
        np.testing.assert_allclose(ranks[0]["state"][name], values, rtol=0, atol=5e-5, err_msg=name)
    assert_replicas_identical(ranks)


def assert_replicas_identical(ranks: list[dict[str, Any]]) -> None:
    for name in ranks[0]["replicas"]:
        seen: dict[int, bytes] = {}
        for result in ranks:
            for expert, content in result["replicas"][name].items():
                assert seen.setdefault(expert, content) == content, f"expert {expert} of {name} differs between ranks"


@pytest.mark.parametrize(
    ("key", "world_size", "strategy"),
    [
        ("plain", 2, {}),
        ("plain", 4, {}),
        ("plain", 3, {}),
        pytest.param("plain", 2, {"copies": 2}, marks=pytest.mark.slow),
        ("plain", 4, {"copies": 2}),
        ("plain", 4, {"ep_size": 2}),
        ("plain", 4, {"ep_size": 1}),
        pytest.param("plain", 2, {"placement": random_placement(0, 2)}, marks=pytest.mark.slow),
        ("plain", 4, {"placement": random_placement(1, 4)}),
        ("plain", 4, {"placement": random_placement(2, 4), "quota": "equal"}),
        ("plain", 2, {"zero1": True}),
        ("plain", 4, {"zero1": True, "placement": random_placement(3, 4)}),
        pytest.param("uneven", 2, {}, marks=pytest.mark.slow),
        ("uneven", 4, {"copies": 2}),
        ("accumulate", 2, {"copies": 2}),
        ("accumulate", 4, {"zero1": True}),
        pytest.param("own", 2, {}, marks=pytest.mark.slow),
        ("own", 4, {"copies": 2}),
        ("noisy", 3, {}),
        ("llama", 4, {}),
        ("llama", 2, {"copies": 2}),
        ("top_1", 2, {"copies": 2}),
        ("two_experts", 4, {}),
        ("forced", 4, {"copies": 4}),
        ("forced", 4, {"placement": random_placement(4, 4)}),
    ],
)
def test_loss_does_not_depend_on_the_world(key: str, world_size: int, strategy: dict[str, Any]) -> None:
    assert_same_training(_reference(key), run(world_size, strategy=strategy, **_OPTIONS[key]))


def test_accumulation_changes_nothing_without_batch_statistics() -> None:
    model = {"router": {"aux_loss_coef": 0.0}}
    whole = run(1, model=model, batch_size=12, steps=8)[0]
    halves = run(2, model=model, batch_size=6, steps=8, trainer={"accumulate_grad_batches": 2})
    np.testing.assert_allclose(halves[0]["gradient_norms"], whole["gradient_norms"], rtol=1e-4)
    for name, values in whole["state"].items():
        np.testing.assert_allclose(halves[0]["state"][name], values, rtol=0, atol=5e-5, err_msg=name)


def test_bf16_mixed_keeps_replicas_identical_and_the_loss_close() -> None:
    options: dict[str, Any] = {"trainer": {"precision": "bf16-mixed"}}
    reference = run(1, **options)[0]
    ranks = run(2, strategy={"copies": 2}, **options)
    assert_replicas_identical(ranks)
    np.testing.assert_allclose(ranks[0]["losses"], reference["losses"], rtol=0, atol=0.02)


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_resume_on_another_number_of_ranks(writers: int, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    strategy = {"zero1": writers == 4, "copies": 2 if writers > 1 else 1}
    run(writers, steps=6, strategy=strategy, save_to=path)
    expected = _reference("plain")["losses"][6:]
    for readers, options in ((1, {}), (2, {"zero1": True}), (4, {"copies": 2})):
        for result in run(readers, strategy=options, ckpt_path=path):
            np.testing.assert_allclose(result["losses"], expected, rtol=0, atol=TOLERANCE)


def test_resume_inside_an_epoch_with_another_cut(tmp_path: Path) -> None:
    path = str(tmp_path / "inside.ckpt")
    run(2, steps=10, save_to=path)  # an epoch has 8 steps
    result = run(3, ckpt_path=path)[0]
    np.testing.assert_allclose(result["losses"], _reference("plain")["losses"][10:], rtol=0, atol=TOLERANCE)


def test_the_same_ranks_twice_are_bit_equal() -> None:
    first, second = (run(2, strategy={"copies": 2}) for _ in range(2))
    assert first[0]["losses"] == second[0]["losses"]
    for name, values in first[0]["state"].items():
        np.testing.assert_array_equal(values, second[0]["state"][name])
