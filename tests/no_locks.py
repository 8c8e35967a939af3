"""File systems without locks."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest


def refuse_locks(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int) -> None:
    """Let flock fail for files in a folder."""
    flock = fcntl.flock

    def refuse(file: Any, kind: int) -> None:
        fd = file if isinstance(file, int) else file.fileno()
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(folder):
            raise OSError(number, os.strerror(number))
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", refuse)
