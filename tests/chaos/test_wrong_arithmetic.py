"""A rank that computes wrong in elastic runs: its step is repeated, and if it does so twice it leaves."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest

from benchmarks.silent.products import WrongProducts
from tests.chaos.elastic_runs import assert_same_losses, elastic_run, reference
from tests.forks import PATIENCE_S
from tests.parameters import slow

STEPS = 7


class Wrong(pl.Callback):
    """Makes products of the process that is rank 1 at first wrong: all from a step on, or those of one try of it."""

    def __init__(self, folder: Path, step: int, *, always: bool) -> None:
        self._folder, self._step, self._always = folder, step, always
        self._mode = WrongProducts(np.random.default_rng(0))

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._is_wrong = trainer.global_rank == 1
        if self._is_wrong:  # it slows every operation
            self._mode.__enter__()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        mark, is_due = self._folder / "wrong", self._is_wrong and trainer.global_step >= self._step
        self._mode.number = -1 if is_due and (self._always or not mark.exists()) else None
        if is_due:
            mark.touch()

    def on_fit_end(self, *_: Any) -> None:
        if self._is_wrong:
            self._mode.__exit__(None, None, None)


def wrong(folder: Path, **options: Any) -> list[pl.Callback]:
    return [Wrong(folder, 4, **options)]


@pytest.mark.parametrize("workers", [2, slow(3)])
def test_a_step_with_a_wrong_product_is_repeated(tmp_path: Path, workers: int) -> None:
    options = {"check_arithmetic_every": 1}
    callbacks = partial(wrong, always=False)
    with elastic_run(tmp_path, workers=workers, steps=STEPS, strategy=options, callbacks=callbacks) as run:
        run.supervise()
        assert_same_losses(run, reference(STEPS))
        reports = run.reports()
        assert len(reports) == workers
        assert all(report["steps_lost"] == 0 and report["lost_ranks"] == [] for report in reports)
        assert all(report["reason"].startswith("rank 1 has computed ") for report in reports)
        assert all(report["reason"].endswith("; the step is repeated") for report in reports)


@pytest.mark.slow
def test_a_rank_that_computes_wrong_again_leaves_before_its_numbers_are_used(tmp_path: Path) -> None:
    callbacks = partial(wrong, always=True)
    options = {"check_arithmetic_every": 1}
    with elastic_run(tmp_path, workers=3, steps=STEPS, strategy=options, callbacks=callbacks) as run:
        for worker in range(3):
            run.processes[worker].join(PATIENCE_S)
        codes = [run.processes[worker].exitcode for worker in range(3)]
        assert sorted(code for code in codes if code is not None) == [0, 0, 1], run.words()
        assert "Preempted: it computed wrong 2 times" in run.words()
        assert_same_losses(run, reference(STEPS))


class KilledInCheck(pl.Callback):
    """Kills rank 1 while others wait for its element."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        check: Any = strategy.update.arithmetic_check
        exchanged = check._exchanged

        def killed(own: Any) -> Any:
            if trainer.global_step == 4 and trainer.global_rank == 1 and trainer.world_size == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return exchanged(own)

        check._exchanged = killed


def killed(folder: Path) -> list[pl.Callback]:
    return [KilledInCheck()]


@pytest.mark.slow
def test_a_kill_in_a_check_is_a_fault_like_any_other(tmp_path: Path) -> None:
    options = {"check_arithmetic_every": 1, "replicas": 2}
    with elastic_run(tmp_path, workers=3, steps=STEPS, strategy=options, callbacks=killed) as run:
        run.supervise()
        assert_same_losses(run, reference(STEPS))
        assert all(report["lost_ranks"] == [1] and report["steps_lost"] == 0 for report in run.reports())
