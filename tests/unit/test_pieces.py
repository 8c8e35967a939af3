"""Batches in micro-batches of a pipeline: which samples each holds, how a batch is cut, and what steps return of it."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.arrays import cut
from moe_lightning.data.sampler import DummyIndices, StepSampler
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.strategies.pipeline import batch_pieces, joined
from moe_lightning.strategies.steps import StepWeights


@pytest.mark.parametrize(("batch", "ranks", "micros"), [(12, 2, 3), (13, 3, 4), (26, 4, 4), (19, 2, 4)])
def test_pieces_are_the_micro_batches_of_an_accumulation(batch: int, ranks: int, micros: int) -> None:
    """Every sample of a step in the piece, at the place, and with the total that accumulation gives it."""
    sizes: dict[str, Any] = {"num_samples": 96, "global_batch_size": batch, "drop_last": False, "seed": 3}
    for rank in range(ranks):
        place = {"rank": rank, "world_size": ranks}
        whole = StepSampler(**sizes, **place, pieces=micros)
        parts = StepSampler(**sizes, **place, num_micros=micros)
        while whole.consumed < whole.epoch_size:
            here, found = whole.slice_at(whole.consumed), whole.indices_at(whole.consumed)
            assert here.rows == len(found)
            expected = []
            for piece in here.pieces:
                assert piece == parts.slice_at(parts.consumed)
                expected += parts.indices_at(parts.consumed) if piece.count else []
                parts.consumed += piece.micro_total
            own = found.of_samples if isinstance(found, DummyIndices) else found
            assert (list(own), len(own)) == (expected, here.count)
            whole.consumed += here.micro_total
            assert whole.consumed == parts.consumed


def test_pieces_of_accumulated_batches_are_numbered_through_the_step() -> None:
    sampler = StepSampler(num_samples=40, global_batch_size=20, num_micros=2, pieces=3, shuffle=False)
    numbers = []
    for consumed in (0, 10, 20, 30):
        here = sampler.slice_at(consumed)
        numbers.append([(piece.micro, piece.num_micros, piece.offset, piece.count) for piece in here.pieces])
    assert numbers[0] == numbers[2] == [(0, 6, 0, 4), (1, 6, 4, 3), (2, 6, 7, 3)]
    assert numbers[1] == numbers[3] == [(3, 6, 10, 4), (4, 6, 14, 3), (5, 6, 17, 3)]


def test_pieces_in_one_process_are_an_accumulation_of_the_same_samples() -> None:
    """A loader's micro-batch stays as it is under accumulation, unless its steps are to be cut as a pipeline does."""
    sampler = StepSampler(num_samples=24, global_batch_size=12, shuffle=False, keeps_micro_batch=True, pieces=4)
    sampler.keep_global_batch()
    sampler.bind(num_micros=4, pieces=1)
    assert (sampler.cut.global_batch_size, len(sampler), sampler.epoch_steps) == (12, 8, 2)
    assert sampler.indices_at(3) == [3, 4, 5]


def test_too_few_samples_for_the_pieces_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="in 8 micro-batches leaves 1 samples for 2 ranks"):
        StepSampler(num_samples=40, global_batch_size=12, num_micros=2, pieces=4, world_size=2)


class Pair(NamedTuple):
    """A batch of a user's."""

    x: torch.Tensor
    names: list[str]


def test_a_batch_is_cut_by_its_samples() -> None:
    batch = {"pair": Pair(torch.arange(10).view(5, 2), list("abcde")), "scale": 2.0, "more": [torch.arange(5)]}
    first, second = batch_pieces(batch, [3, 2])
    assert (first["pair"].names, second["pair"].names) == (["a", "b", "c"], ["d", "e"])
    torch.testing.assert_close(second["pair"].x, torch.tensor([[6, 7], [8, 9]]))
    torch.testing.assert_close(first["more"][0], torch.arange(3))
    assert first["scale"] == second["scale"] == 2.0


def test_what_is_not_of_samples_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"a tensor of shape \[2, 5\]"):
        batch_pieces((torch.zeros(5), torch.zeros(2, 5)), [3, 2])


def test_outcomes_are_put_together() -> None:
    outcomes = [
        {"loss": torch.tensor(1.0), "rows": torch.ones(3, 2)},
        {"loss": torch.tensor(4.0), "rows": torch.ones(1, 2)},
    ]
    found = joined(outcomes, [3, 0], [3.0, 0.0])
    assert float(found["loss"]) == 1.0
    assert found["rows"].shape == (3, 2)
    assert float(joined(outcomes, [3, 1], [1.0, 2.0])["loss"]) == 3.0
    assert joined([None, None], [1, 1], [1.0, 1.0]) is None
    assert joined([["a", "b"], ["c"], ["of nothing"]], [2, 1, 0], [2.0, 1.0, 0.0]) == ["a", "b", "c"]
    assert joined([[[1, 2], [3]], [[4]]], [2, 1], [2.0, 1.0]) == [[1, 2], [3], [4]]
    assert joined([[1.0, 4.0], [3.0, 8.0]], [3, 3], [1.0, 1.0]) == [2.0, 6.0]


# ----------------------------------------------------------------------
# Parts of nearly equal size: complete and even.


@settings(deadline=None, max_examples=100)
@given(total=st.integers(0, 1000), parts=st.integers(1, 50))
def test_parts_are_even_and_complete(total: int, parts: int) -> None:
    bounds = cut(total, parts)
    sizes = [last - first for first, last in pairwise(bounds)]
    assert len(sizes) == parts
    assert sum(sizes) == total
    assert bounds[0] == 0
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


# ----------------------------------------------------------------------
# What a rank says of the weight of its loss.


def test_a_rank_whose_weights_another_stage_gives_is_not_warned_of_ignored_targets() -> None:
    weights = StepWeights()
    weights.append([3.0, 2.0], torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning is the failure
        weights.warn_of_ignored_targets((torch.tensor([[1, -100], [1, 1]]),))


@pytest.mark.parametrize("num_micros", [1, 2, 3])
def test_a_step_without_any_target_trains_nothing_however_it_is_cut(num_micros: int) -> None:
    weights, device = StepWeights(), torch.device("cpu")
    sampler = StepSampler(num_samples=12, global_batch_size=6, num_micros=num_micros)
    module = torch.nn.Linear(1, 1, bias=False)
    auxiliary, position = module.weight.sum(), 0
    for _ in range(num_micros):
        here = sampler.slice_at(position)
        weights.begin(here)
        loss = weights.weigh(torch.zeros(()), 0, here, World.single(device)) + auxiliary
        (loss * weights.share(here)).backward()
        position += here.micro_total
    weights.finish(module)
    assert float(module.weight.grad) == 0.0
