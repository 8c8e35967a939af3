"""Norms of gradients over all ranks, parameter by parameter: those of one rank."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm

from moe_lightning import gradient_norms
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.training import train


class Norms(pl.Callback):
    """Of one training's gradients, by our function or by Lightning's."""

    def __init__(self, norms: Any) -> None:
        self._norms = norms
        self.found: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.found = {name: float(norm) for name, norm in self._norms(pl_module).items()}


def norms(rank: int, world_size: int, strategy: dict[str, Any], of_lightning: bool = False) -> dict[str, float]:
    seen = Norms(partial(grad_norm, norm_type=2) if of_lightning else gradient_norms)
    result = train(rank, world_size, strategy=strategy, steps=2, callbacks=[seen])
    assert seen.found["grad_2.0_norm_total"] == pytest.approx(result["gradient_norms"][-1])
    return seen.found


@cache
def of_one_rank() -> dict[str, float]:
    found: dict[str, float] = run_ranks(1, norms, {}, True)[0]
    return found


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, {"dense": "fsdp"}),
        pytest.param(4, {"dense": "hsdp", "copies": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"dense": "zero1", "copies": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"mesh": {"tp": 2}}, marks=pytest.mark.slow),
    ],
)
def test_norms_are_those_of_one_rank(ranks: int, strategy: dict[str, Any]) -> None:
    for found in run_ranks(ranks, norms, strategy):
        assert found == pytest.approx(of_one_rank(), rel=1e-3, abs=1e-6)


class ClipsByStockMeans(pl.Callback):
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)


def clip(rank: int, world_size: int) -> None:
    train(rank, world_size, strategy={"dense": "fsdp"}, steps=1, callbacks=[ClipsByStockMeans()])


@pytest.mark.parametrize("function", [clip, partial(norms, strategy={"dense": "fsdp"}, of_lightning=True)])
def test_stock_functions_name_ours(function: Any) -> None:
    with pytest.raises(RankFailure, match=r"norm_? cannot read gradients .* use moe_lightning.gradient_norms"):
        run_ranks(2, function)
