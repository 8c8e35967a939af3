"""Wrong tensors become one clear sentence before a kernel sees them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_lightning.errors import ConfigurationError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigurationError(sentence)


def matrix(name: str, tensor: Tensor, dims: int = 2) -> None:
    """A floating-point tensor with that many dimensions."""
    require(tensor.dim() == dims, f"{name} has shape {list(tensor.shape)}, but needs {dims} dimensions")
    require(tensor.dtype in FLOATS, f"{name} is {tensor.dtype}, but needs one of float32, bfloat16, float16, float64")


def index(name: str, tensor: Tensor, dims: int, device: torch.device) -> None:
    """An int64 tensor with that many dimensions on the device of the data."""
    require(tensor.dim() == dims, f"{name} has shape {list(tensor.shape)}, but needs {dims} dimensions")
    require(tensor.dtype == torch.int64, f"{name} is {tensor.dtype}, but needs int64: call .long() on it")
    same_device(name, tensor, device)


def same_device(name: str, tensor: Tensor, device: torch.device) -> None:
    require(tensor.device == device, f"{name} is on {tensor.device}, but the data is on {device}: move it there")


def rows_fit(order_M: Tensor, inverse_TK: Tensor) -> None:
    require(
        len(order_M) <= inverse_TK.numel(),
        f"order lists {len(order_M)} rows, more than the {inverse_TK.numel()} assignments of inverse "
        f"{list(inverse_TK.shape)}",
    )


def byte_buffer(name: str, tensor: Tensor, num_bytes: int | None = None) -> None:
    """A flat contiguous uint8 buffer, of exactly that size where it is given."""
    require(
        tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous(),
        f"{name} is {tensor.dtype} of shape {list(tensor.shape)}, but needs a flat contiguous uint8 buffer",
    )
    require(
        num_bytes is None or tensor.numel() == num_bytes,
        f"{name} holds {tensor.numel()} bytes, but {num_bytes} are needed",
    )
