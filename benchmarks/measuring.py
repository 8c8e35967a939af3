"""Measurements in interleaved rounds, their medians, and goals.

Contenders take turns and are compared by ratios inside one run, so that noise of the machine affects all alike.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from moe_lightning.cli.short_training import synchronize


def interleaved(contenders: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 0) -> dict[str, list[float]]:
    """Run the contenders in turns and return the results of each by round; so a slow spell of the machine affects all.

    Args:
        contenders: functions that measure a whole unit of work.
        rounds: measurements of each.
        warmup: calls of each before, which do not count.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(warmup + rounds):
        for name, measure in contenders.items():
            found[name].append(measure())
    return {name: values[warmup:] for name, values in found.items()}


def interleaved_medians(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2
) -> dict[str, float]:
    """Median seconds that each contender takes, in turns."""
    seconds = interleaved({name: partial(timed, call) for name, call in contenders.items()}, rounds, warmup)
    return {name: statistics.median(values) for name, values in seconds.items()}


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call, until the accelerator has done it."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def medians_of(rows: Sequence[Mapping[str, Any]], *, but: Iterable[str] = ()) -> dict[str, float]:
    """The median of every figure over rows that all have it, those left out that are named."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0] if name not in but}


def goal(what: str, reached: float, most: float, form: str = "{:.2f}", note: str = "") -> str:
    """Return a line that says whether a value is at most its goal."""
    verdict = "met   " if reached <= most else "missed"
    return f"{verdict}  {what}: {form.format(reached)}, goal at most {most:.2f}{note}"


def own_cores(num_ranks: int) -> list[int]:
    """A core for each rank; empty where this process may use fewer, or cores cannot be chosen."""
    cores = sorted(os.sched_getaffinity(0))[:num_ranks] if hasattr(os, "sched_setaffinity") else []
    return cores if len(cores) == num_ranks else []


def pinning(cores: Sequence[int]) -> str:
    """In words, where the ranks run."""
    return f"pinned to cores {list(cores)}" if cores else "not pinned: too few cores"
