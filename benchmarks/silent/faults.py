"""Tools to put faults into code and into the objects of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.silent.case import Fault
from moe_lightning.compat import private_lightning
from moe_lightning.state.tensors import local

Around = Callable[..., Any]
"""(own, *arguments) -> result, with the function that is replaced."""


def replace(owner: Any, name: str, around: Around) -> None:
    """Replace a function of a class, module or object by one that gets it as first argument."""
    own = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(own, *args, **kwargs)

    setattr(owner, name, replaced)


def dense_and_expert(trainer: Any, module: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients on this rank: of dense parameters, or this rank's parts of them, and of experts."""
    stacks = trainer.strategy.experts.stack_of
    named = [(p, p.grad) for p in module.parameters() if p.grad is not None and not p.is_meta]
    dense = [local(g) for p, g in named if p not in stacks]
    return dense, [g for p, g in named if p in stacks]


def squared(gradients: list[Tensor]) -> Tensor:
    """The sum of squares."""
    return torch.stack([torch.zeros(()), *(g.float().square().sum() for g in gradients)]).sum()


def over_ranks(value: Tensor) -> Tensor:
    """The sum over all ranks."""
    value = value.clone()
    torch.distributed.all_reduce(value)
    return value


Norms = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
"""(trainer, module) -> the norm by which gradients are clipped; two: of dense ones, and of those of experts."""


def clips_by(norms: Norms) -> Fault:
    """Clip by other norms than that of the whole model."""

    def run(trainer: Any, module: Any) -> None:
        def clip(optimizer: Any, most: float) -> None:
            norm = norms(trainer, module)
            both = norm if isinstance(norm, tuple) else (norm, norm)
            for gradients, own in zip(dense_and_expert(trainer, module), both, strict=True):
                for gradient in gradients:
                    gradient.mul_((float(most) / (own + 1e-6)).clamp(max=1.0))

        trainer.strategy.precision_plugin.clip_grad_by_norm = clip

    return Fault(run=run)


def at_gradients(change: Callable[[Any, Any], object]) -> Fault:
    """Change gradients before the hooks of an update, as if they had come so from the backward pass.

    Args:
        change: of (trainer, module).
    """

    return at_backward(lambda trainer, module, is_last: change(trainer, module) if is_last else None)


def at_backward(change: Callable[[Any, Any, bool], object], *, is_before: bool = False) -> Fault:
    """Change gradients after, or before, the backward pass of each micro-batch.

    Args:
        change: of (trainer, module, is the last of its step).
    """

    def run(trainer: Any, module: Any) -> None:
        def act() -> None:
            with torch.no_grad():
                change(trainer, module, not private_lightning.is_accumulating(trainer))

        def before(own: Any, *args: Any, **kwargs: Any) -> Any:
            act()
            return own(*args, **kwargs)

        def after(own: Any, *args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            act()
            return result

        replace(trainer.strategy, "backward", before if is_before else after)

    return Fault(run=run)


def blocked(name: str) -> Fault:
    """Leave out a method of the strategy."""
    return Fault(run=lambda trainer, module: replace(trainer.strategy, name, lambda own, *args, **kwargs: None))
