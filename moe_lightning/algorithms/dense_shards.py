"""Which ranks share one copy of the dense parameters when they are cut (FSDP, hybrid FSDP, tensor parallelism), and
what of them is whose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

Groups = tuple[tuple[int, ...], ...]
"""Ranks that share one copy each, in the order of their parts; all of one size."""


def shard_groups(nodes: Sequence[object], size: int) -> Groups:
    """Groups of `size` ranks, those of a node side by side, as parts are gathered in every layer.

    Args:
        nodes: of each rank.
        size: divides their number.
    """
    assert len(nodes) % size == 0
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    order = sorted(range(len(nodes)), key=lambda rank: (numbers[nodes[rank]], rank))
    return tuple(tuple(order[at : at + size]) for at in range(0, len(order), size))


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
class RowCut:
    """How tensors are cut by rows into parts, as `torch.chunk` cuts.

    Attributes:
        holders: ranks that hold each part, [parts].
        part: this rank's.
    """

    holders: Groups
    part: int

    @classmethod
    def whole(cls, num_ranks: int) -> Self:
        """Every rank holds everything."""
        return cls(holders=(tuple(range(num_ranks)),), part=0)

    @classmethod
    def among(cls, groups: Groups, rank: int) -> Self:
        """The cut over groups that share one copy each."""
        part = next(group.index(rank) for group in groups if rank in group)
        return cls(holders=tuple(zip(*groups, strict=True)), part=part)

    @property
    def parts(self) -> int:
        return len(self.holders)

    def of_all(self) -> list[RowCut]:
        """As every rank sees it."""
        parts = {rank: part for part, ranks in enumerate(self.holders) for rank in ranks}
        return [replace(self, part=parts[rank]) for rank in range(len(parts))]

    def names(self) -> tuple[str, ...]:
        """Of the parts, for inventories; those of other cuts have other names."""
        return tuple(f"dense rows {part} of {self.parts}" for part in range(self.parts))

    def bounds(self, rows: int) -> tuple[int, int]:
        """(first, last) row of this rank's part; equal where it has none."""
        return part_bounds(rows, self.part, self.parts)


@dataclass(frozen=True, kw_only=True)
class TensorCut:
    """Which numbers of a tensor are in which part.

    Attributes:
        dim: along which it is cut.
        sections: sizes along `dim` of what lies there one after the other, such as queries, keys and values: each of
            them is cut by itself, as `torch.chunk` cuts.
    """

    dim: int = 0
    sections: tuple[int, ...]

    @property
    def size(self) -> int:
        """Of the whole tensor along `dim`."""
        return sum(self.sections)

    def ranges(self, part: int, parts: int) -> tuple[tuple[int, int], ...]:
        """(first, last) along `dim` of what is in a part, which holds it in this order; empty ones left out."""
        begins = accumulate(self.sections, initial=0)
        bounds = (part_bounds(size, part, parts) for size in self.sections)
        found = ((begin + first, begin + last) for begin, (first, last) in zip(begins, bounds, strict=False))
        return tuple((first, last) for first, last in found if first < last)


def part_of(name: str) -> tuple[int, int]:
    """(part, parts) of one of `RowCut.names`."""
    part, _, parts = name.removeprefix("dense rows ").partition(" of ")
    return int(part), int(parts)


def part_bounds(rows: int, part: int, parts: int) -> tuple[int, int]:
    """(first, last) row of a part as `torch.chunk` cuts; equal where it has none."""
    height = -(-rows // parts)
    return min(rows, part * height), min(rows, (part + 1) * height)
