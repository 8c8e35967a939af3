"""Streams (IterableDataset) in steps of a constant global batch, on any number of ranks and after any fault.

Step t of a training uses the samples [t * B, (t + 1) * B) of the stream's endless sequence of passes, whatever ranks
there are and wherever epochs end: an IterableDataset is iterated to its end, given the number of the next pass
(`set_epoch`, if it has one), and iterated again. Every rank reads the whole stream and keeps its own samples.

A mark is a position and the state to continue from there: the pass, how many of its samples were read, and the
stream's own `state_dict`, if that is exact and the pass has drawn nothing from the global generators, which are not in
it. Otherwise the pass is read again up to there, and its last sample has to be the same as before.

Data sets of litdata and MosaicML, which divide themselves among the ranks when they are iterated, are read by index
instead, as map-style ones, in an order in which a rank reads its part of the files.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset
from typing_extensions import override

from moe_lightning.compat import private_torch
from moe_lightning.config import NonNegativeInt, PositiveInt, validated
from moe_lightning.data.loader import StepLoader, factors_of, key_of, loader_options, reason_in_batches
from moe_lightning.data.sampler import OwnGenerators, StepSampler, mixed_seed
from moe_lightning.errors import ConfigurationError

Mark = dict[str, Any]
"""{"position": samples before it, "lap": pass of the stream, "index": samples of the pass before it, "state": the
stream's own, or None, "last": fingerprint of the sample before it, or None}"""

_START: Mark = {"position": 0, "lap": 0, "index": 0, "state": None, "last": None}
_MARKS = 16
_END = object()
_UNREAD = "_moe_lightning_unread"
"""Attribute of a stream: its state before its first sample, for all readers of a process."""
_ITERATOR = "_moe_lightning_iterator"
"""Attribute of a stream: the id of the iterator begun last, which its state is of."""


@dataclass(frozen=True)
class StreamRead:
    """Samples, and a mark that does not lie behind the last of them."""

    samples: list[Any]
    mark: Mark


class StreamReader(Dataset[Any]):
    """The samples of a stream by position.

    Args:
        stream: yields samples; the same on every rank, as a function of its pass. What it draws from global generators
            is seeded by (seed, pass).
        seed: of these draws.
        endless: pass after pass; otherwise the first one only.
        keep: samples read last that are kept, for a step that is run again; none where the stream's state serves.
    """

    def __init__(self, stream: Any, *, seed: int, endless: bool, keep: int) -> None:
        self._stream, self._seed, self._endless = stream, seed, endless
        self._has_state = has_exact_state(stream)
        self._random = OwnGenerators(seed)
        self._seeded: tuple[Any, ...] = ()  # the generators before the first draw of the pass
        self._iterator: Iterator[Any] | None = None
        self._lap = self._index = self._position = 0
        self._last: Any = _END
        self._marks = deque([_START], maxlen=_MARKS)
        self._recent: deque[tuple[int, Any]] = deque(maxlen=keep)
        self._is_checked = False

    @property
    def _name(self) -> str:
        return type(self._stream).__name__

    def know(self, mark: Mark) -> None:
        """Read on from a mark of a reader like this one, where that is nearer."""
        self._marks.append(mark)

    def __getitems__(self, positions: Sequence[int]) -> StreamRead:
        """The samples at these positions, for torch's DataLoader.

        Raises:
            ConfigurationError: the stream ends too early, does not come again as it was, or has a state that cannot be
                saved.
        """
        wanted = set(positions)
        found = {at: sample for at, sample in self._recent if at in wanted} if min(wanted) < self._position else {}
        if missing := wanted - found.keys():
            with self._random:
                found |= self._read(missing)
                self._marks.append(self._mark())
        end = max(wanted) + 1
        return StreamRead([found[at] for at in positions], self._nearest(end))

    def _read(self, wanted: Collection[int]) -> dict[int, Any]:
        first, last = min(wanted), max(wanted)
        nearest = self._nearest(first)
        is_of_another = self._has_state and vars(self._stream).get(_ITERATOR) != id(self._iterator)
        if self._iterator is None or is_of_another or not nearest["position"] <= self._position <= first:
            self._open(nearest)
        found = {}
        while self._position <= last:
            at, sample = self._position, self._next()
            if at in wanted:
                found[at] = sample
        return found

    def _nearest(self, position: int) -> Mark:
        before = [mark for mark in self._marks if mark["position"] <= position]
        return max(before, key=lambda mark: int(mark["position"]), default=_START)

    def _next(self) -> Any:
        assert self._iterator is not None
        while (sample := next(self._iterator, _END)) is _END:
            if not self._endless:
                raise ConfigurationError(
                    f"The stream {self._name} ended after {self._index} samples of an evaluation that needs more; let "
                    "its __len__ or the Trainer's limit of batches say how many there are."
                )
            if self._index == 0:
                raise ConfigurationError(
                    f"The stream {self._name} yields no sample in pass {self._lap}; bring data, and let each __iter__ "
                    "begin at the first sample."
                )
            self._begin(self._lap + 1)
        self._recent.append((self._position, sample))
        self._position, self._index, self._last = self._position + 1, self._index + 1, sample
        return sample

    # ------------------------------------------------------------------ opening

    def _open(self, mark: Mark) -> None:
        """Go on from a mark."""
        self._recent.clear()
        state = mark["state"] if self._has_state else None
        unread = vars(self._stream).get(_UNREAD)
        if state is None and unread is not None:
            self._stream.load_state_dict(copy.deepcopy(unread))
        self._begin(mark["lap"], state)
        if state is not None:
            self._index = mark["index"]
        elif mark["index"]:
            self._skip(mark["index"], mark["last"])
        self._position = mark["position"]

    def _begin(self, lap: int, state: Any = None) -> None:
        """Iterate a pass, from a state of the stream's where one is given."""
        self._random.seed(mixed_seed(self._seed, lap))
        self._seeded = self._random.values()
        if self._has_state and _UNREAD not in vars(self._stream):
            vars(self._stream)[_UNREAD] = copy.deepcopy(self._stream.state_dict())
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(lap)
        if state is not None:
            self._stream.load_state_dict(copy.deepcopy(state))
        self._iterator = iter(self._stream)
        vars(self._stream)[_ITERATOR] = id(self._iterator)
        self._lap, self._index, self._last = lap, 0, _END

    def _skip(self, count: int, last: int | None) -> None:
        rank_zero_info(
            f"The stream {self._name} has no exact state to go on from: {count} samples of pass {self._lap} are read "
            "again."
        )
        assert self._iterator is not None
        sample: Any = _END
        for _ in range(count):
            sample = next(self._iterator, _END)
        if sample is _END or (last is not None and fingerprint(sample) != last):
            raise ConfigurationError(
                f"The stream {self._name} does not come again as it was: sample {count} of pass {self._lap} is another "
                "one or missing, so samples would be trained on twice or left out; let its order depend on the epoch "
                "given to set_epoch alone, the same on every rank, or give it state_dict and load_state_dict."
            )
        self._index, self._last = count, sample

    def _mark(self) -> Mark:
        state = None
        if self._has_state and self._random.values() == self._seeded:
            state = copy.deepcopy(self._stream.state_dict())
            self._recent.clear()
            if not self._is_checked:
                _require_plain(state, self._name)
                self._is_checked = True
        last = None if self._last is _END else fingerprint(self._last)
        return {"position": self._position, "lap": self._lap, "index": self._index, "state": state, "last": last}


def has_exact_state(stream: Any) -> bool:
    """True if a stream continues with the very next sample after `load_state_dict`. Shuffle buffers of Hugging Face
    datasets are not in their state: those are read again instead.
    """
    if not (hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")):
        return False
    return not type(stream).__module__.startswith("datasets.") or not _has_buffer(getattr(stream, "_ex_iterable", None))


def _has_buffer(examples: Any) -> bool:
    """True if examples of a Hugging Face dataset pass a shuffle buffer, or something unknown."""
    if examples is None or "BufferShuffled" in type(examples).__name__:
        return True
    inner = [value for name, value in vars(examples).items() if "ex_iterable" in name]
    return any(_has_buffer(each) for value in inner for each in (value if isinstance(value, list) else [value]))


def fingerprint(sample: Any) -> int:
    """A number that tells samples apart, the same in every process: of the values in nested containers; of objects
    other than tensors, arrays, numbers and texts only the type counts."""
    digest = xxhash.xxh3_64()
    for leaf in private_torch.tree_leaves(sample):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            digest.update(np.ascontiguousarray(leaf).tobytes())
        elif leaf is None or isinstance(leaf, str | bytes | int | float | np.generic):
            digest.update(repr(leaf).encode())
        else:
            digest.update(type(leaf).__qualname__.encode())
    return digest.intdigest() >> 1  # 63 bits, which every format of integers holds


def _require_plain(state: Any, name: str) -> None:
    """Refuse a stream's state that a checkpoint cannot read back without unpickling code."""
    for leaf in private_torch.tree_leaves(state):
        if leaf is not None and type(leaf) not in (bool, int, float, str, bytes) and not isinstance(leaf, Tensor):
            raise ConfigurationError(
                f"The state_dict of the stream {name} holds a {type(leaf).__name__}, which no checkpoint could be read "
                "with safely; let it hold numbers, texts, tensors, lists, tuples and dicts."
            )


class StreamSampler(StepSampler):
    """Positions in the stream in the place of indices. `shuffle` goes on over the borders of epochs, as training does;
    without, each epoch is the first samples again."""

    @override
    def _indices(self, epoch: int, first: int, count: int) -> list[int]:
        first += epoch * self.epoch_size if self.order.shuffle else 0
        return list(range(first, first + count))

    @override
    def _position_from(self, consumed: int, former: int) -> int:
        return consumed if self.order.shuffle else super()._position_from(consumed, former)


class StreamLoader(StepLoader):
    """This rank's batches of a stream, as StepLoader. Its state has, beside the position, a mark of the stream's to go
    on from: {"stream": see `Mark`}.

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
            seed=sampler.order.seed,
            endless=not sampler.evaluation,
            keep=0 if sampler.evaluation else batches_ahead * sampler.cut.global_batch_size,
        )
        self._mark: Mark | None = None
        # A worker that stays goes on in the stream; a new one would read a pass again.
        options |= {"collate_fn": _Collated(collate_fn), "persistent_workers": workers > 0}
        super().__init__(self._reader, sampler, **options)
        self.dataset = stream
        # Without a length an epoch is what the Trainer's limits say, which a resumed run may change.
        sampler.data_size = len(stream) if isinstance(stream, Sized) else None
        sampler.data_key = key_of(stream)

    @classmethod
    def of_stream(
        cls, loader: DataLoader[Any], *, num_samples: int, training: bool, seed: int, **place: int
    ) -> StreamLoader:
        """The same stream, order and options under a StreamSampler; as StepLoader.from_dataloader.

        Args:
            num_samples: of an epoch.
        """
        options = {"num_samples": num_samples, "shuffle": training, "seed": seed, **place}
        return cls._in_place_of(loader, StreamSampler, training=training, **options)

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
        is_other = bool(self.step_sampler.change_of_data(state_dict))  # accepted; its mark is of the former stream
        self._mark = None if is_other else state_dict.get("stream")
        if self._mark is not None:
            self._reader.know(self._mark)
            private_torch.drop_workers(self._loader)  # theirs do not know it


@dataclass(frozen=True)
class _Collated:
    """Collates the samples of what was read, and hands on the mark."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, read: StreamRead) -> tuple[Any, Mark]:
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
    """Return the reason, in a sentence, why a stream's batches cannot be cut over ranks exactly; None if they can."""
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
            f"The stream {name} has no __len__, so the end of an epoch is unknown; give it one, or give the "
            f"Trainer {cure}."
        )
    return None


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
    size = _size_of_litdata(stream) if package == "litdata" else stream.size
    whole: Subset[Any] = Subset(stream, range(size))  # by index it is whole on every rank
    order = PartwiseShuffle(len(whole), loader.batch_size) if stream.shuffle else None
    options = loader_options(loader)
    return DataLoader(whole, batch_size=loader.batch_size, sampler=order, drop_last=loader.drop_last, **options)


def _size_of_litdata(stream: Any) -> int:
    """Return the length of the whole set; the set's own length is that of a rank."""
    environment = type(stream.distributed_env)(world_size=1, global_rank=0, num_nodes=1)
    stream.distributed_env = environment
    stream.set_drop_last(False)
    return len(stream)
