"""Random numbers that are a function of where they belong, with torch: a counter-based hash (of splitmix64)."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_lightning.kernels.bodies import Draw

_BITS = (1 << 64) - 1
_MASK_24 = (1 << 24) - 1


def signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch holds it in."""
    value &= _BITS
    return value - (1 << 64) if value >> 63 else value


GOLDEN = signed(0x9E3779B97F4A7C15)
MIX_1 = signed(0xBF58476D1CE4E5B9)
MIX_2 = signed(0x94D049BB133111EB)


def mixed(value: int) -> int:
    """`_mix` of one number, as the int64 of its bits."""
    value &= _BITS
    value = (value ^ (value >> 30)) * MIX_1 & _BITS
    value = (value ^ (value >> 27)) * MIX_2 & _BITS
    return signed(value ^ (value >> 31))


def _mix(x: Tensor) -> Tensor:
    """Bijective avalanche of int64 bit patterns; shifts are made logical by masking."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def global_rows(draw: Draw, num_rows: int, device: torch.device) -> Tensor:
    """Global index of each local row."""
    local = torch.arange(num_rows, device=device)
    if draw.parts == 1:
        return local + draw.first * draw.here
    return (local // draw.here + draw.first) * (draw.here * draw.parts) + local % draw.here + draw.part * draw.here


def uniform(draw: Draw, num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """float32 [num_rows, num_columns] in the open interval (0, 1)."""
    rows = _mix(global_rows(draw, num_rows, device) * GOLDEN + draw.key)
    bits = _mix(rows[:, None] + torch.arange(1, num_columns + 1, device=device) * GOLDEN)
    return (((bits >> 40) & _MASK_24).float() + 0.5) * 2.0**-24


def dropout(x_MD: Tensor, p: float, draw: Draw) -> Tensor:
    """[M, D]: see `kernels.keyed_dropout`."""
    keep_MD = uniform(draw, len(x_MD), x_MD.shape[1], x_MD.device) >= p
    return x_MD * (keep_MD / (1.0 - p)).to(x_MD.dtype)
