"""Signals of a scheduler reach ranks at different places of a step, and act on all of them between two batches."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from moe_lightning import ExpertParallelStrategy
from tests.distributed.harness import run_ranks
from tests.distributed.training import OwnModule, RandomTokens, Recorder, make_trainer, quiet_trainer


class Requeued(LightningEnvironment, SLURMEnvironment):
    """A job of SLURM whose ranks the test has started."""

    def __init__(self) -> None:
        super().__init__()
        self.auto_requeue, self.requeue_signal = True, signal.SIGUSR1


class Signals(pl.Callback):
    """Receives a signal in a step, each rank at another place of it."""

    def __init__(self, number: signal.Signals, step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.number, self.step, self.ranks = number, step, ranks

    def receive(self, trainer: pl.Trainer, rank: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank == rank and rank in self.ranks:
            os.kill(os.getpid(), self.number)

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
        self.receive(trainer, 0)

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.receive(trainer, 1)


def train(
    rank: int, world_size: int, folder: Path, callbacks: list[pl.Callback], ckpt_path: str | None = None, **options: Any
) -> list[float]:
    recorder = Recorder()
    make_trainer(rank, world_size)  # the environment, and the seed
    os.environ |= {"SLURM_JOB_ID": "17", "PATH": f"{folder}:{os.environ['PATH']}"}
    trainer = quiet_trainer(
        strategy=ExpertParallelStrategy(timeout_s=20), plugins=[Requeued()], devices=world_size, log_every_n_steps=1,
        callbacks=[recorder, *callbacks], default_root_dir=folder, **{"max_steps": 5} | options,
    )  # fmt: skip
    trainer.fit(OwnModule(), DataLoader(RandomTokens(36), 12, shuffle=True), ckpt_path=ckpt_path)
    assert "_slurm_sigusr_handler_fn" not in vars(trainer._signal_connector)
    return recorder.losses


@pytest.mark.parametrize("step", [1, 2])
def test_a_job_is_saved_and_requeued_between_two_batches(tmp_path: Path, step: int) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    scontrol.chmod(0o755)
    whole = run_ranks(2, train, tmp_path, [Signals(signal.SIGUSR1, step)])
    assert whole[0] == whole[1]
    assert len(whole[0]) == 5
    assert (tmp_path / "called").read_text() == "requeue 17\n"
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"] == step + 1
    resumed = run_ranks(2, train, tmp_path, [], "hpc")
    assert resumed == [whole[0][step + 1 :]] * 2


def ended(rank: int, world_size: int, folder: Path, ranks: tuple[int, ...], steps: int) -> int:
    signals, recorder = Signals(signal.SIGTERM, 1, ranks), Recorder()
    with pytest.raises(SIGTERMException):
        train(rank, world_size, folder, [signals, recorder], max_steps=steps)
    return len(recorder.losses)


@pytest.mark.parametrize(("ranks", "steps"), [((0, 1), 4), ((1,), 4), ((0, 1), 2)])
def test_sigterm_ends_all_ranks_after_the_same_batch(tmp_path: Path, ranks: tuple[int, ...], steps: int) -> None:
    assert run_ranks(2, ended, tmp_path, ranks, steps) == [2, 2]
