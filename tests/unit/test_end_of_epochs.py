"""End of an epoch that a run resumes in."""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig

from moe_lightning.compat import private_lightning
from moe_lightning.strategies import committed_step
from moe_lightning.strategies.committed_step import FitProgress


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
