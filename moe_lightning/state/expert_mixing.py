"""Experts made of others: the rows of a stack, whatever they hold, multiplied by a table of shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def mixed(value: Tensor, table: NDArray[np.float64]) -> Tensor:
    """Rows [new experts, ...] of a tensor [E, ...]: copies of single rows, or sums in double precision, in the order of
    the experts; zeros without a share. Tensors without a row for each expert stay.

    Args:
        table: shares [new experts, E], see `algorithms.expert_edits`.
    """
    if value.shape[:1] != (table.shape[1],):
        return value
    rows = value.new_zeros(len(table), *value.shape[1:])
    for row, shares in zip(rows, table, strict=True):
        parts = np.flatnonzero(shares).tolist()
        if len(parts) == 1:
            row.copy_(value[parts[0]])
        elif parts:
            row.copy_(sum(value[e].double() * float(shares[e]) for e in parts))
    return rows
