"""Recorded traces: third-party data outside the repository, in the folder that MOE_LIGHTNING_TRACES names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("MOE_LIGHTNING_TRACES", Path(__file__).parents[2] / "shared" / "data"))


def recorded(name: str = "routing_trace_gpt_32e.npz") -> Path:
    """The path of a trace; skips the test where it is not there."""
    if not (FOLDER / name).is_file():
        pytest.skip(f"no {name} in {FOLDER}: set MOE_LIGHTNING_TRACES to the folder that holds it")
    return FOLDER / name
