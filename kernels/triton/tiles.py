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

from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import tile_table
from moe_lightning.kernels.tile_table import Tile
from moe_lightning.kernels.triton.launch import INTERPRETED, ceil_div, launch, power_of_two


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a device: compute capability times ten, bytes of shared memory, multiprocessors."""

    capability: int
    shared: int
    multiprocessors: int

    @property
    def has_copy_engine(self) -> bool:
        """Fetches blocks by descriptors, beside the threads."""
        return self.capability >= 90


_SMALLEST = Tile(m=16, n=16, k=16, warps=4, stages=1)
_SINGLE = Tile(m=64, n=64, k=32, warps=4, stages=3)


@functools.cache
def limits(device: torch.device) -> Limits:
    """Return the limits of a GPU; in the interpreter those of none in particular."""
    if device.type != "cuda":
        return Limits(capability=90, shared=1 << 30, multiprocessors=3)
    found = torch.cuda.get_device_properties(device)
    return Limits(
        capability=10 * found.major + found.minor,
        shared=getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block),
        multiprocessors=found.multi_processor_count,
    )


def tiles_for(dtype: torch.dtype, rows_per_slot: int, found: Limits) -> Tile:
    """Those of the table, where the device has the shared memory for them; else the first that it has it for.

    Raises:
        ConfigurationError: it has it for none. A StopIteration would end the epoch.
    """
    if INTERPRETED:
        return _SMALLEST
    if dtype == torch.float32:
        return _SINGLE
    rows = tile_table.rows_class(rows_per_slot)
    chosen = tile_table.chosen(found.capability, dtype.itemsize, rows)
    wanted = (() if chosen is None else (chosen,)) + tile_table.candidates(found.capability, rows)
    for tile in wanted:
        if tile_table.shared_bytes(tile, dtype.itemsize) <= found.shared:
            return tile
    raise ConfigurationError(
        f"no tile of the Triton kernels fits the {found.shared} bytes of shared memory of this GPU: use the kernel "
        "backend 'torch'"
    )


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def _tile_kernel(
    tokens, tiles, total, starts, num_rows, num_slots, capacity,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slots = tl.arange(0, SLOTS)
    # Counts that an aborted collective has left are cut to the rows that there are: no product then runs for hours, or
    # outside of its operands, before the host hears of it.
    counts = tl.minimum(tl.maximum(tl.load(tokens + slots, mask=slots < num_slots, other=0), 0), num_rows)
    upto = tl.cumsum(counts, axis=0)
    first = tl.minimum(upto - counts, num_rows).to(tl.int32)
    ends = tl.where(slots == num_slots, num_rows, tl.minimum(upto, num_rows)).to(tl.int32)
    counts = ends - first
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
    if tl.program_id(0) == 0:
        tl.store(total, tl.sum((counts + BLOCK_M - 1) // BLOCK_M, axis=0))
        tl.store(starts + slots, first, mask=slots <= num_slots)


@dataclass(frozen=True, kw_only=True)
class RowTiles:
    """Row tiles in the order of their rows, for all products over rows of the same slots.

    Attributes:
        entries_3R: int32, slot, first row and end of the slot of each; the slot after the last for rows past all.
        total: int32 [1], how many there are.
        starts_S: int32 [S + 1], first row of each slot, and the first past all.
        capacity: R, the most that there can be.
        tile: whose rows they are cut by.
    """

    entries_3R: Tensor
    total: Tensor
    starts_S: Tensor
    capacity: int
    tile: Tile


def row_tiles(tokens_S: Tensor, num_rows: int, tile: Tile) -> RowTiles:
    """Cut the rows of each slot into tiles, and those past the sum; nothing is read on the host."""
    num_slots = len(tokens_S)
    capacity = ceil_div(num_rows, tile.m) + num_slots + 1
    entries = tokens_S.new_empty(3, capacity, dtype=torch.int32)
    total = tokens_S.new_empty(1, dtype=torch.int32)
    starts = tokens_S.new_empty(num_slots + 1, dtype=torch.int32)
    slots = power_of_two(num_slots + 1)
    block = max(1, min(128, 8192 // slots))
    launch(
        _tile_kernel, (ceil_div(capacity, block),), tokens_S,
        tokens_S, entries, total, starts, num_rows, num_slots, capacity, SLOTS=slots, BLOCK_M=tile.m, BLOCK=block,
    )  # fmt: skip
    return RowTiles(entries_3R=entries, total=total, starts_S=starts, capacity=capacity, tile=tile)


def precision() -> str:
    """fp32 operands are multiplied exactly unless torch was told that TF32 will do."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"  # the older flag may raise


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
