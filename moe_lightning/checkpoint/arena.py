"""Snapshot arena: one rank's snapshots in a file in memory that outlives the process.

A file in /dev/shm is reserved, mapped and touched once; snapshots are copied into it and can be read from another
process, also after the writer was killed. Memory is a pool of blocks, three for every key. A snapshot is a table of
contents that names a block for every key of the rank: new blocks for the keys copied this time, the blocks of the
snapshot before for experts that were left out. So every whole snapshot has the newest copy of every expert of the rank.

`TripleBuffer` is the pure state machine of the three buffers. Each is open for snapshots (S), being written to storage
(P) or the recovery copy (R); all start in S. A snapshot goes into an S buffer; once it is complete and no buffer is P,
it may become P; when the persist completes, P becomes R and the former R becomes S.

Layout of the file:
    superblock   magic, record of the bytes of a table and the classes of blocks
    state x 2    record of the triple buffer, written alternately, so that one copy is always whole
    table x 3    record of a `SnapshotIndex`
    blocks       64-byte aligned, by size class
A record is JSON behind its size and xxh3 (little-endian), which are zeros while it is written.

Sources: PEC 3.2, MoC-System 5.1-5.2. The papers show a timeline only; the choice of the buffer that is filled and of
the waiting snapshot that is dropped is ours.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import secrets
import struct
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from moe_lightning.checkpoint.manifest import SavedStep, check_pieces, dump_json, read_json
from moe_lightning.checkpoint.storage import storage_of
from moe_lightning.checkpoint.storage.interface import Place, lock_exclusively
from moe_lightning.cores import available_memory
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.state.pieces import LARGEST, Piece, Size


@dataclass(frozen=True, kw_only=True)
class SnapshotIndex(SavedStep):
    """The table of contents of one snapshot.

    Attributes:
        rank: that took it.
        placed: with their locations in its memory.
    """

    rank: Size
    placed: tuple[Piece, ...]

    def dump(self) -> bytes:
        return dump_json(SnapshotIndex, self)

    @classmethod
    def parse(cls, data: bytes, origin: str, *, memory_bytes: int = LARGEST) -> SnapshotIndex:
        """Read a table.

        Args:
            origin: where it stands, for messages.
            memory_bytes: that its blocks are offsets in, where that is here.

        Raises:
            CheckpointError: nothing of ours wrote it.
        """

        def problem_of_place(piece: Piece) -> str | None:
            is_inside = piece.location is not None and piece.at.data_offset + piece.nbytes <= memory_bytes
            return None if is_inside else f"lies outside of its {memory_bytes} bytes"

        index = read_json(cls, data, origin)
        check_pieces(index.placed, problem_of_place, origin)
        return index


def digest_of(payload: torch.Tensor) -> str:
    """Hexadecimal xxh3 of uint8 bytes."""
    data: Any = payload.numpy()
    return xxhash.xxh3_64_hexdigest(data)


NO_STEP = -1


class Status(IntEnum):
    """Role of a buffer in the triple buffer."""

    SNAPSHOT = 0
    PERSIST = 1
    RECOVERY = 2


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """One buffer: its status, the step whose snapshot it holds (NO_STEP: none that is whole), and when it was last
    taken up."""

    status: Status = Status.SNAPSHOT
    step: int = NO_STEP
    used_at: int = 0

    @property
    def waits(self) -> bool:
        """Holds a whole snapshot that is neither being persisted nor persisted."""
        return self.status is Status.SNAPSHOT and self.step != NO_STEP


@dataclass(frozen=True, kw_only=True)
class TripleBuffer:
    """The state of all buffers; every method returns a new state.

    Attributes:
        writing: index of the buffer that a snapshot is being copied into, or None.
        clock: counts snapshots begun, so that the least recently used buffer is known.
        newest: step of the newest whole snapshot there ever was, whether or not a buffer still holds it.
        wanted: the first snapshot of this step or later is held until it is persisted; NO_STEP: none is.
    """

    buffers: tuple[Buffer, ...] = (Buffer(), Buffer(), Buffer())
    writing: int | None = None
    clock: int = 0
    newest: int = NO_STEP
    wanted: int = NO_STEP

    def begin_snapshot(self) -> TripleBuffer:
        """Open the least recently used empty S buffer, or overwrite the oldest waiting snapshot that is not held; the
        result's `writing` names it."""
        assert self.writing is None, "a snapshot is already being written"
        free = [i for i, b in enumerate(self.buffers) if b.status is Status.SNAPSHOT]
        held = self.waiting.get(self.held) if self.held is not None else None
        index = min(free, key=lambda i: (i == held, self.buffers[i].waits, self.buffers[i].used_at))
        opened = Buffer(used_at=self.clock + 1)
        return replace(self._with(index, opened), writing=index, clock=self.clock + 1)

    def finish_snapshot(self, step: int) -> TripleBuffer:
        """The snapshot of `step` is whole and waits to be persisted."""
        assert self.writing is not None, "no snapshot is being written"
        whole = self._with(self.writing, replace(self.buffers[self.writing], step=step))
        return replace(whole, writing=None, newest=step)

    def abort_snapshot(self) -> TripleBuffer:
        """The snapshot being written will never be whole (its writer died): the buffer is empty."""
        return replace(self, writing=None)

    def want(self, step: int) -> TripleBuffer:
        """Hold the first snapshot of `step` or later; unchanged where that may have come and gone."""
        return replace(self, wanted=step) if step > self.newest or step in self.waiting else self

    def start_persist(self, step: int) -> TripleBuffer:
        """The waiting snapshot of `step` becomes P; older waiting ones are dropped."""
        assert self.persisting is None, "a persist is already running"
        chosen = self.waiting[step]
        kept = replace(self._without(lambda b: b.waits and b.step < step), wanted=NO_STEP)
        return kept._with(chosen, replace(self.buffers[chosen], status=Status.PERSIST))

    def finish_persist(self) -> TripleBuffer:
        """P is on storage: it becomes R, and the former R an empty S."""
        chosen = self.persisting
        assert chosen is not None, "no persist is running"
        kept = self._without(lambda b: b.status is Status.RECOVERY)
        return kept._with(chosen, replace(self.buffers[chosen], status=Status.RECOVERY))

    def fail_persist(self, *, keep: bool = True) -> TripleBuffer:
        """The persist did not succeed: its snapshot waits again, or is dropped (keep=False, or a newer one waits)."""
        chosen = self.persisting
        assert chosen is not None, "no persist is running"
        failed = self.buffers[chosen]
        keep = keep and not any(step > failed.step for step in self.waiting)
        return self._with(chosen, replace(failed, status=Status.SNAPSHOT, step=failed.step if keep else NO_STEP))

    def drop_waiting(self) -> TripleBuffer:
        """Waiting snapshots are void: a new session has rolled training back."""
        return replace(self._without(lambda b: b.waits), newest=NO_STEP, wanted=NO_STEP)

    @property
    def waiting(self) -> dict[int, int]:
        """step -> buffer of the snapshots that wait to be persisted."""
        return {b.step: i for i, b in enumerate(self.buffers) if b.waits}

    @property
    def held(self) -> int | None:
        """Step of the waiting snapshot that is not overwritten; None while none is wanted, or it has not come."""
        return min((step for step in self.waiting if 0 <= self.wanted <= step), default=None)

    @property
    def persisting(self) -> int | None:
        return self._first(Status.PERSIST)

    @property
    def recovery(self) -> int | None:
        return self._first(Status.RECOVERY)

    def _first(self, status: Status) -> int | None:
        return next((i for i, b in enumerate(self.buffers) if b.status is status), None)

    def _without(self, void: Callable[[Buffer], bool]) -> TripleBuffer:
        """Empty the buffers of which `void` is true."""
        buffers = tuple(replace(b, status=Status.SNAPSHOT, step=NO_STEP) if void(b) else b for b in self.buffers)
        return replace(self, buffers=buffers)

    def _with(self, index: int, buffer: Buffer) -> TripleBuffer:
        buffers = tuple(buffer if i == index else b for i, b in enumerate(self.buffers))
        return replace(self, buffers=buffers)


def newest_common(waiting: Iterable[Iterable[int]]) -> int | None:
    """The newest step whose snapshot waits in every rank's arena; None where there is none.

    Args:
        waiting: for each rank the steps of its waiting snapshots.
    """
    sets = [set(steps) for steps in waiting]
    return max(set.intersection(*sets), default=None) if sets else None


ARENAS = "rank*.arena"

NAMED = "moe-lightning-"
"""Prefix of the names of arenas' directories."""

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
        if is_own(path):
            return path
    return None


def is_own(path: Path) -> bool:
    """Return True if a path is a directory of this user, and no link."""
    return path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()


def arena_directory(name: str, *, sizes: Mapping[int, int], fallback: Path, memory: Path = MEMORY) -> Path:
    """A private directory for arenas: in shared memory, or under `fallback` where that is missing or too small.

    Args:
        sizes: rank -> bytes of its arena, for the ranks of this node.

    Raises:
        ConfigurationError: neither has room, or the one that has it is on a file system without locks.
    """
    needed_bytes = sum(sizes.values())
    rooms = [room for room in (memory, fallback) if room.is_dir()]
    for room in rooms:
        existing = room / f"{NAMED}{name}"
        held = 0
        if is_own(existing):
            for left_over in existing.glob("[!.]*.new"):  # by a rank that died while it reserved memory
                left_over.unlink(missing_ok=True)
            held = sum(f.stat().st_size for f in existing.glob(ARENAS))
        if _free_bytes(room) + held >= needed_bytes:
            _make_private(existing)
            _require_locks(existing)
            _make_room(existing, sizes)
            if room != memory and memory.is_dir():
                logger.warning(
                    "snapshots are written to %s, as this node needs %.2f GiB and %s has %.2f: give it more, as by "
                    "docker run --shm-size or an emptyDir of medium Memory, unless steps may wait for this storage",
                    *(existing, needed_bytes / 2**30, memory, _free_bytes(memory) / 2**30),
                )
            return existing
    free = ", ".join(f"{room} has {_free_bytes(room) / 2**30:.2f} GiB" for room in rooms) or "no such directory exists"
    raise ConfigurationError(
        f"snapshots of this node need {needed_bytes / 2**30:.2f} GiB of memory ({free}): free memory, "
        "spread the state over more ranks, or name a larger fallback directory"
    )


def _make_room(directory: Path, sizes: Mapping[int, int]) -> None:
    """Delete the arenas that no rank takes over, of other ranks or of another size, if the new ones do not fit beside
    them. An agent that has mapped one frees its memory once it notices.
    """
    wanted = {arena_path(directory, rank): nbytes for rank, nbytes in sizes.items()}
    found = {path: path.stat().st_size for path in directory.glob(ARENAS)}
    missing_bytes = sum(nbytes for path, nbytes in wanted.items() if found.get(path) != nbytes)
    unused = [path for path, nbytes in found.items() if wanted.get(path) != nbytes]
    if not unused or _free_bytes(directory) >= missing_bytes:
        return
    for path in unused:
        try:
            arena = Arena(path)
            arena.delete()
            arena.close()
            del arena  # and its mapping
        except DamagedArena:
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue
    deadline = time.monotonic() + _FREED_S
    while _free_bytes(directory) < missing_bytes and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    if not is_own(directory):
        raise ConfigurationError(f"{directory} belongs to somebody else: choose another run name")
    directory.chmod(0o700)


def _require_locks(directory: Path) -> None:
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigurationError(
                f"{directory} is to hold snapshots, as {MEMORY} is too small, but its files cannot be locked "
                f"({error.strerror}): enlarge {MEMORY} (docker run --shm-size, an emptyDir of medium Memory), or mount "
                "the file system with locks (Lustre: -o flock)"
            ) from error


def reserve(fd: int, size: int, room: Path) -> None:
    """Reserve every byte of a file now: a page that cannot be had later would kill the process that touches it.

    Raises:
        ConfigurationError: the file system has no room.
    """
    free = _free_bytes(room)
    try:
        if size > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise ConfigurationError(
            f"the arena needs {size / 2**30:.2f} GiB in {room}, where {free / 2**30:.2f} GiB are free "
            f"({error.strerror}): free memory or use another directory"
        ) from error


def _free_bytes(room: Path) -> int:
    """Return the space for files in a folder; shared memory takes no more than processes may, whatever it reports."""
    stats = os.statvfs(room)
    free = stats.f_bavail * stats.f_frsize
    return min(free, available_memory()) if room.is_relative_to(MEMORY) else free


_MAGIC = b"MOEARN04"
_PAGE = 4096
_ALIGN = 64
_MADV_POPULATE_WRITE = 23  # missing from the mmap module
_RECORD = struct.Struct("<QQ")  # bytes and xxh3 of the JSON behind
_LOCK_TIMEOUT_S = 10.0
_FREED_S = 60.0  # an agent may be writing
_POLL_S = 0.05

logger = logging.getLogger(__name__)


class _NumberedState(NamedTuple):
    """The newer one of two states has the larger number."""

    number: int
    state: TripleBuffer


class DamagedArena(CheckpointError):
    """A file that is not an arena of this version, or no longer one."""


def block_bytes(nbytes: int) -> int:
    """Size of the block that holds a payload."""
    return max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)


def arena_bytes(capacity: Mapping[int, int], table_bytes: int) -> int:
    """Size of the file for `capacity[block size] = keys`: three blocks each, plus tables and states."""
    blocks = 3 * sum(size * count for size, count in capacity.items())
    return len(_superblock(capacity, table_bytes)) + 2 * _PAGE + 3 * table_bytes + blocks


def _superblock(capacity: Mapping[int, int], table_bytes: int) -> bytes:
    """Whole pages."""
    data = json.dumps([table_bytes, sorted(capacity.items())]).encode()
    content = _MAGIC + _RECORD.pack(len(data), xxhash.xxh3_64_intdigest(data)) + data
    return content.ljust(-(-len(content) // _PAGE) * _PAGE, b"\0")


class Arena:
    """A mapped arena file; the same class serves the worker that writes and the agent that reads.

    Transitions of the triple buffer happen under a lock on the file, which the kernel releases when its holder dies.
    """

    def __init__(self, path: Path, *, hold_alive: bool = False) -> None:
        """Open an existing arena.

        Args:
            hold_alive: this process is the writer: others see it alive (`writer_alive`) until it closes or dies.

        Raises:
            DamagedArena: the file is not an arena of this version, or no longer one.
            CheckpointError: another writer holds it.
        """
        self.path = path
        self._open(hold_alive=hold_alive)

    def _open(self, *, hold_alive: bool) -> None:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self.path, flags)
        self._alive_fd = os.open(_alive_path(self.path), flags | os.O_CREAT, 0o600)
        _OPEN.add(self)
        try:
            if hold_alive:
                message = f"another process writes snapshots to {self.path}: end it first"
                lock_exclusively(self._alive_fd, timeout_s=_LOCK_TIMEOUT_S, message=message)
            self._map_whole()
        except BaseException:
            self.close()
            raise
        self._state_at = len(_superblock(self.capacity, self.table_bytes))
        self._table_at = self._state_at + 2 * _PAGE
        self._blocks_at = self._table_at + 3 * self.table_bytes
        self._parsed: dict[int, tuple[int, SnapshotIndex | None]] = {}  # tables by digest: parsing takes long
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def _map_whole(self) -> None:
        """Map the file and read its superblock."""
        size = os.fstat(self._fd).st_size
        if size < _PAGE:
            raise DamagedArena(f"{self.path} is not an arena: {size} bytes are too few; delete it")
        self._map = mmap.mmap(self._fd, size)
        if self._map[: len(_MAGIC)] != _MAGIC:
            raise DamagedArena(f"{self.path} is not an arena of this version; delete it")
        data = self._record(len(_MAGIC), size - len(_MAGIC))
        if data is None:
            raise DamagedArena(f"{self.path} is damaged: the checksum of its superblock does not match; delete it")
        self.table_bytes, classes = json.loads(data)
        self.capacity: dict[int, int] = dict(classes)
        if arena_bytes(self.capacity, self.table_bytes) != size:
            raise DamagedArena(f"{self.path} is damaged: {size} bytes are not what its superblock says; delete it")

    def _record(self, at: int, room: int) -> bytes | None:
        """The JSON of a record that has so many bytes of room; None where there is none, or a torn one."""
        size, digest = _RECORD.unpack_from(self._map, at)
        if not 0 < size <= room - _RECORD.size:
            return None
        data = self._map[at + _RECORD.size : at + _RECORD.size + size]
        return data if xxhash.xxh3_64_intdigest(data) == digest else None

    def _write_record(self, at: int, data: bytes) -> None:
        self._void_record(at)
        self._map[at + _RECORD.size : at + _RECORD.size + len(data)] = data
        _RECORD.pack_into(self._map, at, len(data), xxhash.xxh3_64_intdigest(data))

    def _void_record(self, at: int) -> None:
        _RECORD.pack_into(self._map, at, 0, 0)

    @classmethod
    def create(cls, path: Path, *, capacity: Mapping[int, int], table_bytes: int) -> Arena:
        """Take over the arena of an earlier process where it has the same capacity (its snapshots stay readable), or
        make a new one; a damaged one is replaced with a warning.

        Every page is reserved and touched, so that a later copy neither fails nor waits for the kernel.

        Raises:
            ConfigurationError: the file system has no room.
            CheckpointError: another writer holds it.
        """
        capacity = {block_bytes(size): count for size, count in sorted(capacity.items())}
        if path.exists():
            with contextlib.suppress(FileNotFoundError), _skipping_damage():
                arena = cls(path, hold_alive=True)
                if arena.capacity == capacity and arena.table_bytes == table_bytes and not arena.replaced:
                    arena.transition(lambda state: state.abort_snapshot().drop_waiting())
                    arena._populate()
                    return arena
                arena.close()
            path.unlink(missing_ok=True)
        cls._make_file(path, capacity, table_bytes)
        arena = cls(path, hold_alive=True)
        arena._populate()
        return arena

    def renew(self) -> None:
        """Reserve the arena anew where its file was deleted; the new one holds no snapshots.

        Raises:
            ConfigurationError: the file system has no room.
        """
        capacity, table_bytes = self.capacity, self.table_bytes
        self.close()
        del self._map, self.memory  # before the new one takes as much
        _make_private(self.path.parent)
        self._make_file(self.path, capacity, table_bytes)
        self._open(hold_alive=True)
        self._populate()

    @staticmethod
    def _make_file(path: Path, capacity: Mapping[int, int], table_bytes: int) -> None:
        """Make an empty arena; what is at its path is replaced."""
        size = arena_bytes(capacity, table_bytes)
        staged = path.with_suffix(f".{secrets.token_hex(6)}.new")
        fd = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            reserve(fd, size, path.parent)
            with mmap.mmap(fd, size) as pages:
                superblock = _superblock(capacity, table_bytes)
                pages[: len(superblock)] = superblock
            os.rename(staged, path)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    # --- the triple buffer ------------------------------------------------------------------------------------------

    @property
    def state(self) -> TripleBuffer:
        """The triple buffer as last written (the newer whole one of the two copies)."""
        return self._newest_state().state

    def transition(self, step: Callable[[TripleBuffer], TripleBuffer]) -> TripleBuffer:
        """Apply `step: TripleBuffer -> TripleBuffer` under the file's lock and return the new state."""
        with self.locked():
            newest = self._newest_state()
            new = _NumberedState(newest.number + 1, step(newest.state))
            self._write_record(self._state_at + new.number % 2 * _PAGE, dump_json(_NumberedState, new))
            return new.state

    def _newest_state(self) -> _NumberedState:
        """The newer one of the two copies; one that was never written, or whose writer died in the middle, is none."""
        copies = (self._record(self._state_at + slot * _PAGE, _PAGE) for slot in (0, 1))
        states = (read_json(_NumberedState, data, str(self.path)) for data in copies if data is not None)
        return max(states, key=lambda copy: copy.number, default=_NumberedState(0, TripleBuffer()))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        message = f"the lock of {self.path} was not free within {_LOCK_TIMEOUT_S:g} s"
        lock_exclusively(self._fd, timeout_s=_LOCK_TIMEOUT_S, message=message)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    @property
    def writer_alive(self) -> bool:
        """True if the process that writes snapshots is alive (for use in other processes)."""
        try:
            fcntl.flock(self._alive_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._alive_fd, fcntl.LOCK_UN)
        return False

    def abort_if_writer_died(self) -> None:
        """Give up the snapshot that a dead writer left unfinished (asked again under the lock: a new writer may be
        there by now)."""
        self.transition(lambda s: s if s.writing is None or self.writer_alive else s.abort_snapshot())

    @property
    def replaced(self) -> bool:
        """True if the path now names another file, or none."""
        try:
            return os.stat(self.path).st_ino != os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return True

    # --- tables and payloads ----------------------------------------------------------------------------------------

    def table(self, index: int) -> SnapshotIndex | None:
        """The table of a buffer's snapshot; None where the buffer is empty, torn, or of something else."""
        at = self._table_at + index * self.table_bytes
        _, digest = _RECORD.unpack_from(self._map, at)
        known, table = self._parsed.get(index, (0, None))
        if known == digest:
            return table
        data = self._record(at, self.table_bytes)
        if data is None:
            return None
        try:
            table = SnapshotIndex.parse(data, str(self.path), memory_bytes=self.memory.numel())
        except CheckpointError as error:
            logger.warning("%s: this snapshot is passed over", error)
            table = None
        self._parsed[index] = digest, table
        return table

    def tables(self) -> list[SnapshotIndex]:
        """Tables of all whole snapshots, newest first: what recovery may read."""
        found = [self.table(i) for i, b in enumerate(self.state.buffers) if b.step != NO_STEP]
        return sorted((t for t in found if t is not None), key=lambda t: -t.step)

    def waiting_tables(self) -> list[SnapshotIndex]:
        """Tables of the snapshots that wait to be persisted."""
        found = [self.table(index) for index in self.state.waiting.values()]
        return [table for table in found if table is not None]

    def payload(self, piece: Piece) -> torch.Tensor:
        """uint8 [nbytes]: the bytes of a piece, in the mapped memory."""
        return self.memory[piece.at.data_offset : piece.at.data_offset + piece.nbytes]

    def begin_table(self, index: int) -> None:
        """A buffer is being written: it has no table until `finish_table`."""
        self._void_record(self._table_at + index * self.table_bytes)

    def finish_table(self, index: int, table: SnapshotIndex) -> None:
        """Write the table of a buffer, which is whole now.

        Raises:
            ConfigurationError: the table does not fit.
        """
        data = table.dump()
        room = self.table_bytes - _RECORD.size
        if len(data) > room:
            raise ConfigurationError(
                f"the snapshot's table takes {len(data)} bytes, the arena has room for {room}: raise table_bytes"
            )
        self._write_record(self._table_at + index * self.table_bytes, data)
        self._parsed[index] = xxhash.xxh3_64_intdigest(data), table

    def free_blocks(self, used: Iterable[Piece]) -> dict[int, list[int]]:
        """Offsets of the blocks of each class that no given piece occupies."""
        taken = {piece.at.data_offset for piece in used}
        free: dict[int, list[int]] = {}
        at = self._blocks_at
        for size, count in self.capacity.items():
            free[size] = [offset for offset in range(at, at + 3 * count * size, size) if offset not in taken]
            at += 3 * count * size
        return free

    def _populate(self) -> None:
        """Map every page for writing now; the first copy would otherwise spend ten times its time on page faults."""
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError:  # Linux before 5.14: touch the pages, without changing what an earlier process left there
            pages = np.frombuffer(self._map, dtype=np.uint8)[::_PAGE]
            pages[:] = pages.copy()

    def delete(self) -> None:
        """Remove the file, unless a writer has it; one that is just opening it notices and makes a new one."""
        try:
            fcntl.flock(self._alive_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if not self.replaced:
            self.path.unlink()

    def close(self) -> None:
        """Release the file; the mapping goes when the last tensor on it does."""
        for fd in (self._fd, self._alive_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._alive_fd = -1


def capacity_of(sizes: Iterable[int]) -> dict[int, int]:
    """Block size -> number of keys, from the payload bytes of a rank's keys."""
    return dict(sorted(Counter(block_bytes(size) for size in sizes).items()))


@contextlib.contextmanager
def _skipping_damage() -> Iterator[None]:
    try:
        yield
    except DamagedArena as error:
        logger.warning(
            "%s: a new one takes its place, without the snapshots in it", str(error).removesuffix("; delete it")
        )


def _alive_path(path: Path) -> Path:
    return path.with_suffix(".alive")


_OPEN: weakref.WeakSet[Arena] = weakref.WeakSet()


def _close_inherited() -> None:
    """In a forked child: descriptors would keep the parent's locks alive after its death."""
    for arena in list(_OPEN):
        arena.close()


os.register_at_fork(after_in_child=_close_inherited)


def arenas_name(name: str, run: str, node: str, root: Place) -> str:
    """Names a run's arenas on a node; nodes have names where several may share a machine or a folder. A copy of the
    run's directory has arenas of its own, wherever it lies."""
    short = name.encode()[:64].decode(errors="ignore")  # names of files have 255 bytes
    return "-".join(part for part in (short, run[:8], storage_of(root).identity(root), node) if part)


def fallback_directory(root: Place) -> Path:
    """Return the directory of snapshots that do not fit into shared memory: the one of the checkpoints, or, if these
    are in no file system, that of temporary files.
    """
    return root if isinstance(root, Path) else Path(tempfile.gettempdir())
