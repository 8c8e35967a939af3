"""What the doctor refuses to compare, and how closely it compares."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch.utils.data import DataLoader, IterableDataset

from moe_lightning.doctor.comparison import Digest, StepRecord, compare
from moe_lightning.doctor.parity_doctor import ParityDoctor
from moe_lightning.doctor.reference import one_process_loader
from moe_lightning.errors import ConfigurationError


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def trainer(strategy: Any, steps: int = 0) -> Any:
    return SimpleNamespace(strategy=strategy, global_step=steps)


def elastic() -> Any:
    strategy = DDPStrategy()
    strategy.elastic = object()
    return strategy


@pytest.mark.parametrize(
    ("running", "automatic", "sentence"),
    [
        (trainer(FSDPStrategy()), True, "cannot read whole tensors under FSDPStrategy: use ExpertParallelStrategy"),
        (trainer(elastic()), True, "elastic.enabled=false"),
        (trainer(DDPStrategy(), steps=7), True, "resumes after step 7: drop ckpt_path"),
        (trainer(DDPStrategy()), False, "needs automatic optimization"),
    ],
)
def test_runs_that_cannot_be_compared(running: Any, automatic: bool, sentence: str) -> None:
    module = pl.LightningModule()
    module.automatic_optimization = automatic
    with pytest.raises(ConfigurationError, match=sentence):
        ParityDoctor().on_train_start(running, module)


def test_data_that_cannot_be_read_again() -> None:
    running: Any = SimpleNamespace(train_dataloader=DataLoader(Numbers()))
    with pytest.raises(ConfigurationError, match="a DataLoader does not let it: give a torch DataLoader"):
        one_process_loader(running)


def updated(norm: float) -> StepRecord:
    gradients = {"w": Digest(projection=1.0, norm=1.0)}
    updates = {"w": Digest(projection=norm, norm=norm)}
    return StepRecord(
        weights={}, gradients=gradients, clipped={}, updates=updates, rows={}, counts={}, loss=None, ranks={}
    )


@pytest.mark.parametrize(
    ("tolerance", "norm", "same"),
    [(1e-4, 1.0002, False), (1e-4, 1.00005, True), (0.05, 1.08, True), (0.05, 1.5, False)],
)
def test_updates_pass_on_what_gradients_differ_by_in_16_bits(tolerance: float, norm: float, same: bool) -> None:
    found = compare([updated(norm)], [updated(1.0)], tolerance)
    assert [parting.kind for parting in found.partings] == ([] if same else ["update"])
