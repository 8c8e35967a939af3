"""The files in which protected snapshots lie: ordinary arenas with one block a version."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from moe_lightning.checkpoint.arena import Arena, block_bytes
from moe_lightning.checkpoint.node_inventory import COPIES, PARITIES
from moe_lightning.checkpoint.snapshot_index import SnapshotIndex

_PAGE = 4096


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
        """The version is whole."""
        self._arena.finish_table(self._writing, table)
        self._arena.transition(lambda s: s.finish_snapshot(table.step))

    def close(self) -> None:
        """Let go of the file, which stays for recovery."""
        self._arena.close()


def discard_older_sessions(arenas: Path, session: str) -> None:
    """Delete what protected snapshots of earlier sessions on this node."""
    for pattern in (COPIES, PARITIES):
        for path in arenas.glob(pattern):
            if path.stem.partition(".")[2] < session:
                for name in (path, path.with_suffix(".alive")):
                    with contextlib.suppress(FileNotFoundError):
                        name.unlink()
