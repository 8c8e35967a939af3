"""Lightning's DDPStrategy over the ranks of a world that may change, without knowledge of experts.

Ranks of one machine rendezvous in a private folder that no other user can reach; nothing received is unpickled.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from moe_lightning.checkpoint.files import write_file
from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.compat.private_lightning import SubprocessLauncher, WorkersLauncher
from moe_lightning.elastic.faults import explain
from moe_lightning.elastic.membership import ElasticTask, Membership, membership_from_environment
from moe_lightning.elastic.worker import PeerFailed, leave_process_groups_at_exit
from moe_lightning.errors import CheckpointError, ConfigurationError, MissingCheckpointError
from moe_lightning.files import PrivateFolder
from moe_lightning.parallel.collectives import broadcast_object, carry_objects_without_pickle, check_versions
from moe_lightning.parallel.context import STORE_VARIABLE, World, all_reduce_, broadcast_, join_local_world
from moe_lightning.parallel.gradient_hook import DenseSum, sum_over_ranks
from moe_lightning.strategies.checkpoints import decided
from moe_lightning.strategies.elastic_worlds import ElasticWorlds
from moe_lightning.strategies.failures import Failure
from moe_lightning.strategies.gradients import explained_norm
from moe_lightning.strategies.worlds import FixedWorld, Worlds
from moe_lightning.user_errors import suggestion

logger = logging.getLogger(__name__)

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
        args: arguments of Lightning's launcher.
        failed: called with an exception that leaves the Trainer, before its hooks for exceptions.
        explained: returns the exception to raise instead of one that leaves the Trainer.
    """

    def __init__(
        self, *args: Any, failed: Callable[[BaseException], None], explained: Callable[[Exception], Exception]
    ) -> None:
        super().__init__(*args)
        self._failed, self._explained = failed, explained

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.num_nodes == 1 and not self.cluster_environment.creates_processes_externally:
            folder = PrivateFolder()
            atexit.register(folder.close)
            os.environ[STORE_VARIABLE] = str(folder.path)
        try:
            return super().launch(function, *args, **kwargs)
        except BaseException as error:
            self._failed(error)
            shown = self._explained(error) if isinstance(error, Exception) else error
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
    for kind in (ConfigurationError, MissingCheckpointError, CheckpointError):
        prefix = f"{kind.__module__}.{kind.__name__}: "
        if last.startswith(prefix):
            return kind(last.removeprefix(prefix))
    return error


def meeting_of(environment: ClusterEnvironment | None) -> str:
    """Return a name that the ranks of this run have in common, and no other run on the machine at the same time."""
    assert environment is not None
    names = [os.environ.get(name, "") for name in _NAMES_OF_RUNS]
    return " ".join([environment.main_address, str(environment.main_port), *names])


def elastic_devices(devices: list[torch.device] | None) -> list[torch.device] | None:
    """Return the devices of this machine's ranks, of those that the Trainer found: an elastic launcher sets their
    number.

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


T = TypeVar("T")


class WorldDDPStrategy(DDPStrategy):
    """DDPStrategy for ranks that any launcher has started: their rendezvous is private, worlds may change, nothing
    received is unpickled, and dense gradients are summed over the present world.

    Args:
        timeout_s: longest wait for a peer in any collective.
        kwargs: of DDPStrategy.

    Attributes:
        start_method: how a launcher of ours starts the other ranks: "popen" (the script again), or one of
            multiprocessing's.
        worlds: the present world.
        elastic: changes of the world; `FixedWorld` where no elastic launcher started this process.
        collectives_timeout: longest wait for a peer in any collective.
        may_change: returns True if a file of Lightning's own may be written or deleted now.

    Raises:
        ConfigurationError: an unknown start_method, or, when it is set up, a communication hook.
    """

    of_process = frozenset(
        {
            "worlds",
            "elastic",
            "may_change",
            "look_at_gradients",
            "_own_launcher",
            "_has_met",
            "_ignored_by_ddp",
            "_frozen",
            "_failure",
            "_num_failures",
        }
    )
    """Attributes that `begin` creates."""

    def __init__(self, *, timeout_s: float, **kwargs: Any) -> None:
        known, self.start_method = ["popen", *get_all_start_methods()], kwargs.get("start_method", "popen")
        if self.start_method not in known:
            raise ConfigurationError(f"start_method={self.start_method!r} is not known here: use {', '.join(known)}")
        own, stock, wrapper = (
            list(inspect.signature(of.__init__).parameters)[1:]
            for of in (type(self), DDPStrategy, DistributedDataParallel)
        )
        wrapper.remove("module")
        for name in kwargs:
            if name not in stock and name not in wrapper:
                hint = suggestion(name, [*own, *stock, *wrapper]) or ": drop it"
                raise ConfigurationError(f"{type(self).__name__} has no option {name!r}{hint}")
        self._has_comm_hook = kwargs.get("ddp_comm_hook") is not None
        self.collectives_timeout = timedelta(seconds=timeout_s)
        super().__init__(timeout=self.collectives_timeout, **kwargs)
        self._options = {name: value for name, value in kwargs.items() if name not in stock}

    def begin(self) -> None:
        """Create the attributes of this process and its run: constructors and copies from other processes call it."""
        self.worlds = Worlds()
        self.elastic: ElasticWorlds | FixedWorld = FixedWorld()
        self.may_change: Callable[[object], bool] = lambda file: True
        self.look_at_gradients: Callable[[Tensor], None] | None = None
        self._own_launcher: PrivateLauncher | WorkerLauncher | None = None
        self._has_met = False
        self._ignored_by_ddp: Collection[str] = ()
        self._frozen: Sequence[nn.Parameter] = ()
        self._failure: Failure | None = None
        self._num_failures = 0

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of the constructor and the Trainer, without those of this process, which `begin`
        creates.
        """
        return {name: value for name, value in super().__getstate__().items() if name not in self.of_process}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.begin()

    @property
    def world(self) -> World:
        """The ranks that train together; available once the strategy is set up."""
        return self.worlds.present

    @property
    def node_of(self) -> tuple[int, ...]:
        """The number of each rank's node."""
        return self.world.nodes

    @property
    @override
    def process_group_backend(self) -> str:
        """Name of the process groups' backend."""
        return super().process_group_backend or dist.get_default_backend_for_device(self.root_device)

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this machine's ranks; an elastic launcher says how many there are."""
        return elastic_devices(self._devices)

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._devices = devices

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.may_change(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.may_change(filepath):
            super().remove_checkpoint(filepath)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for a sampler of Lightning's: this rank and the number of ranks in the present world."""
        if not self.worlds.is_joined:
            return super().distributed_sampler_kwargs
        return {"num_replicas": self.world.shape.dp, "rank": self.world.data_rank}

    @property
    @override
    def launcher(self) -> PrivateLauncher | WorkerLauncher | None:
        """None for one process, which starts no other: Lightning then runs it in notebooks and at the prompt."""
        is_alone = self.num_processes * self.num_nodes == 1 and ElasticTask.from_environment() is None
        if is_alone or self.cluster_environment is None:
            return None
        if private_lightning.is_interactive() and self.start_method != "fork":
            raise ConfigurationError(
                f"{self.num_processes} ranks in an interactive environment are forked: use "
                "strategy='expert_parallel_notebook' or ExpertParallelStrategy(start_method='fork'), or run a script"
            )
        if self._own_launcher is None and self.start_method != "popen":
            if self.cluster_environment.creates_processes_externally or ElasticTask.from_environment() is not None:
                raise ConfigurationError(
                    f"start_method={self.start_method!r} starts the ranks itself, but torchrun, SLURM or moe-train "
                    "has started them: drop start_method"
                )
            self._own_launcher = WorkerLauncher(self, start_method=self.start_method)
        elif self._own_launcher is None:
            place = (self.cluster_environment, self.num_processes, self.num_nodes)
            self._own_launcher = PrivateLauncher(*place, failed=self.failed, explained=self.explained)
        return self._own_launcher

    def explained(self, error: Exception) -> Exception:
        """Return the exception to raise instead of one that leaves the Trainer."""
        error = explained_norm(error)
        if "Expected to have finished reduction in the prior iteration" in str(error):
            return ConfigurationError(
                "the module has parameters that the loss of a training_step does not depend on: if that is meant, use "
                "ExpertParallelStrategy(find_unused_parameters=True)"
            )
        if "mixed torch.Tensor and DTensor" in str(error):
            error.add_note(
                "dense=fsdp and hsdp gather the weights of an element of a ModuleList while it is called: call it, not "
                "its parts, and use its weights nowhere else, or use dense=zero1"
            )
        if isinstance(self.elastic, ElasticWorlds):
            return explain(error, self.elastic.engine)
        if self._failure is not None and self._failure.is_network_fault and (cause := self._failure.cause()):
            return PeerFailed(f"{cause}; see its traceback")
        return error

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks of an exception that leaves the Trainer here."""
        if not (self.worlds.is_joined and self.world.is_connected and dist.is_initialized()):
            return
        self._failure = Failure(error, self.world, self._num_failures)
        self._num_failures += 1
        trainer = private_lightning.trainer_of(self.lightning_module)
        for saver in [] if trainer is None else trainer.checkpoint_callbacks:
            if getattr(saver, "save_on_exception", False) and self.is_left_alone:
                saver.save_on_exception = False  # type: ignore[attr-defined]  # it would report a file that is not there
                self.warn_of_no_checkpoint()

    @property
    def is_left_alone(self) -> bool:
        """True after an exception that not all ranks raised: nothing collective can follow."""
        return self._failure is not None and not self._failure.is_common

    def warn_of_no_checkpoint(self) -> None:
        """Warn that an exception leaves no checkpoint, on the rank that raised it."""
        if self._failure is not None and not self._failure.is_network_fault:
            logger.warning("no checkpoint is saved now: not every rank has failed here, and it takes all of them")

    def meet(self) -> None:
        """Join the other ranks unless that has happened; Lightning itself joins only after it has looked for
        checkpoints. Collective.
        """
        if not self._has_met:
            self.setup_environment()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = private_lightning.trainer_of(self.lightning_module)
        if trainer is not None:  # a strategy may be set up without a Trainer
            private_lightning.keep_samplers(trainer)

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        if not self.worlds.is_elastic:  # nor in an earlier run of this process
            engine = membership_from_environment(self.worlds.axes.num_ranks)
            if engine is not None:
                carry_objects_without_pickle()
                self.elastic = elastic = self.elastic_worlds(engine)
                self.take_place(elastic.enter(self.num_processes))
        if not self.worlds.is_elastic:
            self._join()
        self._build_groups()
        self._has_met = True

    @abstractmethod
    def elastic_worlds(self, engine: Membership) -> ElasticWorlds:
        """Build the object that moves a run from world to world."""

    def _join(self) -> None:
        """Join the ranks of a world that does not change."""
        self.set_world_ranks()
        if self.world_size == 1:
            return  # no peers: no sockets, no process group
        carry_objects_without_pickle()
        if not join_local_world(
            rank=self.global_rank,
            size=self.world_size,
            backend=self.process_group_backend,
            device=self.root_device,
            timeout=self.collectives_timeout,
            meeting=meeting_of(self.cluster_environment) if self.num_nodes == 1 else None,
        ):
            super().setup_distributed()

    def _build_groups(self) -> None:
        """Build the groups of a world that does not change, unless this rank is in one; collective."""
        if self.worlds.is_joined:
            return
        world = World.single(self.root_device)
        layout = self.worlds.layout([rank // self.num_processes for rank in range(self.world_size)])
        if self.world_size > 1:
            world = World.connect(self.root_device, self.collectives_timeout, layout)
        self.worlds.take_place(world)
        check_versions(world)
        leave_process_groups_at_exit()

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        task = ElasticTask.from_environment()
        if task is not None and task.starts > 1:
            rank_zero_only.rank = max(1, self.global_rank)  # type: ignore[attr-defined]  # others train already

    def take_place(self, world: World) -> None:
        """Set this process's rank and the number of ranks from a world, for Lightning too."""
        assert self.cluster_environment is not None
        self.worlds.take_place(world, self.cluster_environment)

    @property
    def reachable(self) -> World:
        """The ranks that are connected, whether or not the strategy is set up. A process that waits to join a running
        world is alone: it will receive the others' values.
        """
        if self.world_size == 1:  # one that trained among others before may go on alone, and torch still knows them
            return World.single(self.root_device)
        if self.is_left_alone:
            return World.single(self.root_device)
        world = World.before_setup(self.root_device)
        return replace(world, is_cut=self.world.is_cut) if self.worlds.is_joined else world

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Return the source rank's object on every rank; Lightning and its callbacks send paths, flags and results by
        it.

        Raises:
            ConfigurationError: the object is no plain value or tensor: nothing received is unpickled.
            ForeignMessageError: the message was not sent by a rank of this run.
        """
        value: TBroadcast = broadcast_object(obj, src, self.reachable)
        return value

    def decide(self, look: Callable[[], T]) -> T:
        """Return rank 0's result on every rank, after joining the other ranks if necessary. Collective.

        Args:
            look: called on rank 0; returns plain values.

        Raises:
            ConfigurationError, CheckpointError: on every rank, the error of rank 0.
        """
        self.meet()
        return decided(look, self.reachable)

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """As in DDP; without a group over the ranks of a pipeline stage, because other stages log the same values."""
        stage = self.world.stage if self.worlds.is_joined else None
        if group is None and stage is not None and stage is not self.world:
            if stage.size == 1:
                return tensor
            group = stage.dense
        return super().reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """As in DDP: over all ranks."""
        agreed = torch.tensor(int(decision), device=self.root_device)
        world = self.reachable
        all_reduce_(agreed, world)
        count = int(world.read(agreed))
        return count == world.size if all else count > 0

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.world_size > 1 and not self.is_left_alone:
            super().barrier(*args, **kwargs)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, group, sync_grads) if self.world_size > 1 else tensor

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._has_comm_hook:
            raise ConfigurationError("ddp_comm_hook is taken by the sum over ranks: drop it")
        has_alike = self.world.is_connected and self.world.shape.pp == 1
        if has_alike or trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
            return
        assert self.accelerator is not None  # DDP's own would look for a process group, and for one module on all ranks
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        self.setup_precision_plugin()

    def ignore_in_ddp(self, module: nn.Module, names: Collection[str]) -> None:
        """Exclude parameters and buffers of the module from DDP's broadcasts and sums."""
        self._ignored_by_ddp = names
        private_torch.ignore_in_ddp(module, names)

    @override
    def configure_ddp(self) -> None:
        """Sum dense gradients over the present world by DDP, unless it has one rank."""
        if not self.world.is_connected:
            return
        devices = self.determine_ddp_device_ids()
        assert self.model is not None
        ignored = self._ignored_by_ddp
        summed = {name: p for name, p in self.model.named_parameters() if name not in ignored}
        self._frozen = [parameter for parameter in summed.values() if not parameter.requires_grad]
        if len(self._frozen) == len(summed):
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                if name not in ignored:
                    broadcast_(tensor.data, 0, self.world)
            return  # DDP refuses a model of which it would sum nothing
        # On a stream of its own as in stock Lightning: https://pytorch.org/docs/stable/notes/cuda.html#id5
        with nullcontext() if devices is None else _side_stream(self.root_device):
            ddp = DistributedDataParallel(self.model, devices, process_group=self.world.dense, **self._options)
        assert self.world.dense is not None
        ddp.register_comm_hook(DenseSum(self.world.dense, self.look_at_gradients), sum_over_ranks)
        self.model = ddp

    def sum_unfrozen(self) -> None:
        """Before a step, include parameters in the sums that were frozen when DDP was configured, such as a backbone
        that is tuned from some epoch on; collective if there are any.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            self.model = self.lightning_module
            self.configure_ddp()

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """Plugin that writes files: durable and sealed, unless the user gave another one."""
        return with_durable_io(super().checkpoint_io)

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        DDPStrategy.checkpoint_io.fset(self, io)  # type: ignore[attr-defined]


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Queue work inside on another stream, after the work queued so far and before the following: DDP sends parameters
    that were just written, and fills those that are read next.
    """
    present, side = torch.accelerator.current_stream(device), torch.Stream(device=device)
    side.wait_stream(present)
    with side:
        yield
    present.wait_stream(side)


class DurableCheckpointIO(TorchCheckpointIO):
    """Checkpoint files that are on disk and sealed when a save returns, so that Lightning deletes older ones only then;
    remote places (`s3://...`) are written as in stock Lightning.

    Raises:
        CheckpointError: the storage failed.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            write_file(checkpoint, Path(path))
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written ({error.strerror or error}): files that were there are as they were; make "
                "room or choose another place, and go on from the newest"
            ) from error


def with_durable_io(io: CheckpointIO) -> CheckpointIO:
    """Replace stock Lightning's plugin, or the one that a plugin wraps, by `DurableCheckpointIO`."""
    if type(io) is TorchCheckpointIO:
        return DurableCheckpointIO()
    if type(getattr(io, "checkpoint_io", None)) is TorchCheckpointIO:  # as AsyncCheckpointIO has one
        io.checkpoint_io = DurableCheckpointIO()  # type: ignore[attr-defined]
    return io


def reads_its_own_way(io: CheckpointIO) -> bool:
    """True if the user's plugin may write files in a format of its own, such as encrypted ones."""
    while isinstance(inner := getattr(io, "checkpoint_io", None), CheckpointIO):
        io = inner
    return type(io).load_checkpoint is not TorchCheckpointIO.load_checkpoint
