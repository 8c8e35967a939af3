"""Axes of the mesh with each other and with shared dense parameters: losses, norms and checkpoints of one rank."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.same_training import CASES as KNOWN
from tests.distributed.same_training import assert_same_training
from tests.distributed.test_tensor_parallel import TIED
from tests.distributed.training import train

STEPS = 20
CPTP = {"cp": 2, "tp": 2}
NOISY = KNOWN["noisy"]["model"]
EIGHT_HEADS = TIED | {"num_heads": 8, "num_kv_heads": 4}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"model": {"num_heads": 4, "moe_every": 2}, "validate": True, "trainer": {"val_check_interval": 4}},
    "gpt2 uneven": {"model": NOISY, "batch_size": 13},
    "llama noisy": {"model": EIGHT_HEADS | NOISY, "batch_size": 7, "validate": True},
    "llama accumulated": {"model": TIED, "batch_size": 7, "trainer": {"accumulate_grad_batches": 3}},
}


def run(world_size: int, **options: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_ranks(world_size, partial(train, **{"steps": STEPS} | options))
    return results


@cache
def reference(key: str) -> dict[str, Any]:
    return run(1, **CASES[key])[0]


@pytest.mark.parametrize(
    ("key", "ranks", "strategy"),
    [
        ("llama noisy", 4, {"mesh": CPTP}),
        pytest.param("gpt2", 4, {"mesh": CPTP, "copies": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2 uneven", 4, {"mesh": CPTP}, marks=pytest.mark.slow),
        pytest.param("llama accumulated", 4, {"mesh": CPTP}, marks=pytest.mark.slow),
        pytest.param("llama noisy", 8, {"mesh": CPTP, "copies": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_that_of_one_rank(key: str, ranks: int, strategy: dict[str, Any]) -> None:
    assert_same_training(reference(key), run(ranks, strategy=strategy, **CASES[key]))
