"""State of hooks, and values by which callbacks and schedulers decide, are alike on all ranks after a recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from moe_lightning.compat import private_lightning
from moe_lightning.strategies.committed_step import FitProgress
from moe_lightning.strategies.step_data import LOADERS_KEY


class Annealed(pl.LightningModule):
    """Scales its loss by what its hooks keep."""

    factor = 1.0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["factor"] = self.factor
        checkpoint["saved_at"] = checkpoint["epoch"], checkpoint["global_step"], len(checkpoint["optimizer_states"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.factor = checkpoint["factor"]


class Passes(pl.LightningDataModule):
    """Counts its passes."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def trainer_of(folder: Path, **values: float) -> pl.Trainer:
    """With values that are logged, and a ModelCheckpoint that has saved if there are some."""
    saver = ModelCheckpoint(folder, monitor="val/loss")
    if values:
        saver._last_global_step_saved, saver._last_checkpoint_saved = 7, "step-7.ckpt"
        saver._defer_save_until_validation = True
    trainer = pl.Trainer(logger=False, accelerator="cpu", devices=1, callbacks=[saver], enable_progress_bar=False)
    trainer.strategy.connect(Annealed())
    trainer.datamodule = Passes()  # type: ignore[attr-defined]
    trainer.callback_metrics.update({f"val/{name}": torch.tensor(value) for name, value in values.items()})
    return trainer


def test_a_rank_that_joins_decides_by_what_the_others_decide_by(tmp_path: Path) -> None:
    old, new = trainer_of(tmp_path, loss=2.0), trainer_of(tmp_path)
    dump = FitProgress(step=7, loops={}, loaders=[], lr_schedulers=[]).dump(old)
    FitProgress.adopt(dump, new, with_state=True)
    assert new.callback_metrics == old.callback_metrics == {"val/loss": torch.tensor(2.0)}
    assert private_lightning.monitored(new) == private_lightning.monitored(old)


def test_a_rank_that_joins_has_what_hooks_save(tmp_path: Path) -> None:
    old, new = trainer_of(tmp_path), trainer_of(tmp_path)
    old.lightning_module.factor, old.datamodule.count = 0.5, 3  # type: ignore[attr-defined]
    dump = FitProgress(step=7, loops={}, loaders=[], lr_schedulers=[]).dump(old)
    FitProgress.adopt(dump, new, with_state=True)
    assert (new.lightning_module.factor, new.datamodule.count) == (0.5, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("knows", [True, False])
def test_ranks_decide_by_what_was_there_at_the_step_that_is_restored(tmp_path: Path, knows: bool) -> None:
    dump: dict[str, Any] = {
        "factor": 0.25,
        "monitored": 0.5,  # as modules may name what they save
        "Passes": {"count": 2},
        "global_step": 5,
        "loops": {"fit_loop": fit_loop_state()},
        LOADERS_KEY: [],
        "lr_schedulers": [],
    }
    saved = trainer_of(tmp_path, loss=3.0) if knows else trainer_of(tmp_path)
    if knows:
        dump[private_lightning.MONITORED] = private_lightning.monitored(saved)
    for trainer in (trainer_of(tmp_path, loss=2.0, other=1.0), trainer_of(tmp_path)):  # a survivor, and one that joins
        FitProgress.from_checkpoint(dump, trainer)
        assert private_lightning.monitored(trainer) == private_lightning.monitored(saved)
        assert (trainer.lightning_module.factor, trainer.datamodule.count) == (0.25, 2)  # type: ignore[attr-defined]


def fit_loop_state() -> dict[str, Any]:
    return pl.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False).fit_loop.state_dict()


def test_checkpoints_of_a_rank_that_joins_go_where_those_of_the_others_go(tmp_path: Path) -> None:
    new, shared = trainer_of(tmp_path / "version_1"), [str(tmp_path / "version_0"), str(tmp_path / "last.ckpt")]
    private_lightning.share_folders(new, lambda _: [shared])
    saver: Any = new.checkpoint_callback
    assert [saver.dirpath, saver.last_model_path] == shared


def test_a_stop_is_taken_back_with_the_decision_for_it(tmp_path: Path) -> None:
    """A validation that is repeated over other ranks may decide otherwise. A callback may be appended in between."""
    trainer, stopping = trainer_of(tmp_path), EarlyStopping("val/loss")
    trainer.callbacks.append(stopping)  # type: ignore[attr-defined]
    known = private_lightning.decisions(trainer)
    trainer.callbacks.append(EarlyStopping("val/other"))  # type: ignore[attr-defined]
    trainer.should_stop, stopping.wait_count = True, 3
    private_lightning.take_back_decisions(trainer, known)
    assert (trainer.should_stop, stopping.wait_count) == (False, 0)
