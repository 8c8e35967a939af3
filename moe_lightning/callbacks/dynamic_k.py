"""Dynamic-K: save more experts as faults use up the budget of lost tokens (PEC 3.4; MoC-System 5.3)."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from moe_lightning.algorithms.dynamic_k import DynamicK as DynamicKRule
from moe_lightning.algorithms.ledger import worst_case_plt
from moe_lightning.errors import ConfigurationError
from moe_lightning.values import validated


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

    def start(self, *, k0: int, num_experts: int, interval_steps: int, total_steps: int) -> int:
        """Begin with K experts a layer, or where the run was left; returns the K to use."""
        predicted = partial(worst_case_plt, num_experts=num_experts, interval=interval_steps, total_steps=total_steps)
        self._rule = DynamicKRule(
            k0=k0, num_experts=num_experts, predicted_plt=lambda k: predicted(k=k), threshold=self.threshold
        )
        if self._saved:
            self._rule.load_state_dict(self._saved)
        return self._rule.k

    def after_fault(self, plt: float) -> int:
        """Account for what a restore lost; returns the K to use from now on."""
        assert self._rule is not None
        return self._rule.after_fault(plt)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._rule.state_dict() if self._rule is not None else dict(self._saved)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)
