"""TensorBoard's event files of a run, in its own directory: `tensorboard --logdir outputs`. They begin with the first
numbers, as CSV files do.
"""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from moe_lightning.callbacks.csv_logger import NotBegun
from moe_lightning.compat import private_lightning
from moe_lightning.config import validated
from moe_lightning.user_errors import missing_for_logger


@validated
class TensorBoard(TensorBoardLogger):
    """Lightning's TensorBoardLogger with one folder for all starts of a run, so that a resumed one goes on in the same
    curves.

    Args:
        save_dir: the run directory; files go to its folder tensorboard.

    Raises:
        ConfigurationError: the package tensorboard is not installed.
    """

    def __init__(self, save_dir: str | Path) -> None:
        if find_spec("tensorboard") is None and find_spec("tensorboardX") is None:
            raise missing_for_logger("tensorboard", "tensorboard")
        super().__init__(save_dir=save_dir, name="tensorboard", version="")
        self._parameters: list[tuple[Any, ...]] = []

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """TensorBoard's writer; before the first numbers what begins it."""
        return super().experiment if private_lightning.has_begun(self) else NotBegun(self)

    @override
    @rank_zero_only
    def log_hyperparams(
        self,
        params: dict[str, Any] | Namespace,
        metrics: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """Keep them until the first numbers."""
        if private_lightning.has_begun(self):
            super().log_hyperparams(params, metrics, step)
        else:
            self._parameters.append((params, metrics, step))

    @override
    @rank_zero_only
    def save(self) -> None:
        if private_lightning.has_begun(self):
            super().save()

    def begin(self) -> Any:
        """The writer, from now on."""
        writer = super().experiment
        kept, self._parameters = self._parameters, []
        for arguments in kept:
            super().log_hyperparams(*arguments)
        return writer
