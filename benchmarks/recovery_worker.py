"""One rank of moe-bench recovery: trains a small model under whatever launcher started it, and keeps a diary.

The diary is a file of this process with a JSON line for its start, for every finished step and for every recovery, so
that it survives the process. Ranks end at the step that a file named "stop" in the folder tells, once it is there.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from typing_extensions import override

from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.callbacks.fault_injection import FaultInjection
from moe_lightning.callbacks.fault_recovery import FaultRecovery
from moe_lightning.cli.short_training import StepClock, gpt, quiet_trainer, random_text, write_job
from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
from moe_lightning.strategies import ExpertParallelStrategy
from moe_lightning.strategies.worlds import ExpertParallelCallback, RecoveryReport

STOP = "stop"
_SAMPLES = 4096
_FOREVER = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one training of the benchmark does.

    Attributes:
        folder: for diaries, checkpoints and marks of faults.
        ranks: workers of the first world.
        steps: after which it ends; 0: when it is told to.
        stock: plain DDP with Lightning's ModelCheckpoint instead of ours.
        recovery: arguments of FaultRecovery; None: without it.
        every_n_steps: between checkpoints; 0: none.
        windows: when snapshots are copied.
        strategy: arguments of ExpertParallelStrategy.
        faults: arguments of FaultInjection; None: without it.
        batch: sequences of all ranks together.
        context, d_model, d_expert, layers, experts: of the model.
        cores: the ranks take turns in being pinned to them; empty: not pinned.
    """

    folder: str
    ranks: int
    steps: int = 0
    stock: bool = False
    recovery: dict[str, Any] | None = None
    every_n_steps: int = 0
    windows: Literal["any", "scheduled"] = "any"
    strategy: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, Any] | None = None
    batch: int = 12
    context: int = 64
    d_model: int = 64
    d_expert: int = 128
    layers: int = 2
    experts: int = 8
    cores: tuple[int, ...] = ()

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go; the folder's name is that of the run, and of its snapshots."""
        return Path(self.folder) / "checkpoints"

    def job(self) -> list[str]:
        """Arguments of the ranks that do it."""
        return write_job(Path(self.folder), "benchmarks.recovery_worker:train", asdict(self), self.cores)


class Diary(StepClock, ExpertParallelCallback):
    """Writes down what this process does as it happens."""

    def __init__(self, folder: Path, slot: int) -> None:
        self._stop = folder / STOP
        self._file = (folder / f"diary-{slot}-{os.getpid()}.jsonl").open("a", buffering=1)
        super().__init__()
        self.write("start", slot=slot, pid=os.getpid())

    def write(self, kind: str, **facts: Any) -> None:
        """Append one line."""
        self._file.write(json.dumps({"kind": kind, "time_s": time.time(), **facts}) + "\n")

    @override
    def on_recovered(self, trainer: pl.Trainer, pl_module: pl.LightningModule, report: RecoveryReport) -> None:
        self.write("recovery", **asdict(report))

    @override
    def note(self, trainer: pl.Trainer) -> None:
        strategy = trainer.strategy
        ranks = strategy.world.size if isinstance(strategy, ExpertParallelStrategy) else trainer.world_size
        self.write("step", step=trainer.global_step, ranks=ranks, step_s=self.step_s[-1], cpu_s=self.cpu_s[-1])
        if self._stop.exists() and trainer.global_step >= int(self._stop.read_text()):
            trainer.should_stop = True


def train(settings: dict[str, Any]) -> None:
    """Train until the end that the task or the stop file says."""
    task = Task(**settings)
    callbacks: list[pl.Callback] = []
    if task.every_n_steps and task.stock:
        callbacks.append(
            ModelCheckpoint(
                task.checkpoints, every_n_train_steps=task.every_n_steps, save_last=True, save_on_train_epoch_end=False
            )
        )
    elif task.every_n_steps:
        callbacks.append(
            PartialExpertsCheckpoint(
                str(task.checkpoints),
                every_n_steps=task.every_n_steps,
                save_on_train_end=False,
                timeout_s=240.0,
                windows=task.windows,
            )
        )
    if task.recovery is not None:
        callbacks.append(FaultRecovery(**task.recovery))
    if task.faults is not None:
        callbacks.append(FaultInjection(str(Path(task.folder) / "faults"), **task.faults))
    callbacks.append(Diary(Path(task.folder), int(os.environ.get("LOCAL_RANK", 0))))
    pl.seed_everything(0, verbose=False)
    strategy = "ddp" if task.stock else ExpertParallelStrategy(timeout_s=60.0, **task.strategy)
    trainer = quiet_trainer(
        strategy,
        steps=task.steps or _FOREVER,
        callbacks=callbacks,
        max_epochs=_FOREVER,
        devices=task.ranks,
        **({"plugins": []} if task.stock else {}),
    )
    batch = task.batch // task.ranks if task.stock else task.batch
    loader = DataLoader(random_text(_SAMPLES, task.context), batch, shuffle=True)
    is_tied = task.strategy.get("mesh", {}).get("pp", 1) == 1
    module = GPTModule(gpt(task, tie_embeddings=is_tied), OptimizerConfig(lr=1e-4, warmup_steps=0, decay="constant"))
    trainer.fit(module, loader, ckpt_path=_last(task))
    if isinstance(trainer.strategy, ExpertParallelStrategy):
        trainer.strategy.elastic.close()


def _last(task: Task) -> str | None:
    """What a process that starts over goes on from."""
    if task.stock:
        last = task.checkpoints / "last.ckpt"
        return str(last) if last.exists() else None
    return str(task.checkpoints) if any(task.checkpoints.glob("step-*")) else None
