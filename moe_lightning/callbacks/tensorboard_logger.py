"""TensorBoard's event files of a run, in its own directory: `tensorboard --logdir outputs`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger

from moe_lightning.mistakes import missing_for_logger
from moe_lightning.values import validated


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
