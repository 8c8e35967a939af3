"""Where arenas live, and whether they fit there."""

from __future__ import annotations

import os
from pathlib import Path

from moe_lightning.errors import ConfigurationError

ARENAS = "rank*.arena"

NAMED = "moe-lightning-"
"""What the names of arenas' directories begin with."""

MEMORY = Path("/dev/shm")


def arena_path(directory: Path, rank: int) -> Path:
    """The arena file of a rank."""
    return directory / f"rank{rank:05d}.arena"


def rank_of(path: Path) -> int:
    """The rank of an arena file."""
    return int(path.stem.removeprefix("rank"))


def existing_arenas(name: str, fallback: Path) -> Path | None:
    """The directory that `arena_directory` made for this name; None where there is none of this user's."""
    for room in (MEMORY, fallback):
        path = room / f"{NAMED}{name}"
        if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
            return path
    return None


def arena_directory(name: str, *, needed_bytes: int, fallback: Path, memory: Path = MEMORY) -> Path:
    """A private directory for arenas: in shared memory, or under `fallback` where that is missing or too small.

    Raises:
        ConfigurationError: neither has room.
    """
    rooms = [room for room in (memory, fallback) if room.is_dir()]
    for room in rooms:
        existing = room / f"{NAMED}{name}"
        held = sum(f.stat().st_size for f in existing.glob(ARENAS)) if existing.is_dir() else 0
        if _free_bytes(room) + held >= needed_bytes:
            existing.mkdir(mode=0o700, exist_ok=True)
            if existing.stat().st_uid != os.getuid() or existing.is_symlink():
                raise ConfigurationError(f"{existing} belongs to somebody else: choose another run name")
            existing.chmod(0o700)
            return existing
    free = ", ".join(f"{room} has {_free_bytes(room) / 2**30:.2f} GiB" for room in rooms) or "no such directory exists"
    raise ConfigurationError(
        f"snapshots of this node need {needed_bytes / 2**30:.2f} GiB of memory ({free}): free memory, "
        "spread the state over more ranks, or name a larger fallback directory"
    )


def reserve(fd: int, size: int, room: Path) -> None:
    """Reserve every byte of a file now: a page that cannot be had later would kill the process that touches it.

    Raises:
        ConfigurationError: the file system has no room.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        free = _free_bytes(room) / 2**30
        raise ConfigurationError(
            f"the arena needs {size / 2**30:.2f} GiB in {room}, where {free:.2f} GiB are free ({error.strerror}): "
            "free memory or use another directory"
        ) from error


def _free_bytes(room: Path) -> int:
    stats = os.statvfs(room)
    return stats.f_bavail * stats.f_frsize
