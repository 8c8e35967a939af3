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
        if self.spans:
            last = self.spans[-1]
            if replace(last, start_s=span.start_s, end_s=span.end_s) == span:
                self.spans[-1] = replace(last, end_s=span.end_s)
                return
        self.spans.append(span)
