"""Parity and ordered sums with Triton: one element a lane, the parts in a fixed order."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from moe_lightning.kernels.torch_bytes import words
from moe_lightning.kernels.triton_launch import INTERPRETED, ceil_div, launch

_BLOCK = 64 if INTERPRETED else 2048


@triton.jit
def _xor_kernel(a, b, c, d, out, length, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < length
    parity = tl.load(a + place, mask=mask, other=0)
    if COUNT > 1:
        parity ^= tl.load(b + place, mask=mask, other=0)
    if COUNT > 2:
        parity ^= tl.load(c + place, mask=mask, other=0)
    if COUNT > 3:
        parity ^= tl.load(d + place, mask=mask, other=0)
    tl.store(out + place, parity, mask=mask)


@triton.jit(do_not_specialize=["num_parts"])
def _sum_kernel(parts, out, num_parts, length, stride_part, stride, stride_out, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < length
    total = tl.load(parts + place * stride, mask=mask, other=0).to(tl.float32)
    for part in range(1, num_parts):
        total += tl.load(parts + part * stride_part + place * stride, mask=mask, other=0).to(tl.float32)
    tl.store(out + place * stride_out, total.to(out.dtype.element_ty), mask=mask)


def xor(buffers: Sequence[Tensor], out: Tensor) -> None:
    """out = XOR of equal-length uint8 buffers, four at a time; `out` may be one of them."""
    for parts, result in words(buffers, out):
        if any(part.data_ptr() == result.data_ptr() for part in parts[4:]):
            parts = sorted(parts, key=lambda part: part.data_ptr() != result.data_ptr())  # read it before it is written
        _xor(parts[:4], result)
        for start in range(4, len(parts), 3):
            _xor([result, *parts[start : start + 3]], result)


def _xor(parts: Sequence[Tensor], out: Tensor) -> None:
    a, b, c, d = [*parts, *[parts[0]] * (4 - len(parts))]
    grid = (ceil_div(out.numel(), _BLOCK),)
    launch(_xor_kernel, grid, out, a, b, c, d, out, out.numel(), COUNT=len(parts), BLOCK=_BLOCK)


def sum_in_rank_order(parts_NL: Tensor, out_L: Tensor) -> None:
    """out = ((parts[0] + parts[1]) + parts[2]) + ..., accumulated in fp32 and rounded once."""
    num_parts, length = parts_NL.shape
    launch(
        _sum_kernel, (ceil_div(length, _BLOCK),), out_L,
        parts_NL, out_L, num_parts, length, *parts_NL.stride(), out_L.stride(0), BLOCK=_BLOCK,
    )  # fmt: skip
