"""Ctrl-C while training: whole checkpoints, all ranks after the same step, and the second one ends at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from moe_lightning import GPTModule
from moe_lightning.callbacks.full_checkpoint import LatestCheckpoint
from moe_lightning.callbacks.graceful_stop import GracefulStop
from tests.distributed.harness import run_ranks
from tests.distributed.training import TINY, RandomTokens, make_trainer


class Impatient(pl.Callback):
    """Presses Ctrl-C before some steps of one rank."""

    def __init__(self, *steps: int, rank: int = 0) -> None:
        self._steps, self._rank = steps, rank

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self._steps and trainer.global_rank == self._rank:
            os.kill(os.getpid(), signal.SIGINT)


def _fit(folder: Path, stop: GracefulStop, impatient: Impatient, *, rank: int = 0, ranks: int = 1) -> pl.Trainer:
    callbacks = [stop, impatient, LatestCheckpoint(folder, every_n_train_steps=100)]
    options = {"max_steps": 40, "log_every_n_steps": 4, "enable_checkpointing": True}
    trainer = make_trainer(rank, ranks, callbacks=callbacks, **options)
    trainer.fit(GPTModule(TINY), DataLoader(RandomTokens(96), batch_size=12))
    return trainer


def test_training_ends_after_the_step_and_is_saved(tmp_path: Path) -> None:
    before, stop = signal.getsignal(signal.SIGINT), GracefulStop()
    trainer = _fit(tmp_path, stop, Impatient(5))
    assert stop.has_stopped
    assert trainer.global_step == 6
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000006.ckpt"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    stop = GracefulStop()

    class Twice(Impatient):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            super().on_train_batch_start(trainer, *args)
            super().on_train_batch_start(trainer, *args)

    with pytest.raises(SystemExit):  # Lightning's answer to Ctrl-C
        _fit(tmp_path, stop, Twice(5))
    assert not stop.has_stopped
    assert list(tmp_path.iterdir()) == []


def test_without_a_signal_nothing_stops(tmp_path: Path) -> None:
    stop = GracefulStop()
    assert _fit(tmp_path, stop, Impatient()).global_step == 40
    assert not stop.has_stopped


def _stopped_at(rank: int, world_size: int, folder: Path) -> tuple[int, bool]:
    stop = GracefulStop()
    trainer = _fit(folder, stop, Impatient(5, rank=1), rank=rank, ranks=world_size)
    return trainer.global_step, stop.has_stopped


def test_all_ranks_end_after_the_same_step(tmp_path: Path) -> None:
    """Only one of them was asked."""
    assert run_ranks(2, _stopped_at, tmp_path) == [(8, True)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000008.ckpt"]
