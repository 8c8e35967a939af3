"""A training as in the README, that says nothing of devices: the launcher knows how many ranks there are.

python -m moe_lightning.elastic.run --ranks 2 tests/chaos/plain_script.py FOLDER

Where FOLDER holds a file `crash`, rank 1 fails before training begins; with a file `die` it is killed there, once.
With a file `export` rank 0 goes on after the other one has ended, and writes why its world broke meanwhile.
"""

import os
import signal
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from moe_lightning import ExpertParallelStrategy, GPTModule, OptimizerConfig
from moe_lightning.callbacks.fault_recovery import FaultRecovery
from tests.distributed.training import TINY, RandomTokens, quiet_trainer

folder = Path(sys.argv[1])


class Crash(pl.Callback):
    def setup(self, trainer: pl.Trainer, *_: object, **__: object) -> None:
        if trainer.global_rank == 1 and (folder / "crash").exists():
            raise ValueError("these data are damaged")
        if trainer.global_rank == 1 and (folder / "die").exists():
            (folder / "die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def outlive_rank_1() -> None:
    pid = int((folder / "pid-1").read_text())
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.05)
    time.sleep(3.0)  # three times `silence_timeout_s` of the test
    (folder / "exported").write_text(str(strategy.elastic.engine.reason))


strategy = ExpertParallelStrategy()
trainer = quiet_trainer(
    devices="auto",
    strategy=strategy,
    callbacks=[FaultRecovery(), Crash()],
    max_steps=3,
    use_distributed_sampler=False,
)
trainer.fit(GPTModule(TINY, OptimizerConfig()), DataLoader(RandomTokens(), batch_size=4))
(folder / f"ranks-{trainer.global_rank}").write_text(f"{trainer.world_size} {trainer.num_devices}")
if (folder / "export").exists():
    (folder / f"pid-{trainer.global_rank}").write_text(str(os.getpid()))
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        outlive_rank_1()
    sys.exit(0)
