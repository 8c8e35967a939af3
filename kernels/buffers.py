"""Pool of CPU buffers: large results are written into memory that earlier steps have already touched.

The first touch of fresh memory costs several times the copy that fills it (the system zeroes every page), and malloc
returns large blocks to the system as soon as they are free. The pool lends blocks to tensors and reuses each when the
last tensor over it is gone (autograd, optimizers and users included). CUDA caches blocks itself.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64
_LARGE = 1 << 20
"""Bytes from which a tensor is worth a lent block; malloc keeps smaller ones on its heap."""

Block = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """Statistics of the pool: blocks allocated and blocks reused since it was made, bytes that are idle now."""

    fresh: int
    reused: int
    idle_bytes: int


class BufferPool:
    """Lends blocks of touched host memory as tensors; safe to use from several threads.

    A request takes the smallest idle block that holds it and is at most twice as large. Idle blocks beyond
    `idle_limit_bytes` are given back to the system, those that were used longest ago first.
    """

    def __init__(self, idle_limit_bytes: int = 4 << 30) -> None:
        self._limit = idle_limit_bytes
        self._idle: list[Block] = []
        self._returned: deque[Block] = deque()
        self._lock = threading.Lock()
        self._fresh = 0
        self._reused = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor; NaN where torch is told to fill uninitialised memory, as `torch.empty` does."""
        count = 1
        for size in shape:
            count *= size
        num_bytes = count * dtype.itemsize
        if num_bytes < _LARGE:
            return torch.empty(tuple(shape), dtype=dtype)
        block = self._take(num_bytes)
        lent = block[:num_bytes]  # a tensor keeps this view alive; when it dies the block comes back
        weakref.finalize(lent, self._returned.append, block).atexit = False
        tensor = torch.from_numpy(lent).view(dtype).view(tuple(shape))
        poison: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        if poison and torch.are_deterministic_algorithms_enabled():
            tensor.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max)
        return tensor

    def stats(self) -> PoolStats:
        with self._lock:
            self._collect()
            return PoolStats(
                fresh=self._fresh, reused=self._reused, idle_bytes=sum(block.nbytes for block in self._idle)
            )

    def clear(self) -> None:
        """Free all idle blocks."""
        with self._lock:
            self._collect()
            self._idle.clear()

    def _take(self, num_bytes: int) -> Block:
        with self._lock:
            self._collect()
            fitting = [i for i, block in enumerate(self._idle) if num_bytes <= block.nbytes <= 2 * num_bytes]
            if fitting:
                self._reused += 1
                return self._idle.pop(min(fitting, key=lambda i: self._idle[i].nbytes))
            self._fresh += 1
        step = max(
            _ALIGNMENT, 1 << (num_bytes.bit_length() - 4)
        )  # sizes in steps of an eighth: uneven batches share blocks
        size = -(-num_bytes // step) * step
        raw = np.empty(size + _ALIGNMENT, dtype=np.uint8)
        offset = -raw.ctypes.data % _ALIGNMENT
        return raw[offset : offset + size]

    def _collect(self) -> None:
        # Finalizers run wherever the garbage collector does, also inside `_take`: they only append to the queue.
        while self._returned:
            self._idle.append(self._returned.popleft())
        idle_bytes = sum(block.nbytes for block in self._idle)
        while idle_bytes > self._limit:
            idle_bytes -= self._idle.pop(0).nbytes


pool = BufferPool()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor: from the pool on the CPU, from the device's caching allocator elsewhere."""
    return pool.empty(shape, dtype) if device.type == "cpu" else torch.empty(tuple(shape), dtype=dtype, device=device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for it: by way of page-locked memory on CUDA."""
    if device.type == "cpu" or tensor.device == device:
        return tensor
    staged = tensor.pin_memory() if device.type == "cuda" else tensor
    return staged.to(device, non_blocking=True)
