"""Expert parallelism for Lightning: data-parallel dense parameters, experts in the slots of a placement.

Ranks of one machine rendezvous in a private folder that no other user can reach; nothing received is unpickled.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.files import SUFFIX, weights_alone
from moe_lightning.checkpoint.storage import place_of
from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.config import NonNegativeInt, PositiveInt, Seconds, validated
from moe_lightning.data.loader import follow_schedule, outline_of
from moe_lightning.dispatch.dispatcher import PlanPlace, QuotaPolicy
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.quota import ShadowPlan
from moe_lightning.elastic.health import check_fixed_nodes, check_products
from moe_lightning.elastic.membership import ElasticTask, devices_of_machine, membership_from_environment
from moe_lightning.elastic.worker import leave_process_groups_at_exit
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import machine_folder
from moe_lightning.kernels import BackendName
from moe_lightning.moe.experts import deferred_experts
from moe_lightning.moe.layer import whole_state_dict
from moe_lightning.moe.randomness import attach_stream
from moe_lightning.parallel.collectives import (
    all_gather_json,
    broadcast_object,
    carry_objects_without_pickle,
    check_versions,
)
from moe_lightning.parallel.context import World, all_reduce_, any_says, join_local_world
from moe_lightning.parallel.mesh import ScheduleName, chosen_axes
from moe_lightning.state.tensors import cuts_of
from moe_lightning.strategies.checkpoints import (
    Checkpoints,
    decided,
    is_directory_of_ours,
    reads_its_own_way,
    take_positions,
    with_durable_io,
)
from moe_lightning.strategies.checks import (
    check_for_pipeline,
    check_module,
    chosen_micro_batches,
    identical_buffers,
    reduced_names,
    require_own_sharding,
)
from moe_lightning.strategies.dense_sharding import dense_sharding_name
from moe_lightning.strategies.elastic_worlds import ElasticWorlds
from moe_lightning.strategies.failures import TrainerFailures
from moe_lightning.strategies.fsdp import require_no_hooks
from moe_lightning.strategies.gathered_experts import Stacks, attach_experts, gather_experts, gather_limit
from moe_lightning.strategies.launchers import (
    PrivateLauncher,
    WorkerLauncher,
    build_launcher,
    environment_of_rank,
    meeting_of,
)
from moe_lightning.strategies.options import RunOptions, check_stock_options
from moe_lightning.strategies.pipeline import Pipeline
from moe_lightning.strategies.placed_experts import MigrationReport, PlacedExperts, PlacementOptions
from moe_lightning.strategies.precision import convert_by_rule
from moe_lightning.strategies.stages import StageMap, undo_cut
from moe_lightning.strategies.state_check import CheckInterval
from moe_lightning.strategies.step_data import (
    StepData,
    begin_batch,
    require_accumulation,
    require_loss,
    require_same_data,
)
from moe_lightning.strategies.step_update import StepUpdate
from moe_lightning.strategies.steps import Steps, WholeModel
from moe_lightning.strategies.train_state import FIXED_GROUPS, TrainState
from moe_lightning.strategies.watch import StopOnNan, UpdateSkipped
from moe_lightning.strategies.worlds import ExpertParallelCallback, FixedWorld, Worlds, call_hook

if TYPE_CHECKING:
    from moe_lightning.strategies.slow_ranks import SlowRank

T = TypeVar("T")

logger = logging.getLogger(__name__)


@validated
class ExpertParallelStrategy(DDPStrategy):
    """DDP for dense parameters; every MoELayer of the module dispatches its tokens to experts in the slots of a
    placement.

    One seed and one global batch give one loss sequence on any number of ranks: a DataLoader's batch_size is the
    *global* batch, which the strategy cuts over the ranks; gradients are those of the mean loss over it; noise follows
    the samples.

    Args:
        ep_size: ranks of a dispatch group; tokens are sent only inside it. None: the whole world.
        replicas: replicas of each expert under the uniform placement. None: one in each dispatch group.
        placement: instead of the uniform one, replicas as a nested list [E, N] or [L, E, N], or the path of such a
            table (.json or .npy).
        slots: expert rows that every rank keeps for each layer, room for the replicas of later placements; vacant ones
            cost memory only. None: as many as the first placement needs on some rank.
        quota: "balanced" shares an expert's tokens so that ranks are loaded evenly, "equal" splits them evenly.
        dispatch: transport of tokens: "exchange" (uneven all-to-all), or a name of `DISPATCH_BACKENDS`.
        plan: place of dispatch planning: "host", or "device", see `dispatch.transports`.
        kernels: implementation of the kernels in this process, see `kernels.set_backend`. None: its default.
        dense: sharding of dense parameters and their optimizer states: "ddp" (none), "zero1" (each state on one
            rank), "fsdp" (all in rows over the ranks), "hsdp" (the same in several copies), or a name of
            `strategies.dense_sharding.DENSE_SHARDINGS`.
        shard_size: under hsdp, at least so many ranks share a copy. None: those of a node, or half of all.
        offload_optimizer: True: optimizer states of dense parameters stay in host memory, and updates are made there.
        mesh: ranks along pp (pipeline stages), cp (parts of sequences) and tp (parts of layers). None: one each.
        schedule: of a pipeline: "1f1b", or "interleaved" with two stages on every rank, whose bubbles are half as long.
        micro_batches: micro-batches of a batch in a pipeline. None: two for each of its ranks.
        seed: of keyed randomness and of stock DataLoaders' sampling. None: the one given to seed_everything, else 0.
        timeout_s: longest wait for a peer in any collective.
        check_state_every: steps between checks of the state in memory: dense parameters, moments, buffers of this
            library and experts are compared bit by bit between the ranks that hold them, and with what the last update
            has left. "auto": as few as cost 0.5 % of the time, at most 100; 0: never.
        check_arithmetic_every: steps between checks of arithmetic: of the matrix products of a step each rank sends an
            element to the next rank, which computes it again. "auto": as few as cost 0.5 % of the time, at most 1000;
            0: never.
        stop_on_nan: action before the update of a step in which a rank's loss, or a gradient that the update would use,
            is not finite: "end" the run, or "skip" the update, which then changes no weight, no optimizer state and no
            buffer. Both let the host wait for the loss of every micro-batch and the norm of the gradients. None:
            update, and warn once with rank, step and samples.
        hang_report_s: seconds without a step, after which one report names the ranks that the others wait for, with
            stacks and the last collectives of all; five times as long before the first batch and for a rank that
            compiles. None: never.
        resume_overrides: go on in other training data than those of the checkpoint, which are refused else.
        kwargs: passed to DDPStrategy and so to DistributedDataParallel.

    Attributes:
        options, placing: of the run; of placements.
        worlds: the present world.
        elastic: changes of the world; `FixedWorld` where no elastic launcher started this process.
        state, steps, update: this rank's state of the run; batches and losses; the update of a step.
        checkpoints: saving and restoring.
        failures: exceptions that have left the Trainer.

    Raises:
        ConfigurationError: an unknown option or start_method, a communication hook, sizes that do not fit world or
            model, or torch.compile.
    """

    strategy_name = "expert_parallel"

    def __init__(
        self,
        *,
        ep_size: PositiveInt | None = None,
        replicas: PositiveInt | None = None,
        placement: str | os.PathLike[str] | Sequence[Any] | None = None,
        slots: PositiveInt | None = None,
        quota: QuotaPolicy = "balanced",
        dispatch: str = "exchange",
        plan: PlanPlace = "host",
        kernels: BackendName | None = None,
        dense: str = "ddp",
        shard_size: PositiveInt | None = None,
        offload_optimizer: bool = False,
        mesh: Mapping[str, int] | None = None,
        schedule: ScheduleName = "1f1b",
        micro_batches: PositiveInt | None = None,
        seed: NonNegativeInt | None = None,
        timeout_s: Seconds = 600.0,
        check_state_every: CheckInterval = "auto",
        check_arithmetic_every: CheckInterval = "auto",
        stop_on_nan: StopOnNan | None = None,
        hang_report_s: Seconds | None = 60.0,
        resume_overrides: bool = False,
        **kwargs: Any,
    ) -> None:
        ddp = check_stock_options(type(self), kwargs)
        super().__init__(timeout=timedelta(seconds=timeout_s), **kwargs)
        self.placing = PlacementOptions(
            ep_size=ep_size, replicas=replicas, placement=placement, quota=quota, dispatch=dispatch, plan=plan,
            slots=slots, kernels=kernels)  # fmt: skip
        axes, dense = chosen_axes(mesh), dense_sharding_name(dense, shard_size)
        if axes.tp > 1:
            require_own_sharding(dense, f"mesh.tp={axes.tp}")
        self.options = RunOptions(
            timeout=timedelta(seconds=timeout_s),
            start_method=kwargs.get("start_method", "popen"),
            ddp=ddp,
            axes=axes,
            shard_size=shard_size,
            dense=dense,
            offload_optimizer=offload_optimizer,
            schedule=schedule,
            micro_batches=chosen_micro_batches(micro_batches, schedule, axes.pp),
            seed=seed,
            check_state_every=check_state_every,
            check_arithmetic_every=check_arithmetic_every,
            stop_on_nan=stop_on_nan,
            hang_report_s=hang_report_s,
            resume_overrides=resume_overrides,
        )
        before = {*vars(self)}
        self._begin()
        self._of_process = {*vars(self)} - before

    def _begin(self) -> None:
        """Create the attributes of this process and its run."""
        from moe_lightning.strategies.hangs import HangWatch  # takes a while, and a command that only asks needs none

        options = self.options
        self.worlds = Worlds(options.axes, options.dense, options.shard_size)
        self.elastic: ElasticWorlds | FixedWorld = FixedWorld()
        self.state = TrainState(self.worlds, dense=options.dense, on_host=options.offload_optimizer)
        self.update = StepUpdate(self.worlds, self.state, options)
        self.steps = Steps(self.worlds, self.state, self.update.screened)
        self._passes: WholeModel | Pipeline = WholeModel(
            self.worlds, self.state, self.steps, options.ddp, self.update.check_own_norm
        )
        self._hangs = HangWatch(options.hang_report_s)
        self.checkpoints = Checkpoints(self.worlds, self.state)
        self.failures = TrainerFailures(self.worlds)
        self._own_launcher: PrivateLauncher | WorkerLauncher | None = None
        self._gathered: Stacks | None = None
        self._is_placed = False

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of the constructor and the Trainer, without those that each process creates."""
        return {name: value for name, value in super().__getstate__().items() if name not in self._of_process}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    # ------------------------------------------------------------------ world

    @property
    def world(self) -> World:
        """The ranks that train together; available once the strategy is set up."""
        return self.worlds.present

    @property
    @override
    def process_group_backend(self) -> str:
        """Name of the process groups' backend."""
        return super().process_group_backend or dist.get_default_backend_for_device(self.root_device)

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this machine's ranks; an elastic launcher says how many there are."""
        return devices_of_machine(self._devices)

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._devices = devices

    @property
    @override
    def launcher(self) -> PrivateLauncher | WorkerLauncher | None:
        """None for one process, which starts no other: Lightning then runs it in notebooks and at the prompt."""
        if self._own_launcher is None:
            self._own_launcher = build_launcher(self)
        return self._own_launcher

    def explained(self, error: Exception) -> Exception:
        """Return the exception to raise instead of one that leaves the Trainer."""
        return self.failures.explained(error, self.elastic)

    def failed(self, error: BaseException) -> None:
        """Publish an exception that leaves the Trainer here to the other ranks."""
        self.failures.publish(error, private_lightning.trainer_of(self.lightning_module))

    @property
    def is_left_alone(self) -> bool:
        """True after an exception that not all ranks raised: nothing collective can follow."""
        return self.failures.last is not None and not self.failures.last.is_common

    def meet(self) -> None:
        """Join the other ranks unless that has happened; Lightning itself joins only after it has looked for
        checkpoints. Collective.
        """
        if not self.worlds.is_joined:
            self.setup_environment()

    @override
    def setup_environment(self) -> None:
        self.elastic.record_call(is_running=True)
        super().setup_environment()
        trainer, is_elastic = private_lightning.trainer_of(self.lightning_module), self.worlds.is_elastic
        if trainer is not None:  # a strategy may be set up without a Trainer
            private_lightning.keep_samplers(trainer)
            if self.worlds.may_have_peers:
                any_rank_says = partial(any_says, world=self.world)
                agrees = trainer.state.fn == TrainerFn.FITTING and not is_elastic
                private_lightning.handle_signals_between_batches(trainer, any_rank_says if agrees else None)
            self.state.averaging.begin_fit(trainer, self._averaged_state, is_elastic=is_elastic)

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        if self.root_device.type == "cuda":
            check_products(socket.gethostname(), self.root_device)
        if not self.worlds.is_elastic:  # nor in an earlier run of this process
            engine = membership_from_environment(self.worlds.axes.num_ranks)
            if engine is not None:
                carry_objects_without_pickle()
                self.elastic = elastic = ElasticWorlds(self, engine)
                self.set_present(elastic.join_first(self.num_processes))
        if not self.worlds.is_elastic:
            self._join()
        self._build_groups()

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
            timeout=self.options.timeout,
            meeting=meeting_of(self.cluster_environment) if self.num_nodes == 1 else None,
        ):
            super().setup_distributed()

    def _build_groups(self) -> None:
        """Build the groups of a world that does not change, unless this rank is in one; collective."""
        if self.worlds.is_joined:
            return
        has_peers = self.world_size > 1
        world = World.before_setup(self.root_device) if has_peers else World.single(self.root_device)
        for group in world.all_groups:  # torch's default group may be the user's own, with torch's half hour
            private_torch.set_group_timeout(group, self.options.timeout)
        layout = self.worlds.layout(all_gather_json(self.node_rank, world))  # schedulers deal ranks out in any order
        if has_peers:
            world = World.connect(self.root_device, self.options.timeout, layout)
        self.worlds.set_present(world)
        check_versions(world)
        if self.num_nodes > 1:
            trainer = private_lightning.trainer_of(self.lightning_module)
            folder = Path.cwd() if trainer is None else machine_folder(trainer.default_root_dir)
            check_fixed_nodes(socket.gethostname() if self.local_rank == 0 else None, folder, world)
        leave_process_groups_at_exit()

    @override
    def set_world_ranks(self) -> None:
        private_lightning.set_environment(self, environment_of_rank(self.cluster_environment))
        super().set_world_ranks()
        task = ElasticTask.from_environment()
        if task is not None and task.starts > 1:
            rank_zero_only.rank = max(1, self.global_rank)  # type: ignore[attr-defined]  # others train already

    def set_present(self, world: World) -> None:
        """Set this process's rank and the number of ranks from a world, for Lightning too."""
        assert self.cluster_environment is not None
        self.worlds.set_present(world, self.cluster_environment)

    def leave_world(self) -> None:
        """Release everything that belongs to the groups of the present world; values stay."""
        self._hangs.end()
        self.state.averaging.withdraw()
        call_hook(self.state.module, ExpertParallelCallback.on_before_experts_move)
        self.model = self._passes.unwrapped(self.state.module)
        self.state.parts.leave_world()
        self.steps.leave_world()
        self._forget_step()

    def _forget_step(self) -> None:
        """Forget an aborted step, of this training or of one that an exception has ended."""
        self.steps.forget_step()
        self.experts.forget_step()
        self._passes.forget_step()
        self.update.forget_step()

    def enter_world(self, world: World) -> None:
        """Resume in another world, which this rank has joined and whose state it has by now; collective."""
        self.state.forget_update()
        trainer, waits = self.state.trainer, self.worlds.cannot_train(world.size)
        loaders = (None if waits else trainer.train_dataloader, trainer.val_dataloaders)  # no step is cut for all of it
        if not self.worlds.spares:
            self.step_data.enter_world(rank=world.data_rank, world_size=world.shape.dp, loaders=loaders)
        self.steps.sequences.enter_world(world)
        self.configure_ddp()
        call_hook(self.state.module, ExpertParallelCallback.on_world_changed)
        self._hangs.begin(world, trainer.default_root_dir)

    @property
    def reachable(self) -> World:
        """The ranks that are connected, whether or not the strategy is set up. A process that waits to join a running
        world is alone: it will receive the others' values.
        """
        if self.world_size == 1 or self.is_left_alone:  # torch may still know those it trained among before
            return World.single(self.root_device)
        world = World.before_setup(self.root_device)
        return replace(world, is_aborted=self.world.is_aborted) if self.worlds.is_joined else world

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

    def decide(self, choose: Callable[[], T]) -> T:
        """Return rank 0's result on every rank, after joining the other ranks if necessary. Collective.

        Args:
            choose: called on rank 0; returns plain values.

        Raises:
            ConfigurationError, CheckpointError: on every rank, the error of rank 0.
        """
        self.meet()
        return decided(choose, self.reachable)

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """As in DDP, but a mean inside a step is that over the micro-batch's samples, and integers have exact means.
        Without a group over the ranks of a pipeline stage, because other stages log the same values; a sum then has the
        values of each sample once.
        """
        operation = str(reduce_op).lower().rpartition(".")[2]  # torch's are RedOpType.SUM, RedOpType.AVG
        is_sum = isinstance(tensor, Tensor) and operation == "sum"
        if operation in ("none", "mean", "avg") and isinstance(tensor, Tensor):
            tensor, reduce_op = self.steps.share_of_mean(tensor, over_all_ranks=group is None)
        if self.world_size == 1:
            return tensor
        stage = self.world.stage if self.worlds.is_joined and group is None else None
        if stage is not None and stage is not self.world:
            if stage.size == 1:
                return tensor
            group = stage.dense
        reduce = partial(super().reduce, group=group, reduce_op=reduce_op)
        return self.steps.sum_over_ranks(tensor, reduce) if is_sum and stage is not None else reduce(tensor)

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
        """As in DDP.

        Raises:
            ConfigurationError: ranks have tensors of different shapes.
        """
        if self.world_size == 1:
            return tensor
        if group in (None, dist.group.WORLD):
            shapes = all_gather_json(list(tensor.shape), self.reachable)
            if any(shape != shapes[0] for shape in shapes):
                raise ConfigurationError(
                    f"all_gather of tensors of the shapes {', '.join(map(str, shapes))}, one of each rank: ranks have "
                    "shares of a batch of different sizes, so gather with a torchmetrics.CatMetric, or pad to one "
                    "shape, and train with drop_last=True on batches that the ranks divide"
                )
        return super().all_gather(tensor, group, sync_grads)

    # ------------------------------------------------------------------ setup

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        self.place_module(trainer)
        if "tp" in self.world.groups and (trainer.state.fn == TrainerFn.FITTING or cuts_of(module)):
            self.state.parts.begin_layers(self.world.stage)
        self.steps.draw_noise()
        self._ignore_in_ddp()
        self._hangs.begin(self.world, trainer.default_root_dir)
        if trainer.state.fn == TrainerFn.FITTING and self.world_size > 1:
            private_lightning.agree_on_validations(trainer, partial(self.reduce_boolean_decision, all=False))
        if self.world.is_connected or self.worlds.is_elastic:
            private_lightning.order_reduced(trainer, self._reduced_names)
        if trainer.state.fn == TrainerFn.FITTING or (self.world.is_connected and self.world.shape.pp == 1):
            super().setup(trainer)
        else:  # DDP's own would look for a process group, and for one module on all ranks
            assert self.accelerator is not None
            self.accelerator.setup(trainer)
            self.precision_plugin.convert_module(module)
            self.model_to_device()
            self.setup_precision_plugin()
        self._passes.synchronize()
        self.update.begin(self.precision_plugin)
        if self.elastic.is_newcomer:
            # There are no peers to evaluate with yet.
            trainer.num_sanity_val_steps = 0
            if private_lightning.leave_evaluation_out(trainer):
                logger.warning("the others are in a fit already: this process leaves the evaluation before it out")

    def _reduced_names(self, names: list[str]) -> list[str]:
        return reduced_names(all_gather_json(names, self.world.stage), may_lack=self.worlds.is_elastic)

    def _averaged_state(self) -> dict[str, Any]:
        of_rank = self.state.module.state_dict
        return of_rank() if self.is_left_alone else self.checkpoints.model_state(of_rank, averaged=True)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._is_placed = False
        self._passes.begin_run()

    def promise_replicas(self, nodes: int) -> None:
        """Let so many nodes hold each expert, see `PlacementOptions.promising`; before experts are placed.

        Raises:
            ConfigurationError: the strategy has dispatch groups.
        """
        assert not self._is_placed
        self.placing = self.placing.promising(nodes, max(1, self.world_size // self.worlds.axes.pp))

    def place_module(self, trainer: pl.Trainer) -> None:
        """Put the module's experts into this rank's slots, once for each run of the Trainer; collective.

        Raises:
            ConfigurationError: a module that cannot be trained the same on any number of ranks.
        """
        if self._is_placed:
            return
        module = self.lightning_module
        assert module is not None
        undo_cut(module)
        convert_by_rule(self.precision_plugin, lambda: self.state.stages.whole_module())
        fixed = FIXED_GROUPS if self.state.fixes_groups else None
        check_module(trainer, module, cuts_dense=self.state.parts.is_enabled, fixed_groups=fixed)
        self.steps.stream.begin_run(self._run_seed())
        attach_stream(module, self.steps.stream)
        self.steps.sequences.attach(module, self.world, self.worlds.axes.cp)
        keeps_weights = trainer.state.fn != TrainerFn.FITTING and trainer.ckpt_path is None
        if not self.state.has_placed(module):
            keeps_weights, cut = False, None
            if self.worlds.axes.pp > 1:
                check_for_pipeline(module, stage_size=self.world.stage.size)
                self._passes = Pipeline(
                    module, self.options.schedule, self.steps, self.worlds, self.state, self.update.scaled
                )
                cut = self._passes.cut
            stages = StageMap(module, self.worlds, cut)
            stages.cut.apply(self.root_device)  # before experts without values meet
            self.state.set_module(module, self.placing.place(module, self.world.stage, stages), stages)
        self._gathered = self._gathered if keeps_weights else None
        self.state.parts.begin_run(self.world)
        self.state.stages.cut.apply(self.root_device)
        for layer in self.state.stages.layers:
            layer.resume_world()
        self._is_placed = True

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with self.state.stages.whole_module():
            super().setup_optimizers(trainer)
        self.state.forget_restored()
        self.update.check_optimizers(self.optimizers, are_new=True)
        self.state.set_optimizers(self.optimizers)

    @override
    def configure_ddp(self) -> None:
        """Sum dense gradients over the present world, or cut dense parameters over its ranks.

        Raises:
            ConfigurationError: DDP cannot follow the options.
        """
        ignored = self._ignore_in_ddp()  # a newcomer has its parts by now
        self.steps.draw_noise()
        if "shard" in self.world.groups:
            self.state.parts.begin(self.world.stage)
            return
        assert self.model is not None
        self.model = self._passes.wrapped(self.model, ignored, self.determine_ddp_device_ids())

    def _ignore_in_ddp(self) -> list[str]:
        """Exclude from DDP what ranks do not share, or have alike; returns its names."""
        module = self.state.module
        names = [*self.experts.keys(module), *identical_buffers(module), *cuts_of(module)]
        private_torch.ignore_in_ddp(module, names)
        return names

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._forget_step()
        self.state.forget_counts()
        for parameter in self.state.shards.unowned:  # no optimizer of this rank clears what a former fit has left
            parameter.grad = None
        self.state.parts.drop_unsummed()
        if self.state.parts.is_in_rows:
            require_no_hooks(self.state.module, self.experts.stack_of)
        self.step_data.begin_training()
        self.checkpoints.begin_training()
        self.update.begin_training()
        follow_schedule(self.state.trainer)
        private_lightning.begin_resumed_epoch(self.state.trainer)
        private_lightning.end_resumed_epochs(self.state.trainer)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.state.averaging.finish()
        self.update.finite.finish()
        # In an elastic run a rank that is lost now must not end the others.
        if self.world.is_connected and not self.worlds.is_elastic:
            room = gather_limit(self.num_processes)
            self.state.transfer.gather(self.world.stage, room)
            if self.worlds.axes.pp == 1:  # ranks of a pipeline keep their stages only
                self._gathered = gather_experts(self.experts, room)
            private_lightning.act_on_signals(self.state.trainer, partial(any_says, world=self.world), ends=True)

    @override
    def teardown(self) -> None:
        self.elastic.record_call(is_running=False)
        if (trainer := private_lightning.trainer_of(self.lightning_module)) is not None:
            private_lightning.use_own_methods(trainer)  # first: also where the rest fails
        self._hangs.end()
        self.failures.restore_savers()
        self.checkpoints.release()
        module = self.lightning_module
        if module is not None and self.state.holds(module):
            attach_experts(self.state.stages, self._gathered)
            self.experts.release_graphs()
            self.state.parts.abort_step(self.world)
        self.update.end(self.precision_plugin)
        self._passes.end_run()
        if module is None or not any(p.is_meta for p in module.parameters()):
            super().teardown()  # else placing the experts failed, and the user shall see that error

    # ------------------------------------------------------------------ placement

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with deferred_experts():  # what configure_model builds allocates only this rank's slots
            yield

    @property
    def experts(self) -> PlacedExperts:
        """The experts under their placements; available once the strategy is set up."""
        return self.state.experts

    def replace_experts(self, placements: Sequence[Placement]) -> MigrationReport:
        """Move experts with all their state to new placements, one for each MoE layer of all pipeline stages, over the
        ranks of its stage; collective, between steps.

        Raises:
            ConfigurationError: a placement that does not fit the world, a dispatch group or the slots.
        """
        call_hook(self.state.module, ExpertParallelCallback.on_before_experts_move)
        return self.state.stages.replace(self.experts, placements, self.optimizers, self.world.nodes)

    def start_shadow_experts(self, plans: Sequence[ShadowPlan], early_shares: Sequence[float] | None = None) -> None:
        """Start the shadow experts of the next step, a plan for each MoE layer here; collective, before the step.

        Args:
            plans: the same on every rank.
            early_shares: part of each layer's Trans that overlaps with the experts of the block before it, the rest
                with its dense layers; None: all of it.

        Raises:
            ConfigurationError: plans for other placements or several dispatch groups, or as
                `require_shadows_possible`.
        """
        self.require_shadows_possible()
        self.experts.start_shadows(plans, self.shadow_dtype, early_shares or [1.0] * len(plans))

    def require_shadows_possible(self) -> None:
        """
        Raises:
            ConfigurationError: experts in four bits, or with hooks of their gradients.
        """
        if any(layer.experts.in_4_bits for layer in self.experts.layers):
            raise ConfigurationError(
                "shadows of experts in four bits would travel as if they were not: set the balancer's shadows to none, "
                "or use kind=lora"
            )
        for name, parameter in (pair for stack in self.experts.stacks for pair in stack.parameters.items()):
            if private_torch.has_hooks(parameter):
                raise ConfigurationError(
                    f"experts.{name} has a hook of its gradient, which the gradients of shadow experts pass by: set "
                    "the balancer's shadows to none, or change the gradient in on_before_optimizer_step"
                )

    @property
    def shadow_dtype(self) -> torch.dtype:
        """Dtype of the experts' computation, and so of the weights of shadow experts in transfers."""
        mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        return mixed.get(str(self.precision_plugin.precision)) or self.experts.layers[0].experts.dtype

    # ------------------------------------------------------------------ data

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for a sampler of Lightning's: this rank and the number of ranks in the present world."""
        if not self.worlds.is_joined:
            return super().distributed_sampler_kwargs
        return {"num_replicas": self.world.shape.dp, "rank": self.world.data_rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Cut a loader over the ranks: its batch_size is the global batch.

        Raises:
            ConfigurationError: a loader that cannot be cut exactly: an iterable dataset, batches of the user's own...,
                or ranks have other data.
        """
        assert self.lightning_module is not None
        if self.world.is_connected and not self.worlds.is_elastic:  # else `ElasticWorlds.run`, with who joins
            require_same_data(all_gather_json(outline_of(dataloader), self.world))
        return self.step_data.cut(dataloader, self.lightning_module.trainer)

    def share_samples(self, speeds: IntArray | None, most: int | None = None) -> None:
        """Cut training batches by the speeds of their slices from the next one on, see `StepData.share_by`."""
        self.step_data.share_by(speeds, most, self.state.trainer.train_dataloader)

    @cached_property
    def step_data(self) -> StepData:
        """Loaders of this rank and their positions."""
        return StepData(
            rank=self.world.data_rank,
            world_size=self.world.shape.dp,
            pieces=self.options.micro_batches,
            seed=self._run_seed,
            must_cut=self.worlds.axes.num_ranks > 1 or self.worlds.is_elastic,
        )

    @property
    def resume_overrides(self) -> bool:
        """True if a run may go on in other training data than those of its checkpoint."""
        return self.options.resume_overrides

    def _run_seed(self) -> int:
        seed = self.options.seed
        return seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))

    # ------------------------------------------------------------------ checkpoints

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """Plugin that writes files: durable and sealed, unless the user gave another one."""
        return with_durable_io(super().checkpoint_io)

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        DDPStrategy.checkpoint_io.fset(self, io)  # type: ignore[attr-defined]

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """True if values are restored after optimizers are built, as is needed where ranks hold shards of dense
        parameters; stock DDP restores them before.
        """
        return self.worlds.axes.pp > 1 or (self.worlds.may_have_peers and self.state.parts.is_enabled)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        if not self.state.holds(module):  # connected only
            return whole_state_dict(module)
        with self._passes.opened():
            if self.is_left_alone:
                return super().lightning_module_state_dict()
            return self.checkpoints.model_state(self._compared_state)

    def _compared_state(self) -> dict[str, Any]:
        """Return this rank's part of the model, which ranks in training compare first; collective then."""
        trainer = self.state.trainer
        if trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING:
            self.update.state_check.before_save(trainer.global_step)
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.is_left_alone:
            return {}
        return self.checkpoints.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.failures.last is not None and self.is_left_alone:
            self.failures.last.warn_of_no_checkpoint()
            return
        if self.lightning_module is not None and self.state.holds(self.lightning_module):
            self.checkpoints.add_positions(checkpoint)
        checkpoint = self.checkpoints.plain(checkpoint)
        if self.checkpoints.may_change(filepath):
            self.checkpoints.saved[str(filepath)] = True
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.checkpoints.may_change(filepath):
            self.checkpoints.saved[str(filepath)] = False
            private_lightning.after_saves(self.checkpoint_io, partial(super().remove_checkpoint, filepath))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint: a file, a checkpoint directory, or a directory of these, of which the newest that is whole
        or can be repaired is used, and damage is named. Collective.

        Args:
            weights_only: False: unpickle any object, which may run code of its author; else only tensors and plain
                values are read.

        Raises:
            CheckpointError: it is missing, damaged, holds objects that are not read, or weights alone where a training
                is to resume.
        """
        module, is_trusted = self.lightning_module, weights_only is False
        trainer = private_lightning.trainer_of(module)
        fit = trainer if trainer is not None and trainer.state.fn == TrainerFn.FITTING else None
        if fit is not None and (saver := private_lightning.callback_of(fit, private_lightning.ResumableFrom)):
            saver.before_resuming(fit)
        self.checkpoints.begin_restoring(is_trusted=is_trusted)
        if "://" in str(checkpoint_path) and str(checkpoint_path).endswith(SUFFIX):  # a file of stock Lightning's
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=not is_trusted)
        elif reads_its_own_way(self.checkpoint_io) and not is_directory_of_ours(checkpoint_path):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        else:
            self.meet()
            place = place_of(str(checkpoint_path))
            checkpoint = self.checkpoints.open(place, self.reachable)
        self.checkpoints.begin_hooks(module)
        positions = take_positions(checkpoint)
        if fit is not None:
            if not {"optimizer_states", "lr_schedulers"} <= checkpoint.keys():
                raise weights_alone(checkpoint_path)
            self.step_data.restore(positions, fit.train_dataloader)
            self.checkpoints.restore_schedulers(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        self.checkpoints.end_hooks(module, is_set_up=self.restore_checkpoint_after_setup)
        self.place_module(module.trainer)
        if isinstance(self.precision_plugin, HalfPrecision | DoublePrecision):
            self.precision_plugin.convert_module(module)  # frozen weights are compared in this dtype
        self.checkpoints.load_model(checkpoint, strict=strict)
        self.state.after_writing()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.checkpoints.load_optimizers(checkpoint)

    # ------------------------------------------------------------------ a step

    @override
    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a batch to the device and cut it to this rank's part of each sequence."""
        trainer = private_lightning.trainer_of(self.lightning_module)
        if trainer is not None:
            self._hangs.begin_phase("forward" if trainer.training else "evaluation", trainer.global_step, is_batch=True)
        batch = self.steps.sequences.cut(super().batch_to_device(batch, *args, **kwargs))
        if trainer is not None and trainer.training:
            begin_batch(trainer.train_dataloader)
        return batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        require_accumulation(self.state.trainer)
        self.state.require_same_optimizers(self.optimizers)
        self.update.check_optimizers(self.optimizers)
        self._sum_unfrozen()
        self.update.finite.begin_batch(self.state.module)
        self.update.before_step()
        if self.steps.has_left_step:
            self.steps.forget_step()
            self.update.losses.clear()
            self.state.forget_update()
            self.state.parts.drop_unsummed()
        by_hand = not self.state.module.automatic_optimization
        with self.steps.training(args), self.state.shards.whole_groups() if by_hand else nullcontext():
            context = self.precision_plugin.train_step_context
            output = self._passes.train(super().training_step, context, *args, **kwargs)
        if self.worlds.present.size > 1:
            require_loss(output, self.state.trainer)
        if (step := self.elastic.step) is not None and not by_hand:
            step.batch.begin(args[0], output)
        return output

    def _sum_unfrozen(self) -> None:
        """Let DDP sum the gradients of parameters that were unfrozen; collective then."""
        if self._passes.lacks_unfrozen:
            self.model = self.lightning_module
            self.configure_ddp()

    @property
    def last_stage_loss(self) -> Tensor | None:
        """Weighted loss of the last batch in the last stage of a pipeline; None on ranks without it."""
        return self._passes.last_loss

    @property
    def slowest_rank(self) -> SlowRank | None:
        """The slowest rank of the last minute, on rank 0; None elsewhere, and before it is known."""
        return self._hangs.slowest

    @property
    def last_gradient_norm(self) -> Tensor | None:
        """Gradient norm of the last clipped step, over the whole model."""
        return self.update.gradients.last_norm

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients of the mean over the global batch, summed over replicas before any hook sees them."""
        module, precision = self.state.module, self.precision_plugin
        self._hangs.begin_phase("backward", self.state.trainer.global_step)
        if not self.steps.is_dummy_batch:
            self.update.check_loss(closure_loss, self.steps.batch)
        weighted = self._passes.weighted(closure_loss)
        self.update.gradients.begin_sum()
        with self.steps.summing():
            self.pre_backward(closure_loss)
            loss = precision.pre_backward(weighted, module)
            self._passes.backward(partial(precision.backward, loss, module, optimizer, *args, **kwargs))
        precision.post_backward(loss, module)
        self.post_backward(closure_loss)
        has_next = self.steps.is_blocked  # micro-batch of the step
        self._hangs.begin_phase("callbacks and data" if has_next else "update", self.state.trainer.global_step)
        return closure_loss

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Leave gradients unsummed inside. Under manual optimization, as in `toggle_model(sync_grad=False)`, every
        backward pass sums its own all the same: a later sum could not tell them from those that are summed already.
        """
        if not self.state.module.automatic_optimization:
            yield
            return
        self._sum_unfrozen()  # before the present DDP is asked to leave this micro-batch unsummed
        with self.steps.accumulating(), super().block_backward_sync(), self.state.parts.summing_later():
            yield

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run and commit a step in the order that recoveries rely on: `closure` runs forward and backward, in which DDP
        sums the gradients of dense parameters over ranks and `Steps.summing` those of experts over their holders. Hooks
        follow, in which copies of the last state end, and clipping by the norm of the whole model. Then every rank
        agrees that it is prepared, and none changes a value before all are. An update that is left out or replaced
        leaves the optimizer's step before it changes anything.
        """
        state, elastic, output = self.state, self.elastic, None
        self.checkpoints.begin_update()
        with suppress(UpdateSkipped), self.update.gradients.counted(), state.updating(optimizer) as begin:
            prepare = partial(self.update.prepare, optimizer, elastic, begin)
            with private_lightning.before_update(self.precision_plugin, prepare):
                output = super().optimizer_step(optimizer, closure, model, **kwargs)
        state.shards.broadcast_updates(optimizer)
        state.after_update(optimizer)
        self.update.state_check.after_update()
        elastic.commit()
        self._hangs.begin_phase("callbacks and data", state.trainer.global_step)
        return output

    # ------------------------------------------------------------------ batches outside of training

    @property
    def is_dummy_batch(self) -> bool:
        """True if this rank has no sample in the running or the last batch: callbacks that count samples skip it."""
        return self.steps.is_dummy_batch

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        step = partial(self._passes.evaluate, super().validation_step, self.precision_plugin.val_step_context)
        return self.steps.evaluate(step, self.state.trainer.val_dataloaders, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        step = partial(self._passes.evaluate, super().test_step, self.precision_plugin.test_step_context)
        return self.steps.evaluate(step, self.state.trainer.test_dataloaders, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        step = partial(self._passes.evaluate, super().predict_step, self.precision_plugin.predict_step_context)
        return self.steps.predict(step, self.state.trainer.predict_dataloaders, *args, **kwargs)

    # ------------------------------------------------------------------ registration

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            about = "Expert parallelism with replicated experts"
            strategy_registry.register(cls.strategy_name, cls, description=about)
            for name, start_method in (("spawn", "spawn"), ("fork", "fork"), ("notebook", "fork")):
                options = {"description": f"{about}, ranks by {start_method}", "start_method": start_method}
                strategy_registry.register(f"{cls.strategy_name}_{name}", cls, **options)


ExpertParallelStrategy.register_strategies(StrategyRegistry)


def own_strategy(trainer: pl.Trainer, name: str, cure: str = "drop the callback") -> ExpertParallelStrategy:
    """Return the trainer's strategy.

    Args:
        name: the callback that needs it.
        cure: the alternative that the error names.

    Raises:
        ConfigurationError: it is another one.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, ExpertParallelStrategy):
        raise ConfigurationError(
            f"{name} needs strategy='expert_parallel', not {type(strategy).__name__}: use that, or {cure}"
        )
    return strategy
