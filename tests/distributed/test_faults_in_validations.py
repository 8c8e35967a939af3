"""Faults around validations, ends of epochs and plateaus: callbacks and rates go on as in a calm run."""

from __future__ import annotations

import copy
import os
import threading
import time
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from moe_lightning import FaultRecovery, GPTModule, OptimizerConfig
from moe_lightning.callbacks.latest_checkpoint import LatestCheckpoint
from moe_lightning.compat import private_lightning
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.test_changes_of_worlds import take_part
from tests.distributed.training import TINY, RandomTokens, make_trainer

SMALL = TINY | {"num_layers": 1, "num_experts": 2}

EPOCH = 4
"""Steps of an epoch."""


class Plan(NamedTuple):
    """Plan of a run.

    Attributes:
        options: of the Trainer.
        patience: of EarlyStopping.
        stops_at: batch at whose end a callback stops training.
        is_late: that callback comes after all others.
        resumes_from: a checkpoint.
    """

    options: dict[str, Any]
    patience: int = 99
    stops_at: int = -1
    is_late: bool = False
    resumes_from: str | None = None


class Decided(NamedTuple):
    """Decisions of the callbacks of a run.

    Attributes:
        num_waits: validations or ends of epochs without improvement that EarlyStopping has counted.
        best: step of the best checkpoint, which is there; 0: none was saved.
        last: name of the last checkpoint.
        ended: steps whose validations have ended, in a hook after FaultRecovery's.
        epochs: batches in the averages of each epoch, by the step at which it has ended.
        loops: their state in a checkpoint of the last validation.
    """

    num_waits: int
    best: int
    last: str
    ended: list[int]
    epochs: dict[int, int]
    loops: dict[str, Any]


def lose(trainer: pl.Trainer) -> None:
    engine: Any = trainer.strategy.elastic.engine  # type: ignore[attr-defined]
    engine.reason = "a rank was lost"
    raise dist.DistNetworkError(engine.reason)


class Module(GPTModule):
    """Logs a value that each step improves, and a sum over the epoch, of which a metric has the same.

    Attributes:
        is_worse: validations find a value that is worse than any before.
    """

    is_worse = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batches = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("left", -float(self.trainer.global_step))
        self.log("batches", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        self.batches.update(1.0)
        self.log("batches of a metric", self.batches, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("left", 1e3 * self.is_worse - float(self.trainer.global_step))
        return super().validation_step(batch, batch_idx)


class OnPlateau(Module):
    """Halves the rate after two steps without improvement, of which there is none; loses a rank once after the third
    step.

    Attributes:
        rates: of each batch.
    """

    def __init__(self, *, is_validated: bool, is_hit: bool) -> None:
        super().__init__(SMALL)
        self._is_validated, self._is_hit = is_validated, is_hit
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=1)
        each = {"interval": "epoch", "frequency": 99} if self._is_validated else {"interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "left", **each}}

    def on_validation_epoch_end(self) -> None:
        if self._is_validated:
            self.lr_schedulers().step(-float(self.trainer.global_step))  # type: ignore[union-attr, call-arg]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.lose_once()

    def lose_once(self) -> None:
        if self.trainer.global_step == 3 and not self._is_hit:
            self._is_hit = True
            lose(self.trainer)


class WithinAStep(OnPlateau):
    """Loses the rank after the third validation, which comes within a step."""

    def lose_once(self) -> None:
        if self.trainer.fit_loop.total_batch_idx == 3 * EPOCH - 1 and not self._is_hit:
            self._is_hit = True
            lose(self.trainer)


class Early(pl.Callback):
    """Loses the rank of the module before other callbacks know that the next batch begins."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        pl_module.lose_once()  # type: ignore[operator]


class Stopping(EarlyStopping):
    """Has no state in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class Timer(pl.Callback):
    """Stops training at the end of a batch."""

    def __init__(self, stops_at: int) -> None:
        self._stops_at = stops_at

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.fit_loop.total_batch_idx + 1 == self._stops_at


class Saver(ModelCheckpoint):
    """Saves the best checkpoint and the last one, and loses a rank once: before its last save, after its first one
    of the last checkpoint, or as it has deleted a former best one, after which validations become worse.
    """

    def __init__(self, fault: str, final: int) -> None:
        super().__init__("best", monitor="left", filename="{step}", save_last=True)
        self._fault, self._final = fault, final

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        if trainer.global_step == self._final and self._fault == "before":
            self._fault = ""
            lose(trainer)
        super()._save_checkpoint(trainer, filepath)
        if self._fault == "after" and Path(filepath).stem == "last":
            self._fault = ""
            lose(trainer)

    def _remove_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        super()._remove_checkpoint(trainer, filepath)
        if self._fault == "deleted":
            self._fault, trainer.lightning_module.is_worse = "", True  # type: ignore[assignment]
            lose(trainer)


class Counting(pl.Callback):
    """Counts validations and epochs; loses a rank once: in the first or second validation, in the batch after the
    second, at the end of the last epoch, or in the backward pass after a step.
    """

    def __init__(self, fault: str, final: int) -> None:
        self._fault, self._final = fault, final
        self.ended: list[int] = []
        self.epochs: dict[int, int] = {}
        self.loops: dict[str, Any] = {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended.append(trainer.global_step)
        self.loops = copy.deepcopy(trainer.fit_loop.state_dict())
        if len(self.ended) == {"first": 1, "hook": 2}.get(self._fault):
            lose(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._fault == "batch" and len(self.ended) == 2:
            self._fault = ""
            lose(trainer)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fault == f"after step {trainer.global_step}":
            self._fault = ""
            lose(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fault == "epoch" and trainer.global_step == self._final:
            self._fault = ""
            lose(trainer)
        metrics = trainer.callback_metrics
        assert metrics["batches of a metric"] == metrics["batches"]
        self.epochs[trainer.global_step] = int(metrics["batches"])


def inputs() -> tuple[pl.LightningModule, DataLoader[Any], DataLoader[Any]]:
    train, validation = (DataLoader(RandomTokens(size), batch_size=12) for size in (12 * EPOCH, 12))
    return Module(SMALL, OptimizerConfig(lr=3e-2, warmup_steps=2)), train, validation


def decide(rank: int, world_size: int, faults: list[str], plan: Plan, final: int) -> list[Decided]:
    found = []
    for index, fault in enumerate(faults):
        (folder := Path(f"{index}").resolve()).mkdir()
        os.chdir(folder)
        if dist.is_initialized():
            dist.destroy_process_group()
        take_part(f"planned {index}", ((0,), (0,)), 0, folder / "store")
        stopping = Stopping("val/loss", min_delta=1e6, patience=plan.patience)
        counting, saver = Counting(fault, final), Saver(fault, final)
        callbacks = [stopping, FaultRecovery(), counting, saver]
        callbacks.insert(len(callbacks) * plan.is_late, Timer(plan.stops_at))
        options = {"enable_checkpointing": True, "max_epochs": 2, **plan.options}
        trainer = make_trainer(rank, world_size, callbacks=callbacks, **options)
        trainer.fit(*inputs(), ckpt_path=plan.resumes_from)
        best = 0
        if saver.best_model_path:
            assert Path(saver.best_model_path).is_file()
            best = int(Path(saver.best_model_path).stem.removeprefix("step=").partition("-")[0])
        assert list(saver.best_k_models) == [saver.best_model_path] * bool(best)
        last = Path(saver.last_model_path).name
        found.append(Decided(stopping.wait_count, best, last, counting.ended, counting.epochs, counting.loops))
        os.chdir(folder.parent)
    return found


FAULTS = ["", "hook", "before", "after"]


@cache
def decided(interval: float) -> list[Decided]:
    (found,) = run_pooled(1, decide, FAULTS, Plan({"val_check_interval": interval}), 2 * EPOCH)
    return list(found)


@pytest.mark.parametrize("interval", [0.5, 1.0], ids=["in epochs", "at their ends"])
@pytest.mark.parametrize("fault", FAULTS[1:])
def test_callbacks_decide_as_in_a_calm_run(fault: str, interval: float) -> None:
    calm, found = decided(interval)[0], decided(interval)[FAULTS.index(fault)]
    steps = [int(EPOCH * interval * (1 + index)) for index in range(int(2 / interval))]
    assert calm[:-1] == (len(steps) - 1, steps[-1], "last.ckpt", steps, {EPOCH: EPOCH, 2 * EPOCH: EPOCH})
    repeated = {"hook": steps[1], "before": steps[-1], "after": steps[0]}[fault]
    assert found == calm._replace(ended=sorted([*steps, repeated]))


STOP = EPOCH + 2
"""A step within the second epoch."""

STOPS = {
    "max_steps": Plan({"max_steps": STOP}),
    "callback": Plan({}, stops_at=STOP),
    "last callback": Plan({"val_check_interval": 0.75}, stops_at=STOP, is_late=True),
    "validation": Plan({"val_check_interval": 0.5}, patience=2),
}


@pytest.mark.parametrize("stop", STOPS)
def test_an_end_within_an_epoch_is_repeated(stop: str) -> None:
    (found,) = run_pooled(1, decide, ["", "hook", "before", "epoch"], STOPS[stop], STOP)
    calm, *others = found
    assert (calm.best, calm.epochs) == (STOP, {EPOCH: EPOCH, STOP: STOP - EPOCH})
    for other in others:
        assert other._replace(ended=sorted({*other.ended})) == calm


def test_an_end_within_a_step_is_repeated() -> None:
    plan = Plan({"val_check_interval": 2, "accumulate_grad_batches": 2}, stops_at=EPOCH + 3)
    ((calm, found),) = run_pooled(1, decide, ["", "epoch"], plan, 3)
    assert (calm.num_waits, calm.best, calm.ended, calm.epochs) == (3, 3, [1, 2, 3, 3], {2: EPOCH, 3: 3})
    assert found == calm


@pytest.mark.parametrize(
    ("options", "ended"),
    [
        ({"val_check_interval": 0.5}, [2, 4, 4, 6, 8]),
        ({"val_check_interval": 3, "accumulate_grad_batches": 2}, [1, 3, 3]),
    ],
    ids=["after a step", "within one"],
)
def test_a_file_that_was_deleted_is_not_the_best_of_a_repeat(options: dict[str, Any], ended: list[int]) -> None:
    (((found,)),) = run_pooled(1, decide, ["deleted"], Plan(options), 0)
    assert (found.best, found.ended) == (ended[-1], ended)


def rank_again(rank: int, world_size: int) -> list[list[str]]:
    saver = ModelCheckpoint("best", monitor="left", filename="{step}")
    options = {"max_epochs": 1, "val_check_interval": 0.5, "enable_checkpointing": True}
    trainer = make_trainer(rank, world_size, callbacks=[saver], **options)
    trainer.fit(*inputs())
    checkpoints, found = trainer.strategy.checkpoints, []  # type: ignore[attr-defined]
    (path,) = (each for each, is_there in checkpoints.saved.items() if not is_there)
    for is_saved in (False, True):
        if is_saved:
            trainer.save_checkpoint(path)
        saver.best_k_models = {path: torch.tensor(-2.0), saver.best_model_path: torch.tensor(-1.0)}
        private_lightning.forget_deleted(trainer, checkpoints.is_deleted, lambda known: known)
        found.append([Path(each).name for each in saver.best_k_models])
    return found


def test_a_deleted_file_is_ranked_again_once_it_is_saved_again() -> None:
    assert run_pooled(1, rank_again) == [[["step=4.ckpt"], ["step=2.ckpt", "step=4.ckpt"]]]


class HeldIO(TorchCheckpointIO):
    """Writes files as training ends."""

    def __init__(self) -> None:
        self.may_write = threading.Event()

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        self.may_write.wait(60)
        super().save_checkpoint(*args, **options)


class WorseSecond(pl.Callback):
    """Lets the second validation be worse than the first one, and loses a rank once in its end."""

    def __init__(self, held: HeldIO | None = None) -> None:
        self._held, self._is_hit = held, False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.is_worse = trainer.global_step > 2  # type: ignore[assignment]

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > 2 and not self._is_hit:
            self._is_hit = True
            lose(trainer)

    def on_train_end(self, *_: Any) -> None:
        if self._held is not None:
            self._held.may_write.set()


def save_later(rank: int, world_size: int) -> tuple[str, list[str]]:
    take_part("planned", ((0,), (0,)), 0, Path("store").resolve())
    held, saver = HeldIO(), ModelCheckpoint("best", monitor="left", filename="{step}")
    options = {"max_epochs": 1, "val_check_interval": 0.5, "enable_checkpointing": True}
    callbacks = [FaultRecovery(), saver, WorseSecond(held)]
    trainer = make_trainer(rank, world_size, callbacks=callbacks, plugins=[AsyncCheckpointIO(held)], **options)
    trainer.fit(*inputs())
    return Path(saver.best_model_path).name, os.listdir("best")


def test_a_file_that_is_not_written_yet_stays_the_best_one() -> None:
    assert run_pooled(1, save_later) == [("step=2.ckpt", ["step=2.ckpt"])]


def resume_later(rank: int, world_size: int) -> tuple[str, list[str]]:
    """The file that is the best one in the checkpoint was deleted after that was saved."""
    options = {"val_check_interval": 0.5, "enable_checkpointing": True}
    saver, later = (ModelCheckpoint("best", monitor="left", filename="{step}") for _ in range(2))
    trainer = make_trainer(rank, world_size, callbacks=[saver], max_steps=2, **options)
    trainer.fit(*inputs())
    trainer.save_checkpoint("start.ckpt")
    os.unlink(saver.best_model_path)
    if dist.is_initialized():
        dist.destroy_process_group()
    take_part("planned", ((0,), (0,)), 0, Path("store").resolve())
    callbacks = [FaultRecovery(), later, WorseSecond()]
    trainer = make_trainer(rank, world_size, callbacks=callbacks, max_epochs=1, **options)
    trainer.fit(*inputs(), ckpt_path="start.ckpt")
    return Path(later.best_model_path).name, os.listdir("best")


def test_a_file_that_an_earlier_process_has_deleted_is_not_the_best_of_a_repeat() -> None:
    assert run_pooled(1, resume_later) == [("step=4.ckpt", ["step=4.ckpt"])]


@pytest.mark.parametrize("fault", ["hook", "batch"])
def test_a_validation_within_a_step_is_repeated_with_its_batches(fault: str) -> None:
    plan = Plan({"val_check_interval": 3, "accumulate_grad_batches": 2})
    ((calm, found),) = run_pooled(1, decide, ["", fault], plan, 0)
    assert (calm.num_waits, calm.ended) == (1, [1, 3])
    assert found._replace(ended=sorted({*found.ended})) == calm


def test_averages_of_an_epoch_count_repeated_batches_once() -> None:
    faults = [f"after step {step}" for step in (0, 1, EPOCH)]
    ((calm, *found),) = run_pooled(1, decide, ["", *faults], Plan({}), 0)
    assert calm.epochs == {EPOCH: EPOCH, 2 * EPOCH: EPOCH}
    assert [each[:-1] for each in found] == [calm[:-1]] * len(faults)


def resume_often(rank: int, world_size: int, fault: str, starts: list[int]) -> list[int]:
    found = []
    for index, start in enumerate([0, *starts]):
        if dist.is_initialized():
            dist.destroy_process_group()
        take_part(f"planned {index}", ((0,), (0,)), 0, Path(f"store {index}").resolve())
        saver = LatestCheckpoint("latest", every_n_train_steps=1, save_top_k=-1)
        callbacks = [FaultRecovery(), Counting(fault if start == 0 else "", 0), saver]
        trainer = make_trainer(rank, world_size, callbacks=callbacks, max_epochs=2, enable_checkpointing=True)
        trainer.fit(Module(SMALL), inputs()[1], ckpt_path=f"latest/step-{start:07d}.ckpt" if start else None)
        found.append(trainer.global_step)
    return found


@pytest.mark.parametrize(
    ("fault", "starts"), [(f"after step {EPOCH}", [EPOCH + 2]), ("", [EPOCH, EPOCH + 2])], ids=["fault", "resume"]
)
def test_an_epoch_that_begins_in_a_resume_is_counted(fault: str, starts: list[int]) -> None:
    assert run_pooled(1, resume_often, fault, starts) == [[2 * EPOCH] * (1 + len(starts))]


class Breaking(pl.Callback):
    """Breaks in the first validation."""

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step:
            raise KeyError("of the user")


def break_off(rank: int, world_size: int, folder: str) -> None:
    callbacks = [Stopping("val/loss"), Breaking(), OnExceptionCheckpoint(folder, "middle")]
    trainer = make_trainer(rank, world_size, callbacks=callbacks, enable_checkpointing=True, val_check_interval=0.5)
    with pytest.raises(KeyError):
        trainer.fit(*inputs())


def test_a_validation_in_whose_middle_a_run_resumes_is_repeated(tmp_path: Path) -> None:
    run_pooled(1, break_off, str(tmp_path))
    plan = Plan({"val_check_interval": 0.5}, resumes_from=str(tmp_path / "middle.ckpt"))
    ((calm, found),) = run_pooled(1, decide, ["", "first"], plan, 0)
    assert (calm.num_waits, calm.ended) == (3, [2, 4, 6, 8])
    assert found._replace(ended=sorted({*found.ended})) == calm


def plateaus(rank: int, world_size: int, *, is_validated: bool) -> list[list[float]]:
    found = []
    befores: list[list[pl.Callback]] = [[], [], [Early()]]
    for index, before in enumerate(befores):
        if dist.is_initialized():
            dist.destroy_process_group()
        take_part(f"planned {index}", ((0,), (0,)), 0, Path(f"store {index}").resolve())
        module = OnPlateau(is_validated=is_validated, is_hit=index == 0)
        options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 1 / EPOCH}
        make_trainer(rank, world_size, callbacks=[*before, FaultRecovery()], **options).fit(module, *inputs()[1:])
        found.append(module.rates)
    return found


@pytest.mark.parametrize("is_validated", [False, True], ids=["steps", "validations"])
def test_a_plateau_counts_each_step_once(is_validated: bool) -> None:
    """The fault comes as all ranks are in the next batch, or perhaps not all of them."""
    ((calm, later, sooner),) = run_pooled(1, partial(plateaus, is_validated=is_validated))
    assert calm == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125]
    assert later == [*calm[:4], *calm[3:]]
    assert sooner == calm


def lower_within_a_step(rank: int, world_size: int) -> list[float]:
    take_part("planned", ((0,), (0,)), 0, Path("store").resolve())
    module = WithinAStep(is_validated=True, is_hit=False)
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 3, "accumulate_grad_batches": 2}
    make_trainer(rank, world_size, callbacks=[FaultRecovery()], **options).fit(module, *inputs()[1:])
    return module.rates


def test_a_plateau_counts_a_validation_within_a_step_once() -> None:
    assert run_pooled(1, lower_within_a_step) == [[*[1.0] * (3 * EPOCH - 1), 0.5, 1.0, 0.5]]


class Interrupted(LatestCheckpoint):
    """Loses a rank as it ends its first save, on rank 1 only; notes the last save before each batch."""

    def __init__(self) -> None:
        super().__init__("latest", every_n_train_steps=2)
        self._is_hit, self.known = False, list[tuple[int, str]]()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.known.append((self._last_global_step_saved, Path(self._last_checkpoint_saved).name))
        super().on_train_batch_start(trainer)

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        before = self._last_global_step_saved, self._last_checkpoint_saved
        super()._save_checkpoint(trainer, filepath)
        if trainer.global_rank == 1 and not self._is_hit:
            self._is_hit = True
            self._last_global_step_saved, self._last_checkpoint_saved = before
            Path("hit").touch()
            lose(trainer)


class Losing(Module):
    """Loses a rank in the hook after that save, on rank 0."""

    is_hit = False

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_rank == 0 and self.trainer.global_step == 2 and not self.is_hit:
            self.is_hit = True
            while not Path("hit").exists():
                time.sleep(0.01)
            lose(self.trainer)


def save_apart(rank: int, world_size: int) -> list[tuple[int, str]]:
    dist.destroy_process_group()
    take_part("planned", ((0, 1), (0, 1)), rank, Path("store").resolve())
    saver = Interrupted()
    callbacks = [FaultRecovery(), saver]
    trainer = make_trainer(rank, world_size, callbacks=callbacks, max_epochs=1, enable_checkpointing=True)
    trainer.fit(Losing(SMALL), inputs()[1])
    return saver.known


def test_ranks_agree_on_a_save_that_has_ended_on_one_of_them() -> None:
    none, saved = (0, ""), (2, "step-0000002.ckpt")
    assert run_ranks(2, save_apart) == [[none, none, saved, saved]] * 2


class Apart(ModelCheckpoint):
    """Loses a rank in the last hook of the first epoch on rank 0, and in the next epoch on rank 1.

    Attributes:
        ends: of epochs, as the last one has logged them.
    """

    def __init__(self) -> None:
        super().__init__("apart", save_top_k=0)
        self._is_hit = False
        self.ends: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == 0 and not self._is_hit:
            self._is_hit = True
            while not Path("hit").exists():
                time.sleep(0.01)
            lose(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.ends.append(float(trainer.callback_metrics["ends"]))
        if trainer.global_rank == 1 and trainer.current_epoch == 1 and not self._is_hit:
            self._is_hit = True
            Path("hit").touch()
            lose(trainer)


class Ending(Module):
    """Logs each end of an epoch."""

    def on_train_epoch_end(self) -> None:
        self.log("ends", 1.0, reduce_fx="sum")


def stop_apart(rank: int, world_size: int) -> tuple[int, list[float]]:
    dist.destroy_process_group()
    take_part("planned", ((0, 1), (0, 1)), rank, Path("store").resolve())
    stopping = EarlyStopping("batches", min_delta=1e6, patience=99, check_on_train_epoch_end=True)
    apart = Apart()
    callbacks = [stopping, FaultRecovery(), apart]
    trainer = make_trainer(rank, world_size, callbacks=callbacks, max_epochs=2, enable_checkpointing=True)
    trainer.fit(Ending(SMALL), inputs()[1])
    return stopping.wait_count, apart.ends


def test_ranks_count_an_epoch_once_that_has_ended_on_one_of_them() -> None:
    assert run_ranks(2, stop_apart) == [(1, [1.0]), (1, [1.0, 1.0])]
