"""Grouped matmul by torch's `F.grouped_mm`: one launch on a GPU in bf16; elsewhere torch itself goes slot by slot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_lightning.errors import ConfigurationError

_ROW_BYTES = 16
"""Rows begin at multiples of it, or torch refuses the operands."""

_MOST_ROWS = torch.iinfo(torch.int32).max


def cut(tokens_S: Tensor, num_rows: int, x: Tensor) -> Tensor:
    """The counts themselves."""
    return tokens_S


def grouped_mm(x_MD: Tensor, weight_SDF: Tensor, tokens_S: Tensor) -> Tensor:
    """[M, F]: x @ weight[slot]; rows past the sum of tokens are zero.

    Raises:
        ConfigurationError: rows that are no multiple of 16 bytes, or more of them than int32 counts.
    """
    num_rows, width = len(x_MD), weight_SDF.shape[2]
    _require_whole_rows(x_MD.dtype, num_rows, x_MD.shape[1], width)
    if not (num_rows and len(tokens_S) and x_MD.shape[1] and width):
        return x_MD.new_zeros(num_rows, width)
    if 1 not in weight_SDF.stride()[1:]:
        weight_SDF = weight_SDF.contiguous()
    ends_S = _ends(tokens_S, x_MD)
    out_MF = F.grouped_mm(x_MD, weight_SDF, offs=ends_S)
    tail_M = torch.arange(num_rows, device=x_MD.device) >= ends_S[-1]  # garbage; a mask needs no word of the device
    return out_MF.masked_fill_(tail_M.unsqueeze(1), 0)


def grouped_wgrad(x_MD: Tensor, grad_MF: Tensor, tokens_S: Tensor) -> Tensor:
    """[S, D, F]: x^T @ grad over the rows of each slot; zero for an empty slot.

    Raises:
        ConfigurationError: as `grouped_mm`.
    """
    num_rows, width = grad_MF.shape
    _require_whole_rows(x_MD.dtype, num_rows, x_MD.shape[1], width)
    if not (num_rows and len(tokens_S) and x_MD.shape[1] and width):
        return x_MD.new_zeros(len(tokens_S), x_MD.shape[1], width)
    grad_SDF = F.grouped_mm(x_MD.t(), grad_MF, offs=_ends(tokens_S, x_MD))
    return grad_SDF.masked_fill_((tokens_S == 0).to(x_MD.device).view(-1, 1, 1), 0)


def takes(dtype: torch.dtype, *widths: int) -> bool:
    """True if rows of such widths are whole multiples of what torch asks for."""
    return all(width * dtype.itemsize % _ROW_BYTES == 0 for width in widths)


def _ends(tokens_S: Tensor, x_MD: Tensor) -> Tensor:
    return tokens_S.cumsum(0).to(device=x_MD.device, dtype=torch.int32)


def _require_whole_rows(dtype: torch.dtype, num_rows: int, *widths: int) -> None:
    for width in widths:
        if not takes(dtype, width):
            raise ConfigurationError(
                f"kernel backend 'grouped' needs rows of a multiple of {_ROW_BYTES} bytes, but {width} columns of "
                f"{dtype} are {width * dtype.itemsize}: use widths that are multiples of "
                f"{_ROW_BYTES // dtype.itemsize}, or 'auto'"
            )
    if num_rows > _MOST_ROWS:
        raise ConfigurationError(
            f"kernel backend 'grouped' counts up to {_MOST_ROWS} rows, but there are {num_rows}: use smaller batches, "
            "or 'auto'"
        )
