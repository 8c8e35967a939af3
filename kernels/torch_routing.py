"""Routing with torch: top-k over unique integer keys, and a stable radix sort by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_lightning.kernels.bodies import ExpertSort
from moe_lightning.kernels.torch_rows import row_blocks

_SMALL_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def top_k(scores_TE: Tensor, top_k: int) -> Tensor:
    """int64 [T, K]: ids of the largest scores, descending, ties to the lower id."""
    integer = _SMALL_BITS.get(scores_TE.dtype)
    if integer is None:
        return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    # torch.topk leaves the order of ties open. A key of the score's bits, made monotone, over the reversed id has none.
    num_tokens, num_experts = scores_TE.shape
    reversed_id_E = torch.arange(num_experts - 1, -1, -1, device=scores_TE.device)
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=scores_TE.device)
    limits = torch.iinfo(integer)
    for block in row_blocks(num_tokens, 32 * num_experts, scores_TE.device):
        bits = (scores_TE[block] + 0.0).view(integer)  # + 0.0 turns -0.0 into 0.0, which it equals
        bits ^= (bits >> (limits.bits - 1)) & limits.max  # negative numbers: larger bits mean smaller scores
        keys = bits.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(reversed_id_E)
        torch.sub(num_experts - 1, keys.topk(top_k, dim=-1).values & 0xFFFFFFFF, out=ids_TK[block])
    return ids_TK


def count(ids_TK: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: assignments of each expert, those of -1 left out."""
    return torch.bincount(ids_TK.flatten() + 1, minlength=num_experts + 1)[1:]


def chunk_order(starts_C: Tensor, ends_C: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """int64 [M] each: the old place of each row, and its inverse."""
    sizes_C = torch.diff(ends_C, prepend=ends_C.new_zeros(1))
    shift_C = starts_C - (ends_C - sizes_C)
    rows_M = torch.arange(num_rows, device=starts_C.device)
    index_M = torch.repeat_interleave(shift_C, sizes_C, output_size=num_rows).add_(rows_M)
    inverse_M = torch.empty_like(index_M)
    inverse_M[index_M] = rows_M
    return index_M, inverse_M


def fill_blocks(
    order_A: Tensor, starts_C: Tensor, ends_C: Tensor, num_kept: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """int64 [M] and [A]: the assignment of each row, and the row of each assignment."""
    index_M, inverse_M = chunk_order(starts_C, ends_C, num_rows)
    sorted_A = torch.arange(len(order_A), device=order_A.device)
    inverse_A = torch.empty_like(order_A)
    inverse_A[order_A] = torch.where(sorted_A < num_kept, inverse_M[: len(order_A)], -1)
    return order_A[index_M.clamp_max(len(order_A) - 1)], inverse_A


def sort_by_expert(ids_TK: Tensor, num_experts: int, num_rows: int | None) -> ExpertSort:
    """A stable sort on the narrowest integer type: torch sorts those by counting."""
    ids = ids_TK.reshape(-1)
    # Dropped assignments sort behind the last expert.
    keys = ids if num_rows == ids.numel() else torch.where(ids < 0, num_experts, ids)
    order = torch.sort(keys.to(_key_type(num_experts)), stable=True).indices
    counts = torch.bincount(keys, minlength=num_experts + 1)[:num_experts]
    num_rows = int(counts.sum()) if num_rows is None else num_rows
    row_of = torch.empty_like(order)
    row_of[order] = torch.arange(ids.numel(), device=ids.device)
    starts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    torch.cumsum(counts, 0, out=starts[1:])
    rank = row_of - starts[keys]
    if num_rows < ids.numel():
        dropped = ids < 0
        row_of.masked_fill_(dropped, -1)
        rank.masked_fill_(dropped, -1)
        order = order[:num_rows].contiguous()
    return ExpertSort(order, row_of.view(ids_TK.shape), counts, rank.view(ids_TK.shape))


def _key_type(largest: int) -> torch.dtype:
    return next(t for t in (torch.uint8, torch.int16, torch.int32) if largest <= torch.iinfo(t).max)
