"""The snapshots that a node holds: its ranks' arenas, and what protects the snapshots of other nodes.

Protection lies in ordinary arena files beside those of the ranks, under names that agents pass over:
    held00003-00001.SESSION.copy   kept by writer 3: the snapshots of writer 1 (its own where both are the same)
    parity00003.SESSION.parity     kept by writer 3: the parities of its sharding group, with all members' tables
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moe_lightning.algorithms.inventory import HeldExpert, SnapshotInventory, SnapshotKind
from moe_lightning.checkpoint.arena import Arena
from moe_lightning.checkpoint.arena_location import ARENAS
from moe_lightning.checkpoint.schema import is_whole
from moe_lightning.checkpoint.snapshot_index import SnapshotIndex
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import Piece, expert_of, is_expert_key

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
