"""Optimizer states of dense parameters on the host, while parameters lie on a fake device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.fake_offload import STEPS
from tests.gpu.interpreted import run_interpreted
from tests.gpu.test_budgets import pytestmark  # noqa: F401
from tests.parameters import slow


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "dense"), [(1, "ddp"), *(slow(2, dense) for dense in ("ddp", "zero1"))])
def test_states_stay_on_the_host_and_losses_are_the_same_bits(ranks: int, dense: str, tmp_path: Path) -> None:
    for found in run_interpreted(ranks, "tests.gpu.fake_offload", dense, str(tmp_path)):
        assert found["losses"] == found["expected"] == found["to host"] == found["from host"]
        assert found["here"] == [{"cpu": states["fake"], "fake": 0} for states in found["there"]]
        parameters = found["there"][-1]["fake"] // 2
        assert found["locked"] == 2 * parameters, "weights and gradients"
        assert found["uploaded"] == STEPS * parameters, "new weights, and nothing else"
        sums = 3 if ranks > 1 else 0  # of all state, around and in the step that ranks check it in
        assert found["blocked"] == sums, "an upload for the states of all parameters in each sum, and no other"
