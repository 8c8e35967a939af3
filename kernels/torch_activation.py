"""Fused activation and gate with torch: block by block through the cache, in fp32 (fp64 for fp64)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
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
        h = h_MH[block].to(compute)
        value = F.silu(h[:, :width]).mul_(h[:, width:]) if kind == "swiglu" else F.gelu(h)
        if gate_M is not None:
            value.mul_(gate_M[block].to(compute).unsqueeze(1))
        out_MF[block] = value
    return out_MF


def activation_grad(
    grad_MF: Tensor, h_MH: Tensor, kind: str, gate_M: Tensor | None, out_MF: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients for h and for the gate weights; the activation itself is recomputed unless it was saved."""
    num_rows, hidden = h_MH.shape
    width = hidden // 2 if kind == "swiglu" else hidden
    compute = torch.promote_types(h_MH.dtype, torch.float32)
    grad_MH = buffers.empty((num_rows, hidden), h_MH.dtype, h_MH.device)
    grad_gate_M = None if gate_M is None else torch.empty(num_rows, dtype=compute, device=h_MH.device)
    for block in row_blocks(num_rows, hidden * compute.itemsize, h_MH.device):
        h, grad = h_MH[block].to(compute), grad_MF[block].to(compute)
        if gate_M is not None and grad_gate_M is not None:
            if out_MF is not None:
                value = out_MF[block].to(compute)
            else:
                value = F.silu(h[:, :width]).mul_(h[:, width:]) if kind == "swiglu" else F.gelu(h)
            torch.sum(value.mul_(grad) if out_MF is None else value * grad, dim=1, out=grad_gate_M[block])
            grad = grad * gate_M[block].to(compute).unsqueeze(1)
        if kind == "swiglu":
            left, right = h[:, :width], h[:, width:]
            grad_MH[block, :width] = torch.ops.aten.silu_backward(grad * right, left)
            grad_MH[block, width:] = F.silu(left).mul_(grad)
        else:
            grad_MH[block] = torch.ops.aten.gelu_backward(grad, h)
    return grad_MH, grad_gate_M
