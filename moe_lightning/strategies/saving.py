"""Lightning's saves and loads, by our checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning import seams
from moe_lightning.checkpoint.files import SUFFIX
from moe_lightning.checkpoint.full_state import hyper_parameters_with_objects
from moe_lightning.checkpoint.storages import place_of
from moe_lightning.modules.moe_layer import whole_state_dict
from moe_lightning.strategies.checkpoints import Checkpoints, take_positions
from moe_lightning.strategies.module_checks import require_same_parameters
from moe_lightning.strategies.rank_state import RankState
from moe_lightning.strategies.sealed_files import reads_its_own_way
from moe_lightning.strategies.step_data import StepData
from moe_lightning.strategies.world_ddp import WorldDDPStrategy


class SavingStrategy(WorldDDPStrategy):
    """What Lightning asks of a strategy when it saves and restores.

    Attributes:
        checkpoints: saves and restores.
    """

    checkpoints: Checkpoints
    state: RankState
    _before_hooks: Sequence[nn.Parameter] = ()
    _has_told_objects = False

    @property
    @abstractmethod
    def step_data(self) -> StepData:
        """The positions in the data."""

    @abstractmethod
    def place_module(self, trainer: pl.Trainer) -> None:
        """Put the module's experts into this rank's slots, once for each run of the Trainer; collective.

        Raises:
            ConfigurationError: a module that cannot be trained the same on any number of ranks.
        """

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """As in stock DDP values are restored before optimizers are made, where every rank holds whole dense
        parameters; where ranks hold parts of them, these are made first.
        """
        has_peers = self.world_size > 1 or self.elastic is not None
        return self.worlds.axes.pp > 1 or (has_peers and self.state.parts.is_wished)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        if not self.state.holds(module):  # connected only
            return whole_state_dict(module)
        return self.checkpoints.model_state(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.checkpoints.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.lightning_module is not None and self.state.holds(self.lightning_module):
            self.checkpoints.add_positions(checkpoint)
        if not self._has_told_objects:
            found = hyper_parameters_with_objects(checkpoint)
            self._has_told_objects = bool(found)
            if found:
                rank_zero_warn(
                    f"the hyper-parameters {found} hold objects, so the checkpoint is loaded with "
                    f"fit(..., weights_only=False) only: leave them out with save_hyperparameters(ignore={found})"
                )
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint: a file, a checkpoint directory, or a directory of these, of which the newest is taken that
        is whole or can be mended, and what is damaged is named. Collective.

        Args:
            weights_only: False: unpickle any object in a file, which may run code of whoever wrote it; else only
                tensors and plain values are read.

        Raises:
            CheckpointError: it is missing, damaged, or holds objects that are not read.
        """
        is_trusted = weights_only is False
        if "://" in str(checkpoint_path) and str(checkpoint_path).endswith(SUFFIX):  # a file of stock Lightning's
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=not is_trusted)
        elif reads_its_own_way(self.checkpoint_io):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        else:
            self.meet()
            place = place_of(str(checkpoint_path))
            checkpoint = self.checkpoints.open(place, self.reachable, is_trusted=is_trusted)
        module = self.lightning_module
        positions, trainer = take_positions(checkpoint), seams.trainer_of(module)
        self._before_hooks = [] if module is None else list(module.parameters())
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self.step_data.restore(positions, trainer.train_dataloader)
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
            self.precision_plugin.convert_module(module)  # what frozen weights are compared in
        self.checkpoints.load_model(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.checkpoints.load_optimizers(checkpoint)
