"""Four-bit weights: blockwise NF4, dequantized one expert at a time inside the grouped product.

Blocks of 64 numbers share their largest magnitude; each number is the nearest of 16 quantiles of a normal distribution.
Source: QLoRA (arXiv 2305.14314), section 3 and appendix E; scales are kept in float32, not quantized once more.

Shapes: M rows sorted by slot, S slots, D model width, F expert width, an expert's matrix [D, F] of P = D * F numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_lightning.errors import ConfigurationError

BLOCK = 64
"""Numbers that share a scale."""

# The 16 quantiles, appendix E.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def quantised_sizes(matrix: torch.Size) -> tuple[int, int]:
    """Bytes of codes and numbers of scales of a matrix.

    Raises:
        ConfigurationError: it cannot be cut into blocks.
    """
    if matrix.numel() % BLOCK:
        raise ConfigurationError(
            f"an expert's matrix of {' x '.join(map(str, matrix))} numbers is not a multiple of {BLOCK}, which "
            "kind=qlora needs: use kind=lora"
        )
    return matrix.numel() // 2, matrix.numel() // BLOCK


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [P / 2], two numbers a byte with the first in the low half, and scales, float32 [P / 64]."""
    blocks = matrix.reshape(-1, BLOCK).float()
    scales = blocks.abs().amax(dim=1)
    values = torch.tensor(_NF4, dtype=torch.float32, device=matrix.device)
    shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    nearest = torch.bucketize(shares.contiguous(), (values[1:] + values[:-1]) / 2).to(torch.uint8).view(-1, 2)
    return nearest[:, 0] | nearest[:, 1] << 4, scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [P] of codes and scales."""
    # One lookup fetches both numbers of a byte, as the 8 bytes that two float32 take.
    pairs = torch.index_select(_pairs(codes.device), 0, codes.int()).view(torch.float32)
    return pairs.view(-1, BLOCK).mul_(scales.unsqueeze(1)).view(-1).to(dtype)


@cache
def _pairs(device: torch.device) -> Tensor:
    """int64 [256]: of each byte both numbers, in the bits of an integer."""
    values = torch.tensor(_NF4, dtype=torch.float32, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1).view(torch.int64).flatten().to(device)


def grouped_mm(x_MD: Tensor, codes_SB: Tensor, scales_SC: Tensor, columns: int, tokens_per_slot_S: Tensor) -> Tensor:
    """[M, F]: x @ weight of each row's slot, for frozen weights of which one expert's matrix exists at a time.

    Args:
        x_MD: rows sorted by slot.
        codes_SB, scales_SC: of each slot's matrix [D, F], see `quantise`.
        columns: F.
        tokens_per_slot_S: int64 [S].
    """
    return _GroupedMM.apply(x_MD, codes_SB, scales_SC, columns, tokens_per_slot_S)  # type: ignore[no-any-return, no-untyped-call]


class _GroupedMM(torch.autograd.Function):
    """Neither rows nor weights are kept for the backward pass: only the rows have gradients."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, codes_SB: Tensor, scales_SC: Tensor, columns: int, tokens_S: Tensor) -> Tensor:
        ctx.save_for_backward(codes_SB, scales_SC, tokens_S)
        ctx.columns = columns
        out_MF = x_MD.new_zeros(len(x_MD), columns)
        for rows, weight_DF in _matrices(codes_SB, scales_SC, columns, tokens_S, x_MD.dtype):
            torch.mm(x_MD[rows], weight_DF, out=out_MF[rows])
        return out_MF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        codes_SB, scales_SC, tokens_S = ctx.saved_tensors
        grad_MF = grads[0].contiguous()
        width = 2 * codes_SB.shape[1] // ctx.columns
        grad_MD = grad_MF.new_zeros(len(grad_MF), width)
        for rows, weight_DF in _matrices(codes_SB, scales_SC, ctx.columns, tokens_S, grad_MF.dtype):
            torch.mm(grad_MF[rows], weight_DF.t(), out=grad_MD[rows])
        return grad_MD, None, None, None, None


def _matrices(
    codes_SB: Tensor, scales_SC: Tensor, columns: int, tokens_S: Tensor, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """The rows of each slot that has any, and its matrix [D, F]."""
    start = 0
    for slot, count in enumerate(tokens_S.tolist()):
        if count:
            yield slice(start, start + count), dequantise(codes_SB[slot], scales_SC[slot], dtype).view(-1, columns)
            start += count
