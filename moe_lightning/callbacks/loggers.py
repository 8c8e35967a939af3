"""Loggers of a run: CSV, TensorBoard, MLflow and Weights & Biases, with partial checkpoints as W&B artifacts.

Files begin with the first metrics, so that a command that is refused before it trains leaves no empty run. W&B
never prompts: without a login it works offline. Comet is Lightning's own logger (conf/logger).

Checkpoints are artifacts of W&B with their lineage. Lightning's `log_model` takes files only; here a checkpoint is a
file, a directory of `PartialExpertsCheckpoint`, which keeps its name in the artifact so that `resume=` takes a
downloaded one as it is, or a directory in an object store, of which the artifact holds references. One thread hashes,
copies and logs; of the checkpoints that wait for it only the newest is logged.
"""

from __future__ import annotations

import netrc
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import numpy as np
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from moe_lightning.checkpoint.directory import read_manifest
from moe_lightning.checkpoint.loader import oldest_versions
from moe_lightning.checkpoint.manifest import Manifest
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.compat import private_lightning
from moe_lightning.config import NonNegativeInt, PositiveInt, validated
from moe_lightning.user_errors import missing_for_logger, one_line

RUN_ID = "wandb_run_id"
"""The file of a run's folder that holds the id of its W&B run."""

_STEP = "wandb_step"
"""The file of a run's folder that holds the number of rows of its W&B run: offline, nobody else knows where a resumed
run continues."""

_MOST_BINS = 512


class DeferredExperiment:
    """Placeholder for the experiment of a logger: its first attribute access opens the experiment.

    Lightning asks every logger for its experiment before it has validated anything.

    Args:
        logger: opens the experiment.
    """

    def __init__(self, logger: DeferredLogger) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger.open(), name)


class DeferredLogger(Logger):
    """Logger that opens its experiment with the first metrics; hyperparameters wait until then.

    Base of loggers that derive from one of Lightning's beside it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._pending: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The stock logger's experiment; a placeholder before the first metrics."""
        stock: Any = super()
        return stock.experiment if private_lightning.has_begun(self) else DeferredExperiment(self)

    @override
    @rank_zero_only
    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        """Log hyperparameters once the experiment is open."""
        stock: Any = super()
        if private_lightning.has_begun(self):
            stock.log_hyperparams(*arguments, **options)
        else:
            self._pending.append((arguments, options))

    @override
    @rank_zero_only
    def save(self) -> None:
        if private_lightning.has_begun(self):
            super().save()

    def open(self) -> Any:
        """Open the experiment, log the hyperparameters that wait, and return it."""
        stock: Any = super()
        experiment = stock.experiment
        pending, self._pending = self._pending, []
        for arguments, options in pending:
            stock.log_hyperparams(*arguments, **options)
        return experiment


@validated
class CSV(DeferredLogger, CSVLogger):
    """Lightning's CSVLogger, whose folder is made with the first metrics.

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


@validated
class TensorBoard(DeferredLogger, TensorBoardLogger):
    """Lightning's TensorBoardLogger with one folder for all starts of a run: a resumed run continues its curves.

    Args:
        save_dir: the run directory; event files go to its folder tensorboard (`tensorboard --logdir outputs`).

    Raises:
        ConfigurationError: the package tensorboard is not installed.
    """

    def __init__(self, save_dir: str | Path) -> None:
        if find_spec("tensorboard") is None and find_spec("tensorboardX") is None:
            raise missing_for_logger("tensorboard", "tensorboard")
        super().__init__(save_dir=save_dir, name="tensorboard", version="")


@validated
class MLflow(MLFlowLogger):
    """Lightning's MLFlowLogger. Its address may hold a password, and the configuration goes into files and reports, so
    it is read from the environment here.

    Args:
        tracking_uri: of the server or database; None: MLFLOW_TRACKING_URI, or sqlite:///mlflow.db.
        experiment_name, run_name, tags, log_model, prefix, artifact_location, run_id, synchronous: as in MLFlowLogger.
    """

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment_name: str = "moe-lightning",
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        log_model: bool | Literal["all"] = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        super().__init__(
            experiment_name=experiment_name,
            run_name=run_name,
            tracking_uri=tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db",
            tags=None if tags is None else dict(tags),
            log_model=log_model,
            prefix=prefix,
            artifact_location=artifact_location,
            run_id=run_id,
            synchronous=synchronous,
        )


@validated
class QuietWandbLogger(DeferredLogger, WandbLogger):
    """Lightning's WandbLogger, offline unless there is a login, without W&B's notes on the terminal, and with one run
    id for a directory: a run that is resumed, or whose logging rank died, continues in the same W&B run. WANDB_RUN_ID,
    which agents of sweeps set, has precedence.

    Args:
        project, name, save_dir: as in WandbLogger.
        log_model: checkpoints as artifacts, partial ones too, uploaded beside training: true for the last one when
            training ends, "all" as they are written (of several that wait for their upload, the newest). Offline
            `wandb sync` uploads them, from W&B's copies (WANDB_DATA_DIR).
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
        self._log_checkpoints = log_model
        self._checkpoint: Place | None = None
        self._uploads: CheckpointUploads | None = None
        self._counter = Path(save_dir) / _STEP
        self._rows = 0

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics, and count them."""
        super().log_metrics(metrics, step)
        self._rows += 1
        self._counter.write_text(f"{self._rows}\n")

    @override
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Log the file that one of Lightning's checkpoint callbacks has written."""
        path = checkpoint_callback.last_model_path or checkpoint_callback.best_model_path
        if path:
            self.log_checkpoint(Path(path))

    @rank_zero_only
    def log_checkpoint(self, path: Place) -> None:
        """Log a checkpoint that is complete: a file, a directory, or a directory in a store; does not wait."""
        self._checkpoint = path
        if self._log_checkpoints == "all":
            self._open_uploads().log(path)

    @rank_zero_only
    def resume_from(self, checkpoint: Path, step: int) -> None:
        """Record that the run resumes from a checkpoint, if that is an artifact of a W&B run; does not wait."""
        artifact = resumed_artifact(checkpoint, step)
        if self._log_checkpoints and artifact is not None:
            self._open_uploads().use(artifact)

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Log the last checkpoint of a training that ended well, and wait until W&B has it."""
        if status == "success" and self._log_checkpoints and self._checkpoint is not None:
            self._open_uploads().log(self._checkpoint)
        if self._uploads is not None:
            self._uploads.finish()

    def _open_uploads(self) -> CheckpointUploads:
        if self._uploads is None:
            run = self.experiment
            run.config  # noqa: B018  # opens the run here: the thread only uploads
            self._uploads = CheckpointUploads(private_lightning.wandb_run(self))
        return self._uploads

    @override
    def open(self) -> Any:
        """Open W&B's run under the id of its folder, or the one that the agent of a sweep chose; offline, its step
        continues where the folder's last run ended, as W&B's server does it online.
        """
        chosen = os.environ.get("WANDB_RUN_ID")
        private_lightning.name_wandb_run(self, lambda folder: chosen or persistent_run_id(folder))
        run = super().open()
        rows = self._counter.read_text().strip() if self._counter.exists() else ""
        self._rows = int(rows) if rows.isdecimal() else 0  # a killed process may leave it empty
        if self._rows and run.offline:
            run.log({}, step=self._rows, commit=False)
        return run


def log_histograms(logger: WandbLogger, loads: Mapping[int, Sequence[float]], step: int) -> None:
    """Log shares of the experts as W&B's histograms `moe/layerNN/expert_load`; rank 0 only.

    Args:
        loads: shares [E] by MoE layer; W&B allows at most 512 bins, so neighbors are summed for more experts.
    """
    import wandb

    histograms: dict[str, Any] = {}
    for layer, shares_E in loads.items():
        bins = np.asarray(shares_E)
        width = -(-len(bins) // _MOST_BINS)
        sums = np.add.reduceat(bins, np.arange(0, len(bins), width))
        edges = np.minimum(np.arange(len(sums) + 1) * width, len(bins))
        histograms[f"moe/layer{layer:02d}/expert_load"] = wandb.Histogram(np_histogram=(sums, edges))
    logger.log_metrics(histograms, step)


def persistent_run_id(folder: Path) -> str:
    """Return the id of the W&B run of a folder: the first process makes it, later ones read it."""
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
    """True if W&B finds an API key; without one it would prompt."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host is not None and netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def artifact_name(run_id: str) -> str:
    """Name of the artifact that has all checkpoints of a W&B run as its versions."""
    return f"checkpoint-{run_id}"


def step_alias(step: int) -> str:
    """The alias of the checkpoint after a step."""
    return f"step-{step}"


def resumed_artifact(checkpoint: Path, step: int) -> str | None:
    """Return the artifact of a checkpoint, by the run id in the folder of the run that wrote it; None without one."""
    for folder in list(checkpoint.absolute().parents)[:2]:
        if (folder / RUN_ID).is_file():
            return f"{artifact_name((folder / RUN_ID).read_text().strip())}:{step_alias(step)}"
    return None


def checkpoint_metadata(manifest: Manifest) -> dict[str, Any]:
    """Return the metadata of a partial checkpoint: by layer the version of each expert, which is the step after which
    the oldest part of its state was copied, and how many steps the experts are behind.
    """
    versions = oldest_versions(manifest.stored)
    behind = [manifest.step - version for version in versions.values()]
    metadata: dict[str, Any] = {
        "step": manifest.step,
        "world_size": manifest.world_size,
        "payload_bytes": manifest.payload_bytes,
        "new_bytes": manifest.new_bytes,
    }
    if behind:
        metadata |= {"oldest_expert_steps": max(behind), "mean_expert_steps": sum(behind) / len(behind)}
        by_layer = metadata["expert_versions"] = dict[str, list[int]]()
        for (layer, _), version in sorted(versions.items()):
            by_layer.setdefault(f"layer{layer:02d}", []).append(version)
    return metadata | ({"plt": manifest.extra["plt"]} if "plt" in manifest.extra else {})


def step_of(checkpoint: Place) -> int | None:
    """Return the step in the name of a checkpoint; None without one."""
    found = re.search(r"step[-=](\d+)", checkpoint.name)
    return int(found[1]) if found else None


def files_of(checkpoint: Place) -> tuple[dict[str, Place], dict[str, Any]]:
    """Return the files of an artifact by their names in it, and its metadata.

    Args:
        checkpoint: a file, a directory, or a directory in a store.

    Raises:
        CheckpointError, OSError: the checkpoint is damaged, or has been pruned.
    """
    if isinstance(checkpoint, Path) and checkpoint.is_file():
        step = step_of(checkpoint)
        return {checkpoint.name: checkpoint}, {} if step is None else {"step": step}
    manifest, root = read_manifest(checkpoint), _straight(checkpoint.parent)
    names = [MANIFEST, *(record.path for record in manifest.files.values())]
    places = [_straight(checkpoint / name) for name in names]  # ../step-.../file where links cannot be made
    return {"/".join(place.parts[len(root.parts) :]): place for place in places}, checkpoint_metadata(manifest)


def _straight(place: Place) -> Place:
    return place.resolve() if isinstance(place, Path) else place


def _written(checkpoint: Place) -> tuple[int, int] | None:
    """Return time and size of a local checkpoint's file or manifest, which change when it is replaced."""
    if not isinstance(checkpoint, Path):
        return None
    file = checkpoint / MANIFEST if checkpoint.is_dir() else checkpoint
    if not file.is_file():
        return None
    written = file.stat()
    return written.st_mtime_ns, written.st_size


class CheckpointUploads:
    """Uploads of checkpoints as artifacts of one W&B run, in a thread.

    Args:
        run: W&B's run.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wandb-artifacts")
        self._waiting: Future[None] | None = None
        self._submitted: set[tuple[str, tuple[int, int] | None]] = set()

    def log(self, checkpoint: Place) -> None:
        """Submit a checkpoint unless it was submitted before and not replaced since; does not wait."""
        known = str(checkpoint), _written(checkpoint)
        if known in self._submitted:
            return
        self._submitted.add(known)
        if self._waiting is not None:
            self._waiting.cancel()  # unless it runs already: this one is newer
        self._waiting = self._submit(self._log, checkpoint)

    def use(self, artifact: str) -> None:
        """Record that the run resumes from an artifact, offline in its configuration only; does not wait."""
        self._submit(self._use, artifact)

    def finish(self) -> None:
        """Wait until everything submitted is logged."""
        self._thread.submit(lambda: None).result()

    def _submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        def guarded() -> None:
            try:
                work(*arguments)
            except Exception as error:  # training continues without it
                rank_zero_warn(f"W&B gets no artifact of {arguments[0]}: {one_line(error)}")

        return self._thread.submit(guarded)

    def _log(self, checkpoint: Place) -> None:
        import wandb

        files, metadata = files_of(checkpoint)
        artifact = wandb.Artifact(artifact_name(self._run.id), type="model", metadata=metadata)
        if isinstance(checkpoint, Path):
            _add_copies(artifact, {name: Path(place) for name, place in files.items()}, checkpoint.parent.parent)
        else:
            for name, place in files.items():
                artifact.add_reference(str(place), name=name, checksum=False)  # the manifest has checksums
        aliases = ["latest", *([step_alias(metadata["step"])] if "step" in metadata else [])]
        self._run.log_artifact(artifact, aliases=aliases)

    def _use(self, artifact: str) -> None:
        run = self._run
        run.config.update({"resumed_from": artifact}, allow_val_change=True)
        if not run.offline:
            run.use_artifact(artifact)


def _add_copies(artifact: Any, files: Mapping[str, Path], folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        links = {name: Path(temporary) / str(index) for index, name in enumerate(files)}
        for name, link in links.items():  # all of them first: afterwards pruning is harmless
            _link(files[name], link)
        for name, link in links.items():
            artifact.add_file(str(link), name=name)  # W&B copies it and removes the copy after the upload


def _link(place: Path, name: Path) -> None:
    try:
        name.hardlink_to(place)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(place, name)
