"""How the strategy's state goes into checkpoints and comes back: single files as stock Lightning writes them, and
directories.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.checkpoint.full_state import (
    OptimizerLayout,
    full_model_state,
    full_optimizer_state,
    load_local_optimizer_state,
    local_model_state,
    read_checkpoint,
)
from moe_lightning.checkpoint.loader import Checkpoint, find_newest
from moe_lightning.checkpoint.manifest import MANIFEST
from moe_lightning.checkpoint.source import CheckpointSource
from moe_lightning.checkpoint.training_state import ExpertLayer, TrainingState
from moe_lightning.comm.world import World
from moe_lightning.errors import CheckpointError
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.step_data import StepData, loader_states, states_of_stateful
from moe_lightning.strategies.zero import DenseOptimizerShards

LOADERS_KEY = "step_loaders"
"""Where a checkpoint keeps the position of each training loader."""


class CheckpointingStrategy(DDPStrategy):
    """Saves and restores experts in slots and sharded optimizer states; the part of the strategy that knows
    checkpoints.

    Attributes:
        restored_checkpoint: the directory checkpoint, or the snapshots, that this run came from last; None otherwise.
    """

    _optimizer_groups: list[list[list[nn.Parameter]]]
    _shards: DenseOptimizerShards | None
    restored_checkpoint: CheckpointSource | None = None
    _without_state = False

    @property
    @abstractmethod
    def world(self) -> World: ...

    @property
    @abstractmethod
    def experts(self) -> PlacedExperts: ...

    @abstractmethod
    def _step_data(self) -> StepData: ...

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # a checkpoint is cut to the slots, so the slots must exist

    def _layout(self, optimizer: Optimizer) -> OptimizerLayout:
        bare = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        index = next(i for i, known in enumerate(self.optimizers) if known is bare)
        owners = self._shards.owners if self._shards is not None else {}
        return OptimizerLayout(groups=self._optimizer_groups[index], experts=self.experts.rows, owners=owners)

    # ------------------------------------------------------------------ one file

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on rank 0, expert stacks [E, ...]; empty on the others."""
        assert self.lightning_module is not None
        if self._without_state:
            return {}
        keys = self.experts.keys(self.lightning_module)
        return full_model_state(super().lightning_module_state_dict(), keys, self.world)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer state on rank 0 as a single process would have it; empty on the others."""
        if self._without_state:
            return {}
        bare = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return full_optimizer_state(bare, self._layout(bare), self.world)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write on rank 0, with the position of the training data: Lightning itself leaves it out between epochs."""
        assert self.lightning_module is not None
        loaders = self.lightning_module.trainer.train_dataloader
        checkpoint[LOADERS_KEY] = loader_states(loaders)
        loop = _fit_loop_state(checkpoint)
        if "combined_loader" in loop:  # stock Lightning looks for the positions of loaders that have one there
            loop["combined_loader"] = states_of_stateful(loaders)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint without unpickling code: a file, a checkpoint directory, or a directory of these.

        Of a directory of checkpoints the newest whole one is taken, and damaged newer ones are named.

        Raises:
            CheckpointError: it is missing, damaged, or holds objects that only unsafe unpickling could read.
        """
        path = Path(str(checkpoint_path))
        if "://" in str(checkpoint_path):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=True)
        elif path.is_dir():
            self.restored_checkpoint = _newest_whole(path)
            checkpoint = self.restored_checkpoint.read_object("trainer")
        else:
            checkpoint = read_checkpoint(path)
        positions = checkpoint.get(LOADERS_KEY, [])
        self._step_data().restore(positions)
        if positions:
            _fit_loop_state(checkpoint).pop("combined_loader", None)  # Lightning would restore some of them once more
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self.restored_checkpoint is not None:
            self.training_state().restore_model(self.restored_checkpoint)
            return
        if "state_dict" not in checkpoint:
            raise CheckpointError("the checkpoint has no 'state_dict': it was not written by Lightning")
        local = local_model_state(
            checkpoint["state_dict"],
            self.lightning_module.state_dict(),
            self.experts.keys(self.lightning_module),
            strict=strict,
        )
        self.lightning_module.load_state_dict(local, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.restored_checkpoint is not None:
            self.training_state().restore_optimizers(self.restored_checkpoint)
            _restore_random_state(self.restored_checkpoint, self.world)
            return
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint holds {len(states)} optimizers, the module has {len(self.optimizers)}: "
                "use the configuration it was written with"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_local_optimizer_state(optimizer, self._layout(optimizer), state)

    # ------------------------------------------------------------------ directories

    def training_state(self) -> TrainingState:
        """The live tensors of the run under their checkpoint keys."""
        assert self.lightning_module is not None
        layers = []
        for layer in self.experts.layers:
            parameters = layer.experts.stacked_parameters()
            rows = self.experts.rows[next(iter(parameters.values()))]
            layers.append(ExpertLayer(parameters=parameters, rows=rows))
        optimizers = [(optimizer, self._layout(optimizer)) for optimizer in self.optimizers]
        return TrainingState(
            self.lightning_module, layers, optimizers, rank=self.world.rank, world_size=self.world.size
        )

    def training_objects(self) -> dict[str, Any]:
        """What this rank adds to a directory checkpoint beside tensors; collective, as Lightning's own dump is."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        with self._leave_state_out():
            dump = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        objects: dict[str, Any] = {f"rng/{self.world.rank}": _random_state()}
        if self.world.rank == 0:
            kept = {key: value for key, value in dump.items() if key not in ("state_dict", "optimizer_states")}
            # Lightning looks for both keys before it asks the strategy, which reads them from the directory.
            kept |= {"state_dict": {}, "optimizer_states": [{} for _ in self.optimizers]}
            kept[LOADERS_KEY] = loader_states(trainer.train_dataloader)
            objects["trainer"] = kept
        return objects | self.training_state().objects()

    @contextmanager
    def _leave_state_out(self) -> Generator[None, None, None]:
        self._without_state = True
        try:
            yield
        finally:
            self._without_state = False


def _fit_loop_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Of Lightning's fit loop itself, without its parts; empty where a checkpoint holds weights only."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def _newest_whole(path: Path) -> Checkpoint:
    if (path / MANIFEST).exists():
        checkpoint = Checkpoint(path)
        checkpoint.verify()
        return checkpoint
    found = find_newest(path, report=lambda problem: rank_zero_warn(f"{problem}: the checkpoint before it is tried"))
    if found.checkpoint is None:
        raise CheckpointError(
            f"{path} holds no whole checkpoint: name a .ckpt file or a directory of step-... directories"
        )
    return found.checkpoint


def _random_state() -> dict[str, Any]:
    """The global random generators of this process as tensors and plain values."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(checkpoint: CheckpointSource, world: World) -> None:
    """Continue this rank's generators; a rank that the checkpoint does not know keeps its own."""
    key = f"rng/{world.rank}"
    if key not in checkpoint.keys("rng/"):
        return
    state = checkpoint.read_object(key)
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
