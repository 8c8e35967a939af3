"""End of an epoch that a run resumes in."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig

from moe_lightning.compat import private_lightning


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
