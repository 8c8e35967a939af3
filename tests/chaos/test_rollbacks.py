"""Rollbacks of SpikeGuard in elastic runs: whichever rank is killed when, all others make one or none."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor

from moe_lightning.callbacks import spike_guard
from moe_lightning.callbacks.spike_guard import SpikeGuard
from tests.chaos.elastic_runs import Kill, elastic_run, reference
from tests.parameters import slow

STEPS, EVERY, SPIKE = 15, 3, 12
"""Steps; between copies; done before the step that spikes."""
COPY = SPIKE - EVERY


class Spiky(pl.Callback):
    """Multiplies the loss of some steps, but for what is logged."""

    def __init__(self, factors: dict[int, float]) -> None:
        self._factors = factors

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        own: Any = module.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs) * self._factors.get(trainer.global_step, 1.0)

        module.training_step = training_step  # type: ignore[method-assign]


class KilledWithin(pl.Callback):
    """Rank 0 is killed when it has restored one tensor."""

    def __init__(self, folder: Path) -> None:
        self._mark = folder / "kill-within"

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank != 0:
            return

        def install(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
            tensor, values = next(iter(pairs))
            tensor.copy_(values)
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        spike_guard.install = install  # type: ignore[attr-defined]


def left_out(folder: Path, first: int) -> list[Any]:
    return [Spiky(dict.fromkeys(range(first, SPIKE + 1), float("nan")))]


def guarded(folder: Path, *, within: bool = False) -> list[Any]:
    guard = SpikeGuard(every_n_steps=EVERY, path=str(folder / "spikes.csv"))
    return [Spiky({SPIKE: 50.0}), guard, *[KilledWithin(folder)] * within]


@pytest.mark.parametrize(
    ("place", "step", "rank", "restored"),
    [
        slow("backward", COPY, 1, {COPY}),  # the losses before are known after the recovery
        slow("backward", SPIKE, 0, {SPIKE}),  # before the spike is found: the copies are of other rows by then
        slow("prepare", SPIKE, 1, {SPIKE}),  # before all ranks know of it
        slow("update", SPIKE, 1, {COPY, SPIKE}),  # when this rank knows that all do, and others perhaps
        ("within", SPIKE, 0, {COPY, SPIKE}),
        slow("committed", SPIKE, 0, {COPY, SPIKE}),
        slow("backward", SPIKE + 1, 0, {COPY}),
    ],
)
def test_a_rollback_outlives_a_rank(place: str, step: int, rank: int, restored: set[int], tmp_path: Path) -> None:
    found = rolled_back(tmp_path, place, step, rank)
    assert found in restored


@pytest.mark.slow
@pytest.mark.parametrize("place", ["prepare", "within", "committed"])
def test_where_only_the_lost_rank_had_the_moments_all_return_to_a_snapshot(place: str, tmp_path: Path) -> None:
    rolled_back(tmp_path, place, SPIKE, 1, strategy={"dense": "zero1"}, saving={"every_n_steps": 2})


def rolled_back(folder: Path, place: str, step: int, rank: int, **options: Any) -> int:
    """Return the step that was restored; the losses after are those of a run that has left out the updates since."""
    kills = [] if place == "within" else [Kill(worker=-1, step=step, place=place, rank=rank)]
    callbacks = partial(guarded, within=place == "within")
    with elastic_run(folder, workers=3, steps=STEPS, kills=kills, callbacks=callbacks, **options) as run:
        run.supervise()
        assert run.kills_done() == 1
        *undone, row = csv.DictReader((folder / "spikes.csv").read_text().splitlines())
        assert not undone or "saving" in options, "only a snapshot from before it undoes a rollback"
        assert int(row["step"]) == SPIKE + 1
        restored = int(row["restored_step"])
        assert len(row["samples"].split()) == 12 * (SPIKE + 1 - restored)
        expected = reference(
            STEPS, callbacks=partial(left_out, first=restored), strategy={"stop_on_nan": "skip"}
        ).training  # fmt: skip
        losses = run.losses()
        for after in range(SPIKE + 2, STEPS + 1):
            assert losses[after] == pytest.approx(expected[after], abs=1e-5)
        return restored
