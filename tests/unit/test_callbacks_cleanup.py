"""Callbacks undo their changes after an exception, too, after which Lightning calls no teardown."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moe_lightning import RecomputeDense, callbacks
from tests.distributed.training import quiet_trainer

MODULES = [
    importlib.import_module(f"{callbacks.__name__}.{found.name}") for found in pkgutil.iter_modules(callbacks.__path__)
]
CHANGING = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type)
    and issubclass(kind, Callback)
    and kind.__module__ == module.__name__
    and "teardown" in vars(kind)
]


@pytest.mark.parametrize("kind", CHANGING, ids=lambda kind: kind.__name__)
def test_an_exception_tears_down(kind: type[Callback], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(kind, "teardown", lambda self, trainer, module, stage: calls.append((trainer, module, stage)))
    trainer: Any = object()
    module: Any = object()
    object.__new__(kind).on_exception(trainer, module, RuntimeError())
    assert calls == [(trainer, module, "fit")]


class Failing(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert any("forward" in vars(part) for part in self.modules())
        raise RuntimeError("a mistake")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_keeps_its_forward_after_an_error() -> None:
    trainer, module = quiet_trainer(callbacks=[RecomputeDense()], max_steps=1), Failing()
    with pytest.raises(RuntimeError, match="a mistake"):
        trainer.fit(module, DataLoader(torch.zeros(4, 4)))
    assert not any("forward" in vars(part) for part in module.modules())
