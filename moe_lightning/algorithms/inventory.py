"""What a rank can contribute to a recovery: its live state, the snapshots on its node, the checkpoint on storage.

Inventories travel as JSON; `to_json` and `from_json` are each other's inverse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple, Self


class SnapshotKind(StrEnum):
    """What a snapshot in memory is to its writer."""

    ARENA = "arena"  # its own, on its node
    COPY = "copy"  # kept by another rank (ARC)
    PARITY = "parity"  # of its sharding group, from which it can be computed (AEC)


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
        kind: whose it is, or a parity.
        writer: rank in the world of `session` whose state it is.
        session: start of the run; later ones are larger as strings.
        step: the step after which it was taken.
        world_size: writers that together make a whole version.
        experts: of the writer's snapshot.
        first: the step from which a restore runs the steps up to `step` again; -1: it needs none of them.
        holder: the member of the sharding group that keeps this parity; -1 for the other kinds.
        members: writers of the sharding group of a parity, in its order.
    """

    kind: SnapshotKind
    writer: int
    session: str
    step: int
    world_size: int
    experts: tuple[HeldExpert, ...] = ()
    first: int = -1
    holder: int = -1
    members: tuple[int, ...] = ()

    @property
    def resumes_at(self) -> int:
        """The step that training goes on from after a restore."""
        return self.step if self.first < 0 else self.first

    @property
    def place(self) -> tuple[SnapshotKind, int, int]:
        """(kind, writer, step): names a snapshot of a session on a node."""
        return self.kind, self.writer, self.step

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        kind, experts = SnapshotKind(data["kind"]), tuple(HeldExpert(*row) for row in data["experts"])
        return cls(**{**data, "kind": kind, "experts": experts, "members": tuple(data["members"])})


@dataclass(frozen=True, kw_only=True)
class StorageInventory:
    """The newest whole checkpoint on storage.

    Attributes:
        session, step: of its commit.
        versions: version of every expert, [L][E].
        first: as of a snapshot.
    """

    session: str
    step: int
    versions: tuple[tuple[int, ...], ...]
    first: int = -1

    @property
    def resumes_at(self) -> int:
        """The step that training goes on from after a restore."""
        return self.step if self.first < 0 else self.first

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "versions": tuple(tuple(row) for row in data["versions"])})


@dataclass(frozen=True, kw_only=True)
class RankInventory:
    """What one rank of the new world holds.

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
        names = ("sharded_dense", "owned_dense", "replayed_dense")
        return cls(
            **{
                **data,
                **{name: tuple(data[name]) for name in names},
                "experts": tuple((int(layer), int(expert)) for layer, expert in data["experts"]),
                "snapshots": tuple(SnapshotInventory.from_json(item) for item in data["snapshots"]),
            }
        )


def without_snapshots(
    inventories: Iterable[RankInventory], damaged: Collection[tuple[str, str, int, int]]
) -> list[RankInventory]:
    """The inventories less the snapshots that turned out to be unreadable, given as (node, kind, writer, step)."""
    return [
        inventory.with_snapshots(s for s in inventory.snapshots if (inventory.node, *s.place) not in damaged)
        for inventory in inventories
    ]
