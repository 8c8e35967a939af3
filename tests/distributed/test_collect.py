"""Collecting tensors on rank 0: every dtype and shape, uneven shares, nothing at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_lightning.parallel.collectives import all_gather_json, collect_on_root
from moe_lightning.parallel.context import World, all_reduce_, broadcast_
from tests.distributed.harness import connect, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


def contribution(rank: int) -> dict[str, Tensor]:
    """Rank 1 has nothing; the others scalars, empty and odd shapes of many dtypes."""
    if rank == 1:
        return {}
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for dtype in DTYPES[rank:] if rank else DTYPES:
        for shape in ((), (0, 3), (5,), (2, 3, 7)):
            values = torch.randint(0, 2, shape, generator=generator).to(dtype)
            tensors[f"{rank}/é/{dtype}/{shape}"] = values
    tensors[f"{rank}/strided"] = torch.randn(4, 6, generator=generator).T
    tensors[f"{rank}/trained"] = torch.randn(3, generator=generator).requires_grad_()
    return tensors


def collect(rank: int, world_size: int) -> dict[str, Tensor]:
    return collect_on_root(contribution(rank), connect())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_everything_arrives_on_rank_0(world_size: int) -> None:
    root, *others = run_ranks(world_size, collect)
    assert all(other == {} for other in others)
    expected = {name: tensor for rank in range(world_size) for name, tensor in contribution(rank).items()}
    assert set(root) == set(expected)
    for name, tensor in expected.items():
        assert root[name].dtype == tensor.dtype, name
        assert torch.equal(root[name], tensor.detach()), name
        assert not root[name].requires_grad


def empty(rank: int, world_size: int) -> dict[str, Tensor]:
    return collect_on_root({}, connect())


def test_nothing_to_collect() -> None:
    assert run_ranks(3, empty) == [{}, {}, {}]


def test_what_is_collected_is_a_copy() -> None:
    tensor = torch.zeros(3)
    collected = collect_on_root({"x": tensor}, World.single())
    tensor += 1
    assert not collected["x"].any()


def gather_words(rank: int, world_size: int) -> list[object]:
    return list(all_gather_json({"rank": rank, "words": ["ä" * 100 * rank]}, connect()))


def test_json_of_different_lengths() -> None:
    expected = [{"rank": r, "words": ["ä" * 100 * r]} for r in range(3)]
    assert run_ranks(3, gather_words) == [expected] * 3


def share(rank: int, world_size: int) -> tuple[float, float]:
    world, value, total = connect(), torch.tensor(float(rank)), torch.tensor(float(rank))
    broadcast_(value, 1, world)
    all_reduce_(total, world)
    world.close()
    return float(value), float(total)


def test_broadcast_sum_and_close() -> None:
    assert run_ranks(3, share) == [(1.0, 3.0)] * 3
