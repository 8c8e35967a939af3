"""Recovery from memory: the newest copy of each key that an arena holds, not younger than the recovery point."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from moe_lightning.checkpoint.arena import Arena
from moe_lightning.checkpoint.records import DTYPES, OBJECT, Piece
from moe_lightning.checkpoint.room import ARENAS
from moe_lightning.checkpoint.table import Placed, digest_of
from moe_lightning.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryCopy:
    """A piece in an arena, still valid as long as the arena is not written to."""

    arena: Arena
    placed: Placed

    @property
    def piece(self) -> Piece:
        return self.placed.piece

    def read(self) -> torch.Tensor:
        """A verified copy, of the piece's dtype and shape (uint8 bytes for an object).

        Raises:
            CheckpointError: the bytes do not match their checksum.
        """
        data = self.arena.payload(self.placed).clone()
        if digest_of(data) != self.piece.xxh3:
            raise CheckpointError(f"{self.piece.key} at version {self.piece.version} is damaged in {self.arena.path}")
        return data if self.piece.dtype == OBJECT else data.view(DTYPES[self.piece.dtype]).view(self.piece.shape)


def copies_in_memory(arenas: Path, *, run: str, recovery_step: int) -> dict[tuple[str, int], MemoryCopy]:
    """(key, first row) -> the newest copy with version <= recovery_step, over all arenas of a node.

    Snapshots of a step after the recovery point count as well: the experts that they carried over may be old enough.
    """
    found: dict[tuple[str, int], MemoryCopy] = {}
    for path in sorted(arenas.glob(ARENAS)):
        arena = Arena(path)
        for table in arena.tables():
            for placed in table.placed if table.run == run else ():
                piece = placed.piece
                known = found.get((piece.key, piece.first_row))
                newer = known is None or piece.version > known.piece.version
                if piece.version <= recovery_step and newer:
                    found[piece.key, piece.first_row] = MemoryCopy(arena=arena, placed=placed)
    return found
