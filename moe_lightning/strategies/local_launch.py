"""Ranks of one machine that Lightning, torchrun or SLURM starts meet where no other user can reach them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.utilities import rank_zero_warn
from torch.multiprocessing.spawn import ProcessRaisedException
from typing_extensions import override

from moe_lightning.elastic.membership import ElasticTask
from moe_lightning.errors import CheckpointError, ConfigurationError, MissingCheckpointError
from moe_lightning.files import PrivateFolder
from moe_lightning.parallel.context import STORE_VARIABLE
from moe_lightning.seams import SubprocessLauncher, WorkersLauncher

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


class WorkerLauncher(WorkersLauncher):
    """Lightning's launcher, which forks or spawns all ranks off this process; when they have trained, the module here
    has the whole model.

    Args:
        strategy: of ours.
        start_method: of multiprocessing.
    """

    def __init__(self, strategy: Any, start_method: Any) -> None:
        super().__init__(strategy, start_method)
        self.strategy = strategy
        self._meeting: str | None = None

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with PrivateFolder() as folder:
            self._meeting = str(folder.path) if self.strategy.num_nodes == 1 else None
            try:
                return super().launch(function, *args, **kwargs)
            except ProcessRaisedException as error:
                raise _of_worker(error) from None

    @override
    def begin(self) -> None:
        if self._meeting is not None:  # a forkserver has the environment of its first launch
            os.environ[STORE_VARIABLE] = self._meeting

    @override
    def whole_state(self) -> dict[str, Any]:
        whole: dict[str, Any] = self.strategy.lightning_module_state_dict()
        return whole

    @override
    def fitting(self, trained: dict[str, Any], module: pl.LightningModule) -> dict[str, Any]:
        here = module.state_dict()
        found = {n: v for n, v in trained.items() if n in here and getattr(here[n], "shape", None) == v.shape}
        if lost := [name for name in trained if name not in found]:
            rank_zero_warn(
                f"{len(lost)} of {len(trained)} trained tensors, such as {lost[0]}, have no place in this process's "
                "module: configure_model builds layers on the ranks only; go on from a checkpoint"
            )
        return found

    @override
    def explained(self, error: Exception) -> Exception:
        told: Exception = self.strategy.explained(error)
        return told


def _of_worker(error: ProcessRaisedException) -> Exception:
    """A user's mistake that a worker found, without its traceback; other errors as they are."""
    last = str(error).strip().splitlines()[-1]
    for kind in (ConfigurationError, MissingCheckpointError, CheckpointError):
        prefix = f"{kind.__module__}.{kind.__name__}: "
        if last.startswith(prefix):
            return kind(last.removeprefix(prefix))
    return error


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
