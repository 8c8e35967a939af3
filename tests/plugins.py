"""Packages with entry points, as an installer leaves them, without one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, entries: Mapping[str, Mapping[str, str]], **modules: str
) -> None:
    """Make a folder a place of installed packages, in this process and in those that it starts.

    Args:
        entries: kind -> name -> "module:attribute".
        modules: their sources.
    """
    info = folder / f"{folder.name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 1.0\n")
    lines = [
        line
        for kind, parts in entries.items()
        for line in (f"[moe_lightning.{kind}]", *(f"{name} = {value}" for name, value in parts.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    importlib.invalidate_caches()
