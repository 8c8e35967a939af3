"""Flat buffers of expert state: packing, parity and ordered sums. None of these is differentiable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_lightning.kernels import backends, buffers, checks, reference

_ALIGNMENT = 64


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that `pack` needs: every tensor rounded up to 64 bytes."""
    return sum(_room(tensor) for tensor in tensors)


@torch.no_grad()
def pack(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Copy tensors of any dtypes into one flat uint8 buffer, each piece aligned to 64 bytes, gaps filled with zeros.

    Args:
        tensors: at least one, all on one device.
        out: uint8 [packed_bytes(tensors)] to fill, aligned to 16 bytes; by default a new buffer.
    """
    checks.require(len(tensors) > 0, "pack needs at least one tensor")
    num_bytes = packed_bytes(tensors)
    if out is None:
        out = buffers.empty((num_bytes,), torch.uint8, tensors[0].device)
    for tensor, piece, gap in _pieces(out, tensors, num_bytes):
        piece.copy_(tensor)
        gap.zero_()
    return out


@torch.no_grad()
def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a buffer that `pack` made back into tensors of the same shapes and dtypes, in place."""
    for tensor, piece, _ in _pieces(flat, tensors, packed_bytes(tensors)):
        tensor.copy_(piece)


@torch.no_grad()
def xor_parity(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """XOR of equal-length byte buffers: the parity of all, or the lost one from the others and the parity (REFT 4.2).

    Args:
        parts: at least one uint8 [L], all on one device.
        out: uint8 [L] to fill, which may be one of the parts; by default a new buffer.
    """
    checks.require(len(parts) > 0, "parity needs at least one buffer")
    length, device = parts[0].numel(), parts[0].device
    out = buffers.empty((length,), torch.uint8, device) if out is None else out
    for i, part in enumerate([*parts, out]):
        name = f"buffer {i}" if i < len(parts) else "out"
        checks.byte_buffer(name, part, length)
        checks.same_device(name, part, device)
    rooms = backends.bodies(device)
    if rooms is None:
        return out.copy_(reference.xor_parity(parts))
    rooms.bytes.xor(parts, out)
    return out


@torch.no_grad()
def sum_in_rank_order(parts_NL: Tensor, out: Tensor | None = None) -> Tensor:
    """[L]: ((parts[0] + parts[1]) + parts[2]) + ..., accumulated in fp32 and rounded once: the same bits everywhere.

    Args:
        parts_NL: floats [N, L], N at least 1.
        out: [L] in the dtype of the parts to fill; by default a new tensor.
    """
    checks.matrix("parts", parts_NL)
    checks.require(len(parts_NL) > 0, "a sum needs at least one part")
    length = parts_NL.shape[1]
    out = buffers.empty((length,), parts_NL.dtype, parts_NL.device) if out is None else out
    checks.same_device("out", out, parts_NL.device)
    checks.require(
        out.shape == (length,) and out.dtype == parts_NL.dtype,
        f"out is {out.dtype} of shape {list(out.shape)}, but the sum is {parts_NL.dtype} of shape {[length]}",
    )
    rooms = backends.bodies(parts_NL.device, parts_NL.dtype)
    if rooms is None:
        return out.copy_(reference.sum_in_rank_order(parts_NL))
    rooms.bytes.sum_in_rank_order(parts_NL, out)
    return out


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _pieces(flat: Tensor, tensors: Sequence[Tensor], num_bytes: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(tensor, its piece of the buffer in its shape and dtype, the gap behind it)."""
    checks.byte_buffer("flat buffer", flat, num_bytes)
    checks.require(
        flat.data_ptr() % 16 == 0 and flat.storage_offset() % 16 == 0,
        f"flat buffer begins at byte {flat.storage_offset()} of its storage: begin at a multiple of 16",
    )
    for i, tensor in enumerate(tensors):
        checks.same_device(f"tensor {i}", tensor, flat.device)
    start = 0
    for tensor in tensors:
        stop = start + tensor.numel() * tensor.element_size()
        end = start + _room(tensor)
        yield tensor, flat[start:stop].view(tensor.dtype).view(tensor.shape), flat[stop:end]
        start = end
