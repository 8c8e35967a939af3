"""Ctrl-C as a wish: training ends after a step, so that checkpoints are whole and the ranks end together."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from moe_lightning.strategies import seams


class GracefulStop(Callback):
    """Takes SIGINT while training runs: the ranks agree at the next logging step to stop, and callbacks save what they
    save at the end of a training. A second signal ends at once.

    The ranks agree every `log_every_n_steps`, one rank alone after every step: asking in between would cost a
    collective of its own in each step.

    Attributes:
        has_stopped: training was ended by a signal, with its state saved.
    """

    def __init__(self) -> None:
        self.has_stopped = False
        self._is_asked = False
        self._former: Any = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.has_stopped = self._is_asked = False
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGINT, self._ask)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if seams.is_accumulating(trainer):
            return
        interval = trainer.log_every_n_steps if trainer.world_size > 1 else 1  # type: ignore[attr-defined]
        if trainer.global_step % max(1, interval) == 0:
            self.has_stopped = trainer.strategy.reduce_boolean_decision(self._is_asked, all=False)
            trainer.should_stop |= self.has_stopped

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)
            self._former = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked:
            raise KeyboardInterrupt
        self._is_asked = True
