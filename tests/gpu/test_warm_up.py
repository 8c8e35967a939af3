"""A rank that will join a world has every kernel of its first step before others know of it."""

from __future__ import annotations

import pytest

from tests.gpu.interpreted import run_interpreted
from tests.gpu.test_budgets import pytestmark  # noqa: F401
from tests.parameters import slow


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "ranks"), [("bfloat16", 1), slow("bfloat16", 2), slow("float32", 2)])
def test_the_first_step_compiles_nothing(dtype: str, ranks: int) -> None:
    assert run_interpreted(ranks, "tests.gpu.fake_warm_up", dtype) == [[]] * ranks
