"""One rank of moe-bench memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from benchmarks.peak_memory import PeakMemory, give_back_at_once
from moe_lightning.cli.training import build
from moe_lightning.kernels.torch_kernels import pool

_M_ARENA_MAX = -8  # of malloc.h


class _Watch(pl.Callback):
    """Forgets the first step, which makes the optimizer's states, and sees nothing of the end of training, where ranks
    gather the model.

    Attributes:
        peak: bytes in the steps in between.
    """

    def __init__(self, memory: PeakMemory) -> None:
        self._memory = memory
        self.peak = 0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 1:
            self._memory.restart()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.peak = self._memory.bytes() or 0


def measure(settings: dict[str, Any]) -> dict[str, float]:
    """Train; the peak of this rank's memory over what it had before."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    give_back_at_once()
    _train(settings["warm_up"], None)
    pool.clear()
    memory = PeakMemory(counts_files=False)
    watch = _Watch(memory)
    _train(settings["config"], watch)
    return {"peak_bytes": float(watch.peak), "baseline_bytes": float(memory.before)}


def _train(config: Mapping[str, Any], watch: _Watch | None) -> None:
    run = build(config)
    if watch is not None:
        run.trainer.callbacks.append(watch)  # type: ignore[attr-defined]
    run.trainer.fit(run.module, datamodule=run.data)
