"""Auxiliary losses of routing, and a cross-entropy for samples of unlike lengths. Their means are per token or per
sample, so that weighing ranks by samples gives the mean over the global batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED_TARGET = -100
"""A target that is not to be predicted, such as one of a prompt or of padding."""


def load_balancing_loss(scores_TE: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """E * sum_e f_e * P_e with f the fraction of assignments and P the mean score (Switch Transformer, eq. 4).

    With global counts in `tokens_per_expert_E` the mean of this value over ranks is the loss of the global batch,
    because f is a constant
    to the gradient and P is a mean.

    Args:
        scores_TE: differentiable scores of this rank's tokens; normalised to sum to one per token here (sigmoid
            scores are not).
        tokens_per_expert_E: assignments per expert whose imbalance is punished: of the global batch, or of this rank.
    """
    shares_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    counts_E = tokens_per_expert_E.to(scores_TE)
    fraction_E = counts_E / counts_E.sum().clamp_min(1.0)
    return scores_TE.shape[-1] * (fraction_E * _mean_over_tokens(shares_TE)).sum()


def router_z_loss(logits_TE: Tensor) -> Tensor:
    """Mean squared log-sum-exp of the router's logits (ST-MoE, eq. 5)."""
    return _mean_over_tokens(torch.logsumexp(logits_TE, dim=-1).square())


def _mean_over_tokens(values: Tensor) -> Tensor:
    """Mean over dim 0; zero, not NaN, where there is no token."""
    return values.sum(dim=0) / max(1, values.shape[0])


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Sum of the weighted auxiliary losses that the model's MoE layers left in their last forward pass; add it to
    your loss.

    Returns:
        A scalar; zero where no layer has such a loss.
    """
    from moe_lightning.modules.moe_layer import MoELayer

    losses = [m.auxiliary_loss for m in model.modules() if isinstance(m, MoELayer) and m.auxiliary_loss is not None]
    if not losses:
        return torch.zeros((), device=next(model.parameters()).device)
    return torch.stack(losses).sum()


def mean_over_samples(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over samples of each one's mean cross-entropy over the targets that are not -100; a sample without any
    counts as zero.

    Args:
        logits: [B, V] or [B, L, V].
        targets: [B] or [B, L].
    """
    losses = F.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), reduction="none", ignore_index=IGNORED_TARGET
    ).view(len(targets), -1)
    predicted = torch.ne(targets, IGNORED_TARGET).view(len(targets), -1).sum(dim=1).clamp_min(1)
    return (losses.sum(dim=1) / predicted).mean()
