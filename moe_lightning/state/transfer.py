"""Transfer of state between ranks: the one mover of tensors that are not part of a step.

Tensors travel in exchanges of bounded size. Values that arrive go to memory that nothing else reads, and `install`
writes them into live tensors after the last exchange, so a fault in a transfer leaves every live tensor as it was.

Memory of a rank during a transfer, besides the tensors given and those that arrive: what it sends and what it receives
in one exchange, at most `2 * most_bytes`, on the device of the world; tensors that lie elsewhere are copied there one
by one. A tensor that is larger travels in several exchanges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.collectives import CURE, all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PendingExchange
from moe_lightning.state.layout import Layout, Way, plan_transfer
from moe_lightning.state.pieces import Block, StatePiece, dtype_name

MOST_BYTES = 1 << 26
"""Bytes that a rank sends, and receives, in one exchange."""

_ALIGNMENT = 16

W = TypeVar("W", bound=Way)


@torch.no_grad()
def transfer(
    ways: Iterable[W],
    values: Callable[[W], Iterable[Tensor]],
    memory: Callable[[W], Iterable[Tensor]],
    world: World,
    most_bytes: int = MOST_BYTES,
) -> int:
    """Send tensors to other ranks, and fill those for which others have values; collective.

    Args:
        ways: those from or to this rank at least, in the same order on both.
        values: tensors that this rank sends on one.
        memory: tensors of the same shapes and dtypes, in this order, for what arrives. Nothing else may read them yet.
        most_bytes: a multiple of 16.

    Returns:
        Bytes that this rank has sent to others.

    Raises:
        ConfigurationError: on every rank, two ranks do not expect the same of each other.
    """
    out, into = defaultdict[int, list[Tensor]](list), defaultdict[int, list[Tensor]](list)
    for way in ways:
        if way.source == way.target == world.rank:
            install(zip(memory(way), values(way), strict=True))
        elif way.source == world.rank:
            out[way.target] += _cut(values(way), most_bytes)
        elif way.target == world.rank:
            into[way.source] += _cut(memory(way), most_bytes)
    own = [[[rank, list(map(_room, some))] for rank, some in by_rank.items()] for by_rank in (out, into)]
    listed = all_gather_json(own, world)
    sizes = {(source, target): some for source, (sent, _) in enumerate(listed) for target, some in sent}
    expected = {(source, target): some for target, (_, received) in enumerate(listed) for source, some in received}
    if sizes != expected:
        source, target = min(way for way in {*sizes, *expected} if sizes.get(way) != expected.get(way))
        raise ConfigurationError(f"rank {source} sends rank {target} other tensors than that expects: {CURE}")
    numbers = waves(sizes, most_bytes)
    leaving = _by_wave(out, {rank: numbers[world.rank, rank] for rank in out}, world)
    arriving = _by_wave(into, {rank: numbers[rank, world.rank] for rank in into}, world)
    # Gloo's threads may still hold the buffers of an exchange that has ended, so all use the same.
    largest = (max(map(_nbytes, by_number.values()), default=0) for by_number in (leaving, arriving))
    buffers = [torch.empty(nbytes, dtype=torch.uint8, device=world.device) for nbytes in largest]
    for number in range(1 + max((at for way in numbers.values() for at in way), default=-1)):
        _exchange(leaving[number], arriving[number], buffers, world)
    return sum(tensor.nbytes for some in out.values() for tensor in some)


@torch.no_grad()
def install(arrived: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write values into tensors, given in pairs (tensor, values)."""
    for tensor, values in arrived:
        tensor.copy_(values)


def gather(
    pieces: Iterable[StatePiece],
    world: World,
    receivers: Callable[[str], Collection[int]],
    most_bytes: int = MOST_BYTES,
) -> dict[str, Tensor]:
    """Return the whole tensors that this rank receives by key, on the host: copies; collective.

    Args:
        pieces: what this rank has of them. A key is of one dtype and shape on all ranks.
        receivers: key -> the ranks that receive it.

    Raises:
        CheckpointError: on every rank, no rank has some part of a tensor.
    """
    own = {(piece.key, piece.block): piece.tensor.detach() for piece in pieces}
    have, kinds = published(own, world)
    want = {key: [(Block.of(shape), sorted(receivers(key)))] for key, (_, shape) in kinds.items()}
    plan = plan_transfer(have, want, world.nodes)
    if plan.missing:
        key, block, _ = plan.missing[0]
        raise CheckpointError(f"no rank has {list(block.sizes)} at {list(block.offsets)} of {key}: start over")
    found = {
        key: torch.empty(shape, dtype=dtype) for key, (dtype, shape) in kinds.items() if world.rank in want[key][0][1]
    }
    transfer(
        plan.moves,
        lambda move: [own[move.key, move.held][move.block.within(move.held)]],
        lambda move: [found[move.key][move.block.slices]],
        world,
        most_bytes,
    )
    return found


def published(
    own: Mapping[tuple[str, Block], Tensor], world: World
) -> tuple[Layout, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """Return which ranks have which blocks, and dtype and shape of the whole tensors by key; collective.

    Args:
        own: what this rank has.
    """
    rows = [[key, dtype_name(t), block.whole, block.offsets, block.sizes] for (key, block), t in own.items()]
    holders: dict[str, dict[Block, list[int]]] = {}
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for rank, listed in enumerate(all_gather_json(rows, world)):
        for key, dtype, whole, offsets, sizes in listed:
            block = Block(offsets=tuple(offsets), sizes=tuple(sizes), whole=tuple(whole))
            holders.setdefault(key, {}).setdefault(block, []).append(rank)
            kinds[key] = getattr(torch, dtype), block.whole
    return {key: list(blocks.items()) for key, blocks in holders.items()}, kinds


def waves(sizes: Mapping[tuple[int, int], Sequence[int]], most: int) -> dict[tuple[int, int], list[int]]:
    """Number the exchanges in which things travel, so that no rank sends or receives more than `most` in one of them.

    Args:
        sizes: (source, target) -> the size of each thing, at most `most`.
    """
    num_ranks = 1 + max((rank for way in sizes for rank in way), default=0)
    filled: dict[tuple[int, bool], tuple[int, int]] = {}  # rank, whether it sends -> last exchange, what is in it
    found: dict[tuple[int, int], list[int]] = {}
    # In a round each rank sends to one other and receives from one, so exchanges fill evenly.
    for way in sorted(sizes, key=lambda way: ((way[1] - way[0]) % num_ranks, way)):
        ends = (way[0], True), (way[1], False)
        found[way] = []
        for size in sizes[way]:
            last = [filled.get(end, (0, 0)) for end in ends]
            number = max(wave for wave, _ in last)
            used = [there if wave == number else 0 for wave, there in last]
            if max(used) + size > most:
                number, used = number + 1, [0, 0]
            filled |= {end: (number, there + size) for end, there in zip(ends, used, strict=True)}
            found[way].append(number)
    return found


def _by_wave(
    ways: Mapping[int, Sequence[Tensor]], numbers: Mapping[int, Sequence[int]], world: World
) -> Mapping[int, Sequence[Sequence[Tensor]]]:
    """Return the tensors to or from each rank by the number of the exchange in which they travel."""
    found = defaultdict[int, list[list[Tensor]]](lambda: [[] for _ in range(world.size)])
    for rank, tensors in ways.items():
        for tensor, number in zip(tensors, numbers[rank], strict=True):
            found[number][rank].append(tensor)
    return found


def _exchange(
    out: Sequence[Sequence[Tensor]], into: Sequence[Sequence[Tensor]], buffers: Sequence[Tensor], world: World
) -> None:
    """Exchange tensors by rank, in one collective through two buffers of bytes."""
    sent, received = buffers
    send, recv = ([_nbytes([some]) for some in ways] for ways in (out, into))
    for place, tensor in _places(sent, out):
        place.copy_(tensor)
    PendingExchange(sent[: sum(send)], send, recv, world, received[: sum(recv)]).wait()
    world.synchronize()
    for place, tensor in _places(received, into):
        tensor.copy_(place)


def _places(flat: Tensor, by_rank: Iterable[Iterable[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the place of each tensor in a buffer of bytes, in its shape and dtype, and the tensor."""
    start = 0
    for tensor in (tensor for some in by_rank for tensor in some):
        yield flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor
        start += _room(tensor)


def _nbytes(by_rank: Iterable[Iterable[Tensor]]) -> int:
    return sum(_room(tensor) for some in by_rank for tensor in some)


def _room(tensor: Tensor) -> int:
    """Return the bytes of a tensor in a buffer."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _cut(tensors: Iterable[Tensor], most_bytes: int) -> Iterator[Tensor]:
    """Yield tensors as views that take at most so many bytes each."""
    for tensor in tensors:
        if _room(tensor) <= most_bytes:
            yield tensor
            continue
        dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
        rows = max(1, most_bytes * tensor.shape[dim] // _room(tensor))
        yield from _cut(torch.split(tensor, rows, dim), most_bytes)
