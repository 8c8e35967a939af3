"""Grouped matmul with torch: one `mm` for each non-empty slot into preallocated results; `F.grouped_mm` on CUDA.

On the CPU the loop equals `F.grouped_mm` in small shapes and beats it in large ones, whose cost is the first touch of
the result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_lightning.kernels import buffers


def grouped_mm(x_MD: Tensor, weight_SDF: Tensor, tokens_S: Tensor, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[M, F]: x @ weight[slot]; rows past the sum of tokens are zero."""
    num_rows = len(x_MD) if gather_M is None else len(gather_M)
    if _on_device(x_MD, weight_SDF):
        rows_MD = x_MD if gather_M is None else x_MD[gather_M // divisor]
        ends_S = tokens_S.cumsum(0).to(device=x_MD.device, dtype=torch.int32)
        out_MF = F.grouped_mm(rows_MD, weight_SDF, offs=ends_S)
        tail = (
            torch.arange(num_rows, device=x_MD.device) >= ends_S[-1]
        )  # rows there hold garbage; a mask needs no host sync
        return out_MF.masked_fill_(tail.unsqueeze(1), 0)
    out_MF = buffers.empty((num_rows, weight_SDF.shape[2]), x_MD.dtype, x_MD.device)
    stop = 0
    for slot, rows in _segments(tokens_S):
        torch.mm(_rows(x_MD, rows, gather_M, divisor), weight_SDF[slot], out=out_MF[rows])
        stop = rows.stop
    out_MF[stop:].zero_()
    return out_MF


def grouped_wgrad(x_MD: Tensor, grad_MF: Tensor, tokens_S: Tensor, gather_M: Tensor | None, divisor: int) -> Tensor:
    """[S, D, F]: x^T @ grad over the rows of each slot; zero for an empty slot."""
    shape = (len(tokens_S), x_MD.shape[1], grad_MF.shape[1])
    if _on_device(x_MD, grad_MF):
        rows_MD = x_MD if gather_M is None else x_MD[gather_M // divisor]
        ends_S = tokens_S.cumsum(0).to(device=x_MD.device, dtype=torch.int32)
        grad_SDF = F.grouped_mm(rows_MD.t(), grad_MF, offs=ends_S)
        return grad_SDF.masked_fill_((tokens_S == 0).to(x_MD.device).view(-1, 1, 1), 0)
    grad_SDF = buffers.empty(shape, x_MD.dtype, x_MD.device)
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


def _on_device(*operands: Tensor) -> bool:
    """Whether the device's grouped kernel takes these operands: bf16, with rows of a multiple of 16 bytes."""
    return all(o.is_cuda and o.dtype == torch.bfloat16 and min(o.shape) > 0 and o.shape[-1] % 8 == 0 for o in operands)
