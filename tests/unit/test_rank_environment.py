"""Description of the ranks of an elastic launcher to Lightning in a job of SLURM."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only

from moe_lightning.elastic.membership import ElasticTask
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy


def test_workers_of_an_elastic_launcher_are_no_tasks_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker has the variables of the one task that the launcher is."""
    names = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "RANK", "LOCAL_RANK", "NODE_RANK")
    values = dict(zip(names, "1000110", strict=True), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    values |= ElasticTask(address="none", secret_file="none", node="a").to_environment()
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_JOB_NAME", raising=False)
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # the strategy sets it for the process
    strategy = pl.Trainer(accelerator="cpu", devices=2, strategy=ExpertParallelStrategy(), logger=False).strategy
    assert strategy.local_rank == 1
    strategy.cluster_environment.set_world_size(3)
    assert strategy.world_size == 3, "a change of the world reaches Lightning"
