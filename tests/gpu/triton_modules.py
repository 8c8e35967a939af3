"""Modules with Triton kernels; Triton must be installed."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from moe_lightning.kernels import triton


def launching_modules() -> list[ModuleType]:
    """Return the modules of `kernels.triton` that launch kernels."""
    names = [found.name for found in pkgutil.iter_modules(triton.__path__) if found.name != "launch"]
    found = [importlib.import_module(f"{triton.__name__}.{name}") for name in names]
    assert all(hasattr(module, "launch") for module in found)
    return found
