"""Trainings on a fake device with `offload_optimizer` and without, in interpreted ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from moe_lightning import kernels as ops
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.state import tensors
from tests.gpu.fake_device import NAME, set_up
from tests.gpu.fake_training import fit, meet

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


def run(rank: int, ranks: int, dense: str, folder: str) -> dict[str, Any]:
    set_up()
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters are to stay the same objects
    fake, locked = meet(rank, ranks), list[int]()
    fit_here = partial(fit, rank, ranks, steps=STEPS)
    lock = tensors.page_locked

    def counted(shape: Any, dtype: torch.dtype) -> Tensor:
        locked.append(lock(shape, dtype).nbytes)
        return lock(shape, dtype)

    tensors.page_locked = counted
    plain, offloaded = {"dense": dense}, {"dense": dense, "offload_optimizer": True}
    with fake, ops.backend("triton"):
        there, here = States(), States()
        found: dict[str, Any] = {"expected": fit_here(plain, there)}
        before = fake.take()
        found["losses"] = fit_here(offloaded, here)
        after = fake.take()
        found |= {"uploaded": after.uploaded - before.uploaded, "blocked": len(after.uploads) - len(before.uploads)}
        found |= {"waited": len(after.waits) - len(before.waits), "locked": sum(locked)}
        found |= {"there": there.bytes, "here": here.bytes}
        for name, first, then in (("to host", plain, offloaded), ("from host", offloaded, plain)):
            saver = PartialExpertsCheckpoint(f"{folder}/{name}", every_n_steps=1)
            saved = fit_here(first, saver, steps=SAVED)
            found[name] = saved + fit_here(then, ckpt=f"{folder}/{name}/step-{SAVED:08d}")
    return found
