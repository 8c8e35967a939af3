"""Trainings on a fake device, with snapshots and a restart from them, in interpreted ranks."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from moe_lightning import kernels as ops
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.moe.layer import MoELayer
from moe_lightning.strategies import steps as passes
from tests.distributed.training import OwnModule, RandomTokens, Recorder, make_trainer
from tests.gpu.fake_comms import meet_on_the_device, set_up_comms
from tests.gpu.fake_device import NAME, FakeDevice, set_up
from tests.gpu.fake_layer import told
from tests.gpu.triton_modules import launching_modules

STEPS, SAVED = 4, 2
CHECKED = 2  # the only step below STEPS in which ranks check the state


class FakeAccelerator(Accelerator):
    """Says to Lightning that the device is there."""

    @override
    def setup_device(self, device: torch.device) -> None: ...

    @override
    def teardown(self) -> None: ...

    @override
    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    @override
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    @override
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, 0)] * devices

    @staticmethod
    @override
    def auto_device_count() -> int:
        return 1

    @staticmethod
    @override
    def is_available() -> bool:
        return True

    @staticmethod
    @override
    def name() -> str:
        return NAME


class Module(OwnModule):
    """A small one, which stays where it is when training has ended: its parameters cannot be swapped again."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.embed = nn.Embedding(64, 16)
        self.moe = MoELayer(16, 16, num_experts=4, router={"top_k": 2})
        self.out = nn.Linear(16, 64)

    @override
    def cpu(self) -> Module:
        return self


class SummedGradients(nn.Module):
    """In place of DistributedDataParallel, whose reducer is C++ over the device's own communicators."""

    def __init__(self, module: nn.Module, devices: Any, process_group: Any, **_: Any) -> None:
        super().__init__()
        self.module, self._group, self._arrived = module, process_group, 0
        kept = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._summed = [p for name, p in module.named_parameters() if name not in kept]
        for parameter in self._summed:
            dist.broadcast(parameter.data, 0, group=process_group)
            arrived = weakref.WeakMethod(self._arrive)
            handle = parameter.register_post_accumulate_grad_hook(lambda p, arrived=arrived: arrived()(p))
            weakref.finalize(self, handle.remove)  # as the reducer goes with its world

    def register_comm_hook(self, state: Any, hook: Any) -> None: ...

    def _arrive(self, parameter: Tensor) -> None:
        self._arrived += 1
        if self._arrived == len(self._summed):
            self._arrived = 0
            for each in self._summed:
                dist.all_reduce(each.grad, group=self._group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class StepCounts(pl.Callback):
    """What the device was asked in each step, from the batch's arrival to the end of the update."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._device.take()

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(told(self._device.take()))


def fit(
    rank: int, ranks: int, strategy: dict[str, Any], *callbacks: pl.Callback, accelerator: Any = None,
    steps: int = STEPS, ckpt: Any = None,
) -> list[float]:  # fmt: skip
    """Its losses, on the fake device unless on another accelerator."""
    recorder = Recorder()
    trainer = make_trainer(
        rank, ranks, {"check_state_every": CHECKED, **strategy}, callbacks=[*callbacks, recorder],
        accelerator=accelerator or FakeAccelerator(), gradient_clip_val=1.0, max_steps=steps, limit_val_batches=0,
        enable_checkpointing=any(isinstance(callback, PartialExpertsCheckpoint) for callback in callbacks),
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(RandomTokens(48, length=4), batch_size=6, shuffle=False), ckpt_path=ckpt)
    return recorder.losses


def meet(rank: int, ranks: int) -> FakeDevice:
    """Let trainings of this process run on the device and between its ranks, and kernels launch there."""
    fake = FakeDevice()
    set_up_comms()
    meet_on_the_device(rank, ranks)
    for room in launching_modules():
        room.launch = fake.launch  # type: ignore[assignment]
    passes.DistributedDataParallel = SummedGradients  # type: ignore[assignment, misc]
    return fake


def run(rank: int, ranks: int, plan: str, folder: str) -> dict[str, Any]:
    """Losses on the device, those of the CPU beside them, and what a step asked of the device."""
    set_up()
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters are to stay the same objects
    fit_here = partial(fit, rank, ranks, {"plan": plan})
    found: dict[str, Any] = {"expected": fit_here(accelerator="cpu")}
    fake = meet(rank, ranks)
    passes._WATCHED_STEPS = 1  # later steps do not look at targets, which waits
    with fake, ops.backend("triton"):
        counts = StepCounts(fake)
        found["losses"] = fit_here(counts)
        found["steps"] = counts.steps
        saver = PartialExpertsCheckpoint(f"{folder}/steps", every_n_steps=1)
        fake.take()
        before = fit_here(saver, steps=SAVED)
        found["downloaded"] = fake.take().downloaded
        found["state_bytes"] = SAVED * 3 * sum(p.nbytes for p in Module().moe.experts.parameters()) // ranks
        found["restarted"] = before + fit_here(ckpt=f"{folder}/steps/step-{SAVED:08d}")
    return found
