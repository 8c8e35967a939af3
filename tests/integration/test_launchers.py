"""A user's script with `Trainer(strategy="expert_parallel")` under every launcher that may start it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import run_script
from tests.parameters import slow
from tests.programs import TESTS, run_program

SCRIPT = """
import atexit
import sys
import lightning.pytorch as pl
import moe_lightning
import torch
from torch.utils.data import DataLoader
from tests.distributed.training import OwnModule, RandomTokens, quiet


class Module(OwnModule):
    def on_train_end(self):
        world = self.trainer.strategy.world
        held = self.moe.experts.slot_experts
        with open(f"rank{world.rank}.txt", "w") as result:
            result.write(f"{world.size} {held} {float(self.trainer.callback_metrics['train/loss']):.5f}")


@atexit.register
def has_left():
    assert not torch.distributed.is_initialized(), "threads of groups abort an interpreter that ends before them"
    print("left its groups")


if __name__ == "__main__":
    quiet()
    torch.set_num_threads(1)
    pl.seed_everything(7, verbose=False)
    trainer = pl.Trainer(
        strategy="expert_parallel", accelerator="cpu", devices=int(sys.argv[1]), max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(RandomTokens(48), batch_size=12, shuffle=True))
"""
LAUNCHERS = {
    "popen": ([], 2, {}),
    "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], 2, {}),
    "slurm": (
        [],
        1,
        {
            "SLURM_NTASKS": "1",
            "SLURM_JOB_NAME": "train",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "SLURM_NODELIST": "localhost",
            "SLURM_JOB_ID": "1",
        },
    ),
}


def run(folder: Path, launcher: str) -> list[list[str]]:
    """What each rank wrote: world size, experts held, last loss."""
    prefix, devices, variables = LAUNCHERS[launcher]
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    variables = {**variables, **TESTS, "GLOO_SOCKET_IFNAME": "lo"}
    if launcher == "slurm":  # starts nothing, so the rank may be forked
        done = run_script(script, str(devices), variables=variables)
    else:
        done = run_program(*prefix, script, str(devices), folder=folder, variables=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    if launcher != "slurm":  # a forked one has the test's own exit
        assert done.stdout.count("left its groups") == devices
    return [(folder / f"rank{rank}.txt").read_text().rsplit(" ", 1) for rank in range(devices)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", slow("popen")])  # by default test_private_world.py forks its ranks
def test_every_launcher_trains_the_same(launcher: str, tmp_path: Path) -> None:
    ((alone, loss),) = run(tmp_path / "slurm", "slurm")
    assert alone == "1 (0, 1, 2, 3, 4, 5)"
    first, second = run(tmp_path / launcher, launcher)
    assert (first[0], second[0]) == ("2 (0, 1, 2)", "2 (3, 4, 5)")
    assert float(first[1]) == pytest.approx(float(loss), abs=2e-5)
    assert first[1] == second[1]
