"""Routing with Triton: top-k over unique integer keys, and a stable counting sort without atomics.

The sort counts the experts inside each block of assignments, sums the counts of all blocks, expert by expert, in one
parallel scan, and then places every assignment: what the scan says of its expert and block + those before it there.

Legend: T tokens, K choices, A = T*K assignments, E experts, B blocks.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels.bodies import ExpertSort
from moe_lightning.kernels.triton_launch import INTERPRETED, ceil_div, launch, power_of_two

_TILE = 1024 if INTERPRETED else 8192
"""Elements of a (rows, experts) tile in registers."""


@triton.jit
def _top_k_kernel(scores, ids, num_tokens, num_experts, TOP_K: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    mask = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    value = tl.load(scores + token[:, None] * num_experts + expert[None, :], mask=mask, other=0).to(tl.float32)
    # Key: the score's bits made monotone, above the reversed id, so that no two are equal. + 0.0 turns -0.0 into 0.0.
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (bits.to(tl.int64) << 32) | (EXPERTS - 1 - expert)[None, :]
    lowest = -0x8000000000000000
    key = tl.where(mask, key, lowest)
    for k in range(TOP_K):
        best = tl.max(key, axis=1)
        tl.store(ids + token * TOP_K + k, EXPERTS - 1 - (best & 0xFFFFFFFF), mask=token < num_tokens)
        key = tl.where(key == best[:, None], lowest, key)


@triton.jit
def _count_kernel(ids, rank, counts, num_ids, num_experts, num_blocks, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Rank of each assignment among those of its expert in the block, and the block's count of each expert."""
    block = tl.program_id(0).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS)
    mine = tl.load(ids + place, mask=place < num_ids, other=-1)
    hit = (mine[:, None] == expert[None, :]).to(tl.int32)
    before = tl.cumsum(hit, axis=0) - hit
    tl.store(rank + place, tl.sum(before * hit, axis=1).to(tl.int64), mask=place < num_ids)
    tl.store(counts + expert * num_blocks + block, tl.sum(hit, axis=0).to(tl.int64), mask=expert < num_experts)


@triton.jit
def _place_kernel(ids, rank, counts, upto, order, inverse, num_ids, num_blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + place, mask=place < num_ids, other=-1)
    kept = expert >= 0
    cell = expert * num_blocks + block
    row = tl.load(rank + place, mask=kept, other=0)
    row += tl.load(upto + cell, mask=kept, other=0) - tl.load(counts + cell, mask=kept, other=0)
    start = tl.load(upto + expert * num_blocks - 1, mask=kept & (expert > 0), other=0)
    tl.store(order + row, place, mask=kept)
    tl.store(inverse + place, tl.where(kept, row, -1), mask=place < num_ids)
    tl.store(rank + place, tl.where(kept, row - start, -1), mask=place < num_ids)


def top_k(scores_TE: Tensor, top_k: int) -> Tensor:
    """int64 [T, K]: ids of the largest scores, descending, ties to the lower id."""
    num_tokens, num_experts = scores_TE.shape
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=scores_TE.device)
    experts = power_of_two(num_experts)
    rows = max(1, _TILE // 4 // experts)
    launch(
        _top_k_kernel, (ceil_div(num_tokens, rows),), scores_TE, scores_TE, ids_TK, num_tokens, num_experts,
        TOP_K=top_k, ROWS=rows, EXPERTS=experts,
    )  # fmt: skip
    return ids_TK


def sort_by_expert(ids_TK: Tensor, num_experts: int, may_drop: bool) -> ExpertSort:
    """Two passes over the assignments and one scan of counts; waits only to learn how many were dropped."""
    num_ids = ids_TK.numel()
    experts = power_of_two(num_experts)
    block = max(16, _TILE // experts)
    num_blocks = ceil_div(num_ids, block)
    rank_TK, inverse_TK, order_A = torch.empty_like(ids_TK), torch.empty_like(ids_TK), ids_TK.new_empty(num_ids)
    counts_EB = ids_TK.new_empty(num_experts, num_blocks)
    launch(
        _count_kernel, (num_blocks,), ids_TK, ids_TK, rank_TK, counts_EB, num_ids, num_experts, num_blocks,
        BLOCK=block, EXPERTS=experts,
    )  # fmt: skip
    upto_EB = counts_EB.view(-1).cumsum(0)
    counts_E = counts_EB.sum(1)
    launch(
        _place_kernel, (num_blocks,), ids_TK, ids_TK, rank_TK, counts_EB, upto_EB, order_A, inverse_TK, num_ids,
        num_blocks, BLOCK=block,
    )  # fmt: skip
    if may_drop:
        order_A = order_A[: int(counts_E.sum())]
    return ExpertSort(order_A, inverse_TK, counts_E, rank_TK)
