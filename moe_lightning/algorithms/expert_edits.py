"""Experts that are pruned, merged and duplicated, as a table: which of the old experts each new one is made of.

Every tensor with a row for each expert, weights, router rows and moments, is multiplied by the same table, so that
they stay together. Rows of one old expert are copies to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from moe_lightning.config import NonNegativeInt, PositiveInt, validated
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


@validated
@dataclass(frozen=True, kw_only=True)
class ScheduledEdit:
    """An edit of a running training, by names of experts, or by rules for those that no name mentions.

    Attributes:
        step: optimizer steps after which it happens.
        layers: that it is for; None: all MoE layers.
        prune, merge, duplicate: see `ExpertEdit`.
        prune_least: so many experts with fewest tokens go.
        merge_similar: so many pairs with the most similar router rows (by the cosine) become one.
        duplicate_most: so many experts with most tokens get a copy.
    """

    step: PositiveInt
    layers: Sequence[NonNegativeInt] | None = None
    prune: Sequence[NonNegativeInt] = ()
    merge: Sequence[Sequence[NonNegativeInt]] = ()
    duplicate: Sequence[NonNegativeInt] = ()
    prune_least: NonNegativeInt = 0
    merge_similar: NonNegativeInt = 0
    duplicate_most: NonNegativeInt = 0

    @property
    def changes_nothing(self) -> bool:
        """Whether no expert of any layer is named, and no rule names one."""
        named = (self.prune, self.merge, self.duplicate, self.prune_least, self.merge_similar, self.duplicate_most)
        return not any(named) or (self.layers is not None and not self.layers)

    def resolved(self, loads_E: NDArray[np.int64], similarity_EE: NDArray[np.float64]) -> ExpertEdit:
        """The edit of one layer, rules in the order prune, merge, duplicate.

        Args:
            loads_E: tokens of each expert.
            similarity_EE: symmetric.

        Raises:
            ConfigurationError: the rules ask for more experts than are free.
        """
        named = {*self.prune, *self.duplicate, *(expert for group in self.merge for expert in group)}
        free = [expert for expert in range(len(loads_E)) if expert not in named]
        wanted = self.prune_least + 2 * self.merge_similar + self.duplicate_most
        if wanted > len(free):
            raise ConfigurationError(
                f"the rules of the edit after step {self.step} need {wanted} experts, and {len(free)} of "
                f"{len(loads_E)} are not named already: lower prune_least, merge_similar or duplicate_most"
            )
        least = [free[i] for i in least_loaded(loads_E[free], self.prune_least)]
        free = [expert for expert in free if expert not in least]
        pairs = []
        for _ in range(self.merge_similar):
            pairs.append(max(combinations(free, 2), key=lambda pair: (similarity_EE[pair], -pair[0], -pair[1])))
            free = [expert for expert in free if expert not in pairs[-1]]
        most = sorted(free, key=lambda expert: (-int(loads_E[expert]), expert))[: self.duplicate_most]
        return ExpertEdit(
            prune=(*self.prune, *least),
            merge=(*(tuple(group) for group in self.merge), *pairs),
            duplicate=(*self.duplicate, *most),
        )


def layer_edits(
    edits: Sequence[ScheduledEdit], loads_LE: NDArray[np.int64], similarity_LEE: NDArray[np.float64]
) -> list[ExpertEdit]:
    """The edit of every layer by those of one step.

    Raises:
        ConfigurationError: a layer that there is not, or more experts than are free.
    """
    found = []
    for edit in edits:
        for layer in edit.layers or ():
            if layer >= len(loads_LE):
                raise ConfigurationError(
                    f"the edit after step {edit.step} names layer {layer}: use 0 to {len(loads_LE) - 1}"
                )
    for layer, (loads_E, similarity_EE) in enumerate(zip(loads_LE, similarity_LEE, strict=True)):
        own = [edit for edit in edits if edit.layers is None or layer in edit.layers]
        together = ScheduledEdit(
            step=edits[0].step,
            prune=[expert for edit in own for expert in edit.prune],
            merge=[group for edit in own for group in edit.merge],
            duplicate=[expert for edit in own for expert in edit.duplicate],
            prune_least=sum(edit.prune_least for edit in own),
            merge_similar=sum(edit.merge_similar for edit in own),
            duplicate_most=sum(edit.duplicate_most for edit in own),
        )
        found.append(together.resolved(loads_E, similarity_EE))
    return found


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
