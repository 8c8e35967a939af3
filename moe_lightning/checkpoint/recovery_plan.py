"""Recovery plan: the newest version that can be restored from what the survivors have, and its sources.

After a fault the ranks of the new world exchange inventories (as JSON), and every rank computes the same plan from
them. A *point* is a version at which all state but experts ("dense", optimizer, random generators, ...) has a source:
the live state of survivors, the snapshots of one session in memory, or the checkpoint on storage. At a point every
expert is taken from its newest version that is not younger; one that is older than the point is *stale*, or, if the
point is the last step of a window (`training_state.py`), one that is older than the window's first step.

The rule, with points ordered live > (session, step):
    whole   = the newest point without stale experts
    newest  = the newest point
    choose whole, unless it is older than the checkpoint on storage; then choose newest, memory before storage.
So all ranks repeat a few steps rather than lose tokens, but never more steps than storage would cost.
Within a point the order of sources is live > arena > copy > parity > storage (MoC-System 5.1, REFT 4.3). Snapshots
of one session only are combined: an older session's later steps may have been rolled back.

Shapes: L MoE layers, E experts, N ranks of the new world, W writers (ranks of the session that wrote a snapshot).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from moe_lightning.arrays import BoolArray, IntArray


class Origin(IntEnum):
    """Source of a unit of state, in the order of preference."""

    LIVE = 0
    ARENA = 1  # the writer's own snapshot, on its node
    COPY = 2  # of a snapshot, kept by another rank (ARC)
    PARITY = 3  # of the writer's sharding group, from which its snapshot can be computed (AEC)
    STORAGE = 4


class HeldExpert(NamedTuple):
    """An expert in a snapshot: the versions of its oldest and of its newest tensor, which differ where a partial
    snapshot copies only some kinds of state."""

    layer: int
    expert: int
    version: int
    newest: int


@dataclass(frozen=True, kw_only=True)
class SnapshotInventory:
    """A whole snapshot of one writer, or one of the parities from which it can be computed.

    Attributes:
        kind: ARENA, COPY or PARITY.
        writer: rank in the world of `session` whose state it is.
        session: start of the run; later ones are larger as strings.
        step: the step after which it was taken.
        world_size: writers that together make a whole version.
        resumes_at: the step that training goes on from after a restore: `step`, or the first one of a window.
        experts: of the writer's snapshot.
        holder: the member of the sharding group that keeps this parity; -1 for the other kinds.
        members: writers of the sharding group of a parity, in its order.
    """

    kind: Origin
    writer: int
    session: str
    step: int
    resumes_at: int
    world_size: int
    experts: tuple[HeldExpert, ...] = ()
    holder: int = -1
    members: tuple[int, ...] = ()

    @property
    def place(self) -> SnapshotPlace:
        return self.kind.name.lower(), self.writer, self.step


SnapshotPlace = tuple[str, int, int]
"""(kind, writer, step): names a snapshot of a session on a node."""


def _as_tuples(value: Any) -> Any:
    """JSON with tuples in the place of lists."""
    if isinstance(value, dict):
        return {name: _as_tuples(entry) for name, entry in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class StorageInventory:
    """The newest whole checkpoint on storage.

    Attributes:
        session, step: of its commit.
        resumes_at: as of a snapshot.
        versions: version of every expert, [L][E].
    """

    session: str
    step: int
    resumes_at: int
    versions: tuple[tuple[int, ...], ...]

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**_as_tuples(data))


@dataclass(frozen=True, kw_only=True)
class RankInventory:
    """State that one rank of the new world has.

    Attributes:
        rank: in the new world.
        node: its failure domain.
        live_version: updates contained in its live state; -1: it has none (a fresh process).
        prepared: it has everything that the next update needs, so that it can still apply it.
        experts: (layer, expert) pairs whose state it holds live.
        sharded_dense: dense parameters whose optimizer state only one rank keeps (ZeRO-1), the same on all ranks that
            know them; empty without sharding.
        owned_dense: those of them whose state this rank keeps.
        replayed_dense, replay_version: those whose state this rank keeps as an exact replay for a peer, and its
            version.
        snapshots: on this rank's node; one rank of each node reports them.
    """

    rank: int
    node: str
    live_version: int = -1
    prepared: bool = False
    experts: tuple[tuple[int, int], ...] = ()
    sharded_dense: tuple[str, ...] = ()
    owned_dense: tuple[str, ...] = ()
    replayed_dense: tuple[str, ...] = ()
    replay_version: int = -1
    snapshots: tuple[SnapshotInventory, ...] = ()

    def with_snapshots(self, snapshots: Iterable[SnapshotInventory]) -> RankInventory:
        return replace(self, snapshots=tuple(snapshots))

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "snapshots": [vars(snapshot) for snapshot in self.snapshots]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        values = _as_tuples(data)
        snapshots = (SnapshotInventory(**{**item, "kind": Origin(item["kind"])}) for item in values["snapshots"])
        return cls(**{**values, "snapshots": tuple(snapshots)})


def without_snapshots(
    inventories: Iterable[RankInventory], damaged: Collection[tuple[str, str, int, int]]
) -> list[RankInventory]:
    """The inventories less the snapshots that turned out to be unreadable, given as (node, kind, writer, step); node ""
    stands for every one: what was computed from parities of several nodes.
    """
    return [
        inventory.with_snapshots(
            s for s in inventory.snapshots if {(inventory.node, *s.place), ("", *s.place)}.isdisjoint(damaged)
        )
        for inventory in inventories
    ]


Expert = tuple[int, int]
"""(layer, expert)"""

Point = tuple[str, int]
"""(session, step)"""


_LABELS = {
    Origin.LIVE: "replicas",
    Origin.ARENA: "arenas",
    Origin.COPY: "copies",
    Origin.PARITY: "parity",
    Origin.STORAGE: "storage",
}


@dataclass(frozen=True, kw_only=True, order=True)
class UnitRead:
    """One unit taken from memory: an expert, or everything else that a writer wrote (`expert` is None).

    Attributes:
        writer: rank that took the snapshot, in its session's world.
        step: of the snapshot that holds the unit (an expert in it may be older).
        origin: ARENA, COPY or PARITY.
        node: where the snapshot lies: every rank there can read it; "" for a decoded one.
        reader: rank of the new world that serves the others; the one that assembles it, for a decoded one.
        expert: (layer, expert), or None.
    """

    writer: int
    step: int
    origin: Origin
    node: str
    reader: int
    expert: Expert | None = None


@dataclass(frozen=True, kw_only=True, order=True)
class Decode:
    """A writer's snapshot that is computed from parities (AEC).

    Attributes:
        parities: (member of the sharding group, rank that reads its parity).
        shards: (member, rank that reads its snapshot of the step).
        assembler: rank at which the parts come together.
    """

    writer: int
    step: int
    members: tuple[int, ...]
    parities: tuple[tuple[int, int], ...]
    shards: tuple[tuple[int, int], ...]
    assembler: int


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """Plan of a recovery for all ranks of the new world.

    Attributes:
        level: "live": the ranks of `live_ranks` keep their state, the others receive it; "memory" and "storage":
            everybody restores `version`, dense state from snapshots or from the checkpoint; "nothing": there is no
            source, training starts over.
        version: updates contained in the restored state; 0 where there is no source.
        resumes_at: the step that training goes on from: `version`, unless that is the last step of a window that is run
            again (`training_state.py`).
        session: of the snapshots that are read; None where none is.
        apply_prepared: ranks that must apply the update that they have prepared, before anything else.
        live_ranks: ranks whose live state is then of `version`, at level "live"; the first of them is the source of
            replicated dense state.
        shards: (name, rank) of all dense state that some ranks only keep, at level "live": optimizer states by
            parameter (ZeRO-1), or parts of everything (FSDP); the rank that has it, live or as a replayed copy; -1
            where it is read from memory.
        reads: units taken from memory.
        decodes: snapshots that must be computed before they can be read.
        origins: int64 [L, E], the `Origin` of every expert.
        versions: int64 [L, E], the version of every expert.
        held: bool [L, E, N], which rank holds which expert live at `version`; all false at other levels.
        nodes: of the ranks of the new world.
    """

    level: str
    version: int
    resumes_at: int
    session: str | None
    apply_prepared: tuple[int, ...]
    live_ranks: tuple[int, ...]
    shards: tuple[tuple[str, int], ...]
    reads: tuple[UnitRead, ...]
    decodes: tuple[Decode, ...]
    origins: IntArray
    versions: IntArray
    held: BoolArray
    nodes: tuple[str, ...]

    @cached_property
    def stale(self) -> dict[Expert, int]:
        """(layer, expert) -> version of the experts that are older than the rest."""
        return {(la, e): int(self.versions[la, e]) for la, e in np.argwhere(self.versions < self.resumes_at).tolist()}

    @property
    def from_storage(self) -> tuple[Expert, ...]:
        """The experts that are read from the checkpoint."""
        return tuple((la, e) for la, e in np.argwhere(self.origins == Origin.STORAGE).tolist())

    @property
    def lacks_dense(self) -> bool:
        """True if dense state that no rank has is read from memory at level "live"."""
        return any(rank < 0 for _, rank in self.shards)

    def counts(self) -> dict[Origin, int]:
        """Experts by origin."""
        return dict(sorted(Counter(map(Origin, self.origins[self.origins >= 0].tolist())).items()))

    def describe(self) -> str:
        """Like "14 experts from replicas, 3 from parity, 0 stale"."""
        if self.level == "nothing":
            return "no source is left"
        counts = [f"{count} from {_LABELS[origin]}" for origin, count in self.counts().items()]
        parts = [*(counts or ["0 restored"]), f"{len(self.stale)} stale"]
        return ", ".join([parts[0].replace(" ", " experts ", 1), *parts[1:]])


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
    return search.plan(newest or _NOTHING)


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
    key: Point
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


_NOTHING = _Candidate(level="nothing", key=("", 0), resumes_at=0, session=None, rests={}, experts={})


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
                if snapshot.kind is Origin.PARITY:
                    self._parity[key].setdefault(snapshot.holder, (inventory.node, snapshot))
                else:
                    self._whole[key].append((snapshot.kind, inventory.node, snapshot))
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
        nothing = np.zeros(self._shape, dtype=np.bool_)
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
                yield from self._point("memory", key, resumes_at, key[0], rests, nothing)
        if stored is not None and self._storage is not None:
            yield from self._point("storage", stored, self._storage.resumes_at, stored[0], {}, nothing)

    def _live_point(self, session: str | None, worlds: Mapping[Point, tuple[int, int]]) -> Iterator[_Candidate]:
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
        key = (_LIVE_SESSION, self._live_version)
        yield from self._point("live", key, self._live_version, session, rests, live)

    @cached_property
    def _live_pairs(self) -> dict[int, IntArray]:
        """live rank -> int64 [pairs, 2], (layer, expert) of the experts that it holds."""
        return {r: np.array(self._ranks[r].experts, dtype=np.int64).reshape(-1, 2) for r in self._live}

    def _point(
        self, level: str, key: Point, at: int, session: str | None, rests: Mapping[int, _Source], live: BoolArray
    ) -> Iterator[_Candidate]:
        """The candidate of a point, if every expert has a source: those of bool [L, E] `live` are on live ranks."""
        found = self._expert_sources(session, key[1], np.argwhere(~live))
        if found is not None:
            alive: list[Expert] = [(layer, expert) for layer, expert in np.argwhere(live).tolist()]
            experts = dict.fromkeys(alive, _Source(version=key[1], origin=Origin.LIVE)) | found
            yield _Candidate(level=level, key=key, resumes_at=at, session=session, rests=rests, experts=experts)

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
        """Return the decoding of a lost snapshot; None if another member of its sharding group is lost as well."""
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
                UnitRead(
                    writer=source.writer,
                    step=source.step,
                    origin=source.origin,
                    node=source.node,
                    reader=reader,
                    expert=unit,
                )
            )
        live = chosen.level == "live"
        origins, versions = (np.full(self._shape, -1, dtype=np.int64) for _ in range(2))
        held = np.zeros((*self._shape, len(self._ranks)), dtype=np.bool_)
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
