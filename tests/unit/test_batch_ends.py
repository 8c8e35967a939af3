"""Hooks of a training batch are counted as they run, and stay the user's own."""

from __future__ import annotations

import pickle
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from moe_lightning.compat import private_lightning
from moe_lightning.compat.private_lightning import BatchEnd, use_own_methods, watch_batch_ends
from moe_lightning.parallel.context import World
from moe_lightning.strategies import committed_step
from moe_lightning.strategies.committed_step import UnfinishedBatch

ENDS: list[BatchEnd] = []
"""Ends of the batches that have begun, in their order."""


class Watched(pl.Callback):
    """Adds another callback once the hooks are watched, and pickles itself in its hook."""

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        watch_batch_ends(trainer, lambda: ENDS[-1])
        trainer.callbacks.append(Failing())

    def on_train_batch_start(self, trainer: Any, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        ENDS.append(BatchEnd((None, batch, batch_idx)))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        assert [ENDS[-1].done, ENDS[-1].has_begun] == [trainer.callbacks.index(self), True]
        pickle.dumps(self)


class Failing(pl.Callback):
    """Fails in the third batch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise InterruptedError


def test_hooks_of_a_batch_are_counted_as_they_run() -> None:
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    trainer: Any = pl.Trainer(max_steps=5, accelerator="cpu", callbacks=[Watched()], **options)
    ENDS.clear()
    with pytest.raises(InterruptedError):
        trainer.fit(BoringModel())
    whole = BatchEnd.num_parts(trainer)
    failed = trainer.callbacks.index(next(c for c in trainer.callbacks if isinstance(c, Failing)))
    assert [(end.done, end.has_begun) for end in ENDS] == [(whole, False), (whole, False), (failed, True)]
    use_own_methods(trainer)
    assert "profile" not in vars(trainer.profiler)


class InParts(pl.Callback):
    """Its hook is no plain function."""

    def _end(self, name: str, *_: Any) -> None:
        pass

    on_train_batch_end = partialmethod(_end, "a name")  # type: ignore[assignment]


def test_hooks_of_rank_zero_are_known_where_an_object_alone_has_them() -> None:
    ran: list[int] = []
    logging = LambdaCallback(on_train_batch_end=rank_zero_only(lambda *arguments: ran.append(arguments[-1])))
    trainer: Any = SimpleNamespace(callbacks=[InParts(), logging], lightning_module=BoringModel())
    BatchEnd((None, torch.ones(1), 7), done=4).repeat_for_rank_zero(trainer)
    assert ran == [7]


class Faulty(pl.Callback):
    """Fails once in the end of a batch."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 1:
            raise ConnectionError


def test_a_fault_in_hooks_that_were_left_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fault came before the step was recorded, the second one after it and before the last hook."""
    monkeypatch.setattr(private_lightning, "is_step_open", lambda _: False)
    recording, faulty = LambdaCallback(on_train_batch_end=lambda *_: batch.record_end(0, None, None, 0)), Faulty()
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = pl.Trainer(accelerator="cpu", callbacks=[recording, faulty], **options)
    trainer.strategy.connect(BoringModel())
    batch = UnfinishedBatch(SimpleNamespace(trainer=trainer))  # type: ignore[arg-type]
    batch.running = BatchEnd((None, None, 0), logged={})
    batch.keep(is_prepared=False)
    options = {"made_steps": True, "with_newcomers": False}
    with pytest.raises(ConnectionError):
        batch.finish(0, World.single(), **options)
    batch.keep(is_prepared=False)
    assert batch.finish(0, World.single(), **options)
    assert faulty.calls == 2


class FaultySaver(ModelCheckpoint):
    """Fails once: before its first save, or after its first one of the last checkpoint."""

    def __init__(self, folder: Path, fault: str, **options: Any) -> None:
        super().__init__(folder, monitor="loss", every_n_train_steps=1, **options)
        self._fault = fault
        self.saved: list[str] = []

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        self._fail("before")
        self.saved.append(Path(filepath).name)
        Path(filepath).touch()
        if Path(filepath).stem == "last":
            self._fail("after")

    def _fail(self, fault: str) -> None:
        if fault == self._fault:
            self._fault = ""
            raise ConnectionError


def end_of_a_save(saver: FaultySaver) -> tuple[pl.Trainer, BatchEnd]:
    """Return a trainer and the end of its first batch, of which the hook of the saver is left, and has failed."""
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar"), False)
    trainer = pl.Trainer(accelerator="cpu", callbacks=[saver], **options)
    trainer.strategy.connect(BoringModel())
    trainer.state.fn = TrainerFn.FITTING
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 1
    trainer._logger_connector._callback_metrics["loss"] = torch.tensor(0.5)
    end = BatchEnd((None, None, 0), done=trainer.callbacks.index(saver), logged={})  # type: ignore[attr-defined]
    with pytest.raises(ConnectionError):
        end.run(trainer)
    assert saver.best_model_path
    return trainer, end


def test_a_save_that_failed_is_made_when_its_hook_runs_again(tmp_path: Path) -> None:
    """A ModelCheckpoint notes its best file before it saves it."""
    saver = FaultySaver(tmp_path, "before")
    trainer, end = end_of_a_save(saver)
    end.resolve_failed(trainer, ended=end.done)
    end.run(trainer)
    assert saver.saved == ["epoch=0-step=1.ckpt"]


def test_the_last_checkpoint_is_overwritten_when_its_hook_runs_again(tmp_path: Path) -> None:
    saver = FaultySaver(tmp_path, "after", save_last=True)
    trainer, end = end_of_a_save(saver)
    end.resolve_failed(trainer, ended=end.done)
    end.run(trainer)
    assert saver.saved == ["epoch=0-step=1.ckpt", "last.ckpt", "epoch=0-step=1-v1.ckpt", "last.ckpt"]


def test_a_save_is_not_noted_where_its_hook_does_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has joined that has not made the step."""
    saver = FaultySaver(tmp_path, "before")
    trainer, end = end_of_a_save(saver)
    batch = UnfinishedBatch(SimpleNamespace(trainer=trainer))  # type: ignore[arg-type]
    monkeypatch.setattr(private_lightning, "is_step_open", lambda _: False)
    monkeypatch.setattr(private_lightning, "share_saves", lambda *_: None)
    batch.running = end
    batch.keep(is_prepared=False)
    newcomer = UnfinishedBatch(SimpleNamespace(trainer=trainer))  # type: ignore[arg-type]
    reports: list[Any] = []
    monkeypatch.setattr(committed_step, "all_gather_json", lambda mine, _: reports.append(mine) or [mine, *reports])
    newcomer.finish(1, World.single(), made_steps=False, with_newcomers=True)
    with pytest.warns(UserWarning, match="does not run in every callback"):
        assert not batch.finish(1, World.single(), made_steps=True, with_newcomers=True)
    assert (saver.saved, saver.best_model_path, saver.best_k_models) == ([], "", {})
