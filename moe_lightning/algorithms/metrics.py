"""How even a division of work is, in the field's measures."""

from __future__ import annotations

import numpy as np

from moe_lightning.arrays import IntArray
from moe_lightning.dispatch.quota import Pace


def imbalance(rows: IntArray, speeds: IntArray | None = None) -> float:
    """Busiest rank over mean, 1 is perfect; rows are int64 [N]. Without any rows: 1.

    With speeds, int64 [N]: the longest time over that of a perfect division.
    """
    total, pace = int(rows.sum()), Pace.of(speeds, len(rows))
    return float(pace.times(rows).max()) * pace.total / (total * pace.fastest) if total else 1.0


def balance_ratio(before: IntArray, after: IntArray) -> float:
    """RB: standard deviation of the ranks' rows before balancing over that after it (Pro-Prophet VI).

    Infinite where the division after is perfect and the one before was not, 1 where both are.
    """
    spread_before, spread_after = float(np.std(before)), float(np.std(after))
    if spread_after == 0:
        return float("inf") if spread_before > 0 else 1.0
    return spread_before / spread_after
