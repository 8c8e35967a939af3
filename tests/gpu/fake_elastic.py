"""A worker of an elastic training on the fake device, for `tests.chaos.elastic_runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from moe_lightning.strategies import world_ddp
from tests.gpu.fake_comms import set_up_comms
from tests.gpu.fake_device import FakeDevice, set_up
from tests.gpu.fake_training import FakeAccelerator, SummedGradients


def on_the_device(folder: Path | None = None) -> list[pl.Callback]:
    """Called in a process before its Trainer is made."""
    set_up()
    set_up_comms()
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters are to stay the same objects
    world_ddp.DistributedDataParallel = SummedGradients  # type: ignore[assignment, misc]
    pl.LightningModule.cpu = lambda self: self  # type: ignore[method-assign]  # after training nothing is swapped back
    FakeDevice().__enter__()  # to the end of the process
    return []


def options() -> dict[str, Any]:
    """Of `elastic_run`."""
    return {"callbacks": on_the_device, "trainer_options": {"accelerator": FakeAccelerator()}}
