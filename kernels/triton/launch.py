"""Launching on the device of the data, and tile sizes."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FLATTENS = not INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""Nested loops can become one. The compiler of Triton 3.6, which torch 2.11 needs, fails on loops whose inner bound is
known to be positive."""


def launch(kernel: Any, grid: tuple[int, ...], data: Tensor, *arguments: object, **meta: object) -> None:
    """Run a kernel on the device of `data`; an empty grid runs nothing."""
    if all(grid):
        with torch.cuda.device_of(data):  # type: ignore[no-untyped-call]
            kernel[grid](*arguments, **meta)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def row_tile(width: int, elements: int = 4096) -> tuple[int, int]:
    """(rows, columns) of a tile of that many elements; small in the interpreter, so that small tests have several."""
    if INTERPRETED:
        return 32, 16
    columns = min(power_of_two(width), 1024)
    return max(1, elements // columns), columns
