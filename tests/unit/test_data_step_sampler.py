"""The step sampler: the same global batches for every world, from one integer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from moe_lightning.data.sampler import DummyIndices, StepSampler
from moe_lightning.errors import ConfigurationError

PROPERTY = settings(deadline=None, max_examples=60)


def walk(sampler: StepSampler, micro_batches: int) -> list[tuple[int, list[int]]]:
    """(step, this rank's indices) of the next micro-batches, across epochs, moving the sampler as a consumer does."""
    seen = []
    for _ in range(micro_batches):
        here = sampler.slice_at(sampler.consumed)
        seen.append((here.step, sampler.indices_at(sampler.consumed)))
        sampler.consumed += here.micro_total
    return seen


def epoch_order(sampler: StepSampler) -> list[int]:
    """The indices of the sampler's next whole epoch, in order, seen by a single rank."""
    return [index for _, indices in walk(sampler, len(sampler)) for index in indices]


def steps_of(
    world_size: int, num_micros: int, steps: int, speeds: np.ndarray | None = None, most: int = 10**9, **options: Any
) -> list[list[int | None]]:
    """The ordered global batch of each step, put together from every rank's slices at the offsets they name; speeds
    change rank with every step."""
    batches: list[list[int | None]] = [[None] * options["global_batch_size"] for _ in range(steps)]
    for rank in range(world_size):
        sampler = StepSampler(rank=rank, world_size=world_size, num_micros=num_micros, **options)
        for micro in range(steps * num_micros):
            if speeds is not None and micro % num_micros == 0:
                sampler.share_by(np.roll(speeds, micro), most)
            here = sampler.slice_at(sampler.consumed)
            place = slice(here.offset, here.offset + here.count)
            assert batches[here.step][place] == [None] * here.count
            batches[here.step][place] = sampler.indices_at(sampler.consumed)
            sampler.consumed += here.micro_total
    assert all(index is not None for batch in batches for index in batch)
    return batches


@given(
    world_size=st.integers(1, 6),
    num_micros=st.integers(1, 4),
    extra=st.integers(0, 9),
    beyond=st.integers(0, 50),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
@PROPERTY
def test_every_world_sees_the_same_ordered_steps(
    world_size: int, num_micros: int, extra: int, beyond: int, shuffle: bool, seed: int
) -> None:
    batch = world_size * num_micros + extra
    options = {"num_samples": 2 * batch + beyond, "global_batch_size": batch, "seed": seed, "shuffle": shuffle}
    assert steps_of(world_size, num_micros, 5, **options) == steps_of(1, 1, 5, **options)
    speeds = np.random.default_rng(seed).integers(64, 4097, world_size)
    most = 2 * -(-batch // (world_size * num_micros))
    assert steps_of(world_size, num_micros, 5, speeds, most, **options) == steps_of(1, 1, 5, **options)


@given(
    n=st.integers(1, 60),
    batch=st.integers(1, 20),
    world_size=st.integers(1, 5),
    drop_last=st.booleans(),
    evaluation=st.booleans(),
)
@PROPERTY
def test_every_sample_of_an_epoch_comes_once_in_the_batches_of_a_stock_loader(
    n: int, batch: int, world_size: int, drop_last: bool, evaluation: bool
) -> None:
    options = {"num_samples": n, "global_batch_size": batch, "shuffle": False}
    options |= {"drop_last": drop_last, "evaluation": evaluation}
    if (drop_last and n < batch) or (not evaluation and batch < world_size):
        with pytest.raises(ConfigurationError, match=r"fewer than one step|use fewer ranks"):
            StepSampler(world_size=world_size, **options)
        return
    stock = list(BatchSampler(range(n), batch, drop_last))
    ranks = [list(StepSampler(rank=rank, world_size=world_size, **options)) for rank in range(world_size)]
    for parts, whole in zip(zip(*ranks, strict=True), stock, strict=True):
        assert [index for part in parts if not isinstance(part, DummyIndices) for index in part] == whole
        assert all(set(part) <= set(whole) for part in parts)
        assert all(len(part) == 1 for part in parts if isinstance(part, DummyIndices))


@given(
    n=st.integers(1, 60),
    micro=st.integers(1, 9),
    num_micros=st.integers(1, 4),
    world_size=st.integers(1, 3),
    limit=st.none() | st.integers(1, 9),
    keeps=st.booleans(),
)
@PROPERTY
def test_the_last_step_holds_the_micro_batches_that_a_stock_loader_would_give_it(
    n: int, micro: int, num_micros: int, world_size: int, limit: int | None, keeps: bool
) -> None:
    micro = max(micro, world_size)
    stock = [len(batch) for batch in BatchSampler(range(n), micro, drop_last=False)]
    begin = 1 if keeps else num_micros
    options = {"num_samples": n, "global_batch_size": micro * begin, "num_micros": begin, "drop_last": False}
    samplers = [
        StepSampler(rank=rank, world_size=world_size, keeps_micro_batch=keeps, **options) for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.bind(num_micros=num_micros)
    assert {len(sampler) for sampler in samplers} == {len(stock)}
    if limit is not None:
        stock = stock[:limit]
        for sampler in samplers:
            sampler.limit_epoch(len(stock))
    steps = -(-len(stock) // num_micros)
    for epoch in range(2):
        for number, size in enumerate(stock):
            slices = [sampler.slice_at(sampler.consumed) for sampler in samplers]
            assert {here.micro_total for here in slices} == {size} == {sum(here.count for here in slices)}
            assert {here.step for here in slices} == {epoch * steps + number // num_micros}
            in_step = stock[number // num_micros * num_micros :][:num_micros]
            assert {(here.step_total, here.num_micros) for here in slices} == {(sum(in_step), len(in_step))}
            for sampler in samplers:
                sampler.consumed += size


def test_an_order_of_the_users_own_is_followed_and_resumed() -> None:
    options = {"num_samples": 5, "global_batch_size": 4, "drop_last": False}
    sampler = StepSampler(order=lambda epoch: torch.tensor([7, 7, 3, 1, 9]) + 10 * epoch, **options)
    assert epoch_order(sampler) + epoch_order(sampler) == [7, 7, 3, 1, 9, 17, 17, 13, 11, 19]


@given(
    done=st.integers(0, 9),
    before=st.sampled_from([(1, 1), (3, 1), (2, 2)]),
    after=st.sampled_from([(1, 1), (5, 1), (2, 3)]),
)
@PROPERTY
def test_resumes_at_a_step_border_in_another_world(done: int, before: tuple[int, int], after: tuple[int, int]) -> None:
    options = {"num_samples": 45, "global_batch_size": 12, "seed": 3}
    saved = StepSampler(world_size=before[0], num_micros=before[1], **options)
    walk(saved, done * before[1])
    state = saved.state_dict()
    assert state == {"consumed": done * 12, "epoch_size": 36, "data_size": 45, "data_order": "shuffled with seed 3"}

    expected = steps_of(1, 1, done + 4, **options)[done:]
    resumed: list[list[int]] = [[] for _ in expected]
    samplers = [StepSampler(rank=rank, world_size=after[0], num_micros=after[1], **options) for rank in range(after[0])]
    for sampler in samplers:
        sampler.load_state_dict(state)
    for _ in range(4 * after[1]):
        for sampler in samplers:
            here = sampler.slice_at(sampler.consumed)
            resumed[here.step - done] += sampler.indices_at(sampler.consumed)
            sampler.consumed += here.micro_total
    assert resumed == expected


def test_epochs_permute_anew_and_never_repeat_a_sample() -> None:
    sampler = StepSampler(num_samples=50, global_batch_size=10)
    first, second = epoch_order(sampler), epoch_order(sampler)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert epoch_order(StepSampler(num_samples=50, global_batch_size=10, seed=1)) != first


def test_iterating_runs_to_the_end_of_the_epoch_and_moves_nothing() -> None:
    sampler = StepSampler(num_samples=23, global_batch_size=5, num_micros=2)
    assert len(sampler) == len(list(sampler)) == 8
    assert sampler.consumed == 0
    walk(sampler, 3)
    assert len(list(sampler)) == 5
    walk(sampler, 5)
    assert sampler.epoch == 1
    assert len(list(sampler)) == 8


def test_an_announced_epoch_moves_only_where_it_is_another_one() -> None:
    sampler = StepSampler(num_samples=43, global_batch_size=4)
    epochs = [epoch_order(sampler) for _ in range(3)]
    sampler.consumed = 8
    sampler.set_epoch(0)
    assert sampler.consumed == 8
    sampler.sampler.set_epoch(2)
    assert sampler.consumed == 80
    assert epoch_order(sampler) == epochs[2]
    sampler.set_epoch(1)
    assert epoch_order(sampler) == epochs[1]


def test_binding_that_cannot_work_changes_nothing() -> None:
    sampler = StepSampler(num_samples=64, global_batch_size=12, num_micros=3, world_size=2, rank=1)
    walk(sampler, 1)
    before = sampler.slice_at(sampler.consumed)
    with pytest.raises(ConfigurationError, match="4 samples inside a step of 12"):
        sampler.bind(num_micros=2)
    with pytest.raises(ConfigurationError, match="rank=5 is outside"):
        sampler.bind(rank=5)
    assert sampler.slice_at(sampler.consumed) == before
    sampler.bind(num_micros=6)  # a finer cut has a border there
    assert sampler.slice_at(sampler.consumed).micro == 2
    sampler.bind(rank=0, world_size=1)
    assert sampler.slice_at(sampler.consumed).count == 2


@pytest.mark.parametrize("state", [{}, {"consumed": -1}, {"consumed": 1.5}, {"consumed": True}, {"consumed": 3}])
def test_wrong_positions_are_one_sentence(state: dict[str, Any]) -> None:
    sampler = StepSampler(num_samples=100, global_batch_size=8)
    with pytest.raises(ConfigurationError, match=r"resume (with|from)"):
        sampler.load_state_dict(state)
    assert sampler.consumed == 0


def counts_of(total: int, speeds: list[int], most: int = 10**9) -> list[int]:
    samplers = [
        StepSampler(num_samples=total, global_batch_size=total, rank=rank, world_size=len(speeds))
        for rank in range(len(speeds))
    ]
    for sampler in samplers:
        sampler.share_by(np.array(speeds), most)
    return [sampler.slice_at(0).count for sampler in samplers]


@pytest.mark.parametrize(
    ("total", "speeds", "most", "counts"),
    [
        (12, [4096, 4096, 4096, 4096], 99, [3, 3, 3, 3]),
        (12, [4096, 2048], 99, [8, 4]),
        (12, [4096, 64], 99, [11, 1]),  # at least one
        (12, [4096, 64], 8, [8, 4]),  # as many as a rank may have
        (12, [4096, 64], 3, [6, 6]),  # an even share is always allowed
        (7, [4096, 4095, 4096], 99, [3, 2, 2]),
    ],
)
def test_micro_batches_are_cut_by_speed_within_limits(
    total: int, speeds: list[int], most: int, counts: list[int]
) -> None:
    assert counts_of(total, speeds, most) == counts


def test_another_world_is_cut_evenly_again() -> None:
    sampler = StepSampler(num_samples=24, global_batch_size=12, world_size=2)
    sampler.share_by(np.array([4096, 1024]), 99)
    assert sampler.slice_at(0).count == 10
    sampler.bind(rank=0, world_size=2)
    assert sampler.slice_at(0).count == 10
    sampler.bind(rank=0, world_size=3)
    assert sampler.slice_at(0).count == 4
    sampler.bind(rank=0, world_size=2)
    assert sampler.slice_at(0).count == 6
