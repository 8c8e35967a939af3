"""Digests of tensors, which add up over the ranks that hold parts of them: projections on fixed numbers that belong to
places, and squared norms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from moe_lightning.parallel.tensor import Columns, PartedForward

Spans = Sequence[tuple[int, int]]
"""Where a rank's numbers along a dimension lie in the whole: the first place and the number of each block."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a rank's part of a sample may lie in the whole of it.

    Attributes:
        shape: of the whole.
        spans: by dimension.
        share: that this rank tells of its values, where others have the same.
    """

    shape: list[int]
    spans: list[Spans]
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Which ranks compute a sample.

    Attributes:
        part, parts: of its positions, which are its first dimension, or the second after heads.
        tensor, tensors: among the ranks that compute parts of layers.
    """

    part: int = 0
    parts: int = 1
    tensor: int = 0
    tensors: int = 1

    def whole(self, here: Sequence[int], copies: int) -> Layout:
        """Nothing but positions is cut.

        Args:
            here: the shape of a sample on this rank.
            copies: ranks that have the same values.
        """
        return self._cut(here, None, None, 1.0 / copies)

    def layouts(self, here: Sequence[int], columns: Spans | None = None) -> Iterator[Layout]:
        """Whatever a module's output may be: whole on every rank that computes parts of layers, or cut along one of its
        dimensions; with positions first, or after heads. Their shapes differ, so that of the same output in one process
        says which it is.

        Args:
            here: the shape of a sample on this rank.
            columns: where numbers of its last dimension lie; None: those of each rank side by side.
        """
        yield self.whole(here, self.tensors)
        if self.tensors > 1:
            told_apart = here if self.parts == 1 or len(here) < 3 else here[:1]  # heads or positions, who knows
            yield from (self._cut(here, dim, columns) for dim in range(len(told_apart)))
        elif self.parts > 1 and len(here) > 1:
            yield self._cut(here, None, None, positions=1)  # heads come before them

    def _cut(
        self, here: Sequence[int], by: int | None, columns: Spans | None, share: float = 1.0, positions: int = 0
    ) -> Layout:
        shape: list[int] = []
        spans: list[Spans] = []
        for dim, size in enumerate(here):
            part, parts = (self.part, self.parts) if dim == positions else (0, 1)
            if dim == by:
                part, parts = part * self.tensors + self.tensor, parts * self.tensors
            shape.append(size * parts)
            is_given = dim == by == len(here) - 1
            spans.append(columns if columns is not None and is_given else [(part * size, size)])
        return Layout(shape=shape, spans=spans, share=share)


def columns_of(part: nn.Module) -> Spans | None:
    """Where the outputs of a layer lie that computes some of each of several sections; None of any other module."""
    forward = part.__dict__.get("forward")
    if not isinstance(forward, PartedForward) or not isinstance(forward.style, Columns) or not forward.style.sections:
        return None
    rank, size, sections = forward.ranks.rank, forward.ranks.size, forward.style.sections
    starts = accumulate(sections, initial=0)
    return [(start + rank * (n // size), n // size) for start, n in zip(starts, sections, strict=False)]


def samples_in(tensor: Tensor, count: int | None) -> Tensor | None:
    """Floating-point [samples, ...]; None where the first dimension is not samples.

    Args:
        tensor: of `count` samples, or of tokens one sample after the other.
        count: None: the tensor is one sample.
    """
    values = tensor.detach()
    values = values.double() if not values.is_floating_point() else values.float()
    if count is None:
        return values[None]
    if not tensor.ndim or not count or not len(values) or len(values) % count:
        return None
    return values if len(values) == count else values.reshape(count, len(values) // count, *values.shape[1:])


def digests_of(samples: Tensor, layout: Layout) -> list[list[float]]:
    """(projection, squared norm) of each sample."""
    squares = samples.double().square()
    projected = samples
    for dim in range(samples.ndim - 1, 0, -1):
        wave = torch.cat([_wave(first, size, dim) for first, size in layout.spans[dim - 1]])
        squares, projected = squares.sum(dim), projected @ wave.to(projected)
    found: list[list[float]] = (torch.stack([projected.double(), squares], dim=1) * layout.share).tolist()
    return found


def projection(values: Tensor, offsets: Sequence[int]) -> float:
    """Of a block that begins at these places of its tensor."""
    values = values.float() if values.element_size() < 4 else values
    for dim in range(values.ndim - 1, -1, -1):
        values = values @ _wave(offsets[dim], values.shape[dim], dim).to(values)
    return float(values)


def square(values: Tensor) -> float:
    """The squared norm."""
    return float(torch.linalg.vector_norm(values.double())) ** 2


@lru_cache(maxsize=1024)
def _wave(first: int, size: int, dim: int) -> Tensor:
    """Fixed numbers in [-1, 1] for places along a dimension, float64."""
    places = torch.arange(first, first + size, dtype=torch.float64)
    return 2.0 * torch.frac((torch.sin((places + 1.0) * 12.9898 * (dim + 1)) * 43758.5453).abs()) - 1.0


def tensors_in(output: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module's output that have as many rows as the first one."""
    named: list[tuple[str, Any]] = []
    if isinstance(output, Tensor):
        named = [("", output)]
    elif isinstance(output, tuple | list):
        named = [(f"[{number}]", item) for number, item in enumerate(output)]
    elif isinstance(output, Mapping):
        named = [(f"[{key}]", value) for key, value in output.items()]
    elif dataclasses.is_dataclass(output):
        named = [(f".{item.name}", getattr(output, item.name)) for item in dataclasses.fields(output)]
    tensors = [(suffix, value) for suffix, value in named if isinstance(value, Tensor)]
    return ((suffix, value) for suffix, value in tensors if value.shape[:1] == tensors[0][1].shape[:1])
