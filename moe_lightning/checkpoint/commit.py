"""Commit of a checkpoint without collectives: whoever finds every rank's part in the staging directory gives it a
name; and pruning.

Two agents may try at the same time: both happen under a lock that dies with its holder, and every step can be repeated
after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import xxhash

from moe_lightning.checkpoint.dcp_format import dump_metadata
from moe_lightning.checkpoint.durable import sync_directory, write_durably
from moe_lightning.checkpoint.fence import (
    SWEPT,
    check_world,
    give_name,
    held_open,
    parse_staging,
    staging_path,
    world_lock,
)
from moe_lightning.checkpoint.lease import unread
from moe_lightning.checkpoint.manifest import MANIFEST, METADATA, FileRecord, Manifest, Part, check_coverage
from moe_lightning.checkpoint.store import Heading, headings, part_path, previous_of
from moe_lightning.checkpoint.sweeping import delete_staging
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import Piece, is_partial

PRUNED = "PRUNED.json"
"""What becomes of the manifest of a checkpoint that is being deleted."""

_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EACCES, errno.ENOSYS)


def try_commit(root: Path, session: str, step: int, world_size: int, *, world: int = 0) -> Path | None:
    """Commit a step if every rank's part is there.

    Returns:
        The checkpoint (also where another process has just committed it), or None while parts are missing.

    Raises:
        CheckpointError: the parts do not make a whole checkpoint.
        Superseded: a newer world saves or has resumed there.
        OSError: the storage failed.
    """
    staging = staging_path(root, session, step, world)
    if not root.is_dir() or (
        staging.is_dir() and not (staging / MANIFEST).exists() and missing_ranks(staging, world_size)
    ):
        return None
    with world_lock(root, world):
        done = next((p for p, h in headings(root) if (h.session, h.step) == (session, step)), None)
        if done is not None:
            return done
        if not staging.is_dir():
            check_world(root, world)
            return None
        with held_open(staging) as opened:
            if not (opened / MANIFEST).exists():
                parts = [Part.parse(path.read_bytes(), str(staging)) for path in sorted(opened.glob("part-*.json"))]
                if len(parts) < world_size:
                    return None
                _assemble(root, opened, parts)
            return _give_name(root, staging, opened, step, world)


def withdraw_part(root: Path, session: str, step: int, rank: int, *, world: int = 0) -> None:
    """Take back a rank's part that did not lead to a commit, so that it is written anew."""
    if root.is_dir():
        with world_lock(root, world):
            part_path(staging_path(root, session, step, world), rank).unlink(missing_ok=True)


def missing_ranks(staging: Path, world_size: int) -> list[int]:
    """Ranks whose part is not in a staging directory."""
    return [rank for rank in range(world_size) if not part_path(staging, rank).exists()]


def _assemble(root: Path, staging: Path, parts: list[Part]) -> None:
    """Write .metadata and, last, MANIFEST.json."""
    first = parts[0]
    for part in parts:
        whose = part.run, part.session, part.step, part.world, part.world_size
        if whose != (first.run, first.session, first.step, first.world, len(parts)):
            raise CheckpointError(
                f"the parts of step {first.step} in {root} are of different runs, sessions, steps or worlds: delete "
                "its .staging directories"
            )
    stored = _freshest(parts)
    files = {name: record for part in parts for name, record in part.files.items()}
    fresh_keys = {piece.key for piece in stored}
    previous = previous_of(root, first.session, first.step)
    required: set[str] = set()
    if previous is not None:
        path, manifest = previous
        required = {piece.key for piece in manifest.stored}
        carried = [p for p in manifest.stored if is_partial(p.key) and p.key not in fresh_keys]
        for name in {piece.at.file for piece in carried}:
            files[name] = _carry_over(path, manifest.files[name], staging / name)
        stored += carried
    extra = next((part.extra for part in parts if part.rank == 0), {})
    check_coverage(stored, required=required, extra=extra)
    files = {name: record for name, record in files.items() if any(piece.at.file == name for piece in stored)}
    metadata = dump_metadata(stored, {name: record.path for name, record in files.items()})
    write_durably(staging / METADATA, metadata)
    files[METADATA] = FileRecord(path=METADATA, nbytes=len(metadata), xxh3=xxhash.xxh3_64_hexdigest(metadata))
    manifest = Manifest(
        run=first.run,
        session=first.session,
        sequence=1 + max((heading.sequence for _, heading in headings(root)), default=0),
        step=first.step,
        world=first.world,
        world_size=first.world_size,
        created_s=time.time(),
        previous=previous[0].name if previous else None,
        files=files,
        stored=tuple(stored),
        extra=extra,
    )
    write_durably(staging / MANIFEST, manifest.dump())


def _freshest(parts: list[Part]) -> list[Piece]:
    """Where several ranks wrote the same piece, the newest version, ties by rank."""
    best: dict[tuple[str, tuple[int, ...]], Piece] = {}
    for part in sorted(parts, key=lambda p: p.rank):
        for piece in part.stored:
            known = best.get((piece.key, piece.block.offsets))
            if known is None or piece.version > known.version:
                best[piece.key, piece.block.offsets] = piece
    return list(best.values())


def _carry_over(directory: Path, record: FileRecord, target: Path) -> FileRecord:
    """Hard-link a file of an older checkpoint, or refer to it where the file system has no links."""
    source = directory / record.path
    try:
        os.link(source, target)
    except FileExistsError:  # from a commit that was interrupted
        return replace(record, path=target.name)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source} has vanished, and experts of this checkpoint are only there") from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        owner = Path(record.path).parent.name or directory.name
        return replace(record, path=f"../{owner}/{target.name}")
    return replace(record, path=target.name)


def _give_name(root: Path, staging: Path, opened: Path, step: int, world: int) -> Path:
    manifest = Manifest.parse((opened / MANIFEST).read_bytes(), str(staging / MANIFEST))
    for path in opened.iterdir():  # parts, and what interrupted attempts left
        if path.name != MANIFEST and path.name not in manifest.files:
            path.unlink()
    sync_directory(opened)
    names = [f"step-{step:08d}", *(f"step-{step:08d}-{i}" for i in range(2, 1000))]
    target = next(root / name for name in names if not (root / name).exists())
    give_name(root, staging, opened, target, world)
    sync_directory(root)
    return target


def prune(root: Path, keep_last: int, *, world: int | None = None, with_reserve: bool = False) -> list[str]:
    """Delete all but the newest whole checkpoints, and what interrupted saves left behind.

    A manifest becomes a mark of what is to be deleted before anything is, so that no half-deleted directory looks like
    a checkpoint; files that kept manifests refer to stay. Nothing is deleted that neither such a mark nor the name of
    a file of a save vouches for, and links are not followed. What somebody reads stays for now (`lease.py`). One
    directory that cannot be deleted keeps no other from being.

    Args:
        world: that prunes; it deletes nothing once a newer one has begun. None: whoever asks may.
        with_reserve: keep the newest checkpoint that shares no file with the newest of all, too.

    Returns:
        The names of the deleted checkpoints.

    Raises:
        Superseded: a newer world saves or has resumed there.
        OSError: something could not be deleted; all else was.
    """
    removed: list[str] = []
    failures: list[OSError] = []
    with world_lock(root, world):
        if world is not None:
            check_world(root, world)
        named = headings(root)
        own = [(path, heading) for path, heading in named if not path.is_symlink()]
        if not own:
            return []
        kept, dropped = own[: max(1, keep_last)], own[max(1, keep_last) :]
        reserve = _reserve(own) if with_reserve else None
        for path, _ in reversed([pair for pair in dropped if pair[0] != reserve]):
            with _noting(failures), unread(path) as free:
                if free:
                    os.rename(path / MANIFEST, path / PRUNED)
                    sync_directory(path)
                    removed.append(path.name)
        staying = [(path, heading) for path, heading in named if path.name not in removed]
        needed = {(path / reference).resolve() for path, heading in staying for reference in heading.references}
        newest = kept[0][1]
        for path in root.glob("step-*"):
            with _noting(failures):
                if not path.is_symlink() and not (path / MANIFEST).exists():
                    _delete_unneeded(path, newest.run, needed)
        for path in root.glob(".staging-*"):
            owner = parse_staging(path)
            if owner is not None and owner[1:] < (newest.session, newest.step):
                with _noting(failures):
                    delete_staging(path)
        for path in root.glob(SWEPT):
            with _noting(failures):
                delete_staging(path)
    if failures:
        raise failures[0]
    return removed


def _reserve(own: list[tuple[Path, Heading]]) -> Path | None:
    """The newest checkpoint all of whose files are other ones than those of the newest of all; None without one."""
    newest = own[0][1].names
    return next((path for path, heading in own if heading.names.isdisjoint(newest)), None)


@contextlib.contextmanager
def _noting(failures: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not isinstance(error, FileNotFoundError):  # deleted by somebody else
            failures.append(error)


def _delete_unneeded(path: Path, run: str, needed: set[Path]) -> None:
    """Delete the files of a pruned checkpoint that no other one needs; the mark goes with the last of them."""
    mark = path / PRUNED
    try:
        manifest = Manifest.parse(mark.read_bytes(), str(mark))
    except (OSError, CheckpointError):
        return  # somebody else's, or damaged: nothing vouches for its files
    if manifest.run != run:
        return
    own = [path / record.path for record in manifest.files.values() if "/" not in record.path]
    for file in own:
        if file.resolve() not in needed:
            file.unlink(missing_ok=True)
    if not any(file.exists() for file in own):
        mark.unlink()
        with contextlib.suppress(OSError):  # somebody else's files lie there too
            path.rmdir()
