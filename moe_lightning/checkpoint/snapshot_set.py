"""The snapshots of one session that this process can read: in arenas of its node, or computed from parities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from moe_lightning.algorithms.inventory import SnapshotKind
from moe_lightning.algorithms.recovery_planner import Origin, Read
from moe_lightning.checkpoint.node_inventory import open_arenas, units_of
from moe_lightning.checkpoint.snapshot_index import SnapshotIndex, digest_of
from moe_lightning.kernels import pack
from moe_lightning.state.pieces import Location, Piece


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A table of contents and the memory that its blocks are offsets of."""

    table: SnapshotIndex
    memory: torch.Tensor

    def payloads(self) -> list[torch.Tensor]:
        """uint8 bytes of all pieces, in the order of the table."""
        return [self._payload(piece) for piece in self.table.placed]

    def packed(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """uint8 [packed_bytes_of(pieces)]: all payloads one behind the other, as `relocated` describes them."""
        return packed(self.payloads(), out)

    def unit(self, expert: tuple[int, int] | None) -> list[tuple[Piece, torch.Tensor]]:
        """Pieces and bytes of an expert, or of everything else."""
        chosen = [self.table.placed[index] for index in self._units.get(expert, [])]
        return [(piece, self._payload(piece)) for piece in chosen]

    @cached_property
    def _units(self) -> dict[tuple[int, int] | None, list[int]]:
        return units_of(self.table.placed)

    def _payload(self, piece: Piece) -> torch.Tensor:
        return self.memory[piece.at.data_offset : piece.at.data_offset + piece.nbytes]


class SnapshotSet:
    """Snapshots by origin, writer and step.

    Args:
        arenas: of this node; None where there is none.
        session: that wrote the snapshots.
    """

    def __init__(self, arenas: Path | None, session: str | None) -> None:
        self._snapshots: dict[tuple[Origin, int, int], list[Snapshot]] = defaultdict(list)
        self._parities: dict[tuple[int, int], Snapshot] = {}
        for kind, arena in open_arenas(arenas) if arenas is not None and session is not None else ():
            for table in arena.tables():
                if table.session != session:
                    continue
                snapshot = Snapshot(table=table, memory=arena.memory)
                if kind is SnapshotKind.PARITY:
                    self._parities[table.rank, table.step] = snapshot
                else:
                    self.add(Origin[kind.name], snapshot)
            arena.close()  # the mapping stays as long as somebody uses it

    def add(self, origin: Origin, snapshot: Snapshot) -> None:
        self._snapshots[origin, snapshot.table.rank, snapshot.table.step].append(snapshot)

    def parity(self, holder: int, step: int) -> Snapshot | None:
        """A member's parity; None where it is not here or damaged."""
        found = self._parities.get((holder, step))
        return found if found is not None and _intact(found.unit(None)) else None

    def whole(self, writer: int, step: int) -> Snapshot | None:
        """An intact snapshot of a writer, wherever it comes from; None where there is none."""
        candidates = [s for origin in (Origin.ARENA, Origin.COPY) for s in self._snapshots[origin, writer, step]]
        return next((s for s in candidates if _intact(zip(s.table.placed, s.payloads(), strict=True))), None)

    def read(self, read: Read) -> list[tuple[Piece, torch.Tensor]] | None:
        """The pieces of a unit, verified; None where it is not here or damaged."""
        for snapshot in self._snapshots[read.origin, read.writer, read.step]:
            unit = snapshot.unit(read.expert)
            is_there = bool(unit) or read.expert is None  # a writer may have nothing but experts
            if is_there and _intact(unit):
                return unit
        return None


def packed(payloads: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 [packed_bytes_of(pieces)]: payloads one behind the other."""
    return pack(payloads, out) if payloads else torch.empty(0, dtype=torch.uint8)


def packed_bytes_of(pieces: Iterable[Piece]) -> int:
    """Bytes of payloads that lie one behind the other."""
    return sum(_room(piece.nbytes) for piece in pieces)


def relocated(table: SnapshotIndex, base: int) -> SnapshotIndex:
    """The table of a snapshot that was packed to offset `base`."""
    placed = []
    for piece in table.placed:
        placed.append(replace(piece, location=Location(data_offset=base)))
        base += _room(piece.nbytes)
    return replace(table, placed=tuple(placed))


def _room(nbytes: int) -> int:
    """What `pack` gives a tensor of so many bytes."""
    return -(-nbytes // 64) * 64


def _intact(unit: Iterable[tuple[Piece, torch.Tensor]]) -> bool:
    return all(digest_of(data) == piece.xxh3 for piece, data in unit)
