"""Bytes and sums with torch: parity and ordered sums, block by block so that the accumulator stays in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_BLOCK_BYTES = 1 << 18


def xor(buffers: Sequence[Tensor], out: Tensor) -> None:
    """out = XOR of equal-length uint8 buffers; `out` may be one of them."""
    for parts, result in words(buffers, out):
        for block in _blocks(result):
            parity = parts[0][block]
            for other in parts[1:]:
                parity = parity ^ other[block]
            result[block] = parity


def words(buffers: Sequence[Tensor], out: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
    """The buffers and the result as eight-byte words and a rest of bytes; as bytes alone where one is misaligned."""
    if any(b.data_ptr() % 8 or b.storage_offset() % 8 for b in (*buffers, out)):
        yield list(buffers), out
        return
    whole = out.numel() // 8 * 8
    yield [b[:whole].view(torch.int64) for b in buffers], out[:whole].view(torch.int64)
    yield [b[whole:] for b in buffers], out[whole:]


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
