"""Dynamic-K: save more experts as faults use up the budget of lost tokens.

K starts small and doubles until all experts are saved. Level j (K0, 2 K0, 4 K0, ... E) may spend threshold * 2^-(j+1):
the loss per fault halves when K doubles, so every level lasts for about the same number of faults, and all levels
together stay below the threshold. Because one fault can overshoot a limit that is checked only afterwards, K also
doubles when one more fault at the present K might break the threshold. Sources: PEC 3.2, MoC-System 5.3 (which print
no limit per K).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError


@validated
class DynamicK:
    """The number of experts to save per layer, as a state machine fed with the PLT of every fault.

    Args:
        k0: experts per layer at the start.
        num_experts: E; K never exceeds it.
        predicted_plt: PLT that one more fault at a given K may cost. `worst_case_plt` bound to the run's interval
            gives the guarantee that the total never exceeds the threshold under sequential selection; under the
            load-aware orders `before_checkpoint` gives it. `expected_plt` is less cautious and can overshoot under
            skewed routing.
        threshold: the budget of PLT for the whole training; MoC-System uses 0.0375, PEC 0.05.

    Raises:
        ConfigurationError: k0 is not in 1..E, or the threshold is not in (0, 1).
    """

    def __init__(
        self, *, k0: int, num_experts: int, predicted_plt: Callable[[int], float], threshold: float = 0.0375
    ) -> None:
        if not 1 <= k0 <= num_experts:
            raise ConfigurationError(f"k0={k0} must lie between 1 and the number of experts, {num_experts}")
        if not 0 < threshold < 1:
            raise ConfigurationError(
                f"threshold={threshold} is a share of all tokens: use a value between 0 and 1, such as 0.0375"
            )
        self.k = k0
        self.level = 0
        self.spent_at_level = 0.0
        self.total = 0.0
        self.num_experts = num_experts
        self.threshold = threshold
        self._predicted_plt = predicted_plt
        self._raise_k()

    def after_fault(self, plt: float) -> int:
        """Account for the PLT that one recovery cost and return the K to use from now on."""
        self.spent_at_level += plt
        self.total += plt
        return self._raise_k()

    def before_checkpoint(self, cost: Callable[[int], float]) -> int:
        """The K to use for the next checkpoint, so that a restore of it keeps the budget: the guarantee where the
        selection has no bound beforehand.

        Args:
            cost: K -> PLT that a restore of that checkpoint would cost; 0 where all experts are saved.
        """
        while self.k < self.num_experts and self.total + cost(self.k) > self.threshold:
            self._double()
        return self.k

    def _raise_k(self) -> int:
        while self.k < self.num_experts and self._exhausted():
            self._double()
        return self.k

    def _double(self) -> None:
        self.k = min(2 * self.k, self.num_experts)
        self.level += 1
        self.spent_at_level = 0.0

    def _exhausted(self) -> bool:
        limit = self.threshold * 2.0 ** -(self.level + 1)
        return self.spent_at_level >= limit or self.total + self._predicted_plt(self.k) > self.threshold

    def state_dict(self) -> dict[str, Any]:
        """The level and what was spent, to be saved with the checkpoint."""
        return {"k": self.k, "level": self.level, "spent_at_level": self.spent_at_level, "total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, with the larger K of the two; K is clamped if the model now has fewer experts, and
        rises where a fault costs more than it did, such as after a longer interval."""
        self.k = min(max(self.k, int(state["k"])), self.num_experts)
        self.level = int(state["level"])
        self.spent_at_level = float(state["spent_at_level"])
        self.total = float(state["total"])
        self._raise_k()
