"""The recovery plan: from what the survivors hold to the newest version that can be restored, and how.

After a fault the ranks of the new world exchange inventories, and every rank computes the same plan from them. A
*point* is a version at which the state of everything that is no expert ("dense", optimizer, random generators, ...)
has a source: the live state of survivors, the snapshots of one session in memory, or the checkpoint on storage. At a
point every expert is taken from its newest version that is not younger; one that is older than the point is *stale*.
Where a point is the last step of a window (`replay_window.py`), one that is older than the window's first step is.

The rule, with points ordered live > (session, step):
    whole   = the newest point without stale experts
    newest  = the newest point
    choose whole, unless it is older than the checkpoint on storage; then choose newest, memory before storage.
So all ranks rather repeat a few steps than lose tokens, but never more steps than storage would cost.
Within a point the order of sources is live > arena > copy > parity > storage (MoC-System 5.1, REFT 4.3). Snapshots
of one session only are combined: an older session's later steps may have been rolled back.

Shapes: L MoE layers, E experts, N ranks of the new world, W writers (ranks of the session that wrote a snapshot).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_lightning.algorithms.inventory import (
    RankInventory,
    SnapshotInventory,
    SnapshotKind,
    StorageInventory,
    without_snapshots,
)
from moe_lightning.algorithms.recovery_plan import Decode, Expert, Origin, Read, RecoveryPlan
from moe_lightning.arrays import IntArray

__all__ = [
    "Decode",
    "Expert",
    "Origin",
    "RankInventory",
    "Read",
    "RecoveryPlan",
    "SnapshotInventory",
    "StorageInventory",
    "plan_recovery",
    "without_snapshots",
]

_LIVE_SESSION = "\x7f"  # sorts behind the digits and letters of every session


def plan_recovery(
    inventories: Sequence[RankInventory],
    storage: StorageInventory | None,
    *,
    num_layers: int,
    num_experts: int,
) -> RecoveryPlan:
    """Choose the version to restore and the source of every unit; pure, so that all ranks decide alike.

    Args:
        inventories: one of every rank of the new world, in rank order.
        storage: the newest whole checkpoint; None where there is none.
        num_layers, num_experts: L and E; 0 layers for a dense model.
    """
    assert [inventory.rank for inventory in inventories] == list(range(len(inventories)))
    search = _Search(inventories, storage, (num_layers, num_experts))
    newest: _Candidate | None = None
    for candidate in search.candidates():
        newest = newest or candidate
        if not candidate.num_stale:
            return search.plan(candidate)
    return search.plan(newest) if newest is not None else search.nothing()


class _Source(NamedTuple):
    """One source of a unit; the least one by `_preference` is taken."""

    version: int
    origin: Origin
    step: int = -1
    writer: int = -1
    node: str = ""


def _preference(source: _Source) -> tuple[int, int, int, int, str]:
    return -source.version, source.origin, -source.step, source.writer, source.node


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A point with a source for every unit."""

    level: str
    key: tuple[str, int]
    resumes_at: int
    session: str | None
    rests: Mapping[int, _Source]
    experts: Mapping[Expert, _Source]

    @property
    def version(self) -> int:
        return self.key[1]

    @property
    def num_stale(self) -> int:
        return sum(source.version < self.resumes_at for source in self.experts.values())


class _Search:
    def __init__(
        self,
        inventories: Sequence[RankInventory],
        storage: StorageInventory | None,
        shape: tuple[int, int],
    ) -> None:
        self._ranks, self._storage, self._shape = inventories, storage, shape
        self._nodes: dict[str, list[int]] = defaultdict(list)
        self._whole: dict[tuple[str, int, int], list[tuple[Origin, str, SnapshotInventory]]] = defaultdict(list)
        self._parity: dict[tuple[str, int, int], dict[int, tuple[str, SnapshotInventory]]] = defaultdict(dict)
        for inventory in inventories:
            self._nodes[inventory.node].append(inventory.rank)
        for inventory in inventories:
            for snapshot in inventory.snapshots:
                key = (snapshot.session, snapshot.step, snapshot.writer)
                if snapshot.kind is SnapshotKind.PARITY:
                    self._parity[key].setdefault(snapshot.holder, (inventory.node, snapshot))
                else:
                    self._whole[key].append((Origin[snapshot.kind.name], inventory.node, snapshot))
        for found in self._whole.values():
            found.sort(key=lambda item: item[:2])
        top = max((i.live_version for i in inventories), default=-1)
        self._live_version = top
        behind = [i.rank for i in inventories if top >= 0 and i.live_version == top - 1 and i.prepared]
        self._apply = tuple(behind)
        self._live = tuple(sorted([*behind, *(i.rank for i in inventories if top >= 0 and i.live_version == top)]))
        self._sessions: dict[str, dict[Expert, list[tuple[_Source, int]]]] = {}

    # ------------------------------------------------------------------ points

    def candidates(self) -> Iterator[_Candidate]:
        """Every point at which all units have a source, the newest first; none that is older than storage, where all
        have one."""
        worlds = {(s.session, s.step): (s.world_size, s.resumes_at) for i in self._ranks for s in i.snapshots}
        newest_session = max((session for session, _ in worlds), default=None)
        if self._live:
            yield from self._live_point(newest_session, worlds)
        stored = (self._storage.session, self._storage.step) if self._storage is not None else None
        for key, (world_size, resumes_at) in sorted(worlds.items(), reverse=True):
            if stored is not None and key < stored:
                break
            rests = self._rests(*key, world_size)
            if rests is not None:
                yield from self._point("memory", key, resumes_at, rests)
        if stored is not None and self._storage is not None:
            yield from self._point("storage", stored, self._storage.resumes_at, {})

    def _live_point(
        self, session: str | None, worlds: Mapping[tuple[str, int], tuple[int, int]]
    ) -> Iterator[_Candidate]:
        rests: dict[int, _Source] | None = {}
        if any(rank < 0 for _, rank in self.shards()):
            world_size, at = worlds.get((session or "", self._live_version), (0, -1))
            is_there = at == self._live_version  # what is no expert is older in a window
            rests = self._rests(session or "", self._live_version, world_size) if is_there else None
        if rests is None:
            return
        live = np.zeros(self._shape, dtype=np.bool_)
        for pairs in self._live_pairs.values():
            live[pairs[:, 0], pairs[:, 1]] = True
        source = _Source(version=self._live_version, origin=Origin.LIVE)
        fallback = self._expert_sources(session, self._live_version, np.argwhere(~live))
        if fallback is not None:
            alive: list[Expert] = [(layer, expert) for layer, expert in np.argwhere(live).tolist()]
            experts = dict.fromkeys(alive, source) | fallback
            key = (_LIVE_SESSION, self._live_version)
            yield _Candidate(
                level="live",
                key=key,
                resumes_at=key[1],
                session=session,
                rests=rests,
                experts=experts,
            )

    @cached_property
    def _live_pairs(self) -> dict[int, IntArray]:
        """live rank -> int64 [pairs, 2], (layer, expert) of the experts that it holds."""
        return {r: np.array(self._ranks[r].experts, dtype=np.int64).reshape(-1, 2) for r in self._live}

    def _point(
        self,
        level: str,
        key: tuple[str, int],
        resumes_at: int,
        rests: Mapping[int, _Source],
    ) -> Iterator[_Candidate]:
        experts = self._expert_sources(*key, np.argwhere(np.ones(self._shape, dtype=np.bool_)))
        if experts is not None:
            yield _Candidate(
                level=level,
                key=key,
                resumes_at=resumes_at,
                session=key[0],
                rests=rests,
                experts=experts,
            )

    def shards(self) -> tuple[tuple[str, int], ...]:
        """(name, rank) of every dense parameter whose state only one rank keeps: who has it at the live version."""
        holders: dict[str, int] = {name: -1 for i in self._ranks for name in i.sharded_dense}
        for inventory in reversed(self._ranks):
            if inventory.replay_version == self._live_version:
                holders |= dict.fromkeys(inventory.replayed_dense, inventory.rank)
        for rank in reversed(self._live):
            holders |= dict.fromkeys(self._ranks[rank].owned_dense, rank)
        return tuple(sorted(holders.items()))

    # ------------------------------------------------------------------ sources

    def _rests(self, session: str, step: int, world_size: int) -> dict[int, _Source] | None:
        """A source of everything but experts for every writer; None where one has none."""
        found = {}
        for writer in range(world_size):
            where = self._where(session, step, writer)
            if where is None:
                return None
            found[writer] = _Source(version=step, origin=where[0], step=step, writer=writer, node=where[1])
        return found

    def _where(self, session: str, step: int, writer: int) -> tuple[Origin, str] | None:
        whole = self._whole.get((session, step, writer))
        if whole:
            return whole[0][:2]
        return (Origin.PARITY, "") if self._decode(session, step, writer) is not None else None

    def _decode(self, session: str, step: int, writer: int) -> Decode | None:
        """How a lost snapshot is computed; None where another member of its sharding group is lost as well."""
        parities = self._parity.get((session, step, writer), {})
        if not parities:
            return None
        members = next(iter(parities.values()))[1].members
        others = [member for member in members if member != writer]
        shards = {member: self._whole.get((session, step, member)) for member in others if len(others) > 1}
        if set(others) - parities.keys() or not all(shards.values()):
            return None
        readers = [(member, self._reader(parities[member][0], member)) for member in others]
        return Decode(
            writer=writer,
            step=step,
            members=members,
            parities=tuple(readers),
            shards=tuple((member, self._reader(found[0][1], member)) for member, found in shards.items() if found),
            assembler=readers[0][1],
        )

    def _expert_sources(self, session: str | None, version: int, wanted: IntArray) -> dict[Expert, _Source] | None:
        """The newest version, not younger than the point, of the (layer, expert) rows; None where one has none."""
        known = self._experts_of(session) if session is not None and len(wanted) else {}
        storage = self._storage
        stored = storage.versions if storage and storage.step <= version else None
        chosen = {}
        for layer, expert in wanted.tolist():
            options = [source for source, newest in known.get((layer, expert), []) if newest <= version]
            if stored is not None:
                options.append(_Source(version=stored[layer][expert], origin=Origin.STORAGE))
            if not options:
                return None
            chosen[layer, expert] = min(options, key=_preference) if len(options) > 1 else options[0]
        return chosen

    def _experts_of(self, session: str) -> dict[Expert, list[tuple[_Source, int]]]:
        """(layer, expert) -> every copy in memory, with the version of its newest tensor."""
        if session not in self._sessions:
            found: dict[Expert, list[tuple[_Source, int]]] = defaultdict(list)
            for (owner, step, writer), copies in self._whole.items():
                for origin, node, snapshot in copies if owner == session else ():
                    for layer, expert, version, newest in snapshot.experts:
                        source = _Source(version=version, origin=origin, step=step, writer=writer, node=node)
                        found[layer, expert].append((source, newest))
            for (owner, step, writer), parities in self._parity.items():
                if owner == session and self._decode(session, step, writer) is not None:
                    for layer, expert, version, newest in next(iter(parities.values()))[1].experts:
                        source = _Source(version=version, origin=Origin.PARITY, step=step, writer=writer)
                        found[layer, expert].append((source, newest))
            self._sessions[session] = dict(found)
        return self._sessions[session]

    # ------------------------------------------------------------------ the result

    def _reader(self, node: str, number: int) -> int:
        """The ranks of a node take turns."""
        ranks = self._nodes[node]
        return ranks[number % len(ranks)]

    def plan(self, chosen: _Candidate) -> RecoveryPlan:
        in_memory = (Origin.ARENA, Origin.COPY, Origin.PARITY)
        units: list[tuple[Expert | None, _Source]] = [(None, source) for source in chosen.rests.values()]
        units += [(pair, source) for pair, source in chosen.experts.items() if source.origin in in_memory]
        decodes: dict[tuple[int, int], Decode] = {}
        reads = []
        for unit, source in units:
            if source.origin is Origin.PARITY:
                decode = self._decode(chosen.session or "", source.step, source.writer)
                assert decode is not None
                decodes[source.writer, source.step] = decode
                reader = decode.assembler
            else:
                reader = self._reader(source.node, source.writer)
            reads.append(
                Read(
                    writer=source.writer,
                    step=source.step,
                    origin=source.origin,
                    node=source.node,
                    reader=reader,
                    expert=unit,
                )
            )
        live = chosen.level == "live"
        origins, versions, held = self._empty()
        for pair, source in chosen.experts.items():
            origins[pair], versions[pair] = source.origin, source.version
        for rank in self._live if live else ():
            pairs = self._live_pairs[rank]
            held[pairs[:, 0], pairs[:, 1], rank] = True
        return RecoveryPlan(
            level=chosen.level,
            version=chosen.version,
            resumes_at=chosen.resumes_at,
            session=chosen.session if reads else None,
            apply_prepared=self._apply if live else (),
            live_ranks=self._live if live else (),
            shards=self.shards() if live else (),
            reads=tuple(reads),
            decodes=tuple(decodes.values()),
            origins=origins,
            versions=versions,
            held=held,
            nodes=tuple(inventory.node for inventory in self._ranks),
        )

    def nothing(self) -> RecoveryPlan:
        origins, versions, held = self._empty()
        return RecoveryPlan(
            level="nothing",
            version=0,
            resumes_at=0,
            session=None,
            apply_prepared=(),
            live_ranks=(),
            shards=(),
            reads=(),
            decodes=(),
            origins=origins,
            versions=versions,
            held=held,
            nodes=tuple(inventory.node for inventory in self._ranks),
        )

    def _empty(self) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
        origins = np.full(self._shape, -1, dtype=np.int64)
        return origins, origins.copy(), np.zeros((*self._shape, len(self._ranks)), dtype=np.bool_)
