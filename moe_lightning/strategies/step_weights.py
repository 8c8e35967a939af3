"""What the loss of a rank counts for: its share of the samples of a step, or of what the module says it is a mean
over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from moe_lightning import seams
from moe_lightning.data.sampler import StepSlice
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.losses import IGNORED_TARGET
from moe_lightning.parallel.context import World, all_reduce_
from moe_lightning.state.tensors import local

_WATCHED_STEPS = 100
"""Batches that are searched for ignored targets, before the module is taken to have none."""


class StepWeights:
    """The weights of the micro-batches of one step.

    A micro-batch of weight W counts for W / sum(W) of the step. The sum is known with the last one only: until then
    gradients are scaled by the first W, and `finish` brings them to the sum's.

    Attributes:
        of_batch: W of the running micro-batch; None where it was not given.
    """

    def __init__(self) -> None:
        self._of_step: list[Tensor] = []
        self.of_batch: Tensor | None = None
        self._is_told = False
        self._watched = 0

    def begin(self, here: StepSlice | None, *, is_training: bool = True) -> None:
        """Enter a micro-batch; in training with the first one, a step."""
        self.of_batch = None
        if is_training and (here is None or here.micro == 0):
            self._of_step = []

    def weigh(self, loss: Tensor, weight: Tensor | float, here: StepSlice | None, world: World) -> Tensor:
        """The mean over ranks weighted by `weight`, as a loss that will be weighed by samples; collective.

        Returns:
            The global mean as value, this rank's part of it as gradient.
        """
        self._is_told = True
        if here is None:
            return loss
        own = torch.as_tensor(weight, dtype=torch.float64, device=loss.device)
        own = own if here.count else torch.zeros_like(own)
        counted = torch.where(own > 0, loss, torch.zeros_like(loss))
        if world.size == 1:
            self.of_batch = own
            return counted
        totals = torch.stack([counted.detach().double() * own, own])
        all_reduce_(totals, world)
        self.of_batch = totals[1]
        share = own / totals[1].clamp_min(torch.finfo(torch.float64).tiny)
        mean = totals[0] / totals[1].clamp_min(torch.finfo(torch.float64).tiny)
        value: Tensor = _MeanOfAll.apply(counted, mean.to(loss.dtype), (share * _all_shares(here)).to(loss.dtype))  # type: ignore[no-untyped-call]
        return value

    def scale_sum(self, loss: Tensor, here: StepSlice | None, world: World) -> Tensor:
        """A sum over samples, as a loss that will be weighed by samples."""
        self._is_told = True
        if here is None or world.size == 1:
            return loss
        return loss * _all_shares(here)

    def share(self, here: StepSlice) -> float | Tensor:
        """What this rank's loss of the running micro-batch counts for in the step, up to the factor of `finish`.

        Raises:
            ConfigurationError: a weight was given in some micro-batches of the step only.
        """
        if here.micro and (self.of_batch is not None) != bool(self._of_step):
            raise ConfigurationError(
                "global_mean was called in some micro-batches of a step and not in others, so they have no common "
                "weight: call it in each, with weight=0 where nothing is to be learned"
            )
        if self.of_batch is None or here.num_micros == 1:
            return here.step_share
        self._of_step.append(self.of_batch)
        first = self._of_step[0]
        scale = torch.where(first > 0, self.of_batch / first, self.of_batch) / here.num_micros
        return scale * here.micro_share

    def take(self, weights: Sequence[float], device: torch.device) -> None:
        """Of further micro-batches of the step, which another rank has weighed."""
        self._is_told = self._is_told or len(weights) > 0
        self._of_step += [torch.tensor(weight, dtype=torch.float64, device=device) for weight in weights]

    @torch.no_grad()
    def finish(self, module: nn.Module) -> None:
        """Divide the gradients of a step by its sum of weights, once they hold those of all ranks and micro-batches."""
        if not self._of_step:
            return
        first, total = self._of_step[0], torch.stack(self._of_step).sum()
        factor = len(self._of_step) * torch.where(first > 0, first, torch.ones_like(first)) / total
        factor = torch.where(total > 0, factor, torch.ones_like(factor))
        gradients = [local(p.grad) for p in module.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        self._of_step = []

    def warn_of_ignored_targets(self, arguments: Any, *, parts: int = 1) -> None:
        """Say once where samples, or parts of them, may differ in the number of their ignored targets, and the module
        did not say what its loss is a mean over.

        Args:
            parts: of each sample, of which this rank sees one.
        """
        if self._is_told or self._watched >= _WATCHED_STEPS:
            return
        self._watched += 1
        if any(_ignores_unevenly(leaf, parts) for leaf in seams.tree_leaves(arguments)):
            self._is_told = True
            rank_zero_warn(
                f"the samples of a batch hold unlike numbers of targets {IGNORED_TARGET}, but the loss of a rank "
                "counts by its samples, so a mean over targets depends on the number of ranks: return "
                "moe_lightning.global_mean(self, loss, weight=number_of_targets), or a mean over samples"
            )


class _MeanOfAll(torch.autograd.Function):
    """A mean over all ranks, the same to the last bit on each of them, with the gradient of this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mean: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (share,) = ctx.saved_tensors
        return grad * share, None, None


def _all_shares(here: StepSlice) -> float:
    """What undoes the share of a rank that has a sample."""
    return here.micro_total * here.parts / max(1, here.count)


def _ignores_unevenly(leaf: object, parts: int) -> bool:
    if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.ndim < 1 or leaf.dtype is torch.bool:
        return False
    ignored = torch.eq(leaf, IGNORED_TARGET).reshape(len(leaf), -1).sum(dim=1)
    return bool((ignored != (ignored[:1] if parts == 1 else 0)).any())
