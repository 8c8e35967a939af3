"""End of an epoch that a run resumes in."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torchmetrics import SumMetric

from moe_lightning.compat import private_lightning
from moe_lightning.parallel.context import World
from moe_lightning.strategies import committed_step
from moe_lightning.strategies.committed_step import CommittedStep, FitProgress
from moe_lightning.strategies.step_data import LOADERS_KEY


def test_a_metric_is_required_again_after_an_end_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(loop: object) -> None:
        assert not config.strict
        raise RuntimeError("a rank is lost")

    trainer = pl.Trainer(logger=False, enable_checkpointing=False)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    config = LRSchedulerConfig(plateau, monitor="val/loss", reduce_on_plateau=True)
    trainer.strategy.lr_scheduler_configs = [config]
    trainer.fit_loop._restarting = True
    monkeypatch.setattr(type(trainer.fit_loop), "on_advance_end", fail)
    private_lightning.end_resumed_epochs(trainer)
    with pytest.raises(RuntimeError, match="a rank is lost"):
        trainer.fit_loop.on_advance_end()
    assert config.strict


def test_a_metric_whose_average_is_dropped_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, metric = pl.Trainer(logger=False, enable_checkpointing=False), SumMetric()
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop):
        monkeypatch.setattr(loop, "on_advance_end", lambda *_: None)
    monkeypatch.setattr(private_lightning, "_fetcher", lambda _: None)
    metric.update(1.0)
    trainer.fit_loop.epoch_loop._results.log("training_step", "sum", metric, on_step=False, on_epoch=True)
    private_lightning.end_epoch(trainer, drop_logged=True)
    assert (metric.update_count, float(metric.sum_value)) == (0, 0.0)


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_an_end_that_is_repeated_lowers_a_rate_once(
    monkeypatch: pytest.MonkeyPatch, rate: float | torch.Tensor
) -> None:
    """A rank has come to the next epoch, and another one, which was lost in the reductions before, has not."""
    monkeypatch.setattr(committed_step, "loader_states", lambda _: [])
    monkeypatch.setattr(committed_step.private_torch, "tree_leaves", lambda _: [])
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=rate, capturable=False, foreach=False)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(plateau, monitor="val/loss", reduce_on_plateau=True)]
    trainer.strategy.optimizers = [optimizer]
    plateau.step(1.0)
    progress = FitProgress.of(trainer, after_step=False)
    plateau.step(1.0)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    ended = progress.after_epoch(trainer)
    ended.restore(trainer)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    replace(ended, epoch_is_over=True).restore(trainer)
    assert float(optimizer.param_groups[0]["lr"]) == 0.5
    plateau.step(1.0)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


@pytest.fixture
def saved_trainer(monkeypatch: pytest.MonkeyPatch) -> tuple[pl.Trainer, dict[str, Any]]:
    """A trainer, and the saved state of one after the last step of an epoch."""
    monkeypatch.setattr(committed_step.private_torch, "tree_leaves", lambda _: [])
    monkeypatch.setattr(private_lightning, "is_validation_due", lambda _: True)
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.strategy.connect(pl.LightningModule())
    saved = {
        "global_step": 5,
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        LOADERS_KEY: [],
        "lr_schedulers": [],
    }
    batches = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]  # type: ignore[index]
    batches |= {"is_last_batch": True, "current": {"ready": 1, "started": 1, "processed": 1, "completed": 0}}
    batches["total"] |= {"ready": 5}
    return trainer, saved


def plan_of(level: str, *live_ranks: int) -> Any:
    return SimpleNamespace(level=level, resumes_at=5, version=5, live_ranks=live_ranks)


@pytest.mark.parametrize("faults", [0, 1])
def test_what_is_due_after_a_saved_step_outlives_a_fault_before_it_is_restored(
    monkeypatch: pytest.MonkeyPatch, saved_trainer: tuple[pl.Trainer, dict[str, Any]], faults: int
) -> None:
    """The state of its survivors is live then. Values logged and stops decided after the step are gone."""
    trainer, saved = saved_trainer
    state: Any = SimpleNamespace(trainer=trainer, restored=SimpleNamespace(read_object=lambda _: saved))
    step, world = CommittedStep(state), World.single()
    trainer.should_stop = True
    logged = trainer.fit_loop.epoch_loop._results
    logged.log("training_step", "tokens", torch.tensor(1.0), reduce_fx="sum")
    for plan in [plan_of("memory"), *[plan_of("live", 0)] * faults]:
        step.receive(plan, world)
    assert not trainer.should_stop
    assert not [*logged.valid_items()]
    assert step.progress is not None
    assert step.progress.went_back
    for _ in range(2):  # it is known once, for a recovery may come when the validation has ended
        step.restore()
        assert (step.progress.validation_is_due, step.progress.epoch_is_over) == (True, True)
        monkeypatch.setattr(private_lightning, "is_validation_due", lambda _: False)
    assert ended_epoch(step, world, monkeypatch) == {"with_newcomers": True, "drop_logged": True}


def test_an_end_after_a_saved_step_that_is_repeated_lowers_a_rate_once(
    saved_trainer: tuple[pl.Trainer, dict[str, Any]],
) -> None:
    trainer, saved = saved_trainer
    trainer.strategy.optimizers = [torch.optim.SGD([torch.zeros(1)], lr=0.5)]
    progress = FitProgress.from_checkpoint(saved, trainer).restore(trainer)
    trainer.optimizers[0].param_groups[0]["lr"] = 0.25
    progress.restore(trainer)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("forgets", ["receive", "begin_fit"])
def test_values_before_a_saved_step_or_of_another_fit_are_not_restored(
    saved_trainer: tuple[pl.Trainer, dict[str, Any]], forgets: str
) -> None:
    """The rank was in the batch after that step."""
    trainer, saved = saved_trainer
    saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 5
    state: Any = SimpleNamespace(trainer=trainer, restored=SimpleNamespace(read_object=lambda _: saved))
    step, logged = CommittedStep(state), trainer.fit_loop.epoch_loop._results
    logged.log("training_step", "tokens", torch.tensor(1.0), reduce_fx="sum")
    step.begin_batch()
    if forgets == "begin_fit":
        step.begin_fit()
        logged.reset()
        step.progress = FitProgress.from_checkpoint(saved, trainer)
    else:
        step.receive(plan_of("memory"), World.single())
    step.restore()
    assert not [*logged.valid_items()]


def ended_epoch(step: CommittedStep, world: World, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Finish a step, and return how its batch and its epoch were ended."""
    found: dict[str, bool] = {}
    monkeypatch.setattr(private_lightning, "run_validation", lambda _: None)
    monkeypatch.setattr(private_lightning, "end_epoch", lambda _, **options: found.update(options))
    monkeypatch.setattr(step.batch, "finish", lambda *_, made_steps, **options: found.update(options))
    step.finish(world, lambda _: False)
    return found
