"""Parts of ranks and the commit of a checkpoint without collectives.

Each rank writes its share of a checkpoint: data files, and a part that lists them. Whichever process finds every
rank's part in the staging directory commits the checkpoint; pruning deletes old ones. Two agents may try at the same
time: both happen under a lock that is released when its holder dies, and every step can be repeated after a crash.

Data files have the byte format of torch.distributed.checkpoint, without serializing tensors through Python. `dcp.load`
reads each tensor with `torch.load` from a slice of a file: a fixed prefix, the raw bytes and a fixed suffix. Prefix and
suffix depend on dtype and shape only; torch itself produces them once, and they are cached.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import struct
import time
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_lightning.checkpoint.arena import SnapshotIndex, digest_of
from moe_lightning.checkpoint.directory import (
    check_world,
    claim,
    damaged_after,
    directories,
    has_manifest,
    headings,
    is_sound,
    make_staging,
    newest_of,
    part_name,
    unread_manifests,
    world_lock,
)
from moe_lightning.checkpoint.manifest import METADATA, PRUNED, FileRecord, Manifest, RankPart, check_coverage
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.storage import storage_of
from moe_lightning.checkpoint.storage.interface import Place, Storage, collecting
from moe_lightning.compat import private_torch
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import DTYPES, OBJECT, Location, Piece, is_expert_key, is_replayed


@lru_cache(maxsize=4096)
def frame_of(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Bytes before and after the raw bytes of a tensor in an archive; none for objects, which have no frame."""
    if dtype == OBJECT:
        return b"", b""
    # Memory that nobody touches is not taken, and data that are skipped are a hole of the file, also in memory.
    # A fake tensor would do as well, but importing torch's compiler for it takes an agent longer than its first
    # checkpoint.
    outline = torch.empty(shape, dtype=DTYPES[dtype])
    with open(os.memfd_create("frame"), "w+b") as file:
        with torch.serialization.skip_data():
            torch.save(outline, file)
        with zipfile.ZipFile(file) as archive:
            (record,) = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
        file.seek(record.header_offset)
        local_header = file.read(30)
        name_length, extra_length = struct.unpack("<HH", local_header[26:30])
        start = record.header_offset + 30 + name_length + extra_length
        file.seek(0)
        prefix = file.read(start)
        file.seek(start + record.file_size)
        return prefix, file.read()


def dump_metadata(stored: Iterable[Piece], paths: dict[str, str]) -> bytes:
    """The `.metadata` file of a checkpoint directory.

    Args:
        stored: every piece of every key once.
        paths: file name -> path relative to the directory.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, Any] = {}
    for piece in stored:
        info = private_torch.storage_info(paths[piece.at.file], piece.at.offset, piece.at.length)
        if piece.dtype == OBJECT:
            entries[piece.key] = BytesStorageMetadata()
            storage[MetadataIndex(piece.key)] = info
            continue
        if piece.key not in entries:
            properties = TensorProperties(dtype=DTYPES[piece.dtype])
            entries[piece.key] = TensorStorageMetadata(properties, torch.Size(piece.block.whole), [])
        entry = entries[piece.key]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(ChunkStorageMetadata(torch.Size(piece.block.offsets), torch.Size(piece.block.sizes)))
        storage[MetadataIndex(piece.key, piece.block.offsets, len(entry.chunks) - 1)] = info
    metadata = Metadata(
        state_dict_metadata=entries,
        planner_data={key: (key,) for key in entries},
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    return pickle.dumps(metadata)


def dump_object(value: object) -> bytes:
    """An object as stock DCP stores it; our reader loads it with `load_plain`."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


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
) -> RankPart:
    """Write one rank's share of a checkpoint into the staging directory, and its part-manifest when the data are on
    disk; nothing if it is there already.

    Written is what was due after the previous checkpoint of the session, in the newest copy that the snapshot has, and
    whatever that checkpoint does not hold, or not undamaged.

    Args:
        table: the snapshot.
        payload: the bytes of a piece, uint8 [nbytes].
        damaged: names of files whose experts are written again.

    Raises:
        CheckpointError: the snapshot is damaged, or the directory belongs to another run.
        Superseded: a newer world saves or has resumed there.
        OSError: the storage failed; what was written is removed, unless it is committed already.
    """
    claim(root, table.run)
    storage = storage_of(root)
    staging = storage.staging(root, table.session, table.step, table.world)
    done, names = staging / part_name(table.rank), storage.names(staging)
    # By an agent that died: another node may be committing it, so the files must not change.
    if done.name in names:
        return RankPart.parse(storage.read(done), str(done))
    if MANIFEST in names:
        return _part_of(table, {}, [])
    groups = _due_groups(root, table, damaged)
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
        part = _part_of(table, files, stored)
        storage.put(done, part.dump())
    except OSError:
        # The first error is the one to report. A put may fail after the part has arrived and led to a commit; else the
        # part is deleted before what it lists.
        with contextlib.suppress(OSError, CheckpointError), world_lock(root, table.world):
            if _committed(root, table.session, table.step) is None:
                for name in (done.name, *written):
                    storage.delete(staging / name)
        raise
    return part


def _part_of(table: SnapshotIndex, files: dict[str, FileRecord], stored: Sequence[Piece]) -> RankPart:
    return RankPart(
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


def _due_groups(root: Place, table: SnapshotIndex, damaged: Collection[str]) -> dict[str, list[Piece]]:
    """Return the pieces to write, by file group."""
    held, written_until = set[str](), -1
    previous = newest_of(root, table.session, before=table.step)
    if previous is not None:
        path, manifest = previous
        written_until, held = manifest.step, carried_keys(path, manifest, damaged)
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
            prefix, suffix = frame_of(piece.dtype, piece.block.sizes)
            for chunk in (prefix, data.numpy(), suffix):
                yield chunk
                digest.update(chunk)  # type: ignore[arg-type]  # any buffer
            length = len(prefix) + piece.nbytes + len(suffix)
            data_offset = offset + len(prefix)
            at = Location(file=self._name, offset=offset, length=length, data_offset=data_offset)
            self.stored.append(replace(piece, location=at))
            offset += length
        self.nbytes, self.digest = offset, digest.hexdigest()


_PART = re.compile(r"part-\d+\.json")


def try_commit(
    root: Place, session: str, step: int, world_size: int, *, world: int = 0, has_written: bool = False
) -> Place | None:
    """Commit a step if every rank's part is there. While parts are missing, nothing but their directory is listed.

    Args:
        has_written: a part is new since the last look: where it was written again behind the commit, the checkpoints
            tell of that.

    Returns:
        The checkpoint (also where another process has just committed it), or None while parts are missing.

    Raises:
        CheckpointError: the parts do not make a whole checkpoint.
        Superseded: a newer world saves or has resumed there.
        OSError: the storage failed.
    """
    storage = storage_of(root)
    staging = storage.staging(root, session, step, world)
    names = storage.names(staging)
    if names and MANIFEST not in names and missing_ranks(names, world_size):
        return _committed(root, session, step) if has_written else None
    if not names and not storage.is_dir(root):
        return None
    with world_lock(root, world):
        done = _committed(root, session, step)
        if done is not None:
            return done
        if not storage.is_dir(staging):
            check_world(root, world)
            return None
        with storage.held(staging) as held:
            data = storage.unfinished(held)
            if data is not None:
                manifest = Manifest.parse(data, str(staging / MANIFEST))
            else:
                parts = sorted(name for name in storage.names(held) if _PART.fullmatch(name))
                if len(parts) < world_size:
                    return None
                manifest = _assemble(
                    root, held, [RankPart.parse(storage.read(held / name), str(staging)) for name in parts]
                )
                data = manifest.dump()
            if not storage.attempt():  # the lock may be none, and another node have withdrawn its part
                own = {record.path for record in manifest.files.values() if "/" not in record.path}
                if lacking := own.difference(storage.names(held)):
                    raise CheckpointError(f"{staging} lacks {min(lacking)}, which was withdrawn")
            return storage.commit(staging, held, data, manifest.files, partial(check_world, root, world))


def _committed(root: Place, session: str, step: int) -> Place | None:
    return next((p for p, h in headings(root) if (h.session, h.step) == (session, step)), None)


def withdraw_part(root: Place, session: str, step: int, rank: int, *, world: int = 0) -> None:
    """Take back a rank's part that did not lead to a commit, so that it is written again. Its data are deleted as well,
    unless a commit has begun or could meanwhile: the storage may be full, and another step may be written next.
    """
    storage = storage_of(root)
    if not storage.is_dir(root):
        return
    with world_lock(root, world):
        staging = storage.staging(root, session, step, world)
        storage.delete(staging / part_name(rank))
        names = storage.names(staging)
        if storage.attempt() or MANIFEST in names:  # without a lock others may be committing
            return
        for name in names:
            if name.endswith(f".rank{rank:05d}.step{step:08d}.distcp"):
                storage.delete(staging / name)


def missing_ranks(names: Collection[str], world_size: int) -> list[int]:
    """Ranks whose part is not among the names in a staging directory."""
    there = {*names}
    return [rank for rank in range(world_size) if part_name(rank) not in there]


def _assemble(root: Place, held: Place, parts: list[RankPart]) -> Manifest:
    """Carry experts over and write .metadata."""
    first = parts[0]
    for part in parts:
        whose = part.run, part.session, part.step, part.world, part.world_size
        if whose != (first.run, first.session, first.step, first.world, len(parts)):
            raise CheckpointError(
                f"the parts of step {first.step} in {root} are of different runs, sessions, steps or worlds: delete "
                "its .staging directories"
            )
    stored = _newest_pieces(parts)
    files = {name: record for part in parts for name, record in part.files.items()}
    fresh_keys = {piece.key for piece in stored}
    previous = newest_of(root, first.session, before=first.step)
    required: set[str] = set()
    if previous is not None:
        path, manifest = previous
        required = {piece.key for piece in manifest.stored if not is_replayed(piece.key)}
        carried = [p for p in manifest.stored if is_expert_key(p.key) and p.key not in fresh_keys]
        for name in {piece.at.file for piece in carried}:
            files[name] = _carry_over(path, manifest.files[name], held / name)
        stored += carried
    extra = next((part.extra for part in parts if part.rank == 0), {})
    check_coverage(stored, required=required, extra=extra)
    used = {piece.at.file for piece in stored}
    files = {name: record for name, record in files.items() if name in used}
    metadata = dump_metadata(stored, {name: record.path for name, record in files.items()})
    storage, own = storage_of(held), metadata
    metadata = storage.put_once(held / METADATA, own)
    names = (next(iter(part.files)) for part in parts if part.files)
    if metadata != own and not all(name.encode() in metadata for name in names):  # of a part that was withdrawn since
        storage.put(held / METADATA, own)
        metadata = own
    files[METADATA] = FileRecord(path=METADATA, nbytes=len(metadata), xxh3=xxhash.xxh3_64_hexdigest(metadata))
    return Manifest(
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


def _newest_pieces(parts: list[RankPart]) -> list[Piece]:
    """Return one piece per key and offset: the newest version, ties by lowest rank."""
    best: dict[tuple[str, tuple[int, ...]], Piece] = {}
    for part in sorted(parts, key=lambda p: p.rank):
        for piece in part.stored:
            known = best.get((piece.key, piece.block.offsets))
            if known is None or piece.version > known.version:
                best[piece.key, piece.block.offsets] = piece
    return list(best.values())


def _carry_over(directory: Place, record: FileRecord, target: Place) -> FileRecord:
    """A file of an older checkpoint, linked or referred to."""
    source = directory / record.path
    try:
        if storage_of(directory).link(source, target):
            return replace(record, path=target.name)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source} has vanished, and experts of this checkpoint are only there") from error
    owner = record.path.split("/")[-2] if "/" in record.path else directory.name
    return replace(record, path=f"../{owner}/{target.name}")


def prune(root: Place, keep_last: int, *, world: int | None = None) -> list[str]:
    """Delete all but the newest whole checkpoints, and what interrupted saves left behind.

    A manifest becomes a mark of what is to be deleted before anything is, so that no half-deleted directory looks like
    a checkpoint; files that kept manifests refer to stay. Nothing is deleted that neither such a mark nor the name of
    a file of a save vouches for, and links are not followed. Checkpoints with a lease are skipped, and so is the newest
    one that was saved before memory was damaged. One directory that cannot be deleted keeps no other from being.

    Args:
        world: that prunes; it deletes nothing once a newer one has begun. None: whoever asks may.

    Returns:
        The names of the deleted checkpoints.

    Raises:
        Superseded: a newer world saves or has resumed there.
        OSError: something could not be deleted; all else was.
    """
    removed: list[str] = []
    failures: list[OSError] = []
    storage = storage_of(root)
    with world_lock(root, world):
        if world is not None:
            check_world(root, world)
        named = headings(root)
        own = [(path, heading) for path, heading in named if storage.is_own(path)]
        if not own:
            return []
        damaged = damaged_after(root)
        sound = (path for path, heading in own if is_sound(heading.session, heading.step, damaged))
        kept = {*(path for path, _ in own[: max(1, keep_last)]), next(sound, None)}
        for path in reversed([path for path, _ in own if path not in kept]):
            with collecting(failures), storage.unread(path) as free:
                if free:
                    storage.retire(path)
                    removed.append(path.name)
        staying = [(path, heading) for path, heading in named if path.name not in removed]
        needed = {
            _key(path / file.path) for path, heading in staying for file in heading.files.values() if "/" in file.path
        }
        newest = own[0][1]
        places = directories(root)
        for path in () if unread_manifests(root, places) else places:  # what these need is not known
            with collecting(failures):
                if storage.is_own(path) and not has_manifest(path):
                    _delete_unneeded(storage, path, newest.run, needed)
        for name in storage.names(root):
            owner = storage.owner(root / name)
            if owner is not None and owner[1:] < (newest.session, newest.step):
                with collecting(failures):
                    storage.discard(root / name)
        with collecting(failures):
            storage.sweep(root)
    if failures:
        raise failures[0]
    return removed


def _key(path: Place) -> str:
    """The same for all ways in which manifests name a file."""
    return os.path.normpath(path)


def _delete_unneeded(storage: Storage, path: Place, run: str, needed: set[str]) -> None:
    """Delete the files of a pruned checkpoint that no other one needs; the mark goes with the last of them."""
    mark = path / PRUNED
    try:
        manifest = Manifest.parse(storage.read(mark), str(mark))
    except (OSError, CheckpointError):
        return  # somebody else's, or damaged: nothing vouches for its files
    if manifest.run != run:
        return
    there = [path / name for name in storage.names(path) if name in manifest.files]
    for file in there:
        if _key(file) not in needed:
            storage.delete(file)
    if not any(_key(file) in needed for file in there):
        storage.unmark(path)
