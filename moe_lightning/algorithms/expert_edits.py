"""Experts that are pruned, merged and duplicated, as a table: which of the old experts each new one is made of.

Every tensor with a row for each expert, weights, router rows and moments, is multiplied by the same table, so that
they stay together. Rows of one old expert are copies to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ExpertEdit:
    """What becomes of one layer's experts. The order: those that stay, a merged one in the place of its first part;
    then the copies.

    Attributes:
        prune: experts that go.
        merge: groups of experts that become one.
        duplicate: experts that get a copy, as often as they are named.
    """

    prune: tuple[int, ...] = ()
    merge: tuple[tuple[int, ...], ...] = ()
    duplicate: tuple[int, ...] = ()

    def table(self, loads_E: NDArray[np.int64]) -> NDArray[np.float64]:
        """Shares [new experts, E] of the old experts in each new one; rows add up to 1.

        Args:
            loads_E: tokens of each expert, in proportion to which merged experts count; all zeros means equally.

        Raises:
            ConfigurationError: an expert that there is not, one in two places, or none left.
        """
        num_experts = len(loads_E)
        merged = [expert for group in self.merge for expert in group]
        used = [*self.prune, *merged]
        for expert in (*used, *self.duplicate):
            if not 0 <= expert < num_experts:
                raise ConfigurationError(f"expert {expert} is not in the layer: name some of 0 to {num_experts - 1}")
        for expert in used:
            if used.count(expert) > 1 or (expert in self.prune and expert in self.duplicate):
                raise ConfigurationError(f"expert {expert} is named twice: prune it, or merge it, or duplicate it")
        if any(len(group) < 2 for group in self.merge):
            raise ConfigurationError(f"merging {self.merge} needs two experts at least in each group, such as 0+3")
        group_of = {group[0]: group for group in self.merge}
        gone = {*self.prune, *merged} - set(group_of)
        rows = [_shares(group_of.get(e, (e,)), loads_E) for e in range(num_experts) if e not in gone]
        rows += [_shares((e,), loads_E) for e in self.duplicate]
        if len(rows) == 0:
            raise ConfigurationError(f"pruning all {num_experts} experts leaves none: keep one at least")
        return np.stack(rows)


def edit_tables(
    edits: Sequence[ExpertEdit], num_experts: int, loads_LE: NDArray[np.int64] | None, *, fold: int = 1
) -> list[NDArray[np.float64]]:
    """The table of each layer, see `ExpertEdit.table`; all of them have equally many rows.

    Args:
        edits: one for each layer.
        num_experts: E, before.
        loads_LE: tokens of each expert; None: merged experts count equally.
        fold: rows of all tables are there this many times.

    Raises:
        ConfigurationError: an edit that cannot be, loads of other sizes, or layers that would differ.
    """
    if loads_LE is None:
        loads_LE = np.zeros((len(edits), num_experts), dtype=np.int64)
    if loads_LE.shape != (len(edits), num_experts):
        raise ConfigurationError(
            f"the loads are of {loads_LE.shape} (layers, experts), the checkpoint has {(len(edits), num_experts)}: "
            "give those of its own run"
        )
    tables = [np.tile(edit.table(loads_E), (fold, 1)) for edit, loads_E in zip(edits, loads_LE, strict=True)]
    sizes = {len(table) for table in tables}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"the layers would have {sorted(sizes)} experts: edit them so that all have equally many"
        )
    return tables


def least_loaded(loads_E: NDArray[np.int64], count: int) -> tuple[int, ...]:
    """The experts with fewest tokens, those of lower number first among equals, ascending."""
    return tuple(sorted(np.argsort(loads_E, kind="stable")[:count].tolist()))


def _shares(experts: Sequence[int], loads_E: NDArray[np.int64]) -> NDArray[np.float64]:
    row = np.zeros(len(loads_E))
    weights = loads_E[list(experts)].astype(np.float64)
    row[list(experts)] = weights / weights.sum() if weights.any() else 1 / len(experts)
    return row
