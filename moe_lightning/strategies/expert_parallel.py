"""Expert parallelism for Lightning: data-parallel dense parameters, experts in the slots of a placement."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from moe_lightning.algorithms.placement import Placement
from moe_lightning.algorithms.shadows import ShadowPlan
from moe_lightning.checkpoint.optimizer_replay import AdamWReplay
from moe_lightning.comm.collect import broadcast_object
from moe_lightning.comm.decision_check import check_versions
from moe_lightning.comm.dense_sum import sum_over_ranks
from moe_lightning.comm.dispatcher import DISPATCH_BACKENDS, QuotaPolicy
from moe_lightning.comm.object_collectives import carry_objects_without_pickle
from moe_lightning.comm.world import World, join_local_world
from moe_lightning.data.step_sampler import StepSlice
from moe_lightning.elastic.lifeline import leave_process_groups_at_exit
from moe_lightning.elastic.settings import ElasticTask, membership_from_environment
from moe_lightning.errors import ConfigurationError
from moe_lightning.modules.experts import deferred_experts
from moe_lightning.modules.stream import SampleStream, attach_stream
from moe_lightning.strategies.elastic_worlds import ElasticWorlds
from moe_lightning.strategies.expert_updates import require_updates_by_expert
from moe_lightning.strategies.kept_experts import KeptExperts, room_for_experts
from moe_lightning.strategies.local_launch import PrivateLauncher, meeting_of
from moe_lightning.strategies.placed_experts import MigrationReport, PlacedExperts, resolve_placements
from moe_lightning.strategies.step_data import StepData
from moe_lightning.strategies.step_weights import StepWeights
from moe_lightning.strategies.stepping import SteppingStrategy
from moe_lightning.strategies.world_faults import explained
from moe_lightning.strategies.zero import DENSE_SHARDINGS, DenseSharding
from moe_lightning.values import NonNegativeInt, PositiveInt, Seconds, validated


@validated
class ExpertParallelStrategy(SteppingStrategy):
    """DDP for dense parameters; every MoELayer of the module dispatches its tokens to experts in the slots of a
    placement.

    One seed and one global batch give one loss sequence on any number of ranks: a DataLoader's batch_size is the
    *global* batch, which the strategy cuts over the ranks; gradients are those of the mean loss over it; noise follows
    the samples.

    Args:
        ep_size: ranks of a dispatch group; tokens travel only inside it. None: the whole world.
        copies: replicas of each expert under the uniform placement. None: one in each dispatch group.
        placement: instead of the uniform one, replicas as a nested list [E, N] or [L, E, N], or the path of such a
            table (.json or .npy).
        slots: expert rows that every rank keeps for each layer, room for the replicas of later placements; those that
            hold no expert are vacant and cost memory only. None: as many as the first placement needs.
        quota: "balanced" shares an expert's tokens among its replicas so that ranks are loaded evenly, "equal" splits
            them evenly.
        dispatch: how tokens travel to experts: "exchange" (an uneven all-to-all), "padded" (as DeepSpeed-MoE without
            drops), or a name that somebody has registered in `comm.dispatcher.DISPATCH_BACKENDS`.
        dense: who keeps the optimizer states of dense parameters: "ddp" (every rank all), "zero1" (one rank each), or a
            name that somebody has registered in `strategies.zero.DENSE_SHARDINGS`.
        zero1: short for dense="zero1".
        seed: of keyed randomness and of the sampling of stock DataLoaders. None: the one given to seed_everything,
            else 0.
        timeout_s: longest wait for a peer in any collective.
        check_replicas_every: steps after which replicas of experts are compared bit by bit; 0: never.
        kwargs: passed to DDPStrategy and so to DistributedDataParallel.

    Attributes:
        last_gradient_norm: of the last clipped step, over the whole model.
        promised_replicas: nodes that shall hold each expert where slots allow; recovery relies on it.
        before_replacing: called before experts move, so that nobody reads their rows meanwhile.
        replay: of another rank's optimizer shard; None where none is kept.
        entered_world: called when this rank has entered another world, before the fit loop goes on.

    Raises:
        ConfigurationError: sizes that do not fit the world or the model, fp16 precision, a gradient-accumulation
            schedule, or a module under torch.compile.
    """

    strategy_name = "expert_parallel"

    def __init__(
        self,
        *,
        ep_size: PositiveInt | None = None,
        copies: PositiveInt | None = None,
        placement: str | os.PathLike[str] | Sequence[Any] | None = None,
        slots: PositiveInt | None = None,
        quota: QuotaPolicy = "balanced",
        dispatch: str = "exchange",
        dense: str = "ddp",
        zero1: bool = False,
        seed: NonNegativeInt | None = None,
        timeout_s: Seconds = 600.0,
        check_replicas_every: NonNegativeInt = 100,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("start_method", "popen") != "popen":
            raise ConfigurationError(
                f"start_method={kwargs['start_method']!r} would bring back one rank's experts as the whole model: "
                "use 'popen', torchrun or moe-train"
            )
        if placement is not None and copies is not None:
            raise ConfigurationError(
                f"copies={copies} belongs to the uniform placement: give either copies or placement, not both"
            )
        if zero1 and dense not in ("ddp", "zero1"):
            raise ConfigurationError(f"zero1=true is short for dense=zero1, but dense={dense!r}: give one of them")
        DISPATCH_BACKENDS.find(dispatch)
        DENSE_SHARDINGS.find(dense)
        super().__init__(timeout=timedelta(seconds=timeout_s), **kwargs)
        self._ep_size = ep_size
        self._copies = copies
        self._placement = placement
        self._slots = slots
        self._quota: QuotaPolicy = quota
        self._dispatch = dispatch
        self._dense = "zero1" if zero1 else dense
        self._seed = seed
        self._check_replicas_every = check_replicas_every
        self._compared_step = -1
        self._world: World | None = None
        self._stream = SampleStream()
        self._experts: PlacedExperts | None = None
        self._kept: KeptExperts | None = None
        self._data: StepData | None = None
        self._shards: DenseSharding | None = None
        self._optimizer_groups: list[list[list[nn.Parameter]]] = []
        self._sync_blocked = False
        self._slice: StepSlice | None = None
        self.is_stand_in = False
        self._weights = StepWeights()
        self.last_gradient_norm: Tensor | None = None
        self.promised_replicas = 1
        self.before_replacing: list[Callable[[], None]] = []
        self.entered_world: list[Callable[[], None]] = []
        self._elastic: ElasticWorlds | None = None
        self._has_met = False
        self.replay: AdamWReplay | None = None

    # ------------------------------------------------------------------ world

    @property
    def world(self) -> World:
        """The ranks that train together; available once the strategy is set up."""
        assert self._world is not None
        return self._world

    @property
    def experts(self) -> PlacedExperts:
        """The experts under their placements; available once the strategy is set up."""
        assert self._experts is not None
        return self._experts

    @override
    def meet(self) -> None:
        """Join the other ranks, unless that has happened; Lightning itself does it after it has looked for
        checkpoints. Collective."""
        if not self._has_met:
            self.setup_environment()

    @override
    def setup_distributed(self) -> None:
        self._join()
        self._has_met = True

    def _join(self) -> None:
        reset_seed()
        if self._elastic is None and (engine := membership_from_environment()) is not None:
            carry_objects_without_pickle()
            self._elastic = ElasticWorlds(self, engine)
            self.take_place(self._elastic.enter())
        if self._elastic is not None:
            return
        self.set_world_ranks()
        if self.world_size == 1:
            return  # nobody to talk to: no sockets, no process group
        carry_objects_without_pickle()
        self._process_group_backend = self._get_process_group_backend()
        assert self._timeout is not None
        if not join_local_world(
            rank=self.global_rank,
            size=self.world_size,
            backend=self._process_group_backend,
            timeout=self._timeout,
            meeting=meeting_of(self.cluster_environment) if self.num_nodes == 1 else None,
        ):
            super().setup_distributed()

    @override
    def _configure_launcher(self) -> None:
        if self.num_processes * self.num_nodes == 1 and ElasticTask.from_environment() is None:
            return  # one process starts no other: without a launcher Lightning runs it in notebooks and at the prompt
        assert self.cluster_environment is not None
        place = (self.cluster_environment, self.num_processes, self.num_nodes)
        self._launcher = PrivateLauncher(*place, explained=self._explained)

    def _explained(self, error: Exception) -> Exception:
        return error if self._elastic is None else explained(error, self._elastic.engine)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self._checked_module(trainer)
        if self._world is None:
            assert self._timeout is not None
            # A process that trained among others before may go on alone, and torch still knows them.
            alone = self.world_size == 1
            self._world = World.single(self.root_device) if alone else World.connect(self.root_device, self._timeout)
            check_versions(self._world)
            leave_process_groups_at_exit()
        self._stream.seed = self._run_seed()
        attach_stream(module, self._stream)
        known = self._experts
        if known is None or known.module is not module or known.world is not self.world:
            self._experts = self._place_experts(module)
            self._kept = KeptExperts(self._experts)
        is_training = trainer.state.fn == TrainerFn.FITTING
        assert self._kept is not None
        self._kept.take_back(weights_change=is_training or trainer.ckpt_path is not None)
        ignored = list(self.experts.keys(module)) + _identical_buffers(module)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
        if self.world.is_connected:
            super().setup(trainer)
        else:
            super(DDPStrategy, self).setup(trainer)  # DDP's own would look for a process group
        self.precision_plugin.clip_grad_by_norm = self._clip_by_global_norm  # type: ignore[method-assign]
        if self._elastic is not None:
            self.precision_plugin._after_closure = self._after_closure  # type: ignore[method-assign, assignment]
            if self._elastic.is_newcomer:
                trainer.num_sanity_val_steps = 0  # there is nobody to validate with yet

    def _checked_module(self, trainer: pl.Trainer) -> pl.LightningModule:
        precision = self.precision_plugin
        if str(precision.precision).startswith("16"):
            raise ConfigurationError(
                f"precision='{precision.precision}' scales the loss, and ranks with different experts "
                "would skip different steps: use 'bf16-mixed' or '32-true'"
            )
        schedules = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
        if any(len(set(s.scheduling.values())) > 1 for s in schedules):
            raise ConfigurationError(
                "GradientAccumulationScheduler changes the global batch during the run: "
                "use a constant accumulate_grad_batches"
            )
        averagers = (StochasticWeightAveraging, WeightAveraging)
        averaging = next((c for c in trainer.callbacks if isinstance(c, averagers)), None)  # type: ignore[attr-defined]
        if averaging is not None:
            raise ConfigurationError(
                f"{type(averaging).__name__} copies the module before experts have their places: average checkpoints "
                "after training"
            )
        if self._ddp_comm_hook is not None:
            raise ConfigurationError("ddp_comm_hook is taken by the sum over ranks: drop it")
        module = self.lightning_module
        assert module is not None
        if module._compiler_ctx is not None:
            raise ConfigurationError(
                "torch.compile of the whole module cannot follow tokens, whose numbers are known at run time only: "
                "give the Trainer the module itself, and CompileDense() among the callbacks"
            )
        if trainer.world_size > 1 and any(
            isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm) for m in module.modules()
        ):
            rank_zero_warn(
                "BatchNorm takes its statistics from each rank's part of the batch, so the loss depends on the number "
                "of ranks: use LayerNorm or GroupNorm, or on GPUs sync_batchnorm=True"
            )
        return module

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """The source rank's object on every rank; Lightning and its callbacks send paths, flags and results by it.

        Raises:
            ConfigurationError: the object is no plain value or tensor: nothing that travels is unpickled.
            ForeignMessageError: what arrived was not sent by a rank of ours.
        """
        if self.world_size == 1:
            return obj
        value: TBroadcast = broadcast_object(obj, src, World.before_setup(self.root_device))
        return value

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.world_size > 1:
            super().barrier(*args, **kwargs)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, group, sync_grads) if self.world_size > 1 else tensor

    # ------------------------------------------------------------------ placement

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Experts that are built in configure_model allocate only this rank's slots."""
        with deferred_experts():
            yield

    def require_replicas(self, nodes: int) -> int:
        """Promise that so many nodes hold each expert: whoever places experts must keep it. The uniform placement holds
        each that often, if there are as many ranks. To be called before the strategy is set up.

        Returns:
            Replicas of each expert under the placement that the user chose, or that this call chose.

        Raises:
            ConfigurationError: dispatch groups, which a changing number of ranks cannot keep.
        """
        if self._ep_size is not None:
            raise ConfigurationError(
                f"ep_size={self._ep_size} cuts the ranks into groups, which do not survive a lost rank: drop ep_size"
            )
        self.promised_replicas = nodes
        if self._copies is None and self._placement is None:
            self._copies = min(nodes, self.world_size)
        return self._copies or 1

    def _place_experts(self, module: nn.Module) -> PlacedExperts:
        placements = resolve_placements(
            module, self.world.size, ep_size=self._ep_size, copies=self._copies, placement=self._placement
        )
        return PlacedExperts(
            module,
            placements,
            self.world,
            ep_size=self._ep_size,
            quota=self._quota,
            dispatch=self._dispatch,
            slots=self._slots,
        )

    def replace_experts(self, placements: Sequence[Placement]) -> MigrationReport:
        """Move experts with all their state to new placements, one for each MoE layer; collective, between steps.

        Raises:
            ConfigurationError: a placement that does not fit the world, a dispatch group or the slots.
        """
        for settle in self.before_replacing:
            settle()
        return self.experts.replace(placements, self.optimizers, self.node_of)

    def visit_experts(self, plans: Sequence[ShadowPlan], early_shares: Sequence[float] | None = None) -> None:
        """Let experts visit other ranks in the next step, one plan for each MoE layer; collective, before the step.

        Args:
            plans: the same on every rank.
            early_shares: part of each layer's Trans that travels under the experts of the block before it, the rest
                under its dense layers; None: all of it.

        Raises:
            ConfigurationError: plans for other placements, several dispatch groups, or manual optimization, whose
                steps have no stated end.
        """
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            raise ConfigurationError(
                "shadows need automatic optimization: a step of manual optimization may change weights at any time"
            )
        self.experts.visit(plans, self.flight_dtype, early_shares or [1.0] * len(plans))

    @property
    def flight_dtype(self) -> torch.dtype:
        """What experts compute in, and so what their weights travel in when they visit other ranks."""
        if str(self.precision_plugin.precision) == "bf16-mixed":
            return torch.bfloat16
        return self.experts.layers[0].experts.w_up.dtype

    # ------------------------------------------------------------------ dense gradients

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        if not self.world.is_connected:
            return model
        self._ddp_kwargs["process_group"] = self.world.dense
        try:
            return super()._setup_model(model)
        finally:
            del self._ddp_kwargs["process_group"]  # a group that is held here would outlive its world

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self.world.dense, sum_over_ranks)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        self._optimizer_groups = [[list(g["params"]) for g in optimizer.param_groups] for optimizer in self.optimizers]
        if self.world.size > 1 or self._elastic is not None:
            require_updates_by_expert(self.optimizers, self.experts.stack_of)
        self._shard_optimizers()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._compare_replicas()
        return super().training_step(*args, **kwargs)

    def _compare_replicas(self) -> None:
        """Before a step whose number is a multiple of `check_replicas_every`; collective then.

        Raises:
            ReplicasDifferError: on every rank.
        """
        every, step = self._check_replicas_every, self.trainer.global_step
        if not every or step % every or step in (0, self._compared_step):
            return
        self._compared_step = step
        self.experts.compare_replicas(step)

    @override
    def enter_world(self, world: World) -> None:
        self._compared_step = -1  # newcomers have not compared yet, and all do it together
        super().enter_world(world)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        # In an elastic run a rank that is lost now must not end the others.
        if self._kept is not None and self._elastic is None and self.world.size > 1:
            self._kept.keep(room_for_experts(self.num_processes))

    @override
    def teardown(self) -> None:
        self.release_restored()
        if self._kept is not None:
            self._kept.hand_out()
        for name in ("clip_grad_by_norm", "_after_closure"):
            self.precision_plugin.__dict__.pop(name, None)
        if self.lightning_module is not None and any(p.is_meta for p in self.lightning_module.parameters()):
            return  # experts were refused their places: nothing is allocated, and the user shall see that error
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description="Expert parallelism with replicated experts")


def _identical_buffers(module: nn.Module) -> list[str]:
    """Buffers of our own layers: every rank computes the same values, so DDP need not broadcast them before each
    forward pass.
    """
    ours = [f"{name}." for name, m in module.named_modules() if type(m).__module__.startswith("moe_lightning.")]
    return [name for name, _ in module.named_buffers() if any(name.startswith(prefix) for prefix in ours)]
