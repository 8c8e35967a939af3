"""Dropout whose mask is a function of where a row lies in the global batch.

Legend: M rows, D columns.
"""

from __future__ import annotations

from torch import Tensor

from moe_lightning.kernels import backends, checks, functions, torch_stream
from moe_lightning.kernels.bodies import Draw


def keyed_dropout(x_MD: Tensor, p: float, draw: Draw) -> Tensor:
    """x with zeros where the number drawn for an element is below p, and all else over 1 - p; differentiable.

    Args:
        x_MD: floats.
        p: from 0, below 1.
        draw: which numbers.
    """
    checks.matrix("x", x_MD)
    rooms = backends.bodies(x_MD.device, x_MD.dtype)
    if rooms is None or rooms.stream is torch_stream:
        return torch_stream.dropout(x_MD, p, draw)
    result: Tensor = functions.apply(functions.KeyedDropout, x_MD.contiguous(), p, draw, rooms.stream)
    return result
