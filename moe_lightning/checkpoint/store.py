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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xxhash

from moe_lightning.checkpoint.dcp_format import frame_of
from moe_lightning.checkpoint.durable import write_durably
from moe_lightning.checkpoint.fence import make_staging, staging_path
from moe_lightning.checkpoint.manifest import MANIFEST, METADATA, FileRecord, Manifest, Part
from moe_lightning.checkpoint.snapshot_index import SnapshotIndex, digest_of
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import Location, Piece, is_partial

RECORD = "run.json"
_NAMED = re.compile(r"step-(\d{8,})(-\d+)?")


def part_path(staging: Path, rank: int) -> Path:
    return staging / f"part-{rank:05d}.json"


@dataclass(frozen=True, kw_only=True)
class Heading:
    """What is remembered of a manifest, whose pieces take many times as much.

    Attributes:
        names: of its data files; one name is one content, in whichever checkpoint.
        references: paths of files that lie in other checkpoints, relative to its directory.
    """

    run: str
    session: str
    sequence: int
    step: int
    created_s: float
    names: frozenset[str]
    references: tuple[str, ...]


def checkpoints(root: Path) -> list[tuple[Path, Manifest]]:
    """Named checkpoints whose manifest is undamaged, newest first; the data behind it are not looked at."""
    found = []
    for path, _ in headings(root):
        with contextlib.suppress(CheckpointError, OSError):
            found.append((path, _read_once(path, *_version_of(path))))
    return found


def headings(root: Path) -> list[tuple[Path, Heading]]:
    """The same, but only what is remembered of each; one that cannot be read is passed over."""
    found, known = [], _headings.get(root, {})
    remembered: dict[Path, tuple[_Version, Heading | None]] = {}
    for path in root.glob("step-*"):
        if _NAMED.fullmatch(path.name):
            with contextlib.suppress(OSError):
                version = _version_of(path)
                entry = known.get(path)
                if entry is None or entry[0] != version:
                    entry = version, _heading_of(path, version)
                remembered[path] = entry
                if entry[1] is not None:
                    found.append((path, entry[1]))
    _headings[root] = remembered
    return sorted(found, key=lambda pair: (-pair[1].sequence, -pair[1].created_s))


_Version = tuple[int, int, int]
_headings: dict[Path, dict[Path, tuple[_Version, Heading | None]]] = {}
"""By root and checkpoint, of those that were there last."""


def _version_of(path: Path) -> _Version:
    """Inode, time and size of a manifest: it is not read again while they are the same, as agents ask for all of them
    several times a checkpoint."""
    about = (path / MANIFEST).stat()
    return about.st_ino, about.st_mtime_ns, about.st_size


@lru_cache(maxsize=8)
def _read_once(path: Path, inode: int, changed_ns: int, size: int) -> Manifest:
    return read_manifest(path)


def _heading_of(path: Path, version: _Version) -> Heading | None:
    """None where the manifest is damaged."""
    try:
        manifest = _read_once(path, *version)
    except CheckpointError:
        return None
    return Heading(
        run=manifest.run,
        session=manifest.session,
        sequence=manifest.sequence,
        step=manifest.step,
        created_s=manifest.created_s,
        names=frozenset(manifest.files) - {METADATA},
        references=tuple(record.path for record in manifest.files.values() if "/" in record.path),
    )


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
    """The run that a directory of checkpoints belongs to; None where that is not recorded. Where the record is
    damaged, the checkpoints tell.

    Raises:
        CheckpointError: the record is damaged, and there are no checkpoints, or of several runs.
    """
    run, problem = _recorded_run(root)
    if problem is None:
        return run
    runs = {manifest.run for manifest in _manifests_alone(root)}
    if len(runs) != 1:
        why = "its checkpoints are of several runs" if runs else "no checkpoint tells its run"
        raise CheckpointError(f"{problem}, and {why}: restore or delete it")
    return runs.pop()


def run_record_problem(root: Path) -> str | None:
    """What is wrong with the record of a directory's run; None where nothing is, or there is none."""
    return _recorded_run(root)[1]


def _recorded_run(root: Path) -> tuple[str | None, str | None]:
    """(the run, what is wrong with its record)."""
    path = root / RECORD
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{path} cannot be read ({error.strerror})"
    try:
        run = json.loads(data)["run"]
    except (ValueError, KeyError, TypeError, RecursionError):
        run = None
    if not isinstance(run, str) or data != _run_record(run):
        return None, f"{path} is damaged (it does not match its checksum)"
    return run, None


def _run_record(run: str) -> bytes:
    digest = xxhash.xxh3_64_hexdigest(run.encode(errors="surrogatepass"))
    return json.dumps({"run": run, "xxh3": digest}).encode()


def _manifests_alone(root: Path) -> Iterator[Manifest]:
    """Undamaged manifests, whatever run the directory is recorded to belong to."""
    for path in root.glob("step-*"):
        if _NAMED.fullmatch(path.name):
            with contextlib.suppress(CheckpointError, OSError):
                yield Manifest.parse((path / MANIFEST).read_bytes(), str(path / MANIFEST))


def claim(root: Path, run: str) -> None:
    """Make the directory and record that it belongs to a run; a damaged record is written anew.

    Raises:
        CheckpointError: it belongs to another run.
    """
    root.mkdir(parents=True, exist_ok=True)
    owner = run_of(root)
    if owner is not None and owner != run:
        raise CheckpointError(f"{root} holds the checkpoints of run {owner}, not of {run}: choose another directory")
    if owner is None or run_record_problem(root) is not None:
        write_durably(root / RECORD, _run_record(run))


def previous_of(root: Path, session: str, step: int) -> tuple[Path, Manifest] | None:
    """The newest checkpoint of the same session before a step: the one that experts are carried over from."""
    for path, heading in headings(root):
        if heading.session == session and heading.step < step:
            with contextlib.suppress(CheckpointError, OSError):
                return path, _read_once(path, *_version_of(path))
    return None


def carried_keys(path: Path, manifest: Manifest, damaged: Collection[str] = ()) -> set[str]:
    """The keys that a next checkpoint can carry over: all but those in files that are damaged, gone or of another
    size.

    Args:
        path: the checkpoint's directory.
        damaged: names of files that are known to be damaged.
    """
    lost = {name for name, r in manifest.files.items() if name in damaged or not _is_there(path / r.path, r.nbytes)}
    return {p.key for p in manifest.stored} - {p.key for p in manifest.stored if p.at.file in lost}


def _is_there(path: Path, nbytes: int) -> bool:
    try:
        return path.stat().st_size == nbytes
    except OSError:
        return False


def write_part(
    root: Path,
    table: SnapshotIndex,
    payload: Callable[[Piece], torch.Tensor],
    *,
    damaged: Collection[str] = (),
    copy_every: int | None = None,
) -> Part:
    """Write one rank's share of a checkpoint into the staging directory, and its part-manifest when the data are on
    disk.

    Written is what was due after the previous checkpoint of the session, in the newest copy that the snapshot has, and
    whatever that checkpoint does not hold, or not undamaged.

    Args:
        table: the snapshot.
        payload: the bytes of a piece, uint8 [nbytes].
        damaged: names of files whose experts are written anew.
        copy_every: every so many commits everything is written, so that it lies in files of its own; None: never.

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
    held = carried_keys(*previous, damaged) if previous else set()
    if previous is not None and copy_every is not None and (previous[1].sequence + 1) % copy_every == 0:
        held = set()
    written_until = previous[1].step if previous else -1
    groups: dict[str, list[Piece]] = {}
    for piece in table.placed:
        if piece.due > written_until or not is_partial(piece.key) or piece.key not in held:
            groups.setdefault(piece.group, []).append(piece)
    make_staging(root, table.session, table.step, table.world)
    files: dict[str, FileRecord] = {}
    stored: list[Piece] = []
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
    path: Path, members: Sequence[Piece], payload: Callable[[Piece], torch.Tensor], stored: list[Piece]
) -> FileRecord:
    path.unlink(missing_ok=True)  # left by an agent that died; never truncate, the inode could be linked elsewhere
    digest = xxhash.xxh3_64()
    offset = 0
    with open(path, "xb", buffering=128 << 10) as file:
        for piece in members:
            data = payload(piece)
            if digest_of(data) != piece.xxh3:
                raise CheckpointError(f"the snapshot of {piece.key} at version {piece.version} is damaged in memory")
            frame = frame_of(piece.dtype, piece.block.sizes)
            raw: Any = data.numpy()
            for chunk in (frame.prefix, raw, frame.suffix):
                file.write(chunk)
                digest.update(chunk)
            length = len(frame.prefix) + piece.nbytes + len(frame.suffix)
            data_offset = offset + len(frame.prefix)
            at = Location(file=path.name, offset=offset, length=length, data_offset=data_offset)
            stored.append(replace(piece, location=at))
            offset += length
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path=path.name, nbytes=offset, xxh3=digest.hexdigest())
