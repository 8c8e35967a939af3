"""Memory that changes in elastic runs: the step is repeated, or all return to what was saved before."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from moe_lightning.checkpoint.directory import damaged_after
from moe_lightning.state.tensors import local
from tests.chaos.elastic_runs import assert_same_losses, elastic_run, reference
from tests.chaos.elastic_worker import checkpoints_of
from tests.forks import PATIENCE_S
from tests.parameters import slow

STEPS = 9


class Flip(pl.Callback):
    """Flips a bit of a parameter on one rank, once for each step that is given, between steps or in one."""

    def __init__(self, folder: Path, name: str, steps: tuple[int, ...], *, in_step: bool, scope: str = "") -> None:
        self._marks, self._name, self._scope = folder, name, scope
        self._steps, self._in_step = set(steps), in_step

    def _at(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        mark = self._marks / f"flip-{trainer.global_step}"
        if trainer.global_step in self._steps and strategy.world.rank == 1 and not mark.exists():
            mark.touch()
            parameter = module.get_parameter(self._name)
            tensor = trainer.optimizers[0].state[parameter][self._scope] if self._scope else parameter
            local(tensor).data.view(torch.int32).flatten()[3] ^= 1 << 29

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if not self._in_step:
            self._at(trainer, module)

    def on_before_backward(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if self._in_step:
            self._at(trainer, module)


def flips(folder: Path, **options: Any) -> list[pl.Callback]:
    return [Flip(folder, **options)]


@pytest.mark.parametrize("in_step", [slow(False), True])
def test_of_two_copies_the_healthy_one_is_used_and_no_step_is_lost(tmp_path: Path, in_step: bool) -> None:
    name = "model.blocks.0.attention_norm.weight"
    callbacks = partial(flips, name=name, steps=(5,), in_step=in_step)
    with elastic_run(tmp_path, workers=2, steps=STEPS, strategy={"check_state_every": 1}, callbacks=callbacks) as run:
        run.supervise()
        assert (tmp_path / "flip-5").exists()
        assert_same_losses(run, reference(STEPS))
        assert all(report["steps_lost"] == 0 and report["lost_ranks"] == [] for report in run.reports())
        repeated = f"{name} was damaged on ranks [1] in the step after step 5; the step is repeated"
        assert {report["reason"] for report in run.reports()} == ({repeated} if in_step else set())


@pytest.mark.slow
def test_a_rank_that_is_damaged_twice_leaves(tmp_path: Path) -> None:
    callbacks = partial(flips, name="model.norm.weight", steps=(4, 6), in_step=False)
    with elastic_run(tmp_path, workers=3, steps=STEPS, strategy={"check_state_every": 1}, callbacks=callbacks) as run:
        for worker in range(3):
            run.processes[worker].join(PATIENCE_S)
        codes = [run.processes[worker].exitcode for worker in range(3)]
        assert sorted(code for code in codes if code is not None) == [0, 0, 1], run.words()
        assert "Preempted: its memory was damaged 2 times" in run.words()
        assert_same_losses(run, reference(STEPS))
        assert all(report["ranks_after"] == 2 and report["steps_lost"] == 0 for report in run.reports())


class KilledWhenFound(pl.Callback):
    """Every rank is killed before it can mark what was saved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        def die(*_: Any) -> None:
            (self._folder / f"kill-{trainer.global_rank}").write_text(str(trainer.global_step))
            os.kill(os.getpid(), signal.SIGKILL)

        trainer.strategy.update.state_check._error = die  # type: ignore[attr-defined]


def flipped_and_killed(folder: Path) -> list[pl.Callback]:
    return [Flip(folder, "model.norm.weight", (5,), in_step=False), KilledWhenFound(folder)]


@pytest.mark.slow
def test_damage_is_not_saved_where_the_run_is_killed_before_its_next_check(tmp_path: Path) -> None:
    with elastic_run(
        tmp_path, workers=2, steps=STEPS, strategy={"check_state_every": 100}, callbacks=flipped_and_killed,
        recovery={"min_replicas": 1, "protection": "none"}, saving={"every_n_steps": 2},
    ) as run:  # fmt: skip
        run.supervise(restart=range(2), together=True)
        assert [(tmp_path / f"kill-{rank}").read_text() for rank in range(2)] == ["5", "5"], "its save finds it"
        assert damaged_after(checkpoints_of(tmp_path)) == {}
        assert_same_losses(run, reference(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "name", "in_step"),
    [
        ({}, "model.blocks.0.feed_forward.experts.w_up", False),
        slow({}, "model.blocks.0.feed_forward.experts.w_up", True),
        slow({"dense": "fsdp"}, "model.blocks.0.attention_norm.weight", False),
    ],
)
def test_what_one_rank_alone_held_comes_from_the_snapshot_before(
    tmp_path: Path, strategy: dict[str, Any], name: str, in_step: bool
) -> None:
    callbacks = partial(flips, name=name, steps=(7,), in_step=in_step)
    options: dict[str, Any] = {"recovery": {"min_replicas": 1, "protection": "none"}, "saving": {"every_n_steps": 2}}
    with elastic_run(
        tmp_path, workers=2, steps=STEPS, strategy={"check_state_every": 1, "replicas": 1, **strategy},
        callbacks=callbacks, **options,
    ) as run:  # fmt: skip
        run.supervise()
        assert (tmp_path / "flip-7").exists()
        reports = run.reports()
        assert len(reports) == 2
        assert all("has changed in the memory of rank 1" in report["reason"] for report in reports)
        assert all(0 < report["step"] < 7 and report["lost_ranks"] == [] for report in reports), "7 was damaged"
        assert list(damaged_after(checkpoints_of(tmp_path)).values()) == [6]
        assert_same_losses(run, reference(STEPS))
