"""Builds process groups such that a member lost meanwhile is given up soon, and the next attempt works.

gloo waits for another rank's first connection without looking at anything else, five times as long as the group's
timeout. So groups are built with a short timeout, after all members have met in the store (a wait that can be cut),
and get the timeout of their collectives afterwards.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

_GLOO_PATIENCE = 5


def begin_building(store: Store, size: int, timeout_s: float) -> timedelta:
    """Wait until every member of a world has come to build its groups; the timeout to build them with.

    With it building ends within `timeout_s`, whoever is lost meanwhile. Give each group the timeout of its collectives
    with `set_collectives_timeout` afterwards.

    Args:
        store: under a prefix that is this world's alone.
        size: number of members, each of which calls this once.

    Raises:
        TimeoutError: not all came in time.
        RuntimeError: the store was cut.
    """
    assert not dist.is_initialized(), "destroy the former groups first"
    # torch names groups by a counter, which a failed attempt leaves different on different ranks
    dist.distributed_c10d._world.group_count = 0
    meet(store, "build their groups", size, timeout_s)
    return timedelta(seconds=timeout_s / _GLOO_PATIENCE)


def meet(store: Store, purpose: str, size: int, timeout_s: float) -> None:
    """Wait until so many ranks have come here.

    Args:
        store: a world's.
        purpose: what they come for, as words after "came to"; once in a world.

    Raises:
        TimeoutError: not all came in time.
        RuntimeError: the store was cut.
    """
    met, everybody = f"{purpose}: met", f"{purpose}: all"
    if store.add(met, 1) == size:
        store.set(everybody, "")
    try:
        store.wait([everybody], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        came = store.add(met, 0)
        raise TimeoutError(f"only {came} of {size} ranks came to {purpose} within {timeout_s:g} s") from None


def set_collectives_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Give a group that has been built the timeout of its collectives."""
    if {"cpu", "cuda"} & {device.type for device in group._device_types}:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    else:  # other devices' groups would keep the short one that they were built with, which that call only warns of
        group.set_timeout(timeout)
