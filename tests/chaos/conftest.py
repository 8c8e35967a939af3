"""Tests of this folder kill or stop ranks amid gloo's collectives, and play the launcher without its restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.races import LOST_WAKE_UP

_FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder: a rank that gloo does not wake ends itself, and a launcher would start another."""
    for item in items:
        if item.path.is_relative_to(_FOLDER):
            item.add_marker(pytest.mark.known_race(LOST_WAKE_UP, sign=r"ended with 75\b"))
