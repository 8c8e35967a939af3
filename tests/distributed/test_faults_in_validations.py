"""Faults in the hooks of a validation and of the end of an epoch: callbacks decide as in a calm run."""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from moe_lightning import FaultRecovery, GPTModule, OptimizerConfig
from moe_lightning.elastic.membership import MEMBERSHIPS, ElasticSettings, ElasticTask
from tests.distributed.harness import run_ranks
from tests.distributed.test_changes_of_worlds import PlannedMembership
from tests.distributed.training import TINY, RandomTokens, make_trainer
from tests.forks import PATIENCE_S

EPOCH = 4
"""Steps of an epoch."""


class Decided(NamedTuple):
    """Decisions of the callbacks of a run.

    Attributes:
        num_waits: validations without improvement that EarlyStopping has counted.
        best: step of the best checkpoint, which is there.
        ended: steps whose validations have ended, in a hook after FaultRecovery's.
    """

    num_waits: int
    best: int
    ended: list[int]


def lose(trainer: pl.Trainer) -> None:
    engine: Any = trainer.strategy.elastic.engine  # type: ignore[attr-defined]
    engine.reason = "a rank was lost"
    raise dist.DistNetworkError(engine.reason)


class Saver(ModelCheckpoint):
    """Saves the best checkpoint, and loses a rank once: before its last save, or after its first one."""

    def __init__(self, fault: str) -> None:
        super().__init__("best", monitor="val/loss", filename="{step}")
        self._fault = fault

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        is_last = trainer.global_step == 2 * EPOCH
        if is_last and self._fault == "before":
            self._fault = ""
            lose(trainer)
        super()._save_checkpoint(trainer, filepath)
        if self._fault == "after":
            self._fault = ""
            lose(trainer)


class Counting(pl.Callback):
    """Counts validations, and loses a rank once at the end of the second one."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self.ended: list[int] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended.append(trainer.global_step)
        if self._fault == "hook" and len(self.ended) == 2:
            lose(trainer)


def decide(rank: int, world_size: int, faults: list[str], interval: float) -> list[Decided]:
    found = []
    for index, fault in enumerate(faults):
        (folder := Path(f"{index}").resolve()).mkdir()
        os.chdir(folder)
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.FileStore(str(folder / "store"), -1)
        MEMBERSHIPS.register(name := f"planned {index}")(partial(PlannedMembership, ((0,), (0,)), store))
        settings = ElasticSettings(build_timeout_s=PATIENCE_S, hang_timeout_s=2 * PATIENCE_S, membership=name)
        task = ElasticTask(address="none", secret_file="none", settings=settings, node="node0", slot=0, expected=1)
        os.environ.update(task.to_environment())
        stopping, counting, saver = EarlyStopping("val/loss", min_delta=1e6, patience=99), Counting(fault), Saver(fault)
        callbacks = [stopping, FaultRecovery(), counting, saver]
        options: dict[str, Any] = {"enable_checkpointing": True, "val_check_interval": interval, "max_epochs": 2}
        trainer = make_trainer(rank, world_size, callbacks=callbacks, **options)
        loaders = [DataLoader(RandomTokens(size), batch_size=12) for size in (12 * EPOCH, 12)]
        trainer.fit(GPTModule(TINY, OptimizerConfig(lr=3e-2, warmup_steps=2)), *loaders)
        assert Path(saver.best_model_path).is_file()
        assert list(saver.best_k_models) == [saver.best_model_path]
        best = int(Path(saver.best_model_path).stem.removeprefix("step=").partition("-")[0])
        found.append(Decided(stopping.wait_count, best, counting.ended))
        os.chdir(folder.parent)
    return found


FAULTS = ["", "hook", "before", "after"]


@cache
def decided(interval: float) -> list[Decided]:
    (found,) = run_ranks(1, decide, FAULTS, interval)
    return list(found)


@pytest.mark.parametrize("interval", [0.5, 1.0], ids=["in epochs", "at their ends"])
@pytest.mark.parametrize("fault", FAULTS[1:])
def test_callbacks_decide_as_in_a_calm_run(fault: str, interval: float) -> None:
    calm, found = decided(interval)[0], decided(interval)[FAULTS.index(fault)]
    steps = [int(EPOCH * interval * (1 + index)) for index in range(int(2 / interval))]
    assert calm == (len(steps) - 1, steps[-1], steps)
    repeated = {"hook": steps[1], "before": steps[-1], "after": steps[0]}[fault]
    assert found == (calm.num_waits, calm.best, sorted([*steps, repeated]))
