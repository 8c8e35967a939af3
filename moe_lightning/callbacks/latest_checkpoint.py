"""Full checkpoints named after their step, the last one at the end of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from moe_lightning.compat import private_lightning
from moe_lightning.config import PositiveInt, validated


@validated
class LatestCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint that keeps the newest `step-NNNNNNN.ckpt` files and also writes one when training
    ends.

    Args:
        dirpath: folder of the checkpoints.
        every_n_train_steps: optimizer steps between checkpoints, which are written after the batch in which a multiple
            of them is reached or passed: under manual optimization a batch may have several.
        save_top_k: 1 keeps the newest checkpoint only, -1 all of them.
    """

    def __init__(
        self, dirpath: str | Path, *, every_n_train_steps: PositiveInt = 1000, save_top_k: Literal[1, -1] = 1
    ) -> None:
        super().__init__(
            dirpath=dirpath,
            filename="step-{step:07d}",
            auto_insert_metric_name=False,
            every_n_train_steps=every_n_train_steps,
            save_top_k=save_top_k,
            enable_version_counter=False,
        )
        self._every = every_n_train_steps
        self._began_at = 0  # step before the running batch

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._began_at = trainer.global_step

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step // self._every > self._began_at // self._every:
            self._save(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if not getattr(trainer, "fast_dev_run", False):
            private_lightning.save_as_last(self, trainer)
