"""Snapshots of a pipeline in moe-bench checkpoint: how much of them is copied in bubbles, and what steps then take."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.measuring import own_cores
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.checkpoint.schedule import Window
from moe_lightning.checkpoint.snapshotter import SnapshotReport
from moe_lightning.cli.short_training import ModelOptions, StepClock, gpt, on_ranks, quiet_trainer, random_text
from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
from moe_lightning.parallel.context import join_local_world
from moe_lightning.strategies import ExpertParallelStrategy
from moe_lightning.text_table import table

_STAGES = _MICRO_BATCHES = 2
_BATCH = 8
_WARM_UP, _STEPS = 4, 6
_MODEL = ModelOptions(context=64, d_model=128, d_expert=256, layers=4)
_TIMEOUT = timedelta(seconds=120)
_WAYS = {"no snapshot": None, "any window": "any", "scheduled": "scheduled"}


def bubble_table(rounds: int, folder: Path) -> str:
    """Train a small GPT in stages of one core each, with a snapshot of all experts in every step."""
    settings = {"rounds": rounds, "model": asdict(_MODEL), "folder": str(folder)}
    ranks = on_ranks(f"{__name__}:measure_all", settings, num_ranks=_STAGES, folder=folder, cores=own_cores(_STAGES))
    rows, losses = [], {found["loss"] for rank in ranks for found in rank}
    for name in _WAYS:
        for stage, rank in enumerate(ranks):
            rows.append((name, stage, *_cells([found for found in rank if found["way"] == name])))
    headers = ("snapshots", "stage", "step ms", "stall ms", "bubbles ms", "MB", *(f"{w.value} %" for w in Window))
    title = f"a pipeline of {_STAGES} stages and {_MICRO_BATCHES} micro-batches, a snapshot in every step"
    return f"{table(headers, rows, title)}\nlosses of all of them: {'the same' if len(losses) == 1 else sorted(losses)}"


def _cells(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of one way on one stage: medians, bytes of a snapshot, and the shares of all bytes by window."""
    step_ms, stall_ms, bubble_ms = (
        f"{1e3 * statistics.median(found[name] for found in rounds):.1f}" for name in ("step_s", "stall_s", "bubble_s")
    )
    snapshot_mb = f"{statistics.median(found['snapshot_bytes'] for found in rounds) / 1e6:.1f}"
    copied = {window: sum(found["copied"].get(window.value, 0) for found in rounds) for window in Window}
    if not any(copied.values()):
        return [step_ms, stall_ms, "-", snapshot_mb, *["-"] * len(Window)]
    shares = [f"{100 * size / sum(copied.values()):.0f}" for size in copied.values()]
    return [step_ms, stall_ms, bubble_ms, snapshot_mb, *shares]


# --- a rank ---------------------------------------------------------------------------------------------------------


class Watched(PartialExpertsCheckpoint):
    """Notes each snapshot after the warm-up, and the seconds of bubbles that the next one expects."""

    bubble_s = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.reports, self.stalls_s = list[SnapshotReport](), list[float]()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if self.session is not None and trainer.global_step > _WARM_UP:
            self.session.finish_copy()  # as the next snapshot does
            assert self.session.last_report is not None
            self.reports.append(self.session.last_report)
            self.stalls_s.append(float(trainer.callback_metrics["checkpoint/stall_ms"]) / 1e3)
            if self.session.windows is not None:
                self.bubble_s = self.session.windows.expected()[Window.BUBBLE]
        super().on_train_batch_end(trainer, *arguments)

    def found(self) -> dict[str, Any]:
        """Of this training."""
        return {
            "stall_s": statistics.median(self.stalls_s),
            "bubble_s": self.bubble_s,
            "snapshot_bytes": statistics.median(report.copied_bytes for report in self.reports),
            "copied": {w.value: sum(r.copied_by_window.get(w, 0) for r in self.reports) for w in Window},
        }


def measure_all(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What this rank saw of each way, in turns."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join_local_world(rank=rank, size=size, backend="gloo", device=torch.device("cpu"), timeout=_TIMEOUT)
    found = []
    for index in range(settings["rounds"]):
        for name, windows in _WAYS.items():
            folder = Path(settings["folder"]) / f"{index}-{windows}"
            found.append({"way": name} | _measure(windows, ModelOptions(**settings["model"]), folder))
    return found


def _measure(windows: Any, model: ModelOptions, folder: Path) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    clock, saver = StepClock(), None
    if windows is not None:
        saver = Watched(str(folder), every_n_steps=1, windows=windows, save_on_train_end=False, keep_last=1)
    strategy = ExpertParallelStrategy(
        mesh={"pp": _STAGES}, micro_batches=_MICRO_BATCHES, timeout_s=_TIMEOUT.total_seconds()
    )
    callbacks = [clock, *([saver] if saver is not None else [])]
    trainer = quiet_trainer(strategy, steps=_WARM_UP + _STEPS, callbacks=callbacks)
    module = GPTModule(gpt(model, tie_embeddings=False), OptimizerConfig(lr=1e-4, warmup_steps=0))
    samples = random_text(_BATCH * trainer.max_steps, model.context, torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(samples, _BATCH))
    strategy.world.close()
    if strategy.is_global_zero:
        shutil.rmtree(folder, ignore_errors=True)
    step_s, loss = statistics.median(clock.step_s[_WARM_UP:]), float(trainer.callback_metrics["train/loss"])
    nothing = {"stall_s": 0.0, "bubble_s": 0.0, "snapshot_bytes": 0, "copied": {}}
    return {"step_s": step_s, "loss": loss} | (nothing if saver is None else saver.found())
