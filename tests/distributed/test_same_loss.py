"""Law L1: the loss sequence depends on neither ranks nor placement, replicas, slicing or resuming; law L3: replicas
stay bit-identical.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.harness import run_pooled
from tests.distributed.same_training import (
    CASES,
    TOLERANCE,
    assert_replicas_identical,
    assert_same_training,
    on_one_world,
    reference,
)
from tests.distributed.training import BRIEF, train
from tests.parameters import slow


def run(world_size: int, **options: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_pooled(world_size, partial(train, **BRIEF | options))
    return results


def random_placement(seed: int, ranks: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 3, (2, 6, ranks))
    table[table.sum(axis=2) == 0, rng.integers(ranks)] = 1
    placement: list[Any] = table.tolist()
    return placement


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        slow(
            2,
            [("plain", {}), ("plain", {"dense": "zero1"}), ("accumulate", {"replicas": 2}), ("llama", {"replicas": 2})],
        ),
        slow(2, [("top_1", {"replicas": 2})]),
        # Each way to place experts once, and each training once; equal placements of both are slow rows.
        (2, [("plain", {"ep_size": 1}), ("uneven", {"replicas": 2})]),
        (3, [("plain", {}), ("noisy", {}), ("accumulate", {"dense": "zero1"}), ("skewed", {"replicas": 3})]),
        (4, [("plain", {"ep_size": 2}), ("plain", {"placement": random_placement(2, 4), "quota": "equal"})]),
        slow(
            4,
            [
                ("plain", {"ep_size": 1}),
                ("uneven", {"replicas": 2}),
                ("accumulate", {"dense": "zero1"}),
                ("skewed", {"replicas": 4}),
            ],
        ),
        slow(
            4,
            [
                ("plain", {"dense": "zero1", "placement": random_placement(3, 4)}),
                ("own", {"replicas": 2}),
                ("llama", {}),
                ("two_experts", {}),
            ],
        ),
        slow(
            4,
            [
                ("plain", {}),
                ("plain", {"replicas": 2}),
                ("plain", {"placement": random_placement(1, 4)}),
                ("skewed", {"placement": random_placement(4, 4)}),
            ],
        ),
        slow(
            2,
            [("plain", {"replicas": 2}), ("plain", {"placement": random_placement(0, 2)}), ("uneven", {}), ("own", {})],
        ),
    ],
)
def test_loss_does_not_depend_on_the_world(world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    options = [{"strategy": strategy, **CASES[key]} for key, strategy in cases]
    for (key, strategy), ranks in zip(cases, on_one_world(world_size, train, options), strict=True):
        assert_same_training(reference(key), ranks, f"{key}, {strategy}")


def test_accumulation_changes_nothing_without_batch_statistics() -> None:
    model = {"router": {"aux_loss_coef": 0.0}}
    whole = run(1, model=model, batch_size=12)[0]
    halves = run(2, model=model, batch_size=6, trainer={"accumulate_grad_batches": 2})
    np.testing.assert_allclose(halves[0]["gradient_norms"], whole["gradient_norms"], rtol=1e-4)
    for name, values in whole["state"].items():
        np.testing.assert_allclose(halves[0]["state"][name], values, rtol=0, atol=5e-5, err_msg=name)


def test_bf16_mixed_keeps_replicas_identical_and_the_loss_close() -> None:
    options: dict[str, Any] = {"trainer": {"precision": "bf16-mixed"}}
    alone = run(1, **options)[0]
    ranks = run(2, strategy={"replicas": 2}, **options)
    assert_replicas_identical(ranks)
    np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=0, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("writers", [slow(1), slow(2), 4])
def test_resume_on_another_number_of_ranks(writers: int, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    strategy = {"dense": "zero1" if writers == 4 else "ddp", "replicas": 2 if writers > 1 else 1}
    run(writers, steps=2, strategy=strategy, save_to=path)
    expected = reference("plain")["losses"][2:]
    for readers, options in ((1, {}), (2, {"dense": "zero1"}), (4, {"replicas": 2})):
        for result in run(readers, strategy=options, ckpt_path=path):
            np.testing.assert_allclose(result["losses"], expected, rtol=0, atol=TOLERANCE)


def test_resume_inside_an_epoch_with_another_cut(tmp_path: Path) -> None:
    path = str(tmp_path / "inside.ckpt")
    run(2, steps=2, save_to=path)  # an epoch has 3 steps
    result = run(3, ckpt_path=path)[0]
    assert len(result["losses"]) == BRIEF["steps"] - 2
    np.testing.assert_allclose(result["losses"], reference("plain")["losses"][2:], rtol=0, atol=TOLERANCE)


def test_the_same_ranks_twice_are_bit_equal() -> None:
    first, second = (run(2, strategy={"replicas": 2}) for _ in range(2))
    assert first[0]["losses"] == second[0]["losses"]
    for name, values in first[0]["state"].items():
        np.testing.assert_array_equal(values, second[0]["state"][name])
