"""Layouts of state: which ranks have which blocks of which tensors, and the moves from one layout to another.

Everything here is pure and deterministic: ranks that plan from the same layouts plan the same. What ranks have is
published (`state/transfer.py`); only what they want is derived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from moe_lightning.state.pieces import Block

Layout = Mapping[str, Sequence[tuple[Block, Sequence[int]]]]
"""Key of a tensor -> its blocks, each once, with the ranks that have or want it."""


class Move(NamedTuple):
    """A block that one rank sends another, or itself.

    Attributes:
        key: of the tensor.
        block: what moves.
        held: the block of the source in which it lies.
        wanted: the block of the target in which it lies.
        source, target: ranks.
    """

    key: str
    block: Block
    held: Block
    wanted: Block
    source: int
    target: int


class Way(Protocol):
    """Anything that one rank sends another."""

    @property
    def source(self) -> int: ...

    @property
    def target(self) -> int: ...


class TransferPlan(NamedTuple):
    """Moves that make the wanted layout from what ranks have.

    Attributes:
        moves: they cover every wanted block once, but for what is missing.
        missing: (key, block, target) of what no rank has.
    """

    moves: list[Move]
    missing: list[tuple[str, Block, int]]


def plan_transfer(have: Layout, want: Layout, nodes: Sequence[int]) -> TransferPlan:
    """Choose a source for everything that ranks want, so that little moves between nodes and sends are even.

    A rank takes what it has from itself, then all it can from its node, then the rest; of several ranks that are
    equally near from the one that has sent fewest elements so far.

    Args:
        nodes: of each rank.
    """
    plan, sent = TransferPlan([], []), Counter[int]()
    covers: dict[tuple[int, Block, int], _Cover] = {}  # most tensors are cut as others are
    numbers: dict[tuple[tuple[Block, tuple[int, ...]], ...], int] = {}
    for key, blocks in want.items():
        held = tuple((block, tuple(ranks)) for block, ranks in have.get(key, ()))
        number = numbers.setdefault(held, len(numbers))
        for wanted, target in ((block, rank) for block, ranks in blocks for rank in ranks):
            if (number, wanted, target) not in covers:
                covers[number, wanted, target] = _cover(held, wanted, target, nodes)
            cover = covers[number, wanted, target]
            for block, source_block, ranks in cover.parts:
                source = min(ranks, key=lambda rank: (sent[rank], rank))
                sent[source] += block.numel if source != target else 0
                plan.moves.append(Move(key, block, source_block, wanted, source, target))
            plan.missing.extend((key, block, target) for block in cover.missing)
    return plan


class _Cover(NamedTuple):
    """Cover of a wanted block by blocks that ranks have.

    Attributes:
        parts: (block, the held block in which it lies, the nearest ranks that have that).
        missing: what no rank has.
    """

    parts: list[tuple[Block, Block, Sequence[int]]]
    missing: list[Block]


def _cover(held: Iterable[tuple[Block, Sequence[int]]], wanted: Block, target: int, nodes: Sequence[int]) -> _Cover:
    """Cover a block by the nearest blocks first."""

    def distance(rank: int) -> int:
        return 0 if rank == target else 1 if nodes[rank] == nodes[target] else 2

    least = [(min(map(distance, ranks)), block, ranks) for block, ranks in held]
    least.sort(key=lambda entry: (entry[0], entry[1].offsets, entry[1].sizes))
    found, left = _Cover([], []), [wanted] if wanted.numel else []
    for near, block, ranks in least:
        rest: list[Block] = []
        for part in left:
            common = part.intersection(block)
            if common is None:
                rest.append(part)
                continue
            found.parts.append((common, block, [rank for rank in ranks if distance(rank) == near]))
            rest += part.without(common)
        left = rest
    found.missing.extend(left)
    return found
