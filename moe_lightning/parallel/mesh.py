"""Mesh of ranks: size and order of its axes, and the groups that share dense parameters.

Axes from the outermost to the innermost, as their traffic grows: pp (pipeline stages), dp (data), cp (context: parts of
a sequence), tp (tensor: parts of a layer). rank = ((pp_index * dp + dp_index) * cp + cp_index) * tp + tp_index, so the
ranks of a stage are consecutive, and those of a tensor group are neighbors, on one node where that is large enough and
the launcher numbers ranks node by node.

`RowCut` and `TensorCut` describe sharded dense parameters (FSDP, hybrid FSDP, tensor parallelism).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, product
from math import prod
from typing import Literal, Self

import numpy as np

from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError

ScheduleName = Literal["1f1b", "interleaved"]
"""Order in which pipeline stages compute micro-batches."""

STAGES_PER_RANK: dict[ScheduleName, int] = {"1f1b": 1, "interleaved": 2}

MICRO_BATCHES_PER_RANK = 2
"""Micro-batches of a batch for each rank of a pipeline, where the user gives no number."""

Groups = tuple[tuple[int, ...], ...]
"""Ranks that share one copy each, in the order of their parts; all of one size."""


def shard_groups(nodes: Sequence[object], size: int) -> Groups:
    """Groups of `size` ranks, of as few nodes as possible, since parts are gathered in every layer. Ranks of a group
    ascend, as those of a process group do, whose order says who has which part.

    Args:
        nodes: of each rank.
        size: divides their number.
    """
    assert len(nodes) % size == 0
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    order = sorted(range(len(nodes)), key=lambda rank: (numbers[nodes[rank]], rank))
    return tuple(tuple(sorted(order[at : at + size])) for at in range(0, len(order), size))


def hybrid_shard_size(nodes: Sequence[object], wanted: int | None) -> int:
    """Ranks that share one copy, so that several copies exist.

    Args:
        nodes: of each rank.
        wanted: by memory: the least divisor of the ranks that is not smaller. None: the ranks of a node where all nodes
            have as many and there are several, else the largest that leaves two copies.
    """
    sizes = [size for size in range(1, len(nodes) + 1) if len(nodes) % size == 0]
    if wanted is not None:
        return next((size for size in sizes if size >= wanted), len(nodes))
    per_node = set(Counter(nodes).values())
    if len(per_node) == 1 and 1 < (size := per_node.pop()) < len(nodes):
        return size
    return max(size for size in sizes if 2 * size <= max(2, len(nodes)))


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of all tensors that are cut: first by tensor index, as `TensorCut` says, then by rows of what
    that leaves.

    Attributes:
        tensor: the tensor index, of `tensors`.
        row: which of the parts by rows, of `rows`; `rows` itself: nothing.
    """

    tensor: int = 0
    tensors: int = 1
    row: int = 0
    rows: int = 1

    @property
    def name(self) -> str:
        """For inventories; those of other cuts have other names, which nothing parses."""
        of_tensor = f" in part {self.tensor} of {self.tensors}" if self.tensors > 1 else ""
        return f"dense rows {self.row} of {self.rows}{of_tensor}"


@dataclass(frozen=True, kw_only=True)
class RowCut:
    """Into which parts the dense tensors of a world are cut, and which is this rank's.

    Attributes:
        holders: ranks that hold each part, [tensors * rows], those of one tensor index side by side.
        index: of this rank's part.
        tensors: numbers of a tensor index.
    """

    holders: Groups
    index: int
    tensors: int = 1

    @classmethod
    def whole(cls, num_ranks: int) -> Self:
        """Every rank holds everything."""
        return cls(holders=(tuple(range(num_ranks)),), index=0)

    @classmethod
    def among(cls, groups: Groups, rank: int, tensors: int = 1) -> Self:
        """The cut over groups that share one copy each."""
        index = next(group.index(rank) for group in groups if rank in group)
        return cls(holders=tuple(zip(*groups, strict=True)), index=index, tensors=tensors)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All, in the order of `holders`."""
        rows = len(self.holders) // self.tensors
        places = product(range(self.tensors), range(rows))
        return tuple(Part(tensor=tensor, tensors=self.tensors, row=row, rows=rows) for tensor, row in places)

    @cached_property
    def part(self) -> Part:
        """This rank's."""
        return self.parts[self.index]

    def holders_of(self, cut: TensorCut) -> tuple[int, ...]:
        """The ranks that hold the same values of a tensor as this one."""
        if cut.sections or self.tensors == 1:
            return self.holders[self.index]
        rows = len(self.holders) // self.tensors
        return tuple(sorted(rank for ranks in self.holders[self.index % rows :: rows] for rank in ranks))


@dataclass(frozen=True, kw_only=True)
class TensorCut:
    """Map from the parts of a tensor to their elements.

    Attributes:
        shape: of the whole tensor.
        dim: along which it is cut by tensor index; rows are along the first dimension.
        sections: sizes along `dim` of what lies there one after the other, such as queries, keys and values: each of
            them is cut by itself, as `torch.chunk` cuts. (): it is not cut by tensor index.
    """

    shape: tuple[int, ...]
    dim: int = 0
    sections: tuple[int, ...] = ()

    def shape_of(self, part: Part) -> tuple[int, ...]:
        """Return the shape of the tensor that holds a part."""
        shape = list(self.shape)
        shape[self.dim] = sum(last - first for first, last in self._ranges(part))
        first, last = part_bounds(shape[0], part.row, part.rows)
        return (last - first, *shape[1:])

    def blocks(self, part: Part) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offsets in the whole tensor, sizes) of what is in a part, which holds these blocks one after the other along
        `dim`; empty ones left out.
        """
        ranges = self._ranges(part)
        held = sum(last - first for first, last in ranges) if self.dim == 0 else self.shape[0]
        low, high = part_bounds(held, part.row, part.rows)
        at = 0
        for first, last in ranges:
            begins, ends = [0] * len(self.shape), list(self.shape)
            begins[self.dim], ends[self.dim] = first, last
            ahead = first - at if self.dim == 0 else 0  # of the rows of the part
            begins[0], ends[0] = max(begins[0], low + ahead), min(ends[0], high + ahead)
            at += last - first
            sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
            if min(sizes) > 0:
                yield tuple(begins), sizes

    def _ranges(self, part: Part) -> list[tuple[int, int]]:
        """(first, last) along `dim` of what has the tensor index of a part, in this order."""
        if not self.sections:
            return [(0, self.shape[self.dim])]
        begins = accumulate(self.sections, initial=0)
        bounds = (part_bounds(size, part.tensor, part.tensors) for size in self.sections)
        return [(begin + first, begin + last) for begin, (first, last) in zip(begins, bounds, strict=False)]


def part_bounds(rows: int, part: int, parts: int) -> tuple[int, int]:
    """(first, last) row of a part as `torch.chunk` cuts; equal where it has none."""
    height = -(-rows // parts)
    return min(rows, part * height), min(rows, (part + 1) * height)


@validated
@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """The numbers of ranks along the axes; they multiply to all ranks of the run. The fields are the axes, from the
    outermost to the innermost.

    Another axis is another field here: its ranks share the samples of a slice of the batch, and each counts for one of
    as many equal shares of them, unless another module cuts the work between them.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if size < 1:
                raise ConfigurationError(f"mesh.{axis}={size} must be at least 1")

    def over(self, num_ranks: int) -> Self:
        """Return the shape in which data parallelism takes what the other axes leave.

        Raises:
            ConfigurationError: the other axes do not divide the ranks.
        """
        others = replace(self, dp=1)
        data, rest = divmod(num_ranks, others.num_ranks)
        if rest or not data:
            axes = ", ".join(f"{axis}={getattr(self, axis)}" for axis in self.axes if axis != "dp")
            raise ConfigurationError(
                f"a mesh of {axes} needs a multiple of {others.num_ranks} ranks, not {num_ranks}: "
                "change the axes or the number of ranks"
            )
        return replace(self, dp=data)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, the outermost first."""
        return tuple(field.name for field in fields(self))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks along each of the axes."""
        return tuple(getattr(self, axis) for axis in self.axes)

    @property
    def num_ranks(self) -> int:
        return prod(self.sizes)

    @property
    def sharers(self) -> int:
        """Ranks that compute the loss of the same samples: each counts for one of as many equal shares."""
        return self.num_ranks // (self.pp * self.dp)

    def index(self, rank: int, axis: str) -> int:
        """Return the coordinate of a rank along one axis."""
        return self._indices(rank)[self.axes.index(axis)]

    def peers(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """The ranks, ascending, that stand where this one does along all other axes; itself among them."""
        indices = zip(self.axes, self._indices(rank), strict=True)
        chosen = tuple(slice(None) if axis in axes else index for axis, index in indices)
        return tuple(np.arange(self.num_ranks).reshape(self.sizes)[chosen].ravel().tolist())

    def place(self, rank: int, axes: Collection[str]) -> tuple[int, int]:
        """Return (index of a rank among its `peers`, number of them)."""
        peers = self.peers(rank, axes)
        return peers.index(rank), len(peers)

    def groups(self, axes: Collection[str]) -> Groups:
        """All ranks, cut into the groups that `peers` tells of each, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.peers(rank, axes) for rank in range(self.num_ranks)))

    @property
    def stages(self) -> Groups:
        """Ranks of each pipeline stage, among which its experts are dispatched."""
        return self.groups([axis for axis in self.axes if axis != "pp"])

    def _indices(self, rank: int) -> tuple[int, ...]:
        return tuple(int(index) for index in np.unravel_index(rank, self.sizes))


def stage_ranks(stage: int, num_ranks: int, axes: MeshShape) -> range:
    """The ranks that hold a stage in a world of so many. Those that the axes leave over come last and hold none; where
    they are too few, each of them holds all stages.

    Args:
        axes: with dp=1.
    """
    size = num_ranks // axes.num_ranks * (axes.num_ranks // axes.pp)
    first = stage % axes.pp * size
    return range(first, first + size) if size else range(num_ranks)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Groups of the ranks of a world; the same on all of them.

    Attributes:
        shape: ranks along the axes.
        nodes: failure domain of each rank, numbered from 0; empty: each rank is one.
        shards: ranks that share one copy of the dense parameters, by copy, those of a tensor index side by side; empty
            where every rank has a copy of its own.
    """

    shape: MeshShape
    nodes: tuple[int, ...] = ()
    shards: Groups = ()


def chosen_axes(mesh: Mapping[str, int] | None) -> MeshShape:
    """The axes as a user chose them; dp is left at 1.

    Raises:
        ConfigurationError: an unknown axis, a number of ranks that is not positive.
    """
    chosen = dict(mesh or {})
    for axis, size in chosen.items():
        known = [name for name in MeshShape().axes if name != "dp"]
        if axis not in known:
            cure = "it follows from the number of ranks: drop it"
            cure = cure if axis == "dp" else f"use {', '.join(known[:-1])} or {known[-1]}"
            raise ConfigurationError(f"mesh.{axis}={size!r} cannot be chosen: {cure}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigurationError(f"mesh.{axis}={size!r} is not an integer of at least 1: set it to one")
    return MeshShape(**chosen)
