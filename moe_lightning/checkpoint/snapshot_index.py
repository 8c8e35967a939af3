"""The table of contents of a snapshot: which block of the arena holds which piece of state."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import xxhash

from moe_lightning.checkpoint.schema import LARGEST, check_blocks, check_pieces, check_record, read_object
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import Piece


@dataclass(frozen=True, kw_only=True)
class SnapshotIndex:
    """The table of contents of one snapshot.

    Attributes:
        placed: with their locations in its memory.
        session: identifies one start of the training; carried-over state never crosses sessions.
        extra: JSON that goes into the checkpoint's manifest as it is.
        world: number of the world that took it (`fence.py`).
    """

    run: str
    session: str
    step: int
    rank: int
    world_size: int
    placed: tuple[Piece, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    world: int = 0

    @property
    def first_step(self) -> int:
        """The step after which the oldest of it was taken: the steps from there on are run again after a restore."""
        return min(self.step, int(self.extra.get("replayed_from", self.step)))

    def dump(self) -> bytes:
        return json.dumps({**vars(self), "placed": [piece.to_json() for piece in self.placed]}).encode()

    @classmethod
    def parse(cls, data: bytes, origin: str, *, memory_bytes: int = LARGEST) -> SnapshotIndex:
        """Read a table.

        Args:
            origin: where it stands, for messages.
            memory_bytes: that its blocks are offsets in, where that is here.

        Raises:
            CheckpointError: nothing of ours wrote it.
        """
        values = read_object(data, origin)
        check_record(values, _NEEDED, origin)
        try:
            placed = tuple(Piece.from_json(row, "arena") for row in values["placed"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{origin} was written by something else: it lacks an entry ({error})") from error
        check_pieces(placed, origin)
        check_blocks(placed, memory_bytes, origin)
        known = {name: value for name, value in values.items() if name in _NAMES}
        return cls(**{**known, "placed": placed})


_NAMES = frozenset(entry.name for entry in fields(SnapshotIndex))
_NEEDED = ("run", "session", "step", "rank", "world_size", "placed")


def digest_of(payload: torch.Tensor) -> str:
    """Hexadecimal xxh3 of uint8 bytes."""
    data: Any = payload.numpy()
    return xxhash.xxh3_64_hexdigest(data)
