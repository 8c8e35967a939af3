"""Row movement, keyed dropout and ordered sums with Triton; every sum runs inside one program in a fixed order.

Parities are computed where snapshots lie, in host memory: a GPU has torch for them.

Legend: T tokens, K choices, M rows, D model width, L elements.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels import torch_kernels
from moe_lightning.kernels.interface import SAMPLE_ROWS, Draw
from moe_lightning.kernels.torch_kernels import xor as xor
from moe_lightning.kernels.triton.launch import INTERPRETED, ceil_div, launch, row_tile


@triton.jit(do_not_specialize=["num_rows"])
def _gather_kernel(x, index, out, num_rows, width, DIVISOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(index + row, mask=row < num_rows, other=0) // DIVISOR
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + source[:, None] * width + column[None, :], mask=mask, other=0)
    tl.store(out + row[:, None] * width + column[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(
    rows, inverse, weights, out, num_tokens, width,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(TOP_K):
        row = tl.load(inverse + token * TOP_K + k, mask=token < num_tokens, other=-1)
        mask = (row >= 0)[:, None] & (column < width)[None, :]
        value = tl.load(rows + row[:, None] * width + column[None, :], mask=mask, other=0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * TOP_K + k, mask=row >= 0, other=0).to(tl.float32)[:, None]
        total += value
    mask = (token < num_tokens)[:, None] & (column < width)[None, :]
    tl.store(out + token[:, None] * width + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _spread_kernel(
    grad, order, rows, weights, out, products, num_rows, width,
    TOP_K: tl.constexpr, WANT_ROWS: tl.constexpr, WANT_PRODUCTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    assignment = tl.load(order + row, mask=row < num_rows, other=0)
    weight = tl.load(weights + assignment).to(tl.float32)
    product = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = (row < num_rows)[:, None] & (column < width)[None, :]
        here = row[:, None] * width + column[None, :]
        value = tl.load(grad + (assignment // TOP_K)[:, None] * width + column[None, :], mask=mask, other=0)
        value = value.to(tl.float32)
        if WANT_PRODUCTS:
            product += tl.sum(value * tl.load(rows + here, mask=mask, other=0).to(tl.float32), axis=1)
        if WANT_ROWS:
            tl.store(out + here, (value * weight[:, None]).to(out.dtype.element_ty), mask=mask)
    if WANT_PRODUCTS:
        tl.store(products + row, product, mask=row < num_rows)


def gather(x_TD: Tensor, index_M: Tensor, divisor: int) -> Tensor:
    """[M, D]: x[index // divisor]."""
    num_rows, width = len(index_M), x_TD.shape[1]
    out_MD = x_TD.new_empty(num_rows, width)
    rows, columns = row_tile(width)
    grid = (ceil_div(num_rows, rows), ceil_div(width, columns))
    launch(
        _gather_kernel, grid, x_TD, x_TD, index_M, out_MD, num_rows, width,
        DIVISOR=divisor, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return out_MD


def combine(rows_MD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """[T, D]: weighted sums of the rows of each token, accumulated in fp32 in the order of the choices."""
    num_tokens, top_k = inverse_TK.shape
    width = rows_MD.shape[1]
    out_TD = rows_MD.new_empty(num_tokens, width)
    rows, columns = row_tile(width, elements=2048)
    grid = (ceil_div(num_tokens, rows), ceil_div(width, columns))
    launch(
        _combine_kernel, grid, rows_MD, rows_MD, inverse_TK, weights_TK, out_TD, num_tokens, width,
        TOP_K=top_k, WEIGHTED=weights_TK is not None, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return out_TD


def spread(
    grad_TD: Tensor, order_M: Tensor, rows_MD: Tensor | None, weights_TK: Tensor, want_rows: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `combine` for its rows and (as products by row) its weights, in one pass."""
    num_rows, width = len(order_M), grad_TD.shape[1]
    out_MD = grad_TD.new_empty(num_rows, width) if want_rows else None
    products_M = None if rows_MD is None else grad_TD.new_empty(num_rows, dtype=torch.float32)
    rows, columns = row_tile(width)
    launch(
        _spread_kernel, (ceil_div(num_rows, rows),), grad_TD,
        grad_TD, order_M, rows_MD, weights_TK, out_MD, products_M, num_rows, width,
        TOP_K=weights_TK.shape[1], WANT_ROWS=want_rows, WANT_PRODUCTS=rows_MD is not None,
        ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return out_MD, products_M


_BLOCK = 64 if INTERPRETED else 2048


@triton.jit(do_not_specialize=["num_parts"])
def _sum_kernel(parts, out, num_parts, length, stride_part, stride, stride_out, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < length
    total = tl.load(parts + place * stride, mask=mask, other=0).to(tl.float32)
    for part in range(1, num_parts):
        total += tl.load(parts + part * stride_part + place * stride, mask=mask, other=0).to(tl.float32)
    tl.store(out + place * stride_out, total.to(out.dtype.element_ty), mask=mask)


def sum_in_rank_order(parts_NL: Tensor, out_L: Tensor) -> None:
    """out = ((parts[0] + parts[1]) + parts[2]) + ..., accumulated in fp32 and rounded once."""
    num_parts, length = parts_NL.shape
    launch(
        _sum_kernel, (ceil_div(length, _BLOCK),), out_L,
        parts_NL, out_L, num_parts, length, *parts_NL.stride(), out_L.stride(0), BLOCK=_BLOCK,
    )  # fmt: skip


_GOLDEN: tl.constexpr = tl.constexpr(torch_kernels.GOLDEN)
_SAMPLE_ROWS: tl.constexpr = tl.constexpr(SAMPLE_ROWS)
_MIX_1: tl.constexpr = tl.constexpr(torch_kernels.MIX_1)
_MIX_2: tl.constexpr = tl.constexpr(torch_kernels.MIX_2)


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["num_rows", "key", "first", "here", "part"])
def _dropout_kernel(
    x, out, num_rows, width, key, first, here, part, p, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    size = here.to(tl.int64)
    place = (row // size + first) * _SAMPLE_ROWS + row % size + size * part
    rows = _mix(place * _GOLDEN + key)
    bits = _mix(rows[:, None] + ((column + 1).to(tl.int64) * _GOLDEN)[None, :])
    uniform = (((bits >> 40) & 0xFFFFFF).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    where = row[:, None] * width + column[None, :]
    value = tl.load(x + where, mask=mask, other=0).to(tl.float32)
    tl.store(out + where, (value * tl.where(uniform >= p, scale, 0.0)).to(out.dtype.element_ty), mask=mask)


def dropout(x_MD: Tensor, p: float, draw: Draw) -> Tensor:
    """[M, D], in one launch; applied to a gradient it is its own backward."""
    num_rows, width = x_MD.shape
    out_MD = torch.empty_like(x_MD)
    scale = torch.tensor(np.float32(1.0) / np.float32(1.0 - p)).to(x_MD.dtype).item()  # rounded as in torch
    rows, columns = row_tile(width, elements=2048)
    launch(
        _dropout_kernel, (ceil_div(num_rows, rows), ceil_div(width, columns)), x_MD, x_MD, out_MD, num_rows, width,
        draw.key, draw.first, draw.here, draw.part, p, scale, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return out_MD
