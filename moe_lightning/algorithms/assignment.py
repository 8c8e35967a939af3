"""The assignment problem: pair rows with columns at the least total cost."""

from __future__ import annotations

import numpy as np

from moe_lightning.arrays import IntArray

_FAR = np.iinfo(np.int64).max


def optimal_assignment(cost: IntArray) -> IntArray:
    """int64 [n]: the column of each row, at the least total cost, for int64 costs [n, n].

    Rows take columns at which they are cheapest, the lowest first, as long as there are any; the others are assigned by
    shortest augmenting paths with row and column prices (Jonker and Volgenant), O(n^3), vectorised over columns.
    Integer costs keep it exact.
    """
    n = len(cost)
    row_price = cost.min(axis=1)
    reduced = cost - row_price[:, None]
    column_price = reduced.min(axis=0)
    cheapest = reduced == column_price
    row_of, column_of = np.full(n, -1), np.full(n, -1)
    for row in range(n):
        (free,) = (cheapest[row] & (row_of < 0)).nonzero()
        if free.size:
            column_of[row], row_of[free[0]] = free[0], row
    for row in np.flatnonzero(column_of < 0).tolist():
        _augment(cost, row, row_price, column_price, row_of, column_of)
    return column_of


def _augment(
    cost: IntArray, root: int, row_price: IntArray, column_price: IntArray, row_of: IntArray, column_of: IntArray
) -> None:
    """Assign one more row along the path that raises the cost least; changes all but the cost."""
    distance = cost[root] - row_price[root] - column_price
    open_distance, before = distance.copy(), np.full(len(cost), root)
    visited = []
    while True:
        column = int(open_distance.argmin())
        length = distance[column]
        if row_of[column] < 0:
            break
        visited.append(column)
        open_distance[column] = _FAR
        row = row_of[column]
        through = cost[row] - column_price
        through += length - row_price[row]
        (closer,) = (through < distance).nonzero()  # no column that was visited is
        distance[closer] = open_distance[closer] = through[closer]
        before[closer] = row
    row_price[root] += length
    row_price[row_of[visited]] += length - distance[visited]
    column_price[visited] -= length - distance[visited]
    while True:  # flip the path back to the root
        row = before[column]
        row_of[column], column_of[row], column = row, column, column_of[row]
        if row == root:
            return


def greedy_assignment(cost: IntArray) -> IntArray:
    """int64 [n]: each row's column if the cheapest open pair is fixed again and again; ties lowest row, then column."""
    columns = np.full(len(cost), -1, dtype=np.int64)
    taken = np.zeros(len(cost), dtype=np.bool_)
    for index in np.argsort(cost, axis=None, kind="stable"):
        row, column = divmod(int(index), len(cost))
        if columns[row] < 0 and not taken[column]:
            columns[row], taken[column] = column, True
    return columns
