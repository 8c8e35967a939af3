"""Auxiliary losses of routing, means over the global batch, and placeholders of blocks in other pipeline stages.

The mean of an auxiliary loss is per token, so that weighting ranks by samples gives the mean over the global batch.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_lightning import kernels as ops
from moe_lightning.parallel.tensor import TensorRanks

logger = logging.getLogger(__name__)


class AbsentBlock(nn.Module):
    """Hands its first argument on.

    Attributes:
        auxiliary_loss: of the layers of the stages before, where this is the last block before the last stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary_loss: Tensor | None = None

    @contextmanager
    def carrying(self, loss: Tensor) -> Generator[None, None, None]:
        """Have this auxiliary loss inside."""
        self.auxiliary_loss = loss
        try:
            yield
        finally:
            self.auxiliary_loss = None

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


IGNORED_TARGET = -100
"""A target that is not to be predicted, such as one of a prompt or of padding."""


@dataclass(frozen=True, kw_only=True)
class RealTokens:
    """Mask of the rows that are tokens, not padding.

    Attributes:
        is_token_T: bool.
        divisor: of a sum over this rank's tokens, so that weighing ranks by samples makes a mean over the tokens of all
            ranks: their number times this rank's share of the samples. A scalar.
    """

    is_token_T: Tensor
    divisor: Tensor


def load_balancing_loss(scores_TE: Tensor, tokens_per_expert_E: Tensor, real: RealTokens | None = None) -> Tensor:
    """E * sum_e f_e * P_e with f the fraction of assignments and P the mean score (Switch Transformer, eq. 4).

    With global counts in `tokens_per_expert_E` the mean of this value over ranks is the loss of the global batch,
    because f is a constant to the gradient and P is a mean.

    Args:
        scores_TE: differentiable scores of this rank's tokens; normalised to sum to one per token here (sigmoid
            scores are not).
        tokens_per_expert_E: assignments per expert whose imbalance is punished: of the global batch, or of this rank.
        real: which rows are tokens; None: all.
    """
    if scores_TE.device.type != "cpu" and real is None:
        loss = ops.balance(scores_TE, tokens_per_expert_E)
        if loss is not None:
            return loss
    counts_E = tokens_per_expert_E.to(scores_TE.dtype)
    fraction_E = counts_E / counts_E.sum().clamp_min(1.0)
    shares_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    fraction_E = ops.upload(fraction_E, scores_TE.device)
    # No matrix product, which autocast and TF32 would round: near balance, gradients are small differences.
    return scores_TE.shape[-1] * (fraction_E * _mean_over_tokens(shares_TE, real)).sum()


def router_z_loss(logits_TE: Tensor, real: RealTokens | None = None) -> Tensor:
    """Mean squared log-sum-exp of the router's logits (ST-MoE, eq. 5)."""
    return _mean_over_tokens(torch.logsumexp(logits_TE, dim=-1).square(), real)


def _mean_over_tokens(values: Tensor, real: RealTokens | None) -> Tensor:
    """Mean over dim 0; zero, not NaN, where there is no token."""
    if real is None:
        return values.sum(dim=0) / max(1, values.shape[0])
    is_padding = ~real.is_token_T.view(-1, *[1] * (values.ndim - 1))
    divisor = torch.where(real.divisor > 0, real.divisor, 1.0).to(values)
    return values.masked_fill(is_padding, 0.0).sum(dim=0) / divisor


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Sum of the weighted auxiliary losses that the model's MoE layers left in the forward passes of the micro-batch;
    add it to your loss. Warns once of layers that ran without a graph, as in reentrant activation checkpointing.

    Returns:
        A scalar; zero where no layer has such a loss, as in evaluation and after the backward pass through it.
    """
    from moe_lightning.moe.layer import MoELayer

    layers = [m for m in model.modules() if isinstance(m, AbsentBlock) or (isinstance(m, MoELayer) and not m.is_spent)]
    losses = [layer.auxiliary_loss for layer in layers if layer.training and layer.auxiliary_loss is not None]
    if not losses:
        return torch.zeros((), device=next((p.device for p in model.parameters()), None))
    if torch.is_grad_enabled() and any(map(_has_lost_gradient, layers)):
        _warn_of_lost_gradient()
    return torch.stack(losses).sum()


def _has_lost_gradient(layer: Any) -> bool:
    """True on rank 0 if a layer trains its router and has run without a graph, as in the first pass of a reentrant
    checkpoint.
    """
    loss, router = layer.auxiliary_loss, getattr(layer, "router", None)
    if loss is None or loss.requires_grad or router is None:
        return False
    return layer.dispatcher.world.rank == 0 and any(parameter.requires_grad for parameter in router.parameters())


@cache
def _warn_of_lost_gradient() -> None:
    logger.warning(
        "the auxiliary loss of an MoE layer has no gradient, because the layer ran under torch.no_grad(), as in "
        "reentrant activation checkpointing: give torch.utils.checkpoint.checkpoint, or the option of your model "
        "(gradient_checkpointing_kwargs), use_reentrant=False"
    )


@cache
def warn_of_unused_loss(steps: int) -> None:
    """Warn once that no backward pass went through the auxiliary losses of so many steps."""
    logger.warning(
        "the auxiliary loss of an MoE layer was in no loss of %d steps, and without it a few experts may get nearly "
        "all tokens: return loss + moe_lightning.auxiliary_loss(self) in training_step, or give the layer router="
        '{"aux_loss_coef": 0.0}',
        steps,
    )


def global_mean(module: nn.Module, loss: Tensor, weight: Tensor | float) -> Tensor:
    """A mean over something else than samples, such as the targets that are not ignored, as the mean over the global
    batch; every rank must call it.

    The strategy weighs the losses of ranks by their samples. This one is sum(weight * loss) / sum(weight) over ranks.
    Its value is that of all ranks together, the same to the last bit on each, so logging it needs no `sync_dist`.
    Gradients are exact. Without ExpertParallelStrategy, in stock Lightning or plain PyTorch, the loss is returned as it
    is.

    With gradient accumulation the loss of a step is sum(W * L) / sum(W) over its micro-batches, with W the sum of
    weights over ranks and calls, and L the whole loss of the micro-batch: every other term beside this one, such as
    `auxiliary_loss`, is its mean over the micro-batch's samples and counts by W as well. A micro-batch without any
    weight counts for nothing, in no term; so does, with or without accumulation, a step without any weight.

    Args:
        module: the LightningModule whose step this is.
        loss: this rank's mean, a scalar; not looked at where the weight is 0, but its gradient must be finite.
        weight: what it is a mean over: the number of targets, say. Zero is allowed.
    """
    steps = _steps_of(module)
    return loss if steps is None else steps.weigh(loss, weight)


def global_sum(module: nn.Module, loss: Tensor) -> Tensor:
    """A sum over the samples of this rank as the sum over those of the global batch.

    With gradient accumulation it is the mean over the sums of micro-batches, as in stock Lightning. Log it with
    `sync_dist=True`: the value of one rank is an estimate from its samples.

    Args:
        module: the LightningModule whose step this is.
        loss: a scalar.
    """
    steps = _steps_of(module)
    return loss if steps is None else steps.scale_sum(loss)


def _steps_of(module: nn.Module) -> Any | None:
    """The `steps` of the strategy that runs a module, where it weighs losses by samples."""
    try:
        trainer = getattr(module, "trainer", None)
    except RuntimeError:  # Lightning's way of saying that no Trainer runs the module
        return None
    steps = getattr(getattr(trainer, "strategy", None), "steps", None)
    return steps if hasattr(steps, "weigh") else None


def num_targets(targets: Tensor) -> Tensor:
    """Return the number of targets to be predicted, a scalar."""
    return torch.ne(targets, IGNORED_TARGET).sum()


def mean_over_targets(logits: Tensor, targets: Tensor, ranks: TensorRanks | None = None) -> Tensor:
    """The mean cross-entropy over the targets that are not -100; zero where there is none.

    Args:
        logits: [..., V].
        targets: [...].
        ranks: those among which the V logits are dealt out; None: this rank has all.
    """
    logits_TV, targets_T = logits.flatten(0, -2), targets.flatten()
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    if ranks is None:
        total = F.cross_entropy(logits_TV, targets_T, reduction="sum", ignore_index=IGNORED_TARGET)
    else:
        losses_T = ranks.cross_entropy(logits_TV, targets_T)
        total = losses_T.masked_fill(torch.eq(targets_T, IGNORED_TARGET), 0.0).sum()
    return total / num_targets(targets).clamp_min(1)
