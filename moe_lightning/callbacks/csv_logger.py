"""CSV files of a run, begun with the first numbers: a command that is refused before it trains leaves no folder."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from moe_lightning.compat import private_lightning
from moe_lightning.config import NonNegativeInt, PositiveInt, validated


class NotBegun:
    """Stands for the experiment of a logger that begins when anything is asked of it: Lightning asks for the experiment
    itself before it has checked anything.

    Args:
        logger: its `begin` returns the experiment.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger.begin(), name)


@validated
class CSV(CSVLogger):
    """Lightning's CSVLogger, whose folder is made with the first numbers.

    Args:
        save_dir, name, version, flush_logs_every_n_steps: as in CSVLogger.
    """

    def __init__(
        self,
        save_dir: str | Path,
        name: str = "csv",
        version: NonNegativeInt | str | None = None,
        flush_logs_every_n_steps: PositiveInt = 100,
    ) -> None:
        super().__init__(save_dir, name=name, version=version, flush_logs_every_n_steps=flush_logs_every_n_steps)
        self._parameters: list[dict[str, Any] | Namespace] = []

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer; before the first numbers what begins it."""
        return super().experiment if private_lightning.has_begun(self) else NotBegun(self)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None) -> None:
        """Keep them until the first numbers."""
        if private_lightning.has_begun(self):
            super().log_hyperparams(params)
        elif params is not None:
            self._parameters.append(params)

    @override
    @rank_zero_only
    def save(self) -> None:
        if private_lightning.has_begun(self):
            super().save()

    def begin(self) -> Any:
        """The writer, from now on."""
        writer = super().experiment
        kept, self._parameters = self._parameters, []
        for params in kept:
            super().log_hyperparams(params)
        return writer
