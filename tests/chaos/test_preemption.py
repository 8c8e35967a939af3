"""A rank that is told to leave hands over what only it holds, and the others go on without losing a step."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.strategies.elastic_worlds import ElasticWorlds
from tests.chaos.elastic_runs import SETTINGS, Hold, Kill, assert_same_losses, elastic_run, finish, reference
from tests.chaos.elastic_worker import checkpoints_of
from tests.chaos.test_min_ranks import wait_for_recovery
from tests.forks import PATIENCE_S, wait_until
from tests.parameters import slow

STEPS = 8
NOTICE = Kill(worker=1, step=3, place="forward", signal=signal.SIGTERM)
_SLOW_S = 0.5


class SlowToLeave(pl.Callback):
    """The last exchange of worker 1 returns late, and fails where the world breaks meanwhile, as gloo's would."""

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        elastic, experts = trainer.strategy.elastic, trainer.strategy.experts
        assert isinstance(elastic, ElasticWorlds)
        engine, inner = elastic.engine, experts.enter_world
        if engine.task.slot != 1:
            return

        def late(*arguments: Any) -> None:
            inner(*arguments)
            deadline = time.monotonic() + _SLOW_S
            while time.monotonic() < deadline:
                if engine.reason is not None:
                    raise RuntimeError("gloo: connection closed by peer")
                time.sleep(0.01)

        experts.enter_world = late  # type: ignore[method-assign]


def slow_to_leave(folder: Path) -> list[Any]:
    return [SlowToLeave()]


@pytest.mark.parametrize("dense", [slow("ddp"), "zero1", slow("fsdp")])
def test_sigterm_as_a_notice_hands_over_and_leaves(tmp_path: Path, dense: str) -> None:
    """Nothing was saved, and nothing is lost."""
    with elastic_run(
        tmp_path,
        workers=3,
        steps=STEPS,
        strategy={"dense": dense},
        settings=replace(SETTINGS, notice_on_sigterm=True),
        recovery={"min_replicas": 1},
        callbacks=slow_to_leave,
        kills=[NOTICE],
    ) as run:
        for worker in range(3):
            run.processes[worker].join(PATIENCE_S)
        assert run.processes[0].exitcode == run.processes[2].exitcode == 0
        assert "SIGTERM asks this process to leave" in (tmp_path / "error-1.txt").read_text()
        report = run.result(0)["reports"][0]
        assert (report["ranks_before"], report["ranks_after"], report["steps_lost"]) == (3, 2, 0)
        assert report["restored"] == "12 experts from replicas, 0 stale"
        assert_same_losses(run, reference(STEPS))


def test_ranks_that_leave_and_join_do_not_count_as_faults(tmp_path: Path) -> None:
    with elastic_run(
        tmp_path,
        workers=2,
        steps=STEPS,
        settings=replace(SETTINGS, notice_on_sigterm=True),
        recovery={"min_replicas": 1, "max_recoveries": 1},
        kills=[NOTICE],
        holds=[Hold(step=6, ranks=2)],
    ) as run:
        run.processes[1].join(PATIENCE_S)
        run.wait_for_step(5)  # alone
        run.start(1)
        finish(run, range(2))
        assert [report["ranks_after"] for report in run.result(0)["reports"]] == [1, 2]


def test_ranks_save_before_all_of_them_leave(tmp_path: Path) -> None:
    """The end of an allocation: no snapshot was due yet, and the next start goes on from the last step."""
    with elastic_run(
        tmp_path,
        workers=2,
        steps=STEPS,
        settings=replace(SETTINGS, notice_on_sigterm=True),
        saving={"every_n_steps": 1000},
        kills=[NOTICE, replace(NOTICE, worker=0)],
    ) as run:
        for worker in range(2):
            run.processes[worker].join(PATIENCE_S)
            assert "SIGTERM asks this process to leave" in (tmp_path / f"error-{worker}.txt").read_text()
        last = max(run.losses())
        assert 3 <= last < STEPS
        assert checkpoints(checkpoints_of(tmp_path))[0][1].step == last
        for worker in range(2):
            run.start(worker)
        finish(run, range(2))
        assert run.reports()[0]["step"] == last
        assert_same_losses(run, reference(STEPS))


def test_ranks_that_wait_for_others_save_with_one_that_has_just_joined(tmp_path: Path) -> None:
    """Its loop has not run yet."""
    with elastic_run(
        tmp_path,
        workers=3,
        steps=STEPS,
        settings=replace(SETTINGS, notice_on_sigterm=True, min_ranks=3),
        saving={"every_n_steps": 1000},
        recovery={"min_replicas": 3},
        kills=[Kill(worker=worker, step=2, place="forward") for worker in (1, 2)],
    ) as run:
        wait_for_recovery(run, 0, ranks=1)
        run.start(1)
        wait_until(lambda: run.has_joined(1), run.words)
        for worker in range(2):
            run.signal(worker, signal.SIGTERM)
        for worker in range(2):
            run.processes[worker].join(PATIENCE_S)
            assert "SIGTERM asks this process to leave" in (tmp_path / f"error-{worker}.txt").read_text()
        assert checkpoints(checkpoints_of(tmp_path))[0][1].step == max(run.losses()) == 2
