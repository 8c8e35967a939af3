"""A rank's batch cut into micro-batches of samples, and what steps return of them put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moe_lightning.errors import ConfigurationError


def batch_pieces(batch: Any, rows: Sequence[int]) -> list[Any]:
    """Micro-batches of so many samples each.

    Args:
        batch: nested containers of tensors [samples, ...] and lists of a value for each sample; numbers, strings and
            scalars are handed to every micro-batch.

    Raises:
        ConfigurationError: something else.
    """
    ends = list(accumulate(rows))
    return [_piece(batch, slice(end - count, end), ends[-1]) for count, end in zip(rows, ends, strict=True)]


def _piece(value: Any, where: slice, total: int) -> Any:
    if isinstance(value, Tensor) and value.ndim and len(value) == total:
        return value[where]
    if isinstance(value, Mapping):
        return {key: _piece(inner, where, total) for key, inner in value.items()}
    if isinstance(value, list) and len(value) == total and not any(isinstance(item, Tensor) for item in value):
        return value[where]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_piece(inner, where, total) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(_piece(inner, where, total) for inner in value)
    if value is None or isinstance(value, int | float | str) or (isinstance(value, Tensor) and not value.ndim):
        return value
    shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ConfigurationError(
        f"a batch of {total} samples holds {shown}, which mesh.pp cannot cut into micro-batches: let its tensors begin "
        "with the samples"
    )


def joined(outcomes: Sequence[Any], counts: Sequence[int], weights: Sequence[float]) -> Any:
    """What a step has returned of all micro-batches: rows one after the other, scalars as their mean.

    Args:
        counts: samples of each; of none its rows are left out.
        weights: of the means.

    Raises:
        ConfigurationError: something that is neither.
    """
    first = outcomes[0]
    if isinstance(first, Mapping):
        return {key: joined([outcome[key] for outcome in outcomes], counts, weights) for key in first}
    if isinstance(first, list | tuple):
        columns = zip(*outcomes, strict=True)
        return type(first)(joined(column, counts, weights) for column in columns)
    if isinstance(first, Tensor) and first.ndim:
        kept = zip(outcomes, counts, strict=True)
        return torch.cat([rows.detach() if count else rows[:0].detach() for rows, count in kept])
    if isinstance(first, Tensor | float | int) and not isinstance(first, bool):
        total = sum(weights)
        pairs = [(float(o), w) for o, w in zip(outcomes, weights, strict=True) if w]
        mean = sum(o * w for o, w in pairs) / total if total else 0.0
        return torch.tensor(mean, dtype=first.dtype, device=first.device) if isinstance(first, Tensor) else mean
    if first is None or isinstance(first, bool | str):
        return first
    raise ConfigurationError(
        f"a step returns a {type(first).__name__}, which mesh.pp cannot put together from micro-batches: return tensors"
    )
