"""Which samples every rank sees at every step, as a pure function of one integer.

Training consumes one endless stream: epoch after epoch, each a permutation of the data set seeded by (seed, epoch).
Step t takes the next `global_batch_size` samples of it, whatever the number of ranks; inside the step the batch is cut
into micro-batches (gradient accumulation) and each micro-batch over the ranks, as evenly as whole samples allow. The
number of samples consumed so far is therefore the whole state, and a run that resumes on another number of ranks sees
the same batches. Evaluation uses the same cuts on one epoch: every sample exactly once, none padded, none repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from moe_lightning.algorithms.parts import boundary, cut, part_at
from moe_lightning.errors import ConfigurationError
from moe_lightning.values import PositiveInt, validated


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
    count: int  # samples of this rank
    micro_total: int  # samples of the micro-batch over all ranks
    step_total: int  # samples of the step over all ranks


@validated
class StepSampler(Sampler[list[int]]):
    """A batch sampler with a constant global batch, exact on any number of ranks and resumable from one integer.

    Args:
        num_samples: size of the data set.
        global_batch_size: samples of one optimizer step over all ranks and micro-batches.
        num_micros: micro-batches of one step (gradient accumulation). An evaluation accumulates nothing: there it is 1.
        rank, world_size: whose slices are drawn.
        seed: with the epoch's number it decides the permutation.
        shuffle: permute each epoch; otherwise samples come in their order.
        drop_last: True for training: whole steps only, so an epoch leaves out up to `global_batch_size - 1` samples.
            False for evaluation: all samples, in ceil(num_samples / global_batch_size) batches of nearly equal size.

    Iterating yields this rank's index lists from `consumed` to the end of its epoch and moves nothing, because the
    workers of a DataLoader draw ahead of the training: whoever consumes a batch adds its `micro_total` to `consumed`
    (StepLoader does).

    Raises:
        ConfigurationError: a size below one, a rank outside the world, fewer samples than one step, or a rank that
            would have no sample of some micro-batch.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        global_batch_size: int,
        num_micros: PositiveInt = 1,
        rank: int = 0,
        world_size: PositiveInt = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        for name, value, least in (
            ("num_samples", num_samples, 1),
            ("global_batch_size", global_batch_size, 1),
            ("seed", seed, 0),
        ):
            _require_at_least(name, value, least)
        if drop_last and num_samples < global_batch_size:
            raise ConfigurationError(
                f"The training data has {num_samples} samples, fewer than one step of {global_batch_size} "
                f"(global_batch_size); lower it to at most {num_samples}, or bring more data."
            )
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.whole_steps = num_samples // global_batch_size if drop_last else -(-num_samples // global_batch_size)
        self.epoch_steps = self.whole_steps
        self.consumed = 0
        self._epoch_offset = 0  # our epoch minus the announced one
        self._restored_at: int | None = None  # the position last restored
        self.moves = 0  # how often the position or the world was set from outside
        self._permutation: tuple[int, torch.Tensor] | None = None  # (epoch, its order)
        self._set_world(rank, world_size, num_micros)

    # ------------------------------------------------------------------ the pure map from position to samples

    @property
    def epoch_size(self) -> int:
        """Samples of one epoch over all ranks."""
        return self.epoch_steps * self.global_batch_size if self.drop_last else self.num_samples

    @property
    def epoch(self) -> int:
        """The epoch that `consumed` stands in; a position on a border belongs to the epoch that begins there."""
        return self.consumed // self.epoch_size

    def slice_at(self, consumed: int) -> StepSlice:
        """This rank's slice of the micro-batch that begins after `consumed` samples of the stream.

        Raises:
            ConfigurationError: no micro-batch begins there under the current `num_micros`.
        """
        return self._slice(consumed, self.rank, self.world_size, self.num_micros)

    def indices_at(self, consumed: int) -> list[int]:
        """The data set's indices of `slice_at(consumed)`, in the order of the global batch."""
        here = self.slice_at(consumed)
        epoch, inside = divmod(consumed, self.epoch_size)
        step = part_at(self.epoch_size, self.epoch_steps, inside)
        first = boundary(self.epoch_size, self.epoch_steps, step) + here.offset
        if not self.shuffle:
            return list(range(first, first + here.count))
        indices: list[int] = self._order(epoch)[first : first + here.count].tolist()
        return indices

    def _slice(self, consumed: int, rank: int, world_size: int, num_micros: int) -> StepSlice:
        epoch, inside = divmod(consumed, self.epoch_size)
        step = part_at(self.epoch_size, self.epoch_steps, inside)
        start, stop = (boundary(self.epoch_size, self.epoch_steps, i) for i in (step, step + 1))
        micro_bounds = cut(stop - start, num_micros)
        if inside - start not in micro_bounds[:-1]:
            raise ConfigurationError(
                f"The data position lies {inside - start} samples inside a step of {stop - start}, where none of its "
                f"{num_micros} micro-batches begins; resume with the accumulation and global batch it was saved with, "
                "or from a checkpoint taken after a whole step."
            )
        micro = micro_bounds.index(inside - start)
        micro_total = micro_bounds[micro + 1] - micro_bounds[micro]
        first, last = (boundary(micro_total, world_size, r) for r in (rank, rank + 1))
        return StepSlice(
            step=epoch * self.epoch_steps + step,
            micro=micro,
            num_micros=num_micros,
            offset=micro_bounds[micro] + first,
            count=last - first,
            micro_total=micro_total,
            step_total=stop - start,
        )

    def _order(self, epoch: int) -> torch.Tensor:
        """The permutation of `epoch`, kept until another epoch is asked for."""
        if self._permutation is None or self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            self._permutation = (epoch, torch.randperm(self.num_samples, generator=generator))
        return self._permutation[1]

    # ------------------------------------------------------------------ iteration

    def __len__(self) -> int:
        """Micro-batches in a whole epoch, also under `limit_epoch`: a Trainer applies its limit to this itself."""
        return self.whole_steps * self.num_micros

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
        """{"consumed": samples of the global stream consumed so far}; the same on every rank."""
        return {"consumed": self.consumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            ConfigurationError: not a position, or one inside a step that the current `num_micros` cannot express.
        """
        consumed = state_dict.get("consumed")
        if not isinstance(consumed, int) or isinstance(consumed, bool) or consumed < 0:
            raise ConfigurationError(
                f"The saved data position {state_dict!r} has no non-negative integer 'consumed'; "
                "resume from a checkpoint that a StepSampler wrote."
            )
        self.slice_at(consumed)
        self.consumed = consumed
        self._restored_at = consumed
        self.moves += 1

    def bind(self, *, rank: int | None = None, world_size: int | None = None, num_micros: int | None = None) -> None:
        """Cut the same stream for another world, from the same position; what is None stays as it is.

        Raises:
            ConfigurationError: as the constructor, or the position lies inside a step that the new `num_micros` cannot
                express; then nothing has changed.
        """
        self._set_world(
            self.rank if rank is None else rank,
            self.world_size if world_size is None else world_size,
            self.num_micros if num_micros is None else num_micros,
        )
        self.moves += 1

    def limit_epoch(self, steps: int) -> None:
        """Let every epoch end after its first `steps` steps, between 1 and `whole_steps` (training only)."""
        assert self.drop_last
        assert 1 <= steps <= self.whole_steps
        if steps != self.epoch_steps:
            self.epoch_steps = steps
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

    def _set_world(self, rank: int, world_size: int, num_micros: int) -> None:
        num_micros = num_micros if self.drop_last else 1
        _require_at_least("num_micros", num_micros, 1)
        _require_at_least("world_size", world_size, 1)
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"rank={rank} is outside 0..{world_size - 1}; give the rank inside its world.")
        step_size = self.global_batch_size if self.drop_last else self.num_samples // self.whole_steps
        if step_size // num_micros < world_size:
            raise ConfigurationError(self._too_few(step_size, num_micros, world_size))
        self._slice(self.consumed, rank, world_size, num_micros)
        self.rank, self.world_size, self.num_micros = rank, world_size, num_micros

    def _too_few(self, step_size: int, num_micros: int, world_size: int) -> str:
        if self.drop_last:
            return (
                f"global_batch_size={step_size} in {num_micros} micro-batches leaves {step_size // num_micros} samples "
                f"for {world_size} ranks; set it to at least {num_micros * world_size}, or use fewer ranks "
                "or micro-batches (accumulate_grad_batches, num_micros)."
            )
        return (
            f"{self.num_samples} evaluation samples in batches of at most {self.global_batch_size} leave a batch of "
            f"{step_size} for {world_size} ranks; use fewer ranks, a larger batch, or more samples."
        )


def _require_at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r} is not an integer of at least {least}; set it to one.")
