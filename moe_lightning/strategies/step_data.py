"""Data of the steps: loaders cut over the ranks, and the position of every batch in its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from moe_lightning.arrays import IntArray
from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.data.loader import StepLoader, accumulation_of, is_empty, reason_not_to_cut
from moe_lightning.data.sampler import NoCommonOrderError, StepSampler, StepSlice
from moe_lightning.data.streams import StreamLoader, by_index, reason_not_to_stream, samples_of_epoch
from moe_lightning.errors import ConfigurationError

_MOST_SHOWN = 16  # indices of samples

LOADERS_KEY = "step_loaders"
"""Where a checkpoint keeps the position of each training loader."""


class StepData:
    """Loaders cut over the ranks, and the running batch.

    Args:
        rank, world_size: whose slices.
        pieces: micro-batches that a rank gets at once.
        seed: returns that of the order of stock loaders, which may be another one in each fit.
        must_cut: other ranks may join, or share this rank's samples.
    """

    def __init__(self, *, rank: int, world_size: int, pieces: int = 1, seed: Callable[[], int], must_cut: bool) -> None:
        self._world = {"rank": rank, "world_size": world_size, "pieces": pieces}
        self._must_cut = must_cut
        self._seed = seed
        self._restored: list[dict[str, Any]] = []
        self._resumed: list[StepLoader] = []
        self._speeds: IntArray | None = None
        self._most: int | None = None

    def cut(self, loader: object, trainer: pl.Trainer) -> object:
        """Return the loader's part for this rank; its batch_size is the global batch. A run of one rank uses loaders
        that cannot be cut as they are.

        Raises:
            ConfigurationError: a loader that cannot be cut exactly.
        """
        cut = self._cut(loader, trainer)
        if isinstance(cut, StepLoader) and trainer.training:
            cut.bind_to(trainer)
            cut.step_sampler.share_by(self._speeds, self._most)
            if self._restored:
                cut.load_state_dict(self._restored.pop(0))
                self._resumed.append(cut)
                if not self._restored:
                    resume_at_positions(self._resumed, trainer)
        return cut

    def _cut(self, loader: object, trainer: pl.Trainer) -> object:
        if isinstance(loader, StepLoader):
            loader.bind(**self._world)
            return loader
        is_alone = self._world["world_size"] == self._world["pieces"] == 1 and not self._must_cut
        if isinstance(loader, DataLoader):
            given, loader = loader, by_index(loader)
            is_stream = isinstance(loader.dataset, IterableDataset)
            if not is_stream and is_empty(loader, training=trainer.training):
                return loader  # Lightning warns of it, and leaves it out
            reason = reason_not_to_stream(loader, trainer) if is_stream else reason_not_to_cut(loader)
            if reason is not None and is_alone:
                if is_stream:
                    _warn_of_no_position(reason)
                return loader
            if reason is not None:
                raise ConfigurationError(reason)
            private_lightning.warn_of_few_workers(trainer, given)
            micros = accumulation_of(trainer) if trainer.training else 1
            place: dict[str, Any] = {
                **self._world,
                "num_micros": micros,
                "seed": self._seed(),
                "training": trainer.training,
            }
            if not is_stream:
                try:
                    return StepLoader.from_dataloader(loader, **place)
                except NoCommonOrderError as error:
                    if not is_alone:
                        raise
                    _warn_of_no_position(str(error))
                    return loader
            samples = samples_of_epoch(loader, trainer)
            assert samples is not None, "reason_not_to_stream has looked"
            return StreamLoader.of_stream(loader, num_samples=samples, **place)
        if is_alone:
            return loader
        ranks = self._world["world_size"]
        raise ConfigurationError(
            f"a loader of type {type(loader).__name__} cannot be cut "
            f"{f'over {ranks} ranks' if ranks > 1 or self._must_cut else 'into micro-batches'}: "
            "return a torch DataLoader or a StepLoader"
        )

    def enter_world(self, *, rank: int, world_size: int, loaders: object) -> None:
        """Cut loaders, running ones too, for other ranks from now on."""
        self._world, self._speeds = self._world | {"rank": rank, "world_size": world_size}, None
        for loader in _step_loaders(loaders):
            loader.bind(**self._world)

    def share_by(self, speeds: IntArray | None, most: int | None, loaders: object) -> None:
        """Cut training batches by the speeds of the ranks from the next one on, until the world changes; the same on
        every rank. Loaders of unlike batches stay cut evenly, since no weight of a rank would fit them all.

        Args:
            speeds: int64 [slices of the batch]; None: evenly.
            most: samples of a rank in a micro-batch; None: twice an even share.
            loaders: for training.
        """
        self._speeds, self._most = speeds, most
        cut = [loader.step_sampler for loader in _step_loaders(loaders)]
        for sampler in cut if len({sampler.cut.global_batch_size for sampler in cut}) == 1 else []:
            sampler.share_by(speeds, most)

    def restore(self, states: Sequence[dict[str, Any]], loaders: object) -> None:
        """Set the positions of the training loaders: of those that are cut, or else of those that are cut next."""
        cut = _step_loaders(loaders)
        self._restored, self._resumed = [] if cut else list(states), []
        for loader, state in zip(cut, states, strict=False):
            loader.load_state_dict(state)

    def begin_training(self) -> None:
        """Drop restored positions of which this fit has no loader, in `on_train_start`."""
        self._restored, self._resumed = [], []


def resume_at_positions(loaders: Sequence[StepLoader], trainer: pl.Trainer) -> None:
    """Let the fit loop, whose state counts micro-batches as they were when it was saved, resume at the positions of all
    training loaders: those of the present accumulation, batch size and limit of an epoch.

    Raises:
        ConfigurationError: none of these steps begins at a position.
    """
    samplers = [loader.step_sampler for loader in loaders]
    for sampler in samplers:
        here = sampler.slice_at(sampler.consumed)
        if here.micro:
            raise ConfigurationError(
                f"The data position is {sampler.consumed - sampler.begin_of(here)} samples inside a step of "
                f"{here.step_total}, which cannot begin there; resume with the accumulation and batch size it was "
                "saved with, or from a checkpoint at the end of an epoch."
            )
    inside = [sampler.consumed % sampler.epoch_size for sampler in samplers]
    done = [sampler.batches_in(of or sampler.epoch_size) for sampler, of in zip(samplers, inside, strict=True)]
    is_last = None if len(samplers) > 1 else not inside[0]  # a shorter one of joined loaders may begin again
    private_lightning.count_batches(trainer, max(done), is_last=is_last)


def _step_loaders(loaders: object) -> list[StepLoader]:
    return [loader for loader in private_torch.tree_leaves(loaders) if isinstance(loader, StepLoader)]


def _warn_of_no_position(reason: str) -> None:
    rank_zero_warn(f"This run has one rank, and no position in its data is saved: {reason}")


def loader_states(loaders: object, *, is_in_step: bool = False, has_left_epoch: bool = False) -> list[dict[str, Any]]:
    """Return the positions of the StepLoaders in a collection of loaders.

    Args:
        is_in_step: take those before the step that has not ended.
        has_left_epoch: take those after the epoch, which was left before its end.
    """
    if has_left_epoch:
        return [loader.state_after_epoch() for loader in _step_loaders(loaders)]
    return [_state_of(loader, is_in_step) for loader in _step_loaders(loaders)]


def states_of_stateful(loaders: object, *, is_in_step: bool) -> list[dict[str, Any]]:
    """Return the positions of loaders that have one in stock Lightning too: a DataLoader of torch has none there."""
    flat = private_torch.tree_leaves(loaders)
    stateful = [loader for loader in flat if isinstance(loader, private_lightning.StatefulLoader)]
    return [_state_of(loader, is_in_step) for loader in stateful if not getattr(loader, "replaces_stock", False)]


def _state_of(loader: private_lightning.StatefulLoader[str], is_in_step: bool) -> dict[str, Any]:
    if is_in_step and isinstance(loader, StepLoader):
        return loader.state_before_step()
    return loader.state_dict()


def is_in_step(trainer: pl.Trainer) -> bool:
    """True if a training batch was fetched whose optimizer step has not ended."""
    loaders = _step_loaders(trainer.train_dataloader)
    is_waiting = any(loader.current is not None and not loader.has_begun for loader in loaders)
    return is_waiting or private_lightning.is_step_open(trainer)


def require_same_data(outlines: Sequence[list[Any]]) -> None:
    """
    Args:
        outlines: what `outline_of` returns on each rank.

    Raises:
        ConfigurationError: they differ.
    """
    other = next((rank for rank, outline in enumerate(outlines) if outline != outlines[0]), None)
    if other is not None:
        (first, size, _), (second, others, _) = outlines[0], outlines[other]
        raise ConfigurationError(
            f"rank 0 has {size} samples of {first} and rank {other} {others} of {second}, or other content or indices: "
            "give every rank the whole data set in one order, and random_split a seeded generator; the strategy cuts "
            "its batches"
        )


def require_loss(output: object, trainer: pl.Trainer) -> None:
    """
    Raises:
        ConfigurationError: a micro-batch without a loss, after which gradients of others would not be summed over
            ranks.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    assert trainer.lightning_module is not None
    if loss is None and trainer.lightning_module.automatic_optimization and trainer.accumulate_grad_batches > 1:
        raise ConfigurationError(
            "training_step returned None, and gradients of the step's other micro-batches would be summed over no "
            "ranks: return 0.0 * loss, or use accumulate_grad_batches=1"
        )


def require_accumulation(trainer: pl.Trainer) -> None:
    """
    Raises:
        ConfigurationError: the Trainer's accumulation was changed within an epoch.
    """
    for loader in _step_loaders(trainer.train_dataloader):
        if loader.step_sampler.cut.num_micros != trainer.accumulate_grad_batches:
            raise ConfigurationError(
                f"accumulate_grad_batches was changed from {loader.step_sampler.cut.num_micros} to "
                f"{trainer.accumulate_grad_batches} within an epoch, whose steps are cut already: change it in "
                "on_train_epoch_start, or use GradientAccumulationScheduler"
            )


def begin_batch(loaders: object) -> None:
    """See `StepLoader.begin_batch`, of all loaders."""
    for loader in _step_loaders(loaders):
        loader.begin_batch()


def joined_slice(loaders: object) -> StepSlice | None:
    """Return the slice of samples of a batch: that of the first loader, where a batch joins several.

    Raises:
        ConfigurationError: ranks and micro-batches take unlike shares of the loaders, so that no weight fits them all.
    """
    stepping = _step_loaders(loaders)
    if len(stepping) > 1:
        _require_common_weight([loader.step_sampler for loader in stepping])
    return stepping[0].current if stepping else None


def first_sampler(loaders: object) -> StepSampler | None:
    """Return the sampler of the first training loader that has a position; None if none has."""
    return next((loader.step_sampler for loader in _step_loaders(loaders)), None)


def samples_of(batch: StepSlice | None, loaders: object) -> str:
    """Return the samples of a slice of the first loader as the end of a sentence; empty if they are not known."""
    sampler = first_sampler(loaders)
    if batch is None or sampler is None:
        return ""
    indices = sampler.indices_of(batch)
    shown = ", ".join(map(str, indices[:_MOST_SHOWN]))
    return f" (samples {shown}{' ...' if len(indices) > _MOST_SHOWN else ''} of the data set)"


def _require_common_weight(samplers: Sequence[StepSampler]) -> None:
    parts = max(sampler.cut.world_size * sampler.cut.num_micros for sampler in samplers)
    lengths = sorted({(sampler.cut.global_batch_size, sampler.epoch_size) for sampler in samplers})
    are_unlike = len({batch for batch, _ in lengths}) > 1 and any(batch % parts for batch, _ in lengths)
    end_apart = parts > 1 and len(lengths) > 1 and any(epoch % batch for batch, epoch in lengths)
    if are_unlike or end_apart:
        raise ConfigurationError(
            f"joined loaders of (samples in a batch, in an epoch) {lengths} cannot be cut into {parts} parts alike, so "
            f"their losses have no common weight: use one batch size, or multiples of {parts}, and drop_last=True"
        )


def running_slice(loaders: object, index: int | None) -> StepSlice | None:
    """Return the slice of samples of the batch that a loader yielded last; None if the loader has no position.

    Args:
        index: of the loader; None: a batch joins one of each loader, see `joined_slice`.
    """
    if index is None:
        return joined_slice(loaders)
    flat = private_torch.tree_leaves(loaders)
    loader = flat[index] if index < len(flat) else None
    return loader.current if isinstance(loader, StepLoader) else None
