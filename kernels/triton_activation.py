"""Fused activation and gate weights with Triton: one pass forward, one pass backward, in fp32.

Legend: M rows, F activation width, H = F (gelu) or 2F (swiglu) columns of h.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels.triton_launch import ceil_div, launch, row_tile


@triton.jit
def _gelu(x):
    return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _forward_kernel(
    h, gate, out, num_rows, hidden, width,
    SWIGLU: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    source = h + row[:, None] * hidden + column[None, :]
    left = tl.load(source, mask=mask, other=0).to(tl.float32)
    if SWIGLU:
        value = left * tl.sigmoid(left) * tl.load(source + width, mask=mask, other=0).to(tl.float32)
    else:
        value = _gelu(left)
    if GATED:
        value *= tl.load(gate + row, mask=row < num_rows, other=0).to(tl.float32)[:, None]
    tl.store(out + row[:, None] * width + column[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad, h, gate, saved, grad_h, grad_gate, num_rows, hidden, width,
    SWIGLU: tl.constexpr, GATED: tl.constexpr, SAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    product = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = (row < num_rows)[:, None] & (column < width)[None, :]
        here = row[:, None] * width + column[None, :]
        there = row[:, None] * hidden + column[None, :]
        above = tl.load(grad + here, mask=mask, other=0).to(tl.float32)
        left = tl.load(h + there, mask=mask, other=0).to(tl.float32)
        right = left
        if SWIGLU:
            right = tl.load(h + there + width, mask=mask, other=0).to(tl.float32)
        sigmoid = tl.sigmoid(left)
        if GATED:
            if SAVED:
                value = tl.load(saved + here, mask=mask, other=0).to(tl.float32)
            elif SWIGLU:
                value = left * sigmoid * right
            else:
                value = _gelu(left)
            product += tl.sum(above * value, axis=1)
            above *= tl.load(gate + row, mask=row < num_rows, other=0).to(tl.float32)[:, None]
        if SWIGLU:
            slope = sigmoid * (1.0 + left * (1.0 - sigmoid)) * right
            tl.store(grad_h + there + width, (above * left * sigmoid).to(grad_h.dtype.element_ty), mask=mask)
        else:
            density = 0.3989422804014327 * tl.exp(-0.5 * left * left)
            slope = 0.5 * (1.0 + tl.erf(left * 0.7071067811865476)) + left * density
        tl.store(grad_h + there, (above * slope).to(grad_h.dtype.element_ty), mask=mask)
    if GATED:
        tl.store(grad_gate + row, product, mask=row < num_rows)


def activation(h_MH: Tensor, kind: str, gate_M: Tensor | None) -> Tensor:
    """[M, F]: exact (erf) GELU of h, or silu(first half) * second half; times the gate weight of each row."""
    num_rows, hidden = h_MH.shape
    width = hidden // 2 if kind == "swiglu" else hidden
    out_MF = h_MH.new_empty(num_rows, width)
    rows, columns = row_tile(width, elements=2048)
    launch(
        _forward_kernel, (ceil_div(num_rows, rows), ceil_div(width, columns)), h_MH,
        h_MH, gate_M, out_MF, num_rows, hidden, width,
        SWIGLU=kind == "swiglu", GATED=gate_M is not None, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return out_MF


def activation_grad(
    grad_MF: Tensor, h_MH: Tensor, kind: str, gate_M: Tensor | None, out_MF: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients for h and for the gate weights; a program owns whole rows, so the gate's sum has one order."""
    num_rows, hidden = h_MH.shape
    width = hidden // 2 if kind == "swiglu" else hidden
    grad_MH = torch.empty_like(h_MH)
    grad_gate_M = None if gate_M is None else h_MH.new_empty(num_rows, dtype=torch.float32)
    rows, columns = row_tile(width, elements=2048)
    launch(
        _backward_kernel, (ceil_div(num_rows, rows),), h_MH,
        grad_MF, h_MH, gate_M, out_MF, grad_MH, grad_gate_M, num_rows, hidden, width,
        SWIGLU=kind == "swiglu", GATED=gate_M is not None, SAVED=out_MF is not None, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return grad_MH, grad_gate_M
