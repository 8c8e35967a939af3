"""Checkpoint directories: ranks write their parts side by side, whoever completes the set commits, and old ones are
pruned.

    ROOT/run.json                       the run that the directory belongs to
    ROOT/.staging-wWORLD-SESSION-STEP/  parts being written: data files and part-RANK.json
    ROOT/step-00000120/                 a checkpoint: data files, .metadata (for stock dcp.load), MANIFEST.json

A directory gets its name by a rename after everything in it, MANIFEST.json last, has been forced to disk, so a
checkpoint that has a name is whole. Data files are immutable. Experts that were not saved this time are hard links to
the files of the checkpoint before; where links cannot be made, the manifest refers to `../step-.../file`, and pruning
counts such references. Two agents may try to commit or prune at the same time: both happen under a lock that the
kernel releases when its holder dies. Agents of an older world cannot commit (`fence.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xxhash

from moe_lightning.checkpoint.durable import write_durably
from moe_lightning.checkpoint.fence import make_staging, staging_path
from moe_lightning.checkpoint.frames import StoredPiece, frame_of
from moe_lightning.checkpoint.manifest import MANIFEST, FileRecord, Manifest, Part
from moe_lightning.checkpoint.records import is_partial
from moe_lightning.checkpoint.table import Placed, Table, digest_of
from moe_lightning.errors import CheckpointError

_NAMED = re.compile(r"step-(\d{8,})(-\d+)?")


def part_path(staging: Path, rank: int) -> Path:
    return staging / f"part-{rank:05d}.json"


def checkpoints(root: Path) -> list[tuple[Path, Manifest]]:
    """Named checkpoints whose manifest is undamaged, newest first; the data behind it are not looked at."""
    found = []
    for path in root.glob("step-*"):
        if _NAMED.fullmatch(path.name):
            with contextlib.suppress(CheckpointError, FileNotFoundError, NotADirectoryError):
                about = (path / MANIFEST).stat()
                found.append((path, _read_once(path, about.st_ino, about.st_mtime_ns, about.st_size)))
    return sorted(found, key=lambda pair: -pair[1].sequence)


@lru_cache(maxsize=64)
def _read_once(path: Path, inode: int, changed_ns: int, size: int) -> Manifest:
    """A manifest, not read again while its file is the same: an agent asks for them several times per checkpoint."""
    return read_manifest(path)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
        CheckpointError: it is damaged or belongs to another directory or run.
        FileNotFoundError: there is none: the directory is no checkpoint.
    """
    try:
        data = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read ({error.strerror})") from error
    manifest = Manifest.parse(data, str(path / MANIFEST))
    match = _NAMED.fullmatch(path.name)
    if match and int(match[1]) != manifest.step:
        raise CheckpointError(f"{path / MANIFEST} belongs to step {manifest.step}, not to {path.name}")
    owner = run_of(path.parent)
    if match and owner is not None and owner != manifest.run:
        raise CheckpointError(f"{path / MANIFEST} belongs to run {manifest.run}, but {path.parent} holds run {owner}")
    return manifest


def run_of(root: Path) -> str | None:
    """The run that a directory of checkpoints belongs to; None where that is not recorded."""
    try:
        run = json.loads((root / "run.json").read_bytes())["run"]
        if not isinstance(run, str):
            raise TypeError(f"its run is a {type(run).__name__}")
        return run
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{root / 'run.json'} is damaged ({error}): restore or delete it") from error


def claim(root: Path, run: str) -> None:
    """Make the directory and record that it belongs to a run.

    Raises:
        CheckpointError: it belongs to another run.
    """
    root.mkdir(parents=True, exist_ok=True)
    owner = run_of(root)
    if owner is None:
        write_durably(root / "run.json", json.dumps({"run": run}).encode())
    elif owner != run:
        raise CheckpointError(f"{root} holds the checkpoints of run {owner}, not of {run}: choose another directory")


def previous_of(root: Path, session: str, step: int) -> tuple[Path, Manifest] | None:
    """The newest checkpoint of the same session before a step: the one that experts are carried over from."""
    return next(((p, m) for p, m in checkpoints(root) if m.session == session and m.step < step), None)


def write_part(root: Path, table: Table, payload: Callable[[Placed], torch.Tensor]) -> Part:
    """Write one rank's share of a checkpoint into the staging directory, and its part-manifest when the data are on
    disk.

    Written is what was due after the previous checkpoint of the session, in the newest copy that the snapshot has, and
    whatever that checkpoint does not hold.

    Args:
        table: the snapshot.
        payload: the bytes of a piece, uint8 [nbytes].

    Raises:
        CheckpointError: the snapshot is damaged, or the directory belongs to another run.
        Superseded: a newer world saves or has resumed there.
        OSError: the storage failed; what was written is removed.
    """
    claim(root, table.run)
    staging = staging_path(root, table.session, table.step, table.world)
    done = part_path(staging, table.rank)
    if done.exists():  # by an agent that died since: another node may be committing it, so the files must not change
        return Part.parse(done.read_bytes(), str(done))
    previous = previous_of(root, table.session, table.step)
    held = {item.piece.key for item in previous[1].stored} if previous else set()
    written_until = previous[1].step if previous else -1
    groups: dict[str, list[Placed]] = {}
    for placed in table.placed:
        if placed.due > written_until or not is_partial(placed.piece.key) or placed.piece.key not in held:
            groups.setdefault(placed.piece.group, []).append(placed)
    make_staging(root, table.session, table.step, table.world)
    files: dict[str, FileRecord] = {}
    stored: list[StoredPiece] = []
    try:
        for group, members in groups.items():
            name = f"{group}.rank{table.rank:05d}.step{table.step:08d}.distcp"
            files[name] = _write_data(staging / name, members, payload, stored)
        part = Part(
            run=table.run,
            session=table.session,
            step=table.step,
            rank=table.rank,
            world=table.world,
            world_size=table.world_size,
            files=files,
            stored=tuple(stored),
            extra=table.extra if table.rank == 0 else {},
        )
        write_durably(done, part.dump())
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to report
            for path in staging.glob(f"*.rank{table.rank:05d}.*"):
                path.unlink()
        raise
    return part


def _write_data(
    path: Path, members: Sequence[Placed], payload: Callable[[Placed], torch.Tensor], stored: list[StoredPiece]
) -> FileRecord:
    path.unlink(missing_ok=True)  # left by an agent that died; never truncate, the inode could be linked elsewhere
    digest = xxhash.xxh3_64()
    offset = 0
    with open(path, "xb", buffering=128 << 10) as file:
        for placed in members:
            piece, data = placed.piece, payload(placed)
            if digest_of(data) != piece.xxh3:
                raise CheckpointError(f"the snapshot of {piece.key} at version {piece.version} is damaged in memory")
            frame = frame_of(piece.dtype, piece.shape)
            raw: Any = data.numpy()
            for chunk in (frame.prefix, raw, frame.suffix):
                file.write(chunk)
                digest.update(chunk)
            length = len(frame.prefix) + piece.nbytes + len(frame.suffix)
            data_offset = offset + len(frame.prefix)
            stored.append(
                StoredPiece(piece=piece, file=path.name, offset=offset, length=length, data_offset=data_offset)
            )
            offset += length
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path=path.name, nbytes=offset, xxh3=digest.hexdigest())
