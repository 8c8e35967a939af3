"""The part that data modules of samples share: their loaders, step by step."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning.pytorch import LightningDataModule
from torch.utils.data import Dataset

from moe_lightning.data.step_loader import StepLoader
from moe_lightning.data.step_sampler import StepSampler


class StepDataModule(LightningDataModule):
    """Samples as training, validation, test and prediction batches of a constant global size.

    A subclass sets `_train` and `_val`, the samples to train on and those held out, in `setup`.

    Args:
        global_batch_size: samples of one optimizer step over all ranks and micro-batches; also of an evaluation batch.
        num_workers: DataLoader processes on each rank.
        seed: of the order of the samples.
    """

    sampler: ClassVar[type[StepSampler]] = StepSampler
    """Turns positions into indices of the samples."""

    _train: Dataset[Any]
    _val: Dataset[Any]

    def __init__(self, *, global_batch_size: int, num_workers: int, seed: int) -> None:
        super().__init__()
        self.global_batch_size = global_batch_size
        self.num_workers = num_workers
        self.seed = seed

    def train_dataloader(self) -> StepLoader:
        """Endless permuted epochs of whole steps."""
        return self._loader(self._train, training=True)

    def val_dataloader(self) -> StepLoader:
        """Every held-out sample once."""
        return self._loader(self._val, training=False)

    def test_dataloader(self) -> StepLoader:
        """The held-out samples again: there is no third part."""
        return self.val_dataloader()

    def predict_dataloader(self) -> StepLoader:
        """The held-out samples, in order."""
        return self.val_dataloader()

    def _loader(self, samples: Dataset[Any], *, training: bool) -> StepLoader:
        return StepLoader.of_samples(
            samples,
            sampler=self.sampler,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            training=training,
            num_workers=self.num_workers,
            trainer=self.trainer,
        )
