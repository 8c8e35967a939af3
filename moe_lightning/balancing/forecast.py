"""Forecast of loads, the rule for planning again, and measured speeds of ranks.

Routing is local in time: consecutive steps route alike, except at the start of training (Pro-Prophet IV-C).
`LoadForecast` and `ReplanRule` are deterministic state machines of integers and of numbers that all ranks share, so all
ranks agree without communication.

A rank keeps a running mean of the seconds that a unit of its work takes (`RateMeter`) and sends it to the others with
its standard error (`Reading`). All ranks receive the same integers and change a speed (`AgreedSpeeds`) only where a
reading differs by more than its noise explains, so that plans follow machines and not jitter.

Shapes: N ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_lightning.arrays import IntArray
from moe_lightning.config import Coefficient, PositiveInt, Probability, validated
from moe_lightning.dispatch.quota import ONE_SPEED

_WEIGHT_BITS = 16
_FRACTION_BITS = 8


@validated
class LoadForecast:
    """Exponential moving average of token counts, in fixed-point integers; with decay 0 simply the last observation.

    Args:
        decay: weight of the past; 0: the last step only.

    Attributes:
        average: in units of 1/256 token; None before the first observation.
    """

    def __init__(self, decay: Probability = 0.0) -> None:
        self._past = round(decay * (1 << _WEIGHT_BITS))
        self.average: IntArray | None = None

    def observe(self, tokens: IntArray) -> None:
        """Record the counts of one step, int64 of any shape, each below 2^31. Another shape starts afresh."""
        scaled = tokens.astype(np.int64) << _FRACTION_BITS
        if self.average is None or self.average.shape != scaled.shape:
            self.average = scaled
        else:
            self.average = (self.average * self._past + scaled * ((1 << _WEIGHT_BITS) - self._past)) >> _WEIGHT_BITS

    def predict(self) -> IntArray | None:
        """Expected counts of the next step, rounded; None before the first observation."""
        return None if self.average is None else (self.average + (1 << (_FRACTION_BITS - 1))) >> _FRACTION_BITS


@validated
class ReplanRule:
    """Rule of when to search for a fresh plan, and of when it replaces the current one.

    A fresh plan replaces the kept one when the kept one is predicted to be slower by more than `tolerance`; then the
    next search comes after one step. Every search that changes nothing doubles the interval, up to `max_interval`:
    dense while the routing drifts, nearly free once it has settled.

    Args:
        tolerance: relative slowness at which a kept plan is given up, 0.05 is 5 percent.
        max_interval: most steps between two searches.
    """

    def __init__(self, tolerance: Coefficient = 0.05, max_interval: PositiveInt = 32) -> None:
        self._tolerance, self._max_interval = tolerance, max_interval
        self._interval, self._wait = 1, 0

    def due(self) -> bool:
        """Count one step; whether a search is due in it."""
        self._wait -= 1
        if self._wait > 0:
            return False
        self._wait = self._interval
        return True

    def judge(self, current_s: float, fresh_s: float) -> bool:
        """Return True if the fresh plan replaces the current one, from their predicted seconds on the same tokens."""
        replace = current_s > fresh_s * (1 + self._tolerance)
        self._interval = 1 if replace else min(2 * self._interval, self._max_interval)
        self._wait = self._interval
        return replace


_MEMORY = 64
"""Steps that a mean remembers."""

_LEAST_STRAY = 0.05
"""A time strays that differs from the mean by this part and by a standard deviation; so many in a row on one side are
no noise but another speed."""
_STRAYS = 7

_MOST_STRAY = 1.5
"""A single time counts as at most this factor of the mean: pauses of garbage collectors are no speed."""

_ASSUMED_NOISE, _ASSUMED_STEPS = 0.2, 6
"""Relative deviation of a step's time, before steps have shown it, and how many of them it stands for."""

_LEAST_STEPS = 3
"""Measurements before a mean is reported."""

_LONGEST = 10**23
"""Femtoseconds of the slowest rate, 3 years."""

_CERTAIN, _LEAST_CHANGE = 4, 30
"""Standard errors that a change of speed must exceed, and thousandths."""


class RateMeter:
    """Seconds of a unit of work, from one measurement a step: a running mean that single pauses hardly move, and that
    starts afresh where the speed has changed.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._variance = _ASSUMED_NOISE**2
        self._steps = 0
        self._strays: list[float] = []
        self._side = 0

    def add(self, seconds: float) -> None:
        """Record a step's mean seconds of a unit; values that are not positive are ignored."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        if not self._steps:
            self._mean, self._steps = seconds, 1
            return
        ratio = seconds / self._mean
        stray = 1 + max(_LEAST_STRAY, math.sqrt(self._variance))
        side = (ratio > stray) - (ratio * stray < 1)
        self._strays = [*(self._strays if side == self._side else []), seconds] if side else []
        self._side = side
        if len(self._strays) >= _STRAYS:
            self._mean, self._steps, self._strays = statistics.median(self._strays), _STRAYS, []
            return
        deviation = min(max(ratio, 1 / _MOST_STRAY), _MOST_STRAY) - 1
        self._steps = min(self._steps + 1, _MEMORY)
        self._variance += (deviation**2 - self._variance) / (self._steps + _ASSUMED_STEPS)
        self._mean *= 1 + deviation / self._steps

    @property
    def reading(self) -> Reading:
        """Present estimate."""
        if self._steps < _LEAST_STEPS:
            return Reading()
        error = math.sqrt(self._variance / self._steps)
        return Reading(femtoseconds=max(1, round(min(self._mean * 1e15, _LONGEST))), error=math.ceil(1000 * error))


class Reading(NamedTuple):
    """Measured rate of a rank, with its error.

    Attributes:
        femtoseconds: of a unit of work; 0: nothing is known yet.
        error: standard error of that, in thousandths of it.
    """

    femtoseconds: int = 0
    error: int = 0


class AgreedSpeeds:
    """Speeds of all ranks as all ranks agree on them: the same readings give the same speeds.

    Args:
        node_of: node of each rank, [N].
        speeds: the first ones; None: equal ones.

    Attributes:
        speeds: int64 [N], ONE_SPEED is the median rank's.
    """

    def __init__(self, node_of: Sequence[int], speeds: IntArray | None = None) -> None:
        self._node_of = np.array(node_of)
        self.speeds: IntArray = np.full(len(node_of), ONE_SPEED) if speeds is None else speeds

    def update(self, readings: Sequence[Reading]) -> bool:
        """Follow the readings that differ from what is agreed by more than their noise; whether any does.

        Ranks that know nothing yet count as their node's others do, or else as the median.
        """
        # Python's integers: a second has 10^15 femtoseconds, and ONE_SPEED times 2.3 seconds are beyond int64.
        times = [reading.femtoseconds for reading in readings]
        measured = sorted((rank for rank, time in enumerate(times) if time), key=times.__getitem__)
        if not measured:
            return False
        middle = measured[(len(measured) - 1) // 2]
        # Beyond these limits a rank is ill, not slow or fast.
        least, most = ONE_SPEED // 64, 16 * ONE_SPEED
        found = np.array([min(max(ONE_SPEED * times[middle] // max(1, time), least), most) for time in times])
        known = np.array(times, dtype=np.bool_)
        for rank in np.flatnonzero(~known):
            neighbours = found[known & (self._node_of == self._node_of[rank])]
            found[rank] = int(neighbours.sum()) // len(neighbours) if len(neighbours) else ONE_SPEED
        errors = np.array([math.isqrt(reading.error**2 + readings[middle].error ** 2) for reading in readings])
        certain = np.abs(found - self.speeds) * 1000 > np.maximum(_CERTAIN * errors, _LEAST_CHANGE) * self.speeds
        self.speeds = np.where(certain, found, self.speeds)
        return bool(certain.any())
