"""Integer arrays: tables of experts and ranks as lists of entries, contiguous parts of a range.

Tables of experts and ranks as lists of their entries.

Thousands of ranks with a few slots each leave a table [experts, ranks] nearly empty: what is done for every entry of
the list instead of every cell of the table takes time and memory that grow with the slots only.

Shapes: E experts, N ranks, P pairs.

Contiguous parts of range(total) whose sizes differ by at most one, the larger ones first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """Pairs of an expert and a rank that holds it, by expert and then by rank.

    Attributes:
        experts, ranks: int64 [P], of each pair.
        replicas: int64 [P], how many replicas of the expert the rank holds, at least 1.
        shape: experts and ranks of the whole table.
    """

    experts: IntArray
    ranks: IntArray
    replicas: IntArray
    shape: tuple[int, int]

    @classmethod
    def of_table(cls, replicas: IntArray | NDArray[np.bool_]) -> Pairs:
        """The entries above 0 of int64 [E, N]; one replica each of bool [E, N]."""
        cells = np.flatnonzero(replicas if replicas.dtype == np.bool_ else replicas != 0)
        experts, ranks = np.divmod(cells, replicas.shape[1])
        counts = replicas.reshape(-1)[cells].astype(np.int64, copy=False)
        return cls(experts=experts, ranks=ranks, replicas=counts, shape=replicas.shape)

    @classmethod
    def of_replicas(cls, experts: IntArray, ranks: IntArray, shape: tuple[int, int]) -> Pairs:
        """From the expert and the rank of every replica, int64 [replicas] each, in any order."""
        cells, counts = np.unique(experts * shape[1] + ranks, return_counts=True)
        return cls(experts=cells // shape[1], ranks=cells % shape[1], replicas=counts, shape=shape)

    def joined(self, others: NDArray[np.bool_]) -> Pairs:
        """With one replica more wherever bool [E, N] says so, where there is none so far."""
        held = others.copy()
        held[self.experts, self.ranks] = True
        cells = np.flatnonzero(held)
        replicas = np.ones(len(cells), dtype=np.int64)
        replicas[np.searchsorted(cells, self.experts * self.shape[1] + self.ranks)] = self.replicas
        experts, ranks = np.divmod(cells, self.shape[1])
        return Pairs(experts=experts, ranks=ranks, replicas=replicas, shape=self.shape)

    def table(self) -> IntArray:
        """int64 [E, N]: replicas of each expert on each rank."""
        return self.dense(self.replicas)

    def dense(self, values: IntArray) -> IntArray:
        """int64 [E, N] with int64 [P] values at the pairs, 0 elsewhere."""
        table = np.zeros(self.shape, dtype=np.int64)
        table[self.experts, self.ranks] = values
        return table

    @cached_property
    def starts(self) -> IntArray:
        """int64 [E + 1]: the first pair of each expert, and how many pairs there are."""
        return np.searchsorted(self.experts, np.arange(self.shape[0] + 1))

    @cached_property
    def num_holders(self) -> IntArray:
        """int64 [E]: ranks that hold each expert."""
        return np.diff(self.starts)

    def on_ranks(self, values: IntArray) -> IntArray:
        """int64 [N]: int64 [P] values summed over each rank's pairs; exact below 2^53."""
        return np.bincount(self.ranks, weights=values, minlength=self.shape[1]).astype(np.int64)


def cut(total: int, parts: int) -> tuple[int, ...]:
    """The boundaries [parts + 1] of all parts."""
    size, larger = divmod(total, parts)
    return tuple(index * size + min(index, larger) for index in range(parts + 1))
