"""Weights that are never trained, under adapters: checkpoints hold a digest of them in their place, and a restore
compares it with that of the weights that are here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from moe_lightning.errors import CheckpointError

BASE_DIGEST = "base_digest"
"""Name of an int64 parameter [S, 1] of experts, and of a buffer [1] of the module with adapters."""


def digest_of(tensors: Iterable[Tensor]) -> int:
    """xxh3 of the bits of tensors in order, as a signed integer of 64 bits."""
    state = xxhash.xxh3_64()
    for tensor in tensors:
        data: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        state.update(data)
    value: int = state.intdigest()
    return value - (1 << 64) if value >= 1 << 63 else value


def frozen_base(module: nn.Module) -> frozenset[nn.Parameter]:
    """The parameters that adapters leave as they are; none of a module without any."""
    is_adapted = any(name.rpartition(".")[2] == BASE_DIGEST for name, _ in module.named_buffers())
    return frozenset(p for p in module.parameters() if is_adapted and not p.requires_grad)


def is_digest(key: str) -> bool:
    """Whether a key of the state table is that of a digest."""
    name = key.rpartition("/")[2] if key.startswith("expert/") else key.rpartition("/")[0]
    return name.rpartition("/")[2].rpartition(".")[2] == BASE_DIGEST


def require_same_base(saved: Tensor, here: Tensor, key: str, where: str) -> None:
    """
    Raises:
        CheckpointError: the adapters were trained beside other weights.
    """
    if not torch.equal(saved.cpu(), here.cpu()):
        raise CheckpointError(
            f"the adapters of {where} were trained beside other base weights ({key} differs): give the base model, the "
            "precision and the kind of adapter that they were trained with"
        )
