"""The moves of the greedy search for shadows, for all numbers n of skipped ranks at once.

A move copies an expert to all ranks that lack it but the n with fewest of its tokens. It changes the rank totals that
the performance model needs by an amount that does not depend on the moves before it, so a move costs a few operations
on [B, N], and nothing is tabulated for experts that never move.

Shapes: B values of n, E experts, N ranks, H holders of an expert, S most experts on a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_lightning.algorithms.performance_model import (
    BlockCosts,
    BlockTimes,
    BoolArray,
    FloatArray,
    copy_volumes,
    least_times,
    pair_volumes,
    predict_block,
    total_copies,
)
from moe_lightning.algorithms.placement import IntArray, Placement
from moe_lightning.algorithms.quota import balanced_quota
from moe_lightning.algorithms.shadows import ShadowPlan, choose_homes


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """A layer's expected tokens int64 [E, N] on its residents, and what follows from them."""

    tokens: IntArray
    placement: Placement

    @cached_property
    def load(self) -> IntArray:
        """int64 [E]."""
        load: IntArray = self.tokens.sum(axis=1)
        return load

    @cached_property
    def homes(self) -> IntArray:
        """int64 [E], see `choose_homes`."""
        return choose_homes(self.placement, self.load)

    @cached_property
    def pairs(self) -> tuple[IntArray, IntArray, IntArray]:
        """int64 [pairs] each: expert, rank and quota of every resident, by expert and then by rank."""
        experts, ranks = np.divmod(np.flatnonzero(self.placement.replicas != 0), self.placement.num_ranks)
        return experts, ranks, balanced_quota(self.load, self.placement.replicas)[experts, ranks]

    @cached_property
    def holders(self) -> list[tuple[IntArray, IntArray]]:
        """Of each expert, int64 [H] each: the ranks that hold it, ascending, and their quotas."""
        experts, ranks, quotas = self.pairs
        cuts = np.searchsorted(experts, np.arange(1, len(self.load)))
        return list(zip(np.split(ranks, cuts), np.split(quotas, cuts), strict=True))

    @cached_property
    def residents(self) -> tuple[IntArray, IntArray]:
        """int64 [N, S] each: the experts of every rank, ascending, and their quotas; padded with quotas of 0."""
        order = np.argsort(self.pairs[1], kind="stable")
        experts, ranks, quotas = (column[order] for column in self.pairs)
        slot = np.arange(len(ranks)) - np.searchsorted(ranks, ranks)
        tables = np.zeros((2, self.placement.num_ranks, int(slot.max()) + 1), dtype=np.int64)
        tables[:, ranks, slot] = experts, quotas
        return tables[0], tables[1]


class GreedyMoves:
    """For every n, the experts that are moved one after the other, and the number of moves with the least time.

    Args:
        layer: what is planned for.
        costs: constants of the performance model.
        values_B: int64 [B], the n.
        scheduled: whether Trans and Agg run under computations.

    Attributes:
        unmoved_s: predicted seconds without shadows.
        best_s: float64 [B], the least predicted seconds of each n so far.
        best_BE: bool [B, E], the experts that were moved then.
    """

    def __init__(self, layer: Layer, costs: BlockCosts, values_B: IntArray, scheduled: bool) -> None:
        self._layer, self._costs, self._scheduled, self._values = layer, costs, scheduled, values_B
        num_values, (num_experts, num_ranks) = len(values_B), layer.tokens.shape
        self._num_rows = int(layer.load.sum())
        self._volumes = np.repeat(pair_volumes(layer.tokens, *layer.pairs)[None], num_values, axis=0)
        nobody = np.zeros((num_values, 1, num_ranks), dtype=np.bool_)
        self._copies = copy_volumes(nobody, layer.homes[:1], costs.transfer)[:, 0]
        lacking = num_ranks - np.array([len(ranks) for ranks, _ in layer.holders])
        self._targets = np.maximum(lacking - values_B[:, None], 0)  # [B, E], ranks that a moved expert is copied to
        self._moved = np.zeros((num_values, num_experts), dtype=np.bool_)
        self._rows = np.arange(num_values)  # which n the volumes and copies are of
        self._positions: dict[int, IntArray] = {}
        self.best_BE = self._moved.copy()
        self.best_s = self._predict().total_s
        self.unmoved_s = self.best_s[0]

    def make(self, alpha: float) -> None:
        """Relieve the busiest rank of its heaviest unused expert, until the loads differ by less than alpha times their
        mean, that rank has none, or the copies alone take longer than the best plan."""
        residents, quotas = self._layer.residents
        limit = alpha * self._num_rows / len(residents)
        while self._rows.size:
            computed = self._volumes[:, 0]
            busiest = computed.argmax(axis=1)
            rows, experts = self._rows[:, None], residents[busiest]
            useless = self._moved[rows, experts] | (self._targets[rows, experts] == 0)
            relief = np.where(useless, 0, quotas[busiest])
            slot = relief.argmax(axis=1)
            index = np.arange(len(slot))
            goes_on = (computed.max(axis=1) - computed.min(axis=1) >= limit) & (relief[index, slot] > 0)
            self._keep(goes_on)
            self._move(experts[index, slot][goes_on])
            times = self._predict()
            better = times.total_s < self.best_s[self._rows]
            self.best_s[self._rows[better]] = times.total_s[better]
            self.best_BE[self._rows[better]] = self._moved[self._rows[better]]
            self._keep(self._least_s(times) < self.best_s[self._rows])

    def _keep(self, goes_on: BoolArray) -> None:
        """Go on with these searches [rows] only."""
        if not goes_on.all():
            self._rows = self._rows[goes_on]
            self._volumes, self._copies = self._volumes[goes_on], self._copies[goes_on]

    def shadows(self, index: int) -> BoolArray:
        """bool [E, N]: the best plan of the n with this index."""
        shadows = np.zeros(self._layer.tokens.shape, dtype=np.bool_)
        for expert in np.flatnonzero(self.best_BE[index]).tolist():
            shadows[expert] = self._shadows(expert, self._values[index : index + 1])[0]
        return shadows

    @property
    def num_copies(self) -> IntArray:
        """int64 [B]: shadows in the best plan of each n."""
        copies: IntArray = (self._targets * self.best_BE).sum(axis=1)
        return copies

    def least_s(self, plan: ShadowPlan) -> float:
        """Seconds that the copies of this plan take at least, however its holders share the tokens."""
        copies = total_copies(plan.shadows, plan.homes, self._costs.transfer)
        unmoved = pair_volumes(self._layer.tokens, *self._layer.pairs)
        return float(self._least_s(predict_block(unmoved, copies, self._costs, self._scheduled)))

    # ------------------------------------------------------------------ one move

    def _move(self, experts: IntArray) -> None:
        """Move an expert int64 [rows] in each search: its shadows keep their ranks' tokens, residents share the rest in
        proportion to what they had."""
        if not experts.size:
            return
        layer, values = self._layer, self._values[self._rows]
        kept = np.empty((len(experts), layer.tokens.shape[1]), dtype=np.int64)
        shadows = np.empty(kept.shape, dtype=np.bool_)
        chosen = np.unique(experts).tolist()
        for expert in chosen:
            same = experts == expert if len(chosen) > 1 else slice(None)
            shadows[same] = self._shadows(expert, values[same])
            kept[same] = layer.tokens[expert] * shadows[same]
        self._volumes[:, 0] += kept
        self._volumes[:, 1] -= kept
        if self._costs.expert_s:  # else nobody asks for how many experts a rank computes
            self._volumes[:, 3] += kept > 0
        for expert in chosen:
            rows = np.flatnonzero(experts == expert)
            self._share_rest(expert, rows, layer.load[expert] - kept[rows].sum(axis=1))
        self._copies += copy_volumes(shadows[:, None], layer.homes[experts][:, None], self._costs.transfer)[:, 0]
        self._moved[self._rows, experts] = True

    def _share_rest(self, expert: int, rows: IntArray, rest: IntArray) -> None:
        """Give the residents of an expert int64 [rows] of its tokens instead of all."""
        holders, before = self._layer.holders[expert]
        own, load, upto = self._layer.tokens[expert, holders], self._layer.load[expert], np.cumsum(before)
        after = rest[:, None] * upto // load - rest[:, None] * (upto - before) // load
        change = [
            after - before,
            np.maximum(own - after, 0) - np.maximum(own - before, 0),
            np.maximum(after - own, 0) - np.maximum(before - own, 0),
            (after > 0).astype(np.int64) - (before > 0),
        ]
        self._volumes[rows[:, None], :, holders] += np.stack(change, axis=-1)

    def _shadows(self, expert: int, values_R: IntArray) -> BoolArray:
        """bool [R, N]: where an expert goes if it is moved."""
        if expert not in self._positions:
            holders, _ = self._layer.holders[expert]
            tokens = self._layer.tokens[expert].copy()
            tokens[holders] = np.iinfo(np.int64).max  # residents come last
            position = np.empty_like(tokens)
            position[np.argsort(tokens, kind="stable")] = np.arange(len(tokens))
            position[holders] = -1
            self._positions[expert] = position
        shadows: BoolArray = self._positions[expert] >= values_R[:, None]
        return shadows

    def _predict(self) -> BlockTimes:
        return predict_block(self._volumes, self._copies, self._costs, self._scheduled)

    def _least_s(self, times: BlockTimes) -> FloatArray:
        return least_times(self._num_rows, times, self._costs, self._scheduled, self._layer.placement.num_ranks)
