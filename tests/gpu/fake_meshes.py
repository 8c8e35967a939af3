"""A small GPT in sharded dense parameters and meshes of 2 ranks: its losses on the CPU and on the fake device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, OptimizerConfig
from moe_lightning.parallel import collectives
from tests.distributed.training import TINY, RandomTokens, Recorder, make_trainer
from tests.gpu.fake_comms import meet_on_the_device
from tests.gpu.fake_device import OnDevice, set_up
from tests.gpu.fake_elastic import on_the_device
from tests.gpu.fake_streams import assert_no_races
from tests.gpu.fake_training import FakeAccelerator

STEPS = 3


def run(rank: int, ranks: int, strategy: dict[str, Any]) -> dict[str, list[float]]:
    """Of one rank."""
    set_up()  # before any backward: autograd counts the devices once
    expected = fit(rank, ranks, strategy, "cpu")
    on_the_device()
    torch.utils.swap_tensors = _swapped
    collectives._TAGS[OnDevice] = "tensor"  # it knows no subclasses
    meet_on_the_device(rank, ranks)
    losses = fit(rank, ranks, strategy, FakeAccelerator())
    assert_no_races()
    return {"expected": expected, "losses": losses}


def _swapped(here: Tensor, there: Tensor, swap: Any = torch.utils.swap_tensors) -> None:
    """Attributes of a parameter stay with it, as they do on its way to another device."""
    kept = dict(vars(here))
    swap(here, there)
    vars(here).update(kept)


def fit(rank: int, ranks: int, strategy: dict[str, Any], accelerator: Any) -> list[float]:
    recorder = Recorder()
    trainer = make_trainer(
        rank, ranks, strategy, callbacks=[recorder], accelerator=accelerator, gradient_clip_val=1.0, max_steps=STEPS
    )
    module = GPTModule(TINY | {"tie_embeddings": False}, OptimizerConfig(lr=3e-3))
    trainer.fit(module, DataLoader(RandomTokens(48), batch_size=8, shuffle=False))
    return recorder.losses
