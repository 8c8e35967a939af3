"""How far a fit is: the state of Lightning's loops, schedulers and loaders after a committed step, kept in memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer import call
from torch.utils import _pytree as pytree

from moe_lightning.data.step_loader import StepLoader
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.checkpointing import LOADERS_KEY
from moe_lightning.strategies.step_data import loader_states

_LOOPS, _LOADERS, _SCHEDULERS, _CALLBACKS = "loops", "loaders", "lr_schedulers", "callbacks"


@dataclass(frozen=True, kw_only=True)
class FitProgress:
    """The fit loop as a checkpoint of this moment would describe it.

    Attributes:
        step: optimizer steps done.
        loops: state_dict of the fit loop and its parts.
        loaders: positions of the training loaders.
        lr_schedulers: their state_dicts.
    """

    step: int
    loops: dict[str, Any]
    loaders: list[dict[str, Any]]
    lr_schedulers: list[dict[str, Any]]

    @classmethod
    def of(cls, trainer: pl.Trainer) -> FitProgress:
        """Of a trainer in `on_train_start` or `on_train_batch_end`."""
        return cls(
            step=trainer.global_step,
            loops=copy.deepcopy(trainer.fit_loop.state_dict()),
            loaders=loader_states(trainer.train_dataloader),
            lr_schedulers=[copy.deepcopy(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
        )

    def dump(self, trainer: pl.Trainer) -> dict[str, Any]:
        """For another rank: with the live state of the callbacks; tensors and plain values."""
        return {
            "step": self.step,
            _LOOPS: self.loops,
            _LOADERS: self.loaders,
            _SCHEDULERS: self.lr_schedulers,
            _CALLBACKS: call._call_callbacks_state_dict(trainer),
        }

    @classmethod
    def adopt(cls, dump: dict[str, Any], trainer: pl.Trainer, *, with_callbacks: bool) -> FitProgress:
        """Take over another rank's progress, and the state of its callbacks where this rank has none of the run."""
        if with_callbacks:
            call._call_callbacks_load_state_dict(trainer, dump)
        return cls(step=dump["step"], loops=dump[_LOOPS], loaders=dump[_LOADERS], lr_schedulers=dump[_SCHEDULERS])

    @classmethod
    def from_checkpoint(cls, dump: dict[str, Any], trainer: pl.Trainer) -> FitProgress:
        """The progress in a checkpoint of Lightning's, with the state of the callbacks taken over."""
        call._call_callbacks_on_load_checkpoint(trainer, dump)
        call._call_callbacks_load_state_dict(trainer, dump)
        return cls(
            step=dump["global_step"],
            loops=dump["loops"]["fit_loop"],
            loaders=dump[LOADERS_KEY],
            lr_schedulers=dump["lr_schedulers"],
        )

    def restore(self, trainer: pl.Trainer) -> None:
        """Set the fit loop back to this progress; its next run goes on from here.

        Raises:
            ConfigurationError: a training loader that has no position to go back to.
        """
        loop = trainer.fit_loop
        if trainer.validating:  # the fault came in the middle of a validation
            loop.epoch_loop.val_loop._on_evaluation_model_train()
        trainer.training = True
        loop.load_state_dict(copy.deepcopy(self.loops))
        for config, state in zip(trainer.lr_scheduler_configs, self.lr_schedulers, strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(state))
        loaders = list(pytree.tree_leaves(trainer.train_dataloader))
        if not all(isinstance(loader, StepLoader) for loader in loaders):
            raise ConfigurationError(
                "in-process recovery needs training loaders that can go back to a step: return a torch DataLoader "
                "over a map-style dataset, or a StepLoader"
            )
        for loader, state in zip(loaders, self.loaders, strict=True):
            loader.load_state_dict(dict(state))
        if loop._data_fetcher is not None:
            iter(loop._data_fetcher)
