"""Fused activation and gate with torch: block by block through the cache, in fp32 (fp64 for fp64)."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_lightning.kernels import buffers
from moe_lightning.kernels.torch_rows import row_blocks


def activation(h_MH: Tensor, kind: str, gate_M: Tensor | None) -> Tensor:
    """[M, F]: exact (erf) GELU of h, or silu(first half) * second half; times the gate weight of each row."""
    num_rows, hidden = h_MH.shape
    width = hidden // 2 if kind == "swiglu" else hidden
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


def activation_grad(
    grad_MF: Tensor, h_MH: Tensor, kind: str, gate_M: Tensor | None, out_MF: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients for h and for the gate weights; the activation itself is recomputed unless it was saved."""
    num_rows, hidden = h_MH.shape
    width = grad_MF.shape[1]
    compute = torch.promote_types(h_MH.dtype, torch.float32)
    grad_MH = buffers.empty((num_rows, hidden), h_MH.dtype, h_MH.device)
    grad_gate_M = None if gate_M is None else torch.empty(num_rows, dtype=compute, device=h_MH.device)
    for block in row_blocks(num_rows, hidden * compute.itemsize, h_MH.device):
        h, grad = h_MH[block].to(compute), grad_MF[block].to(compute)
        if gate_M is not None and grad_gate_M is not None:
            value = _activate(h, kind, torch.empty_like(grad)) if out_MF is None else out_MF[block]
            torch.sum(value * grad, dim=1, out=grad_gate_M[block])
            grad = grad * gate_M[block].to(compute).unsqueeze(1)
        target = _in_place_or_wider(grad_MH[block], compute)
        if kind == "swiglu":
            left, right = h[:, :width], h[:, width:]
            torch.ops.aten.silu_backward.grad_input(grad * right, left, grad_input=target[:, :width])
            torch.ops.aten.silu.out(left, out=target[:, width:]).mul_(grad)
        else:
            torch.ops.aten.gelu_backward.grad_input(grad, h, grad_input=target)
        if target.dtype != grad_MH.dtype:
            grad_MH[block] = target
    return grad_MH, grad_gate_M


def _activate(h: Tensor, kind: str, out: Tensor) -> Tensor:
    if kind == "swiglu":
        torch.ops.aten.silu.out(h[:, : out.shape[1]], out=out).mul_(h[:, out.shape[1] :])
    else:
        torch.ops.aten.gelu.out(h, out=out)
    return out


def _in_place_or_wider(result: Tensor, compute: torch.dtype) -> Tensor:
    """Where to compute: in the result itself, or, where that is narrower, in a temporary of the same shape."""
    return result if result.dtype == compute else torch.empty_like(result, dtype=compute)
