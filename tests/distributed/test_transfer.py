"""Tensors move between ranks in exchanges of bounded size: every dtype and shape, parts that several ranks have."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from moe_lightning.balancing.migration import Transfer
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PendingExchange
from moe_lightning.state import transfer as module
from moe_lightning.state.pieces import Block, StatePiece
from moe_lightning.state.transfer import Unit, gather, reshard, transfer, without_memory
from moe_lightning.strategies.train_state import TrainState
from tests.distributed.harness import connect, run_pooled, run_ranks
from tests.distributed.training import train

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
    root, *others = run_pooled(world_size, gathered, most_bytes)
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


def random_units(rng: random.Random, shapes: dict[str, tuple[int, ...]], num_ranks: int) -> list[list[Unit]]:
    """Blocks of tensors on each rank: whole, by rows or by columns, or none."""
    found: list[list[Unit]] = [[] for _ in range(num_ranks)]
    for key, shape in shapes.items():
        kind, dim = rng.choice(("whole", "rows", "some")), rng.randrange(len(shape)) if shape else 0
        for rank in range(num_ranks):
            if kind == "rows" and shape:
                first, last = (shape[dim] * at // num_ranks for at in (rank, rank + 1))
                found[rank].append((key, block(shape, dim, first, last)))
            elif kind != "some" or rng.random() < 0.5:
                found[rank].append((key, Block.of(shape)))
    return found


def moments(key: str, own: Block) -> dict[str, Tensor]:
    """A weight with a moment of its shape, a count, and a factor of another shape."""
    weight = torch.arange(1.0, 1 + torch.Size(own.whole).numel()).view(own.whole) + 1000 * int(key)
    scopes = {"weight": weight[own.slices], "exp_avg": weight.to(torch.bfloat16)[own.slices]}
    return scopes | {"factor": torch.full((9, 2), float(key)), "step": torch.tensor(int(key))}


def resharded(rank: int, world_size: int, rounds: int) -> int:
    world, rng, moved = connect(), random.Random(0), 0
    for _ in range(rounds):
        shapes = {str(n): tuple(rng.randint(1, 6) for _ in range(rng.randrange(1, 4))) for n in range(1, 4)}
        have, want = (random_units(rng, shapes, world_size) for _ in range(2))
        arrived = reshard(
            {unit: moments(*unit) for unit in have[rank]}, without_memory(want[rank]), world, most_bytes=64
        )
        filled: dict[str, Tensor] = {key: torch.zeros(shape, dtype=torch.bool) for key, shape in shapes.items()}
        for key, own in (unit for units in have for unit in units):
            filled[key][own.slices] = True
        known = {key for units in have for key, _ in units}
        complete = [(key, own) for key, own in want[rank] if key in known and bool(filled[key][own.slices].all())]
        assert arrived.keys() == set(complete)
        for unit in (unit for unit in complete if unit[1].numel):
            expected = moments(*unit)
            assert arrived[unit].keys() == expected.keys()
            assert all(torch.equal(arrived[unit][scope], value) for scope, value in expected.items()), unit
            moved += unit not in have[rank]
    return moved


def test_blocks_with_their_moments_come_from_any_layout_to_any_other() -> None:
    assert min(run_pooled(3, resharded, 30)) > 30


def one_meeting(rank: int, world_size: int) -> int:
    """Collectives of a transfer in which every rank has what it wants."""
    world, unit = connect(), ("1", Block.of((3,)))
    found: list[Any] = []
    inner = module.all_gather_json
    module.all_gather_json = lambda *arguments: found.append(0) or inner(*arguments)  # type: ignore[assignment]
    module.PendingExchange = None  # type: ignore[assignment,misc]
    assert torch.equal(reshard({unit: moments(*unit)}, {unit: {}}, world)[unit]["weight"], moments(*unit)["weight"])
    return len(found)


def test_ranks_meet_once_where_nothing_moves() -> None:
    assert run_ranks(2, one_meeting) == [1, 1]


def disagreement(rank: int, world_size: int) -> str:
    unit = ("w", Block.of((2,)))
    with pytest.raises(ConfigurationError) as refused:
        reshard({unit: {"weight": torch.zeros(2, dtype=(torch.float32, torch.float64)[rank])}}, {}, connect())
    return str(refused.value)


def test_ranks_with_other_moments_under_a_key_are_refused() -> None:
    first, second = run_pooled(2, disagreement)
    assert first == second
    assert first.startswith("rank 1 has other tensors of w than others: give all ranks the same")


class Fetches(pl.Callback):
    """Spoils what a rank has after the second step, and fetches it.

    Attributes:
        found: learning rate and dense values after each fetch, and the values before.
    """

    def __init__(self) -> None:
        self.found: list[tuple[float, dict[str, Tensor]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        strategy = trainer.strategy
        state, world = strategy.state, strategy.world
        if trainer.global_step != 2:
            return
        (group,) = state.optimizers[0].param_groups[:1]
        self._see(state, group)
        group["lr"] = (0.5, 0.25)[world.rank]
        state.transfer.fetch(world, range(world.size), behind=(0,))
        self._see(state, group)
        if world.rank == 1:
            group["lr"] = 0.75
            for piece in state.training_state().dense_pieces(transient=True):
                piece.tensor.zero_()
        state.transfer.install(state.transfer.fetch(world, [0], ()), world)
        self._see(state, group)

    def _see(self, state: TrainState, group: dict[str, Any]) -> None:
        pieces = state.training_state().dense_pieces(transient=True)
        self.found.append((group["lr"], {piece.key: piece.tensor.detach().clone() for piece in pieces}))


def fetched(rank: int, world_size: int) -> list[tuple[float, dict[str, Tensor]]]:
    seen = Fetches()
    train(rank, world_size, steps=3, callbacks=[seen])
    return seen.found


def test_who_has_no_valid_values_gets_all_and_who_is_behind_hyperparameters() -> None:
    first, second = run_pooled(2, fetched)
    assert [lr for lr, _ in first[1:]] == [0.25, 0.25], "from the rank that is not behind"
    assert [lr for lr, _ in second[1:]] == [0.25, 0.25]
    expected = first[0][1]
    assert any(key.endswith("/exp_avg") for key in expected)
    for found in (values for one in (first, second) for _, values in one):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
