"""Mixture-of-Experts training for PyTorch Lightning: expert parallelism with replicated experts.

The names in `__init__.pyi` load on first use, so that small tools start without importing Lightning. The strategy
registers itself as "expert_parallel" when Lightning is already imported, as in `import lightning; import
moe_lightning`, and else when it is first used.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(statement, ast.ImportFrom) and statement.module is not None
    for alias in statement.names
}
"""Module by public name, as the stub lists them."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


if "lightning.pytorch" in sys.modules:
    importlib.import_module(f"{__name__}.strategies.expert_parallel")
