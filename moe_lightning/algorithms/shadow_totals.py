"""What copies of experts add up to on every rank while a search moves one expert after the other.

Shapes: R searches side by side, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_lightning.algorithms.performance_model import ONE_COPY, TransferMethod
from moe_lightning.arrays import BoolArray, IntArray


class CopyTotals:
    """`total_copies` of the experts moved so far, in units of 1 / ONE_COPY.

    Args:
        num_searches: R at the start.
        num_ranks: N.
        transfer: see `TransferMethod`.
    """

    def __init__(self, num_searches: int, num_ranks: int, transfer: TransferMethod) -> None:
        self._transfer = transfer
        self._from_home = np.zeros((num_searches, num_ranks), dtype=np.int64)
        self._to_shadows = np.zeros((2 if transfer == "scatter" else 1, num_searches, num_ranks), dtype=np.int64)

    @property
    def phases(self) -> Sequence[Sequence[IntArray]]:
        """For each phase of Trans, int64 [R, N]: what ranks send and receive; one table where that is the same."""
        if self._transfer == "average":
            return ((self._from_home,),)
        sent, received = self._from_home, self._to_shadows[0]
        return ((sent, received), (self._to_shadows[1],)) if self._transfer == "scatter" else ((sent, received),)

    def keep(self, goes_on: BoolArray) -> None:
        """Forget the searches where bool [R] is false."""
        self._from_home, self._to_shadows = self._from_home[goes_on], self._to_shadows[:, goes_on]

    def add(self, shadows: IntArray, homes: IntArray, count: IntArray) -> None:
        """Count one more expert in each search.

        Args:
            shadows: int64 [R, N], 1 where it goes.
            homes: int64 [R], the rank that sends it.
            count: int64 [R], how many shadows it gets, at least 1.
        """
        searches = np.arange(len(homes))
        if self._transfer == "average":
            self._from_home += (ONE_COPY * (count + 1) // shadows.shape[1])[:, None]
        elif self._transfer == "direct":
            self._from_home[searches, homes] += ONE_COPY * count
            self._to_shadows += shadows * ONE_COPY
        else:
            piece = ONE_COPY // count
            self._from_home[searches, homes] += ONE_COPY
            self._to_shadows += np.stack([piece, ONE_COPY - piece])[:, :, None] * shadows
