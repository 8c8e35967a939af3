"""Samples of every rank at every step, as a pure function of one integer.

Training consumes one endless stream: epoch after epoch, each an order of the data set that (seed, epoch) decides.
Step t uses the next `global_batch_size` samples of it, whatever the number of ranks, and the last step of an epoch
what is left; inside the step the batch is cut into micro-batches (gradient accumulation) and each micro-batch over the
ranks, as evenly as whole samples allow or in proportion to their speeds. The number of samples consumed so far is
therefore the whole state, and a run that resumes on another number of ranks sees the same batches. Evaluation uses the
same cuts on one epoch: every sample exactly once.

Ranks without a sample get a dummy one, which has no weight in the loss, so that they join the model's collectives.
A user's own sampler draws its order from a separate global random state, the same on every rank and in every run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from moe_lightning.arrays import IntArray, cut
from moe_lightning.config import NonNegativeInt, PositiveInt, require, validated
from moe_lightning.dispatch.quota import shares, uneven
from moe_lightning.errors import ConfigurationError


class OwnGenerators:
    """Inside, the global generators of Python, NumPy and torch (on the host) go on where the last `with` left them."""

    def __init__(self, seed: int) -> None:
        self._words = seed
        self._own: list[Any] | None = None
        self._others: list[Any] = []

    def __enter__(self) -> OwnGenerators:
        self._others = _states()
        if self._own is None:
            self.seed(self._words)
        else:
            _restore(self._own)
        return self

    def __exit__(self, *_: object) -> None:
        self._own = _states()
        _restore(self._others)

    @staticmethod
    def seed(words: int) -> None:
        """Begin anew; called inside."""
        torch.default_generator.manual_seed(words)
        random.seed(words)
        np.random.seed(words % 2**32)  # noqa: NPY002

    @staticmethod
    def values() -> tuple[Any, ...]:
        """Return values to compare, which every draw changes; called inside."""
        of_torch, of_python, (_, words, *rest) = _states()
        return of_torch.numpy().tobytes(), of_python, words.tobytes(), rest


def _states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()]  # noqa: NPY002


def _restore(states: list[Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002


def mixed_seed(*words: int) -> int:
    """One 63-bit seed for a tuple of non-negative integers; the same on every machine."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1


@dataclass(frozen=True, kw_only=True)
class StepSlice:
    """This rank's part of one micro-batch. All sizes are in samples."""

    step: int  # counted from the start of the stream, over all epochs
    micro: int  # which micro-batch of the step
    num_micros: int  # micro-batches in the step
    offset: int  # this rank's first sample, counted from the start of the step's global batch
    count: int  # samples of this rank; 0: what it holds is a dummy
    micro_total: int  # samples of the micro-batch over all ranks
    step_total: int  # samples of the step over all ranks
    parts: int = 1  # equal shares of the loss of each sample, of which this rank computes one

    @property
    def micro_share(self) -> float:
        """Share of the micro-batch."""
        return self.count / (self.micro_total * self.parts)

    @property
    def step_share(self) -> float:
        """Share of the step."""
        return self.count / (self.step_total * self.parts)

    pieces: tuple[StepSlice, ...] = ()  # of a batch that a pipeline computes in several: each a micro-batch of the step

    @property
    def rows(self) -> int:
        """Samples in the rank's batch, dummies included."""
        return sum(piece.rows for piece in self.pieces) if self.pieces else max(1, self.count)


class DummyIndices(list[int]):
    """Indices of which some are samples that another rank computes, for a rank that has none of its own.

    Attributes:
        of_samples: the others.
    """

    of_samples: Sequence[int] = ()


class EpochOrder:
    """Order of the data set's samples in each epoch: given, drawn from (seed, epoch), or as they are.

    Args:
        num_samples: of an epoch.
        given: the order by the epoch's number; without `shuffle` that of the first epoch is taken again.
    """

    def __init__(
        self, num_samples: int, *, seed: int, shuffle: bool, given: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self._given = given
        self._newest: tuple[int, torch.Tensor] | None = None  # (epoch, its order)

    @property
    def name(self) -> str | None:
        """Name of the order, which a position in it is saved with; None: a given one has none."""
        if self._given is not None:
            return getattr(self._given, "name", None)
        return f"shuffled with seed {self.seed}" if self.shuffle else "in the order of the data set"

    def indices(self, epoch: int, first: int, count: int) -> list[int]:
        """Return the data set's indices of `count` samples of an epoch, from its sample `first` on."""
        if self._given is None and not self.shuffle:
            return list(range(first, first + count))
        indices: list[int] = self._of_epoch(epoch if self.shuffle else 0)[first : first + count].tolist()
        return indices

    def _of_epoch(self, epoch: int) -> torch.Tensor:
        if self._newest is None or self._newest[0] != epoch:
            if self._given is not None:
                order = self._given(epoch)
            else:
                generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
                order = torch.randperm(self.num_samples, generator=generator, device="cpu")
            self._newest = epoch, order
        return self._newest[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCut:
    """Cut of every step into micro-batches, their pieces, and the ranks' slices of them; see StepSampler."""

    global_batch_size: int
    num_micros: int
    pieces: int
    rank: int
    world_size: int
    speeds: IntArray | None = None  # int64 [world_size]; None: evenly
    most: int | None = None  # samples of a rank in a micro-batch, where speeds are given
    _bounds: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_pieces(self) -> int:
        """Pieces of a whole step."""
        return self.num_micros * self.pieces

    def micro_bounds(self, step_total: int) -> tuple[int, ...]:
        """Return the beginnings of a step's micro-batches, and its end: a step of few samples has the first of them
        only.
        """
        whole = cut(self.global_batch_size, self.num_micros)
        return *(start for start in whole if start < step_total), step_total

    def _piece_bounds(self, begin: int, end: int) -> tuple[int, ...]:
        """Return the beginnings of the pieces of the micro-batch of a step from `begin` to `end`, and its end: one of
        few samples has the first of them only.
        """
        whole = cut(self.global_batch_size, self.num_micros)
        size = next(last - first for first, last in itertools.pairwise(whole) if first == begin)
        return *(begin + start for start in cut(size, self.pieces) if begin + start < end), end

    def _rank_bounds(self, total: int) -> tuple[int, ...]:
        """Return the beginnings of the ranks' slices of a micro-batch, and its end."""
        if total not in self._bounds:
            if self.speeds is None:
                self._bounds[total] = cut(total, self.world_size)
            else:
                self._bounds[total] = 0, *itertools.accumulate(shares(total, self.speeds, self.most).tolist())
        return self._bounds[total]

    def slice_at(self, inside_step: int, step_total: int, step: int) -> StepSlice:
        """Return the rank's slice of the micro-batch that begins after `inside_step` samples of a step of `step_total`.

        Raises:
            ConfigurationError: no micro-batch begins there.
        """
        bounds = self.micro_bounds(step_total)
        if inside_step not in bounds[:-1]:
            raise ConfigurationError(
                f"The data position is {inside_step} samples inside a step of {step_total}, where none of its "
                f"{self.num_micros} micro-batches begins; resume with the accumulation and global batch it was saved "
                "with, or from a checkpoint taken after a whole step."
            )
        micro = bounds.index(inside_step)

        borders = [self._piece_bounds(*pair) for pair in itertools.pairwise(bounds)]
        before, of_step = (sum(len(b) - 1 for b in some) for some in (borders[:micro], borders))
        parts = list[StepSlice]()
        for begin, end in itertools.pairwise(borders[micro]):
            first, last = self._rank_bounds(end - begin)[self.rank : self.rank + 2]
            parts.append(
                StepSlice(
                    step=step,
                    micro=before + len(parts),
                    num_micros=of_step,
                    offset=begin + first,
                    count=last - first,
                    micro_total=end - begin,
                    step_total=step_total,
                )
            )
        if self.pieces == 1:
            return parts[0]
        return replace(
            parts[0],
            micro=micro,
            num_micros=len(bounds) - 1,
            count=sum(piece.count for piece in parts),
            micro_total=bounds[micro + 1] - bounds[micro],
            pieces=tuple(parts),
        )


@validated
class StepSampler(Sampler[list[int]]):
    """A batch sampler with a constant global batch, exact on any number of ranks and resumable from one integer.

    Args:
        num_samples: samples of an epoch, the size of the data set where `order` does not say otherwise.
        global_batch_size: samples of one optimizer step over all ranks and micro-batches.
        num_micros: micro-batches of one step (gradient accumulation). An evaluation accumulates nothing: there it is 1.
        rank, world_size: whose slices are drawn.
        pieces: micro-batches that a rank gets at once, as a pipeline wants them; each is cut over the ranks by itself.
        seed: with the epoch's number it decides the permutation.
        shuffle: permute each epoch; otherwise samples come in their order, the same in all of them.
        drop_last: whole steps only, so an epoch leaves out up to `global_batch_size - 1` samples; else they are its
            last step.
        evaluation: one epoch from its first sample, whenever it is iterated.
        keeps_micro_batch: another `num_micros` changes the samples of a step, as in stock Lightning, and not those of a
            micro-batch; `drop_last` then leaves out a last partial micro-batch.
        order: the indices of an epoch, int64 [num_samples], by its number and the same on every rank; without
            `shuffle` those of the first one. A position is refused in one whose `name` is another, if it has one. None:
            those of the data set.

    Attributes:
        order, cut: of the samples of epochs, and of the samples of a step.
        data_size, data_key: the number of the data set's samples and a text that other content changes, as far as they
            are known: a position is that in these data.
        accepts_other_data: True goes on in other data than those of the position that is restored.

    Iterating yields this rank's index lists from `consumed` to the end of its epoch and moves nothing, because the
    workers of a DataLoader draw ahead of the training: whoever consumes a batch adds its `micro_total` to `consumed`
    (StepLoader does).

    Raises:
        ConfigurationError: a size below one, a rank outside the world, no whole step under `drop_last`, or a rank that
            would have no sample of a whole training step's micro-batch.
    """

    def __init__(
        self,
        *,
        num_samples: PositiveInt,
        global_batch_size: PositiveInt,
        num_micros: PositiveInt = 1,
        rank: int = 0,
        world_size: PositiveInt = 1,
        pieces: PositiveInt = 1,
        seed: NonNegativeInt = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        evaluation: bool = False,
        keeps_micro_batch: bool = False,
        order: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        unit = (global_batch_size // num_micros if keeps_micro_batch else 0) or global_batch_size
        if drop_last and num_samples < unit:
            kind = "evaluation" if evaluation else "training"
            raise ConfigurationError(
                f"The {kind} data has {num_samples} samples, fewer than one step of {unit} "
                f"(global_batch_size); lower it to at most {num_samples}, set drop_last=False, or bring more data."
            )
        self.data_size: int | None = num_samples
        self.data_key: str | None = None
        self.accepts_other_data = False
        self.order = EpochOrder(num_samples, seed=seed, shuffle=shuffle, given=order)
        self.cut = StepCut(
            global_batch_size=global_batch_size, num_micros=num_micros, pieces=pieces, rank=rank, world_size=world_size
        )
        self.keeps_micro_batch = keeps_micro_batch
        self.evaluation = evaluation
        self._unit = unit if drop_last else 1
        self.epoch_size = self._usable(num_samples)
        self.consumed = 0
        self._epoch_offset = 0  # our epoch minus the announced one
        self._restored_at: int | None = None  # the position last restored
        self.moves = 0  # how often the position or the world was set from outside
        self.bind()

    # ------------------------------------------------------------------ the pure map from position to samples

    @property
    def epoch_steps(self) -> int:
        """Steps of one epoch."""
        return -(-self.epoch_size // self.cut.global_batch_size)

    @property
    def epoch(self) -> int:
        """The epoch that `consumed` stands in; a position on a border belongs to the epoch that begins there."""
        return self.consumed // self.epoch_size

    def slice_at(self, consumed: int) -> StepSlice:
        """This rank's slice of the micro-batch that begins after `consumed` samples of the stream.

        Raises:
            ConfigurationError: no micro-batch begins there under the current `num_micros`.
        """
        return self._slice(consumed, self.cut)

    def indices_at(self, consumed: int) -> list[int]:
        """The data set's indices of `slice_at(consumed)`, in the order of the global batch; a DummyIndices where it is
        empty. A piece that is empty takes one index, as a dummy for it.
        """
        here = self.slice_at(consumed)
        epoch, inside = divmod(consumed, self.epoch_size)
        step_began = inside - inside % self.cut.global_batch_size
        found, own = list[int](), list[int]()
        for piece in here.pieces or (here,):
            found += (some := self._indices(epoch, step_began + piece.offset if piece.count else inside, piece.rows))
            own += some if piece.count else []
        if len(own) == len(found):
            return found
        dummy = DummyIndices(found)
        dummy.of_samples = own
        return dummy

    def indices_of(self, here: StepSlice) -> list[int]:
        """The data set's indices of the samples in a slice, dummies left out."""
        epoch, began = divmod(self.begin_of(here), self.epoch_size)
        return [i for piece in here.pieces or (here,) for i in self._indices(epoch, began + piece.offset, piece.count)]

    def begin_of(self, here: StepSlice) -> int:
        """The position of the stream at which the step of a slice begins."""
        epoch, step = divmod(here.step, self.epoch_steps)
        return epoch * self.epoch_size + step * self.cut.global_batch_size

    def samples_between(self, first: int, last: int) -> list[int]:
        """Return the data set's indices of the samples of all ranks from one position of the stream to another."""
        found = list[int]()
        while first < last:
            epoch, inside = divmod(first, self.epoch_size)
            count = min(last - first, self.epoch_size - inside)
            found += self._indices(epoch, inside, count)
            first += count
        return found

    def _indices(self, epoch: int, first: int, count: int) -> list[int]:
        return self.order.indices(epoch, first, count)

    def _slice(self, consumed: int, cut: StepCut) -> StepSlice:
        epoch, inside = divmod(consumed, self.epoch_size)
        step, inside_step = divmod(inside, cut.global_batch_size)
        step_total = min(cut.global_batch_size, self.epoch_size - step * cut.global_batch_size)
        return cut.slice_at(inside_step, step_total, epoch * self.epoch_steps + step)

    def _usable(self, num_samples: int) -> int:
        return num_samples - num_samples % self._unit

    # ------------------------------------------------------------------ iteration

    def __len__(self) -> int:
        """Micro-batches in a whole epoch, also under `limit_epoch`: a Trainer applies its limit to this itself."""
        return self.batches_in(self._usable(self.order.num_samples))

    def batches_in(self, samples: int) -> int:
        """Micro-batches in the first samples of an epoch."""
        whole, rest = divmod(samples, self.cut.global_batch_size)
        return whole * self.cut.num_micros + (len(self.cut.micro_bounds(rest)) - 1 if rest else 0)

    def __iter__(self) -> Iterator[list[int]]:
        position = self.consumed
        end = self.epoch_end
        while position < end:
            yield self.indices_at(position)
            position += self.slice_at(position).micro_total

    @property
    def epoch_end(self) -> int:
        """The value of `consumed` at which the current epoch ends."""
        return (self.epoch + 1) * self.epoch_size

    # ------------------------------------------------------------------ state and world

    def state_dict(self) -> dict[str, Any]:
        """{"consumed": samples of the global stream consumed so far, in epochs of "epoch_size", "data_size",
        "data_key", "data_order": of which data in which order, as far as that is known}; the same on every rank."""
        data = {"data_size": self.data_size, "data_key": self.data_key, "data_order": self.order.name}
        known = {name: value for name, value in data.items() if value is not None}
        return {"consumed": self.consumed, "epoch_size": self.epoch_size, **known}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            ConfigurationError: not a position, one inside a step that the current `num_micros` cannot express, or one
                in other data.
        """
        consumed = state_dict.get("consumed")
        if not isinstance(consumed, int) or isinstance(consumed, bool) or consumed < 0:
            raise ConfigurationError(
                f"The saved data position {state_dict!r} has no non-negative integer 'consumed'; "
                "resume from a checkpoint that a StepSampler wrote."
            )
        if (change := self.change_of_data(state_dict)) and not self.accepts_other_data:
            raise ConfigurationError(
                f"The training data are not those of the checkpoint: {change}, so samples would be trained on twice or "
                "left out; bring back the former data, or give resume_overrides=true (in a script to the strategy) to "
                "go on in the new ones."
            )
        former = state_dict.get("epoch_size", self.epoch_size)
        if change:  # the step of the same number
            consumed -= consumed % former % self.cut.global_batch_size
        consumed = self._position_from(consumed, former)
        self.slice_at(consumed)
        self.consumed = consumed
        self._restored_at = consumed
        self.moves += 1

    def change_of_data(self, saved: dict[str, Any]) -> str:
        """Return the difference between the data of a saved position and these; "" if there is none."""
        size, key = saved.get("data_size"), saved.get("data_key")
        if size is not None and self.data_size is not None and size != self.data_size:
            return f"they had {size:,} samples and have {self.data_size:,}"
        if key is not None and self.data_key is not None and key != self.data_key:
            return "they have other content"
        order = saved.get("data_order")
        if order is not None and self.order.name is not None and order != self.order.name:
            return f"they were {order} and are {self.order.name}"
        return ""

    def _position_from(self, consumed: int, former: int) -> int:
        """The same position in the same epoch, or the end of that, where epochs had `former` samples."""
        epoch, inside = divmod(consumed, former)
        return epoch * self.epoch_size + min(inside, self.epoch_size)

    def bind(self, **place: int) -> None:
        """Cut the same stream for another world, from the same position.

        Args:
            place: of rank, world_size, num_micros and pieces those that change.

        Raises:
            ConfigurationError: as the constructor, or the position lies inside a step that the new `num_micros` cannot
                express; then nothing has changed.
        """
        changed: dict[str, Any] = {**place}
        former, cut = self.cut, replace(self.cut, **changed)
        if self.evaluation:
            cut = replace(cut, num_micros=1)
        require(cut.num_micros, PositiveInt, "num_micros")
        require(cut.world_size, PositiveInt, "world_size")
        if not 0 <= cut.rank < cut.world_size:
            raise ConfigurationError(
                f"rank={cut.rank} is outside 0..{cut.world_size - 1}; give the rank inside its world."
            )
        if self.keeps_micro_batch:
            cut = replace(cut, global_batch_size=former.global_batch_size // former.num_micros * cut.num_micros)
        micros, size = cut.num_pieces, cut.global_batch_size
        if not self.evaluation and size // micros < cut.world_size:
            raise ConfigurationError(
                f"global_batch_size={size} in {micros} micro-batches leaves "
                f"{size // micros} samples for {cut.world_size} ranks; set it to at least "
                f"{micros * cut.world_size}, or use fewer ranks or micro-batches (num_micros, the "
                "Trainer's accumulate_grad_batches" + ("; pieces, strategy.micro_batches)." if cut.pieces > 1 else ").")
            )
        if cut.world_size != former.world_size:
            cut = replace(cut, speeds=None)
        if not self.keeps_micro_batch:  # else a micro-batch begins there whatever their number is
            self._slice(self.consumed, cut)
        self.cut = cut
        self.moves += 1

    def keep_global_batch(self) -> None:
        """Let another `num_micros` from here on cut the steps as they are now, in place of making them larger."""
        self.keeps_micro_batch = False

    def share_by(self, speeds: IntArray | None, most: int | None = None) -> None:
        """Cut micro-batches in proportion to the ranks' speeds from now on, until the world changes; the same on every
        rank, and the samples of a step stay what they are.

        Args:
            speeds: int64 [world_size], see `dispatch.quota`; None: as evenly as whole samples allow.
            most: samples of a rank in a micro-batch, see `dispatch.quota.shares`.
        """
        speeds = uneven(speeds)
        fits = speeds is not None and len(speeds) == self.cut.world_size
        self.cut = replace(self.cut, speeds=speeds if fits else None, most=most)
        self.moves += 1

    def limit_epoch(self, batches: int) -> None:
        """Let every epoch end after its first `batches` micro-batches, between 1 and `len(self)` (training only); its
        last step is what is left."""
        assert not self.evaluation
        assert 1 <= batches <= len(self)
        steps, rest = divmod(batches, self.cut.num_micros)
        size = steps * self.cut.global_batch_size + cut(self.cut.global_batch_size, self.cut.num_micros)[rest]
        if (size := min(size, self._usable(self.order.num_samples))) != self.epoch_size:
            self.epoch_size = size
            self.moves += 1

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the position is inside it already.

        A Trainer calls it before every epoch, on `loader.batch_sampler.sampler`. It matters where no position was
        restored. A restored one is right whatever is announced before its first batch: a Trainer that stopped at
        max_steps counts the epoch it left as finished.
        """
        if self.consumed == self._restored_at:
            self._epoch_offset = self.epoch - epoch
        if epoch + self._epoch_offset != self.epoch:
            self.consumed = (epoch + self._epoch_offset) * self.epoch_size
            self.moves += 1

    @property
    def sampler(self) -> StepSampler:
        """Itself: where a Trainer looks for `set_epoch`."""
        return self


class NoCommonOrderError(ConfigurationError):
    """A sampler whose indices cannot be made the same on every rank; one rank alone may use it as it is."""


class SamplerOrder:
    """The indices that a sampler yields in epoch e, as a function of e alone.

    The sampler is read to its end with every global generator, and its own `generator` where it has one, seeded by
    (seed, e); the generators are left as they were. So ranks agree, and a resumed run goes on with the same indices.

    Args:
        sampler: finite; one with `set_epoch` is told the epoch.
        seed: of the run; a generator of the sampler's own is seeded by its initial seed instead.

    Raises:
        NoCommonOrderError: the sampler has a rank's share alone or no length, yields no indices, or another order when
            it is read again.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._name = type(sampler).__name__
        ranks = getattr(sampler, "num_replicas", 1)
        if isinstance(ranks, int) and ranks > 1:
            raise NoCommonOrderError(
                f"The DataLoader's sampler {self._name} takes the share of one of {ranks} ranks itself, which would be "
                "cut over the ranks once more; give it the whole data set (num_replicas=1, rank=0)."
            )
        if not isinstance(sampler, Sized):
            raise NoCommonOrderError(
                f"The DataLoader's sampler {self._name} has no length, so the end of an epoch is unknown; "
                "give it a __len__."
            )
        self.num_samples = len(sampler)
        if not torch.equal(self(0), self(0)):
            raise NoCommonOrderError(
                f"The DataLoader's sampler {self._name} keeps random numbers of its own, so ranks would see different "
                "orders; draw them from torch's global generator, or from one in its attribute `generator`."
            )

    def __call__(self, epoch: int) -> torch.Tensor:
        """int64 [num_samples]."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with _seeded_generators(self._sampler, self._seed, epoch):
            indices = list(self._sampler)
        if not all(isinstance(index, int | np.integer) for index in indices):
            raise NoCommonOrderError(
                f"The DataLoader's sampler {self._name} yields {indices[:1]} where an index is expected; "
                "yield integers."
            )
        if len(indices) != self.num_samples:
            raise NoCommonOrderError(
                f"The DataLoader's sampler {self._name} yields {len(indices)} indices in epoch {epoch}, but its length "
                f"is {self.num_samples}; make both equal in all epochs."
            )
        return torch.tensor(indices, dtype=torch.int64)


@contextmanager
def _seeded_generators(sampler: Any, seed: int, epoch: int) -> Generator[None, None, None]:
    """Seed what a sampler may draw from, and restore it."""
    own = getattr(sampler, "generator", None)
    own = own if isinstance(own, torch.Generator) else None
    with OwnGenerators(mixed_seed(seed, epoch)):
        if own is not None:
            sampler.generator = torch.Generator().manual_seed(mixed_seed(own.initial_seed(), epoch))
        try:
            yield
        finally:
            if own is not None:
                sampler.generator = own
