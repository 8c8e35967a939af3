"""Shadow plan of one layer: experts whose weights are copied to other ranks for one step, and the resulting quota.

Source: Pro-Prophet IV. Shapes: E experts, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.quota import balanced_quota
from moe_lightning.errors import ConfigurationError

QuotaRule = Literal["local", "balanced"]
"""How tokens divide over residents and shadows. "local" (Pro-Prophet): a shadow computes its own rank's tokens,
residents the rest.
"balanced": residents and shadows are holders alike, as even as possible."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShadowPlan:
    """Shadow experts of a layer: copies of weights on other ranks for the next step.

    Attributes:
        shadows: bool [E, N], never where the expert is resident.
        homes: int64 [E], the resident rank that sends each expert's weights and collects its gradients.
        quota_rule: how tokens divide.
    """

    shadows: BoolArray
    homes: IntArray
    quota_rule: QuotaRule = "local"

    @property
    def num_copies(self) -> int:
        return int(self.shadows.sum())

    def check(self, placement: Placement) -> None:
        """Raise ConfigurationError where the plan was made for another placement."""
        pairs = placement.pairs
        if self.shadows.shape != pairs.shape:
            raise ConfigurationError(
                f"a shadow plan for {self.shadows.shape} (experts, ranks) does not fit a placement of "
                f"{pairs.shape}: plan again after a new placement"
            )
        at_home = np.unique(pairs.experts[pairs.ranks == self.homes[pairs.experts]])
        if self.shadows[pairs.experts, pairs.ranks].any() or len(at_home) < len(self.homes):
            raise ConfigurationError(
                "the shadow plan names homes of another placement: plan again after a new placement"
            )


def choose_homes(placement: Placement, load: IntArray) -> IntArray:
    """Return int64 [E], the home of each expert: hot experts first, to the holder that is home of fewest."""
    homes = np.zeros(placement.num_experts, dtype=np.int64)
    duties = np.zeros(placement.num_ranks, dtype=np.int64)
    ranks, starts = placement.pairs.ranks, placement.pairs.starts.tolist()
    for expert in np.argsort(-load, kind="stable").tolist():
        holders = ranks[starts[expert] : starts[expert + 1]]
        home = holders[duties[holders].argmin()]
        homes[expert] = home
        duties[home] += 1
    return homes


def shadow_quota(tokens: IntArray, placement: Placement, plan: ShadowPlan, speeds: IntArray | None = None) -> IntArray:
    """Tokens of each expert that each rank computes, residents and shadows together.

    Args:
        tokens: int64 [E, N], assignments on each rank before dispatch.
        placement: residents.
        plan: shadows.
        speeds: int64 [N], of the ranks; None: all alike.

    Returns:
        int64 [E, N] with the row sums of `tokens`.

    Raises:
        ConfigurationError: the plan was made for another placement.
    """
    plan.check(placement)
    if plan.quota_rule == "balanced" or not plan.num_copies:
        return balanced_quota(tokens.sum(axis=1), placement.replicas + plan.shadows, speeds)
    kept = tokens * plan.shadows
    return kept + balanced_quota((tokens - kept).sum(axis=1), placement.replicas, speeds)
