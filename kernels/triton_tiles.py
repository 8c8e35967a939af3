"""Tiles of the grouped matmuls: their sizes by table and device, a list of them built on the device, descriptors.

Legend: M rows, S slots, R row tiles.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_lightning.kernels import tile_table
from moe_lightning.kernels.triton_launch import INTERPRETED, ceil_div, launch, power_of_two


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a kernel may count on: compute capability times ten, bytes of shared memory, multiprocessors."""

    capability: int
    shared: int
    multiprocessors: int

    @property
    def has_copy_engine(self) -> bool:
        """Fetches blocks by descriptors, beside the threads."""
        return self.capability >= 90


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Block sizes of one matmul and how its programs are pipelined."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def shared(self, element_bytes: int) -> int:
        """Bytes of the operands of all stages, and of the tile on its way out."""
        return element_bytes * (self.stages * (self.m + self.n) * self.k + self.m * self.n // 2)


_SMALLEST = Tiles(m=16, n=16, k=16, warps=4, stages=1)
_SINGLE = Tiles(m=64, n=64, k=32, warps=4, stages=3)


@functools.cache
def limits(device: torch.device) -> Limits:
    """Of a GPU; of none in particular in the interpreter."""
    if device.type != "cuda":
        return Limits(capability=90, shared=1 << 30, multiprocessors=3)
    found = torch.cuda.get_device_properties(device)
    return Limits(
        capability=10 * found.major + found.minor,
        shared=getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block),
        multiprocessors=found.multi_processor_count,
    )


def tiles_for(dtype: torch.dtype, rows_per_slot: int, found: Limits) -> Tiles:
    """Those of the table, where the device has the shared memory for them; else the first that it has it for."""
    if INTERPRETED:
        return _SMALLEST
    if dtype == torch.float32:
        return _SINGLE
    rows = tile_table.rows_class(rows_per_slot)
    chosen = tile_table.chosen(found.capability, dtype.itemsize, rows)
    wanted = (() if chosen is None else (chosen,)) + tile_table.candidates(found.capability, rows)
    tiles = (Tiles(m=m, n=n, k=k, warps=warps, stages=stages) for m, n, k, warps, stages in wanted)
    return next(tile for tile in tiles if tile.shared(dtype.itemsize) <= found.shared)


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def _tile_kernel(
    tokens, tiles, total, num_rows, num_slots, capacity,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slots = tl.arange(0, SLOTS)
    counts = tl.load(tokens + slots, mask=slots < num_slots, other=0).to(tl.int32)
    counts = tl.where(slots == num_slots, num_rows - tl.sum(counts, axis=0), counts)
    ends = tl.cumsum(counts, axis=0)
    tile_ends = tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, axis=0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    mine = slots[None, :] == slot[:, None]
    end = tl.sum(tl.where(mine, ends[None, :], 0), axis=1)
    before = tl.sum(tl.where(mine, (tile_ends - (counts + BLOCK_M - 1) // BLOCK_M)[None, :], 0), axis=1)
    start = end - tl.sum(tl.where(mine, counts[None, :], 0), axis=1)
    mask = tile < capacity
    tl.store(tiles + tile, slot, mask=mask)
    tl.store(tiles + capacity + tile, start + (tile - before) * BLOCK_M, mask=mask)
    tl.store(tiles + 2 * capacity + tile, end, mask=mask)
    tl.store(total, tl.sum((counts + BLOCK_M - 1) // BLOCK_M, axis=0), mask=tl.program_id(0) == 0)


@dataclass(frozen=True, kw_only=True)
class TileList:
    """Row tiles in the order of their rows.

    Attributes:
        entries_3R: int32, slot, first row and end of the slot of each; the slot after the last for rows past all.
        total: int32 [1], how many there are.
        capacity: R, the most that there can be.
    """

    entries_3R: Tensor
    total: Tensor
    capacity: int


def tile_list(tokens_S: Tensor, num_rows: int, block_m: int) -> TileList:
    """Cut the rows of each slot into tiles, and those past the sum; nothing is read on the host."""
    num_slots = len(tokens_S)
    capacity = ceil_div(num_rows, block_m) + num_slots + 1
    entries = tokens_S.new_empty(3, capacity, dtype=torch.int32)
    total = tokens_S.new_empty(1, dtype=torch.int32)
    slots = power_of_two(num_slots + 1)
    block = max(1, min(128, 8192 // slots))
    launch(
        _tile_kernel, (ceil_div(capacity, block),), tokens_S,
        tokens_S, entries, total, num_rows, num_slots, capacity, SLOTS=slots, BLOCK_M=block_m, BLOCK=block,
    )  # fmt: skip
    return TileList(entries_3R=entries, total=total, capacity=capacity)


def described(tensor: Tensor, block: list[int], found: Limits) -> TensorDescriptor | None:
    """A descriptor of a tensor whose blocks the copy engine fetches; None where device or layout does not allow it."""
    pitches = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    if (
        not found.has_copy_engine
        or not tensor.numel()
        or tensor.stride(-1) != 1
        or tensor.data_ptr() % 16
        or any(pitch % 16 or pitch <= 0 for pitch in pitches)
        or block[-1] * tensor.element_size() < 16
    ):
        return None
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
