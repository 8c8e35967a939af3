"""The table of contents of a snapshot: which block of the arena holds which piece of state."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from moe_lightning.checkpoint.records import Piece


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A piece in a snapshot.

    Attributes:
        block: offset of the block that holds it.
        due: the last step at which it was its turn to be written; a checkpoint is to have what was due since the one
            before it, so that a snapshot which is never written costs no turn.
    """

    piece: Piece
    block: int
    due: int


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table of contents of one snapshot.

    Attributes:
        session: identifies one start of the training; carried-over state never crosses sessions.
        extra: JSON that goes into the checkpoint's manifest as it is.
        world: number of the world that took it (`fence.py`).
    """

    run: str
    session: str
    step: int
    rank: int
    world_size: int
    placed: tuple[Placed, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    world: int = 0

    def dump(self) -> bytes:
        rows = [{**p.piece.to_json(), "block": p.block, "due": p.due} for p in self.placed]
        return json.dumps({**vars(self), "placed": rows}).encode()

    @classmethod
    def parse(cls, data: bytes) -> Table:
        values = json.loads(data)
        placed = [Placed(piece=Piece.from_json(r), block=r["block"], due=r["due"]) for r in values["placed"]]
        return cls(**{**values, "placed": tuple(placed)})


def digest_of(payload: torch.Tensor) -> str:
    """Hexadecimal xxh3 of uint8 bytes."""
    data: Any = payload.numpy()
    return xxhash.xxh3_64_hexdigest(data)
