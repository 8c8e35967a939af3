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
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.collectives import CURE, all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PendingExchange
from moe_lightning.state.layout import Move, Way, plan_transfer
from moe_lightning.state.pieces import Block, StatePiece, dtype_name

MOST_BYTES = 1 << 26
"""Bytes that a rank sends, and receives, in one exchange."""

_ALIGNMENT = 16

W = TypeVar("W", bound=Way)

Unit = tuple[str, Block]
"""Key of tensors that are cut alike, such as a parameter and its moments, and a block of them."""

Units = Mapping[Unit, Mapping[str, Tensor]]
"""Tensors by unit and scope."""

NO_UNITS: Units = {}


@torch.no_grad()
def transfer(
    ways: Iterable[W],
    values: Callable[[W], Iterable[Tensor]],
    memory: Callable[[W], Iterable[Tensor]],
    world: World,
    most_bytes: int = MOST_BYTES,
    *,
    of_all: bool = False,
) -> int:
    """Send tensors to other ranks, and fill those for which others have values; collective.

    Args:
        ways: those from or to this rank at least, in the same order on both.
        values: tensors that this rank sends on one.
        memory: tensors of the same shapes and dtypes, in this order, for what arrives. Nothing else may read them yet.
        most_bytes: a multiple of 16.
        of_all: True if every rank gives the ways of all ranks: where nothing moves, they do not meet.

    Returns:
        Bytes that this rank has sent to others.

    Raises:
        ConfigurationError: on every rank, two ranks do not expect the same of each other.
    """
    out, into = defaultdict[int, list[Tensor]](list), defaultdict[int, list[Tensor]](list)
    moves = False
    for way in ways:
        moves |= way.source != way.target
        if way.source == way.target == world.rank:
            install(zip(memory(way), values(way), strict=True))
        elif way.source == world.rank:
            out[way.target] += _cut(values(way), most_bytes)
        elif way.target == world.rank:
            into[way.source] += _cut(memory(way), most_bytes)
    if of_all and not moves:
        return 0
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
    have = {(piece.key, piece.block): {"": piece.tensor.detach()} for piece in pieces}
    published = _publish(have, (), world)
    whole = {key: Block.of(next(iter(blocks)).whole) for key, blocks in published.have.items()}
    wanted = published._replace(want={key: {block: sorted(receivers(key))} for key, block in whole.items()})
    found, missing = _move(have, wanted, world, most_bytes)
    if missing:
        key, block, _ = missing[0]
        raise CheckpointError(f"no rank has {list(block.sizes)} at {list(block.offsets)} of {key}: start over")
    return {key: tensors[""] for (key, _), tensors in found.items()}


def reshard(have: Units, want: Units, world: World, most_bytes: int = MOST_BYTES) -> Units:
    """Return the tensors of the units that this rank wants: copies; collective.

    Args:
        have: tensors of this rank by scope, of the shape of their block; those of another shape, such as counts, are
            the same in all blocks of their key.
        want: memory for the tensors, see `transfer`; none: it is allocated on the host.

    Returns:
        Tensors by unit; without units that no rank has, or of which no rank has some part.

    Raises:
        ConfigurationError: on every rank, ranks have tensors of other scopes, dtypes or shapes under a key.
    """
    return _move(have, _publish(have, want, world), world, most_bytes, want)[0]


class _Published(NamedTuple):
    """Blocks that all ranks have and want, by key.

    Attributes:
        have, want: with the ranks of each block.
        kinds: dtype and shape by scope of the tensors of a key; no shape where it is that of the block.
    """

    have: Mapping[str, Mapping[Block, Sequence[int]]]
    want: Mapping[str, Mapping[Block, Sequence[int]]]
    kinds: Mapping[str, Mapping[str, tuple[str, Sequence[int] | None]]]


def _publish(have: Units, want: Iterable[Unit], world: World) -> _Published:
    """Return what all ranks have and want; collective."""
    own = [[[*unit_row(unit), _kinds(unit[1], tensors)] for unit, tensors in have.items()], [*map(unit_row, want)]]
    held, wanted = defaultdict[str, dict[Block, list[int]]](dict), defaultdict[str, dict[Block, list[int]]](dict)
    kinds: dict[str, Any] = {}
    for rank, (has, wants) in enumerate(all_gather_json(own, world)):
        for *row, kind in has:
            key, block = unit_of(row)
            held[key].setdefault(block, []).append(rank)
            if kinds.setdefault(key, kind) != kind:
                raise ConfigurationError(f"rank {rank} has other tensors of {key} than others: {CURE}")
        for key, block in map(unit_of, wants):
            wanted[key].setdefault(block, []).append(rank)
    return _Published(held, wanted, kinds)


def _move(
    have: Units, published: _Published, world: World, most_bytes: int, memory: Units = NO_UNITS
) -> tuple[Units, list[tuple[str, Block, int]]]:
    """Return what this rank wants and ranks have, and what is missing on any rank; collective if anything moves."""
    held, want = ({key: [*blocks.items()] for key, blocks in of.items()} for of in (published.have, published.want))
    plan, kinds = plan_transfer(held, want, world.nodes), published.kinds
    lost = {
        (key, block, target)
        for key, part, target in plan.missing
        for block, ranks in published.want[key].items()
        if target in ranks and block.intersection(part) is not None
    }
    found = {
        (key, block): memory.get((key, block))
        or {
            scope: (torch.empty if shape is None else torch.zeros)(
                block.sizes if shape is None else tuple(shape), dtype=getattr(torch, dtype)
            )
            for scope, (dtype, shape) in kinds[key].items()
        }
        for key, blocks in published.want.items()
        for block, ranks in blocks.items()
        if key in kinds and world.rank in ranks and (key, block, world.rank) not in lost
    }

    def moved(tensors: Mapping[str, Tensor], move: Move, outer: Block) -> Iterator[Tensor]:
        for scope, (_, shape) in kinds[move.key].items():
            yield tensors[scope] if shape is not None else tensors[scope][move.block.within(outer)]

    transfer(
        [move for move in plan.moves if (move.key, move.wanted, move.target) not in lost],
        lambda move: moved(have[move.key, move.held], move, move.held),
        lambda move: moved(found[move.key, move.wanted], move, move.wanted),
        world,
        most_bytes,
        of_all=True,
    )
    return found, plan.missing


def without_memory(units: Iterable[Unit]) -> Units:
    """Return units for which `reshard` allocates memory."""
    return {unit: {} for unit in units}


def unit_row(unit: Unit) -> list[Any]:
    """Return a unit as JSON."""
    key, block = unit
    return [key, block.offsets, block.sizes, block.whole]


def unit_of(row: Sequence[Any]) -> Unit:
    """Return a unit from JSON."""
    key, offsets, sizes, whole = row
    return key, Block(offsets=tuple(offsets), sizes=tuple(sizes), whole=tuple(whole))


def _kinds(block: Block, tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return dtype and shape by scope; no shape where it is that of the block."""
    return {
        scope: [dtype_name(tensor), None if tuple(tensor.shape) == block.sizes else list(tensor.shape)]
        for scope, tensor in sorted(tensors.items())
    }


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
