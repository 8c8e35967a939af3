"""Deletion of what interrupted saves left behind: only files that a save writes, and never through a link."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from moe_lightning.checkpoint.manifest import MANIFEST, METADATA

_DATA = r"[\w.-]+\.rank\d+\.step\d+\.distcp"
_PART = r"part-\d+\.json"
_WHOLE = f"{_DATA}|{_PART}|{re.escape(MANIFEST)}|{re.escape(METADATA)}"
_WRITTEN_HERE = re.compile(rf"{_WHOLE}|\.({_WHOLE})\.[0-9a-f]+\.new")


def is_written_by_saves(name: str) -> bool:
    """Whether a save gives files such names."""
    return _WRITTEN_HERE.fullmatch(name) is not None


def delete_staging(path: Path) -> None:
    """Delete a staging directory; it stays where something lies in it that no save writes, or where it is a link.

    Somebody may still be writing there: who finds a file or the directory gone is told by the error.
    """
    if path.is_symlink():
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            if is_written_by_saves(entry.name) and entry.is_file(follow_symlinks=False):
                (path / entry.name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()
