"""What happened in a simulation, for tables and pictures."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_lightning.simulate.failures import NS
from moe_lightning.simulate.scenario import Recovery, Span


@dataclass(kw_only=True)
class History:
    """Stretches of time, recoveries, and what training waited for besides."""

    recoveries: list[Recovery] = field(default_factory=list)
    stall_ns: int = 0
    rebalance_ns: int = 0
    _stretches: list[tuple[int, tuple[str, int, int, float]]] = field(default_factory=list)  # start and what it is like
    _end_ns: int = 0

    def note(self, start_ns: int, end_ns: int, state: str, *, used: int, live: int, samples_per_s: float = 0.0) -> None:
        """Add a stretch; one that is like the last prolongs it, stalls between them included."""
        key = (state, used, live, samples_per_s)
        if not self._stretches or key != self._stretches[-1][1]:
            self._stretches.append((start_ns, key))
        self._end_ns = end_ns

    def spans(self) -> tuple[Span, ...]:
        """All stretches, each up to the next."""
        ends = [start for start, _ in self._stretches[1:]] + [self._end_ns]
        return tuple(
            Span(
                start_s=start / NS,
                end_s=end / NS,
                state=state,
                used_nodes=used,
                live_nodes=live,
                samples_per_s=samples_per_s,
            )
            for (start, (state, used, live, samples_per_s)), end in zip(self._stretches, ends, strict=True)
        )
