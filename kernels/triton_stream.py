"""Keyed dropout with Triton: hash, comparison and product in one pass.

Legend: M rows, D columns.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels import torch_stream
from moe_lightning.kernels.bodies import Draw
from moe_lightning.kernels.triton_launch import ceil_div, launch, row_tile

_GOLDEN: tl.constexpr = tl.constexpr(torch_stream.GOLDEN)
_MIX_1: tl.constexpr = tl.constexpr(torch_stream.MIX_1)
_MIX_2: tl.constexpr = tl.constexpr(torch_stream.MIX_2)


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["num_rows", "key", "first", "here", "parts", "part"])
def _dropout_kernel(
    x, out, num_rows, width, key, first, here, parts, part, p, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    size = here.to(tl.int64)
    place = (row // size + first) * (size * parts) + row % size + size * part
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
    scale = torch.tensor(np.float32(1.0) / np.float32(1.0 - p)).to(x_MD.dtype).item()  # rounded as the torch body does
    rows, columns = row_tile(width, elements=2048)
    launch(
        _dropout_kernel, (ceil_div(num_rows, rows), ceil_div(width, columns)), x_MD, x_MD, out_MD, num_rows, width,
        draw.key, draw.first, draw.here, draw.parts, draw.part, p, scale, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return out_MD
