"""How long a cluster's parameters survive, with and without protection (REFT 5).

REFT's eq. 5-6, with what its text mixes up set right: P_re is the chance that the snapshot processes survive, and
1 - P_s that a node fails. Source: REFT 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from moe_lightning.errors import ConfigurationError


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
