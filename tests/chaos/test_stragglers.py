"""Slow ranks in elastic runs: they are followed through kills, and leave where the run says so."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from moe_lightning.callbacks import speeds
from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.strategies.elastic_worlds import ElasticWorlds
from tests.chaos.elastic_runs import SETTINGS, Hold, Kill, assert_same_losses, elastic_run, reference
from tests.distributed.test_uneven_ranks import TestClock
from tests.forks import PATIENCE_S
from tests.parameters import slow

STEPS, SLOW = 31, 2
PLAIN = {"calibrate": False, "flops_per_s": 1e9, "bytes_per_s": 1e9}


class SlowWorker(pl.Callback):
    """Worker 2 takes two and a half times as long for everything, on a clock of the test."""

    def __init__(self, folder: Path) -> None:
        self._path = folder

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if isinstance(trainer.strategy.elastic, ElasticWorlds):
            TestClock.rank = trainer.strategy.elastic.engine.task.slot
        TestClock.slow = {SLOW: (2.5, 0, 10**9)}
        speeds.RankClock = TestClock  # type: ignore[misc]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        samples = trainer.strategy.steps.stream.num_samples  # type: ignore[attr-defined]
        with (self._path / f"samples-{TestClock.rank}.txt").open("a") as file:
            file.write(f"{samples}\n")


def slow_worker(folder: Path, stragglers: str = "adapt") -> list[Any]:
    return [SlowWorker(folder), LoadBalancer(**PLAIN, stragglers=stragglers)]  # type: ignore[arg-type]


def samples_of(folder: Path, worker: int) -> list[int]:
    return [int(line) for line in (folder / f"samples-{worker}.txt").read_text().split()]


@pytest.mark.slow
def test_a_slow_rank_is_followed_through_a_kill(tmp_path: Path) -> None:
    kills = [Kill(worker=1, step=20, place="backward")]
    options: dict[str, Any] = {"kills": kills, "holds": [Hold(step=23, ranks=3)], "strategy": {"slots": 6}}
    with elastic_run(tmp_path, workers=3, steps=STEPS, callbacks=slow_worker, **options) as run:
        run.supervise(restart=range(3))
        assert run.kills_done() == 1
        assert_same_losses(run, reference(STEPS), has_replicas=True)
        slow = samples_of(tmp_path, SLOW)
        assert slow[0] == 4
        assert slow[18] == slow[-1] == 2


@pytest.mark.parametrize("min_ranks", [1, slow(3)])
def test_a_straggler_hands_over_and_leaves_unless_too_few_would_be_left(tmp_path: Path, min_ranks: int) -> None:
    with elastic_run(
        tmp_path,
        workers=3,
        steps=STEPS,
        settings=replace(SETTINGS, min_ranks=min_ranks),
        recovery={"min_replicas": 1},
        strategy={"slots": 6},
        callbacks=partial(slow_worker, stragglers="evict"),
    ) as run:
        for worker in range(3):
            run.processes[worker].join(PATIENCE_S)
        assert run.processes[0].exitcode == run.processes[1].exitcode == 0
        assert_same_losses(run, reference(STEPS))
        if min_ranks == 3:
            assert run.processes[SLOW].exitcode == 0
            assert not run.reports()
            return
        assert "of the median rank's speed for 20 steps" in (tmp_path / f"error-{SLOW}.txt").read_text()
        report = run.result(0)["reports"][0]
        assert (report["ranks_before"], report["ranks_after"], report["steps_lost"]) == (3, 2, 0)
        assert report["restored"] == "12 experts from replicas, 0 stale"
