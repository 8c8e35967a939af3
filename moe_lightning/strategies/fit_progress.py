"""How far a fit is: the state of Lightning's loops, schedulers and loaders after a committed step, kept in memory.

Lightning goes on from such a state with the next batch. What it had still to do after the step, a validation and the
end of an epoch, `finish_step` does first.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl

from moe_lightning import seams
from moe_lightning.data.loader import StepLoader, follow_schedule
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json, broadcast_object
from moe_lightning.parallel.context import World
from moe_lightning.strategies.step_data import LOADERS_KEY, loader_states

_LOOPS, _LOADERS, _CALLBACKS = "loops", "loaders", "callbacks"
_SCHEDULERS, _NEXT_SCHEDULERS = "lr_schedulers", "lr_schedulers_next_epoch"


@dataclass(frozen=True, kw_only=True)
class FitProgress:
    """The fit loop as a checkpoint of this moment would describe it.

    Attributes:
        step: optimizer steps done.
        loops: state_dict of the fit loop and its parts.
        loaders: positions of the training loaders.
        lr_schedulers: their state_dicts.
        lr_schedulers_next_epoch: the same after the end of the epoch, at which plateaus count; None before.
        validation_is_due: it follows on this step, and did not end yet.
        epoch_is_over: the step is the last one of an epoch, whose end did not come yet.
    """

    step: int
    loops: dict[str, Any]
    loaders: list[dict[str, Any]]
    lr_schedulers: list[dict[str, Any]]
    lr_schedulers_next_epoch: list[dict[str, Any]] | None = None
    validation_is_due: bool = False
    epoch_is_over: bool = False

    @classmethod
    def of(cls, trainer: pl.Trainer, *, after_step: bool) -> FitProgress:
        """Of a trainer in `on_train_batch_end` after an optimizer step, or in `on_train_start`."""
        loop = trainer.fit_loop
        return cls(
            validation_is_due=after_step and seams.is_validation_due(trainer),
            epoch_is_over=after_step and loop.epoch_loop.batch_progress.is_last_batch,
            step=trainer.global_step,
            loops=copy.deepcopy(loop.state_dict()),
            loaders=loader_states(trainer.train_dataloader),
            lr_schedulers=_schedulers(trainer),
        )

    def after_epoch(self, trainer: pl.Trainer) -> FitProgress:
        """Of the same step, in `on_train_epoch_start` of the next epoch."""
        return replace(self, epoch_is_over=False, lr_schedulers_next_epoch=_schedulers(trainer))

    def dump(self, trainer: pl.Trainer) -> dict[str, Any]:
        """For another rank: with the live state of the callbacks; tensors and plain values."""
        return {
            "step": self.step,
            _LOOPS: self.loops,
            _LOADERS: self.loaders,
            _SCHEDULERS: self.lr_schedulers,
            _NEXT_SCHEDULERS: self.lr_schedulers_next_epoch,
            _CALLBACKS: seams.callback_states(trainer),
        }

    @classmethod
    def adopt(cls, dump: dict[str, Any], trainer: pl.Trainer, *, with_callbacks: bool) -> FitProgress:
        """Take over another rank's progress, and the state of its callbacks where this rank has none of the run."""
        if with_callbacks:
            seams.load_callbacks(trainer, dump, is_checkpoint=False)
        return cls(
            step=dump["step"],
            loops=dump[_LOOPS],
            loaders=dump[_LOADERS],
            lr_schedulers=dump[_SCHEDULERS],
            lr_schedulers_next_epoch=dump[_NEXT_SCHEDULERS],
        )

    @classmethod
    def from_checkpoint(cls, dump: dict[str, Any], trainer: pl.Trainer) -> FitProgress:
        """The progress in a checkpoint of Lightning's, with the state of the callbacks taken over; `restore` it, then
        ask for `with_dues`."""
        seams.load_callbacks(trainer, dump, is_checkpoint=True)
        return cls(
            step=dump["global_step"],
            loops=dump["loops"]["fit_loop"],
            loaders=dump[LOADERS_KEY],
            lr_schedulers=dump["lr_schedulers"],
        )

    def with_dues(self, trainer: pl.Trainer) -> FitProgress:
        """Of a trainer that was just restored to a checkpoint: what was still to be done when that was saved."""
        loop = trainer.fit_loop.epoch_loop
        batches: Any = loop.batch_progress
        if batches.total.completed == batches.total.processed:  # saved at the end of training
            return self
        is_due = not seams.validates_by_time(trainer) and seams.is_validation_due(trainer)  # clocks of ranks differ
        return replace(self, validation_is_due=is_due, epoch_is_over=batches.is_last_batch)

    def restore(self, trainer: pl.Trainer) -> None:
        """Set the fit loop back to this progress; its next run goes on from here.

        Raises:
            ConfigurationError: a training loader that has no position to go back to.
        """
        loop = trainer.fit_loop
        if trainer.validating:  # the fault came in the middle of a validation
            seams.abandon_validation(trainer)
        trainer.training = True
        loop.load_state_dict(copy.deepcopy(self.loops))
        follow_schedule(trainer)
        ended = None if self.epoch_is_over else self.lr_schedulers_next_epoch
        for config, state in zip(trainer.lr_scheduler_configs, ended or self.lr_schedulers, strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(state))
        loaders = list(seams.tree_leaves(trainer.train_dataloader))
        if not all(isinstance(loader, StepLoader) for loader in loaders):
            raise ConfigurationError(
                "in-process recovery needs training loaders that can go back to a step: return a torch DataLoader "
                "over a map-style dataset, or a StepLoader"
            )
        for loader, state in zip(loaders, self.loaders, strict=True):
            loader.load_state_dict(dict(state))
        seams.restart_loaders(trainer)


def finish_step(trainer: pl.Trainer, progress: FitProgress | None, *, with_newcomers: bool) -> None:
    """What was still to be done after the step that a fit was restored to; collective.

    Lightning itself, loaded in this place, takes both as done.

    Args:
        with_newcomers: some ranks did not see the epoch; what its steps logged is dropped then, because the ranks
            could not reduce it together.
    """
    assert progress is not None, "a recovery restored it"
    if progress.validation_is_due:
        validation = trainer.fit_loop.epoch_loop.val_loop
        validation.restarting = False
        trainer.validating = True
        validation.run()
        trainer.training = True
    if progress.epoch_is_over:
        seams.end_epoch(trainer, drop_logged=with_newcomers)


def _schedulers(trainer: pl.Trainer) -> list[dict[str, Any]]:
    return [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]


def shared_progress(
    kept: FitProgress | None, trainer: pl.Trainer, version: int, world: World, *, is_live: bool
) -> FitProgress:
    """The progress at a version, from whoever has it; collective.

    Args:
        kept: what this rank could take its fit loop back to.
        is_live: this rank's state counts.
    """
    if is_live and _step_of(kept) != version == trainer.global_step:
        # It failed between the update and the end of its step, or before its first one.
        kept = FitProgress.of(trainer, after_step=kept is not None)
    mine = [kept.step, kept.validation_is_due, kept.epoch_is_over] if is_live and kept is not None else [-1] * 3
    everyones = all_gather_json(mine, world)
    steps = [step for step, _, _ in everyones]
    if any(step != version for step in steps):
        source = steps.index(version)
        dump = kept.dump(trainer) if world.rank == source and kept is not None else None
        dump = broadcast_object(dump, source, world)
        if _step_of(kept) != version or not is_live:
            kept = FitProgress.adopt(dump, trainer, with_callbacks=not is_live)
    assert kept is not None
    # One that was further than others does again what they have still to do.
    validation, epoch = (any(entry[i] for entry in everyones if entry[0] == version) for i in (1, 2))
    return replace(kept, validation_is_due=validation, epoch_is_over=epoch)


def _step_of(kept: FitProgress | None) -> int:
    return kept.step if kept is not None else -1


def set_up_data(trainer: pl.Trainer) -> None:
    """Make all loaders that a fit will need, before its first world trains or before this process is in one: Lightning
    makes them when they are needed, with barriers, which those who have theirs do not join in."""
    loop = trainer.fit_loop
    loop.setup_data()
    if trainer.enable_validation and trainer.val_dataloaders is None:
        trainer.validating = True
        loop.epoch_loop.val_loop.setup_data()
        trainer.training = True
