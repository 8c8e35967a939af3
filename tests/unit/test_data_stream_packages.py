"""Streams of the packages of the extra `streams`, from local files; each test is skipped without its package."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader, Dataset

from moe_lightning.data.loader import StepLoader
from moe_lightning.data.streams import StreamLoader
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.step_data import StepData

SIZE, BATCH = 23, 6


def trainer() -> Trainer:
    made = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_steps=20)
    made.training = True
    return made


def cut(loader: DataLoader[Any], rank: int = 0, world_size: int = 1, state: dict[str, Any] | None = None) -> StepLoader:
    found = StepData(rank=rank, world_size=world_size, seed=lambda: 5, must_cut=False).cut(loader, trainer())
    assert isinstance(found, StepLoader)
    found.bind(rank=rank, world_size=world_size)  # of the Trainer it has taken one rank
    if state is not None:
        found.load_state_dict(state)
    return found


def endless(loader: StepLoader) -> Iterator[list[int]]:
    while True:
        for batch in loader:
            yield (batch["i"] if isinstance(batch, dict) else batch).tolist()


def assert_exact(make: Any, steps: int = 7) -> list[int]:
    """One order on one rank, and on two of which a kill leaves three; the samples of one rank."""
    alone = [number for batch in islice(endless(cut(make())), steps) for number in batch]
    two = [cut(make(), rank, 2) for rank in range(2)]
    seen = _together(two, 2)
    three = [cut(make(), rank, 3, two[0].state_dict()) for rank in range(3)]
    assert seen + _together(three, steps - 2) == alone
    assert sorted(alone[:SIZE]) == list(range(SIZE))
    return alone


def _together(ranks: list[StepLoader], steps: int) -> list[int]:
    rows = zip(*(islice(endless(rank), steps) for rank in ranks), strict=True)
    return [number for row in rows for part in row for number in part]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("shuffle", [False, True])
def test_stateful_loaders_of_torchdata(shuffle: bool) -> None:
    package = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return package.StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=shuffle)

    assert (assert_exact(make)[:SIZE] == list(range(SIZE))) is not shuffle


@pytest.mark.parametrize("buffer", [0, 8])
def test_hugging_face_data_sets_in_streaming_mode(buffer: int) -> None:
    """A shuffle buffer is not in the state of the set: its pass is read again."""
    datasets = pytest.importorskip("datasets")

    def make() -> Any:
        stream = datasets.Dataset.from_dict({"i": list(range(SIZE))}).to_iterable_dataset(num_shards=4)
        stream = stream.shuffle(seed=3, buffer_size=buffer) if buffer else stream
        return DataLoader(stream.with_format("torch"), batch_size=BATCH)

    order = assert_exact(make)
    assert (order[:SIZE] == list(range(SIZE))) is not bool(buffer)
    assert (order[SIZE : SIZE + 9] == order[:9]) is not bool(buffer)


def test_hugging_face_data_sets_begin_again_in_a_second_fit() -> None:
    """Also where the first one was resumed, whose place the set keeps, and at a second evaluation."""
    datasets = pytest.importorskip("datasets")
    streams = [datasets.Dataset.from_dict({"i": list(range(SIZE))}).to_iterable_dataset() for _ in range(2)]
    loaders = [DataLoader(stream.with_format("torch"), batch_size=BATCH) for stream in streams]
    ranks = [cut(loader, rank, 2) for rank, loader in enumerate(loaders)]
    assert _together(ranks, 2) == list(range(2 * BATCH))
    resumed = [cut(loader, rank, 2, ranks[0].state_dict()) for rank, loader in enumerate(loaders)]
    assert _together(resumed, 1) == list(range(2 * BATCH, 3 * BATCH))
    fresh = [cut(loader, rank, 2) for rank, loader in enumerate(loaders)]
    assert _together(fresh, 2) == list(range(2 * BATCH))
    place: dict[str, Any] = {"world_size": 2, "num_samples": SIZE, "training": False, "seed": 5}
    evaluated = [StreamLoader.of_stream(loader, rank=rank, **place) for rank, loader in enumerate(loaders)]
    for _ in range(3):
        assert _together(evaluated, 2) == list(range(2 * BATCH))


def test_hugging_face_data_sets_are_validated_while_they_are_trained_on() -> None:
    datasets = pytest.importorskip("datasets")
    streams = [datasets.Dataset.from_dict({"i": list(range(SIZE))}).to_iterable_dataset() for _ in range(2)]
    shared, fresh = (DataLoader(stream.with_format("torch"), batch_size=BATCH) for stream in streams)
    training = cut(shared)
    iterator = endless(training)
    next(iterator)
    place: dict[str, Any] = {"rank": 0, "world_size": 1, "num_samples": SIZE, "training": False, "seed": 5}
    next(iter(StreamLoader.of_stream(shared, **place)))
    assert next(iterator) == list(range(BATCH, 2 * BATCH))
    assert next(endless(cut(fresh, state=training.state_dict()))) == list(range(2 * BATCH, 3 * BATCH))


def test_hugging_face_data_sets_split_by_node_are_refused() -> None:
    distributed = pytest.importorskip("datasets.distributed")
    import datasets

    stream = datasets.Dataset.from_dict({"i": [1, 2]}).to_iterable_dataset(num_shards=2)
    stream = distributed.split_dataset_by_node(stream, rank=0, world_size=2)
    with pytest.raises(ConfigurationError, match="of datasets divides itself among ranks"):
        cut(DataLoader(stream, batch_size=BATCH), world_size=2)


@pytest.mark.parametrize("shuffle", [False, True])
def test_streaming_data_sets_of_litdata_go_by_index(shuffle: bool, tmp_path: Path) -> None:
    litdata = pytest.importorskip("litdata")
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(tmp_path), chunk_size=5)
    for index in range(SIZE):
        writer[index] = {"i": torch.tensor(index)}
    writer.done()
    writer.merge()
    order = assert_exact(lambda: DataLoader(litdata.StreamingDataset(str(tmp_path), shuffle=shuffle), batch_size=BATCH))
    assert (order[:SIZE] == list(range(SIZE))) is not shuffle


@pytest.mark.parametrize("kind", ["LocalDataset", "StreamingDataset"])
def test_streaming_data_sets_of_mosaicml_go_by_index(kind: str, tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming.base")
    with streaming.MDSWriter(out=str(tmp_path), columns={"i": "int"}, size_limit=64) as writer:
        for index in range(SIZE):
            writer.write({"i": index})
    options = {"batch_size": BATCH, "shuffle": False} if kind == "StreamingDataset" else {}
    made = getattr(streaming, kind)(local=str(tmp_path), **options)
    assert assert_exact(lambda: DataLoader(made, batch_size=BATCH))[:SIZE] == list(range(SIZE))
