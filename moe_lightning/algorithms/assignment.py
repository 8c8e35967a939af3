"""The assignment problem: pair rows with columns at the least total cost."""

from __future__ import annotations

import numpy as np

from moe_lightning.algorithms.placement import IntArray


def optimal_assignment(cost: IntArray) -> IntArray:
    """int64 [n]: the column of each row, at the least total cost, for int64 costs [n, n].

    Shortest augmenting paths with row and column prices, O(n^3), the inner loop over columns vectorised. Integer costs
    keep it exact; ties fall to the lower column.
    """
    n = len(cost)
    row_price, column_price = np.zeros(n, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
    row_of = np.full(n + 1, -1)  # the row paired with each column; column n is the root of the search
    far = np.iinfo(np.int64).max
    for row in range(n):
        distance, previous = np.full(n, far), np.full(n, n)
        visited = np.zeros(n + 1, dtype=np.bool_)
        column, row_of[n] = n, row
        while row_of[column] >= 0:
            visited[column] = True
            here = row_of[column]
            open_columns = ~visited[:n]
            reduced = cost[here] - row_price[here] - column_price[:n]
            closer = open_columns & (reduced < distance)
            distance[closer], previous[closer] = reduced[closer], column
            following = int(np.argmin(np.where(open_columns, distance, far)))
            step = distance[following]
            row_price[row_of[visited]] += step
            column_price[visited] -= step
            distance[open_columns] -= step
            column = following
        while column != n:  # flip the path back to the root
            row_of[column], column = row_of[previous[column]], int(previous[column])
    columns = np.empty(n, dtype=np.int64)
    columns[row_of[:n]] = np.arange(n)
    return columns


def greedy_assignment(cost: IntArray) -> IntArray:
    """int64 [n]: each row's column if the cheapest open pair is fixed again and again; ties lowest row, then column."""
    columns = np.full(len(cost), -1, dtype=np.int64)
    taken = np.zeros(len(cost), dtype=np.bool_)
    for index in np.argsort(cost, axis=None, kind="stable"):
        row, column = divmod(int(index), len(cost))
        if columns[row] < 0 and not taken[column]:
            columns[row], taken[column] = column, True
    return columns
