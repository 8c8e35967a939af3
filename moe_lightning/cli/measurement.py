"""Timing that survives a noisy machine: interleaved rounds, medians, ratios inside one run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch


def interleaved(contenders: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 0) -> dict[str, list[float]]:
    """What each contender returns in each round; they take turns, so that a slow spell of the machine hits all.

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


def synchronize() -> None:
    """Wait for the accelerator, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def medians_of(rows: Sequence[Mapping[str, Any]], *, but: Iterable[str] = ()) -> dict[str, float]:
    """The median of every figure over rows that all have it, those left out that are named."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0] if name not in but}


def goal(what: str, reached: float, most: float, form: str = "{:.2f}", note: str = "") -> str:
    """Whether what was reached is at most the goal, in a line."""
    verdict = "met   " if reached <= most else "missed"
    return f"{verdict}  {what}: {form.format(reached)}, goal at most {most:.2f}{note}"


def machine() -> str:
    """One line that says where and how something was measured."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "unpinned"
    return f"{device}, torch {torch.__version__}, {torch.get_num_threads()} thread(s), cores {affinity}"
