"""Expert parallelism for Lightning: data-parallel dense parameters, experts in the slots of a placement."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from typing_extensions import override

from moe_lightning.algorithms.placement import Placement, dispatch_groups, parse_placements, uniform_placement
from moe_lightning.checkpoint.full_state import (
    ExpertRows,
    OptimizerLayout,
    full_model_state,
    full_optimizer_state,
    load_local_optimizer_state,
    local_model_state,
)
from moe_lightning.comm.dense_sum import sum_over_ranks
from moe_lightning.comm.dispatcher import Dispatcher, QuotaPolicy
from moe_lightning.comm.replica_sum import ReplicaSum, StackedParameter
from moe_lightning.comm.world import World, broadcast_, join_launched_world
from moe_lightning.data.step_loader import StepLoader
from moe_lightning.data.step_sampler import StepSlice
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.modules.experts import deferred_experts
from moe_lightning.modules.moe_layer import MoELayer, moe_layers
from moe_lightning.modules.stream import SampleStream, attach_stream
from moe_lightning.strategies.gradient_norm import global_gradient_norm, scale_gradients
from moe_lightning.strategies.zero import DenseOptimizerShards


_LOADERS_KEY = "step_loaders"
"""Where a checkpoint keeps the position of each training loader."""


class ExpertParallelStrategy(DDPStrategy):
    """DDP for dense parameters; every MoELayer of the module dispatches its tokens to experts in the slots of a
    placement.

    One seed and one global batch give one loss sequence on any number of ranks: a DataLoader's batch_size is the
        *global* batch, which the
    strategy cuts over the ranks; gradients are those of the mean loss over it; noise follows the samples.

    Args:
        ep_size: ranks of a dispatch group; tokens travel only inside it. None: the whole world.
        copies: replicas of each expert under the uniform placement. None: one in each dispatch group.
        placement: instead of the uniform one, replicas as a nested list [E, N] or [L, E, N], or the path of such a
            table (.json or .npy).
        quota: "balanced" shares an expert's tokens among its replicas so that ranks are loaded evenly, "equal" splits
            them evenly.
        zero1: keep the optimizer state of each dense parameter on one rank only.
        seed: of keyed randomness and of the sampling of stock DataLoaders. None: the one given to seed_everything,
            else 0.
        timeout_s: longest wait for a peer in any collective.
        kwargs: passed to DDPStrategy and so to DistributedDataParallel.

    Raises:
        ConfigurationError: sizes that do not fit the world or the model, fp16 precision, or a gradient-accumulation
            schedule.
    """

    strategy_name = "expert_parallel"

    def __init__(
        self,
        *,
        ep_size: int | None = None,
        copies: int | None = None,
        placement: str | Sequence[Any] | None = None,
        quota: QuotaPolicy = "balanced",
        zero1: bool = False,
        seed: int | None = None,
        timeout_s: float = 600.0,
        **kwargs: Any,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigurationError(f"timeout_s={timeout_s} must be above 0 seconds")
        if placement is not None and copies is not None:
            raise ConfigurationError(
                f"copies={copies} belongs to the uniform placement: give either copies or placement, not both"
            )
        super().__init__(timeout=timedelta(seconds=timeout_s), **kwargs)
        self._ep_size = ep_size
        self._copies = copies
        self._placement = placement
        self._quota: QuotaPolicy = quota
        self._zero1 = zero1
        self._seed = seed
        self._world: World | None = None
        self._stream = SampleStream()
        self._experts: dict[nn.Parameter, ExpertRows] = {}
        self._replica_sum: ReplicaSum | None = None
        self._shards: DenseOptimizerShards | None = None
        self._optimizer_groups: list[list[list[nn.Parameter]]] = []
        self._sync_blocked = False
        self._synced = False
        self._slice: StepSlice | None = None
        self._loader_states: list[dict[str, Any]] = []
        self.last_gradient_norm: Tensor | None = None

    # ------------------------------------------------------------------ world

    @property
    def world(self) -> World:
        """The ranks that train together; available once the strategy is set up."""
        assert self._world is not None
        return self._world

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        if self.world_size == 1:
            return  # nobody to talk to: no sockets, no process group
        self._process_group_backend = self._get_process_group_backend()
        assert self._timeout is not None
        if not join_launched_world(
            rank=self.global_rank, size=self.world_size, backend=self._process_group_backend, timeout=self._timeout
        ):
            super().setup_distributed()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self._checked_module(trainer)
        if self._world is None:
            assert self._timeout is not None
            self._world = World.connect(self.root_device, self._timeout)
        self._stream.seed = self._seed if self._seed is not None else _global_seed()
        attach_stream(module, self._stream)
        self._place_experts(module)
        names = [name for name, parameter in module.named_parameters() if parameter in self._experts]
        ignored = names + _identical_buffers(module)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
        super().setup(trainer)
        self.precision_plugin.clip_grad_by_norm = self._clip_by_global_norm  # type: ignore[method-assign]

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
        if self._ddp_comm_hook is not None:
            raise ConfigurationError("ddp_comm_hook is taken by the sum over ranks: drop it")
        assert self.lightning_module is not None
        return self.lightning_module

    # ------------------------------------------------------------------ placement

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Experts that are built in configure_model allocate only this rank's slots."""
        with deferred_experts():
            yield

    def _place_experts(self, module: nn.Module) -> None:
        layers = moe_layers(module)
        placements = self._placements(layers)
        groups = dispatch_groups(self.world.size, self._ep_size or self.world.size)
        self._experts = {}
        stacked = []
        for layer, placement in zip(layers, placements, strict=True):
            self._take_rank_0_experts(layer)
            layer.place(Dispatcher(placement, self.world, groups, self._quota), self.root_device)
            slots = layer.experts.slot_experts
            for parameter in layer.experts.stacked_parameters().values():
                self._experts[parameter] = ExpertRows(slot_experts=slots, placement=placement, rank=self.world.rank)
                stacked.append(StackedParameter(parameter=parameter, slot_experts=slots, placement=placement))
        self._replica_sum = ReplicaSum(stacked, self.world)

    def _placements(self, layers: Sequence[MoELayer]) -> list[Placement]:
        size = self.world.size
        if self._placement is None:
            copies = self._copies or size // (self._ep_size or size)
            return [uniform_placement(layer.num_experts, size, copies) for layer in layers]
        if len({layer.num_experts for layer in layers}) > 1:
            raise ConfigurationError(
                "a placement table needs the same number of experts in every MoE layer: use copies instead"
            )
        table, origin = _read_placement(self._placement)
        experts = layers[0].num_experts if layers else 0
        return parse_placements(table, num_layers=len(layers), num_experts=experts, num_ranks=size, origin=origin)

    def _take_rank_0_experts(self, layer: MoELayer) -> None:
        """Start from one model: rank 0's weights, or its seed where nothing is allocated yet; DDP does the same for
        dense parameters.
        """
        experts = layer.experts
        if experts.is_deferred:
            seed = torch.tensor([experts.init_seed], device=self.root_device)
            broadcast_(seed, 0, self.world)
            experts.init_seed = int(seed)
        elif experts.num_slots == experts.num_experts and self.world.size > 1:
            for parameter in experts.stacked_parameters().values():
                values = parameter.data.to(self.root_device)
                broadcast_(values, 0, self.world)
                parameter.data.copy_(values)

    # ------------------------------------------------------------------ dense gradients

    @override
    def configure_ddp(self) -> None:
        if self.world.size > 1:
            super().configure_ddp()

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, sum_over_ranks)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        self._optimizer_groups = [[list(g["params"]) for g in optimizer.param_groups] for optimizer in self.optimizers]
        if self._zero1 and self.world.size > 1:
            assert self.lightning_module is not None
            dense = [p for p in self.lightning_module.parameters() if p.requires_grad and p not in self._experts]
            self._shards = DenseOptimizerShards(dense, self.world)
            for optimizer in self.optimizers:
                self._shards.shard(optimizer)

    # ------------------------------------------------------------------ data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Cut a loader over the ranks: its batch_size is the global batch.

        Raises:
            ConfigurationError: a loader that cannot be cut exactly (an iterable dataset, a sampler of the user's own,
                ...).
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        loader = self._cut_loader(dataloader, trainer)
        if isinstance(loader, StepLoader) and trainer.training:
            loader.bind_to(trainer)
            if self._loader_states:
                loader.load_state_dict(self._loader_states.pop(0))
        return loader

    def _cut_loader(self, dataloader: object, trainer: pl.Trainer) -> object:
        world: dict[str, int] = {"rank": self.global_rank, "world_size": self.world_size}
        if isinstance(dataloader, StepLoader):
            dataloader.bind(**world)
            return dataloader
        if not isinstance(dataloader, DataLoader):
            if self.world_size == 1:
                return dataloader
            raise ConfigurationError(
                f"a loader of type {type(dataloader).__name__} cannot be cut over {self.world_size} ranks: "
                "return a torch DataLoader or a StepLoader"
            )
        seed = self._seed if self._seed is not None else _global_seed()
        micros = trainer.accumulate_grad_batches if trainer.training else 1
        return StepLoader.from_dataloader(dataloader, **world, num_micros=micros, seed=seed, training=trainer.training)

    def _enter_batch(self, loaders: object, index: int = 0) -> None:
        """Learn from the loader which samples the running batch holds."""
        flat = pytree.tree_leaves(loaders)
        loader = flat[index] if index < len(flat) else None
        self._slice = loader.current if isinstance(loader, StepLoader) else None
        if self._slice is not None:
            assert self.lightning_module is not None
            self._stream.advance(
                step=self.lightning_module.trainer.global_step,
                first_sample=self._slice.offset,
                num_samples=self._slice.count,
            )

    # ------------------------------------------------------------------ one step

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        self._synced = False
        self._enter_batch(self.lightning_module.trainer.train_dataloader)
        return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, "val_dataloaders", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, "test_dataloaders", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, "predict_dataloaders", *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], loaders: str, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        index = kwargs.get("dataloader_idx", args[2] if len(args) > 2 else 0)
        self._enter_batch(getattr(self.lightning_module.trainer, loaders), index)
        try:
            return step(*args, **kwargs)
        finally:
            self._slice = None

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """As in DDP, but inside a step the mean over ranks is the mean over the samples of the micro-batch, and
        integers have exact means.
        """
        is_mean = reduce_op is None or str(reduce_op).lower() in ("mean", "avg", "reduceop.avg")
        here = self._slice
        if isinstance(tensor, Tensor) and is_mean and not tensor.is_floating_point():
            tensor = tensor.double()  # DDP would cut the fraction, and with it Lightning's counts of samples
        if isinstance(tensor, Tensor) and is_mean and here is not None and group is None and self.world.size > 1:
            return super().reduce(tensor * (here.count / here.micro_total), group, "sum")
        return super().reduce(tensor, group, reduce_op)

    def _loss_weight(self) -> float:
        """This rank's share of the step's mean loss, undoing Lightning's division by the number of micro-batches."""
        here = self._slice
        if here is None:
            return 1.0 / self.world.size
        assert self.lightning_module is not None
        divided = here.num_micros if self.lightning_module.automatic_optimization else 1
        return here.count * divided / here.step_total

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Gradients of the mean over the global batch, summed over replicas before any hook sees them."""
        weight = self._loss_weight()
        self.pre_backward(closure_loss)
        assert self.lightning_module is not None
        loss = self.precision_plugin.pre_backward(
            closure_loss if weight == 1.0 else closure_loss * weight, self.lightning_module
        )
        self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        self._slice = None
        if self.lightning_module.automatic_optimization and not self._sync_blocked:
            self._sum_replicas()
        self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._sync_blocked = True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._sync_blocked = False

    def _sum_replicas(self) -> None:
        assert self._replica_sum is not None
        self._replica_sum()
        self._synced = True

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        def closure_then_sum() -> Any:
            result = closure()
            if not self._synced:
                self._sum_replicas()
            return result

        output = super().optimizer_step(optimizer, closure_then_sum, model, **kwargs)
        if self._shards is not None:
            self._shards.spread_updates()
        assert self.lightning_module is not None
        for layer in moe_layers(self.lightning_module):
            layer.router.update_bias()
        return output

    def _clip_by_global_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = self._layout(optimizer).numbered()
        self.last_gradient_norm = global_gradient_norm(parameters, self._experts, self.world)
        scale_gradients(parameters, self.last_gradient_norm, float(clip_val))

    # ------------------------------------------------------------------ checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # a full checkpoint is cut to the slots, so the slots must exist

    def _expert_keys(self) -> dict[str, ExpertRows]:
        assert self.lightning_module is not None
        named = self.lightning_module.named_parameters(remove_duplicate=False)
        return {name: self._experts[parameter] for name, parameter in named if parameter in self._experts}

    def _layout(self, optimizer: Optimizer) -> OptimizerLayout:
        bare = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        index = next(i for i, known in enumerate(self.optimizers) if known is bare)
        owners = self._shards.owners if self._shards is not None else {}
        return OptimizerLayout(groups=self._optimizer_groups[index], experts=self._experts, owners=owners)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on rank 0, expert stacks [E, ...]; empty on the others."""
        return full_model_state(super().lightning_module_state_dict(), self._expert_keys(), self.world)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer state on rank 0 as a single process would have it; empty on the others."""
        bare = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return full_optimizer_state(bare, self._layout(bare), self.world)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write on rank 0, with the position of the training data: Lightning itself leaves it out between epochs."""
        assert self.lightning_module is not None
        loaders = pytree.tree_leaves(self.lightning_module.trainer.train_dataloader)
        checkpoint[_LOADERS_KEY] = [loader.state_dict() for loader in loaders if isinstance(loader, StepLoader)]
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint without unpickling code; tensors are mapped, so each rank reads only what it keeps.

        Raises:
            CheckpointError: the file is missing, damaged, or holds objects that only unsafe unpickling could read.
        """
        path = Path(str(checkpoint_path))
        if "://" in str(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only=True)
        if not path.is_file():
            raise CheckpointError(f"the checkpoint {path} does not exist: give the path of a .ckpt file")
        try:
            checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"the checkpoint {path} holds more than tensors and plain values ({reason}): it is not loaded"
            ) from error
        except (RuntimeError, EOFError, ValueError, OSError) as error:
            raise CheckpointError(
                f"the checkpoint {path} is damaged or no checkpoint: {str(error).splitlines()[0]}"
            ) from error

        self._loader_states = list(checkpoint.get(_LOADERS_KEY, []))
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if "state_dict" not in checkpoint:
            raise CheckpointError("the checkpoint has no 'state_dict': it was not written by Lightning")
        local = local_model_state(
            checkpoint["state_dict"], self.lightning_module.state_dict(), self._expert_keys(), strict=strict
        )
        self.lightning_module.load_state_dict(local, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_local_optimizer_state(optimizer, self._layout(optimizer), state)

    @override
    def teardown(self) -> None:
        if self.precision_plugin.__dict__.get("clip_grad_by_norm") is not None:
            del self.precision_plugin.clip_grad_by_norm
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description="Expert parallelism with replicated experts")


def _global_seed() -> int:
    """The seed of lightning's seed_everything; 0 where none was given."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def _identical_buffers(module: nn.Module) -> list[str]:
    """Buffers of our own layers: every rank computes the same values, so DDP need not broadcast them before each
    forward pass.
    """
    ours = [f"{name}." for name, m in module.named_modules() if type(m).__module__.startswith("moe_lightning.")]
    return [name for name, _ in module.named_buffers() if any(name.startswith(prefix) for prefix in ours)]


def _read_placement(source: str | Sequence[Any]) -> tuple[object, str]:
    if not isinstance(source, str):
        return list(source), "placement"
    path = Path(source)
    if not path.is_file():
        raise ConfigurationError(
            f"the placement file {path} does not exist: give a .json or .npy table [layers, experts, ranks]"
        )
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False), str(path)
        return json.loads(path.read_text()), str(path)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"the placement file {path} is not a .json or .npy table: {error}") from error
