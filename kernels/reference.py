"""Slow, obvious implementation of every operation, differentiated by autograd, which the fast ones must equal.

Legend: T tokens, K choices, M rows, E experts, S slots, D model width, F expert width, N sources or parts, C chunks,
L elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_lightning.kernels.interface import CLAMPED_ALPHA, CLAMPED_LIMIT, ExpertSort


def top_k_experts(scores_TE: Tensor, top_k: int) -> Tensor:
    def largest(scores: list[float]) -> list[int]:
        return sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[:top_k]

    ids = [largest(scores) for scores in scores_TE.detach().tolist()]
    return torch.tensor(ids, dtype=torch.int64, device=scores_TE.device).view(len(scores_TE), top_k)


def sort_by_expert(ids_TK: Tensor, num_experts: int) -> ExpertSort:
    flat = ids_TK.reshape(-1).tolist()
    order: list[int] = []
    inverse, rank = [-1] * len(flat), [-1] * len(flat)
    counts = []
    for expert in range(num_experts):
        mine = [i for i, e in enumerate(flat) if e == expert]
        for place, assignment in enumerate(mine):
            inverse[assignment], rank[assignment] = len(order), place
            order.append(assignment)
        counts.append(len(mine))

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=ids_TK.device)

    return ExpertSort(
        tensor(order), tensor(inverse).view(ids_TK.shape), tensor(counts), tensor(rank).view(ids_TK.shape)
    )


def permute(x_TD: Tensor, order_M: Tensor, inverse_TK: Tensor) -> Tensor:
    rows = [x_TD[i // inverse_TK.shape[1]] for i in order_M.tolist()]
    return torch.stack(rows) if rows else x_TD[:0]


def unpermute(rows_MD: Tensor, inverse_TK: Tensor, order_M: Tensor, weights_TK: Tensor | None) -> Tensor:
    compute = torch.promote_types(rows_MD.dtype, torch.float32)
    if not len(inverse_TK):
        return rows_MD[:0]
    sums = []
    for t, row_ids in enumerate(inverse_TK.tolist()):
        total = torch.zeros(rows_MD.shape[1], dtype=compute, device=rows_MD.device)
        for k, row in enumerate(row_ids):
            if row >= 0:
                term = rows_MD[row].to(compute)
                total = total + (term if weights_TK is None else weights_TK[t, k].to(compute) * term)
        sums.append(total)
    return torch.stack(sums).to(rows_MD.dtype)


def grouped_mm(x_MD: Tensor, weight_SDF: Tensor, tokens_S: Sequence[int]) -> Tensor:
    compute = torch.promote_types(x_MD.dtype, torch.float32)
    pieces, start = [], 0
    for slot, count in enumerate(tokens_S):
        pieces.append(x_MD[start : start + count].to(compute) @ weight_SDF[slot].to(compute))
        start += count
    tail = x_MD[start:].to(compute) @ weight_SDF.new_zeros(weight_SDF.shape[1:], dtype=compute)
    return torch.cat([*pieces, torch.zeros_like(tail)]).to(x_MD.dtype)


def expert_activation(h_MH: Tensor, kind: str) -> Tensor:
    h = h_MH.to(torch.promote_types(h_MH.dtype, torch.float32))
    if kind == "swiglu":
        left, right = h.chunk(2, dim=1)
        value = F.silu(left) * right
    elif kind == "swiglu_clamped":
        left, right = h.chunk(2, dim=1)
        # not clamp, whose gradient at a limit is 1 up to torch 2.14 and 0 from 2.15 on; that of the kernels is 1
        left = torch.where(left > CLAMPED_LIMIT, CLAMPED_LIMIT, left)
        right = torch.where(right.abs() > CLAMPED_LIMIT, CLAMPED_LIMIT * right.sign(), right)
        value = left * torch.sigmoid(CLAMPED_ALPHA * left) * (right + 1)
    elif kind == "gelu_tanh":
        value = h * 0.5 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (h + 0.044715 * h**3)))
    else:
        value = h * 0.5 * (1 + torch.erf(h / 2**0.5))
    return value.to(h_MH.dtype)


def xor_parity(buffers: Sequence[Tensor]) -> Tensor:
    values = [0] * buffers[0].numel()
    for buffer in buffers:
        values = [a ^ b for a, b in zip(values, buffer.tolist(), strict=True)]
    return torch.tensor(values, dtype=torch.uint8, device=buffers[0].device)


def sum_in_rank_order(parts_NL: Tensor) -> Tensor:
    total = parts_NL[0].to(torch.promote_types(parts_NL.dtype, torch.float32))
    for part in parts_NL[1:]:
        total = total + part.to(total.dtype)
    return total.to(parts_NL.dtype)
