"""Ranks of one machine that Lightning, torchrun or SLURM starts meet where no other user can reach them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from typing_extensions import override

from moe_lightning.comm.private_folder import PrivateFolder
from moe_lightning.comm.world import STORE_VARIABLE
from moe_lightning.elastic.settings import ElasticTask
from moe_lightning.errors import ConfigurationError
from moe_lightning.seams import SubprocessLauncher

_NAMES_OF_RUNS = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)


class PrivateLauncher(SubprocessLauncher):
    """Lightning's launcher, which starts the script once more for every other rank; on one machine they meet in a
    private folder of rank 0's.

    Args:
        args: of Lightning's.
        explained: the exception that is raised in the place of one that leaves the Trainer.
    """

    def __init__(self, *args: Any, explained: Callable[[Exception], Exception]) -> None:
        super().__init__(*args)
        self._explained = explained

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.num_nodes == 1 and not self.cluster_environment.creates_processes_externally:
            folder = PrivateFolder()
            atexit.register(folder.close)
            os.environ[STORE_VARIABLE] = str(folder.path)
        try:
            return super().launch(function, *args, **kwargs)
        except Exception as error:
            told = self._explained(error)
            if told is error:
                raise
            raise told from None


def meeting_of(environment: ClusterEnvironment | None) -> str:
    """What the ranks of this run have in common, and no other run on the machine at the same time."""
    assert environment is not None
    names = [os.environ.get(name, "") for name in _NAMES_OF_RUNS]
    return " ".join([environment.main_address, str(environment.main_port), *names])


def elastic_devices(devices: list[torch.device] | None) -> list[torch.device] | None:
    """The devices of this machine's ranks, of those that the Trainer found: an elastic launcher says how many.

    Raises:
        ConfigurationError: fewer GPUs than ranks.
    """
    task = ElasticTask.from_environment()
    if task is None or not devices:
        return devices
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", len(devices)))
    if devices[0].type == "cpu":
        return [devices[0]] * ranks
    if len(devices) < ranks:
        raise ConfigurationError(
            f"the launcher started {ranks} ranks on this machine, but the Trainer has {len(devices)} devices: "
            f"use devices={ranks} where there are so many, or start fewer ranks"
        )
    return devices[:ranks]
