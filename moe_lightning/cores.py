"""CPU cores and memory that this process may use, which on a shared machine are less than it has."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_QUOTAS: tuple[tuple[Path, tuple[str, ...]], ...] = (
    (Path("/sys/fs/cgroup"), ("cpu.max",)),
    (Path("/sys/fs/cgroup/cpu"), ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
)
"""Root of the control groups, and a group's files with quota and period, of both versions."""


def usable_cores() -> int:
    """Return the number of cores that schedulers and control groups leave to this process, at least 1."""
    found = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for root, names in _QUOTAS:
        for group in _groups(root):
            with suppress(OSError, ValueError, ZeroDivisionError):  # not a group of this version, or "max": no quota
                quota, period = (int(word) for name in names for word in (group / name).read_text().split())
                if quota > 0:
                    found.append(quota // period)
    return max(1, min(found))


_CONTAINER = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Root of the control groups, and a group's files of limit and usage, of both versions."""
_OWN_GROUPS = Path("/proc/self/cgroup")


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Bytes that this machine can still give to processes, within the limits of their container or batch job."""
    known = [machine_memory()]
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        known.append(next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    for root, limit, usage in _CONTAINER:
        for group in _groups(root):
            with suppress(OSError, ValueError):  # not a group of this version, or "max": no limit
                used = int((group / usage).read_text()) - _file_cache(group / "memory.stat")
                known.append(int((group / limit).read_text()) - used)
    return max(0, min(known))


def _groups(root: Path) -> set[Path]:
    """Folders of the control groups that this process is in: a container's is the root, a batch job's lies below."""
    found = {root}
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            group = root / line.split(":", 2)[2].lstrip("/")
            found |= {group, *group.parents}
    return found


def _file_cache(path: Path) -> int:
    """Bytes of files that a container has in memory, and that make room for others."""
    found = dict(line.split() for line in path.read_text().splitlines())
    return sum(int(found.get(f"total_{name}", found.get(name, 0))) for name in ("inactive_file", "active_file"))
