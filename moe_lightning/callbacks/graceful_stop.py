"""Ctrl-C and SIGTERM as a wish: training ends after a step, so that checkpoints are whole and ranks end together."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from moe_lightning import seams


class GracefulStop(Callback):
    """Takes SIGINT and SIGTERM while training runs: the ranks agree at the next logging step to stop, and callbacks
    save what they save at the end of a training. A second SIGINT ends at once; SIGTERM may come from a scheduler that
    signals the launcher as well as its ranks.

    The ranks agree every `log_every_n_steps`, one rank alone after every step: asking in between would cost a
    collective of its own in each step.

    Attributes:
        stopped_by: the signal that ended the training, with its state saved; None where none did.
    """

    def __init__(self) -> None:
        self.stopped_by: signal.Signals | None = None
        self._asked_by: signal.Signals | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stopped_by = self._asked_by = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning has set its own handlers before, and sets all back when it ends."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._ask)
            if not _is_notice(trainer):
                signal.signal(signal.SIGTERM, self._ask)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if seams.is_accumulating(trainer):
            return
        interval = trainer.log_every_n_steps if trainer.world_size > 1 else 1  # type: ignore[attr-defined]
        if trainer.global_step % max(1, interval) == 0:
            decide = trainer.strategy.reduce_boolean_decision
            if decide(self._asked_by is not None, all=False):
                is_term = decide(self._asked_by == signal.SIGTERM, all=False)
                self.stopped_by = signal.SIGTERM if is_term else signal.SIGINT
                trainer.should_stop = True

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == self._asked_by == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked_by = signal.Signals(number)


def _is_notice(trainer: pl.Trainer) -> bool:
    """Whether SIGTERM tells a rank of an elastic run to leave the others."""
    elastic = getattr(trainer.strategy, "elastic", None)
    return elastic is not None and elastic.engine.settings.notice_on_sigterm
