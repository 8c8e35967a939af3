"""The gradient norm of the whole model: dense parameters once, each expert once, whoever holds what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from traceback import extract_tb
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World, all_reduce_
from moe_lightning.parallel.mesh import TensorCut
from moe_lightning.state.tensors import cut_of, local


@torch.no_grad()
def gradient_norms(module: pl.LightningModule) -> dict[str, Tensor]:
    """What Lightning's `grad_norm(module, 2)` is on one rank: the 2-norm of every gradient, and of all together, over
    all ranks and with each expert once; under stock strategies the same as that. For `on_before_optimizer_step`, which
    comes before clipping; collective.

    Returns:
        Scalars under Lightning's names, "grad_2.0_norm/NAME" and "grad_2.0_norm_total"; in a pipeline the parameters of
        this stage, and the total of all.
    """
    strategy: Any = module.trainer.strategy
    if not hasattr(strategy, "worlds"):
        return {name: torch.as_tensor(norm) for name, norm in grad_norm(module, 2).items()}
    mesh, stack_of = strategy.worlds.mesh, strategy.experts.stack_of
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    norms = {f"grad_2.0_norm/{name}": global_gradient_norm([p], stack_of, mesh.world) for name, p in named.items()}
    return norms | {"grad_2.0_norm_total": global_gradient_norm(named.values(), stack_of, mesh.world, mesh.pipe)}


def explained_norm(error: Exception) -> Exception:
    """What is raised in the place of an error of stock functions that know whole gradients of one process only."""
    called = {frame.name for frame in extract_tb(error.__traceback__)} & {"grad_norm", "clip_grad_norm_"}
    if not called or not any(words in str(error) for words in ("torch.Tensor and DTensor", "not allocated yet")):
        return error
    return ConfigurationError(
        f"{called.pop()} cannot read gradients of which every rank holds rows: use "
        "moe_lightning.gradient_norms(module) for their norms, and Trainer(gradient_clip_val=...) or "
        "self.clip_gradients(...) to clip them"
    )


@torch.no_grad()
def global_gradient_norm(
    parameters: Iterable[nn.Parameter],
    stack_of: Mapping[nn.Parameter, ExpertStack],
    world: World,
    pipe: World | None = None,
) -> Tensor:
    """The 2-norm over the model, bit-identical on every rank.

    The squared norm of each expert, and of each block of a parameter that is cut, is summed at its own place of a
    vector, so the result hardly depends on which rank computed it.

    Args:
        parameters: all parameters of the optimizer on all ranks, expert stacks included, in an order that all ranks
            share.
        stack_of: those that are expert stacks.
        world: who shares the parameters.
        pipe: the stages of a pipeline, each with parameters of its own; None: there is one.

    Returns:
        A float32 scalar on the world's device.
    """
    dense, spread = [], []
    for parameter in parameters:
        if parameter.is_meta:  # another stage's
            continue
        stack = stack_of.get(parameter)
        if stack is not None:
            spread.append(_squared_norms(parameter, stack))
        elif (cut := cut_of(parameter)) is not None:
            spread.append(_squared_part(parameter, cut, world))
        elif parameter.grad is not None:
            dense.append(_norm(parameter.grad).square())
    total = torch.stack(dense).sum() if dense else torch.zeros((), device=world.device)
    if spread:
        squares = torch.cat(spread)
        all_reduce_(squares, world)
        total = total + squares.sum()
    if pipe is not None and pipe.size > 1:
        squares = torch.zeros(pipe.size, device=world.device)
        squares[pipe.rank] = total
        all_reduce_(squares, pipe)
        total = squares.sum()
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Shrink the gradients so that the global norm is at most `max_norm`."""
    factor = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


def _norm(gradient: Tensor, dim: int | None = None) -> Tensor:
    """In float32, summed in the gradient's own precision where that is higher."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=dim, dtype=dtype)
    return norm.float()


def _squared_part(parameter: nn.Parameter, cut: TensorCut, world: World) -> Tensor:
    """[parts], this rank's at its place where it is the first that holds these values."""
    among = world.row_cut
    squares = torch.zeros(len(among.holders), dtype=torch.float32, device=parameter.device)
    if among.holders_of(cut)[0] == world.rank and parameter.grad is not None:
        squares[among.index] = _norm(local(parameter.grad)).square()
    return squares


def _squared_norms(parameter: nn.Parameter, stack: ExpertStack) -> Tensor:
    squares_E = torch.zeros(stack.num_experts, dtype=torch.float32, device=parameter.device)
    if parameter.grad is not None:
        per_slot = _norm(parameter.grad.flatten(1), dim=1).square()
        for slot, expert in stack.owned():
            squares_E[expert] = per_slot[slot]
    return squares_E
