"""A worker of an elastic training on the fake device, for `tests.chaos.elastic_runs`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from moe_lightning.strategies import steps as passes
from tests.gpu.fake_comms import set_up_comms
from tests.gpu.fake_device import FakeDevice, set_up
from tests.gpu.fake_streams import assert_no_races, locked_bytes
from tests.gpu.fake_training import FakeAccelerator, SummedGradients


class NoRaces(pl.Callback):
    """Looks for them when the training has ended."""

    def on_fit_end(self, *_: Any) -> None:
        assert_no_races()


class LockedMemory(pl.Callback):
    """Leaves what is page-locked after each step, and how many ranks made it."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"locked-{os.getpid()}.jsonl").open("a", buffering=1)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        line = {"step": trainer.global_step, "ranks": trainer.world_size, "bytes": locked_bytes()}
        self._file.write(json.dumps(line) + "\n")


def on_the_device(folder: Path | None = None) -> list[pl.Callback]:
    """Called in a process before its Trainer is made."""
    set_up()
    set_up_comms()
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters are to stay the same objects
    passes.DistributedDataParallel = SummedGradients  # type: ignore[assignment, misc]
    pl.LightningModule.cpu = lambda self: self  # type: ignore[method-assign]  # after training nothing is swapped back
    FakeDevice().__enter__()  # to the end of the process
    return [NoRaces(), *([] if folder is None else [LockedMemory(folder)])]


def options() -> dict[str, Any]:
    """Of `elastic_run`."""
    return {"callbacks": on_the_device, "trainer_options": {"accelerator": FakeAccelerator()}}
