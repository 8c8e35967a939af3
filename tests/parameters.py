"""Parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """A set of parameters that the default run leaves out: another row of a matrix, not another law."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def soak(*values: Any, **options: Any) -> Any:
    """A set of parameters that the slow matrix leaves out too: another seed of a random test that has some there."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.soak], **options)
