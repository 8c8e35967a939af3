"""The ways to train and to save that moe-bench compare compares, and callbacks that save and note the stall."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.checkpoint.arena import arena_path
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.strategies import ExpertParallelStrategy

TIMEOUT = timedelta(seconds=120)
MICRO_BATCHES = 4
"""Of the pipeline."""

OURS: dict[str, dict[str, Any]] = {
    "expert_parallel": {},
    "zero1": {"dense": "zero1"},
    "cut": {"dense": "fsdp"},
    "cp": {"mesh": {"cp": 2}},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, "micro_batches": MICRO_BATCHES},
}
"""Our strategies by the options of each."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train and to save.

    Attributes:
        strategy: "ddp" and "fsdp" are stock Lightning, FSDP as its ModelParallelStrategy with FSDP2; the others are
            `OURS`.
        loop: compute experts one after the other, as stock PyTorch code does.
        saving: "file" and "thread" are Lightning's ModelCheckpoint, the latter with its AsyncCheckpointIO; "dcp" is
            torch's async_save; "every" and "quarter" are our callback with all of the experts or E/4; None: not at all.
        each_step: save after every step; False: as often as the others.
    """

    strategy: Literal["ddp", "fsdp", "expert_parallel", "zero1", "cut", "cp", "tp", "pp"]
    loop: bool = False
    saving: Literal["file", "thread", "dcp", "every", "quarter"] | None = None
    each_step: bool = False

    @property
    def is_ours(self) -> bool:
        return self.strategy in OURS

    def saves_every(self, steps: int) -> int:
        """Steps between its checkpoints, where the others save every so many."""
        return 1 if self.each_step else steps


TRAININGS = {
    "DDP, loop": Contender(strategy="ddp", loop=True),
    "DDP, our layer": Contender(strategy="ddp"),
    "FSDP2, loop": Contender(strategy="fsdp", loop=True),
    "FSDP2, our layer": Contender(strategy="fsdp"),
    "ours": Contender(strategy="expert_parallel"),
    "ours, zero1": Contender(strategy="zero1"),
    "ours, fsdp": Contender(strategy="cut"),
    "ours, cp": Contender(strategy="cp"),
    "ours, tp": Contender(strategy="tp"),
    f"ours, pp, {MICRO_BATCHES} micro-batches": Contender(strategy="pp"),
}
SAVINGS = {
    "DDP, ModelCheckpoint": Contender(strategy="ddp", saving="file"),
    "DDP, AsyncCheckpointIO": Contender(strategy="ddp", saving="thread"),
    "DDP, dcp.async_save": Contender(strategy="ddp", saving="dcp"),
    "FSDP2, ModelCheckpoint": Contender(strategy="fsdp", saving="file"),
    "ours, every expert": Contender(strategy="expert_parallel", saving="every"),
    "ours, every expert, each step": Contender(strategy="expert_parallel", saving="every", each_step=True),
    "ours, K = E/4, each step": Contender(strategy="expert_parallel", saving="quarter", each_step=True),
}
BASES = {"ddp": "DDP, our layer", "fsdp": "FSDP2, our layer", "expert_parallel": "ours"}
"""The training without checkpoints that each way to save is compared with."""


class Timed(pl.Callback):
    """Mixed into a callback that saves: notes the seconds that the trainer spends in it in each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stalls_s: list[float] = []
        self._running_s = 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._running_s += time.perf_counter() - began

    def on_before_optimizer_step(self, *args: Any) -> None:
        with self._timed():
            super().on_before_optimizer_step(*args)

    def on_train_batch_end(self, *args: Any) -> None:
        with self._timed():
            super().on_train_batch_end(*args)
        self.stalls_s.append(self._running_s)
        self._running_s = 0.0


class AsyncSave(pl.Callback):
    """Saves as the documentation of torch.distributed.checkpoint says."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__()
        self._folder, self._every = folder, every
        # Competitors are imported where they are used, so that nothing else of the benchmarks depends on them.
        self._dist = importlib.import_module("torch.distributed")
        self._dcp = importlib.import_module("torch.distributed.checkpoint")
        self._state_of = importlib.import_module("torch.distributed.checkpoint.state_dict").get_state_dict
        # Its thread and the training may not use one group at the same time.
        self._group = self._dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._pending: Any = None

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step % self._every:
            return
        self._settle()
        model, optimizer = self._state_of(trainer.strategy.model, trainer.optimizers)
        target = self._folder / f"step-{trainer.global_step}"
        self._pending = self._dcp.async_save(
            {"model": model, "optimizer": optimizer}, checkpoint_id=str(target), process_group=self._group
        )

    def _settle(self) -> None:
        if self._pending is not None:
            self._pending.result()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._settle()
        self._dist.destroy_process_group(self._group)


class TimedModelCheckpoint(Timed, ModelCheckpoint):
    """Lightning's, with its stall noted."""


class TimedAsyncSave(Timed, AsyncSave):
    """DCP's, with its stall noted."""


class TimedPartialExpertsCheckpoint(Timed, PartialExpertsCheckpoint):
    """Ours, with its stall noted, and the shared memory that the snapshots of a rank take. The last step of the warm-up
    waits for the first checkpoint, so that the start of the process that writes is not measured.
    """

    memory_bytes = 0

    def __init__(self, folder: Path, *, warmup: int, **options: Any) -> None:
        super().__init__(str(folder), save_on_train_end=False, **options)
        self._folder, self._warmup = folder, warmup

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._warmup - 1:
            deadline = time.monotonic() + TIMEOUT.total_seconds()
            while trainer.is_global_zero and not checkpoints(self._folder) and time.monotonic() < deadline:
                time.sleep(0.05)
            trainer.strategy.barrier()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(trainer.strategy, ExpertParallelStrategy)
        arenas = self.recovery_sources(trainer.strategy).arenas
        assert arenas is not None
        self.memory_bytes = arena_path(arenas, trainer.global_rank).stat().st_size
        super().on_train_end(trainer, pl_module)


def saving_callback(contender: Contender, folder: Path, *, num_experts: int, every: int, warmup: int) -> Timed | None:
    """Return the callback that saves under a contender; None if it does not save.

    Args:
        warmup: unmeasured steps.
    """
    match contender.saving:
        case None:
            return None
        case "file" | "thread":
            return TimedModelCheckpoint(folder, every_n_train_steps=every, save_on_train_epoch_end=False)
        case "dcp":
            return TimedAsyncSave(folder, every)
        case "every" | "quarter":
            k = num_experts if contender.saving == "every" else max(1, num_experts // 4)
            return TimedPartialExpertsCheckpoint(folder, warmup=warmup, every_n_steps=every, k_snapshot=k)


def bytes_of_one(folder: Path, contender: Contender) -> int:
    """What the last checkpoint wrote: ours without what it carries over, stock ones a file or a folder of files."""
    if contender.saving is None:
        return 0
    if contender.saving in ("every", "quarter"):
        return checkpoints(folder)[0][1].new_bytes
    last = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return sum(path.stat().st_size for path in (last, *last.rglob("*")) if path.is_file())
