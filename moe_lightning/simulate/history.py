"""What happened in a simulation, for tables and pictures."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moe_lightning.simulate.failures import NS
from moe_lightning.simulate.scenario import Recovery, Span


@dataclass(kw_only=True)
class History:
    """Stretches of time, recoveries, and what training waited for besides."""

    spans: list[Span] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    stall_ns: int = 0
    rebalance_ns: int = 0
    _key: tuple[str, int, int, float] | None = None  # of the last stretch

    def note(self, start_ns: int, end_ns: int, state: str, *, used: int, live: int, samples_per_s: float = 0.0) -> None:
        """Add a stretch; one that is like the last prolongs it."""
        span = Span(
            start_s=start_ns / NS,
            end_s=end_ns / NS,
            state=state,
            used_nodes=used,
            live_nodes=live,
            samples_per_s=samples_per_s,
        )
        key = (state, used, live, samples_per_s)
        if key == self._key:
            span = replace(span, start_s=self.spans.pop().start_s)
        self.spans.append(span)
        self._key = key
