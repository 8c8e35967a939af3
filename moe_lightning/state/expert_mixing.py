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


def mixed_slots(value: Tensor, slots: tuple[int, ...], wanted: tuple[int, ...], table: NDArray[np.float64]) -> Tensor:
    """The same of the rows that a rank has: one for each of its slots, before and after.

    Args:
        value: [S, ...].
        slots: the old expert in each of them, -1 where vacant; all that `wanted` is made of are there.
        wanted: the new expert in each slot that there will be, -1 where vacant.
    """
    held = sorted(slot for slot, expert in enumerate(slots) if expert >= 0)
    held.sort(key=lambda slot: slots[slot])
    shares = np.zeros((len(wanted), len(held)))
    for slot, expert in enumerate(wanted):
        if expert >= 0:
            shares[slot] = table[expert, [slots[old] for old in held]]
    return mixed(value[held], shares) if held else value.new_zeros(len(wanted), *value.shape[1:])
