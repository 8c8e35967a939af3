"""Transfer plans against brute force over elements: random layouts, with parts missing and held several times."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product

from moe_lightning.state.layout import Layout, plan_transfer
from moe_lightning.state.pieces import Block
from moe_lightning.state.transfer import waves

Element = tuple[str, tuple[int, ...], int]


def elements(block: Block) -> Iterator[tuple[int, ...]]:
    return product(*(range(at, at + size) for at, size in zip(block.offsets, block.sizes, strict=True)))


def random_blocks(rng: random.Random, shape: tuple[int, ...]) -> list[Block]:
    """All of a tensor, its rows or columns, or boxes that overlap and leave gaps."""
    kind = rng.randrange(3)
    if kind == 0 or not shape:
        return [Block.of(shape)]
    if kind == 1:
        dim = rng.randrange(len(shape))
        bounds = sorted({0, shape[dim], *(rng.randint(0, shape[dim]) for _ in range(3))})
        return [
            Block(
                offsets=tuple(first if d == dim else 0 for d in range(len(shape))),
                sizes=tuple(last - first if d == dim else size for d, size in enumerate(shape)),
                whole=shape,
            )
            for first, last in pairwise(bounds)
        ]
    found = {}
    for _ in range(rng.randint(0, 3)):
        offsets = tuple(rng.randrange(max(1, size)) for size in shape)
        sizes = tuple(rng.randint(0, size - at) for size, at in zip(shape, offsets, strict=True))
        found[offsets, sizes] = Block(offsets=offsets, sizes=sizes, whole=shape)
    return list(found.values())


def random_layout(rng: random.Random, shapes: dict[str, tuple[int, ...]], num_ranks: int) -> Layout:
    ranks = range(num_ranks)
    return {
        key: [(block, sorted(rng.sample(ranks, rng.randint(1, num_ranks)))) for block in random_blocks(rng, shape)]
        for key, shape in shapes.items()
        if rng.random() < 0.9
    }


def test_every_wanted_element_comes_once_and_from_as_near_as_it_can() -> None:
    rng, moved = random.Random(0), Counter[str]()
    for _ in range(600):
        num_ranks = rng.randint(1, 5)
        nodes = [rng.randrange(3) for _ in range(num_ranks)]
        shapes = {f"w{i}": tuple(rng.randint(0, 4) for _ in range(rng.randrange(4))) for i in range(3)}
        have, want = random_layout(rng, shapes, num_ranks), random_layout(rng, shapes, num_ranks)
        plan = plan_transfer(have, want, nodes)
        assert plan == plan_transfer(have, want, nodes)

        holders: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        for key, blocks in have.items():
            for block, ranks in blocks:
                for element in elements(block):
                    holders.setdefault((key, element), set()).update(ranks)
        wanted = Counter(
            (key, block, element, rank)
            for key, blocks in want.items()
            for block, ranks in blocks
            for rank in ranks
            for element in elements(block)
        )
        came, lost, far = Counter[tuple[str, Block, tuple[int, ...], int]](), Counter[Element](), 0
        for move in plan.moves:
            assert move.source in next(ranks for block, ranks in have[move.key] if block == move.held)
            assert all(move.block.intersection(outer) == move.block for outer in (move.held, move.wanted))
            came.update((move.key, move.wanted, element, move.target) for element in elements(move.block))
            far += move.block.numel * (nodes[move.source] != nodes[move.target])
            moved["self" if move.source == move.target else "other"] += move.block.numel
        for key, block, rank in plan.missing:
            lost.update((key, element, rank) for element in elements(block))
        nowhere = {entry: n for entry, n in wanted.items() if (entry[0], entry[2]) not in holders}
        assert came == wanted - Counter(nowhere)
        assert lost == Counter((key, element, rank) for key, _, element, rank in Counter(nowhere).elements())
        least = sum(
            n
            for (key, _, element, rank), n in came.items()
            if all(nodes[holder] != nodes[rank] for holder in holders[key, element])
        )
        assert far == least
        at_home = sum(n for (key, _, element, rank), n in came.items() if rank in holders[key, element])
        assert sum(m.block.numel for m in plan.moves if m.source == m.target) == at_home
        moved["missing"] += sum(nowhere.values())
    assert min(moved["self"], moved["other"], moved["missing"]) > 1000, moved


def test_ranks_that_have_the_same_share_the_sends() -> None:
    keys = [str(number) for number in range(12)]
    have = {key: [(Block.of((5,)), [0, 1, 2])] for key in keys}
    plan = plan_transfer(have, {key: [(Block.of((5,)), [3])] for key in keys}, nodes=[0, 0, 0, 0])
    assert Counter(move.source for move in plan.moves) == {0: 4, 1: 4, 2: 4}
    plan = plan_transfer(have, {key: [(Block.of((5,)), [3])] for key in keys}, nodes=[0, 1, 2, 1])
    assert {move.source for move in plan.moves} == {1}


def test_exchanges_are_bounded_and_few() -> None:
    rng = random.Random(1)
    for _ in range(300):
        num_ranks, most = rng.randint(2, 6), rng.randint(8, 40)
        ways = [(s, t) for s in range(num_ranks) for t in range(num_ranks) if s != t and rng.random() < 0.7]
        sizes = {way: [rng.randint(0, most) for _ in range(rng.randrange(9))] for way in ways}
        numbers = waves(sizes, most)
        assert {way: len(found) for way, found in numbers.items()} == {way: len(some) for way, some in sizes.items()}
        filled: Counter[tuple[int, str, int]] = Counter()
        for (source, target), found in numbers.items():
            assert found == sorted(found), "what two ranks exchange keeps its order"
            for number, size in zip(found, sizes[source, target], strict=True):
                filled[source, "sends", number] += size
                filled[target, "receives", number] += size
        assert all(used <= most for used in filled.values())
    everyone = {(s, t): [1] * 10 for s in range(4) for t in range(4) if s != t}
    assert max(n for found in waves(everyone, 10).values() for n in found) == 2, "30 of each rank in exchanges of 10"
