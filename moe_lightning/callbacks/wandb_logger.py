"""A Weights & Biases logger that never asks: without a login it works offline. Its run begins with the first numbers,
so that a command that fails before it trains leaves no empty run."""

from __future__ import annotations

import math
import netrc
import os
import re
import secrets
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import numpy as np
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor
from typing_extensions import override

from moe_lightning.callbacks.csv_logger import NotBegun
from moe_lightning.callbacks.wandb_artifacts import RUN_ID, CheckpointUploads, resumed_artifact
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.compat import private_lightning
from moe_lightning.config import validated

_MOST_BINS = 512


@validated
class QuietWandbLogger(WandbLogger):
    """Lightning's WandbLogger, offline unless there is a login, without W&B's notes on the terminal, and with one run
    id for a directory: a run that is resumed, or whose logging rank died, goes on in the same W&B run. WANDB_RUN_ID, as
    agents of sweeps set it, comes first.

    Args:
        project, name, save_dir: as in WandbLogger.
        log_model: checkpoints as artifacts, partial ones too, uploaded beside training: true for the last one when
            training ends, "all" as they are written, of several that wait for their upload the newest. `best` is the
            first after the lowest validation loss. Offline `wandb sync` uploads them.
        offline: true or false; None: offline unless WANDB_MODE is set or an API key is known.
        group: runs that W&B shows together; None: WANDB_RUN_GROUP, which a multirun of moe-train sets.
        tags: to find the run by.
        options: passed to WandbLogger.
    """

    def __init__(
        self,
        *,
        project: str = "moe-lightning",
        name: str | None = None,
        save_dir: str | Path = ".",
        offline: bool | None = None,
        log_model: bool | Literal["all"] = False,
        group: str | None = None,
        tags: Sequence[str] = (),
        **options: Any,
    ) -> None:
        if offline is None:
            offline = "WANDB_MODE" not in os.environ and not has_wandb_login()
        os.environ.setdefault("WANDB_SILENT", "true")
        options |= {"group": group} if group is not None else {}
        options |= {"tags": list(tags)} if tags else {}
        super().__init__(project=project, name=name, save_dir=save_dir, offline=offline, **options)
        private_lightning.drop_wandb_option(self, "anonymous")
        self._parameters: list[dict[str, Any] | Namespace] = []
        self._log_checkpoints = log_model
        self._checkpoint: Place | None = None
        self._losses = {"last": math.inf, "best": math.inf}
        self._uploads: CheckpointUploads | None = None

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """W&B's run; the same one for every process that logs into this directory, one after the other. Lightning asks
        for it before it has checked anything, so the run begins when something is asked of it.
        """
        return NotBegun(self) if private_lightning.wandb_run(self) is None else super().experiment

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Keep them until the run begins."""
        if private_lightning.wandb_run(self) is None:
            self._parameters.append(params)
        else:
            super().log_hyperparams(params)

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log them; the validation loss says which checkpoint is the best one."""
        self._losses["last"] = float(metrics.get("val/loss", self._losses["last"]))
        super().log_metrics(metrics, step)

    @override
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Called by Lightning's checkpoints, which are files."""
        path = checkpoint_callback.last_model_path or checkpoint_callback.best_model_path
        if path:
            self.log_checkpoint(Path(path))

    @rank_zero_only
    def log_checkpoint(self, path: Place) -> None:
        """A checkpoint, a file, a directory or one in a store, has been written whole; returns at once."""
        self._checkpoint = path
        if self._log_checkpoints == "all":
            self._upload(path)

    @rank_zero_only
    def resume_from(self, checkpoint: Path, step: int) -> None:
        """The run goes on from a checkpoint: where that is an artifact of a W&B run, say so; returns at once."""
        artifact = resumed_artifact(checkpoint, step)
        if self._log_checkpoints and artifact is not None:
            self._begun_uploads().use(artifact)

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Log the last checkpoint of a training that ended well, and wait until W&B has it."""
        if status == "success" and self._log_checkpoints and self._checkpoint is not None:
            self._upload(self._checkpoint)
        if self._uploads is not None:
            self._uploads.finish()

    def _upload(self, path: Place) -> None:
        last, best = self._losses["last"], self._losses["best"]
        self._losses["best"] = min(last, best)
        metadata = {"val/loss": last} if math.isfinite(last) else {}
        self._begun_uploads().log(path, ["best"] if last < best else [], metadata)

    def _begun_uploads(self) -> CheckpointUploads:
        if self._uploads is None:
            run = self.experiment
            run.config  # noqa: B018  # begins it here: only uploads are for the thread
            self._uploads = CheckpointUploads(private_lightning.wandb_run(self))
        return self._uploads

    def begin(self) -> Any:
        """W&B's run, from now on."""
        # An agent of a sweep names the run that it starts.
        private_lightning.name_wandb_run(self, lambda folder: os.environ.get("WANDB_RUN_ID") or lasting_run_id(folder))
        run = super().experiment
        kept, self._parameters = self._parameters, []
        for params in kept:
            super().log_hyperparams(params)
        return run


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
    path = folder / RUN_ID
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
