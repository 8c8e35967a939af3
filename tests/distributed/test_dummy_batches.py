"""A rank without samples takes part in a step and leaves nothing in what users count themselves."""

from __future__ import annotations

import logging
import re
from collections import Counter
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.dummy_batches import without_traces
from tests.distributed.harness import run_pooled
from tests.distributed.training import OwnModule, RandomTokens, Warned, make_trainer


class Meter:
    """What many scripts bring along."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.sum += value
        self.count += count


class Counting(OwnModule):
    """Counts the samples of its steps in every way that users do."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.number, self.tensor = 0, torch.zeros(3)
        self.kept: list[Tensor] = []
        self.by_stage: Counter[str] = Counter()
        self.nested: dict[str, Any] = {"a": [0, set()]}
        self.meter, self.meters = Meter(), {Meter()}
        self.metrics = [MeanMetric()]

    def count(self, x: Tensor, stage: str) -> None:
        samples = len(x)
        if stage == "val":  # while training DDP gives all ranks the buffers of rank 0
            self.seen += samples
        self.number += samples
        self.tensor = self.tensor + samples
        self.kept.append(x)
        self.by_stage[stage] += samples
        self.nested["a"][0] += samples
        self.nested["a"][1] |= {int(row[0]) for row in x}
        for meter in (self.meter, *self.meters):
            meter.update(float(samples), samples)
        self.metrics[0].update(float(samples))
        self.lazily = getattr(self, "lazily", 0) + samples

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.count(batch[0], "train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.count(batch[0], "val")
        self.moe(self.embed(batch[0]))


class Seen(pl.Callback):
    """Samples as a callback counts them."""

    def __init__(self) -> None:
        self.count = 0

    def on_validation_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.count += 0 if trainer.strategy.is_dummy_batch else len(batch[0])  # type: ignore[attr-defined]


def counts_of(rank: int, world_size: int) -> dict[str, Any]:
    """After an epoch of 18 samples, the last 2 in a batch of their own, and a validation of 3."""
    seen, module = Seen(), Counting()
    trainer = make_trainer(rank, world_size, callbacks=[seen], max_epochs=1, max_steps=-1)
    trainer.fit(module, DataLoader(RandomTokens(18), batch_size=8), DataLoader(RandomTokens(3), batch_size=4))
    return {
        "buffer": int(module.seen),
        "number": module.number,
        "tensor": int(module.tensor[0]),
        "kept": sum(map(len, module.kept)),
        "by_stage": dict(module.by_stage),
        "nested": (module.nested["a"][0], len(module.nested["a"][1]) <= module.number),
        "meter": (module.meter.sum, module.meter.count),
        "meters": sum(meter.count for meter in module.meters),
        "metric": module.metrics[0]._update_count,
        "lazily": getattr(module, "lazily", 0),
        "callback": seen.count,
    }


class StepCounting(OwnModule):
    """Counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.num_steps += 1
        return super().training_step(batch, batch_idx)


def warned(rank: int, world_size: int) -> list[str]:
    """In an epoch of batches with 8, 8 and 2 samples, and one more of these."""
    handler = Warned()
    logging.getLogger("moe_lightning").addHandler(handler)
    try:
        trainer = make_trainer(rank, world_size, max_epochs=2, max_steps=-1)
        trainer.fit(StepCounting(), DataLoader(RandomTokens(18), batch_size=8))
    finally:
        logging.getLogger("moe_lightning").removeHandler(handler)
    return [line for line in handler.lines if "StepCounting" in line]


def test_a_counter_of_steps_that_stays_behind_is_a_warning() -> None:
    first, second, third, fourth = run_pooled(4, warned)
    assert first == second == []
    for lines in (third, fourth):
        assert lines == [
            "StepCounting.num_steps stays as it was on a rank without a sample of the last batch, since it may count "
            "samples: if it counts steps, use self.trainer.global_step or batch_idx, or drop_last=True"
        ]


def test_numbers_that_become_arrays_or_are_nan_are_restored_without_a_warning() -> None:
    trainer, module = pl.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False), Counting()
    module.trainer = trainer
    values = vars(module)
    values |= {"of_classes": 0, "tensors": 0, "best": float("nan"), "steps": 0}
    with without_traces(module) as changed:
        values |= {"of_classes": np.zeros(3), "tensors": torch.zeros(3), "steps": 1}
    assert changed == ["Counting.steps"]
    assert (values["of_classes"], values["tensors"], values["steps"]) == (0, 0, 0)


class Texts(OwnModule):
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        self.moe(self.embed(batch[0]))
        first = batch[0][:, 0]
        return {"text": [str(int(x)) for x in first], "array": first.numpy(), "ids": first, "kind": "first"}


def predicted(rank: int, world_size: int) -> list[Any]:
    predictions: Any = make_trainer(rank, world_size).predict(Texts(), DataLoader(RandomTokens(2), batch_size=4))
    (found,) = predictions
    assert found["kind"] == "first"
    return [found["text"], found["array"].tolist(), found["ids"].tolist()]


def test_predictions_of_any_kind_have_no_rows_of_dummy_batches() -> None:
    texts, arrays, ids = ([*chain(*each)] for each in zip(*run_pooled(4, predicted), strict=True))
    assert [int(text) for text in texts] == arrays == ids == [int(RandomTokens()[i][0][0]) for i in range(2)]


class Gathering(Counting):
    """Collects what its validation steps have seen."""

    def on_validation_epoch_end(self) -> None:
        self.all_gather(torch.cat(self.kept))


def gathers(rank: int, world_size: int) -> str:
    trainer = make_trainer(rank, world_size, max_steps=1)
    with pytest.raises(ConfigurationError) as told:
        trainer.validate(Gathering(), DataLoader(RandomTokens(5), batch_size=2), verbose=False)
    return str(told.value)


def test_shares_of_different_sizes_are_not_gathered() -> None:
    for told in run_pooled(2, gathers):
        assert re.search(r"all_gather of tensors of the shapes \[3, \d+\], \[2, \d+\], one .*CatMetric", told)


def test_sums_of_users_count_every_sample_once() -> None:
    ranks = run_pooled(4, counts_of)
    assert sum(rank["buffer"] for rank in ranks) == 3
    for name in ("number", "tensor", "kept", "meters", "lazily"):
        assert sum(rank[name] for rank in ranks) == 21, name
    assert sum(rank["nested"][0] for rank in ranks) == 21
    assert sum(rank["meter"][1] for rank in ranks) == sum(rank["meter"][0] for rank in ranks) == 21
    assert sum(rank["callback"] for rank in ranks) == 3
    totals: Counter[str] = sum((Counter(rank["by_stage"]) for rank in ranks), Counter())
    assert totals == {"train": 18, "val": 3}
    assert sum(rank["metric"] for rank in ranks) == 4 + 4 + 2 + 3, "batches with samples, over ranks"
