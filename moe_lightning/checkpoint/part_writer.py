"""Writes a rank's share of a checkpoint: data files, and the part that lists them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import xxhash

from moe_lightning.checkpoint.dcp_format import frame_of
from moe_lightning.checkpoint.fence import make_staging
from moe_lightning.checkpoint.manifest import FileRecord, Manifest, Part
from moe_lightning.checkpoint.snapshot_index import SnapshotIndex, digest_of
from moe_lightning.checkpoint.storage import Place
from moe_lightning.checkpoint.storages import storage_of
from moe_lightning.checkpoint.store import claim, part_name, previous_of
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import Location, Piece, is_expert_key


def carried_keys(path: Place, manifest: Manifest, damaged: Collection[str] = ()) -> set[str]:
    """The keys of experts that a next checkpoint can carry over: all but those in files that are damaged, gone or of
    another size.

    Args:
        path: the checkpoint's directory.
        damaged: names of files that are known to be damaged.
    """
    stored = [piece for piece in manifest.stored if is_expert_key(piece.key)]
    files = {name: manifest.files[name] for name in {piece.at.file for piece in stored}}
    lost = {name for name, r in files.items() if name in damaged or not _is_there(path / r.path, r.nbytes)}
    return {p.key for p in stored} - {p.key for p in stored if p.at.file in lost}


def _is_there(path: Place, nbytes: int) -> bool:
    try:
        return storage_of(path).stat(path).nbytes == nbytes
    except OSError:
        return False


def write_part(
    root: Place,
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
    storage = storage_of(root)
    staging = storage.staging(root, table.session, table.step, table.world)
    done = staging / part_name(table.rank)
    if done.name in storage.names(staging):
        # By an agent that died: another node may be committing it, so the files must not change.
        return Part.parse(storage.read(done), str(done))
    groups = _due_groups(root, table, damaged, copy_every)
    make_staging(root, table.session, table.step, table.world)
    files: dict[str, FileRecord] = {}
    stored: list[Piece] = []
    written: list[str] = []
    attempt = storage.attempt()
    try:
        for group, members in groups.items():
            name = f"{group}{attempt}.rank{table.rank:05d}.step{table.step:08d}.distcp"
            data = _Data(name, members, payload)
            written.append(name)
            storage.write(staging / name, data)
            files[name] = FileRecord(path=name, nbytes=data.nbytes, xxh3=data.digest)
            stored += data.stored
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
        storage.put(done, part.dump())
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to report
            for name in written:
                storage.delete(staging / name)
        raise
    return part


def _due_groups(
    root: Place, table: SnapshotIndex, damaged: Collection[str], copy_every: int | None
) -> dict[str, list[Piece]]:
    """What is to be written, by file group."""
    held, written_until = set[str](), -1
    previous = previous_of(root, table.session, table.step)
    if previous is not None:
        path, manifest = previous
        written_until = manifest.step
        if copy_every is None or (manifest.sequence + 1) % copy_every:
            held = carried_keys(path, manifest, damaged)
    groups: dict[str, list[Piece]] = {}
    for piece in table.placed:
        if piece.due > written_until or not is_expert_key(piece.key) or piece.key not in held:
            groups.setdefault(piece.group, []).append(piece)
    return groups


class _Data:
    """The bytes of a data file, made and checked anew each time that they are iterated over.

    Attributes:
        nbytes, digest, stored: of the file, and its pieces at their locations, once it was gone through.

    Raises:
        CheckpointError: the snapshot is damaged.
    """

    def __init__(self, name: str, members: Sequence[Piece], payload: Callable[[Piece], torch.Tensor]) -> None:
        self._name, self._members, self._payload = name, members, payload
        self.nbytes, self.digest = 0, ""
        self.stored: list[Piece] = []

    def __iter__(self) -> Iterator[Any]:
        digest, offset = xxhash.xxh3_64(), 0
        self.stored = []
        for piece in self._members:
            data = self._payload(piece)
            if digest_of(data) != piece.xxh3:
                raise CheckpointError(f"the snapshot of {piece.key} at version {piece.version} is damaged in memory")
            frame = frame_of(piece.dtype, piece.block.sizes)
            for chunk in (frame.prefix, data.numpy(), frame.suffix):
                yield chunk
                digest.update(chunk)  # type: ignore[arg-type]  # any buffer
            length = len(frame.prefix) + piece.nbytes + len(frame.suffix)
            data_offset = offset + len(frame.prefix)
            at = Location(file=self._name, offset=offset, length=length, data_offset=data_offset)
            self.stored.append(replace(piece, location=at))
            offset += length
        self.nbytes, self.digest = offset, digest.hexdigest()
