"""Ranks whose losses or gradients differ from those of the others: their data are of another kind, or their device
computes wrong numbers.

Each rank keeps the losses of its last micro-batches, and the norms of some of its own dense gradients, before they are
summed over the ranks. Medians of these are compared: the data of the ranks differ from step to step, but hardly in the
median of many.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_lightning.elastic.worker import write_to_terminal
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.strategies.watch import LEAST_SPREAD, OwnNumbers, median_and_deviation

_FEWEST = 16
"""Numbers of a rank that are needed for a comparison."""

_FEWEST_RANKS = 3  # two that differ do not show which one is wrong
_LIMIT = 10.0  # spreads
_ERROR_OF_MEDIAN = math.sqrt(math.pi / 2)  # of normally distributed numbers, times their deviation over sqrt(count)


class RankMedian(NamedTuple):
    """Median of a rank's numbers.

    Attributes:
        median: of them.
        error: standard error of the median.
    """

    median: float
    error: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> RankMedian | None:
        """Return the median of finite numbers; None: there are too few."""
        if len(numbers) < _FEWEST:
            return None
        median, deviation = median_and_deviation(numbers)
        return cls(median, _ERROR_OF_MEDIAN * deviation / math.sqrt(len(numbers)))


class Outlier(NamedTuple):
    """A rank that differs from the others.

    Attributes:
        value: its median.
        usual: the median of the ranks' medians.
        most: difference from it that would not be reported.
    """

    rank: int
    value: float
    usual: float
    most: float


def outliers(ranks: Sequence[RankMedian | None], kinds: Sequence[Hashable]) -> list[Outlier]:
    """Return the ranks whose median differs by more than ten spreads from the median of all that are of their kind. The
    spread is the greatest of 1.4826 times the median absolute deviation over the ranks, the standard error of a rank's
    median, and 1 %.

    Args:
        ranks: by rank; None has no numbers.
        kinds: by rank; those of unlike kinds are not compared.

    >>> outliers([RankMedian(2.0, 0.01), RankMedian(2.01, 0.01), RankMedian(2.5, 0.01)], [0, 0, 0])[0].rank
    2
    """
    found = []
    for kind in dict.fromkeys(kinds):
        of_kind = {
            rank: own
            for rank, (own, its) in enumerate(zip(ranks, kinds, strict=True))
            if own is not None and its == kind
        }
        if len(of_kind) < _FEWEST_RANKS:
            continue
        usual, deviation = median_and_deviation([own.median for own in of_kind.values()])
        error = statistics.median(own.error for own in of_kind.values())
        shared = max(deviation, error, LEAST_SPREAD * abs(usual))
        for rank, own in of_kind.items():
            most = _LIMIT * max(shared, own.error)
            if abs(own.median - usual) > most:
                found.append(Outlier(rank, own.median, usual, most))
    return found


class RankComparison:
    """Comparison of this rank's numbers with those of the others."""

    def __init__(self) -> None:
        self._reported: set[tuple[int, int, str]] = set()

    def compare(self, own: OwnNumbers, world: World) -> None:
        """Report each rank of a world that differs from the others once, on rank 0; collective."""
        numbers = {"median loss": own.losses, "median norm of its own gradients": own.norms}
        axes = [axis for axis in world.shape.axes if axis != "dp"]
        message = {
            "kind": [own.count, *(world.shape.index(world.rank, axis) for axis in axes)],
            **{what: _median_of(known) for what, known in numbers.items()},
        }
        found = all_gather_json(message, world)
        for what in numbers:
            medians = [None if each[what] is None else RankMedian(*each[what]) for each in found]
            for outlier in outliers(medians, [tuple(each["kind"]) for each in found]):
                key = (world.generation, outlier.rank, what)
                if world.rank == 0 and key not in self._reported:
                    write_to_terminal(f"warning: {_sentence(what, outlier)}")
                self._reported.add(key)


def _median_of(numbers: Collection[Tensor]) -> RankMedian | None:
    known = torch.stack([*numbers]).tolist() if numbers else []
    return RankMedian.of([number for number in known if math.isfinite(number)])


def _sentence(what: str, outlier: Outlier) -> str:
    return (
        f"rank {outlier.rank} has a {what} of {outlier.value:.4g}, that of ranks with as many samples is "
        f"{outlier.usual:.4g} (within {outlier.most:.2g}): if its data are not of another kind, its device may compute "
        "wrong numbers; strategy.check_arithmetic_every=1 would find that"
    )
