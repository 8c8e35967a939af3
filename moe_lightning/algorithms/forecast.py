"""Tomorrow's loads from yesterday's, and when a plan made from them deserves to be made again.

Routing is local in time: consecutive steps route alike, except at the start of training (Pro-Prophet IV-C). Both
classes are deterministic state machines of integers and of numbers that all ranks share, so all ranks agree without
talking.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from moe_lightning.arrays import IntArray
from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError

_WEIGHT_BITS = 16
_FRACTION_BITS = 8


class ForecastState(TypedDict):
    """State of a `LoadForecast`: its average in units of 1/256 token, or None before the first observation."""

    average: IntArray | None


@validated
class LoadForecast:
    """Exponential moving average of token counts, in fixed-point integers; with decay 0 simply the last observation.

    Args:
        decay: weight of the past, 0 <= decay < 1.

    Raises:
        ConfigurationError: decay outside that range.
    """

    def __init__(self, decay: float = 0.0) -> None:
        if not 0 <= decay < 1:
            raise ConfigurationError(f"decay={decay} is no weight of the past: use 0 (last step only) up to below 1")
        self._past = round(decay * (1 << _WEIGHT_BITS))
        self._average: IntArray | None = None

    def observe(self, tokens: IntArray) -> None:
        """Take in the counts of one step, int64 of any shape, each below 2^31. Another shape starts afresh."""
        scaled = tokens.astype(np.int64) << _FRACTION_BITS
        if self._average is None or self._average.shape != scaled.shape:
            self._average = scaled
        else:
            self._average = (self._average * self._past + scaled * ((1 << _WEIGHT_BITS) - self._past)) >> _WEIGHT_BITS

    def predict(self) -> IntArray | None:
        """Expected counts of the next step, rounded; None before the first observation."""
        return None if self._average is None else (self._average + (1 << (_FRACTION_BITS - 1))) >> _FRACTION_BITS

    def state_dict(self) -> ForecastState:
        return {"average": None if self._average is None else self._average.copy()}

    def load_state_dict(self, state: ForecastState) -> None:
        self._average = None if state["average"] is None else state["average"].copy()


class ReplanState(TypedDict):
    """State of a `ReplanRule`: steps between two searches now, and steps until the next one."""

    interval: int
    wait: int


@validated
class ReplanRule:
    """When to search for a fresh plan, and whether to take it.

    A fresh plan replaces the kept one when the kept one is predicted to be slower by more than `tolerance`; then the
    next search comes after one step. Every search that changes nothing doubles the interval, up to `max_interval`:
    dense while the routing drifts, nearly free once it has settled.

    Args:
        tolerance: relative slowness at which a kept plan is given up, 0.05 is 5 percent.
        max_interval: most steps between two searches.

    Raises:
        ConfigurationError: a negative tolerance, or an interval below 1.
    """

    def __init__(self, tolerance: float = 0.05, max_interval: int = 32) -> None:
        if tolerance < 0:
            raise ConfigurationError(f"tolerance={tolerance} would replace every plan by an equal one: use 0 or more")
        if max_interval < 1:
            raise ConfigurationError(f"max_interval={max_interval} is no number of steps: use at least 1")
        self._tolerance, self._max_interval = tolerance, max_interval
        self._interval, self._wait = 1, 0

    def due(self) -> bool:
        """Count one step; whether a search is due in it."""
        self._wait -= 1
        if self._wait > 0:
            return False
        self._wait = self._interval
        return True

    def judge(self, kept_s: float, fresh_s: float) -> bool:
        """Whether the fresh plan replaces the kept one, from their predicted seconds on the same tokens."""
        replace = kept_s > fresh_s * (1 + self._tolerance)
        self._interval = 1 if replace else min(2 * self._interval, self._max_interval)
        self._wait = self._interval
        return replace

    def state_dict(self) -> ReplanState:
        return {"interval": self._interval, "wait": self._wait}

    def load_state_dict(self, state: ReplanState) -> None:
        self._interval, self._wait = state["interval"], state["wait"]
