"""Every hook of a committed step runs once, also where a rank dies between the update and the end of the step."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

from tests.chaos.elastic_runs import Hold, Kill, assert_same_losses, elastic_run, reference
from tests.forks import wait_until
from tests.parameters import slow


class Counting(pl.Callback):
    """Counts steps as an average of weights would, keeps the count in checkpoints, and says when it did."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.count = 0

    @property
    def state_key(self) -> str:
        return self._name

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        assert outputs is None or outputs["loss"].ndim == 0
        self.count += 1
        task = trainer.strategy.elastic.engine.task  # type: ignore[attr-defined]
        with (self._folder / f"ended-{self._name}-{task.slot}.jsonl").open("a") as file:
            file.write(json.dumps([trainer.global_step, self.count]) + "\n")


class Collective(Counting):
    """Talks to the others in its hook, as a callback that saves does."""

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        trainer.strategy.reduce_boolean_decision(True)
        super().on_train_batch_end(trainer, *arguments)


class Interrupted(pl.Callback):
    """Lets worker 2 hear of a death in the barrier before an update that another survivor makes."""

    step = 5

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        elastic = trainer.strategy.elastic  # type: ignore[attr-defined]
        inner = elastic.prepare

        def prepare(optimizer: Any) -> None:
            inner(optimizer)
            if trainer.global_step != self.step or elastic.step.version != self.step or elastic.engine.task.slot != 2:
                return
            wait_until(lambda: elastic.engine.reason is not None)
            raise ConnectionError("connection closed by a peer")

        elastic.prepare = prepare


def counters_and_interruption(folder: Path) -> list[Any]:
    return [*counters(folder), Interrupted()]


def counters(folder: Path) -> list[Any]:
    return [Counting(folder, "first"), Collective(folder, "collective"), Counting(folder, "last")]


def ended(folder: Path, name: str, worker: int) -> list[list[int]]:
    path = folder / f"ended-{name}-{worker}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("workers", "steps", "strategy"),
    [(2, 9, {}), slow(3, 18, {}), slow(4, 18, {"dense": "hsdp", "shard_size": 2})],
)
def test_hooks_of_a_committed_step_run_once(workers: int, steps: int, strategy: dict[str, Any], tmp_path: Path) -> None:
    places = ((3, "update"), (7, "committed"), (11, "update"), (15, "committed"))[: steps // 4]
    kills = [Kill(worker=1, step=step, place=place) for step, place in places]
    holds = [Hold(step=step, ranks=workers) for step in (6, 10, 14)[: steps // 4 - 1]]
    options: dict[str, Any] = {"kills": kills, "holds": holds, "strategy": strategy, "callbacks": counters}
    logger = CSVLogger(tmp_path / "csv", flush_logs_every_n_steps=1)
    options["trainer_options"] = {"logger": logger}
    with elastic_run(tmp_path, workers=workers, steps=steps, **options) as run:
        run.supervise(restart=range(workers))
        assert run.kills_done() == len(kills)
        assert_same_losses(run, reference(steps))
        assert_each_once(tmp_path, workers, steps, lost=1)
    assert logged_steps(tmp_path / "csv") == list(range(steps))


def logged_steps(folder: Path) -> list[int]:
    """The steps whose loss is in a file of the CSV loggers of all processes, ascending."""
    rows = [row for path in folder.rglob("metrics.csv") for row in csv.DictReader(path.open())]
    return sorted(int(row["step"]) for row in rows if row["train/loss"])


class OfRankZero(pl.Callback):
    """Writes on the logging rank only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @rank_zero_only
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        with (self._folder / "of-rank-zero").open("a") as file:
            file.write(f"{trainer.global_step}\n")


def of_rank_zero(folder: Path) -> list[Any]:
    return [OfRankZero(folder), Counting(folder, "last")]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "place"), [(2, "committed"), slow(2, "update"), slow(3, "batch_end")])
def test_who_takes_the_place_of_the_logging_rank_logs_its_last_step(workers: int, place: str, tmp_path: Path) -> None:
    """The killed rank 0 has made the update and not logged it; its successor has ended the step as another rank."""
    kills = [Kill(worker=0, step=3, place=place), Kill(worker=1, step=8, place=place)]  # an epoch has 8 steps
    options: dict[str, Any] = {"kills": kills, "holds": [Hold(step=6, ranks=workers)], "callbacks": of_rank_zero}
    options["trainer_options"] = {"logger": CSVLogger(tmp_path / "csv", flush_logs_every_n_steps=1)}
    with elastic_run(tmp_path, workers=workers, steps=11, **options) as run:
        run.supervise(restart=range(workers))
        assert run.kills_done() == len(kills)
        assert_same_losses(run, reference(11))
    assert logged_steps(tmp_path / "csv") == list(range(11))
    assert sorted(map(int, (tmp_path / "of-rank-zero").read_text().split())) == list(range(1, 12))


def test_a_row_of_the_log_outlives_the_end_of_its_epoch(tmp_path: Path) -> None:
    """Rank 0 dies before it has logged the last step of an epoch, which its successor has ended by then."""
    options: dict[str, Any] = {"kills": [Kill(worker=0, rank=0, step=8, place="batch_end")]}
    options["trainer_options"] = {"logger": CSVLogger(tmp_path / "csv", flush_logs_every_n_steps=1)}
    with elastic_run(tmp_path, workers=2, steps=9, **options) as run:
        run.supervise()
        assert run.kills_done() == 1
        assert_same_losses(run, reference(9))
    assert logged_steps(tmp_path / "csv") == list(range(9))


def test_a_fault_in_a_validation_logs_no_step_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kills": [Kill(worker=1, step=8, place="validation", visit=2)], "validate": True}
    options["trainer_options"] = {"logger": CSVLogger(tmp_path / "csv", flush_logs_every_n_steps=1)}
    with elastic_run(tmp_path, workers=2, steps=9, **options) as run:
        run.supervise()
        assert run.kills_done() == 1
    assert logged_steps(tmp_path / "csv") == list(range(9))


def assert_each_once(folder: Path, workers: int, steps: int, *, lost: int) -> None:
    """Every worker that was there throughout has ended every step once, and nobody has counted one twice."""
    for name in ("first", "collective", "last"):
        for worker in range(workers):
            lines = ended(folder, name, worker)
            assert all(step == count for step, count in lines), (name, worker, lines)
            made = [step for step, _ in lines]
            wanted = sorted(set(made)) if worker == lost else list(range(1, steps + 1))
            assert made == wanted, (name, worker, made)


@pytest.mark.slow
def test_who_makes_up_for_an_update_ends_its_step(tmp_path: Path) -> None:
    kills = [Kill(worker=1, step=Interrupted.step, place="update")]
    options: dict[str, Any] = {"kills": kills, "callbacks": counters_and_interruption}
    with elastic_run(tmp_path, workers=3, steps=9, **options) as run:
        run.supervise()
        assert run.kills_done() == 1
        assert_same_losses(run, reference(9))
        assert_each_once(tmp_path, 3, 9, lost=1)


def own_counters_and_interruption(folder: Path) -> list[Any]:
    return [Counting(folder, "first"), Counting(folder, "last"), Interrupted()]


@pytest.mark.slow
def test_who_ends_a_step_that_another_has_ended_begins_no_checkpoint(tmp_path: Path) -> None:
    """Worker 0 has ended the step when it hears of the death: what worker 2 has left to do, it does alone."""
    kills = [Kill(worker=1, step=Interrupted.step + 1, place="batch_end")]
    options: dict[str, Any] = {"kills": kills, "callbacks": own_counters_and_interruption}
    with elastic_run(tmp_path, workers=3, steps=9, saving={"every_n_steps": 4}, **options) as run:
        run.supervise()
        assert run.kills_done() == 1
        assert_same_losses(run, reference(9))
    for name in ("first", "last"):
        assert [ended(tmp_path, name, worker) for worker in (0, 2)] == [[[step, step] for step in range(1, 10)]] * 2
