"""Lightning's saves and loads, by our checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning import seams
from moe_lightning.checkpoint.files import SUFFIX
from moe_lightning.checkpoint.storages import place_of
from moe_lightning.strategies.checkpoints import Checkpoints, take_positions
from moe_lightning.strategies.step_data import StepData
from moe_lightning.strategies.world_ddp import WorldDDPStrategy


class SavingStrategy(WorldDDPStrategy):
    """What Lightning asks of a strategy when it saves and restores.

    Attributes:
        checkpoints: saves and restores.
    """

    checkpoints: Checkpoints

    @property
    @abstractmethod
    def step_data(self) -> StepData:
        """The positions in the data."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # a checkpoint is cut to the slots, so the slots must exist

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.checkpoints.model_state(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.checkpoints.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self.checkpoints.add_positions(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint without unpickling code: a file, a checkpoint directory, or a directory of these, of which
        the newest is taken that is whole or can be mended, and what is damaged is named. Collective.

        Raises:
            CheckpointError: it is missing, damaged, or holds objects that only unsafe unpickling could read.
        """
        if "://" in str(checkpoint_path) and str(checkpoint_path).endswith(SUFFIX):  # a file of stock Lightning's
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=True)
        else:
            self.meet()
            checkpoint = self.checkpoints.open(place_of(str(checkpoint_path)), self.reachable)
        positions, trainer = take_positions(checkpoint), seams.trainer_of(self.lightning_module)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self.step_data.restore(positions, trainer.train_dataloader)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.checkpoints.load_model(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.checkpoints.load_optimizers(checkpoint)
