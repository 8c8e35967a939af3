"""One rank of moe-bench compare: trains the same small model in every way, and saves it in every way."""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import statistics
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typing_extensions import override

from moe_lightning.bench.balance_worker import model_config
from moe_lightning.bench.compare_contenders import (
    SAVINGS,
    TIMEOUT,
    TRAININGS,
    Contender,
    bytes_of_one,
    saving_callback,
)
from moe_lightning.bench.layer import LoopLayer
from moe_lightning.bench.ranks import enter
from moe_lightning.bench.step import StepClock
from moe_lightning.comm.world import join_local_world
from moe_lightning.elastic.lifeline import leave_process_groups
from moe_lightning.models.gpt_config import GPTConfig
from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
from moe_lightning.strategies import ExpertParallelStrategy


def warmup_steps(every: int) -> int:
    """Unmeasured steps: at least three, and a multiple of the interval of checkpoints."""
    return every * -(-3 // every)


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


class Watch(StepClock):
    """Notes, too, the processor time of this rank, and the bytes of parameters and optimizer state that live here."""

    def __init__(self) -> None:
        super().__init__()
        self._cpu_s: list[float] = []
        self.state_bytes = 0

    @override
    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self._cpu_s.append(time.process_time())

    def cpu_s(self) -> list[float]:
        """Of the steps whose durations `durations_s` tells: what they would take if nobody waited for anybody."""
        return [later - earlier for earlier, later in pairwise(self._cpu_s)]

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        tensors: list[Any] = list(pl_module.parameters())
        for optimizer in trainer.optimizers:
            tensors += [value for state in optimizer.state.values() for value in state.values()]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, torch.Tensor)]
        self.state_bytes = sum(t.numel() * t.element_size() for t in local)


_COLLECTIVES: Any = importlib.import_module("torch.distributed.distributed_c10d")
_STOCK_OBJECTS = _COLLECTIVES._pickler, _COLLECTIVES._unpickler
"""How torch carries objects of any class, which dcp needs; our strategy carries plain values only."""


def measure(contender: Contender, options: dict[str, Any], folder: Path) -> dict[str, float]:
    """Train and save under one contender; what this rank saw."""
    if not contender.is_ours:
        _COLLECTIVES._pickler, _COLLECTIVES._unpickler = _STOCK_OBJECTS
    pl.seed_everything(0, verbose=False)
    every, first = contender.saves_every(options["every"]), warmup_steps(options["every"])
    watch, saving = Watch(), saving_callback(contender, folder, num_experts=options["experts"], every=every)
    strategy = _strategy(contender, options["ranks"])
    trainer = pl.Trainer(
        strategy=strategy,
        plugins=[LightningEnvironment(), *([AsyncCheckpointIO()] if contender.saving == "thread" else [])],
        accelerator="cpu",
        devices=options["ranks"],
        max_steps=first + options["steps"],
        callbacks=[watch, *([saving] if saving is not None else [])],
        logger=False,
        enable_checkpointing=isinstance(saving, ModelCheckpoint),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # it would shuffle, and not everywhere alike
    )
    config = replace(model_config(options), bias=False)  # the loop over experts knows no biases
    trainer.fit(ComparedModule(config, contender), _loader(contender, options, trainer.max_steps))
    if isinstance(strategy, ExpertParallelStrategy):
        strategy.world.close()
    measured = slice(first - 1, None)  # with the saves after steps `first` to the last but one
    found = {
        "step_s": statistics.median(watch.durations_s()[measured]),
        "mean_step_s": statistics.mean(watch.durations_s()[measured]),
        "cpu_s": statistics.median(watch.cpu_s()[measured]),
        "state_bytes": watch.state_bytes,
        "loss": float(trainer.callback_metrics["train/loss"]),
    }
    if saving is not None:
        saves = range(first, first + options["steps"], every)
        found["stall_s"] = statistics.median(saving.stalls_s[step - 1] for step in saves)
        found["memory_bytes"] = getattr(saving, "memory_bytes", 0)
    return found


def _strategy(contender: Contender, ranks: int) -> Strategy:
    if contender.strategy == "ddp":
        return DDPStrategy(timeout=TIMEOUT)
    if contender.strategy == "fsdp":
        return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, timeout=TIMEOUT)
    return ExpertParallelStrategy(zero1=contender.strategy == "zero1", timeout_s=TIMEOUT.total_seconds())


def _loader(contender: Contender, options: dict[str, Any], steps: int) -> DataLoader[Any]:
    """The same global batches for everybody; ours cuts them itself."""
    ids = torch.randint(
        0, 256, (options["batch"] * steps, options["context"] + 1), generator=torch.Generator().manual_seed(1)
    )
    samples, ranks = TensorDataset(ids[:, :-1], ids[:, 1:]), options["ranks"]
    if contender.is_ours:
        return DataLoader(samples, options["batch"])
    sampler: DistributedSampler[Any] = DistributedSampler(samples, ranks, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(samples, options["batch"] // ranks, sampler=sampler)


def main(arguments: list[str]) -> None:
    """Measure everything that the settings file names; leave the rows of this rank."""
    options = json.loads(Path(arguments[0]).read_text())
    rank, results = enter(options["cores"]), Path(arguments[1])
    join_local_world(rank=rank, size=options["ranks"], backend="gloo", timeout=TIMEOUT)
    rows = []
    for index in range(options["rounds"]):
        for name, contender in (TRAININGS | SAVINGS).items():
            if name not in options["contenders"]:
                continue
            folder = results / f"compared{index}-{list(TRAININGS | SAVINGS).index(name)}"
            found = measure(contender, options, folder / "checkpoints")
            if rank == 0:
                found["disk_bytes"] = bytes_of_one(folder / "checkpoints", contender)
                shutil.rmtree(folder, ignore_errors=True)
                print(f"round {index + 1}, {name}: {1e3 * found['mean_step_s']:.1f} ms a step", flush=True)
            rows.append({"round": index, "contender": name} | found)
            gc.collect()  # the wrapped model before is a cycle
    (results / f"rank{rank}.json").write_text(json.dumps(rows))
    leave_process_groups()


if __name__ == "__main__":
    main(sys.argv[1:])
