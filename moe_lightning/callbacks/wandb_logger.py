"""A Weights & Biases logger that never asks: without a login it works offline."""

from __future__ import annotations

import netrc
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor
from typing_extensions import override

_MOST_BINS = 512


class QuietWandbLogger(WandbLogger):
    """Lightning's WandbLogger, offline unless there is a login, without W&B's notes on the terminal, and with one run
    id for a directory: a run that is resumed, or whose logging rank died, goes on in the same W&B run. WANDB_RUN_ID, as
    agents of sweeps set it, comes first.

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

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """W&B's run; the same one for every process that logs into this directory, one after the other."""
        if self._experiment is None and self._wandb_init.get("id") is None:
            # An agent of a sweep names the run that it starts.
            run_id = os.environ.get("WANDB_RUN_ID") or lasting_run_id(Path(str(self._save_dir)))
            self._wandb_init["id"] = self._id = run_id
        return super().experiment


def log_histograms(logger: WandbLogger, loads: Mapping[int, Tensor], step: int) -> None:
    """Shares of the experts as W&B's histograms `moe/layerNN/expert_load`; rank 0 only.

    Args:
        loads: shares [E] by MoE layer; W&B takes no more than 512 bins, so of more experts neighbours are added.
    """
    import wandb

    histograms: dict[str, Any] = {}
    for layer, shares_E in loads.items():
        bins = shares_E.numpy()
        width = -(-len(bins) // _MOST_BINS)
        sums = np.add.reduceat(bins, np.arange(0, len(bins), width))
        edges = np.minimum(np.arange(len(sums) + 1) * width, len(bins))
        histograms[f"moe/layer{layer:02d}/expert_load"] = wandb.Histogram(np_histogram=(sums, edges))
    logger.log_metrics(histograms, step)


def lasting_run_id(folder: Path) -> str:
    """The id of the run that logs into a folder: made by the first process that asks, read by those after it."""
    path = folder / "wandb_run_id"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        known = path.read_text().strip()
        return known if re.fullmatch(r"[0-9a-z]{4,64}", known) else secrets.token_hex(4)
    run_id = secrets.token_hex(4)
    with os.fdopen(descriptor, "w") as file:
        file.write(run_id + "\n")
    return run_id


def has_wandb_login() -> bool:
    """Whether W&B would find an API key: without one it would ask."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host is not None and netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
