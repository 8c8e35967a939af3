"""DataLoader over a StepSampler, with its position counted where batches are consumed.

Lightning leaves such a loader as it is (no sampler is injected), saves and restores it through `state_dict` and
`load_state_dict` (saved with the fit loop's progress, restored before the first iterator of a resumed fit), and uses
`len()` as the batches of an epoch.

Schedules of gradient accumulation: Lightning's GradientAccumulationScheduler sets the Trainer's
`accumulate_grad_batches` when an epoch begins: too late for loaders, which are made before the first one, and not at
all in an epoch that is resumed.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.data.sampler import DummyIndices, SamplerOrder, StepSampler, StepSlice, mixed_seed
from moe_lightning.errors import ConfigurationError


def _schedule_of(trainer: Trainer) -> GradientAccumulationScheduler | None:
    callbacks = getattr(trainer, "callbacks", ())
    return next((c for c in callbacks if isinstance(c, GradientAccumulationScheduler)), None)


def accumulation_of(trainer: Trainer) -> int:
    """Micro-batches of a step in the current epoch."""
    schedule = _schedule_of(trainer)
    if schedule is None:
        return trainer.accumulate_grad_batches
    return schedule.get_accumulate_grad_batches(trainer.current_epoch)


def factors_of(trainer: Trainer) -> set[int]:
    """The numbers of micro-batches that a step of some epoch has."""
    schedule = _schedule_of(trainer)
    return {trainer.accumulate_grad_batches} if schedule is None else set(schedule.scheduling.values())


def follow_schedule(trainer: Trainer) -> None:
    """Set the Trainer to the factor of an epoch that is resumed."""
    trainer.accumulate_grad_batches = accumulation_of(trainer)


def leave_schedule(trainer: Trainer) -> None:
    """Set the Trainer to what a schedule asks for when a fit loop starts."""
    if _schedule_of(trainer) is not None:
        trainer.accumulate_grad_batches = 1


_LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


class StepLoader:
    """This rank's batches of a StepSampler, resumable mid-epoch.

    A training iterator runs from the sampler's position to the end of its epoch, and the next one begins the next
    epoch; an evaluation iterator always begins at the first sample. `bind` and `load_state_dict` reach an iterator that
    is under way: it drops what its workers fetched ahead and goes on from the new position. One iterator is meant to be
    in use at a time.

    Args:
        dataset: map-style data set of `sampler.num_samples` samples. Where it has an attribute `data_key`, a text that
            its content decides, a run that is resumed with other content is refused, and ranks that differ in it are.
        sampler: which of them, and when.
        options: passed to torch's DataLoader (num_workers, collate_fn, ...). Without a `generator`, workers are seeded
            by (the order's seed, rank, position where the iterator begins), and the global random stream is left alone.

    Attributes:
        step_sampler: what decides the samples; it holds the position.
        current: the slice of the batch yielded last, or None before the first.
        has_begun: True once a Trainer has counted the batch yielded last.
        sampler: the user's own, where the loader stands for a DataLoader; else there is none, since Lightning would
            replace it to overfit batches.
        num_workers, pin_memory, collate_fn: as in torch's DataLoader.
        replaces_stock: it stands for a DataLoader, which stock Lightning would use without a position.
    """

    replaces_stock = False
    sampler: Sampler[Any] | Iterable[Any]

    def __init__(self, dataset: Dataset[Any], sampler: StepSampler, **options: Any) -> None:
        self.dataset = dataset
        self.step_sampler = sampler
        sampler.data_key = key_of(dataset)
        self.current: StepSlice | None = None
        self.has_begun = False
        self._before_step: dict[str, Any] | None = None
        self._trainer: Trainer | None = None
        # A Trainer announces epochs to batch_sampler.sampler; its prediction writers read indices from its own wrapper.
        self.batch_sampler: Any = _SeenIndices(sampler) if sampler.evaluation else sampler
        self._own_generator = None
        if options.get("generator") is None:
            options["generator"] = self._own_generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self.batch_sampler, **options)
        loader = self._loader
        self.num_workers, self.pin_memory, self.collate_fn = loader.num_workers, loader.pin_memory, loader.collate_fn
        self.worker_init_fn = options.get("worker_init_fn")

    @classmethod
    def from_dataloader(cls, loader: DataLoader[Any], *, training: bool, seed: int = 0, **place: int) -> StepLoader:
        """The same data, order and options under a StepSampler.

        The loader's batch size is taken as the *global* micro-batch: a training step has `batch_size * num_micros`
        samples over all ranks, the last one of an epoch what is left, without a partial batch under `drop_last`.
        `shuffle=True` draws a permutation of its own for each epoch; a sampler of the user's is read in a way that is
        the same on every rank. A DistributedSampler is replaced, its shuffling kept.

        Args:
            place: rank, world_size, pieces and num_micros, see StepSampler.

        Raises:
            ConfigurationError: what `reason_not_to_cut` says.
        """
        reason = reason_not_to_cut(loader)
        if reason is not None:
            raise ConfigurationError(reason)
        indices = _of_all_ranks(batches_of(loader).sampler)
        shuffle = _shuffles(indices, loader.dataset)
        order = SamplerOrder(indices, seed) if shuffle is None else None
        num_samples = len(loader.dataset) if order is None else order.num_samples  # type: ignore[arg-type]
        options: dict[str, Any] = {"shuffle": shuffle is not False, "order": order, "seed": seed, **place}
        return cls._in_place_of(loader, StepSampler, training=training, num_samples=num_samples, **options)

    @classmethod
    def _in_place_of(
        cls,
        loader: DataLoader[Any],
        kind: type[StepSampler],
        *,
        rank: int,
        world_size: int,
        num_micros: int = 1,
        training: bool,
        **options: Any,
    ) -> Self:
        """Return a loader of a stock one's data and options under a sampler of a kind.

        Args:
            options: of the sampler, beside those that the stock loader and `training` decide.
        """
        batches = batches_of(loader)
        sampler = kind(
            global_batch_size=batches.batch_size * (num_micros if training else 1),
            num_micros=num_micros,
            rank=rank,
            world_size=world_size,
            drop_last=batches.drop_last,
            evaluation=not training,
            keeps_micro_batch=training,
            **options,
        )
        converted = cls(loader.dataset, sampler, **loader_options(loader))
        converted.sampler = batches.sampler
        converted.replaces_stock = True
        return converted

    @classmethod
    def of_samples(
        cls,
        dataset: Dataset[Any],
        *,
        global_batch_size: int,
        seed: int,
        training: bool,
        num_workers: int = 0,
        trainer: Trainer | None = None,
        sampler: type[StepSampler] = StepSampler,
        order: Callable[[int], torch.Tensor] | None = None,
    ) -> StepLoader:
        """Build a data module's loader: shuffled whole steps for training, every sample in order for evaluation.

        Args:
            global_batch_size: samples of a step of training; an evaluation batch has those of one of its micro-batches,
                which fit the memory.
            sampler: the class that turns positions into indices of the data set.
            order: of training, see StepSampler.
            trainer: whose rank, world and accumulation the loader takes; None: one process.

        Raises:
            ConfigurationError: as StepSampler and `bind_to`, or training has fewer samples than a step.
        """
        num_samples = len(dataset)  # type: ignore[arg-type]
        if training and num_samples < global_batch_size:
            raise ConfigurationError(
                f"global_batch_size={global_batch_size} is more than the {num_samples} samples for training: lower it, "
                "or give more data"
            )
        if not training and trainer is not None:
            global_batch_size = max(1, global_batch_size // accumulation_of(trainer))
        step_sampler = sampler(
            num_samples=num_samples,
            global_batch_size=global_batch_size,
            seed=seed,
            shuffle=training,
            drop_last=training,
            evaluation=not training,
            order=order if training else None,
        )
        loader = cls(
            dataset,
            step_sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
        if trainer is not None:
            loader.bind_to(trainer)
        return loader

    # ------------------------------------------------------------------ iteration

    def __len__(self) -> int:
        """Micro-batches in a whole epoch; a Trainer applies its limit to this itself."""
        return len(self.step_sampler)

    def __iter__(self) -> Iterator[Any]:
        sampler = self.step_sampler
        if sampler.evaluation:
            sampler.consumed = 0
        elif self._trainer is not None and self._trainer.accumulate_grad_batches != sampler.cut.num_micros:
            self.bind(num_micros=self._trainer.accumulate_grad_batches)  # a schedule has changed it at this epoch
        end = sampler.epoch_end
        while sampler.consumed < end:
            yield from self._until_moved()

    def begin_batch(self) -> None:
        """Mark the batch yielded last as begun: the Trainer counts it from here on."""
        self.has_begun = True

    def _until_moved(self) -> Iterator[Any]:
        sampler = self.step_sampler
        moves = sampler.moves
        if self._own_generator is not None:
            self._own_generator.manual_seed(mixed_seed(sampler.order.seed, sampler.cut.rank, sampler.consumed))
        for batch in _with_plain_errors(self._loader):
            current = sampler.slice_at(sampler.consumed)
            if current.micro == 0:
                self._before_step = self.state_dict()
            self.current, self.has_begun = current, False
            sampler.consumed += current.micro_total
            yield self._received(batch)
            if sampler.moves != moves:
                return

    def _received(self, fetched: Any) -> Any:
        """The batch in what the DataLoader yields."""
        return fetched

    @property
    def batch_size(self) -> int:
        """Samples of this rank in the first micro-batch of an epoch, the largest it gets."""
        return self.step_sampler.slice_at(0).count

    # ------------------------------------------------------------------ state and world

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch yielded last, see StepSampler.state_dict."""
        return self.step_sampler.state_dict()

    def state_before_step(self) -> dict[str, Any]:
        """The position before the step of the batch yielded last, for a step that did not end."""
        return self.state_dict() if self._before_step is None else dict(self._before_step)

    def state_after_epoch(self) -> dict[str, Any]:
        """The position at the end of the epoch of the batch yielded last."""
        size = self.step_sampler.epoch_size
        return self.state_dict() | {"consumed": -(-self.step_sampler.consumed // size) * size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position; raises ConfigurationError as StepSampler.load_state_dict."""
        self.step_sampler.load_state_dict(state_dict)
        self.current, self._before_step = None, dict(state_dict)

    def bind(self, **place: int) -> None:
        """Cut the same stream for another world; as StepSampler.bind."""
        self.step_sampler.bind(**place)
        self.current = None

    def bind_to(self, trainer: Trainer) -> None:
        """Take rank, world, accumulation and the limit of an epoch from a Trainer; to overfit batches, training keeps
        them in a fixed order. The accumulation is that of the Trainer when an epoch begins.

        Raises:
            ConfigurationError: as `bind`, or a schedule of accumulation would change the number of micro-batches of an
                epoch, where the global batch is constant.
        """
        place = trainer.distributed_sampler_kwargs or {"rank": trainer.global_rank, "num_replicas": trainer.world_size}
        # Along some axes of a mesh ranks share their samples.
        self.bind(rank=place["rank"], world_size=place["num_replicas"], num_micros=accumulation_of(trainer))
        if self.step_sampler.evaluation:
            return
        factors = sorted(factors_of(trainer))
        if len(factors) > 1 and not self.step_sampler.keeps_micro_batch:
            raise ConfigurationError(
                f"GradientAccumulationScheduler changes accumulate_grad_batches among {factors}, and a loader of a "
                "constant global batch would have other numbers of batches in an epoch, which Lightning counts once: "
                "use one factor, or a torch DataLoader, whose batch_size is a micro-batch"
            )
        self._trainer = trainer
        self.step_sampler.accepts_other_data = getattr(trainer.strategy, "resume_overrides", False)
        if getattr(trainer, "overfit_batches", 0):
            self.step_sampler.order.shuffle = False
        if not getattr(trainer, "fast_dev_run", False):
            self._limit_epoch(trainer.limit_train_batches)

    def _limit_epoch(self, limit: int | float | None) -> None:
        limit = 1.0 if limit is None else limit
        batches = min(limit, len(self)) if isinstance(limit, int) else int(len(self) * limit)
        if batches:
            self.step_sampler.limit_epoch(batches)

    # Lightning sets this one on loaders whose workers it seeds (seed_everything(workers=True)).
    @property
    def worker_init_fn(self) -> Callable[[int], None] | None:
        """Function that every worker process calls first, as in torch's DataLoader."""
        return self._worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Callable[[int], None] | None) -> None:
        self._worker_init_fn = function
        self._loader.worker_init_fn = partial(_begin_worker, function)


def _begin_worker(function: Callable[[int], None] | None, worker: int) -> None:
    """Begin a worker process that only its rank ends: schedulers send SIGTERM to all processes of a job, and the rank
    needs batches up to its last step. A worker that is spawned ends all the same: it has threads before this one.
    """
    rank = multiprocessing.parent_process()  # which need not be the process that forks workers
    if sys.platform == "linux" and rank is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_rank, args=(rank.pid,), daemon=True).start()
    if function is not None:
        function(worker)


def _end_with_rank(rank: int | None) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)


def _with_plain_errors(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches; an error of a worker process is a line with its cause and place. torch makes its traceback the
    message; here that is a note, except of a user's mistake, whose sentence is all there is to say.
    """
    try:
        yield from batches
    except ConfigurationError as error:
        # torch's frames hold each other and the workers, whose end would then wait for the garbage collector.
        cause = error.with_traceback(None)
        raise ConfigurationError(str(error).rpartition("ConfigurationError: ")[2].rstrip()) from cause
    except Exception as error:
        _, of_worker, trace = str(error).partition("Original Traceback (most recent call last):\n")
        if not of_worker:
            raise
        raise _in_a_line(type(error), trace) from None


_FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)')


def _in_a_line(kind: type[Exception], trace: str) -> Exception:
    """An error of the kind that has the traceback, with the last place outside of installed packages."""
    frames = _FRAME.findall(trace)
    file, line, function = next((f for f in reversed(frames) if "site-packages" not in f[0]), frames[-1])
    lines = trace.splitlines()
    last = max(number for number, text in enumerate(lines) if _FRAME.match(text))
    cause = next((text for text in lines[last:] if not text.startswith(" ")), kind.__name__)
    sentence = f"{cause.removeprefix(f'{kind.__name__}: ')} ({function}, {file}:{line}, in a DataLoader worker)"
    try:
        error = kind(sentence)
    except Exception:  # a constructor of its own
        error = RuntimeError(f"{kind.__name__}: {sentence}")
    error.add_note(trace.rstrip())
    return error


class _SeenIndices(private_lightning.BatchIndices):
    """Batch sampler for Lightning's prediction writers: indices of this rank's samples without dummy samples."""

    def __next__(self) -> list[int]:
        indices = super().__next__()
        if isinstance(indices, DummyIndices):
            self.seen_batch_indices[-1] = list(indices.of_samples)
        return indices


def is_empty(loader: DataLoader[Any], *, training: bool) -> bool:
    """True if a stock loader of a map-style data set has nothing to yield. To train on less than a batch under
    `drop_last` is a mistake, which StepSampler refuses.
    """
    if _kind(batches_of(loader)) is not BatchSampler or not isinstance(batches_of(loader).sampler, Sized):
        return False
    return len(batches_of(loader).sampler if training else batches_of(loader)) == 0


def reason_not_to_cut(loader: DataLoader[Any]) -> str | None:
    """Return a sentence on why a stock loader's global batches cannot be cut over ranks; None if they can."""
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"The data set {type(loader.dataset).__name__} is iterable and has no indices to share among ranks; use a "
            "map-style Dataset with __getitem__ and __len__, or StreamLoader.of_stream."
        )
    return reason_in_batches(loader)


def reason_in_batches(loader: DataLoader[Any]) -> str | None:
    """The same of the way it makes batches, whatever its data set."""
    if any(getattr(_kind(loader), name) is not getattr(DataLoader, name) for name in private_torch.ITERATION):
        return (
            f"{type(loader).__name__} iterates in its own way, which cutting its batches over ranks would lose; "
            "return a torch DataLoader or a StepLoader, or use one rank."
        )
    batches = batches_of(loader)
    if batches is None:
        return (
            "The DataLoader has batch_size=None, which leaves nothing to cut over ranks; give it an integer "
            "batch_size, or use one rank."
        )
    if _kind(batches) is not BatchSampler:
        return (
            f"The DataLoader's batch sampler {type(batches).__name__} cannot be cut over ranks exactly; give the "
            "DataLoader a batch_size and a sampler instead, return a StepLoader, or use one rank."
        )
    return None


def _kind(thing: Any) -> Any:
    """Its class, or torch's where it is what a StatefulDataLoader of torchdata has in the place of that: the state that
    it adds is kept here in another way."""
    kind = type(thing)
    if not kind.__module__.startswith("torchdata.stateful_dataloader"):
        return kind
    return getattr(torch.utils.data, kind.__name__.removeprefix("Stateful"), kind)


def outline_of(loader: object) -> list[Any]:
    """Return what loaders of all ranks have in common: class, length and `data_key` of the data set, and for a Subset,
    or one of another, a checksum of the indices.
    """
    data, sums = getattr(loader, "dataset", None), []
    size = len(data) if isinstance(data, Sized) and not isinstance(data, IterableDataset) else None
    outline = [type(data).__name__, size]
    while isinstance(data, Subset):
        sums.append(zlib.crc32(np.asarray(data.indices, dtype=np.int64).tobytes()))
        data = data.dataset
    return [*outline, [*sums, key_of(data)]]


def key_of(data: object) -> str | None:
    """The `data_key` of a data set, where it has one that is text."""
    key = getattr(data, "data_key", None)
    return key if isinstance(key, str) else None


def loader_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of a DataLoader that its replacement has too, beside its data, order and batch size."""
    return {name: getattr(loader, name) for name in _LOADER_OPTIONS}


def batches_of(loader: DataLoader[Any]) -> Any:
    """The batch sampler of a loader, of which Lightning may have made another one."""
    batches: object = loader.batch_sampler
    if isinstance(batches, private_lightning.BatchIndices):  # what Lightning makes of a loader it predicts with
        batches = private_lightning.batches_of(batches)
    return batches


def _of_all_ranks(sampler: Any) -> Any:
    """The sampler, or in the place of a DistributedSampler the one whose indices that shares among the ranks."""
    if _kind(sampler) is not DistributedSampler:
        return sampler
    return RandomSampler(sampler.dataset) if sampler.shuffle else SequentialSampler(sampler.dataset)


def _shuffles(sampler: Any, dataset: Any) -> bool | None:
    """True if a sampler draws a permutation of the whole data set, False if it takes it in its order; None: other
    indices, such as those of a part of it.
    """
    kind = _kind(sampler)
    if kind not in (SequentialSampler, RandomSampler) or not isinstance(dataset, Sized):
        return None
    if not len(sampler.data_source) == len(sampler) == len(dataset):
        return None
    if kind is SequentialSampler:
        return False
    return None if sampler.replacement else True


class StepDataModule(LightningDataModule):
    """Samples as training, validation, test and prediction batches of a constant global size.

    A subclass sets `_train` and `_val`, the samples to train on and those held out, in `setup`, and where training has
    an order of its own `_order`, see StepSampler.

    Args:
        global_batch_size: samples of one optimizer step over all ranks and micro-batches; an evaluation batch is
            as large as a micro-batch.
        num_workers: DataLoader processes on each rank.
        seed: of the order of the samples.
    """

    sampler: ClassVar[type[StepSampler]] = StepSampler
    """Turns positions into indices of the samples."""

    _train: Dataset[Any]
    _val: Dataset[Any]
    _order: Callable[[int], torch.Tensor] | None = None

    def __init__(self, *, global_batch_size: int, num_workers: int, seed: int) -> None:
        super().__init__()
        self.global_batch_size = global_batch_size
        self.num_workers = num_workers
        self.seed = seed

    def train_dataloader(self) -> StepLoader:
        """Endless permuted epochs of whole steps."""
        return self._loader(self._train, training=True)

    def val_dataloader(self) -> StepLoader:
        """Every held-out sample once."""
        return self._loader(self._val, training=False)

    def test_dataloader(self) -> StepLoader:
        """The held-out samples again: there is no third part."""
        return self.val_dataloader()

    def predict_dataloader(self) -> StepLoader:
        """The held-out samples, in order."""
        return self.val_dataloader()

    def _loader(self, samples: Dataset[Any], *, training: bool) -> StepLoader:
        return StepLoader.of_samples(
            samples,
            sampler=self.sampler,
            order=self._order,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            training=training,
            num_workers=self.num_workers,
            trainer=self.trainer,
        )
