"""Quotas, the dispatch plan and its runs of rows with Triton: one program that keeps the tables [E, N] in registers.

Legend: E experts, N ranks, C slots.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels import torch_kernels
from moe_lightning.kernels.interface import QuotaRounds, Runs
from moe_lightning.kernels.triton.launch import launch, power_of_two

_CELLS = 4096
"""Most cells of a table in the registers of one program; torch plans larger ones."""


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
    tokens, row_stride, column_stride, replicas, send, recv, num_experts, num_ranks, rank, patience, slack, largest_one,
    ROUNDS: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    expert, column = tl.arange(0, EXPERTS)[:, None], tl.arange(0, RANKS)[None, :]
    here = (expert < num_experts) & (column < num_ranks)
    place = expert * num_ranks + column
    tokens_EN = tl.load(tokens + expert * row_stride + column * column_stride, mask=here, other=0)
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


@triton.jit(do_not_specialize=["block"])
def _runs_kernel(
    send, recv, slots, send_starts, send_ends, recv_starts, recv_ends, tokens,
    num_experts, num_ranks, num_slots, block,
    EXPERTS: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    expert, rank = tl.arange(0, EXPERTS), tl.arange(0, RANKS)
    is_rank = rank < num_ranks
    place = expert[:, None] * num_ranks + rank[None, :]
    here = (expert < num_experts)[:, None] & is_rank[None, :]
    begins_N = rank.to(tl.int64) * block

    sizes_EN = tl.load(send + place, mask=here, other=0)
    upto_EN, by_expert_E, by_rank_N = tl.cumsum(sizes_EN, axis=1), tl.sum(sizes_EN, axis=1), tl.sum(sizes_EN, axis=0)
    starts_EN = (tl.cumsum(by_expert_E, axis=0) - by_expert_E)[:, None] + upto_EN - sizes_EN
    room_N = tl.where(is_rank, block - by_rank_N, 0)
    run = rank[None, :] * (num_experts + 1) + expert[:, None]
    tl.store(send_starts + run, starts_EN, mask=here)
    tl.store(send_ends + run, begins_N[None, :] + tl.cumsum(sizes_EN, axis=0), mask=here)
    last = rank * (num_experts + 1) + num_experts
    tl.store(send_starts + last, tl.sum(by_rank_N, axis=0) + tl.cumsum(room_N, axis=0) - room_N, mask=is_rank)
    tl.store(send_ends + last, begins_N + by_rank_N + room_N, mask=is_rank)

    sizes_EN = tl.load(recv + place, mask=here, other=0)
    by_rank_N = tl.sum(sizes_EN, axis=0)
    room_N = tl.where(is_rank, block - by_rank_N, 0)
    starts_EN = begins_N[None, :] + tl.cumsum(sizes_EN, axis=0) - sizes_EN
    slot = tl.arange(0, SLOTS)
    holds = tl.load(slots + slot, mask=slot < num_slots, other=num_experts)
    is_run = (holds < num_experts)[:, None] & is_rank[None, :]
    sizes_CN = tl.load(recv + holds[:, None] * num_ranks + rank[None, :], mask=is_run, other=0)
    tokens_C = tl.sum(sizes_CN, axis=1)
    held_CN = tl.minimum(holds, num_experts - 1)[:, None].to(tl.int32) + tl.zeros((SLOTS, RANKS), dtype=tl.int32)
    run = slot[:, None] * num_ranks + rank[None, :]
    is_slot = (slot < num_slots)[:, None] & is_rank[None, :]
    tl.store(recv_starts + run, tl.where(is_run, tl.gather(starts_EN, held_CN, axis=0), 0), mask=is_slot)
    ends_CN = (tl.cumsum(tokens_C, axis=0) - tokens_C)[:, None] + tl.cumsum(sizes_CN, axis=1)
    tl.store(recv_ends + run, ends_CN, mask=is_slot)
    tl.store(tokens + slot, tokens_C, mask=slot < num_slots)
    last = num_slots * num_ranks + rank
    tl.store(recv_starts + last, begins_N + by_rank_N, mask=is_rank)
    tl.store(recv_ends + last, tl.sum(tokens_C, axis=0) + tl.cumsum(room_N, axis=0), mask=is_rank)


def plan_rows(tokens_EN: Tensor, replicas_EN: Tensor, rank: int, sharing: QuotaRounds) -> tuple[Tensor, Tensor]:
    """int64 [E, N] each, in one launch where the table fits the registers of a program."""
    num_experts, num_ranks = tokens_EN.shape
    experts, ranks = power_of_two(num_experts), power_of_two(num_ranks)
    if experts * ranks > _CELLS:
        return torch_kernels.plan_rows(tokens_EN, replicas_EN, rank, sharing)
    send_EN, recv_EN = (torch.empty_like(replicas_EN) for _ in range(2))
    launch(
        _plan_kernel, (1,), tokens_EN, tokens_EN, *tokens_EN.stride(), replicas_EN, send_EN, recv_EN, num_experts,
        num_ranks, rank, sharing.patience, sharing.slack, sharing.one, ROUNDS=sharing.rounds, EXPERTS=experts,
        RANKS=ranks, num_warps=16,
    )  # fmt: skip
    return send_EN, recv_EN


def runs(send_EN: Tensor, recv_EN: Tensor, slots_C: Tensor, block: int) -> Runs:
    """See `kernels.plan_runs`; one launch where the tables fit the registers of a program."""
    (num_experts, num_ranks), num_slots = send_EN.shape, len(slots_C)
    experts, ranks, slots = (power_of_two(number) for number in (num_experts, num_ranks, num_slots))
    if max(experts, slots) * ranks > _CELLS:
        return torch_kernels.runs(send_EN, recv_EN, slots_C, block)
    sizes = [num_ranks * (num_experts + 1)] * 2 + [(num_slots + 1) * num_ranks] * 2 + [num_slots]
    made = Runs(*send_EN.new_empty(sum(sizes)).split(sizes))
    launch(
        _runs_kernel, (1,), send_EN, send_EN, recv_EN, slots_C, *made, num_experts, num_ranks, num_slots, block,
        EXPERTS=experts, RANKS=ranks, SLOTS=slots, num_warps=16,
    )  # fmt: skip
    return made
