"""The modules with kernels of Triton, which must be there to import them."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from moe_lightning import kernels


def rooms() -> list[ModuleType]:
    """All of them that launch kernels."""
    names = [found.name for found in pkgutil.iter_modules(kernels.__path__) if found.name.startswith("triton_")]
    found = [importlib.import_module(f"{kernels.__name__}.{name}") for name in names if name != "triton_launch"]
    assert all(hasattr(room, "launch") for room in found)
    return found
