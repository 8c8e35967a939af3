"""Snapshots in memory: inventory of a node, decoding of parities, exchange between nodes, reads by key.

Snapshots of other nodes lie in ordinary arena files beside those of the ranks, under names that agents ignore:
    held00003-00001.SESSION.copy   at writer 3: the snapshots of writer 1 (its own where both are the same)
    parity00003.SESSION.parity     at writer 3: the parities of its sharding group, with all members' tables

A rank reads what is on its own node itself. Everything else comes in a transfer (`state/transfer.py`) from the
ranks that the plan names, after snapshots of which only parities exist have been computed (AEC; REFT 4.2, eq. 1-2):
each survivor of a group receives the sub-shards that went into its parity and XORs them out of it, which leaves a
sub-shard of the lost snapshot. Senders verify every piece; a damaged one raises on all ranks, so that they can plan
again without it:

    inventories (`local_inventory`) -> all-gather -> `plan_recovery` -> `fetch`
                                          ^-- `without_snapshots(inventories, error.damaged)` on `DamagedSnapshots`
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.arena import ARENAS, Arena, SnapshotIndex, arenas_name, digest_of, existing_arenas
from moe_lightning.checkpoint.directory import damaged_after, is_sound, run_of
from moe_lightning.checkpoint.loader import Checkpoint, CheckpointSource, DamagesOf, find_usable
from moe_lightning.checkpoint.manifest import dump_json, read_json
from moe_lightning.checkpoint.protection import sub_shard
from moe_lightning.checkpoint.recovery_plan import (
    Decode,
    Expert,
    HeldExpert,
    Origin,
    RecoveryPlan,
    SnapshotInventory,
    SnapshotPlace,
    StorageInventory,
    UnitRead,
)
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.errors import CheckpointError
from moe_lightning.kernels import pack, xor_parity
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.state.pieces import OBJECT, Location, Piece, by_key, expert_of, is_expert_key
from moe_lightning.state.transfer import transfer

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
                    found += _parities_of(table) if kind is Origin.PARITY else [_inventory_of(table, kind)]
                except CheckpointError as error:
                    logger.warning("%s: it is passed over", error)
        arena.close()
    return sorted(found, key=lambda s: (s.session, s.step, -s.writer), reverse=True)


def open_arenas(arenas: Path) -> Iterator[tuple[Origin, Arena]]:
    """(kind, arena) of every file with snapshots on this node; damaged ones are passed over with a
    warning."""
    for pattern, kind in ((ARENAS, Origin.ARENA), (COPIES, Origin.COPY), (PARITIES, Origin.PARITY)):
        for path in sorted(arenas.glob(pattern)):
            try:
                arena = Arena(path)
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                logger.warning("%s (its snapshots are passed over)", error)
                continue
            holder, _, writer = path.name.removeprefix("held").split(".")[0].partition("-")
            own = kind is Origin.COPY and holder == writer
            yield (Origin.ARENA if own else kind), arena


def units_of(pieces: Iterable[Piece]) -> dict[tuple[int, int] | None, list[Piece]]:
    """(layer, expert), or None for everything else -> its pieces."""
    units: dict[tuple[int, int] | None, list[Piece]] = defaultdict(list)
    for piece in pieces:
        units[expert_of(piece.key)].append(piece)
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


def _inventory_of(table: SnapshotIndex, kind: Origin, **parity: Any) -> SnapshotInventory:
    experts = []
    for unit, pieces in units_of(table.placed).items():
        versions = [piece.version for piece in pieces if is_expert_key(piece.key)]
        if unit is not None and versions:  # weights alone are nothing to restore from
            experts.append(HeldExpert(*unit, min(versions), max(versions)))
    return SnapshotInventory(
        kind=kind,
        writer=table.rank,
        session=table.session,
        step=table.step,
        resumes_at=table.first_step,
        world_size=table.world_size,
        experts=tuple(sorted(experts)),
        **parity,
    )


def _parities_of(table: SnapshotIndex) -> list[SnapshotInventory]:
    """One entry for each other member: this parity helps to compute its snapshot."""
    members = table.extra.get("members")
    if not isinstance(members, list) or not all(type(member) is int and member >= 0 for member in members):
        raise CheckpointError(f"the parity of rank {table.rank} was written by something else: it lacks its group")
    return [
        _inventory_of(protected, Origin.PARITY, holder=table.rank, members=tuple(members))
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
        payloads = self.payloads()
        return pack(payloads, out) if payloads else _bytes(0)

    def unit(self, expert: tuple[int, int] | None) -> list[tuple[Piece, torch.Tensor]]:
        """Pieces and bytes of an expert, or of everything else."""
        return [(piece, self._payload(piece)) for piece in self._units.get(expert, [])]

    @cached_property
    def _units(self) -> dict[tuple[int, int] | None, list[Piece]]:
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
                if kind is Origin.PARITY:
                    self._parities[table.rank, table.step] = snapshot
                else:
                    self.add(kind, snapshot)
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

    def read(self, read: UnitRead) -> list[tuple[Piece, torch.Tensor]] | None:
        """The pieces of a unit, verified; None where it is not here or damaged."""
        for snapshot in self._snapshots[read.origin, read.writer, read.step]:
            unit = snapshot.unit(read.expert)
            is_there = bool(unit) or read.expert is None  # a writer may have nothing but experts
            if is_there and _intact(unit):
                return unit
        return None


def packed_bytes_of(pieces: Iterable[Piece]) -> int:
    """Bytes of payloads that lie one behind the other."""
    return sum(_padded_bytes(piece.nbytes) for piece in pieces)


def relocated(table: SnapshotIndex, base: int) -> SnapshotIndex:
    """The table of a snapshot that was packed to offset `base`."""
    placed = []
    for piece in table.placed:
        placed.append(replace(piece, location=Location(data_offset=base)))
        base += _padded_bytes(piece.nbytes)
    return replace(table, placed=tuple(placed))


def _padded_bytes(nbytes: int) -> int:
    """Return the space that `pack` reserves for a tensor of so many bytes."""
    return -(-nbytes // 64) * 64


def _intact(unit: Iterable[tuple[Piece, torch.Tensor]]) -> bool:
    return all(digest_of(data) == piece.xxh3 for piece, data in unit)


def decode_snapshots(decodes: Sequence[Decode], library: SnapshotSet, world: World) -> list[tuple[int, SnapshotPlace]]:
    """Add the computed snapshots to the assemblers' libraries; collective.

    Returns:
        (rank that found it, place) of every part that is missing or damaged; then nothing was computed.
    """
    if not decodes:
        return []
    parts = _Parts(decodes, library, world.rank)
    gathered = all_gather_json([parts.sizes, parts.problems], world)
    problems = [(rank, (str(kind), int(w), int(s))) for rank, (_, found) in enumerate(gathered) for kind, w, s in found]
    if problems:
        return problems
    sizes = [int(gathered[decode.assembler][0][str(index)]) for index, decode in enumerate(decodes)]
    shares = [
        _SubShard(index, holder, member, source, target)
        for index, decode in enumerate(decodes)
        for holder, target in decode.parities
        for member, source in decode.shards
        if member != holder
    ]
    known = {share: _bytes(sizes[share.decode]) for share in shares if share.target == world.rank}
    transfer(
        shares,
        lambda share: [parts.sub_shard(*share[:3], nbytes=sizes[share.decode])],
        lambda share: [known[share]],
        world,
        of_all=True,
    )
    lost = [
        _SubShard(index, holder, decode.writer, reader, decode.assembler)
        for index, decode in enumerate(decodes)
        for holder, reader in decode.parities
    ]
    assembled = {
        index: _bytes(sizes[index] * (len(decode.members) - 1))
        for index, decode in enumerate(decodes)
        if decode.assembler == world.rank
    }

    def place(share: _SubShard) -> torch.Tensor:
        members, nbytes = decodes[share.decode].members, sizes[share.decode]
        start = nbytes * sub_shard(members.index(share.holder), members.index(share.member))
        return assembled[share.decode][start : start + nbytes]

    def solved(share: _SubShard) -> torch.Tensor:
        others = (data for other, data in known.items() if other[:2] == share[:2])
        return xor_parity([parts.parities[share[:2]], *others])

    transfer(lost, lambda share: [solved(share)], lambda share: [place(share)], world, of_all=True)
    for index, blob in assembled.items():
        library.add(Origin.PARITY, Snapshot(table=parts.tables[index], memory=blob))
    return []


class _SubShard(NamedTuple):
    """A part of a member's snapshot that went into a holder's parity, on its way between ranks; of the lost one, once
    it is computed.
    """

    decode: int
    holder: int
    member: int
    source: int
    target: int


def _bytes(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class _Parts:
    """Verified parities and shards that this rank contributes."""

    def __init__(self, decodes: Sequence[Decode], library: SnapshotSet, rank: int) -> None:
        self.parities: dict[tuple[int, int], torch.Tensor] = {}
        self.tables = {}
        self.sizes: dict[int, int] = {}
        self.problems: list[SnapshotPlace] = []
        self._decodes = decodes
        self._shards: dict[tuple[int, int], torch.Tensor] = {}
        for index, decode in enumerate(decodes):
            for holder, reader in decode.parities:
                if reader != rank:
                    continue
                parity = library.parity(holder, decode.step)
                if parity is None:
                    self.problems.append(("parity", decode.writer, decode.step))
                    continue
                ((_, self.parities[index, holder]),) = parity.unit(None)
                self.sizes[index] = self.parities[index, holder].numel()
                lost = next(t for t in protected_tables(parity.table) if t.rank == decode.writer)
                self.tables[index] = relocated(lost, 0)
            for member, reader in decode.shards:
                if reader != rank:
                    continue
                shard = library.whole(member, decode.step)
                if shard is None:
                    self.problems += [(kind, member, decode.step) for kind in ("arena", "copy")]
                else:
                    self._shards[index, member] = shard.packed()

    def sub_shard(self, index: int, holder: int, member: int, *, nbytes: int) -> torch.Tensor:
        """The part of a member's shard that went into a holder's parity, padded with zeros."""
        members = self._decodes[index].members
        return cut_shard(self._shards[index, member], sub_shard(members.index(holder), members.index(member)), nbytes)


def cut_shard(shard: torch.Tensor, number: int, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes]: sub-shard `number` of a packed snapshot, padded with zeros."""
    part = shard[number * nbytes : (number + 1) * nbytes]
    return part if part.numel() == nbytes else torch.cat([part, part.new_zeros(nbytes - part.numel())])


class MemoryCheckpoint(CheckpointSource):
    """The state at a step, put together from snapshots; every piece is compared with its checksum when it is read.

    It is valid until the arenas of this node are written again, except for its objects, which are copied.

    Args:
        plan: of the recovery.
        pieces: of all keys, with their bytes, uint8 [nbytes]; None where this rank did not ask for them.
        storage: the checkpoint that has what is not in memory.
    """

    def __init__(
        self, plan: RecoveryPlan, pieces: Iterable[tuple[Piece, torch.Tensor | None]], storage: Checkpoint | None
    ) -> None:
        self.path = Path(f"the snapshot of step {plan.version}")
        self.step, self.first_step = plan.version, plan.resumes_at
        self._versions, self._storage = plan.versions, storage
        listed = list(pieces)
        self._listed = by_key(piece for piece, _ in listed)
        # Objects are small and may be asked for later than tensors.
        self._data = {_name(p): data.clone() if p.dtype == OBJECT else data for p, data in listed if data is not None}
        self._experts_on_storage, self._rest_on_storage = set(plan.from_storage), plan.level == "storage"

    @override
    def expert_versions(self) -> IntArray:
        return self._versions.copy()

    @override
    def release(self) -> None:
        objects = {_name(p) for pieces in self._listed.values() for p in pieces if p.dtype == OBJECT}
        self._data = {name: data for name, data in self._data.items() if name in objects}
        if self._storage is not None and self._rest_on_storage:
            self._storage.release()

    @cached_property
    @override
    def _pieces(self) -> Mapping[str, Sequence[Piece]]:
        stored = self._storage._pieces if self._storage is not None else {}
        return {key: pieces for key, pieces in stored.items() if self._is_on_storage(key)} | self._listed

    def _is_on_storage(self, key: str) -> bool:
        expert = expert_of(key)
        return self._rest_on_storage if expert is None else expert in self._experts_on_storage

    @override
    def _raw(self, piece: Piece) -> torch.Tensor:
        if piece.key not in self._listed:
            assert self._storage is not None
            return self._storage._raw(piece)
        data = self._data.get(_name(piece))
        if data is None:
            raise CheckpointError(f"{piece.key} of {self.path} is on another rank: fetch it before it is read")
        if digest_of(data) != piece.xxh3:
            raise CheckpointError(f"{piece.key} of {self.path} is damaged: its checksum does not match")
        return data


def _name(piece: Piece) -> tuple[str, tuple[int, ...]]:
    return piece.key, piece.block.offsets


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
    """Read or receive what this rank needs of the plan's snapshots; collective.

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
        "pieces": {i: dump_json(list[Piece], [piece for piece, _ in units[i] or ()]).decode() for i in served},
        "damaged": [i for i, unit in units.items() if unit is None],
    }
    gathered = all_gather_json(own, world)
    bad = [plan.reads[index] for entry in gathered for index in entry["damaged"]]
    _raise_if_damaged([(read.node, read.origin.name.lower(), read.writer, read.step) for read in bad])
    listing = {
        int(i): read_json(list[Piece], rows.encode(), f"the listing of rank {rank}")
        for rank, entry in enumerate(gathered)
        for i, rows in entry["pieces"].items()
    }
    needed = [{(la, e) for la, e in entry["experts"]} for entry in gathered]
    units |= _deliver(list(_deliveries(plan, needed)), units, listing, world)
    fetched = [(piece, data) for unit in units.values() for piece, data in unit or ()]
    elsewhere = [(piece, None) for i in listing.keys() - units.keys() for piece in listing[i]]
    return MemoryCheckpoint(plan, [*fetched, *elsewhere], storage)


def _deliver(
    deliveries: Sequence[_Delivery],
    units: Mapping[int, list[tuple[Piece, torch.Tensor]] | None],
    listing: Mapping[int, Sequence[Piece]],
    world: World,
) -> dict[int, list[tuple[Piece, torch.Tensor]]]:
    """Send units to the ranks that need them, and return those that this rank receives; collective."""
    arrived = {
        way.read: [(piece, _bytes(piece.nbytes)) for piece in listing[way.read]]
        for way in deliveries
        if way.target == world.rank
    }
    transfer(
        deliveries,
        lambda way: [data for _, data in units[way.read] or ()],
        lambda way: [data for _, data in arrived[way.read]],
        world,
        of_all=True,
    )
    return arrived


def _raise_if_damaged(damaged: Collection[tuple[str, str, int, int]]) -> None:
    if damaged:
        raise DamagedSnapshots(damaged)


class _Delivery(NamedTuple):
    """A unit that a rank reads for another one, by its index in the plan's reads."""

    read: int
    source: int
    target: int


def _deliveries(plan: RecoveryPlan, needs: list[set[Any]]) -> Iterator[_Delivery]:
    """Yield every unit that has to travel."""
    for index, read in enumerate(plan.reads):
        for rank, experts in enumerate(needs):
            wanted = read.expert is None or read.expert in experts
            if wanted and rank != read.reader and plan.nodes[rank] != read.node:
                yield _Delivery(index, read.reader, rank)


@dataclass(frozen=True, kw_only=True)
class RecoverySources:
    """Sources of state for a recovery.

    Attributes:
        root: directory of the checkpoints.
        name: of the run's arenas on this node, without the run's number.
        node: of this process.
        fallback: room for arenas beside shared memory.
        report: called with each problem of damaged checkpoints and its repair.
        enter: called before the storage is looked at; no older world commits anything after that.
    """

    root: Place
    name: str
    node: str
    fallback: Path
    report: Callable[[str], None]
    enter: Callable[[], None] = lambda: None

    @property
    def arenas(self) -> Path | None:
        """This node's arenas; None where there are none."""
        run = run_of(self.root)
        if run is None:
            return None
        return existing_arenas(arenas_name(self.name, run, self.node, self.root), self.fallback)

    def snapshots(self) -> list[SnapshotInventory]:
        """Whole snapshots on this node that were taken before memory of their session was damaged."""
        run, arenas = run_of(self.root), self.arenas
        if run is None or arenas is None:
            return []
        damaged = damaged_after(self.root)
        return [saved for saved in local_inventory(arenas, run) if is_sound(saved.session, saved.step, damaged)]

    def newest_checkpoint(self, damages_of: DamagesOf) -> Checkpoint | None:
        """The newest checkpoint on storage that is whole or can be repaired, see `find_usable`; one rank of the world
        asks.
        """
        run = run_of(self.root)
        if run is None:
            return None
        self.enter()
        found = find_usable(self.root, run=run, damages_of=damages_of)
        for problem in found.problems:
            self.report(problem)
        return found.checkpoint


def storage_inventory(checkpoint: Checkpoint) -> StorageInventory:
    """Return the session, steps and versions of experts that a checkpoint holds."""
    versions = tuple(tuple(int(v) for v in layer) for layer in checkpoint.expert_versions())
    session, first = checkpoint.manifest.session, checkpoint.first_step
    return StorageInventory(session=session, step=checkpoint.step, resumes_at=first, versions=versions)
