"""Expert parallelism for Lightning: data-parallel dense parameters, experts in the slots of a placement.

`PlacementOptions` are the user's choice of placements. `GatheredExperts` copies every expert to every rank's host at
the end of training, if memory allows: a script may then use the module without the other ranks, as Lightning advises
with `Trainer(devices=1).test(module)` on rank 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.files import SUFFIX, weights_alone
from moe_lightning.checkpoint.storage import place_of
from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.config import NonNegativeInt, PositiveInt, Seconds, validated
from moe_lightning.data.loader import follow_schedule
from moe_lightning.dispatch.dispatcher import DISPATCH_BACKENDS, PlanPlace, QuotaPolicy
from moe_lightning.dispatch.placement import Placement, parse_placements, uniform_placement
from moe_lightning.dispatch.quota import ShadowPlan
from moe_lightning.elastic.membership import Membership
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import MOST_BYTES, check_regular, read_text
from moe_lightning.kernels import BackendName, set_backend
from moe_lightning.moe.experts import deferred_experts
from moe_lightning.moe.layer import moe_layers, whole_state_dict
from moe_lightning.moe.randomness import attach_stream
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.parallel.mesh import chosen_axes
from moe_lightning.parallel.pipeline import ScheduleName
from moe_lightning.state.tensors import local, rows_of
from moe_lightning.state.transfer import gather
from moe_lightning.strategies.checkpoints import Checkpoints, take_positions
from moe_lightning.strategies.checks import (
    check_for_pipeline,
    check_module,
    chosen_micro_batches,
    cut_parameters,
    identical_buffers,
    require_same_parameters,
    require_separate_updates,
)
from moe_lightning.strategies.dense_parameters import check_parts, cut_groups, dense_sharding_name
from moe_lightning.strategies.elastic_worlds import ElasticWorlds
from moe_lightning.strategies.gradients import scale_gradients
from moe_lightning.strategies.hangs import HangWatch
from moe_lightning.strategies.pipeline import Context, Pipeline
from moe_lightning.strategies.placed_experts import MigrationReport, PlacedExperts, StageMap
from moe_lightning.strategies.precision import convert_by_rule
from moe_lightning.strategies.scaling import AgreedScaler, own_scale, share_scale
from moe_lightning.strategies.stages import StageState, StageTransfer
from moe_lightning.strategies.step_data import StepData, begin_batch, require_accumulation, samples_of
from moe_lightning.strategies.steps import Steps
from moe_lightning.strategies.train_state import FIXED_GROUPS, StateTransfer, TrainState
from moe_lightning.strategies.watch import FiniteWatch, StopOnNan, UpdateSkipped, dense_values
from moe_lightning.strategies.world_ddp import WorldDDPStrategy, reads_its_own_way
from moe_lightning.strategies.worlds import Worlds, call_hook

_MOST_BYTES = 1 << 30
_MOST_SHARE = 1 / 8
"""Share of the free memory, over all ranks of a machine."""


class GatheredExperts:
    """Stacks of all experts of a model, gathered at the end of training.

    Args:
        experts: under their placements.
        stages: of the model, whose layers are all gathered.
    """

    def __init__(self, experts: PlacedExperts, stages: StageMap) -> None:
        self._experts, self._stages = experts, stages
        self._layers, self._world = stages.layers, stages.world
        self._stacks: list[dict[str, Tensor]] | None = None

    def gather(self, most_bytes: int) -> None:
        """Gather all experts, unless they take more than the least limit of the ranks; collective. In a pipeline dense
        parameters are gathered too.
        """
        self._stages.gather(most_bytes)
        stacks, world = self._stages.stacks(self._experts), self._world
        entries = [(stack.num_experts, p) for stack in stacks for p in stack.parameters.values()]
        needed = sum(count * p.shape[1:].numel() * p.element_size() for count, p in entries)
        if needed > min(all_gather_json(most_bytes, world)):
            return
        pieces = [
            piece
            for layer, stack in enumerate(stacks)
            for name, parameter in stack.parameters.items()
            for piece in rows_of(f"{layer}/{name}", parameter.detach(), stack)
        ]
        found = gather(pieces, world, lambda _: range(world.size))
        self._stacks = [
            {name: found[f"{layer}/{name}"] for name in stack.parameters} for layer, stack in enumerate(stacks)
        ]

    def attach(self) -> None:
        """Let the layers compute without the other ranks, if they can, at the end of the Trainer."""
        if self._world.size == 1:
            return
        layers = self._layers
        stacks: Sequence[dict[str, Tensor] | None] = self._stacks or [None] * len(layers)
        for layer, whole in zip(layers, stacks, strict=True):
            layer.end_world(self._world.size, whole)

    def detach(self, *, weights_change: bool) -> None:
        """Let the layers compute with the other ranks again; drop the copies if weights change."""
        for layer in self._layers:
            layer.resume_world()
        if weights_change:
            self._stacks = None


def gather_limit(num_processes: int) -> int:
    """Return the bytes that a rank may use for gathered experts, on a machine with so many ranks."""
    try:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):  # not known here
        return 0
    return min(_MOST_BYTES, int(free * _MOST_SHARE) // max(1, num_processes))


class PlacementOptions:
    """Options of placement and dispatch: see ExpertParallelStrategy.

    Attributes:
        promised_replicas: nodes that hold each expert if slots allow; recovery relies on it.

    Raises:
        ConfigurationError: two placements, or an unknown dispatch.
    """

    def __init__(
        self,
        *,
        ep_size: int | None,
        replicas: int | None,
        placement: str | os.PathLike[str] | Sequence[Any] | None,
        quota: QuotaPolicy,
        dispatch: str,
        plan: PlanPlace,
        slots: int | None,
        kernels: BackendName | None,
    ) -> None:
        if placement is not None and replicas is not None:
            raise ConfigurationError(
                f"replicas={replicas} belongs to the uniform placement: give either replicas or placement, not both"
            )
        self._ep_size, self._replicas, self._placement, self._slots = ep_size, replicas, placement, slots
        DISPATCH_BACKENDS.find(dispatch)
        self._quota: QuotaPolicy = quota
        self._dispatch, self._plan_on, self._kernels = dispatch, plan, kernels
        self.promised_replicas = 1

    def require_replicas(self, nodes: int, world_size: int) -> int:
        """Promise that so many nodes hold each expert, in later placements too. The uniform placement holds each that
        often, if there are as many ranks. Must be called before the strategy is set up.

        Returns:
            Replicas of each expert under the chosen placement.

        Raises:
            ConfigurationError: dispatch groups, which a changing number of ranks cannot keep.
        """
        if self._ep_size is not None:
            raise ConfigurationError(
                f"ep_size={self._ep_size} cuts the ranks into groups, which do not survive a lost rank: drop ep_size"
            )
        self.promised_replicas = nodes
        if self._replicas is None and self._placement is None:
            self._replicas = min(nodes, world_size)
        return self._replicas or 1

    def place(self, module: nn.Module, world: World, stages: StageMap) -> PlacedExperts:
        """Put a module's experts into slots; collective.

        Args:
            world: the ranks, of each stage of a pipeline.
            stages: of the module.
        """
        if self._kernels is not None:
            set_backend(self._kernels)
        with stages.whole_module():
            placements = resolve_placements(
                module, world.size, ep_size=self._ep_size, replicas=self._replicas, placement=self._placement
            )
        return PlacedExperts(
            module,
            stages.set_placements(placements),
            world,
            ep_size=self._ep_size,
            quota=self._quota,
            dispatch=self._dispatch,
            plan_on=self._plan_on,
            slots=self._slots,
        )


def resolve_placements(
    module: nn.Module,
    num_ranks: int,
    *,
    ep_size: int | None = None,
    replicas: int | None = None,
    placement: str | os.PathLike[str] | Sequence[Any] | None = None,
) -> list[Placement]:
    """Return the placement of each MoE layer: uniform with so many replicas, or from a table or file.

    Raises:
        ConfigurationError: a file or table that is missing, malformed or made for other sizes.
    """
    layers = moe_layers(module)
    if placement is None:
        replicas = max(1, num_ranks // (ep_size or num_ranks)) if replicas is None else replicas
        return [uniform_placement(layer.num_experts, num_ranks, replicas) for layer in layers]
    if len({layer.num_experts for layer in layers}) > 1:
        raise ConfigurationError(
            "a placement table needs the same number of experts in every MoE layer: use replicas instead"
        )
    table, origin = _read_table(placement)
    experts = layers[0].num_experts if layers else 0
    return parse_placements(table, num_layers=len(layers), num_experts=experts, num_ranks=num_ranks, origin=origin)


def _read_table(source: str | os.PathLike[str] | Sequence[Any]) -> tuple[object, str]:
    if not isinstance(source, str | os.PathLike):
        return list(source), "placement"
    path = Path(source)
    if not path.is_file():
        raise ConfigurationError(
            f"the placement file {path} does not exist: give a .json or .npy table [layers, experts, ranks]"
        )
    try:
        if path.suffix == ".npy":
            check_regular(path, most_bytes=MOST_BYTES)
            return np.array(np.load(path, mmap_mode="r", allow_pickle=False)), str(path)
        return json.loads(read_text(path)), str(path)
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise ConfigurationError(f"the placement file {path} is not a .json or .npy table: {error}") from error


@validated
class ExpertParallelStrategy(WorldDDPStrategy):
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
            cost memory only. None: as many as the first placement needs.
        quota: "balanced" shares an expert's tokens so that ranks are loaded evenly, "equal" splits them evenly.
        dispatch: transport of tokens: "exchange" (uneven all-to-all), or a name of `DISPATCH_BACKENDS`.
        plan: place of dispatch planning: "host", or "device", see `dispatch.transports`.
        kernels: implementation of the kernels in this process, see `kernels.set_backend`. None: its default.
        dense: sharding of dense parameters and their optimizer states: "ddp" (none), "zero1" (each state on one
            rank), "fsdp" (all in rows over the ranks), "hsdp" (the same in several copies), or a name of
            `strategies.dense_parameters.DENSE_SHARDINGS`.
        shard_size: under hsdp, at least so many ranks share a copy. None: those of a node, or half of all.
        offload_optimizer: True: optimizer states of dense parameters stay in host memory, and updates are made there.
        mesh: ranks along pp (pipeline stages), cp (parts of sequences) and tp (parts of layers). None: one each.
        schedule: of a pipeline: "1f1b", or "interleaved" with two stages on every rank, whose bubbles are half as long.
        micro_batches: micro-batches of a batch in a pipeline. None: two for each of its ranks.
        seed: of keyed randomness and of stock DataLoaders' sampling. None: the one given to seed_everything, else 0.
        timeout_s: longest wait for a peer in any collective.
        check_replicas_every: steps after which everything that several ranks hold alike is compared bit by bit: dense
            parameters, moments, buffers of this library, replicas of experts; 0: never.
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
        worlds, elastic, collectives_timeout, may_change: see WorldDDPStrategy.
        state, steps: this rank's state of the run; batches, losses and gradients.
        update_is_skipped: the last update was left out, because a loss or gradient was not finite.
        reads_objects: the user lets restores unpickle objects.
        weigh, scale_sum: see `moe_lightning.moe.losses.global_mean` and `global_sum`.
        checkpoints, placing: saving and restoring; the options of placement.

    Raises:
        ConfigurationError: sizes that do not fit world or model, fp16, torch.compile.
    """

    strategy_name = "expert_parallel"
    of_process = WorldDDPStrategy.of_process | {
        "state", "steps", "weigh", "scale_sum", "checkpoints", "update_is_skipped", "reads_objects", "_gathered",
        "_pipeline", "_data", "_is_placed", "_num_groups", "_before_hooks", "_finite", "_clipped", "_hangs",
        "_scaler"}  # fmt: skip

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
        check_replicas_every: NonNegativeInt = 25,
        stop_on_nan: StopOnNan | None = None,
        hang_report_s: Seconds | None = 60.0,
        resume_overrides: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(timeout_s=timeout_s, **kwargs)
        self.resume_overrides = resume_overrides
        self.placing = PlacementOptions(
            ep_size=ep_size, replicas=replicas, placement=placement, quota=quota, dispatch=dispatch, plan=plan,
            slots=slots, kernels=kernels)  # fmt: skip
        self._seed = seed
        self._axes = chosen_axes(mesh)
        self._micro_batches = chosen_micro_batches(micro_batches, schedule, self._axes.pp)
        self._schedule: ScheduleName = schedule
        dense = dense_sharding_name(dense, shard_size)
        check_parts(self._axes, dense)
        self._shards_of = partial(cut_groups, dense, wanted=shard_size, tensors=self._axes.tp)
        self._shard_size = shard_size
        self._of_state: dict[str, Any] = {"dense": dense, "max_slots": slots, "on_host": offload_optimizer}
        self._check_replicas_every, self.stop_on_nan = check_replicas_every, stop_on_nan
        self._hang_report_s = hang_report_s
        self.begin()

    @override
    def begin(self) -> None:
        super().begin()
        self.worlds = Worlds(self._axes, self._shards_of, self._shard_size)
        self.state = TrainState(self.worlds, **self._of_state)
        self.steps = Steps(self.worlds, self.state, check_replicas_every=self._check_replicas_every)
        self._finite = FiniteWatch(self.stop_on_nan)
        self.look_at_gradients = None if self.stop_on_nan is None else self._finite.look_at_own
        self._clipped: int | None = None  # the optimizer whose gradients have been looked at
        self._hangs = HangWatch(self._hang_report_s)
        self.weigh, self.scale_sum = self.steps.weigh, self.steps.scale_sum
        self.checkpoints = Checkpoints(self.worlds, self.state)
        self.may_change = self.checkpoints.may_change
        self.update_is_skipped = self.reads_objects = False
        self._gathered: GatheredExperts | None = None
        self._pipeline: Pipeline | None = None
        self._data: StepData | None = None
        self._is_placed = False
        self._num_groups = 0
        self._before_hooks: Sequence[nn.Parameter] = ()
        self._scaler: AgreedScaler | None = None

    # ------------------------------------------------------------------ world

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """As in DDP, but a mean inside a step is that over the micro-batch's samples; integers have exact means."""
        is_mean = reduce_op is None or str(reduce_op).lower() in ("mean", "avg", "reduceop.avg")
        if is_mean and isinstance(tensor, Tensor):
            tensor, reduce_op = self.steps.share_of_mean(tensor, over_all_ranks=group is None)
        return tensor if self.world_size == 1 else super().reduce(tensor, group, reduce_op)

    @override
    def elastic_worlds(self, engine: Membership) -> ElasticWorlds:
        return ElasticWorlds(self, engine)

    def leave(self) -> None:
        """Release everything that belongs to the groups of the present world; values stay."""
        self._hangs.end()
        self.state.averaging.withdraw()
        call_hook(self.state.module, "on_before_experts_move")
        self.model = self.state.module  # DDP's reducer holds a group
        self.state.parts.leave()
        self.steps.leave_world()
        self._finite.forget_step()
        self.state.forget_step()
        if self._pipeline is not None:
            self._pipeline.forget_step()
        if self._scaler is not None:
            self._scaler.forget_step()

    def enter(self, world: World) -> None:
        """Resume in another world, whose state this rank has by now; collective."""
        self.take_place(world)
        self.state.forget_update()
        trainer, waits = self.state.trainer, self.worlds.is_passing(world.size)
        loaders = (None if waits else trainer.train_dataloader, trainer.val_dataloaders)  # no step is cut for all of it
        if not self.worlds.spares:
            self.step_data.enter_world(rank=world.data_rank, world_size=world.shape.dp, loaders=loaders)
        self.steps.sequences.enter_world(world)
        self.configure_ddp()
        call_hook(self.state.module, "on_world_changed")
        self._hangs.begin(world, trainer.default_root_dir)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        self.place_module(trainer)
        if "tp" in self.world.groups and (trainer.state.fn == TrainerFn.FITTING or cut_parameters(module)):
            self.state.parts.begin_layers(self.world.stage)
        self.steps.draw_noise()
        self._ignore_in_ddp()
        self._hangs.begin(self.world, trainer.default_root_dir)
        super().setup(trainer)
        if self._pipeline is not None:
            self._pipeline.synchronize(self.experts.stack_of, str(trainer.precision))
        self._scaler = share_scale(self.precision_plugin, self.worlds, self.state.parameters_of)
        private_lightning.clip_with(self.precision_plugin, self._clip, self.steps.gradients.clip_by_value)
        private_torch.clip_norms_by(self.steps.gradients.norms_for_clipping, scale_gradients)
        if self.elastic.is_newcomer:
            trainer.num_sanity_val_steps = 0  # there are no peers to validate with yet

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        trainer, is_elastic = private_lightning.trainer_of(self.lightning_module), self.worlds.is_elastic
        if trainer is not None:
            self.state.averaging.begin_fit(trainer, self.worlds.axes, self._averaged_state, is_elastic=is_elastic)

    def _averaged_state(self) -> dict[str, Any]:
        of_rank = self.state.module.state_dict
        return of_rank() if self.is_left_alone else self.checkpoints.model_state(of_rank, averaged=True)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._is_placed = False

    def place_module(self, trainer: pl.Trainer) -> None:
        """Put the module's experts into this rank's slots, once for each run of the Trainer; collective.

        Raises:
            ConfigurationError: a module that cannot be trained the same on any number of ranks.
        """
        if self._is_placed:
            return
        module = self.lightning_module
        assert module is not None
        convert_by_rule(self.precision_plugin)
        fixed = FIXED_GROUPS if self.state.fixes_groups else None
        check_module(trainer, module, cuts_dense=self.state.parts.is_wished, fixed_groups=fixed)
        self.steps.stream.begin_run(self._run_seed())
        attach_stream(module, self.steps.stream)
        self.steps.sequences.attach(module, self.world, self.worlds.axes.cp)
        if not self.state.has_placed(module):
            if self.worlds.axes.pp > 1:
                check_for_pipeline(module)
                self._pipeline = Pipeline(module, self._schedule, self.steps, self.worlds, self._scaled)
            stages, transfer = StageMap(module, self.worlds), StateTransfer(self.state)
            if self._pipeline is not None:
                stages = of_pipeline = StageState(self._pipeline.cut, self.worlds)
                transfer = StageTransfer(self.state, of_pipeline, self.worlds)
            self.state.set_module(module, self.placing.place(module, self.world.stage, stages), stages, transfer)
            self._gathered = GatheredExperts(self.experts, stages)
        self.state.stages.apply(self.root_device)
        assert self._gathered is not None
        self._gathered.detach(weights_change=trainer.state.fn == TrainerFn.FITTING or trainer.ckpt_path is not None)
        self._is_placed = True

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with self.state.stages.whole_module():
            super().setup_optimizers(trainer)
        self._require_separate_updates()
        self.state.set_optimizers(self.optimizers)

    def _require_separate_updates(self) -> None:
        self._num_groups = sum(len(optimizer.param_groups) for optimizer in self.optimizers)
        if self.worlds.may_have_peers:
            require_separate_updates(self.optimizers, self.experts.stack_of)

    @override
    def configure_ddp(self) -> None:
        """Sum dense gradients over the present world, or cut dense parameters over its ranks."""
        self._ignore_in_ddp()  # a newcomer has its parts by now
        self.steps.draw_noise()
        if "shard" in self.world.groups:
            self.state.parts.begin(self.world.stage)
        elif self._pipeline is None:
            super().configure_ddp()

    def _ignore_in_ddp(self) -> None:
        module = self.state.module
        self.ignore_in_ddp(module, [*self.experts.keys(module), *identical_buffers(module), *cut_parameters(module)])

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.checkpoints.begin_training()
        self.steps.gradients.forget_writers()
        follow_schedule(self.state.trainer)
        private_lightning.end_resumed_epochs(self.state.trainer)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.state.averaging.finish()
        self._finite.finish()
        # In an elastic run a rank that is lost now must not end the others.
        if self._gathered is not None and not self.worlds.is_elastic and self.world.size > 1:
            room, ranks = gather_limit(self.num_processes), self.world.stage
            self.state.gather(ranks, room)
            self._gathered.gather(room)  # in a pipeline dense parameters, too

    @override
    def teardown(self) -> None:
        self._hangs.end()
        self.checkpoints.release()
        if self._gathered is not None:
            self._gathered.attach()
            self.state.parts.abort_step(self.world)
        private_lightning.use_own_methods(self.precision_plugin)
        own_scale(self.precision_plugin)
        self._scaler = None
        private_torch.clip_norms_as_usual()
        if (trainer := private_lightning.trainer_of(self.lightning_module)) is not None:
            private_lightning.end_epochs_as_usual(trainer)
        if self.lightning_module is None or not any(p.is_meta for p in self.lightning_module.parameters()):
            super().teardown()  # else placing the experts failed, and the user shall see that error
        if self._pipeline is not None:  # also where placing the experts failed
            self.state.replace_parameters(self._pipeline.cut.restore_values())

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
        call_hook(self.state.module, "on_before_experts_move")
        return self.state.stages.replace(self.experts, placements, self.optimizers, self.node_of)

    def start_shadow_experts(self, plans: Sequence[ShadowPlan], early_shares: Sequence[float] | None = None) -> None:
        """Start the shadow experts of the next step, a plan for each MoE layer here; collective, before the step.

        Args:
            plans: the same on every rank.
            early_shares: part of each layer's Trans that overlaps with the experts of the block before it, the rest
                with its dense layers; None: all of it.

        Raises:
            ConfigurationError: plans for other placements, several dispatch groups, or manual optimization, whose
                steps have no stated end.
        """
        self.steps.require_stated_end("shadows")
        self.experts.start_shadows(plans, self.shadow_dtype, early_shares or [1.0] * len(plans))

    @property
    def shadow_dtype(self) -> torch.dtype:
        """Dtype of the experts' computation, and so of the weights of shadow experts in transfers."""
        mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        return mixed.get(str(self.precision_plugin.precision)) or self.experts.layers[0].experts.dtype

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Cut a loader over the ranks: its batch_size is the global batch.

        Raises:
            ConfigurationError: a loader that cannot be cut exactly: an iterable dataset, batches of the user's own...
        """
        assert self.lightning_module is not None
        return self.step_data.cut(dataloader, self.lightning_module.trainer)

    def share_samples(self, speeds: IntArray | None, most: int | None = None) -> None:
        """Cut training batches by the speeds of their slices from the next one on, see `StepData.share_by`."""
        self.step_data.share_by(speeds, most, self.state.trainer.train_dataloader)

    @property
    def step_data(self) -> StepData:
        """Loaders of this rank and their positions."""
        if self._data is None:
            place = {"rank": self.world.data_rank, "world_size": self.world.shape.dp, "pieces": self._micro_batches}
            shares = self.worlds.axes.num_ranks > 1 or self.worlds.is_elastic
            self._data = StepData(**place, seed=self._run_seed(), must_cut=shares)
        return self._data

    def _run_seed(self) -> int:
        return self._seed if self._seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))

    # ------------------------------------------------------------------ checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """True if values are restored after optimizers are built, as is needed where ranks hold shards of dense
        parameters; stock DDP restores them before.
        """
        has_peers = self.world_size > 1 or self.worlds.is_elastic
        return self.worlds.axes.pp > 1 or (has_peers and self.state.parts.is_wished)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        if not self.state.holds(module):  # connected only
            return whole_state_dict(module)
        if self.is_left_alone:
            return super().lightning_module_state_dict()
        return self.checkpoints.model_state(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {} if self.is_left_alone else self.checkpoints.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.is_left_alone:
            self.warn_of_no_checkpoint()
            return
        if self.lightning_module is not None and self.state.holds(self.lightning_module):
            self.checkpoints.add_positions(checkpoint)
        super().save_checkpoint(self.checkpoints.plain(checkpoint), filepath, storage_options)

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
        is_trusted = self.reads_objects = weights_only is False
        self.checkpoints.begin_restoring()
        if "://" in str(checkpoint_path) and str(checkpoint_path).endswith(SUFFIX):  # a file of stock Lightning's
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=not is_trusted)
        elif reads_its_own_way(self.checkpoint_io):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        else:
            self.meet()
            place = place_of(str(checkpoint_path))
            checkpoint = self.checkpoints.open(place, self.reachable, is_trusted=is_trusted)
        module = self.lightning_module
        positions, trainer = take_positions(checkpoint), private_lightning.trainer_of(module)
        self._before_hooks = [] if module is None else list(module.parameters())
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            if not {"optimizer_states", "lr_schedulers"} <= checkpoint.keys():
                raise weights_alone(checkpoint_path)
            self.step_data.restore(positions, trainer.train_dataloader)
            self.checkpoints.restore_schedulers(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        if self.restore_checkpoint_after_setup:
            require_same_parameters(module, self._before_hooks)
        self._before_hooks = ()
        self.place_module(module.trainer)
        if isinstance(self.precision_plugin, HalfPrecision | DoublePrecision):
            self.precision_plugin.convert_module(module)  # frozen weights are compared in this dtype
        self.checkpoints.load_model(checkpoint, strict=strict)
        self.state.find_twins()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.checkpoints.load_optimizers(checkpoint)

    # ------------------------------------------------------------------ a step

    @override
    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a batch to the device and cut it to this rank's part of each sequence."""
        trainer = private_lightning.trainer_of(self.lightning_module)
        if trainer is not None:
            self._hangs.enter("forward" if trainer.training else "evaluation", trainer.global_step, is_batch=True)
        batch = self.steps.sequences.cut(super().batch_to_device(batch, *args, **kwargs))
        if trainer is not None and trainer.training:
            begin_batch(trainer.train_dataloader)
        return batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        require_accumulation(self.state.trainer)
        if sum(len(optimizer.param_groups) for optimizer in self.optimizers) != self._num_groups:
            self._require_separate_updates()
        self.sum_unfrozen()
        self._finite.begin_batch(self.state.module)
        with self.steps.training(args):
            if self._pipeline is not None:
                return self._pipeline.train(self.precision_plugin.train_step_context, args)
            return super().training_step(*args, **kwargs)

    @property
    def last_stage_loss(self) -> Tensor | None:
        """Weighted loss of the last batch in the last stage of a pipeline; None on ranks without it."""
        return None if self._pipeline is None else self._pipeline.last_loss

    @property
    def last_gradient_norm(self) -> Tensor | None:
        """Gradient norm of the last clipped step, over the whole model."""
        return self.steps.gradients.last_norm

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients of the mean over the global batch, summed over replicas before any hook sees them."""
        module, precision = self.state.module, self.precision_plugin
        self._hangs.enter("backward", self.state.trainer.global_step)
        if not self.steps.is_dummy_batch:
            self._finite.look(closure_loss, self._place())
        weighted = closure_loss if self._pipeline is not None else self.steps.weighted(closure_loss)
        with self.steps.summing():
            self.pre_backward(closure_loss)
            loss = precision.pre_backward(weighted, module)
            if self._pipeline is not None:
                self._pipeline.backward(self.experts.stack_of, is_last=not self.steps.is_blocked)
            else:
                precision.backward(loss, module, optimizer, *args, **kwargs)
        precision.post_backward(loss, module)
        self.post_backward(closure_loss)
        self._hangs.enter("update", self.state.trainer.global_step)
        return closure_loss

    def _place(self) -> Callable[[], str]:
        """Return a function that describes the origin of the running micro-batch: rank, step and samples."""
        trainer, rank, batch = self.state.trainer, self.world.rank, self.steps.batch
        step = trainer.global_step
        return lambda: f"on rank {rank} in the step after step {step}{samples_of(batch, trainer.train_dataloader)}"

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.steps.accumulating(), super().block_backward_sync(), self.state.parts.summing_later():
            yield

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run and commit a step in the order that recoveries rely on: `closure` runs forward and backward, in which DDP
        sums the gradients of dense parameters over ranks and `Steps.summing` those of experts over their holders. Hooks
        follow, in which copies of the last state end, and clipping by the norm of the whole model. Then every rank
        agrees that it is prepared, and none changes a value before all are. A skipped update leaves the optimizer's
        step before it changes anything.
        """
        elastic, state, output = self.elastic, self.state, None
        self.checkpoints.begin_update()

        def prepare() -> None:
            overflows = self._scaler is not None and self._scaler.overflows(optimizer)
            if not overflows:
                self._look_at_update(optimizer)
            is_bad = self._finite.is_skipped(state.module, self.world)
            self.update_is_skipped = is_bad or overflows
            if is_bad or (overflows and self.worlds.is_elastic):
                state.forget_update()  # a recovery would apply it
            elif overflows:
                state.forget_counts()
            else:
                self.steps.gradients.require_same_gradients(optimizer)
            elastic.prepare(optimizer)  # where ranks may be lost, a barrier: the last collective before the update
            if self.update_is_skipped:
                if self._scaler is not None:
                    self._scaler.update()
                raise UpdateSkipped
            state.replay_update(optimizer)
            elastic.begin_update()
            expose_blocks()

        # Closure, hooks, clipping, `prepare`, update.
        updating = state.updating(optimizer)
        preparing = private_lightning.before_update(self.precision_plugin, prepare)
        with suppress(UpdateSkipped), updating as expose_blocks, preparing:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        state.broadcast_updates(optimizer)
        state.after_update(optimizer)
        elastic.commit()
        self._hangs.enter("callbacks and data", state.trainer.global_step)
        return output

    def _clip(self, optimizer: Optimizer, most: float) -> None:
        """Clip by the norm of the whole model, and check that it is finite before gradients are scaled by it."""
        self._clipped = self.state.number_of(optimizer)
        self.steps.gradients.clip(optimizer, most, partial(self._look_at_norm, optimizer, is_used=True))

    def _look_at_update(self, optimizer: Optimizer) -> None:
        """Check the gradients of an update, unless clipping has."""
        clipped, self._clipped = self._clipped, None
        if clipped == self.state.number_of(optimizer):
            return
        found = [p.grad for p in self.state.parameters_of(optimizer) if p.grad is not None]
        gradients = [values for gradient in found if (values := dense_values(local(gradient))).numel()]
        if gradients:
            self._look_at_norm(optimizer, private_torch.stock_norm(gradients), is_used=False)

    def _scaled(self, loss: Tensor) -> Tensor:
        """Return a loss multiplied by the scale of float16, where there is one."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _look_at_norm(self, optimizer: Optimizer, norm: Tensor, *, is_used: bool) -> None:
        if self._scaler is not None and self._scaler.has_overflowed(optimizer):
            return  # the scale was too large: no update follows

        def named() -> dict[str, nn.Parameter]:
            updated = set(self.state.parameters_of(optimizer))
            return {name: p for name, p in self.state.module.named_parameters() if p in updated}

        step, world = self.state.trainer.global_step, self.world
        ranks = "" if world.size == 1 else f"summed over {world.size} ranks, "
        where = f"{ranks}in the step after step {step}"
        self._finite.look_at_update(norm, named, where, world, is_used=is_used)

    # ------------------------------------------------------------------ batches outside of training

    @property
    def is_dummy_batch(self) -> bool:
        """True if this rank has no sample in the running or the last batch: callbacks that count samples skip it."""
        return self.steps.is_dummy_batch

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        step = self._evaluation("validation_step", self.precision_plugin.val_step_context)
        return self.steps.evaluate(step, self.state.trainer.val_dataloaders, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        step = self._evaluation("test_step", self.precision_plugin.test_step_context)
        return self.steps.evaluate(step, self.state.trainer.test_dataloaders, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        step = self._evaluation("predict_step", self.precision_plugin.predict_step_context)
        return self.steps.predict(step, self.state.trainer.predict_dataloaders, *args, **kwargs)

    def _evaluation(self, name: str, context: Context) -> Callable[..., Any]:
        """Return the function that evaluates a batch: Lightning's, or the pipeline's."""
        pipeline = self._pipeline
        if pipeline is None or pipeline.is_whole:
            step: Callable[..., Any] = getattr(super(), name)
            return step
        own = getattr(self.state.module, name)
        return lambda *args: pipeline.evaluate(own, context, args)

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
