"""What one layer's shadows are in the next step: a state machine of the layer's counts, the same on every rank.

Shapes: E experts, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_lightning.algorithms.balancing import SHADOW_POLICIES
from moe_lightning.algorithms.forecast import LoadForecast, ReplanRule
from moe_lightning.algorithms.performance_model import BlockCosts, BlockTimes
from moe_lightning.algorithms.shadow_search import search_shadows
from moe_lightning.algorithms.shadows import no_shadows, predict_plan
from moe_lightning.arrays import IntArray
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.shadow_plan import ShadowPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """What was decided after one observation.

    Attributes:
        plan: the layer's shadows; None where none are planned.
        trans_s: predicted seconds of its Trans.
        forecast_error: part of the assignments that the forecast had elsewhere; None before the first forecast.
    """

    plan: ShadowPlan | None
    trans_s: float
    forecast_error: float | None


class LayerPlanner:
    """Forecasts a layer's tokens and plans its shadows.

    Args:
        shadows: policy of `algorithms.balancing`.
        alpha: the search stops when loads differ by less than alpha times their mean.
        decay: of the forecast.
        rule: when to search, made anew for a new placement.
        placement: the layer's.
    """

    def __init__(
        self, *, shadows: str, alpha: float, decay: float, rule: Callable[[], ReplanRule], placement: Placement
    ) -> None:
        self._shadows, self._alpha = shadows, alpha
        self._new_rule, self._rule = rule, rule()
        self._placement = placement
        self._plan: ShadowPlan | None = None
        self._trans_s = 0.0
        self.forecast = LoadForecast(decay)
        self.load = np.zeros(placement.num_experts, dtype=np.int64)

    def observe(self, counts_EN: Sequence[IntArray], costs: BlockCosts) -> Decision:
        """Take in the assignments of a step's micro-batches, int64 [E, N] each, and plan the next step's shadows."""
        tokens = np.ascontiguousarray(counts_EN[0] if len(counts_EN) == 1 else np.sum(counts_EN, axis=0))
        forecast, error = self.forecast.predict(), None
        if forecast is not None and forecast.shape == tokens.shape:
            error = float(np.abs(forecast - tokens).sum()) / max(1, 2 * int(tokens.sum()))
        self.forecast.observe(tokens)
        self.load += tokens.sum(axis=1)
        if self._shadows != "none":
            self._replan(costs)
        return Decision(plan=self._plan, trans_s=self._trans_s, forecast_error=error)

    def _replan(self, costs: BlockCosts) -> None:
        tokens, placement = self.forecast.predict(), self._placement
        assert tokens is not None

        def predict(plan: ShadowPlan) -> BlockTimes:
            return predict_plan(tokens, placement, plan, costs)

        if self._shadows != "search":
            self._plan = SHADOW_POLICIES[self._shadows](tokens, placement, costs)
            self._trans_s = float(predict(self._plan).trans_s)
        elif self._plan is None or self._rule.due():
            fresh = search_shadows(tokens, placement, costs, alpha=self._alpha)
            kept = no_shadows(tokens, placement) if self._plan is None else self._plan
            kept_s, fresh_s = predict(kept), predict(fresh)
            replaces = self._rule.judge(float(kept_s.total_s), float(fresh_s.total_s))
            self._plan = fresh if replaces else kept
            self._trans_s = float((fresh_s if replaces else kept_s).trans_s)

    def move(self, placement: Placement) -> None:
        """The layer's experts have moved: its shadows must be planned anew."""
        self._placement, self._plan, self._rule = placement, None, self._new_rule()

    def take_load(self, fade: int) -> tuple[IntArray, IntArray | None]:
        """The tokens of each expert so far int64 [E] and the forecast int64 [E, N]; loads then count 1 / fade."""
        load = self.load.copy()
        self.load //= fade
        return load, self.forecast.predict()

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the load and the forecast's average."""
        average = self.forecast.state_dict()["average"]
        return {"load": self.load.tolist(), "average": None if average is None else average.tolist()}

    def load_state(self, load: IntArray, average: list[list[int]] | None) -> None:
        """Continue from a state; the average only if it is of as many experts and ranks."""
        self.load = load.copy()
        known = None if average is None else np.array(average, dtype=np.int64)
        fits = known is not None and known.shape == self._placement.pairs.shape
        self.forecast.load_state_dict({"average": known if fits else None})
