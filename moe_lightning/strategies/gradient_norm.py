"""The gradient norm of the whole model: dense parameters once, each expert once, whatever the placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from moe_lightning.checkpoint.full_state import ExpertRows
from moe_lightning.comm.world import World, all_reduce_


@torch.no_grad()
def global_gradient_norm(
    parameters: Iterable[nn.Parameter], experts: Mapping[nn.Parameter, ExpertRows], world: World
) -> Tensor:
    """The 2-norm over the model, bit-identical on every rank.

    Each expert's squared norm is summed at its own place of a vector, so the result hardly depends on which rank
    computed it.

    Args:
        parameters: all parameters of the optimizer on all ranks, expert stacks included, in an order that all ranks
            share.
        experts: rows of those that are expert stacks.

    Returns:
        A float32 scalar on the world's device.
    """
    dense, stacks = [], []
    for parameter in parameters:
        rows = experts.get(parameter)
        if rows is not None:
            stacks.append(_squared_norms(parameter, rows))
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


def _squared_norms(parameter: nn.Parameter, rows: ExpertRows) -> Tensor:
    squares_E = torch.zeros(rows.placement.num_experts, dtype=torch.float32, device=parameter.device)
    if parameter.grad is not None:
        per_slot = _norm(parameter.grad.flatten(1), dim=1).square()
        for slot, expert in rows.owned():
            squares_E[expert] = per_slot[slot]
    return squares_E
