"""Which world may write: once a newer one has begun to save or to resume, an older one cannot commit any more.

Worlds are numbered; the directory of checkpoints remembers the newest by a mark, an empty file `.world-NUMBER`. There
is no compare-and-set on a file system, and a lock would be held by whoever was stopped in the middle of a commit. So
both sides use what is atomic (a rename of the staging directory, or a conditional put of its manifest), and of the two
calls on one directory one fails:

    a newer world:   1. write its mark durably      2. close the staging directories of older worlds
    an older world:  1. make a staging directory    2. look for newer marks    3. write    4. commit it

If the older world's second step saw no newer mark, its directory was there before the newer world's second step, which
closes it. When `enter_world` returns, whatever older worlds could commit is committed and nothing follows.
"""

from __future__ import annotations

import re
import time
from contextlib import AbstractContextManager

from moe_lightning.checkpoint.storage import Place, exists
from moe_lightning.checkpoint.storages import storage_of
from moe_lightning.errors import CheckpointError

_MARK = re.compile(r"\.world-(\d+)")
_LOCK = re.compile(r"\.lock(?:-(\d+))?")


class Superseded(CheckpointError):
    """A newer world saves here or has resumed from here."""


def newest_world(root: Place) -> int:
    """The number of the newest world that has left its mark; 0 where none has."""
    found = [match[1] for name in storage_of(root).names(root) if (match := _MARK.fullmatch(name))]
    return max(map(int, found), default=0)


def next_world(root: Place) -> int:
    """A number for a world that got none from elsewhere: milliseconds since 1970, above all marks."""
    return max(newest_world(root) + 1, time.time_ns() // 1_000_000)


def check_world(root: Place, world: int) -> None:
    """Refuse to go on for a world that is no longer the newest one.

    Raises:
        Superseded: a newer world has left its mark.
    """
    newest = newest_world(root)
    if newest > world:
        raise Superseded(
            f"world {world} may not write to {root} any more: world {newest} has begun to save there or has resumed "
            "from there; what this one had not committed is void"
        )


def enter_world(root: Place, world: int) -> None:
    """Leave the mark of a world that begins to save or to resume; after that no older world commits anything.

    Raises:
        Superseded: a newer world was here first.
        OSError: the storage failed.
    """
    check_world(root, world)
    storage = storage_of(root)
    mark = root / f".world-{world}"
    if not exists(storage, mark):
        storage.put(mark, b"")
    for name in storage.names(root):
        owner = storage.owner(root / name)
        if owner is not None and owner[0] < world:
            storage.close(root / name)
    storage.sweep(root)
    for name in storage.names(root):
        for pattern in (_MARK, _LOCK):
            match = pattern.fullmatch(name)
            if match and int(match[1] or 0) < world:
                storage.delete(root / name)


def make_staging(root: Place, session: str, step: int, world: int) -> Place:
    """Make the staging directory of a checkpoint, or find it made; only then look for newer marks.

    Raises:
        Superseded: a newer world has left its mark.
    """
    storage = storage_of(root)
    staging = storage.staging(root, session, step, world)
    storage.begin(staging)
    try:
        check_world(root, world)
    except Superseded:
        storage.close(staging)
        raise
    return staging


def world_lock(root: Place, world: int | None = None) -> AbstractContextManager[None]:
    """Hold the lock of a world (None: the newest): who is stopped while it holds its own does not hold up later ones.

    Raises:
        CheckpointError: another process of this world holds it for long.
    """
    number = newest_world(root) if world is None else world
    return storage_of(root).lock(root, f".lock-{number}" if number else ".lock")
