"""Streams (IterableDataset) in steps of a constant global batch, on any number of ranks and after any fault.

Step t of a training takes the samples [t * B, (t + 1) * B) of the stream's endless row of passes (see `stream_reader`),
whatever ranks there are and wherever epochs end. Data sets of litdata and MosaicML, which divide themselves among the
ranks when they are iterated, are taken by their indices instead, as map-style ones, in an order in which a rank reads
its part of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from typing_extensions import override

from moe_lightning import seams
from moe_lightning.config import NonNegativeInt, PositiveInt, validated
from moe_lightning.data.accumulation import factors_of
from moe_lightning.data.step_loader import StepLoader, batches_of, kept_options, reason_in_batches
from moe_lightning.data.step_sampler import StepSampler
from moe_lightning.data.stream_reader import Mark, Read, StreamReader


class StreamSampler(StepSampler):
    """Positions in the stream in the place of indices. `shuffle` goes on over the borders of epochs, as training does;
    without, each epoch is the first samples again."""

    @override
    def _indices(self, epoch: int, first: int, count: int) -> list[int]:
        first += epoch * self.epoch_size if self.shuffle else 0
        return list(range(first, first + count))


class StreamLoader(StepLoader):
    """This rank's batches of a stream, as StepLoader. Its state has, beside the position, a mark of the stream's to go
    on from: {"consumed": int, "stream": see `stream_reader.Mark`}.

    Args:
        stream: the same samples in the same order on every rank.
        sampler: which of them, and when.
        options: passed to torch's DataLoader; at most one worker.
    """

    def __init__(
        self, stream: IterableDataset[Any], sampler: StreamSampler, *, collate_fn: Callable[..., Any], **options: Any
    ) -> None:
        workers = options.get("num_workers", 0)
        batches_ahead = 1 + (options.get("prefetch_factor") or 2) if workers else 1
        self._reader = StreamReader(
            stream,
            seed=sampler.seed,
            endless=not sampler.evaluation,
            keep=0 if sampler.evaluation else batches_ahead * sampler.global_batch_size,
        )
        self._mark: Mark | None = None
        # A worker that stays goes on in the stream; a new one would read a pass again.
        options |= {"collate_fn": _Collated(collate_fn), "persistent_workers": workers > 0}
        super().__init__(self._reader, sampler, **options)
        self.dataset = stream

    @classmethod
    def of_stream(
        cls,
        loader: DataLoader[Any],
        *,
        num_samples: int,
        rank: int,
        world_size: int,
        pieces: int,
        num_micros: int,
        seed: int,
        training: bool,
    ) -> StreamLoader:
        """The same stream, order and options under a StreamSampler; as StepLoader.from_dataloader.

        Args:
            num_samples: of an epoch.
        """
        batches = batches_of(loader)
        sampler = StreamSampler(
            num_samples=num_samples,
            global_batch_size=batches.batch_size * (num_micros if training else 1),
            num_micros=num_micros,
            rank=rank,
            world_size=world_size,
            pieces=pieces,
            seed=seed,
            shuffle=training,
            drop_last=batches.drop_last,
            evaluation=not training,
            keeps_micro_batch=training,
        )
        cut = cls(loader.dataset, sampler, **kept_options(loader))  # type: ignore[arg-type]
        cut.sampler = batches.sampler
        cut.replaces_stock = True
        return cut

    @override
    def _received(self, fetched: Any) -> Any:
        batch, self._mark = fetched
        return batch

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({} if self._mark is None else {"stream": self._mark})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._mark = state_dict.get("stream")
        if self._mark is not None:
            self._reader.know(self._mark)
            seams.forget_workers(self._loader)  # theirs do not know it


@dataclass(frozen=True)
class _Collated:
    """Collates the samples of what was read, and hands on the mark."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, read: Read) -> tuple[Any, Mark]:
        return self.collate(read.samples), read.mark


def samples_of_epoch(loader: DataLoader[Any], trainer: Trainer) -> int | None:
    """Samples of a stream that are an epoch: its length, or else what the Trainer's limits say; None: nobody knows.

    A training without any length but with max_steps is one epoch.
    """
    if hasattr(loader.dataset, "__len__"):
        return len(loader.dataset)
    assert loader.batch_size is not None
    if not trainer.training:
        stage = "test" if trainer.testing else "predict" if trainer.predicting else "val"
        limit = getattr(trainer, f"limit_{stage}_batches")
        return limit * loader.batch_size if isinstance(limit, int) and limit > 0 else None
    limit = trainer.limit_train_batches
    batches = limit if isinstance(limit, int) and limit > 0 else trainer.max_steps * max(factors_of(trainer))
    return batches * loader.batch_size if batches > 0 else None


def reason_not_to_stream(loader: DataLoader[Any], trainer: Trainer) -> str | None:
    """Why the batches of a stream cannot be cut over ranks exactly, in a sentence; None where they can."""
    stream: Any = loader.dataset
    name, package = type(stream).__name__, type(stream).__module__.partition(".")[0]
    if (reason := reason_in_batches(loader)) is not None:
        return reason
    if loader.num_workers > 1:
        return (
            f"num_workers={loader.num_workers} processes would each read a part of the stream {name}, so that the "
            "order of the samples depended on their number; set num_workers to 0 or 1."
        )
    if package in ("litdata", "streaming") or getattr(stream, "_distributed", None) is not None:
        return (
            f"The stream {name} of {package} divides itself among ranks, so that its order depends on their number; "
            "give the whole stream (a StreamingDataset, or a Hugging Face data set that is not split by node)."
        )
    if samples_of_epoch(loader, trainer) is None:
        cure = "limit_train_batches or max_steps" if trainer.training else "an integer limit of its batches"
        return (
            f"The stream {name} has no __len__, so nobody knows where an epoch of it ends; give it one, or give the "
            f"Trainer {cure}."
        )
    return None


class ByIndex(Dataset[Any]):
    """The samples of a data set that divides itself among ranks when it is iterated, by index, whole on every rank."""

    def __init__(self, stream: Any, size: int) -> None:
        self._stream, self._size = stream, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._stream[index]


@validated
class PartwiseShuffle(Sampler[int]):
    """Indices in a random order in which place i of every batch comes from the i-th part of the data set, so that a
    rank, whose places stay the same, reads its own parts of the files alone. Drawn from torch's global generator.

    Args:
        size: of the data set.
        batch_size: parts, runs of neighbours of the same length but for a sample.
    """

    def __init__(self, size: NonNegativeInt, batch_size: PositiveInt) -> None:
        self._size, self._parts = size, max(1, min(size, batch_size))

    def __len__(self) -> int:
        return self._size

    @override
    def __iter__(self) -> Iterator[int]:
        parts = torch.arange(self._size).tensor_split(self._parts)  # the first ones are longer by a sample
        shuffled = [part[torch.randperm(len(part))] for part in parts]
        least = self._size // self._parts
        batches = torch.stack([part[:least] for part in shuffled], dim=1).flatten()
        yield from torch.cat([batches, *(part[least:] for part in shuffled)]).tolist()


def by_index(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader of a StreamingDataset of litdata or MosaicML as one of indices; any other as it is."""
    stream: Any = loader.dataset
    if not (isinstance(loader.dataset, IterableDataset) and type(stream).__name__ == "StreamingDataset"):
        return loader
    package = type(stream).__module__.partition(".")[0]
    if package not in ("litdata", "streaming") or loader.batch_size is None:
        return loader
    whole = ByIndex(stream, _size_of_litdata(stream) if package == "litdata" else stream.size)
    order = PartwiseShuffle(len(whole), loader.batch_size) if stream.shuffle else None
    options = kept_options(loader)
    return DataLoader(whole, batch_size=loader.batch_size, sampler=order, drop_last=loader.drop_last, **options)


def _size_of_litdata(stream: Any) -> int:
    """Of the whole set: its own length is that of a rank."""
    environment = type(stream.distributed_env)(world_size=1, global_rank=0, num_nodes=1)
    stream.distributed_env = environment
    stream.set_drop_last(False)
    return len(stream)
