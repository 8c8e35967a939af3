"""A loss that is no finite number is told with rank, step and samples, and may end the run or cost one step."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from moe_lightning.data.sampler import StepSampler
from moe_lightning.errors import NonFiniteLossError
from tests.distributed.harness import run_ranks
from tests.distributed.training import OwnModule, RandomTokens, Recorder, make_trainer
from tests.parameters import slow

BAD = 77
"""A sample of which the loss is no number."""


class Numbered(RandomTokens):
    """Samples that know their number."""

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), index


class Module(OwnModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, numbers = batch
        loss = super().training_step((x, y), batch_idx)
        return loss * math.nan if BAD in numbers.tolist() else loss


def fit(rank: int, world_size: int, stop: str | None, options: dict[str, Any]) -> dict[str, Any]:
    recorder, text = Recorder(), io.StringIO()
    trainer = make_trainer(rank, world_size, {"stop_on_nan": stop, **options}, callbacks=[recorder], max_steps=8)
    module, told = Module(), ""
    with contextlib.redirect_stderr(text):
        try:
            trainer.fit(module, DataLoader(Numbered(), batch_size=12))
        except NonFiniteLossError as error:
            told = str(error)
    is_whole = all(bool(p.isfinite().all()) for p in module.parameters())
    return {"told": told, "steps": trainer.global_step, "whole": is_whole, "text": text.getvalue()}


def words_of(rank_of_bad: int) -> str:
    samples = range(72, 78) if rank_of_bad == 0 else range(78, 84)
    listed = ", ".join(map(str, samples))
    return f"the loss is nan on rank {rank_of_bad} in the step after step 6 (samples {listed} of the data set)"


def test_it_is_told_once() -> None:
    found = run_ranks(2, fit, None, {})
    assert [result["steps"] for result in found] == [8, 8]
    assert not found[0]["whole"]
    told = [line for result in found for line in result["text"].splitlines() if "the loss is" in line]
    assert told == [f"warning: {words_of(0)}; training goes on: stop_on_nan=end or skip would stop it"]


@pytest.mark.parametrize("options", [{}, slow({"dense": "fsdp"}), slow({"dense": "zero1"})])
def test_the_run_ends_before_the_update(options: dict[str, Any]) -> None:
    found = run_ranks(2, fit, "end", options)
    assert [result["steps"] for result in found] == [6, 6]
    assert all(result["whole"] for result in found)
    assert all(result["told"].startswith(f"{words_of(0)}: the run ends before this update") for result in found)


@pytest.mark.parametrize("options", [{}, slow({"dense": "fsdp"}), slow({"dense": "zero1"})])
def test_the_update_is_left_out(options: dict[str, Any]) -> None:
    found = run_ranks(2, fit, "skip", options)
    assert [(result["told"], result["steps"], result["whole"]) for result in found] == [("", 8, True)] * 2


def test_the_samples_of_a_slice_are_those_of_its_batch() -> None:
    for shuffle in (False, True):
        sampler = StepSampler(
            num_samples=26, global_batch_size=8, num_micros=2, rank=1, world_size=2, seed=3, shuffle=shuffle, pieces=2
        )
        position = 0
        for _ in range(12):
            here = sampler.slice_at(position)
            indices = sampler.indices_at(position)
            assert sampler.indices_of(here) == list(getattr(indices, "of_samples", indices))
            position += here.micro_total
