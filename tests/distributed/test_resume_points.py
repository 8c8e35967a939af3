"""Going on from wherever a run can be saved: inside an epoch, at its end, after a validation, at the end of the fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from moe_lightning import PartialExpertsCheckpoint
from tests.distributed.training import OwnModule, RandomTokens, make_trainer, train

STEPS_OF_EPOCH = 8
LIMITS = {"max_steps": ({"max_steps": 17}, {"max_steps": 20}), "max_epochs": ({"max_epochs": 2}, {"max_epochs": 3})}
SAVES = {
    "after a step": {"every_n_train_steps": 5},
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
        return train(0, 1, trainer=trainer, callbacks=callbacks, **options)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("limit", LIMITS)
def test_a_run_goes_on_with_the_next_batch(limit: str, save: str, tmp_path: Path) -> None:
    first, whole_run = LIMITS[limit]
    validate = save == "after a validation"
    whole = fit(whole_run, validate=validate)
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
    whole = fit({"max_steps": 20})
    path = str(tmp_path / "end.ckpt")
    fit({"max_steps": steps}, save_to=path)
    resumed = fit({"max_steps": 20}, ckpt_path=path)
    np.testing.assert_array_equal(resumed["losses"], whole["losses"][steps:])


@pytest.mark.parametrize("limit", LIMITS)
def test_a_plateau_looks_at_the_epoch_that_was_gone_on_with(limit: str, tmp_path: Path) -> None:
    first, whole_run = LIMITS[limit]
    module = {"own_module": OnPlateau, "validate": True}
    whole = fit(whole_run, **module)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=STEPS_OF_EPOCH - 3)
    fit(first, saver, **module)
    resumed = fit(whole_run, **module, ckpt_path=str(next(tmp_path.glob("*.ckpt"))))
    np.testing.assert_array_equal(resumed["losses"], whole["losses"][-len(resumed["losses"]) :])


@pytest.mark.parametrize("limit", LIMITS)
def test_the_loop_says_that_it_was_resumed_to_the_end_of_the_epoch(limit: str, tmp_path: Path) -> None:
    """As in stock Lightning."""
    first, whole_run = LIMITS[limit]
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=STEPS_OF_EPOCH - 3)
    fit(first, saver, Restarting())
    watch = Restarting()
    resumed = fit(whole_run, watch, ckpt_path=str(next(tmp_path.glob("*.ckpt"))))
    left = -int(next(tmp_path.glob("*.ckpt")).stem.split("=")[1]) % STEPS_OF_EPOCH
    assert watch.seen == [True] * left + [False] * (len(resumed["losses"]) - left)


class Validated(OwnModule):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.embed(batch[0]).sum())


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
