"""Whether snapshots in host memory survive failed nodes, and how long a cluster's parameters do (REFT 5).

REFT's eq. 5-6, with what its text mixes up set right: P_re is the chance that the snapshot processes survive, and
1 - P_s that a node fails. Sources: REFT 5, ALGORITHMS 7.2-7.7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from moe_lightning.errors import ConfigurationError

ProtectionKind = Literal["none", "parity", "copies"]


def snapshots_survive(failed: Sequence[bool], *, kind: ProtectionKind, group_size: int, copies: int = 1) -> bool:
    """Whether every failed node's snapshot can be restored from the others of its sharding group.

    Groups are blocks of consecutive nodes; a last block of one node joins the one before. Parity (AEC) restores one
    node of a group. With copies (ARC, shifts 1..copies) node i's snapshot is lost when i and its next `copies`
    neighbours in the ring all failed.

    Args:
        failed: of each node of the world.
        kind: of the protection; with "none" every failed node's snapshot is lost.
        group_size: nodes of a sharding group.
        copies: of each snapshot on other nodes.

    Raises:
        ConfigurationError: a group without neighbours.
    """
    if group_size < 2:
        raise ConfigurationError(f"group_size={group_size} leaves no other node to protect a snapshot: use at least 2")
    if not any(failed):
        return True
    if kind == "none" or len(failed) < 2:
        return False
    starts = list(range(0, len(failed), group_size))
    if len(failed) - starts[-1] == 1 and len(starts) > 1:
        starts.pop()
    for start, end in zip(starts, [*starts[1:], len(failed)], strict=True):
        group = list(failed[start:end])
        if kind == "parity" and sum(group) > 1:
            return False
        reach = min(copies, len(group) - 1)
        if kind == "copies" and any(
            all(group[(node + shift) % len(group)] for shift in range(reach + 1)) for node in range(len(group))
        ):
            return False
    return True


def node_survival(time: float, *, rate: float, shape: float) -> float:
    """exp(-rate * time^shape): a device or node has not failed until then (REFT 5)."""
    return math.exp(-rate * time**shape)


def protected_survival(time: float, *, devices: int, group_size: int, rate: float, shape: float) -> float:
    """Eq. 5 with P_re = 1: no group of `group_size` has lost more than one member."""
    alive = node_survival(time, rate=rate, shape=shape)
    group = alive**group_size + group_size * (1 - alive) * alive ** (group_size - 1)
    return float(group ** (devices / group_size))


def unprotected_survival(time: float, *, devices: int, rate: float, shape: float) -> float:
    """Eq. 6: no device has failed; the rate is that of hardware and software together."""
    return node_survival(time, rate=rate, shape=shape) ** devices


def time_to(threshold: float, survival: Callable[[float], float], *, longest: float = 1e6) -> float:
    """The time at which a falling survival curve passes a threshold, by bisection.

    Raises:
        ConfigurationError: a threshold that is no probability, or one not reached within `longest`.
    """
    if not 0 < threshold < 1 or survival(longest) > threshold:
        raise ConfigurationError(f"threshold={threshold} is not crossed before {longest}: use one between 0 and 1")
    low, high = 0.0, longest
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if survival(middle) > threshold else (low, middle)
    return low
