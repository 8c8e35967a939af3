"""Inventory of the snapshots on a node.

The snapshots that a node holds: its ranks' arenas, and what protects the snapshots of other nodes.

Protection lies in ordinary arena files beside those of the ranks, under names that agents pass over:
    held00003-00001.SESSION.copy   kept by writer 3: the snapshots of writer 1 (its own where both are the same)
    parity00003.SESSION.parity     kept by writer 3: the parities of its sharding group, with all members' tables

The snapshots of one session that this process can read: in arenas of its node, or computed from parities.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moe_lightning.checkpoint.arena import ARENAS, Arena, SnapshotIndex, digest_of
from moe_lightning.checkpoint.manifest import is_whole
from moe_lightning.checkpoint.recovery_plan import HeldExpert, Origin, Read, SnapshotInventory, SnapshotKind
from moe_lightning.errors import CheckpointError
from moe_lightning.kernels import pack
from moe_lightning.state.pieces import Location, Piece, expert_of, is_expert_key

logger = logging.getLogger(__name__)

COPIES = "held*.copy"
PARITIES = "parity*.parity"


def copy_path(arenas: Path, session: str, holder: int, writer: int) -> Path:
    """The file in which one rank keeps another's snapshots."""
    return arenas / f"held{holder:05d}-{writer:05d}.{session}.copy"


def parity_path(arenas: Path, session: str, holder: int) -> Path:
    """The file in which a rank keeps its group's parities."""
    return arenas / f"parity{holder:05d}.{session}.parity"


def local_inventory(arenas: Path, run: str) -> list[SnapshotInventory]:
    """Every whole snapshot of a run on this node, newest first; torn ones are not listed."""
    found = []
    for kind, arena in open_arenas(arenas):
        for table in arena.tables():
            if table.run == run:
                try:
                    found += _parities_of(table) if kind is SnapshotKind.PARITY else [_inventory_of(table, kind)]
                except CheckpointError as error:
                    logger.warning("%s: it is passed over", error)
        arena.close()
    return sorted(found, key=lambda s: (s.session, s.step, -s.writer), reverse=True)


def open_arenas(arenas: Path) -> Iterator[tuple[SnapshotKind, Arena]]:
    """(kind, arena) of every file with snapshots on this node; damaged ones are passed over with a
    warning."""
    for pattern, kind in ((ARENAS, SnapshotKind.ARENA), (COPIES, SnapshotKind.COPY), (PARITIES, SnapshotKind.PARITY)):
        for path in sorted(arenas.glob(pattern)):
            try:
                arena = Arena(path)
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                logger.warning("%s (its snapshots are passed over)", error)
                continue
            holder, _, writer = path.name.removeprefix("held").split(".")[0].partition("-")
            own = kind is SnapshotKind.COPY and holder == writer
            yield (SnapshotKind.ARENA if own else kind), arena


def units_of(pieces: Iterable[Piece]) -> dict[tuple[int, int] | None, list[int]]:
    """(layer, expert), or None for everything else -> the indices of its pieces."""
    units: dict[tuple[int, int] | None, list[int]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        units[expert_of(piece.key)].append(index)
    return dict(units)


def protected_tables(table: SnapshotIndex) -> list[SnapshotIndex]:
    """The tables of the group's members, from the table of a parity.

    Raises:
        CheckpointError: it is of something else.
    """
    origin, texts = f"the parity of rank {table.rank}", table.extra.get("tables")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"{origin} was written by something else: it lacks the tables of its group")
    return [SnapshotIndex.parse(text.encode(errors="replace"), origin) for text in texts]


def _inventory_of(table: SnapshotIndex, kind: SnapshotKind, **parity: Any) -> SnapshotInventory:
    experts = []
    for unit, indices in sorted((u, i) for u, i in units_of(table.placed).items() if u is not None):
        versions = [table.placed[index].version for index in indices if is_expert_key(table.placed[index].key)]
        if not versions:
            continue  # weights alone are nothing to restore from
        experts.append(HeldExpert(*unit, min(versions), max(versions)))
    return SnapshotInventory(
        kind=kind,
        writer=table.rank,
        session=table.session,
        step=table.step,
        first=table.first_step,
        world_size=table.world_size,
        experts=tuple(experts),
        **parity,
    )


def _parities_of(table: SnapshotIndex) -> list[SnapshotInventory]:
    """One entry for each other member: this parity helps to compute its snapshot."""
    members = table.extra.get("members")
    if not isinstance(members, list) or not all(is_whole(member) for member in members):
        raise CheckpointError(f"the parity of rank {table.rank} was written by something else: it lacks its group")
    return [
        _inventory_of(protected, SnapshotKind.PARITY, holder=table.rank, members=tuple(members))
        for protected in protected_tables(table)
        if protected.rank != table.rank
    ]


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
    """Return the space that `pack` reserves for a tensor of so many bytes."""
    return -(-nbytes // 64) * 64


def _intact(unit: Iterable[tuple[Piece, torch.Tensor]]) -> bool:
    return all(digest_of(data) == piece.xxh3 for piece, data in unit)
