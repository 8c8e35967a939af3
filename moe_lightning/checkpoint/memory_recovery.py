"""Carries a recovery plan out as far as snapshots in memory are concerned.

A rank reads what lies on its own node itself. What it needs from other nodes comes in one exchange on the background
group, from the ranks that the plan names, after snapshots that exist as parities only have been computed. Readers
verify every piece before it is sent; a damaged one makes all ranks fail with its name, so that all of them can plan
again without it:

    inventories (`local_inventory`) -> all-gather -> `plan_recovery` -> `fetch`
                                          ^-- `without_snapshots(inventories, error.damaged)` on `DamagedSnapshots`
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from moe_lightning.algorithms.inventory import SnapshotKind
from moe_lightning.algorithms.recovery_planner import Expert, RecoveryPlan
from moe_lightning.checkpoint.decoding import decode_snapshots
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.memory_checkpoint import MemoryCheckpoint
from moe_lightning.checkpoint.snapshot_set import SnapshotSet, packed, packed_bytes_of
from moe_lightning.errors import CheckpointError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PeerBuffer, exchange_parcels
from moe_lightning.state.pieces import Piece


class DamagedSnapshots(CheckpointError):
    """Snapshots that a plan counts on cannot be read; every rank raises it.

    Attributes:
        damaged: (node, kind, writer, step) of each, as `without_snapshots` takes them.
    """

    def __init__(self, damaged: Collection[tuple[str, str, int, int]]) -> None:
        node, kind, writer, step = min(damaged)
        where = f"on node {node}" if node else "computed from parities"
        super().__init__(
            f"the {kind} snapshot of writer {writer} at step {step} {where} is damaged or gone "
            f"({len(damaged)} are): plan the recovery again without it"
        )
        self.damaged = frozenset(damaged)


def fetch(
    plan: RecoveryPlan,
    world: World,
    arenas: Path | None,
    needed_experts: Collection[Expert],
    *,
    storage: Checkpoint | None = None,
) -> MemoryCheckpoint:
    """Bring what this rank needs of the plan's snapshots into its reach; collective.

    Args:
        plan: the same on every rank.
        arenas: directory of this node's arenas; None where it has none.
        needed_experts: (layer, expert) pairs that this rank will hold; it gets all other state in any case.
        storage: the checkpoint that the plan counted on.

    Returns:
        The state at `plan.version`. Arenas must not be written before it was restored from.

    Raises:
        DamagedSnapshots: bytes do not match their checksums; raised on every rank.
    """
    library = SnapshotSet(arenas, plan.session)
    problems = [(plan.nodes[rank], *place) for rank, place in decode_snapshots(plan.decodes, library, world)]
    _raise_if_damaged(problems)
    wanted = {i for i, read in enumerate(plan.reads) if read.expert is None or read.expert in needed_experts}
    here = {i for i, read in enumerate(plan.reads) if read.node == plan.nodes[world.rank]} & wanted
    served = {i for i, read in enumerate(plan.reads) if read.reader == world.rank}
    units = {i: library.read(plan.reads[i]) for i in here | served}
    own = {
        "experts": sorted(needed_experts),
        "pieces": {i: [piece.to_json() for piece, _ in units[i] or ()] for i in served},
        "damaged": [i for i, unit in units.items() if unit is None],
    }
    told = all_gather_json(own, world)
    bad = [plan.reads[index] for entry in told for index in entry["damaged"]]
    _raise_if_damaged([(read.node, SnapshotKind[read.origin.name], read.writer, read.step) for read in bad])
    listing = {int(i): [Piece.from_json(row) for row in rows] for entry in told for i, rows in entry["pieces"].items()}
    deliveries = list(_deliveries(plan, [{(la, e) for la, e in entry["experts"]} for entry in told]))
    parcels = [
        PeerBuffer(source=plan.reads[index].reader, target=target, nbytes=packed_bytes_of(listing[index]))
        for index, target in deliveries
    ]
    arrived = exchange_parcels(parcels, lambda at: packed([data for _, data in units[deliveries[at][0]] or ()]), world)
    units |= {deliveries[at][0]: _split(data, listing[deliveries[at][0]]) for at, data in arrived.items()}
    fetched = [(piece, data) for unit in units.values() for piece, data in unit or ()]
    elsewhere = [(piece, None) for i in listing.keys() - units.keys() for piece in listing[i]]
    return MemoryCheckpoint(
        plan.version,
        [*fetched, *elsewhere],
        versions=plan.versions,
        first=plan.resumes_at,
        storage=storage,
        experts_on_storage=plan.from_storage,
        rest_on_storage=plan.level == "storage",
    )


def _raise_if_damaged(damaged: Collection[tuple[str, str, int, int]]) -> None:
    if damaged:
        raise DamagedSnapshots(damaged)


def _deliveries(plan: RecoveryPlan, needs: list[set[Any]]) -> Iterator[tuple[int, int]]:
    """(index of the read, rank) for every unit that has to travel."""
    for index, read in enumerate(plan.reads):
        for rank, experts in enumerate(needs):
            wanted = read.expert is None or read.expert in experts
            if wanted and rank != read.reader and plan.nodes[rank] != read.node:
                yield index, rank


def _split(data: torch.Tensor, pieces: list[Piece]) -> list[tuple[Piece, torch.Tensor]]:
    """The pieces of a packed unit."""
    found, start = [], 0
    for piece in pieces:
        found.append((piece, data[start : start + piece.nbytes]))
        start += packed_bytes_of([piece])
    return found
