"""Ctrl-C and SIGTERM while training: whole checkpoints, all ranks after the same step, a second Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from moe_lightning import GPTModule
from moe_lightning.callbacks.latest_checkpoint import LatestCheckpoint
from moe_lightning.cli import training
from moe_lightning.cli.training import GracefulStop
from tests.distributed.harness import run_ranks
from tests.distributed.training import TINY, RandomTokens, make_trainer


class Impatient(pl.Callback):
    """Presses Ctrl-C before some steps of one rank, or sends other signals."""

    def __init__(self, *steps: int, rank: int = 0, signals: Sequence[signal.Signals] = (signal.SIGINT,)) -> None:
        self._steps, self._rank, self._signals = steps, rank, signals

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self._steps and trainer.global_rank == self._rank:
            for number in self._signals:
                os.kill(os.getpid(), number)


def _fit(folder: Path, stop: GracefulStop, impatient: Impatient, *, rank: int = 0, ranks: int = 1) -> pl.Trainer:
    callbacks = [stop, impatient, LatestCheckpoint(folder, every_n_train_steps=100)]
    options = {"max_steps": 12, "log_every_n_steps": 4, "enable_checkpointing": True}
    trainer = make_trainer(rank, ranks, callbacks=callbacks, **options)
    trainer.fit(GPTModule(TINY), DataLoader(RandomTokens(96), batch_size=12))
    return trainer


@pytest.mark.parametrize(
    ("signals", "stopped_by"),
    [
        ([signal.SIGINT], signal.SIGINT),
        ([signal.SIGINT, signal.SIGINT], signal.SIGINT),  # a scheduler's to all, and that of the launcher
        ([signal.SIGTERM], signal.SIGTERM),
        ([signal.SIGTERM, signal.SIGTERM], signal.SIGTERM),
        ([signal.SIGTERM, signal.SIGINT], signal.SIGINT),  # as above
        ([signal.SIGINT, signal.SIGTERM], signal.SIGTERM),
    ],
)
def test_training_ends_after_the_step_and_is_saved(
    tmp_path: Path, signals: list[signal.Signals], stopped_by: signal.Signals
) -> None:
    before, stop = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], GracefulStop()
    trainer = _fit(tmp_path, stop, Impatient(5, signals=signals))
    assert stop.stopped_by == stopped_by
    assert trainer.global_step == 6
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000006.ckpt"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_stop_does_not_wait_for_validation(tmp_path: Path) -> None:
    validated: list[int] = []
    count = pl.callbacks.LambdaCallback(on_validation_start=lambda trainer, _: validated.append(trainer.global_step))
    callbacks = [GracefulStop(), Impatient(5), count, LatestCheckpoint(tmp_path, every_n_train_steps=100)]
    trainer = make_trainer(0, 1, callbacks=callbacks, max_steps=12, enable_checkpointing=True, val_check_interval=4)
    loaders = [DataLoader(RandomTokens(96), batch_size=12) for _ in range(2)]
    trainer.fit(GPTModule(TINY), *loaders)
    assert trainer.global_step == 6
    assert validated == [4]
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000006.ckpt"]


@pytest.mark.parametrize("step", [3, 9])
def test_a_stop_within_an_epoch_is_not_judged_by_the_validation_before_it(tmp_path: Path, step: int) -> None:
    """In the first epoch there is none, and the callbacks would raise an error before anything is saved."""
    judge, best = EarlyStopping("val/loss"), ModelCheckpoint(tmp_path / "best", monitor="val/loss", save_top_k=-1)
    saver = LatestCheckpoint(tmp_path, every_n_train_steps=100)
    callbacks = [GracefulStop(), Impatient(step), judge, best, saver]
    trainer = make_trainer(0, 1, callbacks=callbacks, max_epochs=3, enable_checkpointing=True)
    trainer.fit(GPTModule(TINY), *(DataLoader(RandomTokens(96), batch_size=12) for _ in range(2)))
    assert trainer.global_step == step + 1
    assert judge.wait_count == 0
    assert len(best.best_k_models) == step // 8
    assert [path.name for path in tmp_path.glob("*.ckpt")] == [f"step-{step + 1:07d}.ckpt"]


@pytest.mark.parametrize("least", [{"min_steps": 10}, {"min_epochs": 2}])
def test_a_stop_does_not_wait_for_the_least_training(tmp_path: Path, least: dict[str, int]) -> None:
    callbacks = [GracefulStop(), Impatient(5, signals=[signal.SIGTERM])]
    trainer = make_trainer(0, 1, callbacks=callbacks, max_steps=12, **least)
    trainer.fit(GPTModule(TINY), DataLoader(RandomTokens(96), batch_size=12))
    assert trainer.global_step == 6


class TwoOptimizers(pl.LightningModule):
    """The second one begins in the second batch: `global_step` stays odd from then on."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for layer, optimizer in list(zip(self.layers, optimizers, strict=True))[: batch_idx + 1]:
            optimizer.zero_grad()
            self.manual_backward(layer(batch[0] / 64).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in self.layers]


def test_steps_that_pass_over_all_multiples_are_saved_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pl.Trainer, "world_size", 2)  # then it asks in logging steps only
    callbacks = [GracefulStop(), Impatient(9), LatestCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)]
    trainer = make_trainer(0, 1, callbacks=callbacks, max_steps=60, log_every_n_steps=4, enable_checkpointing=True)
    trainer.fit(TwoOptimizers(), DataLoader(RandomTokens(384), batch_size=12))
    assert trainer.global_step == 15  # after eight batches
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:07d}.ckpt" for step in (5, 9, 13, 15)]


def test_a_second_signal_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_ONE_REQUEST_S", 0.0)
    stop = GracefulStop()
    with pytest.raises(SystemExit):  # Lightning's answer to Ctrl-C
        _fit(tmp_path, stop, Impatient(5, signals=[signal.SIGINT] * 2))
    assert stop.stopped_by is None
    assert list(tmp_path.iterdir()) == []


def test_without_a_signal_nothing_stops(tmp_path: Path) -> None:
    stop = GracefulStop()
    assert _fit(tmp_path, stop, Impatient()).global_step == 12
    assert stop.stopped_by is None


def _stopped_at(rank: int, world_size: int, folder: Path) -> tuple[int, signal.Signals | None]:
    stop = GracefulStop()
    trainer = _fit(folder, stop, Impatient(5, rank=1, signals=[signal.SIGTERM]), rank=rank, ranks=world_size)
    return trainer.global_step, stop.stopped_by


def test_all_ranks_end_after_the_same_step(tmp_path: Path) -> None:
    """Only one of them was asked."""
    assert run_ranks(2, _stopped_at, tmp_path) == [(8, signal.SIGTERM)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000008.ckpt"]


@pytest.mark.parametrize("stopped_by", [None, signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_joins_after_the_others_agreed_learns_their_signal(stopped_by: signal.Signals | None) -> None:
    ranks, decisions = [GracefulStop(), GracefulStop()], list[bool]()
    ranks[0].stopped_by = stopped_by

    def decide(decision: bool, *, all: bool) -> bool:
        decisions.append(decision)
        return decision

    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(reduce_boolean_decision=decide))
    ranks[0].on_train_end(trainer, trainer)
    of_others = iter(decisions)
    trainer.strategy.reduce_boolean_decision = lambda decision, all: next(of_others) or decision
    ranks[1].on_train_end(trainer, trainer)
    assert [stop.stopped_by for stop in ranks] == [stopped_by, stopped_by]
