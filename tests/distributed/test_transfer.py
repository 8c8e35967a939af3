"""Tensors move between ranks in exchanges of bounded size: every dtype and shape, parts that several ranks have."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from moe_lightning.balancing.migration import Transfer
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PendingExchange
from moe_lightning.state import transfer as module
from moe_lightning.state.pieces import Block, StatePiece
from moe_lightning.state.transfer import gather, transfer
from tests.distributed.harness import connect, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


def values() -> dict[str, Tensor]:
    """Scalars, empty and odd shapes of many dtypes."""
    generator = torch.Generator().manual_seed(1)
    found = {
        f"é/{dtype}/{shape}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for dtype in DTYPES
        for shape in ((), (0, 3), (5,), (2, 3, 7))
    }
    strided, trained = (torch.randn(4, 6, generator=generator) for _ in range(2))
    return found | {"strided": strided.T, "trained": trained.requires_grad_()}


def block(shape: tuple[int, ...], dim: int, first: int, last: int) -> Block:
    return Block(
        offsets=tuple(first if d == dim else 0 for d in range(len(shape))),
        sizes=tuple(last - first if d == dim else size for d, size in enumerate(shape)),
        whole=shape,
    )


def held(rank: int, world_size: int) -> list[StatePiece]:
    """Whole tensors on one rank each, but a table that is cut by columns, of which the last are on two ranks."""
    found = [StatePiece.of(k, t) for n, (k, t) in enumerate(values().items()) if n % world_size == rank]
    table = torch.arange(60.0).view(5, 12)
    columns = [block((5, 12), 1, 12 * part // world_size, 12 * (part + 1) // world_size) for part in range(world_size)]
    mine = [columns[rank]] if rank else [columns[0]] + [columns[-1]] * (world_size > 1)
    return found + [StatePiece(key="table", tensor=table[own.slices], block=own) for own in mine]


def gathered(rank: int, world_size: int, most_bytes: int) -> dict[str, Tensor]:
    return gather(
        held(rank, world_size), connect(), lambda key: (0,) if key != "table" else range(world_size), most_bytes
    )


@pytest.mark.parametrize(("world_size", "most_bytes"), [(1, 16), (2, 1 << 20), (4, 32)])
def test_everything_arrives_where_it_is_wanted(world_size: int, most_bytes: int) -> None:
    root, *others = run_ranks(world_size, gathered, most_bytes)
    assert all(list(other) == ["table"] for other in others)
    expected = {k: t.detach() for k, t in values().items()} | {"table": torch.arange(60.0).view(5, 12)}
    assert set(root) == set(expected)
    for key, tensor in expected.items():
        assert root[key].dtype == tensor.dtype, key
        assert torch.equal(root[key], tensor), key
    assert not root["trained"].requires_grad
    assert all(torch.equal(other["table"], expected["table"]) for other in others)


def test_what_is_gathered_is_a_copy() -> None:
    tensor = torch.zeros(3)
    found = gather([StatePiece.of("x", tensor)], World.single(), lambda _: (0,))
    tensor += 1
    assert not found["x"].any()
    assert gather([], World.single(), lambda _: (0,)) == {}


def refusals(rank: int, world_size: int) -> list[str]:
    world, found = connect(), []
    rows = StatePiece(key="w", tensor=torch.zeros(1, 2), block=block((3, 2), 0, rank, rank + 1))
    with pytest.raises(CheckpointError) as lost:
        gather([rows], world, lambda _: (0,))
    found.append(str(lost.value))
    way = Transfer(layer=0, expert=0, source=0, target=1)
    with pytest.raises(ConfigurationError) as other:
        transfer([way], lambda _: [torch.zeros(4)], lambda _: [torch.zeros(5)], world)
    return [*found, str(other.value)]


def test_what_is_missing_or_not_expected_is_refused_on_every_rank() -> None:
    first, second = run_ranks(2, refusals)
    assert first == second
    assert first[0] == "no rank has [1, 2] at [2, 0] of w: start over"
    assert first[1].startswith("rank 0 sends rank 1 other tensors than that expects: give all ranks the same")


class Watched(PendingExchange):
    """An exchange whose buffers are recorded."""

    buffers: ClassVar[set[tuple[int, int]]] = set()
    exchanges = 0

    def __init__(self, flat: Tensor, *arguments: Any) -> None:
        super().__init__(flat, *arguments)
        memory = flat.untyped_storage(), self._received.untyped_storage()
        Watched.buffers |= {(storage.data_ptr(), storage.nbytes()) for storage in memory}
        Watched.exchanges += 1


def watched(rank: int, world_size: int, most_bytes: int) -> tuple[int, int, int]:
    """Bytes of all buffers, exchanges, and bytes received, when all ranks want tensors of all."""
    module.PendingExchange = Watched  # type: ignore[misc]
    pieces = [StatePiece.of(f"{rank}/{n}", torch.full((40, 25), float(n))) for n in range(5)]
    found = gather(pieces, connect(), lambda _: range(world_size), most_bytes)
    assert all(bool((tensor == float(key[2:])).all()) for key, tensor in found.items())
    assert len(found) == 5 * world_size
    received = sum(tensor.nbytes for key, tensor in found.items() if not key.startswith(f"{rank}/"))
    return sum(nbytes for _, nbytes in Watched.buffers), Watched.exchanges, received


@pytest.mark.parametrize("most_bytes", [1600, 4096, 1 << 20])
def test_the_buffers_of_a_transfer_stay_within_their_bound(most_bytes: int) -> None:
    """4,000 bytes a tensor, 40,000 a rank: some tensors are larger than the first bound."""
    for nbytes, exchanges, received in run_ranks(3, watched, most_bytes):
        assert 0 < nbytes <= 2 * most_bytes
        assert received == 40_000
        assert exchanges <= 2 * -(-received // most_bytes)
