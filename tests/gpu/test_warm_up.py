"""A rank that will join a world has every kernel of its first step before others know of it."""

from __future__ import annotations

import pytest

from tests.gpu.test_budgets import on_the_fake_device, pytestmark  # noqa: F401
from tests.parameters import slow


@pytest.mark.parametrize(("dtype", "ranks"), [("bfloat16", 1), slow("bfloat16", 2), slow("float32", 2)])
def test_the_first_step_compiles_nothing(dtype: str, ranks: int) -> None:
    assert on_the_fake_device("tests.gpu.fake_warm_up", str(ranks), dtype) == [[]] * ranks
