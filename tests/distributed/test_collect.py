"""JSON of all ranks, broadcasts and sums."""

from __future__ import annotations

import torch

from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import all_reduce_, broadcast_
from tests.distributed.harness import connect, run_ranks


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
