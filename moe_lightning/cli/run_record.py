"""What a run is recorded as once it trains: its configuration in the run directory and in the loggers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from moe_lightning.callbacks.wandb_logger import QuietWandbLogger
from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.data.text import TextData

_LOGGED = ("run_name", "seed", "ranks", "task", "data", "strategy", "trainer", "callbacks", "elastic")
"""Beside the model and the optimizer, which the module logs."""


class RunRecord(Callback):
    """Records the configuration when training starts: a command that fails before leaves the former one, and no empty
    run in a logger.

    Args:
        directory: of the run.
        config: as composed.
    """

    def __init__(self, directory: RunDirectory, config: Mapping[str, Any]) -> None:
        self._directory = directory
        self._config = config

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self._directory.record(self._config)
            data = getattr(trainer, "datamodule", None)
            if isinstance(data, TextData) and data.trained_tokenizer is not None:
                self._directory.keep_tokenizer(data.trained_tokenizer)
            self._directory.metrics.unlink(missing_ok=True)  # of an earlier training
        for logger in trainer.loggers:
            logger.log_hyperparams({name: self._config[name] for name in _LOGGED})
            if isinstance(logger, QuietWandbLogger) and trainer.ckpt_path:
                logger.resume_from(Path(trainer.ckpt_path), trainer.global_step)


class ResumedWithOverrides(Callback):
    """Gives the optimizer of a resumed run the values of the configuration in place of the checkpoint's: learning
    rate, betas, weight decay, each where the schedule is. Its state stays.
    """

    def __init__(self) -> None:
        self._given: list[list[dict[str, Any]]] = []

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The optimizers are new here: Lightning restores their states afterwards."""
        self._given = [
            [{name: group[name] for name in _options(optimizer) & group.keys()} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._apply(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A recovery from storage may bring the checkpoint's values back between two steps."""
        self._apply(trainer)

    def _apply(self, trainer: pl.Trainer) -> None:
        for optimizer, given in zip(trainer.optimizers, self._given, strict=True):
            for group, values in zip(optimizer.param_groups, given, strict=True):
                group.update(values, lr=values.get("initial_lr", values["lr"]))
        for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs):
            if isinstance(scheduler, LambdaLR):
                groups = scheduler.optimizer.param_groups
                scheduler.base_lrs = [group["lr"] for group in groups]
                for group, share in zip(groups, scheduler.lr_lambdas, strict=True):
                    group["lr"] *= share(scheduler.last_epoch)


def _options(optimizer: torch.optim.Optimizer) -> set[str]:
    """What a group may be configured with; the rest is counted in training."""
    return {"initial_lr", *inspect.signature(type(optimizer)).parameters} - {"params"}
