"""The training that runs on hosts: a tiny model, a line in a file for every step, and as slow as the test wants it.

    python -m moe_lightning.elastic.run ... tests/network/script.py FOLDER     in an elastic world
    torchrun ... tests/network/script.py FOLDER [--ddp]                        by the same strategy, or stock DDP
    python tests/network/script.py FOLDER                                      alone

Files in FOLDER steer it: `pace` holds seconds between steps, `end` the step after which it ends; `die-HOST` kills a
worker in its next commit. `diary-HOST.jsonl` gets a line for every step (`Step` of trainings.py), `checkpoints` are
shared by all hosts.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader

from moe_lightning import ExpertParallelStrategy, GPTModule, OptimizerConfig
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.callbacks.fault_recovery import FaultRecovery
from tests.distributed.training import TINY, RandomTokens, quiet, quiet_trainer

_FOREVER = 1_000_000
_GLOBAL_BATCH = 12


class Diary(pl.Callback):
    """Writes what happens as it happens, keeps the pace, and ends where it is told."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = (folder / f"diary-{socket.gethostname()}.jsonl").open("a", buffering=1)

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        elastic = getattr(trainer.strategy, "elastic", None)
        if elastic is not None:
            elastic.commit = self._dying(elastic.commit)

    def _dying(self, commit: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **options: Any) -> Any:
            self._die()
            return commit(*args, **options)

        return outer

    def _die(self) -> None:
        """End without a word, once, where a test has asked for it."""
        with suppress(FileNotFoundError):
            (self._folder / f"die-{socket.gethostname()}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(_number(self._folder / "pace", 0.0))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        elastic = getattr(trainer.strategy, "elastic", None)  # DDP has none
        members = elastic.members if elastic is not None else None
        line = {
            "step": trainer.global_step,
            "loss": float(trainer.callback_metrics["train/loss"]),
            "size": trainer.world_size,
            "rank": trainer.global_rank,
            "world": members.name if members is not None else "",
            "time": time.monotonic(),
            "pid": os.getpid(),
        }
        self._file.write(json.dumps(line) + "\n")
        if trainer.global_step >= _number(self._folder / "end", _FOREVER):
            trainer.should_stop = True


def _number(path: Path, default: float) -> float:
    """What a file says; it is replaced at once, so that it is always whole."""
    with suppress(FileNotFoundError):
        return float(path.read_text())
    return default


def main(folder: Path, is_ddp: bool) -> None:
    """Train until FOLDER/end says so."""
    torch.set_num_threads(1)
    quiet()
    pl.seed_everything(7, verbose=False)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    is_elastic = "TORCHELASTIC_RUN_ID" not in os.environ and ranks > 1
    callbacks: list[pl.Callback] = []
    if is_elastic:
        saver = PartialExpertsCheckpoint(str(folder / "checkpoints"), every_n_steps=10, timeout_s=60.0)
        callbacks = [saver, FaultRecovery()]
    trainer = quiet_trainer(
        strategy="ddp" if is_ddp else ExpertParallelStrategy(),
        plugins=[LightningEnvironment()] if is_elastic or ranks == 1 else [],
        num_nodes=ranks,
        max_steps=_FOREVER,
        max_epochs=_FOREVER,
        callbacks=[Diary(folder), *callbacks],
        enable_checkpointing=is_elastic,
        log_every_n_steps=1,
    )
    batch = _GLOBAL_BATCH // ranks if is_ddp else _GLOBAL_BATCH
    optimizer = OptimizerConfig(lr=3e-3, warmup_steps=2, decay="constant")
    saved = folder / "checkpoints"
    resumed = str(saved) if is_elastic and any(saved.glob("step-*")) else None
    trainer.fit(GPTModule(TINY, optimizer), DataLoader(RandomTokens(), batch, shuffle=True), ckpt_path=resumed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--ddp" in sys.argv[2:])
