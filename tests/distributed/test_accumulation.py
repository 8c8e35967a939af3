"""Gradient accumulation as in stock Lightning: schedules, and epochs that end inside a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, OnExceptionCheckpoint
from torch.utils.data import DataLoader

from moe_lightning.data.loader import StepLoader
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies import expert_parallel
from tests.distributed.harness import run_pooled
from tests.distributed.training import OwnModule, RandomTokens, make_trainer, quiet, quiet_trainer
from tests.parameters import slow

SCHEDULES = ({0: 2}, {0: 1, 1: 3, 2: 2}, {1: 2})
BATCHES, EPOCHS = 6, 3


class Plain(OwnModule):
    """Without an adaptive optimizer, which would hide a factor of the gradients."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Watch(pl.Callback):
    def __init__(self, broken_at: int | None = None) -> None:
        self.losses: list[tuple[int, int, float]] = []
        self.broken_at = broken_at

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.broken_at:
            raise RuntimeError("on purpose")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        line = trainer.current_epoch, trainer.global_step, float(trainer.callback_metrics["train/loss"])
        self.losses.append(line)


def fit(
    rank: int,
    world_size: int,
    schedule: dict[int, int] | None,
    *,
    stock: bool = False,
    broken_at: int | None = None,
    folder: str = "",
    ckpt_path: str | None = None,
    loader: Any = None,
    **options: Any,
) -> dict[str, Any]:
    watch = Watch(broken_at)
    callbacks: list[Any] = [watch, *([GradientAccumulationScheduler(dict(schedule))] if schedule else [])]
    callbacks += [OnExceptionCheckpoint(folder, "saved")] if broken_at is not None else []
    chosen: dict[str, Any] = {"max_epochs": EPOCHS, "callbacks": callbacks, "limit_val_batches": 0} | options
    if stock:
        quiet()
        pl.seed_everything(7, verbose=False)
        trainer = quiet_trainer(**chosen | {"enable_checkpointing": False})
    else:
        trainer = make_trainer(rank, world_size, **chosen)
    module = Plain()
    data = loader or DataLoader(RandomTokens(6 * BATCHES), batch_size=6)
    if broken_at is not None:
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.fit(module, data)
        return {}
    trainer.fit(module, data, ckpt_path=ckpt_path)
    state = trainer.strategy.lightning_module_state_dict()
    return {"losses": watch.losses, "state": {name: tensor.numpy() for name, tensor in state.items()}}


def fit_with(rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [fit(rank, world_size, **run) for run in runs]


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, states: bool = True) -> None:
    assert [line[:2] for line in found["losses"]] == [line[:2] for line in expected["losses"]]
    np.testing.assert_allclose([x for *_, x in found["losses"]], [x for *_, x in expected["losses"]], atol=1e-5, rtol=0)
    for name, values in expected["state"].items() if states else ():
        np.testing.assert_allclose(found["state"][name], values, rtol=0, atol=5e-5, err_msg=name)


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_every_schedule_is_that_of_stock_lightning(world_size: int) -> None:
    runs: list[dict[str, Any]] = [{"schedule": schedule} for schedule in SCHEDULES]
    expected = run_pooled(1, fit_with, [run | {"stock": True} for run in runs])[0]
    for found, reference in zip(run_pooled(world_size, fit_with, runs)[0], expected, strict=True):
        assert_same(found, reference)


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_a_schedule_is_resumed_in_mid_epoch(world_size: int, tmp_path: Path) -> None:
    """Stock Lightning goes on with a factor of one there."""
    schedule = {0: 2, 1: 3}
    run = {"schedule": schedule, "folder": str(tmp_path), "enable_checkpointing": True}
    runs: list[dict[str, Any]] = [run, run | {"broken_at": 4}, run | {"ckpt_path": str(tmp_path / "saved.ckpt")}]
    whole, _, resumed = run_pooled(world_size, fit_with, runs)[0]
    whole["losses"] = whole["losses"][-len(resumed["losses"]) :]
    assert resumed["losses"][0][:2] == (1, 4)
    assert_same(resumed, whole)


@pytest.mark.parametrize("limit", [3, 5])
def test_an_epoch_may_end_inside_a_step(limit: int) -> None:
    """The last step is the mean over its samples, where stock Lightning divides by more: so far all is alike."""
    run: dict[str, Any] = {"schedule": None, "accumulate_grad_batches": 2, "limit_train_batches": limit}
    stock = fit(0, 1, stock=True, **run)
    alone, (shared, _) = run_pooled(1, fit_with, [run])[0][0], run_pooled(2, fit_with, [run])
    assert len(alone["losses"]) == EPOCHS * limit
    assert alone["losses"][-1][1] == EPOCHS * -(-limit // 2)
    assert_same(shared[0], alone)
    assert [line[:2] for line in alone["losses"]] == [line[:2] for line in stock["losses"]]
    np.testing.assert_allclose(
        [x for *_, x in alone["losses"][:limit]], [x for *_, x in stock["losses"][:limit]], atol=1e-5, rtol=0
    )


class Changing(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.accumulate_grad_batches = 1 + batch_idx // 2


def refused(rank: int, world_size: int) -> list[str]:
    """Words about a loader of a constant global batch, and about a factor that changes within an epoch."""
    words: list[str] = []
    constant = StepLoader.of_samples(RandomTokens(36), global_batch_size=6, seed=0, training=True)
    runs: list[dict[str, Any]] = [
        {"schedule": {0: 1, 1: 2}, "loader": constant},
        {"schedule": None, "callbacks": [Changing()]},
    ]
    for run in runs:
        with pytest.raises(ConfigurationError) as caught:
            fit(rank, world_size, **run)
        words.append(str(caught.value))
    return words


def test_what_cannot_be_followed_is_refused() -> None:
    schedule, change = run_pooled(1, refused)[0]
    assert schedule.startswith("GradientAccumulationScheduler changes accumulate_grad_batches among [1, 2]")
    assert change.startswith("accumulate_grad_batches was changed from 1 to 2 within an epoch")


class LeavesAnEpoch(Plain):
    """Ends the first one in the middle of its second step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.fit_loop.total_batch_idx == 3 else None


class StopsInAStep(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 2


def fit_after_a_part_of_a_step(
    rank: int, world_size: int, strategy: dict[str, Any], in_another_fit: bool
) -> dict[str, Any]:
    module, watch, data = Plain(), Watch(), DataLoader(RandomTokens(36), batch_size=6)
    options: dict[str, Any] = {"max_steps": 3, "accumulate_grad_batches": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_parallel, "gather_limit", lambda _: 0)  # rows stay rows between fits, as of a large model
        if in_another_fit:
            make_trainer(rank, world_size, strategy, callbacks=[StopsInAStep()], **options).fit(module, data)
        else:
            module = LeavesAnEpoch()
        trainer = make_trainer(rank, world_size, strategy, callbacks=[watch], **options)
        trainer.fit(module, data)
        state = trainer.strategy.lightning_module_state_dict()
    return {"losses": watch.losses, "state": {name: tensor.numpy() for name, tensor in state.items()}}


@pytest.mark.parametrize("in_another_fit", [False, True])
@pytest.mark.parametrize("dense", [slow("ddp"), "zero1", "fsdp"])
def test_nothing_is_left_of_a_step_that_did_not_end(dense: str, in_another_fit: bool) -> None:
    alone = run_pooled(1, fit_after_a_part_of_a_step, {}, in_another_fit)[0]
    assert_same(run_pooled(2, fit_after_a_part_of_a_step, {"dense": dense}, in_another_fit)[0], alone)


class LeavesALossOut(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx % 2 == 0 else None


def without_a_loss(rank: int, world_size: int) -> str:
    trainer = make_trainer(rank, world_size, {}, max_steps=2, accumulate_grad_batches=2)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(LeavesALossOut(), DataLoader(RandomTokens(36), batch_size=6))
    return str(caught.value)


def test_a_micro_batch_without_a_loss_is_refused_where_gradients_are_summed() -> None:
    for words in run_pooled(2, without_a_loss):
        assert words.startswith("training_step returned None, and gradients of the step's other micro-batches")
