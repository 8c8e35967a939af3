"""Launchers of Lightning's that start the ranks of a run, which rendezvous in a private folder on one machine."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_warn
from torch.multiprocessing.spawn import ProcessRaisedException
from typing_extensions import override

from moe_lightning.compat import private_lightning
from moe_lightning.compat.private_lightning import SubprocessLauncher, WorkersLauncher
from moe_lightning.elastic.membership import ElasticTask
from moe_lightning.errors import CheckpointError, ConfigurationError, MissingCheckpointError, UnreadableCheckpointError
from moe_lightning.files import PrivateFolder
from moe_lightning.parallel.context import STORE_VARIABLE

_NAMES_OF_RUNS = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)


class PrivateLauncher(SubprocessLauncher):
    """Lightning's launcher, which starts the script again for every other rank; on one machine they rendezvous in a
    private folder of rank 0.

    Args:
        strategy: of ours.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self.strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.num_nodes == 1 and not self.cluster_environment.creates_processes_externally:
            folder = PrivateFolder()
            atexit.register(folder.close)
            os.environ[STORE_VARIABLE] = str(folder.path)
        try:
            return super().launch(function, *args, **kwargs)
        except BaseException as error:
            self.strategy.failed(error)  # before the Trainer's hooks for exceptions
            shown = self.strategy.explained(error) if isinstance(error, Exception) else error
            if shown is error:
                raise
            raise shown from None


class WorkerLauncher(WorkersLauncher):
    """Lightning's launcher, which forks or spawns all ranks from this process; after training the module here has the
    whole model.

    Args:
        strategy: of ours.
        start_method: of multiprocessing.
    """

    def __init__(self, strategy: Any, start_method: Any) -> None:
        super().__init__(strategy, start_method)
        self.strategy, self.forks = strategy, start_method == "fork"
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
        if self.forks:  # threads of OpenMP that the starting process has used do not exist here
            os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning sets more
            torch.set_num_threads(1)
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
                "module: configure_model builds layers on the ranks only; continue from a checkpoint"
            )
        return found

    @override
    def explained(self, error: Exception) -> Exception:
        shown: Exception = self.strategy.explained(error)
        return shown


def _of_worker(error: ProcessRaisedException) -> Exception:
    """Return a user error of a worker without its traceback; other errors unchanged."""
    last = str(error).strip().splitlines()[-1]
    for kind in (ConfigurationError, MissingCheckpointError, UnreadableCheckpointError, CheckpointError):
        prefix = f"{kind.__module__}.{kind.__name__}: "
        if last.startswith(prefix):
            return kind(last.removeprefix(prefix))
    return error


def meeting_of(environment: ClusterEnvironment | None) -> str:
    """Return a name that the ranks of this run have in common, and no other run on the machine at the same time."""
    assert environment is not None
    names = [os.environ.get(name, "") for name in _NAMES_OF_RUNS]
    return " ".join([environment.main_address, str(environment.main_port), *names])


def environment_of_rank(found: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """Return what describes this rank: the plain variables of an elastic launcher, whose ranks change, also in a job of
    SLURM or the like, which Lightning finds there.

    Args:
        found: by Lightning.
    """
    if found is None or isinstance(found, LightningEnvironment) or ElasticTask.from_environment() is None:
        return found
    return LightningEnvironment()


def build_launcher(strategy: Any) -> PrivateLauncher | WorkerLauncher | None:
    """Return the launcher of a strategy of ours; None for one process, which starts no other.

    Raises:
        ConfigurationError: a start_method that does not fit the way in which this process was started.
    """
    environment, is_elastic = strategy.cluster_environment, ElasticTask.from_environment() is not None
    num_processes, start_method = strategy.num_processes, strategy.options.start_method
    if environment is None or (num_processes * strategy.num_nodes == 1 and not is_elastic):
        return None
    if private_lightning.is_interactive() and start_method != "fork":
        raise ConfigurationError(
            f"{num_processes} ranks in an interactive environment are forked: use "
            "strategy='expert_parallel_notebook' or ExpertParallelStrategy(start_method='fork'), or run a script"
        )
    if start_method == "popen":
        return PrivateLauncher(strategy)
    if environment.creates_processes_externally or is_elastic:
        raise ConfigurationError(
            f"start_method={start_method!r} starts the ranks itself, but torchrun, SLURM or moe-train "
            "has started them: drop start_method"
        )
    return WorkerLauncher(strategy, start_method=start_method)
