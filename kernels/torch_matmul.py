"""Grouped matmul with torch: one `mm` for each non-empty slot into preallocated results; torch's own kernel on CUDA.

On the CPU the loop equals `F.grouped_mm` in small shapes and beats it in large ones, whose cost is the first touch of
the result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_lightning.kernels import buffers, torch_grouped
from moe_lightning.kernels.torch_grouped import cut

__all__ = ["cut", "grouped_mm", "grouped_wgrad"]


def grouped_mm(x_MD: Tensor, weight_SDF: Tensor, tokens_S: Tensor, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[M, F]: x @ weight[slot]; rows past the sum of tokens are zero."""
    if _on_device(x_MD, weight_SDF.shape[2]):
        return torch_grouped.grouped_mm(x_MD, weight_SDF, tokens_S, gather_M, divisor)
    num_rows = len(x_MD) if gather_M is None else len(gather_M)
    out_MF = buffers.empty((num_rows, weight_SDF.shape[2]), x_MD.dtype, x_MD.device)
    stop = 0
    for slot, rows in _segments(tokens_S):
        torch.mm(_rows(x_MD, rows, gather_M, divisor), weight_SDF[slot], out=out_MF[rows])
        stop = rows.stop
    out_MF[stop:].zero_()
    return out_MF


def grouped_wgrad(x_MD: Tensor, grad_MF: Tensor, tokens_S: Tensor, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[S, D, F]: x^T @ grad over the rows of each slot; zero for an empty slot."""
    if _on_device(x_MD, grad_MF.shape[1]):
        return torch_grouped.grouped_wgrad(x_MD, grad_MF, tokens_S, gather_M, divisor)
    grad_SDF = buffers.empty((len(tokens_S), x_MD.shape[1], grad_MF.shape[1]), x_MD.dtype, x_MD.device)
    filled = 0
    for slot, rows in _segments(tokens_S):
        grad_SDF[filled:slot].zero_()
        torch.mm(_rows(x_MD, rows, gather_M, divisor).t(), grad_MF[rows], out=grad_SDF[slot])
        filled = slot + 1
    grad_SDF[filled:].zero_()
    return grad_SDF


def _segments(tokens_S: Tensor) -> Iterator[tuple[int, slice]]:
    """(slot, its rows) of the non-empty slots."""
    start = 0
    for slot, count in enumerate(tokens_S.tolist()):
        if count:
            yield slot, slice(start, start + count)
            start += count


def _rows(x_MD: Tensor, rows: slice, gather_M: Tensor | None, divisor: int) -> Tensor:
    return x_MD[rows] if gather_M is None else x_MD.index_select(0, gather_M[rows] // divisor)


def _on_device(x_MD: Tensor, width: int) -> bool:
    """Whether torch has one kernel for such operands: bf16 on CUDA, with whole rows."""
    return x_MD.is_cuda and x_MD.dtype == torch.bfloat16 and torch_grouped.takes(x_MD.dtype, x_MD.shape[1], width)
