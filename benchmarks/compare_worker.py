"""One rank of moe-bench compare: trains the same small model in every way, and saves it in every way."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from benchmarks.compare import Options
from benchmarks.compare_contenders import (
    OURS,
    SAVINGS,
    TIMEOUT,
    TRAININGS,
    Contender,
    bytes_of_one,
    saving_callback,
)
from benchmarks.layer import LoopLayer
from benchmarks.peak_memory import PeakMemory, give_back_at_once
from moe_lightning.cli.short_training import StepClock, gpt, quiet_trainer, random_text
from moe_lightning.models.gpt import GPTConfig
from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
from moe_lightning.moe.router import RouterConfig
from moe_lightning.parallel.context import join_local_world
from moe_lightning.state.tensors import local
from moe_lightning.strategies import ExpertParallelStrategy


def warmup_steps(every: int) -> int:
    """Unmeasured steps: at least three, and a multiple of the interval of checkpoints with one of them inside."""
    return every * (1 + -(-3 // every))


class ComparedModule(GPTModule):
    """The benchmarked GPT under one contender."""

    def __init__(self, config: GPTConfig, contender: Contender) -> None:
        super().__init__(config, OptimizerConfig(lr=1e-4, warmup_steps=0))
        self._contender = contender

    @override
    def configure_model(self) -> None:
        super().configure_model()
        if self._contender.loop:
            for block in self.model.blocks:
                block.feed_forward = LoopLayer(block.feed_forward)  # type: ignore[arg-type]
        if self._contender.strategy == "fsdp":
            # Competitors are imported where they are used, so that nothing else of the benchmarks depends on them.
            fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for block in (*self.model.blocks, self.model):
                fully_shard(block, mesh=mesh)


class MemoryWatch(StepClock):
    """Notes, too, the bytes of parameters and optimizer state that live on this rank, and the peak of its memory.

    Args:
        first: unmeasured steps.
    """

    state_bytes = 0
    peak_bytes: int | None = None

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first, self._memory = first, PeakMemory()

    @override
    def note(self, trainer: pl.Trainer) -> None:
        if trainer.global_step == self._first:
            self._memory.restart()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.peak_bytes = self._memory.bytes()
        tensors: list[Any] = list(pl_module.parameters())
        for optimizer in trainer.optimizers:
            tensors += [value for state in optimizer.state.values() for value in state.values()]
        self.state_bytes = sum(local(t).nbytes for t in tensors if isinstance(t, torch.Tensor))


_COLLECTIVES: Any = importlib.import_module("torch.distributed.distributed_c10d")
_STOCK_OBJECTS = _COLLECTIVES._pickler, _COLLECTIVES._unpickler
"""How torch carries objects of any class, which dcp needs; our strategy carries plain values only."""


def measure_all(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What this rank saw of everything that the settings name, in turns."""
    names, results = settings.pop("contenders"), Path(settings.pop("folder"))
    options, rows = Options(**settings), []
    if options.memory:
        give_back_at_once()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join_local_world(rank=rank, size=ranks, backend="gloo", device=torch.device("cpu"), timeout=TIMEOUT)
    for index in range(options.rounds):
        for number, (name, contender) in enumerate((TRAININGS | SAVINGS).items()):
            if name not in names:
                continue
            folder = results / f"compared{index}-{number}"
            found = measure(contender, options, folder / "checkpoints", rank, ranks)
            if rank == 0:
                found["disk_bytes"] = bytes_of_one(folder / "checkpoints", contender)
                shutil.rmtree(folder, ignore_errors=True)
            print(f"round {index + 1}, {name}: {1e3 * found['mean_step_s']:.1f} ms a step", flush=True)
            rows.append({"round": index, "contender": name} | found)
            gc.collect()  # the wrapped model before is a cycle
    return rows


def measure(contender: Contender, options: Options, folder: Path, rank: int, ranks: int) -> dict[str, float]:
    """Train and save under one contender; what this rank saw."""
    if not contender.is_ours:
        _COLLECTIVES._pickler, _COLLECTIVES._unpickler = _STOCK_OBJECTS
    pl.seed_everything(0, verbose=False)
    every, first = contender.saves_every(options.every), warmup_steps(options.every)
    watch = MemoryWatch(first)
    saving = saving_callback(contender, folder, num_experts=options.experts, every=every, warmup=first)
    strategy = _strategy(contender, ranks)
    trainer = quiet_trainer(
        strategy,
        steps=first + options.steps,
        callbacks=[watch, *([saving] if saving is not None else [])],
        plugins=[LightningEnvironment(), *([AsyncCheckpointIO()] if contender.saving == "thread" else [])],
        use_distributed_sampler=False,  # it would shuffle, and not everywhere alike
    )
    # The loop over experts knows no biases, and a pipeline no tied embeddings.
    config = gpt(options, bias=False, tie_embeddings=False, router=RouterConfig(top_k=2, aux_loss_coef=0.0))
    trainer.fit(ComparedModule(config, contender), _loader(contender, options, trainer.max_steps, rank, ranks))
    if isinstance(strategy, ExpertParallelStrategy):
        strategy.world.close()
    measured = slice(first, None)  # with the saves after steps `first` to the last but one
    found = {
        "step_s": statistics.median(watch.step_s[measured]),
        "mean_step_s": statistics.mean(watch.step_s[measured]),
        "cpu_s": statistics.median(watch.cpu_s[measured]),
        "state_bytes": watch.state_bytes,
        "loss": float(trainer.callback_metrics["train/loss"]),
    }
    if watch.peak_bytes is not None:
        found["peak_bytes"] = watch.peak_bytes
    if saving is not None:
        saves = range(first, first + options.steps, every)
        found["stall_s"] = statistics.median(saving.stalls_s[step - 1] for step in saves)
        found["memory_bytes"] = getattr(saving, "memory_bytes", 0)
    return found


def _strategy(contender: Contender, ranks: int) -> Strategy:
    if contender.strategy == "ddp":
        return DDPStrategy(timeout=TIMEOUT)
    if contender.strategy == "fsdp":
        return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, timeout=TIMEOUT)
    return ExpertParallelStrategy(**OURS[contender.strategy], timeout_s=TIMEOUT.total_seconds())


def _loader(contender: Contender, options: Options, steps: int, rank: int, ranks: int) -> DataLoader[Any]:
    """The same global batches for everybody; ours cuts them itself."""
    samples = random_text(options.batch * steps, options.context, torch.Generator().manual_seed(1))
    if contender.is_ours:
        return DataLoader(samples, options.batch)
    sampler: DistributedSampler[Any] = DistributedSampler(samples, ranks, rank, shuffle=False)
    return DataLoader(samples, options.batch // ranks, sampler=sampler)
