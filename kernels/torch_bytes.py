"""Bytes and sums with torch: parity and ordered sums, block by block so that the accumulator stays in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK_BYTES = 1 << 18


def xor(buffers: Sequence[Tensor], out: Tensor) -> None:
    """out = XOR of equal-length uint8 buffers; `out` may be one of them."""
    whole = out.numel() // 8 * 8
    if all(b.data_ptr() % 8 == 0 and b.storage_offset() % 8 == 0 for b in (*buffers, out)):
        _xor([b[:whole].view(torch.int64) for b in buffers], out[:whole].view(torch.int64))
        _xor([b[whole:] for b in buffers], out[whole:])
    else:
        _xor(buffers, out)


def _xor(buffers: Sequence[Tensor], out: Tensor) -> None:
    for block in _blocks(out):
        parity = buffers[0][block]
        for other in buffers[1:]:
            parity = parity ^ other[block]
        out[block] = parity


def sum_in_rank_order(parts_NL: Tensor, out_L: Tensor) -> None:
    """out = ((parts[0] + parts[1]) + parts[2]) + ..., accumulated in fp32 (fp64 for fp64) and rounded once."""
    compute = torch.promote_types(parts_NL.dtype, torch.float32)
    for block in _blocks(out_L):
        total = parts_NL[0, block].to(compute, copy=True)
        for part in parts_NL[1:, block]:
            total += part
        out_L[block] = total


def _blocks(out: Tensor) -> list[slice]:
    step = (
        max(1, _BLOCK_BYTES * torch.get_num_threads() // out.element_size())
        if out.device.type == "cpu"
        else out.numel()
    )
    return [slice(start, start + step) for start in range(0, out.numel(), max(1, step))]
