"""Comet's records of a run, offline unless an API key is known: `comet upload` sends what is offline."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from moe_lightning.compat import private_lightning
from moe_lightning.config import validated
from moe_lightning.user_errors import missing_for_logger


@validated
class Comet(private_lightning.LateComet):
    """Lightning's CometLogger, begun with the first numbers and ended with the process. Each start is an
    experiment of its own.

    Args:
        save_dir: gets the archive of an offline experiment.
        project, name: what Comet shows.
        offline: true or false; None: offline unless COMET_API_KEY is set.

    Raises:
        ConfigurationError: the package comet_ml is not installed.
    """

    def __init__(
        self,
        save_dir: str | Path,
        *,
        project: str = "moe-lightning",
        name: str | None = None,
        offline: bool | None = None,
    ) -> None:
        if find_spec("comet_ml") is None:
            raise missing_for_logger("comet", "comet_ml")
        is_offline = "COMET_API_KEY" not in os.environ if offline is None else offline
        os.environ.setdefault("COMET_LOGGING_CONSOLE", "ERROR")
        options = {"name": name} if name is not None else {}
        super().__init__(is_online=not is_offline, project=project, offline_directory=str(save_dir), **options)

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Nothing: the training may be validated afterwards; Comet itself ends the experiment with the process."""
