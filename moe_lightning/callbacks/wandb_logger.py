"""A Weights & Biases logger that never asks: without a login it works offline."""

from __future__ import annotations

import netrc
import os
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import WandbLogger


class QuietWandbLogger(WandbLogger):
    """Lightning's WandbLogger, offline unless there is a login, and without W&B's notes on the terminal.

    Args:
        project, name, save_dir, log_model: as in WandbLogger.
        offline: true or false; None: offline unless WANDB_MODE is set or an API key is known.
        options: passed to WandbLogger.
    """

    def __init__(
        self,
        *,
        project: str = "moe-lightning",
        name: str | None = None,
        save_dir: str = ".",
        offline: bool | None = None,
        log_model: bool = False,
        **options: Any,
    ) -> None:
        if offline is None:
            offline = "WANDB_MODE" not in os.environ and not has_wandb_login()
        os.environ.setdefault("WANDB_SILENT", "true")
        super().__init__(project=project, name=name, save_dir=save_dir, offline=offline, log_model=log_model, **options)
        self._wandb_init.pop("anonymous", None)  # W&B warns of it, even of its default


def has_wandb_login() -> bool:
    """Whether W&B would find an API key: without one it would ask."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host is not None and netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
