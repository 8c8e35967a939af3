"""Trainings on a fake device with `offload_optimizer` and without, in interpreted ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from moe_lightning import kernels as ops
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.state import tensors
from moe_lightning.strategies import gradients
from tests.distributed.training import RandomTokens, Recorder, make_trainer
from tests.gpu.fake_comms import meet_on_the_device, set_up_comms
from tests.gpu.fake_device import NAME, FakeDevice, set_up
from tests.gpu.fake_training import FakeAccelerator, Module, SummedGradients
from tests.gpu.triton_modules import launching_modules

STEPS, SAVED = 3, 2


class States(pl.Callback):
    """After each step: bytes of dense optimizer states by the device that they are on."""

    def __init__(self) -> None:
        self.bytes: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        found = {"cpu": 0, NAME: 0}
        experts = trainer.strategy.experts.stack_of  # type: ignore[attr-defined]
        for parameter, state in trainer.optimizers[0].state.items():
            assert parameter.device.type == NAME
            for value in state.values():
                if value.ndim and parameter not in experts:
                    found[value.device.type] += value.nbytes
        self.bytes.append(found)


def fit(
    rank: int, ranks: int, strategy: dict[str, Any], *callbacks: pl.Callback, steps: int = STEPS, ckpt: Any = None
) -> list[float]:
    recorder = Recorder()
    trainer = make_trainer(
        rank, ranks, strategy, callbacks=[*callbacks, recorder],
        accelerator=FakeAccelerator(), gradient_clip_val=1.0, max_steps=steps, limit_val_batches=0,
        enable_checkpointing=any(isinstance(callback, PartialExpertsCheckpoint) for callback in callbacks),
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(RandomTokens(48, length=4), batch_size=6, shuffle=False), ckpt_path=ckpt)
    return recorder.losses


def run(rank: int, ranks: int, dense: str, folder: str) -> dict[str, Any]:
    set_up()
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters are to stay the same objects
    fake, locked = FakeDevice(), list[int]()
    set_up_comms()
    meet_on_the_device(rank, ranks)
    for room in launching_modules():
        room.launch = fake.launch  # type: ignore[assignment]
    gradients.DistributedDataParallel = SummedGradients  # type: ignore[assignment, misc]
    lock = tensors.page_locked

    def counted(shape: Any, dtype: torch.dtype) -> Tensor:
        locked.append(lock(shape, dtype).nbytes)
        return lock(shape, dtype)

    tensors.page_locked = counted
    plain, offloaded = {"dense": dense}, {"dense": dense, "offload_optimizer": True}
    with fake, ops.backend("triton"):
        there, here = States(), States()
        found: dict[str, Any] = {"expected": fit(rank, ranks, plain, there)}
        before = fake.take()
        found["losses"] = fit(rank, ranks, offloaded, here)
        after = fake.take()
        found |= {"uploaded": after.uploaded - before.uploaded, "blocked": len(after.uploads) - len(before.uploads)}
        found |= {"waited": len(after.waits) - len(before.waits), "locked": sum(locked)}
        found |= {"there": there.bytes, "here": here.bytes}
        for name, first, then in (("to host", plain, offloaded), ("from host", offloaded, plain)):
            saver = PartialExpertsCheckpoint(f"{folder}/{name}", every_n_steps=1)
            saved = fit(rank, ranks, first, saver, steps=SAVED)
            found[name] = saved + fit(rank, ranks, then, ckpt=f"{folder}/{name}/step-{SAVED:08d}")
    return found
