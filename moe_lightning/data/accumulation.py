"""Schedules of gradient accumulation.

Lightning's GradientAccumulationScheduler sets the Trainer's `accumulate_grad_batches` when an epoch begins: too late
for loaders, which are made before the first one, and not at all in an epoch that is resumed.
"""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler


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
