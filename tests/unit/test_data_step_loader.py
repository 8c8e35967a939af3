"""The step loader: position counted at the consumer, conversion of stock loaders, and resuming under Lightning."""

from __future__ import annotations

import multiprocessing
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningModule
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from moe_lightning.data.loader import StepLoader
from moe_lightning.data.sampler import StepSampler
from moe_lightning.errors import ConfigurationError
from tests.distributed.training import quiet_trainer
from tests.forks import PATIENCE_S


class Numbers(Dataset[torch.Tensor]):
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def step_loader(size: int = 23, batch: int = 4, drop_last: bool = True, workers: int = 0, **options: Any) -> StepLoader:
    sampler = StepSampler(num_samples=size, global_batch_size=batch, drop_last=drop_last, **options)
    return StepLoader(Numbers(size), sampler, num_workers=workers)


def read(batches: Iterator[torch.Tensor] | StepLoader) -> list[list[int]]:
    return [[int(x) for x in batch] for batch in batches]


# ---------------------------------------------------------------------- iteration and position


@pytest.mark.parametrize("workers", [0, 1])
def test_position_is_counted_where_batches_are_consumed(workers: int) -> None:
    whole = read(step_loader())
    loader = step_loader(workers=workers)
    assert len(loader) == len(whole) == 5
    assert loader.current is None
    iterator = iter(loader)
    for step in range(2):
        assert read(iter([next(iterator)])) == [whole[step]]
        assert (loader.current.step, loader.current.count) == (step, 4)
        assert loader.state_dict()["consumed"] == 4 * (step + 1)
    resumed = step_loader(workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert read(resumed) == whole[2:]
    assert resumed.state_dict()["consumed"] == 20


class Odd(Exception):
    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} {number}")


class Broken(Numbers):
    """Raises at one sample."""

    def __init__(self, size: int, error: Exception) -> None:
        super().__init__(size)
        self.error = error

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("error", "kind", "cause"),
    [
        (FileNotFoundError(2, "No such file", "/far/away.bin"), FileNotFoundError, "[Errno 2] No such file: '/far/"),
        (ValueError("first line\nsecond line"), ValueError, "first line"),
        (KeyError("name"), KeyError, "'name'"),
        (Odd("apples", 3), RuntimeError, "apples 3"),
    ],
)
def test_an_error_of_a_worker_is_a_line_with_its_place(error: Exception, kind: type[Exception], cause: str) -> None:
    sampler = StepSampler(num_samples=23, global_batch_size=4, shuffle=False)
    with pytest.raises(kind) as raised:
        list(StepLoader(Broken(23, error), sampler, num_workers=1))
    said = str(raised.value)
    assert cause in said
    assert "\n" not in said
    assert "Caught" not in said
    assert re.search(r"\(__getitem__, .*test_data_step_loader.py:\d+, in a DataLoader worker\)", said)
    assert "Traceback" not in said
    assert "raise self.error" in raised.value.__notes__[0]


def test_the_next_iterator_begins_the_next_epoch() -> None:
    loader = step_loader()
    first, second = read(loader), read(loader)
    assert len(first) == len(second) == 5
    assert first != second
    assert loader.current.step == 9


def test_evaluation_always_begins_at_the_first_sample() -> None:
    loader = step_loader(evaluation=True, drop_last=False, shuffle=False)
    assert len(list(islice(loader, 2))) == 2
    for _ in range(2):
        assert [index for batch in read(loader) for index in batch] == list(range(23))


@pytest.mark.parametrize("workers", [0, 1])
def test_binding_reaches_an_iterator_under_way(workers: int) -> None:
    """What a recovery does: a rank is lost after two steps, the second one is run again by the world that is left."""
    alone = read(step_loader())
    loader = step_loader(workers=workers, rank=0, world_size=2)
    iterator = iter(loader)
    assert read(islice(iterator, 2)) == [alone[0][:2], alone[1][:2]]
    loader.bind(rank=0, world_size=1)
    loader.load_state_dict({"consumed": 4})
    assert loader.current is None
    assert read(iterator) == alone[1:]


def test_persistent_workers_serve_the_new_world() -> None:
    sampler = StepSampler(num_samples=23, global_batch_size=4, rank=1, world_size=2)
    loader = StepLoader(Numbers(23), sampler, num_workers=1, persistent_workers=True)
    alone = read(step_loader())
    iterator = iter(loader)
    assert read(islice(iterator, 1)) == [alone[0][2:]]
    loader.bind(rank=0, world_size=1)
    assert read(iterator) == alone[1:]


def test_local_batch_size_is_what_the_first_slice_holds() -> None:
    assert step_loader(batch=7, world_size=2, num_micros=2, rank=0).batch_size == 2
    assert step_loader(batch=7, world_size=3, rank=0).batch_size == 3


def test_the_global_random_stream_is_left_alone() -> None:
    before = torch.get_rng_state()
    read(step_loader())
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------------- conversion of stock loaders


def convert(loader: DataLoader[Any], training: bool = True, **options: Any) -> StepLoader:
    return StepLoader.from_dataloader(loader, **({"rank": 0, "world_size": 1, "training": training} | options))


@pytest.mark.parametrize(
    ("build", "shuffle"),
    [
        (lambda data: DataLoader(data, batch_size=4, shuffle=True), True),
        (lambda data: DataLoader(data, batch_size=4), False),
        (lambda data: DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, 0)), True),
        (lambda data: DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, 0, shuffle=False)), False),
    ],
)
def test_a_stock_loader_keeps_its_shuffling(build: Any, shuffle: bool) -> None:
    loader = convert(build(Numbers(24)), num_micros=3, world_size=2)
    assert loader.step_sampler.order.shuffle is shuffle
    assert loader.step_sampler.cut.global_batch_size == 12
    assert len(loader) == 6
    assert loader.batch_size == 2
    assert isinstance(loader, _Stateful)


PART = Numbers(5)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(PART),
        RandomSampler(PART),
        DistributedSampler(PART, 1, 0, shuffle=False),
        DistributedSampler(PART, 1, 0),
    ],
)
def test_a_sampler_of_a_part_of_the_data_set_yields_that_part(sampler: Any, world_size: int) -> None:
    stock = DataLoader(Numbers(9), batch_size=2, sampler=sampler)
    ranks = [convert(stock, training=False, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len(ranks[0]) == 3
    seen = {index for loader in ranks for batch in read(loader) for index in batch}
    assert seen == set(range(5))


@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_last_drops_a_partial_batch_and_not_a_partial_step(shuffle: bool) -> None:
    stock = DataLoader(Numbers(13), batch_size=2, shuffle=shuffle, drop_last=True)
    loader = convert(stock, num_micros=4)
    batches = read(loader)
    assert len(batches) == len(loader) == len(stock) == 6
    assert len({index for batch in batches for index in batch}) == 12
    assert loader.step_sampler.epoch_steps == 2, "of four batches and of two"
    assert len(convert(DataLoader(Numbers(13), batch_size=2, drop_last=True), num_micros=8)) == 6


def test_what_lightning_makes_of_a_loader_it_predicts_with_is_undone() -> None:
    data = Numbers(23)
    batches = _IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(data), 4, False))
    loader = convert(DataLoader(data, batch_sampler=batches), training=False)
    assert read(loader) == [list(range(first, min(first + 4, 23))) for first in range(0, 23, 4)]


def test_a_stock_loader_keeps_its_options() -> None:
    stock = DataLoader(
        Numbers(24),
        batch_size=4,
        collate_fn=len,
        num_workers=1,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=5,
        worker_init_fn=print,
        multiprocessing_context="fork",
        generator=torch.Generator(),
    )
    inner = convert(stock)._loader
    for name in (
        "dataset",
        "collate_fn",
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
        "timeout",
        "generator",
    ):
        assert getattr(inner, name) == getattr(stock, name)
    assert inner.multiprocessing_context == stock.multiprocessing_context
    loader = convert(DataLoader(Numbers(24), batch_size=4, collate_fn=len))
    assert list(loader) == [4] * 6
    loader.worker_init_fn = print
    assert loader.worker_init_fn is print


def _touch(paths: list[Path], worker: int) -> None:
    paths[worker].touch()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say who sent a signal")
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_scheduler_does_not_end_workers_before_their_rank(start_method: str, tmp_path: Path) -> None:
    """It sends SIGTERM to all processes of a job, and the rank trains on up to the end of a step, and saves."""
    begun = [tmp_path / str(worker) for worker in range(2)]
    options: dict[str, Any] = {"num_workers": 2, "worker_init_fn": partial(_touch, begun)}
    options["multiprocessing_context"] = start_method
    loader = StepLoader(Numbers(48), StepSampler(num_samples=48, global_batch_size=4, shuffle=False), **options)
    batches = iter(loader)
    found = [next(batches), next(batches)]  # one of each worker
    workers = multiprocessing.active_children()
    subprocess.run(["kill", "-TERM", *(str(worker.pid) for worker in workers)], check=True)
    found += islice(batches, 10)
    assert torch.cat(found).flatten().tolist() == list(range(48))
    assert all(path.exists() for path in begun)
    for worker in workers:
        worker.terminate()
        worker.join(PATIENCE_S)
        assert not worker.is_alive()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_last_partial_batch_is_what_the_loader_says(training: bool, drop_last: bool) -> None:
    stock = DataLoader(Numbers(7), batch_size=4, drop_last=drop_last)
    assert read(convert(stock, training=training)) == read(stock)
    assert len(convert(stock, training=training)) == len(stock)


@pytest.mark.parametrize("num_micros", [1, 2, 4])
def test_evaluation_does_not_accumulate(num_micros: int) -> None:
    stock = DataLoader(Numbers(10), batch_size=4)
    assert read(convert(stock, training=False, num_micros=num_micros)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


WEIGHTS = [0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 9.0]


def samplers_of_users(data: Dataset[Any]) -> list[Any]:
    return [
        WeightedRandomSampler(WEIGHTS, 11),
        WeightedRandomSampler(WEIGHTS, 11, generator=torch.Generator().manual_seed(5)),
        RandomSampler(data, replacement=True),
        RandomSampler(data, num_samples=5),
        SubsetRandomSampler([1, 2, 6]),
        Reversed(),
        ByNumpy(),
    ]


class Reversed(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        return iter([(6 - index + self.epoch) % 7 for index in range(7)])


class ByNumpy(Reversed):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(7).tolist())  # noqa: NPY002


@pytest.mark.parametrize("kind", range(7))
def test_a_sampler_of_the_users_own_is_cut_alike_on_all_ranks(kind: int) -> None:
    data = Numbers(7)

    def epochs(world_size: int, rank: int, skip: int = 0) -> list[list[list[int]]]:
        torch.manual_seed(100 + rank)  # ranks differ in what a sampler would draw from
        np.random.seed(100 + rank)  # noqa: NPY002
        before = torch.get_rng_state()
        loader = convert(
            DataLoader(data, batch_size=4, sampler=samplers_of_users(data)[kind]), rank=rank, world_size=world_size
        )
        loader.load_state_dict({"consumed": skip * loader.step_sampler.epoch_size})
        batches = [read(loader) for _ in range(3 - skip)]
        assert torch.equal(torch.get_rng_state(), before)
        return batches

    alone = epochs(1, 0)
    assert len({str(epoch) for epoch in alone}) == 3
    for epoch in alone:
        assert sum(len(batch) for batch in epoch) == len(samplers_of_users(data)[kind])
    halves = zip(epochs(2, 0), epochs(2, 1), strict=True)
    joined = [[first + second for first, second in zip(*epoch, strict=True)] for epoch in halves]
    assert [[sorted(set(batch)) for batch in epoch] for epoch in joined] == [
        [sorted(set(batch)) for batch in epoch] for epoch in alone
    ]
    assert epochs(1, 0, skip=1) == alone[1:]


class Private(Reversed):
    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(7), 7))


class Short(Reversed):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


class Named(Reversed):
    def __iter__(self) -> Iterator[Any]:
        return iter("abcdefg")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Filtered(DataLoader[Any]):
    """As torch_geometric's loaders, which gather features in the main process."""

    def _get_iterator(self) -> Any:
        return map(len, super()._get_iterator())


class Balanced(DistributedSampler[Any]):
    pass


class OwnBatches(BatchSampler):
    pass


DATA = Numbers(24)


@pytest.mark.parametrize(
    ("stock", "sentence"),
    [
        (DataLoader(Stream(), batch_size=2), "use a map-style Dataset"),
        (DataLoader(DATA, batch_size=None), "integer batch_size"),
        (DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 2, False)), "batch sampler OwnBatches"),
        (DataLoader(DATA, batch_size=4, sampler=Private()), "Private keeps random numbers of its own"),
        (DataLoader(DATA, batch_size=4, sampler=Short()), "Short yields 1 indices in epoch 0, but its length is 7"),
        (DataLoader(DATA, batch_size=4, sampler=Endless()), "Endless has no length"),
        (DataLoader(DATA, batch_size=4, sampler=Named()), r"Named yields \['a'\] where an index is expected"),
        (OwnIteration(DATA, batch_size=2), "OwnIteration iterates in its own way"),
        (Filtered(DATA, batch_size=4), "Filtered iterates in its own way"),
        (DataLoader(DATA, batch_size=4, sampler=Balanced(DATA, 2, 0)), "Balanced takes the share of one of 2 ranks"),
        (DataLoader(DATA, batch_size=2), "leaves 2 samples for 3 ranks"),
        (DataLoader(DATA, batch_size=25, drop_last=True), "fewer than one step of 25"),
    ],
)
def test_loaders_that_cannot_be_exact_are_refused(stock: DataLoader[Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        convert(stock, world_size=3)


def test_a_sampler_of_all_ranks_is_cut() -> None:
    assert len(convert(DataLoader(DATA, batch_size=4, sampler=Balanced(DATA, 1, 0)), world_size=3)) == 6


# ---------------------------------------------------------------------- under Lightning


class Recorder(LightningModule):
    """Keeps what it is fed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained: list[list[int]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.trained.append([int(x) for x in batch])
        return self.layer(batch).mean() * 0

    def validation_step(self, batch: torch.Tensor) -> None:
        self.validated.append([int(x) for x in batch])

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(path: Path, resume: Path | None = None, limit: int | None = None, **options: Any) -> Recorder:
    module = Recorder()
    trainer = quiet_trainer(default_root_dir=path, limit_train_batches=limit, **{"num_sanity_val_steps": 2} | options)
    loader = step_loader()
    loader.bind_to(trainer)
    trainer.fit(module, loader, step_loader(size=7, evaluation=True, drop_last=False, shuffle=False), ckpt_path=resume)
    return module


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("until", [{"max_epochs": 3}, {"max_steps": 9}])
def test_a_resumed_fit_sees_exactly_the_remaining_batches(
    tmp_path: Path, limit: int | None, until: dict[str, int]
) -> None:
    whole = fit(tmp_path, limit=limit, **until).trained
    keep = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(tmp_path, max_steps=7, limit=limit, callbacks=[keep], enable_checkpointing=True)
    for saved_after in (2, 3, 5, 6, 7):
        resumed = fit(tmp_path, limit=limit, resume=tmp_path / f"step={saved_after}.ckpt", **until)
        assert resumed.trained == whole[saved_after:]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("save_on_train_epoch_end", [True, False])
def test_a_fit_resumed_between_epochs_begins_the_next_one(
    tmp_path: Path, limit: int | None, save_on_train_epoch_end: bool
) -> None:
    whole = fit(tmp_path, max_epochs=3, limit=limit).trained
    keep = ModelCheckpoint(
        dirpath=tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=save_on_train_epoch_end
    )
    fit(tmp_path, max_epochs=2, limit=limit, callbacks=[keep], enable_checkpointing=True)
    for epoch in range(2):
        resumed = fit(tmp_path, max_epochs=3, limit=limit, resume=tmp_path / f"epoch={epoch}.ckpt")
        assert resumed.trained == whole[(epoch + 1) * (limit or 5) :]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_limited_epochs_take_the_start_of_each_permutation(tmp_path: Path) -> None:
    whole, limited = fit(tmp_path, max_epochs=3).trained, fit(tmp_path, max_epochs=3, limit=3).trained
    assert limited == [batch for epoch in range(3) for batch in whole[5 * epoch : 5 * epoch + 3]]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_validation_inside_an_epoch_is_whole_and_disturbs_nothing(tmp_path: Path) -> None:
    module = fit(tmp_path, max_epochs=2, val_check_interval=2, num_sanity_val_steps=1)
    assert module.trained == fit(tmp_path, max_epochs=2, limit_val_batches=0).trained
    every_sample = [[0, 1, 2, 3], [4, 5, 6]]
    assert module.validated == [every_sample[0]] + 4 * every_sample


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__(write_interval="batch")
        self.indices: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *_: Any) -> None:
        assert [int(x) for x in prediction] == batch_indices
        self.indices.append(batch_indices)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_prediction_writers_get_the_indices_of_their_rank(tmp_path: Path) -> None:
    writer = Writer()
    quiet_trainer(default_root_dir=tmp_path, callbacks=[writer]).predict(
        Recorder(), step_loader(size=7, evaluation=True, drop_last=False, shuffle=False, rank=1, world_size=4)
    )
    assert writer.indices == [[1], [5]]
