"""Going on from wherever a run can be saved: inside an epoch, at its end, after a validation, at the end of the fit."""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from moe_lightning import FaultRecovery, PartialExpertsCheckpoint
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.test_changes_of_worlds import take_part
from tests.distributed.training import OwnModule, RandomTokens, Recorder, make_trainer, train
from tests.parameters import slow

STEPS_OF_EPOCH = 4
LIMITS = {"max_steps": ({"max_steps": 10}, {"max_steps": 14}), "max_epochs": ({"max_epochs": 2}, {"max_epochs": 3})}
SAVES = {
    "after a step": {"every_n_train_steps": 3},
    "after an epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "after a validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
}


class Restarting(Callback):
    """What users ask of the fit loop in every step."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.fit_loop.restarting)


class OnPlateau(OwnModule):
    """Divides its learning rate by two after every validation."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.embed(batch[0]).sum(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"}}


def fit(limit: dict[str, int], *callbacks: Any, **options: Any) -> dict[str, Any]:
    trainer = {"enable_checkpointing": True, "max_steps": -1} | limit
    with patch.dict(os.environ):
        return train(0, 1, trainer=trainer, callbacks=callbacks, dataset_size=12 * STEPS_OF_EPOCH, **options)


@cache
def undisturbed(limit: str) -> dict[str, Any]:
    return fit(LIMITS[limit][1])


@pytest.mark.parametrize("save", [save if save == "after a step" else slow(save) for save in SAVES])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_run_goes_on_with_the_next_batch(limit: str, save: str, tmp_path: Path) -> None:
    first, whole_run = LIMITS[limit]
    validate = save == "after a validation"
    whole = fit(whole_run, validate=True) if validate else undisturbed(limit)
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **SAVES[save])  # type: ignore[arg-type]
    fit(first, saver, validate=validate)
    saved = sorted(tmp_path.glob("*.ckpt"))
    steps = [torch.load(path, weights_only=True)["global_step"] for path in saved]
    assert {STEPS_OF_EPOCH, 2 * STEPS_OF_EPOCH} <= set(steps) or save == "after a step"
    for path, step in zip(saved, steps, strict=True):
        resumed = fit(whole_run, validate=validate, ckpt_path=str(path))
        np.testing.assert_array_equal(resumed["losses"], whole["losses"][step:], err_msg=path.name)
        num_validations = len(whole["validations"]) - len(resumed["validations"])
        assert resumed["validations"] == whole["validations"][num_validations:]


@pytest.mark.parametrize("steps", [STEPS_OF_EPOCH - 1, STEPS_OF_EPOCH, 2 * STEPS_OF_EPOCH])
def test_a_finished_run_can_be_made_longer(steps: int, tmp_path: Path) -> None:
    whole = undisturbed("max_steps")
    path = str(tmp_path / "end.ckpt")
    fit({"max_steps": steps}, save_to=path)
    resumed = fit({"max_steps": 14}, ckpt_path=path)
    np.testing.assert_array_equal(resumed["losses"], whole["losses"][steps:])


@pytest.mark.parametrize("limit", ["max_steps", slow("max_epochs")])
def test_a_plateau_looks_at_the_epoch_that_was_gone_on_with(limit: str, tmp_path: Path) -> None:
    first, whole_run = LIMITS[limit]
    module = {"own_module": OnPlateau, "validate": True}
    whole = fit(whole_run, **module)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=STEPS_OF_EPOCH - 1)
    fit(first, saver, **module)
    resumed = fit(whole_run, **module, ckpt_path=str(next(tmp_path.glob("*.ckpt"))))
    np.testing.assert_array_equal(resumed["losses"], whole["losses"][-len(resumed["losses"]) :])


def test_a_plateau_passes_over_an_epoch_that_was_validated_before_the_checkpoint(tmp_path: Path) -> None:
    """As in stock Lightning, for lack of the metric."""
    saver = ModelCheckpoint(tmp_path, "last", save_on_train_epoch_end=False)
    fit({"max_epochs": 2}, saver, own_module=OnPlateau, validate=True)
    resumed = fit({"max_epochs": 3}, own_module=OnPlateau, validate=True, ckpt_path=str(tmp_path / "last.ckpt"))
    assert len(resumed["losses"]) == STEPS_OF_EPOCH


@pytest.mark.parametrize("limit", LIMITS)
def test_the_loop_says_that_it_was_resumed_to_the_end_of_the_epoch(limit: str, tmp_path: Path) -> None:
    """As in stock Lightning."""
    first, whole_run = LIMITS[limit]
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=STEPS_OF_EPOCH - 1)
    fit(first, saver, Restarting())
    watch = Restarting()
    resumed = fit(whole_run, watch, ckpt_path=str(next(tmp_path.glob("*.ckpt"))))
    left = -int(next(tmp_path.glob("*.ckpt")).stem.split("=")[1]) % STEPS_OF_EPOCH
    assert watch.seen == [True] * left + [False] * (len(resumed["losses"]) - left)


class StopsAt(Callback):
    """Stops a run in the middle of an epoch, as EarlyStopping, Timer and Ctrl-C do."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.fit_loop.total_batch_idx + 1 == self.batch


class Epochs(Callback):
    """The epochs that have ended, with the steps until then."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, int]] = []

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.ended.append((trainer.current_epoch, trainer.global_step))


@pytest.mark.parametrize(
    ("saver", "batch", "micros"),
    [
        ("ModelCheckpoint", 3, 1),
        slow("ModelCheckpoint", 7, 2),
        slow("PartialExpertsCheckpoint", 7, 1),
        slow("save_checkpoint", 3, 2),
        slow("save_checkpoint", 5, 2),
    ],
)
def test_a_run_that_was_stopped_in_an_epoch_goes_on_in_it(saver: str, batch: int, micros: int, tmp_path: Path) -> None:
    whole_run, place = {"max_epochs": 3, "accumulate_grad_batches": micros}, tmp_path / "last.ckpt"
    options: dict[str, Any] = {"own_module": OnPlateau, "validate": True}
    savers: dict[str, Callback] = {
        "ModelCheckpoint": ModelCheckpoint(tmp_path, "last"),
        "PartialExpertsCheckpoint": PartialExpertsCheckpoint(str(place), every_n_steps=100),
        "save_checkpoint": Callback(),
    }
    whole = fit(whole_run, expected := Epochs(), **options)
    saved = {"save_to": str(place)} if saver == "save_checkpoint" else {}
    stopped = fit(whole_run, StopsAt(batch), savers[saver], **options, **saved)
    resumed = fit(whole_run, seen := Epochs(), **options, ckpt_path=str(place))
    assert len(stopped["losses"]) == batch
    first, epoch = batch - batch % micros, batch // STEPS_OF_EPOCH
    np.testing.assert_array_equal(resumed["losses"], whole["losses"][first:])
    assert resumed["validations"] == whole["validations"][epoch:]
    assert seen.ended == expected.ended[epoch:]


class Validated(OwnModule):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.embed(batch[0]).sum())


class Skipping(Validated):
    """Ends the first epoch before its third batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.fit_loop.total_batch_idx == 2 else None


@pytest.mark.parametrize("limit", [LIMITS["max_epochs"][1], slow(LIMITS["max_steps"][1])])
def test_a_run_that_has_left_an_epoch_goes_on(limit: dict[str, int], tmp_path: Path) -> None:
    """With the next epoch, and later within one and at the end of one."""
    options: dict[str, Any] = {"own_module": Skipping, "validate": True}
    savers = [
        ModelCheckpoint(tmp_path, "epoch-{step}", save_top_k=-1),
        ModelCheckpoint(tmp_path, "batch-{step}", every_n_train_steps=3, save_top_k=-1),
    ]
    whole = fit(limit, expected := Epochs(), *savers, **options)
    assert expected.ended[0] == (0, 2)
    saved = sorted(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    for path in saved:
        step = int(path.stem.split("=")[1])
        resumed = fit(limit, seen := Epochs(), **options, ckpt_path=str(path))
        np.testing.assert_array_equal(resumed["losses"], whole["losses"][step:], err_msg=path.name)
        assert resumed["validations"] == whole["validations"][len(whole["validations"]) - len(resumed["validations"]) :]
        assert seen.ended == expected.ended[len(expected.ended) - len(seen.ended) :], path.name


@pytest.mark.slow
def test_a_file_is_loaded_after_a_directory(tmp_path: Path) -> None:
    """By one Trainer: the state of the directory that it resumed from does not replace that of the file."""
    loader, file = DataLoader(RandomTokens(24), batch_size=12), tmp_path / "later.ckpt"
    with patch.dict(os.environ):
        saver = PartialExpertsCheckpoint(str(tmp_path / "parts"), every_n_steps=2)
        make_trainer(0, 1, max_steps=2, callbacks=[saver], enable_checkpointing=True).fit(Validated(), loader)
        resumed, module = make_trainer(0, 1, max_steps=4), Validated()
        resumed.fit(module, loader, ckpt_path=str(tmp_path / "parts"))
        resumed.save_checkpoint(file)
        trained = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        module.out.weight.data.zero_()
        resumed.validate(module, loader, ckpt_path=str(file), verbose=False)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, trained[name], rtol=0, atol=0, msg=name, check_device=False)


# ----------------------------------------------------------------------
# Going on from what was saved after an exception: nothing of a step that did not end counts, nothing of it is lost.


EPOCHS, BATCHES = 2, 8
HOOKS = (
    "on_before_batch_transfer", "on_train_batch_start", "training_step", "on_before_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip
IN_VALIDATION = ("on_validation_batch_start", "validation_step", "on_validation_batch_end")
AFTER_THE_UPDATE = ("lr_scheduler_step", "after lr_scheduler_step", "on_train_batch_end", *IN_VALIDATION)
SAVERS = ("OnExceptionCheckpoint", "save_on_exception", "save_checkpoint")


class Broken(Exception):
    """The user's own."""


class Breaking(OwnModule):
    """Raises in one of its hooks, once, in a batch counted over epochs."""

    def __init__(self, hook: str | None, batch: int) -> None:
        super().__init__()
        self.hook, self.batch, self.is_validated = hook, batch, False

    def break_in(self, hook: str) -> None:
        loop = self.trainer.fit_loop.epoch_loop
        counted = loop.total_batch_idx + (hook == "on_before_batch_transfer")  # it is not counted yet
        if hook == self.hook and self.trainer.training and counted == self.batch:
            raise Broken(hook)

    def break_in_validation(self, hook: str, batch_idx: int) -> None:
        """In its second batch."""
        counted = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if hook == self.hook and self.trainer.validating and batch_idx == 1 and counted == self.batch:
            raise Broken(hook)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.break_in("on_before_batch_transfer")
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.break_in("on_train_batch_start")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.break_in("training_step")
        return super().training_step(batch, batch_idx)

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.break_in_validation("on_validation_batch_start", batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.break_in_validation("validation_step", batch_idx)
        self.log("val/loss", self.embed(batch[0]).sum(), sync_dist=True)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.break_in_validation("on_validation_batch_end", batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.break_in("on_before_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.break_in("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.break_in("on_train_batch_end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma) for gamma in (0.9, 0.8)]
        return [optimizer], [{"scheduler": scheduler, "interval": "step"} for scheduler in schedulers]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if scheduler.gamma == 0.8:  # the other one has stepped
            self.break_in("lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)
        if scheduler.gamma == 0.8:
            self.break_in("after lr_scheduler_step")


class Steps(Recorder):
    """The losses of every micro-batch, by the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.by_step: dict[int, list[float]] = {}
        self.epochs: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step - (not trainer.fit_loop._should_accumulate())
        self.by_step.setdefault(step, []).append(float(trainer.callback_metrics["train/loss"]))

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.epochs.append((trainer.current_epoch, trainer.global_step))


def fit_broken(
    rank: int,
    world_size: int,
    folder: str,
    *,
    micros: int = 1,
    hook: str | None = None,
    batch: int = 0,
    saver: str = "OnExceptionCheckpoint",
    ckpt_path: str | None = None,
    val_check: int | None = None,
    callback: pl.Callback | None = None,
) -> dict[str, Any]:
    steps = Steps()
    savers: dict[str, list[pl.Callback]] = {
        "OnExceptionCheckpoint": [OnExceptionCheckpoint(folder, "saved")],
        "save_on_exception": [ModelCheckpoint(folder, "saved", every_n_epochs=1000, save_on_exception=True)],
        "save_checkpoint": [],
    }
    validation: dict[str, Any] = {} if val_check is None else {"val_check_interval": val_check}
    trainer = make_trainer(
        rank,
        world_size,
        callbacks=[steps, *(savers[saver] if hook else []), *([callback] if callback else [])],
        max_epochs=EPOCHS,
        accumulate_grad_batches=micros,
        enable_checkpointing=True,
        logger=CSVLogger(folder, name="csv", flush_logs_every_n_steps=1),
        **validation,
    )
    module = Breaking(hook, batch)
    data = DataLoader(RandomTokens(6 * BATCHES), batch_size=6, shuffle=True)
    held_out = None if val_check is None else DataLoader(RandomTokens(12), batch_size=6)
    try:
        trainer.fit(module, data, held_out, ckpt_path=ckpt_path)
    except Broken:
        if saver == "save_checkpoint":
            trainer.save_checkpoint(f"{folder}/saved.ckpt")
    state = trainer.strategy.lightning_module_state_dict() if hook is None else {}
    rows = []
    table = Path(trainer.logger.log_dir) / "metrics.csv"  # type: ignore[union-attr, arg-type]
    if hook is None and rank == 0 and table.exists():
        rows = table.read_text().splitlines()[1:]
    return {
        "steps": steps.by_step,
        "epochs": steps.epochs,
        "validations": steps.validations,
        "rows": rows,
        "state": {name: tensor.numpy() for name, tensor in state.items()},
    }


def fit_all(
    rank: int, world_size: int, folder: str, broken: list[dict[str, Any]], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """The undisturbed run, and for every way to break it what resumes from there."""
    results = [fit_broken(rank, world_size, f"{folder}/whole", **options)]
    for index, case in enumerate(broken):
        own = f"{folder}/{index}"
        fit_broken(rank, world_size, own, **options, **case)
        saved = next(Path(own).glob("*.ckpt"))
        results.append(fit_broken(rank, world_size, own, **options, ckpt_path=str(saved)))
    return results


def assert_all_go_on(tmp_path: Path, world_size: int, broken: list[dict[str, Any]], **options: Any) -> None:
    pooled = world_size == 1
    whole, *resumed = run_ranks(world_size, fit_all, str(tmp_path), broken, options, pooled=pooled)[0]
    for case, found in zip(broken, resumed, strict=True):
        done = (case["batch"] + (case["hook"] in AFTER_THE_UPDATE)) // options.get("micros", 1)
        expected = {step: losses for step, losses in whole["steps"].items() if step >= done}
        assert found["steps"] == expected, case
        assert found["epochs"] == whole["epochs"][len(whole["epochs"]) - len(found["epochs"]) :]
        assert found["rows"] == whole["rows"][len(whole["rows"]) - len(found["rows"]) :], case
        assert len(found["rows"]) >= len(expected)
        for name, values in whole["state"].items():
            np.testing.assert_array_equal(found["state"][name], values, err_msg=f"{name}, {case}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "micros", "saver", "batches"),
    [
        slow(1, 1, "OnExceptionCheckpoint", (0, 3, 8, 11)),
        (1, 2, "save_checkpoint", (5, 8)),
        slow(1, 2, "save_on_exception", (4, 9, 15)),
        slow(2, 1, "save_checkpoint", (3, 8)),
        slow(2, 2, "OnExceptionCheckpoint", (4, 5)),
        slow(2, 2, "save_on_exception", (5,)),
    ],
)
def test_the_batches_of_the_step_come_again(
    world_size: int, micros: int, saver: str, batches: tuple[int, ...], tmp_path: Path
) -> None:
    broken = [{"hook": hook, "batch": batch, "saver": saver} for hook in HOOKS for batch in batches]
    ends = ("on_before_optimizer_step", "on_train_batch_end")
    broken = [case for case in broken if case["hook"] not in ends or (case["batch"] + 1) % micros == 0]  # type: ignore[operator]
    assert_all_go_on(tmp_path, world_size, broken, micros=micros)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_schedulers_follow_the_last_update(world_size: int, tmp_path: Path) -> None:
    """An error between the update and a scheduler does not leave the rate one step behind, nor one ahead."""
    hooks = ("lr_scheduler_step", "after lr_scheduler_step")
    broken = [
        {"hook": hook, "batch": 3 + 4 * index, "saver": saver} for index, saver in enumerate(SAVERS) for hook in hooks
    ]
    assert_all_go_on(tmp_path, world_size, broken)


class LosesTheWorld(Callback):
    """Loses the first world in its first step; notes how often schedulers have stepped before each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        engine = trainer.strategy.elastic.engine
        if engine.number == 0:
            engine.reason = "a rank was lost"
            raise torch.distributed.DistNetworkError(engine.reason)
        self.seen.append(
            (trainer.global_step, [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs])
        )


def resume_in_worlds(rank: int, world_size: int, saved: str) -> list[tuple[int, list[int]]]:
    """Rank 0 resumes alone and loses its world; rank 1, which has read the same file, joins it in the next one."""
    torch.distributed.destroy_process_group()
    take_part("planned", ((0,), (0, 1)), rank, Path.cwd() / "worlds")
    loses = LosesTheWorld()
    trainer = make_trainer(rank, world_size, callbacks=[loses, FaultRecovery()], max_epochs=EPOCHS)
    trainer.fit(Breaking(None, 0), DataLoader(RandomTokens(6 * BATCHES), batch_size=6, shuffle=True), ckpt_path=saved)
    return loses.seen


def test_a_scheduler_that_was_behind_is_not_behind_in_the_next_world(tmp_path: Path) -> None:
    """Nor ahead on a rank that joins."""
    run_pooled(1, partial(fit_broken, folder=str(tmp_path), hook="lr_scheduler_step", batch=3))
    for seen in run_ranks(2, resume_in_worlds, str(tmp_path / "saved.ckpt")):
        assert seen[0][0] == 4
        assert seen == [(step, [step, step]) for step, _ in seen]


@pytest.mark.parametrize(("micros", "val_check"), [(2, 3), slow(1, 4)])
def test_what_was_validated_in_mid_step_loses_nothing(micros: int, val_check: int, tmp_path: Path) -> None:
    """Validations come in the middle of steps and of epochs; one of a repeated micro-batch comes again."""
    broken = [
        {"hook": "on_before_optimizer_step", "batch": batch, "saver": "save_on_exception"}
        for batch in (2 * val_check + 1, 9)
    ]
    assert_all_go_on(tmp_path, 1, broken, micros=micros, val_check=val_check)


def fit_twice_after_failed_validations(
    rank: int, world_size: int, folder: str, micros: int, val_check: int, broken: list[dict[str, Any]]
) -> list[Any]:
    """The undisturbed run, those that resume after an error, and those that resume from a validation of theirs."""
    options: dict[str, Any] = {"micros": micros, "val_check": val_check}
    results: list[Any] = [fit_broken(rank, world_size, f"{folder}/whole", **options)]
    for index, case in enumerate(broken):
        own, later = f"{folder}/{index}", f"{folder}/{index}/later"
        fit_broken(rank, world_size, own, **options, **case)
        saver = ModelCheckpoint(later, every_n_epochs=1, save_on_train_epoch_end=False, save_top_k=-1, monitor=None)
        first = fit_broken(rank, world_size, own, **options, ckpt_path=f"{own}/saved.ckpt", callback=saver)
        path = min(Path(later).glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
        again = fit_broken(rank, world_size, f"{own}/again", **options, ckpt_path=str(path))
        results.append((first["validations"], again["validations"]))
    return results


@pytest.mark.parametrize(("micros", "val_check", "batch"), [(1, 4, 11), slow(2, 1, 2), slow(1, 8, 7), slow(2, 4, 3)])
def test_a_validation_that_failed_comes_again_as_a_whole(
    micros: int, val_check: int, batch: int, tmp_path: Path
) -> None:
    """Once, and not again where the run resumes after it, unless that repeats its micro-batch."""
    broken = [{"hook": hook, "batch": batch, "saver": saver} for hook, saver in zip(IN_VALIDATION, SAVERS, strict=True)]
    ((whole, *resumed),) = run_pooled(1, fit_twice_after_failed_validations, str(tmp_path), micros, val_check, broken)
    left = whole["validations"][batch // val_check :]
    is_repeated = (batch + 1) % micros > 0
    for case, found in zip(broken, resumed, strict=True):
        assert found == (left, left[not is_repeated :]), case


def fit_and_save_in_validation(rank: int, world_size: int, folder: str) -> list[Any]:
    """Checkpoints of a validation after an odd number of the micro-batches of steps of two."""
    saver = ModelCheckpoint(
        folder, "{step}-{val/loss}", monitor="val/loss", save_top_k=-1, auto_insert_metric_name=False
    )
    options: dict[str, Any] = {"micros": 2, "val_check": 3}
    whole = fit_broken(rank, world_size, f"{folder}/whole", callback=saver, **options)
    saved = sorted(Path(folder).rglob("*.ckpt"))
    return [whole, [fit_broken(rank, world_size, f"{folder}/again", ckpt_path=str(path), **options) for path in saved]]


def test_a_checkpoint_of_a_validation_in_mid_step(tmp_path: Path) -> None:
    ((whole, resumed),) = run_pooled(1, fit_and_save_in_validation, str(tmp_path))
    assert len(resumed) == 2 * (BATCHES // 3)
    for found in resumed:
        first = min(found["steps"])
        assert found["steps"] == {step: losses for step, losses in whole["steps"].items() if step >= first}
        for name, values in whole["state"].items():
            np.testing.assert_array_equal(found["state"][name], values, err_msg=name)
