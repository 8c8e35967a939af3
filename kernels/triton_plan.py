"""Quotas and the dispatch plan with Triton: one program that keeps the tables [E, N] in registers, in fixed rounds.

Legend: E experts, N ranks.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels import torch_plan
from moe_lightning.kernels.bodies import Sharing
from moe_lightning.kernels.triton_launch import launch, power_of_two

_CELLS = 4096
"""Of a table in the registers of one program; torch plans what is larger."""


@triton.jit
def _split(tokens, pull):
    upto = tl.cumsum(pull, axis=1)
    norm = tl.maximum(tl.sum(pull, axis=1), 1)[:, None]
    return tokens[:, None] * upto // norm - tokens[:, None] * (upto - pull) // norm


@triton.jit
def _overlap(end, length, other_end, other_length):
    shared = tl.minimum(end, other_end) - tl.maximum(end - length, other_end - other_length)
    return tl.maximum(shared, 0)


@triton.jit
def _plan_kernel(
    tokens, replicas, send, recv, num_experts, num_ranks, rank, patience, slack, largest_one,
    ROUNDS: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    expert, column = tl.arange(0, EXPERTS)[:, None], tl.arange(0, RANKS)[None, :]
    here = (expert < num_experts) & (column < num_ranks)
    place = expert * num_ranks + column
    tokens_EN = tl.load(tokens + place, mask=here, other=0)
    replicas_EN = tl.load(replicas + place, mask=here, other=0)
    tokens_E = tl.sum(tokens_EN, axis=1)
    best_EN = replicas_EN
    first_EN = replicas_EN
    if ROUNDS > 0:
        mean = tl.maximum((tl.sum(tokens_E, axis=0) + num_ranks - 1) // num_ranks, 1)
        holders_E = tl.maximum(tl.sum((replicas_EN > 0).to(tl.int64), axis=1), 1)
        bound = tl.maximum(mean, tl.max((tokens_E + holders_E - 1) // holders_E, axis=0))
        enough = bound + bound // slack
        most_pulled = tl.maximum(tl.max(tl.sum(replicas_EN, axis=1) * tokens_E, axis=0), 1)
        one = tl.maximum(tl.minimum(0x4000000000000000 // most_pulled, largest_one), 1)
        weights_N = tl.zeros((RANKS,), dtype=tl.int64) + one
        best_load = bound * 0 + 0x7FFFFFFFFFFFFFFF
        best_round = bound * 0
        is_over = bound < 0
        for index in range(ROUNDS):
            pull_EN = weights_N[None, :] * replicas_EN
            norm_E = tl.maximum(tl.sum(pull_EN, axis=1), 1)
            load_N = tl.sum(tokens_E[:, None] * pull_EN // norm_E[:, None], axis=0)
            most = tl.max(load_N, axis=0)
            first_EN = tl.where(index == 0, pull_EN, first_EN)
            is_better = (most < best_load) & (is_over == 0)
            best_EN = tl.where(is_better, pull_EN, best_EN)
            best_load = tl.where(is_better, most, best_load)
            best_round = tl.where(is_better, index, best_round)
            is_stuck = (index - best_round >= patience) & (best_load <= enough)
            is_over = is_over | is_stuck | (most * 500 <= bound * 501)
            weights_N = weights_N * mean // tl.maximum(load_N, tl.maximum(mean // 64, 1))
            real_N = tl.where(tl.arange(0, RANKS) < num_ranks, weights_N, 0)
            weights_N = tl.maximum(weights_N * one // tl.maximum(tl.max(real_N, axis=0), 1), 1)
    quota_EN = _split(tokens_E, best_EN)
    if ROUNDS > 0:
        other_EN = _split(tokens_E, first_EN)
        is_first = tl.max(tl.sum(other_EN, axis=0), axis=0) < tl.max(tl.sum(quota_EN, axis=0), axis=0)
        quota_EN = tl.where(is_first, other_EN, quota_EN)
    local_EN = tl.minimum(tokens_EN, quota_EN)
    surplus_EN, lack_EN = tokens_EN - local_EN, quota_EN - local_EN
    surplus_end_EN, lack_end_EN = tl.cumsum(surplus_EN, axis=1), tl.cumsum(lack_EN, axis=1)
    own = column == rank
    surplus_E = tl.sum(tl.where(own, surplus_EN, 0), axis=1)[:, None]
    surplus_end_E = tl.sum(tl.where(own, surplus_end_EN, 0), axis=1)[:, None]
    lack_E = tl.sum(tl.where(own, lack_EN, 0), axis=1)[:, None]
    lack_end_E = tl.sum(tl.where(own, lack_end_EN, 0), axis=1)[:, None]
    sent_EN = _overlap(surplus_end_E, surplus_E, lack_end_EN, lack_EN)
    got_EN = _overlap(lack_end_E, lack_E, surplus_end_EN, surplus_EN)
    tl.store(send + place, tl.where(own, local_EN, sent_EN), mask=here)
    tl.store(recv + place, tl.where(own, local_EN, got_EN), mask=here)


def plan_rows(tokens_EN: Tensor, replicas_EN: Tensor, rank: int, sharing: Sharing) -> tuple[Tensor, Tensor]:
    """int64 [E, N] each, in one launch where the table fits the registers of a program."""
    num_experts, num_ranks = tokens_EN.shape
    experts, ranks = power_of_two(num_experts), power_of_two(num_ranks)
    if experts * ranks > _CELLS:
        return torch_plan.plan_rows(tokens_EN, replicas_EN, rank, sharing)
    send_EN, recv_EN = (torch.empty_like(tokens_EN) for _ in range(2))
    launch(
        _plan_kernel, (1,), tokens_EN, tokens_EN, replicas_EN, send_EN, recv_EN, num_experts, num_ranks, rank,
        sharing.patience, sharing.slack, sharing.one, ROUNDS=sharing.rounds, EXPERTS=experts, RANKS=ranks, num_warps=16,
    )  # fmt: skip
    return send_EN, recv_EN
