"""The strategy's step, snapshots and a restart from them on a fake device, with the losses of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.fake_training import CHECKED, STEPS
from tests.gpu.interpreted import run_interpreted
from tests.gpu.test_budgets import pytestmark  # noqa: F401
from tests.parameters import slow


def train(ranks: int, plan: str, folder: Path) -> list[dict[str, Any]]:
    """Of each rank, from `fake_training`."""
    return run_interpreted(ranks, "tests.gpu.fake_training", plan, str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["host", slow("device")])
@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_a_training_its_snapshots_and_a_restart_are_those_of_the_cpu(ranks: int, plan: str, tmp_path: Path) -> None:
    for found in train(ranks, plan, tmp_path):
        assert found["expected"] == pytest.approx(found["losses"], rel=0, abs=1e-5)
        assert found["restarted"] == pytest.approx(found["losses"], rel=0, abs=1e-5)
        assert len(found["losses"]) == len(found["steps"]) == STEPS
        assert found["downloaded"] >= found["state_bytes"], "snapshots did not come by copies that nobody waits for"
        for number, step in enumerate(found["steps"][1:], start=1):  # the first agrees on sizes
            # A check of the state tells every rank what all have found, before the step and before its update.
            is_checked = ranks > 1 and number == CHECKED
            assert len(step["waits"]) == (plan == "host") + 2 * is_checked, step["waits"]
            assert is_checked or not step["uploads"]
