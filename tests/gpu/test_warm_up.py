"""A rank that will join a world has every kernel of its first step before others know of it."""

from __future__ import annotations

from tests.gpu.test_budgets import on_the_fake_device, pytestmark  # noqa: F401


def test_the_first_step_compiles_nothing() -> None:
    assert on_the_fake_device("tests.gpu.fake_warm_up") == [[], []]
