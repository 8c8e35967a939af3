"""How long a kernel takes on a GPU: matmuls tile by tile, everything else by its bytes. All of it is modelled.

A tile costs a prologue (finding its place, the first loads on their way), a loop over K that the slower of the tensor
cores and the second-level cache bounds, and an epilogue (conversion and store). Multiprocessors take tiles in rounds,
and no kernel is faster than memory lets its operands pass once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU in a dozen numbers: those of its data sheet, and what kernels reach of them.

    Attributes:
        flops: of the tensor cores in bf16 with fp32 sums, dense, per second.
        sustained: what they keep of it under load, at the clock that the power limit leaves.
        fp32_flops: outside of the tensor cores.
        multiprocessors: that take tiles.
        memory: bytes per second.
        cache: bytes per second from the second level into all multiprocessors.
        shared: bytes of shared memory that one block may take.
        prologue_s: from the start of a tile to its first product, where nothing was fetched before.
        has_copy_engine: fetches and stores tiles by descriptors, beside the threads.
    """

    flops: float
    sustained: float
    fp32_flops: float
    multiprocessors: int
    memory: float
    cache: float
    shared: int
    prologue_s: float
    has_copy_engine: bool = True


DEVICES = {
    "a100": Device(
        flops=312e12, sustained=0.86, fp32_flops=19.5e12, multiprocessors=108, memory=2.04e12, cache=4.4e12,
        shared=163 << 10, prologue_s=1.6e-6, has_copy_engine=False,
    ),
    "h100": Device(
        flops=989e12, sustained=0.81, fp32_flops=67e12, multiprocessors=132, memory=3.35e12, cache=8.4e12,
        shared=227 << 10, prologue_s=1.4e-6,
    ),
    "h200": Device(
        flops=989e12, sustained=0.81, fp32_flops=67e12, multiprocessors=132, memory=4.8e12, cache=8.4e12,
        shared=227 << 10, prologue_s=1.4e-6,
    ),
    "b200": Device(
        flops=2250e12, sustained=0.68, fp32_flops=75e12, multiprocessors=148, memory=8.0e12, cache=14e12,
        shared=227 << 10, prologue_s=1.4e-6,
    ),
    "rtx5090": Device(
        flops=209e12, sustained=0.90, fp32_flops=105e12, multiprocessors=170, memory=1.79e12, cache=7.0e12,
        shared=99 << 10, prologue_s=1.2e-6,
    ),
}  # fmt: skip

MEMORY_SHARE = 0.90
"""Of the memory's rate, what a kernel that only moves rows reaches."""

FP32_SHARE = 0.70
"""Of the fp32 rate, what a large matmul outside of the tensor cores reaches."""

LAUNCH_S = 2.5e-6
"""From the end of one kernel to the first work of the next, while the host is ahead."""

HANDOVER_S = 0.25e-6
"""Prologue of a persistent kernel's tile: its first loads were issued under the tile before."""

GATHERED_PROLOGUE = 0.6
"""Share of the prologue that stays where a persistent kernel must read indices before it can fetch."""

EPILOGUE_S = 0.6e-6
"""Draining the products and starting the store."""

STORE_BYTES = 80e9
"""A multiprocessor's way out to the second-level cache, per second."""

_WGRAD_PROGRAMS = 4
"""That a multiprocessor runs one after the other, see `kernels.triton.matmul`: each begins and ends by itself."""

READ_S = 0.7e-6
"""From an epilogue's load to its first value, which nothing hides."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Block sizes of a matmul: rows, columns, and depth of one step of its loop."""

    m: int
    n: int
    k: int


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """One grouped product [rows, inner] x [groups, inner, width], or what is like it.

    Attributes:
        rows, width, inner: sizes M, N and K; `rows` over all groups, and so is `inner` where `is_wgrad`.
        groups: experts.
        tile: of the kernel.
        is_wgrad: the groups cut K and have one result each.
        is_persistent: programs walk over tiles and fetch the next one's operands under the present one.
        tiles_of_program: that one program computes whatever the others do; 1 also where programs share all tiles out.
        gathers: rows of the left operand lie where an index says.
        hides_epilogue: by a second group of warps, or a second block of the multiprocessor.
        shares_loads: two blocks take the right operand from one load (clusters).
        stores_ahead: the copy engine carries a tile's result out under the next tile.
        input_factor: size of what an epilogue reads over M x N elements: h, say.
        reads_ahead: that under the products; else only when they are done.
        steps: instructions of an epilogue for each of its sums, beside rounding and storing.
        output_factor: size of what a tile stores over M x N elements; more where h and its activation are both kept.
        extra_bytes: read or written beside all that, each once.
        element_bytes: of operands.
        terms: of the right operand, each of `element_bytes`, whose products are added: three of bf16 make one of fp32.
    """

    rows: int
    width: int
    inner: int
    groups: int = 1
    tile: Tile
    is_wgrad: bool = False
    is_persistent: bool = False
    tiles_of_program: int = 1
    gathers: bool = False
    hides_epilogue: bool = False
    shares_loads: bool = False
    stores_ahead: bool = False
    extra_bytes: float = 0.0
    input_factor: float = 0.0
    reads_ahead: bool = False
    steps: float = 0.0
    output_factor: float = 1.0
    element_bytes: float = 2.0
    terms: int = 1

    @property
    def flops(self) -> float:
        """Multiply-adds counted as two, without padding."""
        return 2.0 * self.rows * self.width * self.inner


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one kernel, and what bounds it."""

    seconds: float
    bound: str


def matmul_cost(matmul: Matmul, device: Device) -> Cost:
    """Seconds on a device, its launch included; rows lie evenly on the groups."""
    tile = matmul.tile
    if matmul.is_wgrad:
        depth = matmul.inner / matmul.groups
        tiles = float(matmul.groups * ceil(matmul.rows / tile.m) * ceil(matmul.width / tile.n))
        results = float(matmul.groups * matmul.rows * matmul.width)
        operands = float(matmul.inner * (matmul.rows + matmul.terms * matmul.width))
    else:
        depth = float(matmul.inner)
        tiles = matmul.groups * _row_tiles(matmul) * ceil(matmul.width / tile.n)
        results = float(matmul.rows * matmul.width)
        operands = float(matmul.rows * matmul.inner + matmul.terms * matmul.groups * matmul.inner * matmul.width)
    steps = ceil(depth / tile.k)
    peak = device.flops * 2 / matmul.element_bytes * device.sustained / device.multiprocessors
    multiply_s = steps * 2 * tile.m * tile.n * tile.k * matmul.terms / peak
    right = matmul.terms * tile.n / (2 if matmul.shares_loads else 1)
    fetched = (tile.m + right) * tile.k * matmul.element_bytes
    fetch_s = steps * fetched / (device.cache / device.multiprocessors)
    prologue_s = device.prologue_s
    if matmul.is_persistent and device.has_copy_engine:
        # Steps of a sum over rows fetch their own indices ahead; a tile of rows begins with its own.
        waits = matmul.gathers and not matmul.is_wgrad
        prologue_s = GATHERED_PROLOGUE * prologue_s if waits else HANDOVER_S
    loop_s = max(multiply_s, fetch_s)
    sums = tile.m * tile.n
    out_s, store_s = 2.0 * sums * matmul.output_factor / STORE_BYTES, EPILOGUE_S
    if matmul.stores_ahead and device.has_copy_engine:
        loop_s = max(loop_s, out_s)
        if matmul.groups > 1 and not matmul.is_wgrad:  # the last tile of a group goes row by row
            store_s += out_s / _row_tiles(matmul)
    else:  # loads, arithmetic and stores of an epilogue's pieces overlap
        in_s = 2.0 * sums * matmul.input_factor / (device.cache / device.multiprocessors)
        arithmetic_s = sums * matmul.steps / (device.fp32_flops / 2 / device.multiprocessors)
        reads_late = matmul.input_factor and not matmul.reads_ahead
        store_s += max(in_s + out_s, arithmetic_s) + (READ_S if reads_late else 0.0)
    tile_s = max(loop_s + prologue_s, store_s) if matmul.hides_epilogue else loop_s + prologue_s + store_s
    rounds = ceil(tiles / matmul.tiles_of_program / device.multiprocessors) * matmul.tiles_of_program
    compute_s = rounds * tile_s
    if matmul.is_persistent and matmul.is_wgrad:
        compute_s += (min(_WGRAD_PROGRAMS, rounds) - 1) * (device.prologue_s - prologue_s + out_s)
    beside = 2 * results * (matmul.input_factor + matmul.output_factor) + matmul.extra_bytes
    moved = matmul.element_bytes * operands + beside
    memory_s = moved / (MEMORY_SHARE * device.memory)
    if memory_s > compute_s:
        bound = "memory"
    elif prologue_s + store_s > 0.35 * tile_s and not matmul.hides_epilogue:
        bound = "prologue and epilogue"
    else:
        bound = "tensor cores" if multiply_s >= fetch_s else "second-level cache"
    return Cost(seconds=max(compute_s, memory_s) + LAUNCH_S, bound=bound)


def _row_tiles(matmul: Matmul) -> float:
    """Of one group: the last of a group's tiles is half full on average, unless the groups fill theirs exactly."""
    rows = matmul.rows / matmul.groups
    return rows / matmul.tile.m + 0.5 if matmul.groups > 1 else ceil(rows / matmul.tile.m)


def rows_cost(moved_bytes: float, device: Device, launches: int = 1) -> Cost:
    """Seconds of kernels that move so many bytes through memory together."""
    memory_s = moved_bytes / (MEMORY_SHARE * device.memory)
    launch_s = launches * LAUNCH_S
    return Cost(seconds=memory_s + launch_s, bound="memory" if memory_s > launch_s else "launch")


def fp32_matmul_cost(flops: float, moved_bytes: float, device: Device) -> Cost:
    """Seconds of a matmul in fp32 outside of the tensor cores."""
    compute_s, memory_s = flops / (FP32_SHARE * device.fp32_flops), moved_bytes / (MEMORY_SHARE * device.memory)
    bound = "fp32 units" if compute_s > memory_s else "memory"
    return Cost(seconds=max(compute_s, memory_s) + LAUNCH_S, bound=bound)


def tile_for(device: Device, rows_per_group: float) -> Tile:
    """The tile that `kernels.triton.tiles` takes for 16-bit operands on a device."""
    if rows_per_group <= 96:
        return Tile(m=64, n=128, k=64 if device.shared > 112 << 10 else 32)
    if device.shared < 128 << 10:
        return Tile(m=128, n=128, k=32)
    return Tile(m=128, n=256 if device.has_copy_engine else 128, k=64)
