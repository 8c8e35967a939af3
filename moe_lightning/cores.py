"""CPU cores that this process may use, which on a shared machine are fewer than it has."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Files with the quota and the period of a container's control group, of both versions."""


def usable_cores() -> int:
    """Return the number of cores that schedulers and the container leave to this process, at least 1."""
    found = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for files in _QUOTAS:
        with suppress(OSError, ValueError, ZeroDivisionError):  # "max": no quota
            quota, period = (int(word) for path in files for word in Path(path).read_text().split())
            if quota > 0:
                found.append(quota // period)
    return max(1, min(found))
