"""What a recovery will do: where every unit of state comes from, and at which version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_lightning.arrays import IntArray

Expert = tuple[int, int]
"""(layer, expert)"""


class Origin(IntEnum):
    """Where a unit of state comes from, in the order of preference."""

    LIVE = 0
    ARENA = 1
    COPY = 2
    PARITY = 3
    STORAGE = 4


_LABELS = {
    Origin.LIVE: "replicas",
    Origin.ARENA: "arenas",
    Origin.COPY: "copies",
    Origin.PARITY: "parity",
    Origin.STORAGE: "storage",
}


@dataclass(frozen=True, kw_only=True, order=True)
class Read:
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
    """What every rank of the new world does.

    Attributes:
        level: "live": the ranks of `live_ranks` keep their state, the others receive it; "memory" and "storage":
            everybody restores `version`, dense state from snapshots or from the checkpoint; "nothing": there is no
            source, training starts anew.
        version: updates contained in the restored state; 0 where there is no source.
        resumes_at: the step that training goes on from: `version`, unless that is the last step of a window that is run
            again (`replay_window.py`).
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
    reads: tuple[Read, ...]
    decodes: tuple[Decode, ...]
    origins: IntArray
    versions: IntArray
    held: NDArray[np.bool_]
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
        """Whether dense state that no rank has is read from memory at level "live"."""
        return any(rank < 0 for _, rank in self.shards)

    def counts(self, among: Collection[Expert] | None = None) -> dict[Origin, int]:
        """Experts by origin; `among` restricts them, for example to those that a lost node held."""
        chosen = np.argwhere(self.origins >= 0).tolist() if among is None else among
        return dict(sorted(Counter(Origin(int(self.origins[la, e])) for la, e in chosen).items()))

    def describe(self, among: Collection[Expert] | None = None) -> str:
        """Like "14 experts from replicas, 3 from parity, 0 stale"."""
        if self.level == "nothing":
            return "no source is left"
        counts = [f"{count} from {_LABELS[origin]}" for origin, count in self.counts(among).items()]
        stale = len(self.stale if among is None else self.stale.keys() & set(among))
        parts = [*(counts or ["0 restored"]), f"{stale} stale"]
        return ", ".join([parts[0].replace(" ", " experts ", 1), *parts[1:]])
