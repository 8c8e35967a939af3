"""Gradients of the experts' weights with Triton: a sum over the rows of each slot.

A program walks over several tiles, of any slots, in one loop, so that operands of the next tile are on their way under
the end of the present one; the copy engine stores a result beside the threads. A tile takes as long as its slot has
rows: there are several programs for each multiprocessor, so that one with a busy slot's tile takes fewer of them.

Legend: M rows, D inner width, F output width, S slots.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels.triton_launch import ceil_div, launch, power_of_two
from moe_lightning.kernels.triton_tiles import RowTiles, described, limits, precision, tiles_for

_PROGRAMS = 4
"""Of a multiprocessor, one after the other."""


@triton.jit(do_not_specialize=["num_slots"])
def _weight_kernel(
    x, grad, starts, gather, out, out_blocks, inner, width, num_slots,
    DIVISOR: tl.constexpr, GATHERED: tl.constexpr, GRAD_GATHERED: tl.constexpr, PRECISION: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """All tiles of a program are one loop over steps of BLOCK_K rows, though slots differ in rows."""
    num_columns = tl.cdiv(width, BLOCK_N)
    num_tiles = tl.cdiv(inner, BLOCK_M) * num_columns
    slots = tl.arange(0, SLOTS)
    is_slot = slots < num_slots
    counts = tl.load(starts + slots + 1, mask=is_slot, other=0) - tl.load(starts + slots, mask=is_slot, other=0)
    before = _mine(slots * num_tiles)
    mine = tl.where(is_slot, _mine((slots + 1) * num_tiles) - before, 0)
    total_steps = tl.sum(mine * _steps(counts, BLOCK_K), axis=0)

    index = tl.program_id(0) - tl.num_programs(0)
    step, steps, slot, start, end, row_d, column_f = 0, 1, 0, 0, 0, 0, 0
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in tl.range(0, total_steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            index += tl.num_programs(0)
            slot = index // num_tiles
            row_d = index % num_tiles // num_columns * BLOCK_M
            column_f = index % num_columns * BLOCK_N
            start = tl.load(starts + slot)
            end = tl.load(starts + slot + 1)
            steps = _steps(end - start, BLOCK_K)
        d = row_d + tl.arange(0, BLOCK_M)
        f = column_f + tl.arange(0, BLOCK_N)
        row = start + step * BLOCK_K + tl.arange(0, BLOCK_K)
        in_slot = row < end
        left, right = row.to(tl.int64), row.to(tl.int64)
        if GATHERED or GRAD_GATHERED:
            source = tl.load(gather + row, mask=in_slot, other=0) // DIVISOR
            if GATHERED:
                left = source
            if GRAD_GATHERED:
                right = source
        a = tl.load(x + left[None, :] * inner + d[:, None], mask=(d < inner)[:, None] & in_slot[None, :], other=0)
        b = tl.load(grad + right[:, None] * width + f[None, :], mask=in_slot[:, None] & (f < width)[None, :], other=0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        if step == steps - 1:
            result = total.to(out.dtype.element_ty)
            if out_blocks is not None:
                out_blocks.store([slot, row_d, column_f], result.reshape(1, BLOCK_M, BLOCK_N))
            else:
                here = out + tl.cast(slot, tl.int64) * inner * width + d.to(tl.int64)[:, None] * width + f[None, :]
                tl.store(here, result, mask=(d < inner)[:, None] & (f < width)[None, :])
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


@triton.jit
def _mine(bound):
    """How many tiles below a bound this program computes: it takes every tl.num_programs(0)-th."""
    return tl.maximum(bound - tl.program_id(0) + tl.num_programs(0) - 1, 0) // tl.num_programs(0)


@triton.jit
def _steps(count, BLOCK_K: tl.constexpr):
    """Of a tile: an empty slot has one, which stores its zeros."""
    return tl.maximum(tl.cdiv(count, BLOCK_K), 1)


def grouped_wgrad(x_MD: Tensor, grad_MF: Tensor, cut: RowTiles, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[S, D, F]: x^T @ grad over the rows of each slot; zero for an empty slot."""
    return _wgrad(x_MD, grad_MF, cut, gather_M, divisor, gathers_grad=False)


def down_wgrad(activation_MF: Tensor, grad: Tensor, cut: RowTiles, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[S, F, D]: activation^T @ grad, where the gradient may be by tokens."""
    return _wgrad(activation_MF, grad, cut, gather_M, divisor, gathers_grad=True)


def _wgrad(
    x: Tensor, grad: Tensor, cut: RowTiles, gather_M: Tensor | None, divisor: int, *, gathers_grad: bool
) -> Tensor:
    num_slots, inner, width = len(cut.starts_S) - 1, x.shape[1], grad.shape[1]
    out_SDF = x.new_empty(num_slots, inner, width)
    found = limits(x.device)
    tile = tiles_for(x.dtype, inner, found)
    tiles = num_slots * ceil_div(inner, tile.m) * ceil_div(width, tile.n)
    launch(
        _weight_kernel, (min(_PROGRAMS * found.multiprocessors, tiles),), x,
        x, grad, cut.starts_S, gather_M, out_SDF, described(out_SDF, [1, tile.m, tile.n], found), inner, width,
        num_slots, DIVISOR=divisor, GATHERED=gather_M is not None and not gathers_grad,
        GRAD_GATHERED=gather_M is not None and gathers_grad, PRECISION=precision(), SLOTS=power_of_two(num_slots),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, num_warps=tile.warps,
        # Half of the stages wait for indices.
        num_stages=tile.stages if gather_M is None else 2 * tile.stages - 1,
    )  # fmt: skip
    return out_SDF
