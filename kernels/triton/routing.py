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

from moe_lightning.kernels.interface import ExpertSort
from moe_lightning.kernels.triton.launch import INTERPRETED, ceil_div, launch, power_of_two

_TILE = 1024 if INTERPRETED else 8192
"""Elements of a (rows, experts) tile in registers."""

_ROWS = 32 if INTERPRETED else 512
"""Rows of a block of `chunk_order`."""


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
def _place_kernel(
    ids, rank, counts, upto, total, order, inverse, num_ids, num_experts, num_blocks,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    if block == 0:
        every = tl.arange(0, EXPERTS)
        ends = tl.load(upto + every * num_blocks + num_blocks - 1, mask=every < num_experts, other=0)
        starts = tl.load(upto + every * num_blocks - 1, mask=(every > 0) & (every < num_experts), other=0)
        tl.store(total + every, ends - starts, mask=every < num_experts)
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


@triton.jit
def _old_place(starts, ends, row, here, num_chunks, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the old places of rows of the new order."""
    low = tl.zeros((BLOCK,), dtype=tl.int32)  # the first chunk that ends behind the row lies in low..high
    high = tl.full((BLOCK,), 0, dtype=tl.int32) + (num_chunks - 1)
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_behind = tl.load(ends + middle, mask=here, other=0) > row
        high = tl.where(is_behind, middle, high)
        low = tl.where(is_behind, low, tl.minimum(middle + 1, high))
    begins = tl.load(ends + low - 1, mask=here & (low > 0), other=0)
    return tl.load(starts + low, mask=here, other=0) + row - begins


@triton.jit(do_not_specialize=["num_rows", "num_chunks"])
def _chunk_kernel(starts, ends, index, inverse, num_rows, num_chunks, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = row < num_rows
    old = _old_place(starts, ends, row, here, num_chunks, STEPS, BLOCK)
    tl.store(index + row, old, mask=here)
    tl.store(inverse + old, row, mask=here)


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "num_ids"])
def _fill_kernel(
    order, starts, ends, num_routed, index, inverse, num_ids, num_rows, num_chunks,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = row < num_rows
    old = _old_place(starts, ends, row, here, num_chunks, STEPS, BLOCK)
    mine = tl.load(order + tl.minimum(old, num_ids - 1), mask=here, other=0)
    tl.store(index + row, mine, mask=here)
    tl.store(inverse + mine, tl.where(old < tl.load(num_routed), row, -1), mask=here & (old < num_ids))


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


def count(ids_TK: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: assignments of each expert, those of -1 left out; nothing is read on the host."""
    return _count(ids_TK, num_experts)[1].sum(1)


def chunk_order(starts_C: Tensor, ends_C: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """int64 [M] each: the old place of each row, and its inverse, in one launch."""
    index_M, inverse_M = (starts_C.new_empty(num_rows) for _ in range(2))
    launch(
        _chunk_kernel, (ceil_div(num_rows, _ROWS),), starts_C, starts_C, ends_C, index_M, inverse_M, num_rows,
        len(starts_C), STEPS=len(starts_C).bit_length(), BLOCK=_ROWS,
    )  # fmt: skip
    return index_M, inverse_M


def fill_blocks(
    order_A: Tensor, starts_C: Tensor, ends_C: Tensor, num_routed: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """int64 [M] and [A]: the assignment of each row, and the row of each assignment, in one launch."""
    index_M, inverse_A = order_A.new_empty(num_rows), torch.empty_like(order_A)
    launch(
        _fill_kernel, (ceil_div(num_rows, _ROWS),), order_A, order_A, starts_C, ends_C, num_routed, index_M, inverse_A,
        len(order_A), num_rows, len(starts_C), STEPS=len(starts_C).bit_length(), BLOCK=_ROWS,
    )  # fmt: skip
    return index_M, inverse_A


def _block(num_experts: int) -> int:
    """Assignments of a block of the sort."""
    return max(16, _TILE // power_of_two(num_experts))


def _count(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return each assignment's place among those of its expert in its block, and the blocks' counts [E, B]."""
    num_blocks = ceil_div(ids_TK.numel(), _block(num_experts))
    rank_TK, counts_EB = torch.empty_like(ids_TK), ids_TK.new_empty(num_experts, num_blocks)
    launch(
        _count_kernel, (num_blocks,), ids_TK, ids_TK, rank_TK, counts_EB, ids_TK.numel(), num_experts, num_blocks,
        BLOCK=_block(num_experts), EXPERTS=power_of_two(num_experts),
    )  # fmt: skip
    return rank_TK, counts_EB


def sort_by_expert(ids_TK: Tensor, num_experts: int, num_rows: int | None) -> ExpertSort:
    """Two passes over the assignments and one scan of counts; waits only to learn how many were dropped."""
    num_ids, experts, block = ids_TK.numel(), power_of_two(num_experts), _block(num_experts)
    num_blocks = ceil_div(num_ids, block)
    inverse_TK, order_A = torch.empty_like(ids_TK), ids_TK.new_empty(num_ids)
    rank_TK, counts_EB = _count(ids_TK, num_experts)
    upto_EB = counts_EB.view(-1).cumsum(0)
    counts_E = ids_TK.new_empty(num_experts) if num_blocks else ids_TK.new_zeros(num_experts)
    launch(
        _place_kernel, (num_blocks,), ids_TK, ids_TK, rank_TK, counts_EB, upto_EB, counts_E, order_A, inverse_TK,
        num_ids, num_experts, num_blocks, BLOCK=block, EXPERTS=experts,
    )  # fmt: skip
    num_rows = int(counts_E.sum()) if num_rows is None else num_rows
    order_A = order_A[:num_rows]
    return ExpertSort(order_A, inverse_TK, counts_E, rank_TK)
