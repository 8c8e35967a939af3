"""How fast ranks are, in integers that all ranks know, and what loads and shares follow from them.

A speed is a fixed-point number with the unit `ONE_SPEED`; only ratios matter. A rank's *time* is its load at the speed
of the fastest rank: with equal speeds times are loads, and everything here gives the integers of ranks that nobody has
timed.

Shapes: N ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_lightning.arrays import IntArray
from moe_lightning.errors import ConfigurationError

ONE_SPEED = 1 << 12
"""Fixed-point unit of a speed."""

SPEED_RANGE = 64
"""The fastest rank counts as at most so many times as fast as the slowest: one beyond that is ill, not slow."""

_TIME_BITS = 24
"""Of fractions of the time of a unit."""


def given_speeds(speeds: Sequence[float] | IntArray, num_ranks: int, name: str = "speeds") -> IntArray:
    """int64 [N] from relative speeds that somebody gives, the fastest ONE_SPEED.

    Args:
        speeds: [N], positive; any unit.
        num_ranks: N.
        name: what to call them in a message.

    Raises:
        ConfigurationError: another number of them, or one that is not positive and finite.
    """
    if len(speeds) != num_ranks or not num_ranks:
        raise ConfigurationError(f"{name} lists {len(speeds)} speeds for {num_ranks} ranks: give one for each")
    for rank, speed in enumerate(speeds):
        if not (math.isfinite(speed) and speed > 0):
            raise ConfigurationError(
                f"{name} gives rank {rank} the speed {speed}: use positive numbers, such as 0.5 for half of the others'"
            )
    rates = np.array(speeds, dtype=np.float64)
    return _in_range(np.rint(ONE_SPEED * (rates / rates.max())).astype(np.int64))


def speeds_in_proportion(rates: NDArray[np.float64]) -> IntArray | None:
    """int64 [N] from positive rates float64 [N], such as rows in a second; None where they are all the same."""
    return uneven(_in_range(np.rint(ONE_SPEED * (rates / rates.max())).astype(np.int64)))


def _in_range(speeds: IntArray) -> IntArray:
    return np.maximum(speeds, -(-int(speeds.max()) // SPEED_RANGE))


def uneven(speeds: IntArray | None) -> IntArray | None:
    """The speeds, or None where they are all the same."""
    return None if speeds is None or (speeds == speeds[0]).all() else speeds


@dataclass(frozen=True, kw_only=True, eq=False)
class Pace:
    """Times of loads, and loads of times; loads are below 2^46, so that their products with speeds fit into int64.

    Attributes:
        speeds: int64 [N]; all 1 where ranks are equally fast.
        is_even: whether they are.
    """

    speeds: IntArray
    is_even: bool

    @classmethod
    def of(cls, speeds: IntArray | None, num_ranks: int) -> Pace:
        """Of int64 [N] speeds, each from 1 to 2^16; None: all the same.

        Raises:
            ConfigurationError: speeds of another number of ranks, or outside of that range.
        """
        if speeds is None:
            return cls(speeds=np.ones(num_ranks, dtype=np.int64), is_even=True)
        if len(speeds) != num_ranks or speeds.dtype.kind != "i" or speeds.min() < 1 or speeds.max() > 1 << 16:
            raise ConfigurationError(
                f"speeds {speeds.tolist()} do not fit {num_ranks} ranks: give an integer from 1 to 65536 for each"
            )
        if uneven(speeds) is None:
            return cls.of(None, num_ranks)
        return cls(speeds=speeds.astype(np.int64), is_even=False)

    @cached_property
    def fastest(self) -> int:
        """The speed in which times are told."""
        return int(self.speeds.max())

    @cached_property
    def total(self) -> int:
        """Of all ranks together."""
        return int(self.speeds.sum())

    def times(self, load: IntArray) -> IntArray:
        """int64 [..., N] of loads int64 [..., N], rounded up."""
        return load if self.is_even else -(-load * self.fastest // self.speeds)

    def time(self, rank: int, load: int) -> int:
        """Of one rank."""
        return -(-load * self.fastest // int(self.speeds[rank]))

    def loads(self, time: int) -> list[int]:
        """[N]: the most that each rank can carry in a time."""
        return [time] * len(self.speeds) if self.is_even else (time * self.speeds // self.fastest).tolist()

    def least_time(self, load: int, ranks: Sequence[int] | None = None) -> int:
        """In which some ranks, or all, can carry a load that may be shared out among them in whole tokens."""
        if self.is_even:
            return -(-load // (len(self.speeds) if ranks is None else len(ranks)))
        speeds = self.speeds if ranks is None else self.speeds[list(ranks)]
        total = int(speeds.sum())
        low, high = -(-load * self.fastest // total), -(-(load + len(speeds)) * self.fastest // total)
        while low < high:
            middle = (low + high) // 2
            if int((middle * speeds // self.fastest).sum()) < load:
                low = middle + 1
            else:
                high = middle
        return low


def shares(total: int, speeds: IntArray, most: int | None = None) -> IntArray:
    """int64 [N]: a whole number of units for each rank, so that the longest time is as short as it can be.

    Args:
        total: units to share out.
        speeds: int64 [N].
        most: units of a rank; an even share is allowed in any case. None: twice that. Where there are enough, every
            rank gets one.
    """
    num_ranks = len(speeds)
    least, even = min(1, total // num_ranks), -(-total // num_ranks)
    most = 2 * even if most is None else max(most, even)

    low, high = 0, -(-(total << _TIME_BITS) // int(speeds.min()))
    fits = high * int(speeds.max()) < 1 << 63
    rates = speeds if fits else speeds.astype(np.object_)  # Python's integers

    def within(time: int) -> IntArray:
        units: IntArray = np.clip(time * rates >> _TIME_BITS, least, most)
        return units

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if int(within(middle).sum()) >= total else (middle + 1, high)
    units = within(low)
    for rank in np.argsort((units << _TIME_BITS) // rates, kind="stable")[::-1]:  # who is last gets one less
        if int(units.sum()) > total and units[rank] > least:
            units[rank] -= 1
    assert int(units.sum()) == total
    return units.astype(np.int64, copy=False)
