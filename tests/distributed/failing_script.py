"""A plain script whose ranks fail, all or one of them: `failing_script.py CALLBACK WHO FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader

from moe_lightning import ExpertParallelStrategy
from tests.distributed.training import OwnModule, RandomTokens, quiet, quiet_trainer

what, who, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])


class Fails(pl.Callback):
    """Raises before the fourth step."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and who in ("all", str(trainer.global_rank)):
            raise ValueError("an error of the user's")


class OwnSaver(pl.Callback):
    """Saves and meets the others after an exception."""

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(folder / "own.ckpt")
        trainer.strategy.barrier()


SAVERS: dict[str, Any] = {
    "stock": lambda: ModelCheckpoint(folder, save_on_exception=True),
    "on_exception": lambda: OnExceptionCheckpoint(folder),
    "own": OwnSaver,
}
if __name__ == "__main__":
    quiet()
    trainer = quiet_trainer(
        devices=2,
        strategy=ExpertParallelStrategy(timeout_s=600),
        max_steps=6,
        default_root_dir=folder,
        callbacks=[Fails(), SAVERS[what]()],
        enable_checkpointing=True,
    )
    trainer.fit(OwnModule(), DataLoader(RandomTokens(), batch_size=12))
