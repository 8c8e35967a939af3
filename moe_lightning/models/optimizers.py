"""What our optimizers for stacks of experts have in common, and which parameters of a model they take for what."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.moe.experts import Experts


class GroupOptimizer(Optimizer):
    """Updates the parameters of a group that have a gradient, in a way of its own."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update_group([p for p in group["params"] if p.grad is not None], group)
        return loss

    @abstractmethod
    def _update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update these, by the options of their group."""


def vectors_of(model: nn.Module) -> set[nn.Parameter]:
    """Trained biases, norms and tensors whose other sizes are one, and the biases of experts, a vector for each."""
    vectors = {p for p in model.parameters() if p.requires_grad and p.squeeze().ndim < 2}
    experts = (module for module in model.modules() if isinstance(module, Experts))
    return vectors | {p for stack in experts for p in (stack.b_up, stack.b_down) if p is not None}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: matrices, which decay, and vectors, which do not."""
    vectors = vectors_of(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p not in vectors], "weight_decay": weight_decay},
        {"params": [p for p in trained if p in vectors], "weight_decay": 0.0},
    ]
