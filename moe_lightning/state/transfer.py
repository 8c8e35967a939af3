"""Transfer of state between ranks: the one mover of tensors that are not part of a step.

Tensors travel in exchanges of bounded size, and values that arrive go to memory that nothing else reads.

Memory of a rank during a transfer, besides the tensors given and those that arrive: what it sends and what it receives
in one exchange, at most `2 * most_bytes`, on the device of the world; tensors that lie elsewhere are copied there one
by one. A tensor that is larger travels in several exchanges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.collectives import CURE, all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PendingExchange
from moe_lightning.state.layout import Layout, plan_transfer, waves
from moe_lightning.state.pieces import Block, StatePiece, dtype_name

MOST_BYTES = 1 << 26
"""Bytes that a rank sends, and receives, in one exchange."""

_ALIGNMENT = 16


@torch.no_grad()
def transfer(
    sends: Mapping[int, Sequence[Tensor]],
    receives: Mapping[int, Sequence[Tensor]],
    world: World,
    most_bytes: int = MOST_BYTES,
) -> int:
    """Send tensors to other ranks, and fill those for which others have values; collective.

    Args:
        sends: rank -> tensors for it.
        receives: rank -> memory for what it sends, in the same order, shapes and dtypes. Nothing else may read it yet.
        most_bytes: a multiple of 16.

    Returns:
        Bytes that this rank has sent.

    Raises:
        ConfigurationError: on every rank, two ranks do not expect the same of each other.
    """
    out, into = (
        {rank: list(_cut(some, most_bytes)) for rank, some in ways.items() if some} for ways in (sends, receives)
    )
    own = [[[rank, list(map(_room, some))] for rank, some in ways.items()] for ways in (out, into)]
    listed = all_gather_json(own, world)
    sizes = {(source, target): some for source, (ways, _) in enumerate(listed) for target, some in ways}
    expected = {(source, target): some for target, (_, ways) in enumerate(listed) for source, some in ways}
    if sizes != expected:
        source, target = min(way for way in {*sizes, *expected} if sizes.get(way) != expected.get(way))
        raise ConfigurationError(f"rank {source} sends rank {target} other tensors than that expects: {CURE}")
    numbers = waves(sizes, most_bytes)
    leaving = _by_wave(out, {rank: numbers[world.rank, rank] for rank in out}, world)
    arriving = _by_wave(into, {rank: numbers[rank, world.rank] for rank in into}, world)
    # Gloo's threads may still hold the buffers of an exchange that has ended, so all use the same.
    largest = (max(map(_nbytes, by_number.values()), default=0) for by_number in (leaving, arriving))
    sent, received = (torch.empty(nbytes, dtype=torch.uint8, device=world.device) for nbytes in largest)
    for number in range(1 + max((at for way in numbers.values() for at in way), default=-1)):
        _exchange(leaving[number], arriving[number], sent, received, world)
    return sum(tensor.nbytes for some in sends.values() for tensor in some)


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
    sends, receives = defaultdict[int, list[Tensor]](list), defaultdict[int, list[Tensor]](list)
    for move in plan.moves:
        if move.source == world.rank:
            values = own[move.key, move.held][move.block.within(move.held)]
            if move.target == world.rank:
                found[move.key][move.block.slices] = values
            else:
                sends[move.target].append(values)
        elif move.target == world.rank:
            receives[move.source].append(found[move.key][move.block.slices])
    transfer(sends, receives, world, most_bytes)
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
    out: Sequence[Sequence[Tensor]], into: Sequence[Sequence[Tensor]], sent: Tensor, received: Tensor, world: World
) -> None:
    """Exchange tensors by rank, in one collective through two buffers of bytes."""
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
