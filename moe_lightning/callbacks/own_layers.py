"""Which MoE layers of a model a rank plans for, and what ranks that plan for others know together.

A state of the balancer is of all layers, whatever the mesh: {"loads": [L][E], "averages": [L], "interval": steps}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_lightning.errors import ConfigurationError

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class OwnLayers:
    """All layers, or those of the pipeline stages on this rank.

    Attributes:
        numbers: which of the model's.
        total: layers of the model.
    """

    numbers: tuple[int, ...]
    total: int

    def part(self, state: State) -> State:
        """What a state says of these layers.

        Raises:
            ConfigurationError: the state of a model with other layers.
        """
        if len(state["loads"]) != self.total:
            raise ConfigurationError(
                f"the balancer's state is of {len(state['loads'])} MoE layers, but the model has {self.total}: resume "
                "with the model that wrote the checkpoint"
            )
        return state | {name: [state[name][number] for number in self.numbers] for name in ("loads", "averages")}

    def whole(self, own: State, known: State | None) -> State:
        """A state of all layers: of these as they say, of the others as it was known, or nothing.

        Args:
            own: of these layers.
            known: of all layers of some model.
        """
        if known is None or len(known["loads"]) != self.total:
            nothing = [0] * len(own["loads"][0]) if own["loads"] else []
            known = {"loads": [nothing] * self.total, "averages": [None] * self.total}
        state = own | {name: list(known[name]) for name in ("loads", "averages")}
        for at, number in enumerate(self.numbers):
            for name in ("loads", "averages"):
                state[name][number] = own[name][at]
        return state


def together(told: Sequence[tuple[Sequence[int], State | None]], total: int) -> State | None:
    """What ranks know together: of each layer what the first that plans for it says, else what the first says that
    knows anything.

    Args:
        told: of each rank the layers that it plans for, and its state of all layers.
        total: layers of the model.
    """
    known = next((state for _, state in told if state is not None), None)
    for numbers, state in reversed(told):
        if state is not None and numbers:
            layers = OwnLayers(numbers=tuple(numbers), total=total)
            known = layers.whole(layers.part(state), known)
    return known
