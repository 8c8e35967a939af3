"""Streams by position: one order on any number of ranks, after any kill, with and without a state of the stream's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from moe_lightning.data import streams
from moe_lightning.data.loader import StepLoader
from moe_lightning.data.streams import (
    PartwiseShuffle,
    StreamLoader,
    StreamReader,
    fingerprint,
    reason_not_to_stream,
    samples_of_epoch,
)
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.step_data import StepData

SIZE = 11


class Plain(IterableDataset[int]):
    """Pass e yields 100 * e + i, shuffled by global random numbers."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.epoch, self.reads = size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(self.size))
        random.shuffle(numbers)
        for number in numbers:
            self.reads += 1
            yield 100 * self.epoch + number


class Stateful(Plain):
    """The same in order, from where its state says."""

    begin = 0

    def __iter__(self) -> Iterator[int]:
        begin = self.begin
        for number in range(begin, self.size):
            self.begin, self.reads = number + 1, self.reads + 1
            yield 100 * self.epoch + number
        self.begin = 0

    def state_dict(self) -> dict[str, Any]:
        return {"begin": self.begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["begin"]


class Drawing(Stateful):
    """Its draws, which are not in its state, decide what it yields."""

    def __iter__(self) -> Iterator[int]:
        return (number for number in super().__iter__() if random.random() < 0.7)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epoch = state["epoch"]


def loader(
    stream: IterableDataset[Any],
    *,
    rank: int = 0,
    world: int = 1,
    batch: int = 4,
    training: bool = True,
    workers: int = 0,
    num_samples: int = SIZE,
    micros: int = 1,
    pieces: int = 1,
) -> StreamLoader:
    stock = DataLoader(stream, batch_size=batch, num_workers=workers)
    place = {"rank": rank, "world_size": world, "pieces": pieces, "num_micros": micros}
    return StreamLoader.of_stream(stock, num_samples=num_samples, seed=3, training=training, **place)


def endless(cut: StreamLoader) -> Iterator[list[int]]:
    while True:
        for batch in cut:
            yield [] if cut.current is not None and cut.current.count == 0 else batch.tolist()


def whole(kind: type[Plain], count: int) -> list[int]:
    read = list(islice(endless(loader(kind(), batch=1)), count))
    return [number for (number,) in read]


@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_passes_follow_each_other_and_each_is_whole(kind: type[Plain]) -> None:
    order = whole(kind, 3 * SIZE)
    for lap in range(3):
        assert sorted(order[lap * SIZE : (lap + 1) * SIZE]) == [100 * lap + i for i in range(SIZE)]


@settings(deadline=None, max_examples=20)
@given(
    kind=st.sampled_from([Plain, Stateful, Drawing]),
    runs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.sampled_from([0, 1, 2])), min_size=1, max_size=4),
    micros=st.integers(1, 2),
    pieces=st.integers(1, 2),
    size=st.sampled_from([SIZE, 64]),
)
def test_kills_on_any_ranks_leave_nothing_out_and_bring_nothing_twice(
    kind: type[Plain], runs: Sequence[tuple[int, int, int]], micros: int, pieces: int, size: int
) -> None:
    """Each run has its ranks, commits some micro-batches, and reads some more that are lost with it."""
    state, seen = None, []
    for world, commits, lost in runs:
        options = {"world": world, "batch": 8, "micros": micros, "pieces": pieces, "num_samples": size}
        ranks = [loader(kind(), rank=rank, **options) for rank in range(world)]
        for cut in ranks:
            if state is not None:
                cut.load_state_dict(state)
        iterators = [endless(cut) for cut in ranks]
        for _ in range(commits * micros):
            rows = [next(iterator) for iterator in iterators]
            if pieces == 1:
                seen += [number for row in rows for number in row]
            else:  # the pieces of each rank lie beside those of the others
                seen += _put_together(rows, [cut.current for cut in ranks])
        state = ranks[0].state_dict()
        for iterator in iterators:
            list(islice(iterator, lost))
    assert seen == whole(kind, len(seen))


def _put_together(rows: Sequence[list[int]], slices: Sequence[Any]) -> list[int]:
    placed = {}
    for row, current in zip(rows, slices, strict=True):
        numbers = iter(row)
        for piece in current.pieces:
            placed |= {
                piece.offset + at: number for at, number in enumerate(islice(numbers, piece.rows)) if piece.count
            }
    return [placed[at] for at in sorted(placed)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Plain, Stateful, Drawing])
def test_worlds_that_change_under_way_keep_the_order(kind: type[Plain], workers: int) -> None:
    """A step is read by two ranks, fails, and is run again by this one alone; a worker process reads ahead."""
    cut = loader(kind(), world=2, workers=workers)
    iterator = endless(cut)
    first, kept = next(iterator), cut.state_dict()
    next(iterator)
    cut.bind(world_size=1, rank=0)
    cut.load_state_dict(kept)
    again = [next(iterator) for _ in range(4)]
    order = whole(kind, 20)
    assert first == order[:2]
    assert [number for batch in again for number in batch] == order[4 : 4 + sum(map(len, again))]


@pytest.mark.parametrize(("kind", "most"), [(Plain, 404), (Drawing, 600)])
def test_a_step_that_is_run_again_is_not_read_again(kind: type[Plain], most: int) -> None:
    stream = kind(1000)
    cut = loader(stream, world=2, num_samples=1000)
    iterator = endless(cut)
    for _ in range(100):
        next(iterator)
    kept = cut.state_dict()
    next(iterator)
    cut.bind(world_size=1, rank=0)
    cut.load_state_dict(kept)
    assert len(next(iterator)) == 4
    assert stream.reads <= most


def test_a_state_makes_reading_again_unnecessary() -> None:
    cut = loader(Stateful(1000), num_samples=1000)
    list(islice(endless(cut), 100))
    stream = Stateful(1000)
    resumed = loader(stream, num_samples=1000)
    resumed.load_state_dict(cut.state_dict())
    assert next(endless(resumed)) == [400, 401, 402, 403]
    assert stream.reads == 4


def test_a_stream_without_a_state_is_read_again_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(streams, "rank_zero_info", said.append)
    cut = loader(Plain(1000), num_samples=1000)
    list(islice(endless(cut), 100))
    resumed = loader(Plain(1000), num_samples=1000)
    resumed.load_state_dict(cut.state_dict())
    assert next(endless(resumed)) == next(endless(cut))
    assert ["400 samples of pass 0 are read again" in line for line in said] == [True]


def test_a_rank_collates_its_own_samples_alone() -> None:
    collated: list[int] = []

    def collate(numbers: list[int]) -> list[int]:
        collated.extend(numbers)
        return numbers

    stock = DataLoader(Stateful(), batch_size=4, collate_fn=collate)
    place = {"rank": 1, "world_size": 2, "pieces": 1, "num_micros": 1, "num_samples": 8}
    assert list(StreamLoader.of_stream(stock, seed=3, training=True, **place)) == [[2, 3], [6, 7]]
    assert collated == [2, 3, 6, 7]


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_a_rank_reads_its_parts_of_a_set_that_has_indices(world: int) -> None:
    size, batch, chunk = 602, 6, 10
    stock = DataLoader(Numbers(size), batch_size=batch, sampler=PartwiseShuffle(size, batch), drop_last=True)
    ranks = [
        StepLoader.from_dataloader(stock, rank=rank, world_size=world, seed=3, training=True) for rank in range(world)
    ]
    epochs = [[[batch.tolist() for batch in cut] for cut in ranks] for _ in range(2)]
    seen = [[[n for part in parts for n in part] for parts in zip(*read, strict=True)] for read in epochs]
    alone = StepLoader.from_dataloader(stock, rank=0, world_size=1, seed=3, training=True)
    assert seen == [[batch.tolist() for batch in alone] for _ in range(2)]
    assert seen[0] != seen[1]
    for read in epochs:
        assert len({number for batches in read for numbers in batches for number in numbers}) == size - size % batch
    for rank in range(world):
        chunks = {number // chunk for read in epochs for numbers in read[rank] for number in numbers}
        assert len(chunks) <= size / chunk / world + 2


@pytest.mark.parametrize(("size", "batch"), [(11, 4), (12, 4), (3, 4), (1, 1)])
def test_a_partwise_shuffle_takes_every_index_once(size: int, batch: int) -> None:
    assert sorted(PartwiseShuffle(size, batch)) == list(range(size))


def test_overfitting_takes_the_first_batches_of_an_order_again() -> None:
    stock = DataLoader(Numbers(), batch_size=4, sampler=PartwiseShuffle(SIZE, 4))
    cut = StepLoader.from_dataloader(stock, rank=0, world_size=1, seed=3, training=True)
    cut.bind_to(trainer(overfit_batches=2))
    first, again = ([batch.tolist() for batch in cut] for _ in range(2))
    assert first == again
    assert len(first) == 2


def test_evaluation_sees_each_sample_once_from_the_first_on() -> None:
    ranks = [loader(Stateful(), rank=rank, world=3, training=False) for rank in range(3)]
    for _ in range(2):
        rows = zip(*(islice(endless(cut), 3) for cut in ranks), strict=True)
        assert sorted(number for row in rows for part in row for number in part) == list(range(SIZE))
        next(iter(ranks[0]))  # a sanity check reads a part


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_a_stream_that_was_used_begins_at_its_first_sample_again(kind: type[Plain], training: bool) -> None:
    """A second fit, or a validation after it: new loaders over the same objects, on ranks that stopped apart."""
    streams = [kind() for _ in range(2)]
    for _ in range(3):
        ranks = [loader(stream, rank=rank, world=2, training=training) for rank, stream in enumerate(streams)]
        rows = list(islice(zip(*map(endless, ranks), strict=True), 2))
        assert [number for row in rows for part in row for number in part] == whole(kind, 8)


class Held(Stateful):
    """Its place is that of the object, whoever iterates."""

    def __iter__(self) -> Iterator[int]:
        while self.begin < self.size:
            self.begin += 1
            yield 100 * self.epoch + self.begin - 1
        self.begin = 0


@pytest.mark.parametrize("kind", [Plain, Stateful, Held])
def test_a_stream_is_validated_while_it_is_trained_on(kind: type[Plain]) -> None:
    stream = kind()
    training, seen = loader(stream), []
    iterator = endless(training)
    for _ in range(4):
        seen += next(iterator)
        assert next(iter(loader(stream, training=False))).tolist() == whole(kind, 4)
    resumed = loader(kind())
    resumed.load_state_dict(training.state_dict())
    assert seen + next(endless(resumed)) == whole(kind, len(seen) + 4)


def test_a_stream_is_validated_after_a_fit_that_ended_with_a_pass() -> None:
    stream, seen = Stateful(8), []

    class Module(BoringModel):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self(batch.new_zeros(1, 32, dtype=torch.float)).sum()

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            seen.extend(batch.tolist())

    cut = StepData(rank=0, world_size=1, seed=lambda: 0, must_cut=False)
    made = trainer(max_steps=2, limit_val_batches=2, enable_progress_bar=False, enable_model_summary=False)
    made.strategy.process_dataloader = lambda given: cut.cut(given, made)  # type: ignore[method-assign]
    made.fit(Module(), DataLoader(stream, batch_size=4), [])
    made.validate(Module(), DataLoader(stream, batch_size=4), verbose=False)
    assert seen == list(range(8))


def test_the_streams_draws_are_its_own() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    iterator = endless(loader(Plain()))
    next(iterator)
    assert random.random() == expected
    assert list(islice(iterator, 2)) == [whole(Plain, 12)[4:8], whole(Plain, 11)[8:]]


# ---------------------------------------------------------------------- what cannot be exact is one sentence


class Unsteady(IterableDataset[int]):
    """Another order whenever it is read."""

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng().permutation(10**6)[:SIZE]


class Empty(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


class Once(IterableDataset[int]):
    def __init__(self) -> None:
        self.rest = iter(range(3))

    def __iter__(self) -> Iterator[int]:
        return self.rest


class Opaque(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"begin": random.Random()}


@pytest.mark.parametrize(
    ("stream", "training", "sentence"),
    [
        (Empty(), True, "Empty yields no sample in pass 0"),
        (Once(), True, "Once yields no sample in pass 1"),
        (Plain(5), False, "Plain ended after 5 samples"),
        (Opaque(), True, "Opaque holds a Random, which no checkpoint"),
    ],
)
def test_streams_that_cannot_be_read_on(stream: IterableDataset[Any], training: bool, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        list(islice(endless(loader(stream, training=training)), 5))


def test_a_stream_that_does_not_come_again_is_told() -> None:
    cut = loader(Unsteady())
    next(endless(cut))
    resumed = loader(Unsteady())
    resumed.load_state_dict(cut.state_dict())
    with pytest.raises(ConfigurationError, match="Unsteady does not come again as it was: sample 4 of pass 0"):
        next(endless(resumed))


class Sized(Plain):
    def __len__(self) -> int:
        return self.size


class Numbers(Dataset[int]):
    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def trainer(**options: Any) -> Trainer:
    made = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **options)
    made.training = True
    return made


@pytest.mark.parametrize(
    ("stream", "options", "samples"),
    [
        (Sized(), {}, SIZE),
        (Plain(), {"limit_train_batches": 5, "accumulate_grad_batches": 2}, 20),
        (Plain(), {"max_steps": 7, "accumulate_grad_batches": 2}, 56),
        (Plain(), {"max_epochs": 3}, None),
    ],
)
def test_the_samples_of_an_epoch(stream: Plain, options: dict[str, Any], samples: int | None) -> None:
    stock = DataLoader(stream, batch_size=4)
    assert samples_of_epoch(stock, trainer(**options)) == samples
    reason = reason_not_to_stream(stock, trainer(**options))
    assert reason is None if samples else "no __len__" in str(reason)


def test_several_workers_are_refused_and_a_lone_rank_is_told() -> None:
    stock = DataLoader(Sized(), batch_size=4, num_workers=2)
    data = StepData(rank=0, world_size=2, seed=lambda: 0, must_cut=False)
    with pytest.raises(ConfigurationError, match="set num_workers to 0 or 1"):
        data.cut(stock, trainer())
    alone = StepData(rank=0, world_size=1, seed=lambda: 0, must_cut=False)
    with pytest.warns(UserWarning, match="no position in its data is saved"):
        assert alone.cut(stock, trainer()) is stock


def test_fingerprints_tell_samples_apart_in_every_process() -> None:
    sample = {"x": torch.ones(2, dtype=torch.bfloat16), "y": [np.arange(2), "a", 1, None], "z": object()}
    assert fingerprint(sample) == fingerprint(sample | {"z": object()})
    assert fingerprint(sample) != fingerprint(sample | {"x": torch.zeros(2)})


def test_far_marks_are_found() -> None:
    reader = StreamReader(Stateful(), seed=0, endless=True, keep=0)
    for at in range(40):
        assert reader.__getitems__([at]).samples == [100 * (at // SIZE) + at % SIZE]
    assert reader.__getitems__([1, 0]).samples == [1, 0]
