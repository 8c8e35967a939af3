"""One line of the planner's benchmark, and how it is measured."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlannerRow:
    """One plan of all layers.

    Attributes:
        name: what was planned.
        ranks, experts, layers: how large.
        seconds: on the clock.
        processor_s: processor time of all threads, which other work on the machine lengthens less.
        peak_mib: memory that planning needed beside its inputs, at its peak.
        goal_s: what processor_s shall stay below; None where nothing is promised for this size.
    """

    name: str
    ranks: int
    experts: int
    layers: int
    seconds: float
    processor_s: float
    peak_mib: float
    goal_s: float | None = None


def measured(
    name: str, call: Callable[[], object], ranks: int, experts: int, layers: int, goal_s: float | None = None
) -> PlannerRow:
    """Time a call, then trace the memory of another."""
    began, processor = time.perf_counter(), time.process_time()
    call()
    seconds, processor_s = time.perf_counter() - began, time.process_time() - processor
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return PlannerRow(
        name=name,
        ranks=ranks,
        experts=experts,
        layers=layers,
        seconds=seconds,
        processor_s=processor_s,
        peak_mib=peak / 2**20,
        goal_s=goal_s,
    )
