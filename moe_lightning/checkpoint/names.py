"""Names of checkpoints, also for commands that spare themselves the seconds of importing the rest."""

from __future__ import annotations

import os
import re
from pathlib import Path

MANIFEST = "MANIFEST.json"
"""File that makes a directory a whole checkpoint."""

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+)|-w(\d+)-[\w-]+)?")
_FILE = re.compile(r"step-(\d+)\.ckpt")
"""Names of the files of LatestCheckpoint."""


def order_of(name: str) -> tuple[int, int] | None:
    """Return the step of a checkpoint directory, and a number that is higher for a later one of the same step; None if
    no checkpoint has such a name. File systems add a number to names that are there already, object stores the world
    and the session.
    """
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or match[3] or 1))


def newest_first(folder: Path) -> list[tuple[int, Path]]:
    """Return the steps and paths of the checkpoints of a folder by name, files and directories, the highest step first;
    of equal steps the last one saved first.
    """
    paths = folder.glob("step-*") if folder.is_dir() else ()
    found = [(*order, path) for path in paths if (order := _order_in_folder(path)) is not None]
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def _order_in_folder(path: Path) -> tuple[int, int] | None:
    if path.is_file():
        match = _FILE.fullmatch(path.name)
        return None if match is None else (int(match[1]), 1)
    return order_of(path.name) if os.path.lexists(path / MANIFEST) else None
