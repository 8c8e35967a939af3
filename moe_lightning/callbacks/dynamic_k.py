"""Dynamic-K: save more experts as faults use up the budget of lost tokens (PEC 3.4; MoC-System 5.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from moe_lightning.checkpoint.selection import DynamicK as DynamicKRule
from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError


@validated
class DynamicK(Callback):
    """Raises K_persist of PartialExpertsCheckpoint so that the proportion of lost tokens stays below a threshold.

    It doubles K when the level's share of the budget is spent, or when one more fault could exceed the budget: the
    total stays below
    the threshold however the routing is skewed.

    Args:
        threshold: proportion of lost tokens (PLT) that the whole training may cost.

    Raises:
        ConfigurationError: the threshold is not between 0 and 1.
    """

    def __init__(self, threshold: float = 0.0375) -> None:
        if not 0 < threshold < 1:
            raise ConfigurationError(f"threshold={threshold} is a share of all tokens: use a value between 0 and 1")
        self.threshold = threshold
        self._rule: DynamicKRule | None = None
        self._saved: dict[str, Any] = {}

    def start(self, *, k0: int, num_experts: int, predicted_plt: Callable[[int], float]) -> int:
        """Begin with K experts a layer, or go on from where this run is: what was spent stays spent however often its
        world or its interval changes. Returns the K to use.

        Args:
            predicted_plt: K -> PLT that one more fault may cost at most.
        """
        known = self._rule.state_dict() if self._rule is not None else self._saved
        self._rule = DynamicKRule(k0=k0, num_experts=num_experts, predicted_plt=predicted_plt, threshold=self.threshold)
        if known:
            self._rule.load_state_dict(known)
        return self._rule.k

    def after_fault(self, plt: float) -> int:
        """Account for what a restore lost; returns the K to use from now on."""
        assert self._rule is not None
        return self._rule.after_fault(plt)

    def before_checkpoint(self, cost: Callable[[int], float]) -> int:
        """The K to use for the next checkpoint, from what a restore of it would cost at each K."""
        assert self._rule is not None
        return self._rule.before_checkpoint(cost)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._rule.state_dict() if self._rule is not None else dict(self._saved)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved, self._rule = dict(state_dict), None
