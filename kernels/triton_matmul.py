"""Grouped matmul with Triton: one launch over the tiles of all slots, without reading the counts on the host.

The grid is the largest that any split of the rows could need; each program finds its slot and tile from the counts,
and those past the last tile leave at once. Rows past the sum of the counts form one more slot, which stores zeros.
Where rows are gathered, the gather happens in the load.

Legend: M rows, D inner width, F output width, S slots.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels.triton_launch import INTERPRETED, ceil_div, launch, power_of_two


@triton.jit
def _pick(values, slots, slot):
    """values[slot] of a vector in registers."""
    return tl.sum(tl.where(slots == slot, values, 0), axis=0)


@triton.jit
def _rows_kernel(
    x, weight, tokens, gather, out, num_rows, inner, width, num_slots, stride_slot, stride_inner, stride_width,
    DIVISOR: tl.constexpr, GATHERED: tl.constexpr, PRECISION: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs share rows and weights in the second-level cache: GROUP row tiles walk the columns together.
    num_columns = tl.cdiv(width, BLOCK_N)
    group = tl.program_id(0) // (GROUP * num_columns)
    inside = tl.program_id(0) % (GROUP * num_columns)
    tile = group * GROUP + inside % GROUP
    column_tile = inside // GROUP

    slots = tl.arange(0, SLOTS)
    counts = tl.load(tokens + slots, mask=slots < num_slots, other=0)
    counts = tl.where(slots == num_slots, num_rows - tl.sum(counts, axis=0), counts)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, axis=0)
    slot = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
    if slot > num_slots:
        return
    count = _pick(counts, slots, slot)
    start = _pick(tl.cumsum(counts, axis=0), slots, slot) - count
    first = (tile - _pick(tile_ends - tiles, slots, slot)) * BLOCK_M

    in_slot = first + tl.arange(0, BLOCK_M)
    row = start + in_slot
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if slot < num_slots:
        source = row
        if GATHERED:
            source = tl.load(gather + row, mask=in_slot < count, other=0) // DIVISOR
        k = tl.arange(0, BLOCK_K)
        left = x + source[:, None] * inner + k[None, :]
        right = weight + slot.to(tl.int64) * stride_slot + k[:, None] * stride_inner + column[None, :] * stride_width
        for done in range(0, inner, BLOCK_K):
            in_k = k < inner - done
            a = tl.load(left, mask=(in_slot < count)[:, None] & in_k[None, :], other=0)
            b = tl.load(right, mask=in_k[:, None] & (column < width)[None, :], other=0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            left += BLOCK_K
            right += BLOCK_K * stride_inner
    mask = (in_slot < count)[:, None] & (column < width)[None, :]
    tl.store(out + row[:, None] * width + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weight_kernel(
    x, grad, tokens, gather, out, inner, width, num_slots,
    DIVISOR: tl.constexpr, GATHERED: tl.constexpr, PRECISION: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    num_columns = tl.cdiv(width, BLOCK_N)
    slots = tl.arange(0, SLOTS)
    counts = tl.load(tokens + slots, mask=slots < num_slots, other=0)
    count = _pick(counts, slots, slot)
    start = _pick(tl.cumsum(counts, axis=0), slots, slot) - count

    d = (tl.program_id(0) // num_columns) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % num_columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for done in range(0, count, BLOCK_K):
        in_slot = done + k
        row = start + in_slot
        source = row
        if GATHERED:
            source = tl.load(gather + row, mask=in_slot < count, other=0) // DIVISOR
        a = tl.load(
            x + source[None, :] * inner + d[:, None], mask=(d < inner)[:, None] & (in_slot < count)[None, :], other=0
        )
        b = tl.load(
            grad + row[:, None] * width + column[None, :],
            mask=(in_slot < count)[:, None] & (column < width)[None, :],
            other=0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    here = slot.to(tl.int64) * inner * width + d.to(tl.int64)[:, None] * width + column[None, :]
    mask = (d < inner)[:, None] & (column < width)[None, :]
    tl.store(out + here, total.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Block sizes of one matmul and how its programs are pipelined."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def tiles(dtype: torch.dtype, rows_per_slot: int, capability: int) -> Tiles:
    """Tiles for a dtype, the mean rows of a slot (few rows: low tiles), and the major compute capability."""
    if INTERPRETED:
        return Tiles(m=16, n=16, k=16, warps=4, stages=1)
    if dtype == torch.float32:
        return Tiles(m=64, n=64, k=32, warps=4, stages=3)
    if rows_per_slot <= 48:
        return Tiles(m=32, n=128, k=64, warps=4, stages=4)
    if rows_per_slot <= 96 or capability < 9:
        return Tiles(m=64 if rows_per_slot <= 96 else 128, n=128, k=32 if capability < 9 else 64, warps=4, stages=4)
    return Tiles(m=128, n=256, k=64, warps=8, stages=4)


def grouped_mm(x_MD: Tensor, weight_SDF: Tensor, tokens_S: Tensor, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[M, F]: x @ weight[slot]; rows past the sum of tokens are zero. Any strides of the weight."""
    num_slots, inner, width = weight_SDF.shape
    num_rows = len(x_MD) if gather_M is None else len(gather_M)
    out_MF = x_MD.new_empty(num_rows, width)
    tile = _tiles_for(x_MD, num_rows, num_slots)
    # Each slot, and the tail, may waste one partial tile; the last group of row tiles is filled up.
    row_tiles = ceil_div(num_rows // tile.m + num_slots + 1, _GROUP) * _GROUP if num_rows else 0
    launch(
        _rows_kernel, (row_tiles * ceil_div(width, tile.n),), x_MD,
        x_MD, weight_SDF, tokens_S.to(x_MD.device), gather_M, out_MF,
        num_rows, inner, width, num_slots, *weight_SDF.stride(),
        DIVISOR=divisor, GATHERED=gather_M is not None, PRECISION=_precision(), SLOTS=power_of_two(num_slots + 1),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=_GROUP, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_MF


def grouped_wgrad(x_MD: Tensor, grad_MF: Tensor, tokens_S: Tensor, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[S, D, F]: x^T @ grad over the rows of each slot; zero for an empty slot."""
    num_slots, inner, width = len(tokens_S), x_MD.shape[1], grad_MF.shape[1]
    out_SDF = x_MD.new_empty(num_slots, inner, width)
    tile = _tiles_for(x_MD, inner, 1)
    launch(
        _weight_kernel, (ceil_div(inner, tile.m) * ceil_div(width, tile.n), num_slots), x_MD,
        x_MD, grad_MF, tokens_S.to(x_MD.device), gather_M, out_SDF, inner, width, num_slots,
        DIVISOR=divisor, GATHERED=gather_M is not None, PRECISION=_precision(), SLOTS=power_of_two(num_slots),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_SDF


_GROUP = 8


def _tiles_for(x: Tensor, num_rows: int, num_slots: int) -> Tiles:
    capability = torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0
    return tiles(x.dtype, num_rows // max(1, num_slots), capability)


def _precision() -> str:
    """fp32 operands are multiplied exactly unless torch was told that TF32 will do."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
