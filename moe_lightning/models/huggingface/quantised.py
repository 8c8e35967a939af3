"""Dequantises what released checkpoints hold in few bits: MXFP4 experts (GPT-OSS) and FP8 matrices (DeepSeek-V3).

Training needs weights in float, so they are unpacked as they are read, a tensor or an expert at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_lightning.errors import CheckpointError

FP8_SCALE = "_scale_inv"
"""What the name of an FP8 matrix's scales ends with, after its own name."""

MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""What the two parts of an MXFP4 tensor are called after its own name."""

_FP8_BLOCK = 128
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


def from_fp8(weight_RC: Tensor, scale: Tensor) -> Tensor:
    """Each block of 128 x 128 values times its scale, in float32 (DeepSeek-V3, section 3.3).

    Args:
        weight_RC: float8 [R, C].
        scale: [ceil(R / 128), ceil(C / 128)].

    Raises:
        CheckpointError: scales of another shape.
    """
    rows, columns = weight_RC.shape
    if scale.shape != (-(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK)):
        raise CheckpointError(
            f"FP8 scales of shape {list(scale.shape)} do not fit {rows} x {columns} values in blocks of {_FP8_BLOCK}"
        )
    scale = scale.float().repeat_interleave(_FP8_BLOCK, 0)[:rows].repeat_interleave(_FP8_BLOCK, 1)[:, :columns]
    return weight_RC.float() * scale


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Two 4-bit floats a byte, low nibble first, times a power of two for each 32 of them (OCP microscaling, 5.3), in
    bfloat16, which holds every such product.

    Args:
        blocks: uint8 [..., F, G, 16]: F outputs of G * 32 inputs each.
        scales: uint8 [..., F, G], exponents biased by 127.

    Returns:
        [..., G * 32, F]: inputs first, as the unpacked checkpoints have it.

    Raises:
        CheckpointError: parts that do not fit each other.
    """
    if blocks.shape[:-1] != scales.shape or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise CheckpointError(
            f"MXFP4 blocks of shape {list(blocks.shape)} do not fit scales of shape {list(scales.shape)}"
        )
    values = torch.tensor([*_MXFP4_VALUES, *(-value for value in _MXFP4_VALUES)], dtype=torch.bfloat16)
    nibbles = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - _EXPONENT_BIAS
    return torch.ldexp(values[nibbles.long()], exponents).to(torch.bfloat16).flatten(-2).transpose(-1, -2)
