"""Activations of experts with Triton: one pass forward, one pass backward, in fp32.

Legend: M rows, F activation width, H = F (gelu) or 2F (gated) columns of h. KIND is the place in `ACTIVATIONS`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels.interface import ACTIVATIONS, GATED
from moe_lightning.kernels.triton.launch import ceil_div, launch, row_tile


@triton.jit
def activated(left, right, KIND: tl.constexpr):
    if KIND == 0:
        value = left * 0.5 * (1.0 + tl.erf(left * 0.7071067811865476))
    elif KIND == 1:
        value = left * tl.sigmoid(left) * right
    elif KIND == 2:
        # 0.5 * (1 + tanh(u)) is sigmoid(2u)
        value = left * tl.sigmoid(1.5957691216057308 * (left + 0.044715 * left * left * left))
    else:
        left, right = _clamped(left, right)
        value = left * tl.sigmoid(1.702 * left) * (right + 1.0)
    return value


@triton.jit
def slopes(left, right, KIND: tl.constexpr):
    """Derivatives by left and by right; the second is meaningless for the kinds of gelu."""
    if KIND == 0:
        density = 0.3989422804014327 * tl.exp(-0.5 * left * left)
        by_left = 0.5 * (1.0 + tl.erf(left * 0.7071067811865476)) + left * density
        by_right = by_left
    elif KIND == 1:
        sigmoid = tl.sigmoid(left)
        by_right = left * sigmoid
        by_left = (sigmoid + by_right * (1.0 - sigmoid)) * right
    elif KIND == 2:
        sigmoid = tl.sigmoid(1.5957691216057308 * (left + 0.044715 * left * left * left))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * left * left)
        by_left = sigmoid * (1.0 + left * (1.0 - sigmoid) * inner)
        by_right = by_left
    else:
        gate, up = _clamped(left, right)
        sigmoid = tl.sigmoid(1.702 * gate)
        by_left = tl.where(left <= 7.0, sigmoid * (1.0 + 1.702 * gate * (1.0 - sigmoid)) * (up + 1.0), 0.0)
        by_right = tl.where(tl.abs(right) <= 7.0, gate * sigmoid, 0.0)
    return by_left, by_right


@triton.jit
def _clamped(left, right):
    return tl.minimum(left, 7.0), tl.minimum(tl.maximum(right, -7.0), 7.0)


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    h, out, num_rows, hidden, width,
    KIND: tl.constexpr, TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    source = h + row[:, None] * hidden + column[None, :]
    left = tl.load(source, mask=mask, other=0).to(tl.float32)
    right = left
    if TWO:
        right = tl.load(source + width, mask=mask, other=0).to(tl.float32)
    result = activated(left, right, KIND)
    tl.store(out + row[:, None] * width + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    grad, h, grad_h, num_rows, hidden, width,
    KIND: tl.constexpr, TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    there = row[:, None] * hidden + column[None, :]
    above = tl.load(grad + row[:, None] * width + column[None, :], mask=mask, other=0).to(tl.float32)
    left = tl.load(h + there, mask=mask, other=0).to(tl.float32)
    right = left
    if TWO:
        right = tl.load(h + there + width, mask=mask, other=0).to(tl.float32)
    by_left, by_right = slopes(left, right, KIND)
    if TWO:
        tl.store(grad_h + there + width, (above * by_right).to(grad_h.dtype.element_ty), mask=mask)
    tl.store(grad_h + there, (above * by_left).to(grad_h.dtype.element_ty), mask=mask)


def activation(h_MH: Tensor, kind: str) -> Tensor:
    """[M, F]: the activation of h."""
    num_rows, hidden = h_MH.shape
    width = hidden // 2 if kind in GATED else hidden
    out_MF = h_MH.new_empty(num_rows, width)
    rows, columns = row_tile(width, elements=2048)
    launch(
        _forward_kernel, (ceil_div(num_rows, rows), ceil_div(width, columns)), h_MH,
        h_MH, out_MF, num_rows, hidden, width,
        KIND=ACTIVATIONS.index(kind), TWO=kind in GATED, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return out_MF


def activation_grad(grad_MF: Tensor, h_MH: Tensor, kind: str) -> Tensor:
    """[M, H]: the gradient for h."""
    num_rows, hidden = h_MH.shape
    width = hidden // 2 if kind in GATED else hidden
    grad_MH = torch.empty_like(h_MH)
    rows, columns = row_tile(width, elements=2048)
    launch(
        _backward_kernel, (ceil_div(num_rows, rows), ceil_div(width, columns)), h_MH,
        grad_MF, h_MH, grad_MH, num_rows, hidden, width,
        KIND=ACTIVATIONS.index(kind), TWO=kind in GATED, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return grad_MH
