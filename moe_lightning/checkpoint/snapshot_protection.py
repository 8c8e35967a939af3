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
import time
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, kw_only=True)
class PeerBuffer:
    """Bytes that one rank has for another."""

    source: int
    target: int
    nbytes: int


class PendingBuffers:
    """Byte buffers in flight on the background group; `wait` returns those for this rank.

    Args:
        buffers: of all ranks, or at least those from and to this rank, in one order at both ends. If any rank lists
            one that crosses ranks, every rank must list one, because the exchange is collective.
        payload: index of a buffer -> its uint8 bytes; called for buffers from this rank only.
    """

    def __init__(self, buffers: Sequence[PeerBuffer], payload: Callable[[int], torch.Tensor], world: World) -> None:
        self._world = world
        self._delivered: dict[int, torch.Tensor] = {}
        send, recv = [0] * world.size, [0] * world.size
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(world.size)]
        incoming: list[list[int]] = [[] for _ in range(world.size)]
        for index, buffer in enumerate(buffers):
            if buffer.source == buffer.target:
                if buffer.source == world.rank:
                    self._delivered[index] = payload(index)
            elif buffer.source == world.rank:
                outgoing[buffer.target].append(payload(index))
                send[buffer.target] += buffer.nbytes
            elif buffer.target == world.rank:
                incoming[buffer.source].append(index)
                recv[buffer.source] += buffer.nbytes
        self._order = [index for indices in incoming for index in indices]
        self._sizes = [buffers[index].nbytes for index in self._order]
        self.sent_bytes = sum(send)
        self._exchange: PendingExchange | None = None
        if any(buffer.source != buffer.target for buffer in buffers):
            flat = _joined([buffer for target in outgoing for buffer in target])
            self._exchange = PendingExchange(flat.to(world.device), send, recv, world)

    def wait(self) -> dict[int, torch.Tensor]:
        """Return index -> uint8 bytes on the host of every buffer for this rank; raises as `World.read`."""
        if self._exchange is not None:
            parts = torch.split(self._exchange.read(self._world), self._sizes)
            self._delivered |= dict(zip(self._order, parts, strict=True))
            self._exchange = None
        return self._delivered


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

    Raises:
        ConfigurationError: the file system has no room.
    """

    def __init__(self, path: Path, *, nbytes: int, table_bytes: int) -> None:
        self.nbytes = nbytes
        block, pages = block_bytes(nbytes), -(-table_bytes // _PAGE) * _PAGE  # blocks begin behind the tables, aligned
        self._arena = Arena.create(path, capacity={block: 1}, table_bytes=pages)
        self._blocks = self._arena.free_blocks([])[block]
        self._writing = 0

    @property
    def memory_bytes(self) -> int:
        """Size of the file: all versions and their tables."""
        return self._arena.memory.numel()

    def begin(self) -> torch.Tensor:
        """uint8 [nbytes]: room for the next version, which is torn until `publish`."""
        state = self._arena.transition(lambda s: s.abort_snapshot().begin_snapshot())
        assert state.writing is not None
        self._arena.begin_table(state.writing)
        self._writing = state.writing
        return self._arena.memory[self.base : self.base + self.nbytes]

    @property
    def base(self) -> int:
        """Offset of the version being written, for its table."""
        return self._blocks[self._writing]

    def publish(self, table: SnapshotIndex) -> None:
        """Publish the version, which is whole."""
        self._arena.finish_table(self._writing, table)
        self._arena.transition(lambda s: s.finish_snapshot(table.step))

    def renew(self) -> None:
        """Reserve the file anew where it was deleted, without the versions in it."""
        self._arena.renew()

    def close(self) -> None:
        """Close the file, which stays for recovery."""
        self._arena.close()


def discard_older_sessions(arenas: Path, session: str) -> None:
    """Delete what protected snapshots of earlier sessions on this node."""
    for pattern in (COPIES, PARITIES):
        for path in arenas.glob(pattern):
            if path.stem.partition(".")[2] < session:
                for name in (path, path.with_suffix(".alive")):
                    with contextlib.suppress(FileNotFoundError):
                        name.unlink()


_SLACK_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class ProtectionReport:
    """Bytes and seconds that this rank spent to protect one snapshot.

    Attributes:
        step: of the snapshot.
        sent_bytes: of copies and sub-shards.
        table_bytes: sent beside them.
        memory_bytes: of this rank's protecting files, all versions together.
        start_s: training waited: for the version before, for the sizes, for its own snapshot to be packed.
        exchange_s: until everything had arrived; training went on.
    """

    step: int
    sent_bytes: int
    table_bytes: int
    memory_bytes: int
    start_s: float
    exchange_s: float


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """A version that is being exchanged."""

    table: SnapshotIndex
    tables: PendingBuffers
    payloads: PendingBuffers
    ways: Sequence[tuple[int, int]]
    sub_bytes: int
    start_s: float


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
        self._has_begun = self._has_retired = False

    @property
    def report(self) -> ProtectionReport | None:
        """Report on the newest protected version of this rank; None before the first."""
        return self._report

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
        began = time.perf_counter()
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
        flight = _Flight(
            table=table,
            tables=self._send(ways, lambda writer, _: int(gathered[writer][0]), lambda _: _bytes(text)),
            payloads=self._send(
                ways,
                lambda writer, holder: self._payload_bytes(sizes, writer, holder),
                lambda holder: self._payload(blob, nbytes, sub, holder),
            ),
            ways=ways,
            sub_bytes=sub,
            start_s=time.perf_counter() - began,
        )
        self._thread = threading.Thread(target=self._complete, args=(flight,), name="protection", daemon=True)
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
            file.renew()

    def close(self) -> None:
        """Close the files, which stay for recovery; a running exchange ends, or fails with its connections."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._failure = None
        self._close_files()

    # ------------------------------------------------------------------ who sends what

    def _ways(self) -> list[tuple[int, int]]:
        """(writer, holder) of everything that travels."""
        copies = [(writer, holder) for writer, holders in enumerate(self._layout.holders) for holder in holders]
        shares = [(j, i) for group in self._layout.groups for j in group for i in group if i != j]
        return copies + shares

    def _send(
        self, ways: Sequence[tuple[int, int]], nbytes: Callable[[int, int], int], payload: Callable[[int], torch.Tensor]
    ) -> PendingBuffers:
        parcels = [PeerBuffer(source=writer, target=holder, nbytes=nbytes(writer, holder)) for writer, holder in ways]
        return PendingBuffers(parcels, lambda at: payload(ways[at][1]), self._world)

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
            file.close()
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
        """Delete the files of older sessions once this one has a version of its own."""
        if table is not None and not self._has_retired:
            self._has_retired = True
            discard_older_sessions(self._arena.path.parent, table.session)

    def _complete(self, flight: _Flight) -> None:
        """The thread: wait for what arrives and make copies and parities of it."""
        try:
            began = time.perf_counter()
            texts = {flight.ways[at][0]: data.numpy().tobytes() for at, data in flight.tables.wait().items()}
            payloads = {flight.ways[at][0]: data for at, data in flight.payloads.wait().items()}
            arrived = time.perf_counter()
            for writer in payloads.keys() - set(self._group):
                file = self._files[writer]
                file.begin()[: payloads[writer].numel()] = payloads[writer]
                file.publish(relocated(SnapshotIndex.parse(texts[writer], f"the snapshot of rank {writer}"), file.base))
            if self._parity is not None:
                shares = [payloads[member] for member in self._group if member != self._world.rank]
                self._publish_parity(self._parity, flight, texts, shares)
            self._report = ProtectionReport(
                step=flight.table.step,
                sent_bytes=flight.payloads.sent_bytes,
                table_bytes=flight.tables.sent_bytes,
                memory_bytes=sum(file.memory_bytes for file in self._all_files()),
                start_s=flight.start_s,
                exchange_s=arrived - began,
            )
        except BaseException as error:  # handed to the training thread, which raises it
            self._failure = error.with_traceback(None)  # frames would keep the groups of a broken world alive

    def _publish_parity(
        self, file: ProtectedFile, flight: _Flight, texts: dict[int, bytes], parts: Sequence[torch.Tensor]
    ) -> None:
        parity = xor_parity(parts, file.begin()[: flight.sub_bytes])
        piece = Piece(
            key="parity",
            dtype="uint8",
            block=Block.of((flight.sub_bytes,)),
            version=flight.table.step,
            group="parity",
            nbytes=flight.sub_bytes,
            xxh3=digest_of(parity),
            location=Location(data_offset=file.base),
            due=flight.table.step,
        )
        texts = texts | {self._world.rank: relocated(flight.table, 0).dump()}
        tables = [texts[member].decode() for member in self._group]
        file.publish(replace(flight.table, placed=(piece,), extra={"members": list(self._group), "tables": tables}))


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
