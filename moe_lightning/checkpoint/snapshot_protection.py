"""Protection of snapshots against the loss of their node, while training goes on.

At a fixed point of a step every rank calls `start` with the step of a published snapshot. Its own packed snapshot is
stored in a protected file (`prepare` does that earlier, in the snapshot's thread), and one asynchronous exchange on the
background group sends it to the ranks that store copies (ARC), or its sub-shards to the members of its sharding group
(AEC), which store their XOR and all tables of contents. A thread waits for what arrives and publishes it; the next
`start` waits for the thread. A protected version needs nothing but these files, which are ordinary arenas with one
block a version; one that not all ranks have finished is torn, and the one before it counts.

Sources: REFT 4.1-4.3.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moe_lightning.checkpoint.arena import Arena, SnapshotIndex, block_bytes, digest_of
from moe_lightning.checkpoint.memory import (
    COPIES,
    PARITIES,
    Snapshot,
    copy_path,
    packed_bytes_of,
    parity_path,
    relocated,
)
from moe_lightning.checkpoint.protection import ProtectionLayout, sub_shard, sub_shard_bytes
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import xor_parity
from moe_lightning.parallel.collectives import all_gather_json, failing_together
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PendingExchange
from moe_lightning.state.pieces import Block, Location, Piece

_PAGE = 4096


Ways = Collection[tuple[int, int]]
"""(writer, holder) of everything that is sent."""


class PendingBuffers:
    """Byte buffers in flight on the background group; `wait` returns those for this rank.

    Args:
        ways: (source, target) of the buffers of all ranks, the same on every rank, because the exchange is collective.
        nbytes: (source, target) -> bytes of a buffer.
        payload: target -> uint8 bytes of this rank's buffer for it.

    Attributes:
        sent_bytes: by this rank.
    """

    def __init__(
        self, ways: Ways, nbytes: Callable[[int, int], int], payload: Callable[[int], torch.Tensor], world: World
    ) -> None:
        rank, others = world.rank, range(world.size)
        self._world = world
        self._sources = [source for source in others if (source, rank) in ways]
        send = [nbytes(rank, other) if (rank, other) in ways else 0 for other in others]
        self._recv = [nbytes(other, rank) if (other, rank) in ways else 0 for other in others]
        self.sent_bytes = sum(send)
        flat = _joined([payload(other) for other in others if (rank, other) in ways])
        self._exchange = PendingExchange(flat.to(world.device), send, self._recv, world)

    def wait(self) -> dict[int, torch.Tensor]:
        """Return source -> uint8 bytes on the host of every buffer for this rank; raises as `World.read`."""
        parts = torch.split(self._exchange.read(self._world), self._recv)
        return {source: parts[source] for source in self._sources}


def _joined(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all buffers one behind the other; buffers that lie so in memory are not copied."""
    if not buffers:
        return torch.empty(0, dtype=torch.uint8)
    ends = [buffer.data_ptr() + buffer.numel() for buffer in buffers]
    first = buffers[0]
    one_memory = all(b.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for b in buffers)
    if one_memory and all(b.data_ptr() == end for b, end in zip(buffers[1:], ends, strict=False)):
        return first.as_strided((ends[-1] - first.data_ptr(),), (1,))
    return torch.cat(list(buffers))


class ProtectedFile:
    """Versions of one writer's packed snapshot, or of a parity; the newest ones stay while the next is written.

    Args:
        path: a name of its own for each session, so that the versions of the session before stay until this one has a
            whole version.
        nbytes: room of a version.
        table_bytes: room of its table.

    Attributes:
        nbytes: as given.
        arena: the file: all versions and their tables.

    Raises:
        ConfigurationError: the file system has no room.
    """

    def __init__(self, path: Path, *, nbytes: int, table_bytes: int) -> None:
        self.nbytes = nbytes
        block, pages = block_bytes(nbytes), -(-table_bytes // _PAGE) * _PAGE  # blocks begin behind the tables, aligned
        self.arena = Arena.create(path, capacity={block: 1}, table_bytes=pages)
        self._blocks = self.arena.free_blocks([])[block]
        self._writing = 0

    def begin(self) -> torch.Tensor:
        """uint8 [nbytes]: room for the next version, which is torn until `publish`."""
        state = self.arena.transition(lambda s: s.abort_snapshot().begin_snapshot())
        assert state.writing is not None
        self.arena.begin_table(state.writing)
        self._writing = state.writing
        return self.arena.memory[self.base : self.base + self.nbytes]

    @property
    def base(self) -> int:
        """Offset of the version being written, for its table."""
        return self._blocks[self._writing]

    def publish(self, table: SnapshotIndex) -> None:
        """Publish the version, which is whole."""
        self.arena.finish_table(self._writing, table)
        self.arena.transition(lambda s: s.finish_snapshot(table.step))


_SLACK_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class ProtectionReport:
    """Bytes that this rank spent to protect one snapshot.

    Attributes:
        step: of the snapshot.
        sent_bytes: of copies and sub-shards.
        memory_bytes: of this rank's protecting files, all versions together.
    """

    step: int
    sent_bytes: int
    memory_bytes: int


class Protector:
    """Protection of one session's snapshots; `start` is called by all ranks at the same point of a step.

    Args:
        arena: of this rank's snapshots; protecting files lie beside it.
        layout: holders of copies and parities.
        world: the ranks; exchanges run on its background group.
    """

    def __init__(self, arena: Arena, layout: ProtectionLayout, world: World) -> None:
        self._arena, self._layout, self._world = arena, layout, world
        self._group = layout.group_of(world.rank)
        self._limits: list[tuple[int, int]] = []
        self._files: dict[int, ProtectedFile] = {}
        self._parity: ProtectedFile | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._report: ProtectionReport | None = None
        self._prepared: int | None = None
        self._packed = torch.empty(0, dtype=torch.uint8)
        self._has_begun = False

    def prepare(self, table: SnapshotIndex) -> None:
        """Pack this rank's snapshot, so that `start` need not; local, from the thread that publishes snapshots
        (`Snapshotter.on_published`). The first snapshot is packed by `start`, which learns what room it takes."""
        nbytes = packed_bytes_of(table.placed)
        if self._files and nbytes <= self._limits[self._world.rank][1]:
            self._pack(table, nbytes)

    def start(self, step: int) -> bool:
        """Begin to protect the snapshot of a step, after the one before it is finished; collective.

        Returns:
            False, and nothing is begun, where some rank has no whole snapshot of that step.

        Raises:
            ConfigurationError: some rank has no room for what it should keep; raised on all.
        """
        table = next((table for table in self._arena.tables() if table.step == step), None)
        if not self._layout.protects:
            if self._has_begun:  # every rank has published the snapshot before
                self._retire_older_sessions(table)
            self._has_begun = True
            return False
        is_whole = self.finish() is not None
        text = b"" if table is None else relocated(table, 0).dump()
        nbytes = 0 if table is None else packed_bytes_of(table.placed)
        gathered = all_gather_json([len(text), nbytes], self._world)
        if table is None or not all(length for length, _ in gathered):
            return False
        if is_whole:  # every rank is here, so every rank has finished one
            self._retire_older_sessions(table)
        sizes = [int(size) for _, size in gathered]
        self._reserve(table.session, [(int(length), size) for (length, _), size in zip(gathered, sizes, strict=True)])
        sub = self._sub_bytes(sizes, self._world.rank)
        blob = self._publish_own(table, nbytes, sub * (len(self._group) - 1))
        ways = self._ways()
        tables = PendingBuffers(ways, lambda writer, _: int(gathered[writer][0]), lambda _: _bytes(text), self._world)
        payloads = PendingBuffers(
            ways,
            lambda writer, holder: self._payload_bytes(sizes, writer, holder),
            lambda holder: self._payload(blob, nbytes, sub, holder),
            self._world,
        )
        arguments = (table, tables, payloads, sub)
        self._thread = threading.Thread(target=self._complete, args=arguments, name="protection", daemon=True)
        self._thread.start()
        return True

    def finish(self) -> ProtectionReport | None:
        """Wait until what was begun is published; the report of the newest version.

        Raises:
            RuntimeError: it could not be published.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise RuntimeError(f"a snapshot could not be protected: {failure}") from failure
        return self._report

    def renew(self) -> None:
        """Reserve the files anew where they were deleted; they protect nothing until the next snapshot. Local.

        Raises:
            RuntimeError: the version that was begun could not be published.
        """
        self.finish()
        self._packed, self._prepared = torch.empty(0, dtype=torch.uint8), None
        for file in self._all_files():
            file.arena.renew()

    def close(self) -> None:
        """Close the files, which stay for recovery; a running exchange ends, or fails with its connections."""
        with contextlib.suppress(RuntimeError):
            self.finish()
        self._close_files()

    # ------------------------------------------------------------------ who sends what

    def _ways(self) -> Ways:
        copies = [(writer, holder) for writer, holders in enumerate(self._layout.holders) for holder in holders]
        shares = [(j, i) for group in self._layout.groups for j in group for i in group if i != j]
        return {*copies, *shares}

    def _sub_bytes(self, sizes: Sequence[int], rank: int) -> int:
        group = self._layout.group_of(rank)
        return sub_shard_bytes([sizes[member] for member in group]) if group else 0

    def _payload_bytes(self, sizes: Sequence[int], writer: int, holder: int) -> int:
        return sizes[writer] if holder in self._layout.holders[writer] else self._sub_bytes(sizes, writer)

    def _payload(self, blob: torch.Tensor, nbytes: int, sub: int, holder: int) -> torch.Tensor:
        if holder in self._layout.holders[self._world.rank]:
            return blob[:nbytes]
        start = sub * sub_shard(self._group.index(holder), self._group.index(self._world.rank))
        return blob[start : start + sub]

    # ------------------------------------------------------------------ what is kept

    def _reserve(self, session: str, gathered: Sequence[tuple[int, int]]) -> None:
        """Open files for these sizes; again, with more room, where a snapshot has outgrown them."""
        if self._limits and all(
            length <= a and size <= b for (length, size), (a, b) in zip(gathered, self._limits, strict=True)
        ):
            return
        self._limits = [(length * 5 // 4 + _SLACK_BYTES, size * 65 // 64 + _SLACK_BYTES) for length, size in gathered]
        with failing_together(self._world):
            try:
                self._open_files(session)
            except (ConfigurationError, OSError) as error:
                raise ConfigurationError(f"rank {self._world.rank} cannot keep protected snapshots: {error}") from error

    def _open_files(self, session: str) -> None:
        self._close_files()
        arenas, rank = self._arena.path.parent, self._world.rank
        sub = self._sub_bytes([size for _, size in self._limits], rank)
        for writer in (rank, *self._layout.copied_writers(rank)):
            length, size = self._limits[writer]
            nbytes = max(size, sub * (len(self._group) - 1)) if writer == rank else size
            path = copy_path(arenas, session, rank, writer)
            self._files[writer] = ProtectedFile(path, nbytes=nbytes, table_bytes=length)
        if self._group:
            tables_bytes = sum(self._limits[member][0] for member in self._group) * 3 // 2
            path = parity_path(arenas, session, rank)
            self._parity = ProtectedFile(path, nbytes=sub, table_bytes=tables_bytes)

    def _all_files(self) -> list[ProtectedFile]:
        return [*self._files.values(), *([self._parity] if self._parity is not None else [])]

    def _close_files(self) -> None:
        for file in self._all_files():
            file.arena.close()
        self._files, self._parity, self._prepared = {}, None, None

    def _pack(self, table: SnapshotIndex, nbytes: int) -> None:
        """Into the own file; the version is torn until `_publish_own` publishes it, or packs another one over it."""
        self._prepared = None
        self._packed = self._files[self._world.rank].begin()
        Snapshot(table=table, memory=self._arena.memory).packed(self._packed[:nbytes])
        self._prepared = table.step

    def _publish_own(self, table: SnapshotIndex, nbytes: int, padded: int) -> torch.Tensor:
        """This rank's packed snapshot, in its own file, padded with zeros."""
        if self._prepared != table.step:
            self._pack(table, nbytes)
        self._prepared = None
        self._packed[nbytes:padded].zero_()
        file = self._files[self._world.rank]
        file.publish(relocated(table, file.base))
        return self._packed

    def _retire_older_sessions(self, table: SnapshotIndex | None) -> None:
        """Delete the files of older sessions on this node, once this one has a version of its own."""
        if table is None:
            return
        arenas = self._arena.path.parent
        for path in (*arenas.glob(COPIES), *arenas.glob(PARITIES)):
            if path.stem.partition(".")[2] < table.session:
                path.unlink(missing_ok=True)
                path.with_suffix(".alive").unlink(missing_ok=True)

    def _complete(self, table: SnapshotIndex, tables: PendingBuffers, payloads: PendingBuffers, sub: int) -> None:
        """The thread: wait for what arrives and make copies and parities of it."""
        try:
            texts = {writer: data.numpy().tobytes() for writer, data in tables.wait().items()}
            arrived = payloads.wait()
            for writer in arrived.keys() - set(self._group):
                file = self._files[writer]
                file.begin()[: arrived[writer].numel()] = arrived[writer]
                file.publish(relocated(SnapshotIndex.parse(texts[writer], f"the snapshot of rank {writer}"), file.base))
            if self._parity is not None:
                shares = [arrived[member] for member in self._group if member != self._world.rank]
                self._publish_parity(self._parity, table, sub, texts, shares)
            memory_bytes = sum(file.arena.memory.numel() for file in self._all_files())
            self._report = ProtectionReport(step=table.step, sent_bytes=payloads.sent_bytes, memory_bytes=memory_bytes)
        except BaseException as error:  # handed to the training thread, which raises it
            self._failure = error.with_traceback(None)  # frames would keep the groups of a broken world alive

    def _publish_parity(
        self,
        file: ProtectedFile,
        table: SnapshotIndex,
        sub: int,
        texts: dict[int, bytes],
        parts: Sequence[torch.Tensor],
    ) -> None:
        parity = xor_parity(parts, file.begin()[:sub])
        piece = Piece(
            key="parity",
            dtype="uint8",
            block=Block.of((sub,)),
            version=table.step,
            group="parity",
            nbytes=sub,
            xxh3=digest_of(parity),
            location=Location(data_offset=file.base),
            due=table.step,
        )
        texts = texts | {self._world.rank: relocated(table, 0).dump()}
        tables = [texts[member].decode() for member in self._group]
        file.publish(replace(table, placed=(piece,), extra={"members": list(self._group), "tables": tables}))


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
