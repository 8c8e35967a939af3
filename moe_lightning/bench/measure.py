"""Timing that survives a noisy machine: interleaved rounds, medians, ratios inside one run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved_medians(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2
) -> dict[str, float]:
    """Median seconds of each contender; they take turns, so that a slow spell of the machine hits all of them.

    Args:
        contenders: functions to time, each a whole measured unit of work.
        rounds: measurements of each.
        warmup: unmeasured calls of each before.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(warmup + rounds):
        for name, function in contenders.items():
            start = time.perf_counter()
            function()
            synchronize()
            if index >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def synchronize() -> None:
    """Wait for the accelerator, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> str:
    """One line that says where and how something was measured."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "unpinned"
    return f"{device}, torch {torch.__version__}, {torch.get_num_threads()} thread(s), cores {affinity}"
