"""Fused activation and gate with torch: block by block through the cache, in fp32 (fp64 for fp64)."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_lightning.kernels import buffers
from moe_lightning.kernels.bodies import CLAMPED_ALPHA, CLAMPED_LIMIT, is_gated
from moe_lightning.kernels.torch_rows import row_blocks


def activation(h_MH: Tensor, kind: str, gate_M: Tensor | None) -> Tensor:
    """[M, F]: the activation of h, times the gate weight of each row."""
    num_rows, hidden = h_MH.shape
    width = hidden // 2 if is_gated(kind) else hidden
    compute = torch.promote_types(h_MH.dtype, torch.float32)
    out_MF = buffers.empty((num_rows, width), h_MH.dtype, h_MH.device)
    for block in row_blocks(num_rows, hidden * compute.itemsize, h_MH.device):
        value = _in_place_or_wider(out_MF[block], compute)
        _activate(h_MH[block].to(compute), kind, value)
        if gate_M is not None:
            value.mul_(gate_M[block].to(compute).unsqueeze(1))
        if value.dtype != out_MF.dtype:
            out_MF[block] = value
    return out_MF


def activation_grad(grad_MF: Tensor, h_MH: Tensor, kind: str, gate_M: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients for h and for the gate weights; the activation itself is computed again."""
    num_rows, hidden = h_MH.shape
    compute = torch.promote_types(h_MH.dtype, torch.float32)
    grad_MH = buffers.empty((num_rows, hidden), h_MH.dtype, h_MH.device)
    grad_gate_M = None if gate_M is None else torch.empty(num_rows, dtype=compute, device=h_MH.device)
    for block in row_blocks(num_rows, hidden * compute.itemsize, h_MH.device):
        h, grad = h_MH[block].to(compute), grad_MF[block].to(compute)
        if gate_M is not None and grad_gate_M is not None:
            torch.sum(_activate(h, kind, torch.empty_like(grad)) * grad, dim=1, out=grad_gate_M[block])
            grad = grad * gate_M[block].to(compute).unsqueeze(1)
        target = _in_place_or_wider(grad_MH[block], compute)
        _differentiate(grad, h, kind, target)
        if target.dtype != grad_MH.dtype:
            grad_MH[block] = target
    return grad_MH, grad_gate_M


def _activate(h: Tensor, kind: str, out: Tensor) -> Tensor:
    if not is_gated(kind):
        torch.ops.aten.gelu.out(h, approximate=_gelu_form(kind), out=out)
        return out
    left, right = h.chunk(2, dim=1)
    if kind == "swiglu":
        torch.ops.aten.silu.out(left, out=out).mul_(right)
    else:
        left, right = _clamped(left, right)
        torch.sigmoid(CLAMPED_ALPHA * left, out=out).mul_(left).mul_(right.add_(1.0))
    return out


def _differentiate(grad: Tensor, h: Tensor, kind: str, out: Tensor) -> None:
    if not is_gated(kind):
        torch.ops.aten.gelu_backward.grad_input(grad, h, approximate=_gelu_form(kind), grad_input=out)
        return
    (left, right), (to_left, to_right) = h.chunk(2, dim=1), out.chunk(2, dim=1)
    if kind == "swiglu":
        torch.ops.aten.silu_backward.grad_input(grad * right, left, grad_input=to_left)
        torch.ops.aten.silu.out(left, out=to_right).mul_(grad)
        return
    gate, up = _clamped(left, right)
    sigmoid = torch.sigmoid(CLAMPED_ALPHA * gate)
    slope = sigmoid * (1.0 + CLAMPED_ALPHA * gate * (1.0 - sigmoid))
    torch.mul(grad * (up + 1.0) * slope, left <= CLAMPED_LIMIT, out=to_left)
    torch.mul(grad * gate * sigmoid, right.abs() <= CLAMPED_LIMIT, out=to_right)


def _gelu_form(kind: str) -> str:
    return "tanh" if kind == "gelu_tanh" else "none"


def _clamped(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return left.clamp(max=CLAMPED_LIMIT), right.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)


def _in_place_or_wider(result: Tensor, compute: torch.dtype) -> Tensor:
    """Where to compute: in the result itself, or, where that is narrower, in a temporary of the same shape."""
    return result if result.dtype == compute else torch.empty_like(result, dtype=compute)
