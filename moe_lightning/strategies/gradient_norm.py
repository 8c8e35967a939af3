"""The gradient norm of the whole model: dense parameters once, each expert once, whatever the placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from moe_lightning.comm.world import World, all_reduce_
from moe_lightning.state.expert_stacks import ExpertStack


@torch.no_grad()
def global_gradient_norm(
    parameters: Iterable[nn.Parameter], stack_of: Mapping[nn.Parameter, ExpertStack], world: World
) -> Tensor:
    """The 2-norm over the model, bit-identical on every rank.

    Each expert's squared norm is summed at its own place of a vector, so the result hardly depends on which rank
    computed it.

    Args:
        parameters: all parameters of the optimizer on all ranks, expert stacks included, in an order that all ranks
            share.
        stack_of: those that are expert stacks.

    Returns:
        A float32 scalar on the world's device.
    """
    dense, stacks = [], []
    for parameter in parameters:
        stack = stack_of.get(parameter)
        if stack is not None:
            stacks.append(_squared_norms(parameter, stack))
        elif parameter.grad is not None:
            dense.append(_norm(parameter.grad).square())
    total = torch.stack(dense).sum() if dense else torch.zeros((), device=world.device)
    if stacks:
        squares = torch.cat(stacks)
        all_reduce_(squares, world)
        total = total + squares.sum()
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Shrink the gradients so that the global norm is at most `max_norm`."""
    factor = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


def _norm(gradient: Tensor, dim: int | None = None) -> Tensor:
    """In float32, summed in the gradient's own precision where that is higher."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=dim, dtype=dtype)
    return norm.float()


def _squared_norms(parameter: nn.Parameter, stack: ExpertStack) -> Tensor:
    squares_E = torch.zeros(stack.num_experts, dtype=torch.float32, device=parameter.device)
    if parameter.grad is not None:
        per_slot = _norm(parameter.grad.flatten(1), dim=1).square()
        for slot, expert in stack.owned():
            squares_E[expert] = per_slot[slot]
    return squares_E
