"""Sharded parameters, sequences, layers in parts and stages on the fake device, with the losses of the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.gpu.fake_meshes import STEPS, run
from tests.parameters import slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        slow({"mesh": {"tp": 2}}),
        slow({"mesh": {"cp": 2}}),
        slow({"dense": "zero1"}),
        {"dense": "fsdp"},
        slow({"dense": "hsdp"}),
        slow({"mesh": {"pp": 2}}),
    ],
    ids=str,
)
def test_losses_are_those_of_the_cpu(strategy: dict[str, Any]) -> None:
    for found in run_ranks(2, run, strategy):
        assert found["losses"] == pytest.approx(found["expected"], rel=0, abs=1e-6)
        assert len(found["losses"]) == STEPS
