"""Computes lost snapshots from the parities of their sharding groups (AEC; REFT 4.2, eq. 1-2).

Every survivor of a group receives the sub-shards that went into its parity and XORs them out of it: what remains is a
sub-shard of the lost snapshot. The assembler puts these together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_lightning.algorithms.inventory import SnapshotKind
from moe_lightning.algorithms.protection import sub_shard
from moe_lightning.algorithms.recovery_planner import Decode, Origin
from moe_lightning.checkpoint.node_inventory import protected_tables
from moe_lightning.checkpoint.snapshot_set import Snapshot, SnapshotSet, relocated
from moe_lightning.kernels import xor_parity
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PeerBuffer, exchange_parcels

Place = tuple[str, int, int]
"""(kind, writer, step) of a snapshot"""


def decode_snapshots(decodes: Sequence[Decode], library: SnapshotSet, world: World) -> list[tuple[int, Place]]:
    """Add the computed snapshots to the assemblers' libraries; collective.

    Returns:
        (rank that found it, place) of every part that is missing or damaged; then nothing was computed.
    """
    if not decodes:
        return []
    parts = _Parts(decodes, library, world.rank)
    told = all_gather_json([parts.sizes, parts.problems], world)
    problems = [(rank, (str(kind), int(w), int(s))) for rank, (_, found) in enumerate(told) for kind, w, s in found]
    if problems:
        return problems
    sizes = [int(told[decode.assembler][0][str(index)]) for index, decode in enumerate(decodes)]
    ways = [
        (index, holder, member, PeerBuffer(source=source, target=target, nbytes=sizes[index]))
        for index, decode in enumerate(decodes)
        for holder, target in decode.parities
        for member, source in decode.shards
        if member != holder
    ]
    arrived = exchange_parcels(
        [way[3] for way in ways], lambda at: parts.sub_shard(*ways[at][:3], nbytes=ways[at][3].nbytes), world
    )
    known: dict[tuple[int, int], list[torch.Tensor]] = {}
    for at, data in arrived.items():
        known.setdefault(ways[at][:2], []).append(data)
    lost = [
        (index, holder, PeerBuffer(source=reader, target=decode.assembler, nbytes=sizes[index]))
        for index, decode in enumerate(decodes)
        for holder, reader in decode.parities
    ]
    solved = exchange_parcels(
        [way[2] for way in lost],
        lambda at: xor_parity([parts.parities[lost[at][:2]], *known.get(lost[at][:2], [])]),
        world,
    )
    assembled: dict[int, torch.Tensor] = {}
    for at, data in solved.items():
        index, holder, _ = lost[at]
        decode = decodes[index]
        blob = assembled.setdefault(index, torch.empty(sizes[index] * (len(decode.members) - 1), dtype=torch.uint8))
        start = sizes[index] * sub_shard(decode.members.index(holder), decode.members.index(decode.writer))
        blob[start : start + sizes[index]] = data
    for index, blob in assembled.items():
        library.add(Origin.PARITY, Snapshot(table=parts.tables[index], memory=blob))
    return []


class _Parts:
    """What this rank contributes: parities and shards, verified."""

    def __init__(self, decodes: Sequence[Decode], library: SnapshotSet, rank: int) -> None:
        self.parities: dict[tuple[int, int], torch.Tensor] = {}
        self.tables = {}
        self.sizes: dict[int, int] = {}
        self.problems: list[Place] = []
        self._decodes = decodes
        self._shards: dict[tuple[int, int], torch.Tensor] = {}
        for index, decode in enumerate(decodes):
            for holder, reader in decode.parities:
                if reader != rank:
                    continue
                parity = library.parity(holder, decode.step)
                if parity is None:
                    self.problems.append((SnapshotKind.PARITY, decode.writer, decode.step))
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
                    wholes = (SnapshotKind.ARENA, SnapshotKind.COPY)
                    self.problems += [(kind, member, decode.step) for kind in wholes]
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
