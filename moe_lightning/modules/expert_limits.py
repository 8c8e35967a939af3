"""Limits of what tokens choose: the capacity of experts, and the groups of them that a token may use.

Shapes: T tokens of this rank, K choices, E experts, G groups of experts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_lightning import kernels as ops


def drop_overflow(
    expert_ids_TK: Tensor, weights_TK: Tensor, limit: int, num_experts: int, policy: Literal["probability", "position"]
) -> Tensor:
    """Replace by -1 what exceeds an expert's limit: its smallest weights, or its last tokens.

    Returns:
        int64 [T, K]; each expert keeps min(limit, its assignments).
    """
    ids_M = expert_ids_TK.flatten()
    if policy == "probability":
        by_weight_M = torch.argsort(weights_TK.flatten(), descending=True, stable=True)
        rank_M = torch.empty_like(ids_M)
        rank_M[by_weight_M] = ops.sort_by_expert(ids_M[by_weight_M, None], num_experts).rank_in_expert_TK[:, 0]
    else:
        rank_M = ops.sort_by_expert(ids_M[:, None], num_experts).rank_in_expert_TK[:, 0]
    return torch.where(rank_M < limit, ids_M, -1).view_as(expert_ids_TK)


def limit_to_best_groups(selection_TE: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Minus infinity outside each token's best groups."""
    grouped_TGE = selection_TE.view(selection_TE.shape[0], num_groups, -1)
    group_scores_TG = grouped_TGE.topk(min(2, grouped_TGE.shape[-1]), dim=-1).values.sum(dim=-1)
    best_TG = ops.top_k_routing(group_scores_TG, top_groups)[1]
    allowed_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter_(-1, best_TG, True)
    return grouped_TGE.masked_fill(~allowed_TG.unsqueeze(-1), -torch.inf).flatten(-2)
