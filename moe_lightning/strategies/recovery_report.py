"""What a recovery did, how long its phases took, and who hears of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Phase = Literal["leaving", "rendezvous", "groups", "plan", "movement", "settling"]

PHASES: tuple[str, ...] = get_args(Phase)
"""Of a recovery, in their order."""


@dataclass(frozen=True, kw_only=True)
class RecoveryReport:
    """How one world followed another.

    Attributes:
        reason: one sentence.
        step: optimizer steps that the run goes on from.
        steps_lost: committed steps that are run again.
        lost_ranks: ranks of the world before that are not in the one after: dead, expelled or gone on notice.
        ranks_before, ranks_after: sizes of the two worlds; 0 before for a process that was in none.
        restored: where the experts' state came from, in words with counts.
        stale_experts: those that came back older than the step.
        min_replicas: nodes that hold each expert now.
        began_at: seconds since the epoch at which this rank saw the fault.
        seconds: of each of PHASES that there was, and their "total".
    """

    reason: str
    step: int
    steps_lost: int
    lost_ranks: tuple[int, ...]
    ranks_before: int
    ranks_after: int
    restored: str
    stale_experts: int
    min_replicas: int
    began_at: float
    seconds: dict[str, float]


class RecoveryListener:
    """Has a part in recoveries, or hears of them: `ElasticWorlds.listeners`."""

    def publish_snapshots(self) -> None:
        """Snapshots are about to be looked for: one that is half done shall be found."""

    def count_stale(self, versions: Mapping[tuple[int, int], int]) -> None:
        """Experts of the live state, by (layer, expert), came back as they were at these steps; newcomers learn next
        what is counted.
        """

    def recovered(self, report: RecoveryReport) -> None:
        """A recovery has ended."""


@dataclass
class Stopwatch:
    """Seconds of the phases of a recovery."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
