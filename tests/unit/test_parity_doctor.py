"""What the doctor refuses to compare, how closely it compares, and what it reads back."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from moe_lightning.doctor.comparison import Digest, StepRecord, compare, tensors_of
from moe_lightning.doctor.parity_doctor import ParityDoctor
from moe_lightning.doctor.reference import one_process_loader
from moe_lightning.errors import ConfigurationError, ParityError
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from tests.distributed.training import quiet_trainer


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def trainer(strategy: Any, steps: int = 0, precision: str = "32-true") -> Any:
    return SimpleNamespace(strategy=strategy, global_step=steps, precision=precision)


def elastic() -> Any:
    strategy = ExpertParallelStrategy()
    strategy.worlds.allow_changes()
    return strategy


@pytest.mark.parametrize(
    ("running", "sentence"),
    [
        (trainer(FSDPStrategy()), "cannot read whole tensors under FSDPStrategy: use ExpertParallelStrategy"),
        (trainer(DDPStrategy(), precision="16-mixed"), "cannot repeat how 16-mixed scales losses"),
        (trainer(elastic()), "elastic.enabled=false"),
        (trainer(DDPStrategy(), steps=7), "resumes after step 7: drop ckpt_path"),
    ],
)
def test_runs_that_cannot_be_compared(running: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        ParityDoctor().on_train_start(running, pl.LightningModule())


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


def counted(norm: float) -> StepRecord:
    return StepRecord(
        weights={},
        gradients={},
        clipped={},
        updates={},
        rows={},
        counts={},
        loss=None,
        ranks={},
        counted={"router": Digest(projection=norm, norm=norm)},
    )


@pytest.mark.parametrize("tolerance", [1e-4, 0.05])
def test_one_token_that_is_counted_twice_is_seen(tolerance: float) -> None:
    (parting,) = compare([counted(1001.0)], [counted(1000.0)], tolerance).partings
    assert parting.kind == "counted tokens"
    assert not compare([counted(1000.0)], [counted(1000.0)], tolerance).partings


def test_gradients_that_are_no_numbers_on_all_ranks_agree() -> None:
    def note(rank: int, value: float) -> dict[str, Any]:
        return {"rank": rank, "gradients": [["w", [0], value, value, 1, 0.0]]}

    assert tensors_of([note(0, math.nan), note(1, math.nan)], "gradients")["w"].differing is None
    assert tensors_of([note(0, math.nan), note(1, 1.0)], "gradients")["w"].differing is not None


class Small(pl.LightningModule):
    """A layer with momentum, a schedule and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.scale: Tensor = self.scale * 1.5
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def examined(folder: Path) -> str:
    """What the doctor says of a training of `Small`; empty if it finds nothing."""
    run = quiet_trainer(max_epochs=1, default_root_dir=folder, callbacks=[ParityDoctor()])
    try:
        run.fit(Small(), DataLoader(torch.randn(12, 4), batch_size=4))  # type: ignore[arg-type]
    except ParityError as error:
        return str(error)
    return ""


def test_a_checkpoint_is_read_back_and_the_training_goes_on_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, "lightning.pytorch")
    assert not examined(tmp_path)
    assert not list(tmp_path.rglob("*.ckpt"))
    assert "weights_only" not in caplog.text, "Lightning tells of defaults that the user has not left open"


@pytest.mark.parametrize(
    ("owner", "name", "own", "words"),
    [
        (Strategy, "load_optimizer_state_dict", lambda *_: None, "of layer.weight is not in it"),
        (torch.optim.lr_scheduler.StepLR, "load_state_dict", lambda *_: None, "the schedule of last_epoch"),
        (Strategy, "load_model_state_dict", lambda *_, **__: None, "the weights of layer.weight are nan, not"),
    ],
)
def test_what_a_resume_would_lose_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: Any, name: str, own: Any, words: str
) -> None:
    monkeypatch.setattr(owner, name, own)
    assert re.match(f"a checkpoint is not read back as it was: .*{words}", examined(tmp_path))


def test_a_buffer_that_is_not_read_back_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def without_scale(self: Any, checkpoint: Any, strict: bool = True) -> None:
        weights = {key: value for key, value in checkpoint["state_dict"].items() if key != "scale"}
        self.lightning_module.load_state_dict(weights, strict=False)

    monkeypatch.setattr(Strategy, "load_model_state_dict", without_scale)
    assert "the buffer of scale is nan, not 3.375: a resume would route" in examined(tmp_path)
