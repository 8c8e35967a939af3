"""A world as the thread of one of its processes sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moe_lightning.elastic.membership import Members
from moe_lightning.elastic.probing import Endpoint


@dataclass(kw_only=True)
class Watch:
    """A world that this process is in.

    Attributes:
        has_settled: somebody in it had set up before it formed.
        probes: where the links to its other nodes are tried.
        cut: frees every operation that waits for a peer; None before the world is guarded.
        reason: why it broke; None while it holds.
        rating: how much the reason says: 1 an error, 2 a silent rank, 3 a launcher's word on a death.
        broken_at: when, on the thread's clock; None while it holds.
    """

    members: Members
    has_settled: bool
    probes: Mapping[str, Endpoint] = field(default_factory=dict)
    cut: Callable[[], None] | None = None
    reason: str | None = None
    rating: int = 0
    broken_at: float | None = None
