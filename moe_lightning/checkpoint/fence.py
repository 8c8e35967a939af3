"""Which world may write: once a newer one has begun to save or to resume, an older one cannot commit any more.

Worlds are numbered; the directory of checkpoints remembers the newest by a mark, an empty file `.world-NUMBER`. There
is no compare-and-set on a file system, and a lock would be held by whoever was stopped in the middle of a commit. So
both sides use what is atomic, a rename:

    a newer world:   1. write its mark durably      2. rename the staging directories of older worlds away
    an older world:  1. make a staging directory    2. look for newer marks    3. write    4. rename it: the commit

If the older world's second step saw no newer mark, its directory was there before the newer world's second step, which
renames it away; of the two renames of one directory one fails. When `enter_world` returns, whatever older worlds could
commit is committed and nothing follows.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from moe_lightning.checkpoint.durable import directory_lock, sync_directory, write_durably
from moe_lightning.checkpoint.sweeping import delete_staging
from moe_lightning.errors import CheckpointError

_MARK = re.compile(r"\.world-(\d+)")
_STAGING = re.compile(r"\.staging-(?:w(\d+)-)?(.+)-(\d{8,})")
_LOCK = re.compile(r"\.lock(?:-(\d+))?")
SWEPT = ".swept-*"


class Superseded(CheckpointError):
    """A newer world saves here or has resumed from here."""


def newest_world(root: Path) -> int:
    """The number of the newest world that has left its mark; 0 where none has."""
    found = [match[1] for name in _names(root) if (match := _MARK.fullmatch(name))]
    return max(map(int, found), default=0)


def next_world(root: Path) -> int:
    """A number for a world that got none from elsewhere: milliseconds since 1970, above all marks."""
    return max(newest_world(root) + 1, time.time_ns() // 1_000_000)


def check_world(root: Path, world: int) -> None:
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


def enter_world(root: Path, world: int) -> None:
    """Leave the mark of a world that begins to save or to resume; after that no older world commits anything.

    Raises:
        Superseded: a newer world was here first.
        OSError: the storage failed.
    """
    check_world(root, world)
    mark = root / f".world-{world}"
    if not mark.exists():
        write_durably(mark, b"")
    _sweep(root, world)
    for name in _names(root):
        for pattern in (_MARK, _LOCK):
            match = pattern.fullmatch(name)
            if match and int(match[1] or 0) < world:
                (root / name).unlink(missing_ok=True)


def staging_path(root: Path, session: str, step: int, world: int = 0) -> Path:
    """Where the parts of a checkpoint are written."""
    return root / f".staging-w{world}-{session}-{step:08d}"


def parse_staging(path: Path) -> tuple[int, str, int] | None:
    """(world, session, step) of a staging directory, None for any other."""
    match = _STAGING.fullmatch(path.name)
    return (int(match[1] or 0), match[2], int(match[3])) if match else None


def make_staging(root: Path, session: str, step: int, world: int) -> Path:
    """Make the staging directory of a checkpoint, or find it made; only then look for newer marks.

    Raises:
        Superseded: a newer world has left its mark.
    """
    staging = staging_path(root, session, step, world)
    staging.mkdir(exist_ok=True)
    try:
        check_world(root, world)
    except Superseded:
        _put_away(staging)
        raise
    return staging


@contextlib.contextmanager
def world_lock(root: Path, world: int | None = None) -> Iterator[None]:
    """Hold the lock of a world (None: the newest): who is stopped while it holds its own does not hold up later ones.

    Raises:
        CheckpointError: another process of this world holds it for long.
    """
    number = newest_world(root) if world is None else world
    with directory_lock(root, name=f".lock-{number}" if number else ".lock"):
        yield


@contextlib.contextmanager
def held_open(directory: Path) -> Iterator[Path]:
    """A path to this very directory, whatever happens to its name meanwhile (Linux).

    Raises:
        FileNotFoundError: it is gone.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def give_name(root: Path, staging: Path, opened: Path, target: Path, world: int) -> None:
    """Rename a staging directory: the commit.

    Args:
        opened: the directory that was filled, from `held_open`.

    Raises:
        Superseded: a newer world has renamed it away, or has left its mark.
    """
    check_world(root, world)
    try:
        os.rename(staging, target)
    except FileNotFoundError:
        check_world(root, world)
        raise
    if not os.path.samestat(target.stat(), opened.stat()):
        # Swept, and made anew by a process that has not looked for marks yet; it is empty, so it is no checkpoint.
        _put_away(target)
        check_world(root, world)
        raise CheckpointError(f"{staging} was replaced while it was written: the snapshot is written again")


def _sweep(root: Path, world: int) -> None:
    """Rename all staging directories of older worlds away, then delete them."""
    for name in _names(root):
        owner = parse_staging(root / name)
        if owner is not None and owner[0] < world and not (root / name).is_symlink():
            _put_away(root / name)
    sync_directory(root)
    for path in root.glob(SWEPT):
        delete_staging(path)


def _put_away(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # committed, or put away by somebody else
        os.rename(path, path.with_name(f".swept-{secrets.token_hex(8)}"))


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []
