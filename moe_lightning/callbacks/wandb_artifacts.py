"""Checkpoints as artifacts of W&B: versions with their lineage, uploaded while training goes on.

Hashing, copying and logging happen in one thread of their own. A checkpoint that is asked for while that thread is
behind takes the place of the one that waits. A directory of `PartialExpertsCheckpoint` keeps its name in the artifact,
so that a downloaded one is resumed from as it is. Of one in a store the artifact holds references to its objects.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from moe_lightning.checkpoint.directory import read_manifest
from moe_lightning.checkpoint.loader import oldest_versions
from moe_lightning.checkpoint.manifest import MANIFEST, Manifest
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.user_errors import one_line

RUN_ID = "wandb_run_id"
"""The file of a run's folder that holds the id of its W&B run."""


def artifact_name(run_id: str) -> str:
    """Under which all checkpoints of a W&B run are versions."""
    return f"checkpoint-{run_id}"


def step_alias(step: int) -> str:
    """The alias of the checkpoint after a step."""
    return f"step-{step}"


def resumed_artifact(checkpoint: Path, step: int) -> str | None:
    """The artifact of a checkpoint, by the id that lies in the folder of the run that wrote it; None without one."""
    for folder in list(checkpoint.absolute().parents)[:2]:
        if (folder / RUN_ID).is_file():
            return f"{artifact_name((folder / RUN_ID).read_text().strip())}:{step_alias(step)}"
    return None


def ages(manifest: Manifest) -> dict[str, Any]:
    """What an artifact says of a partial checkpoint: by layer the version of each expert, which is the step after which
    the oldest part of its state was taken, and how many steps they are behind.
    """
    versions = oldest_versions(manifest.stored)
    behind = [manifest.step - version for version in versions.values()]
    told: dict[str, Any] = {
        "step": manifest.step,
        "world_size": manifest.world_size,
        "payload_bytes": manifest.payload_bytes,
        "new_bytes": manifest.new_bytes,
    }
    if behind:
        told |= {"oldest_expert_steps": max(behind), "mean_expert_steps": sum(behind) / len(behind)}
        by_layer = told["expert_versions"] = dict[str, list[int]]()
        for (layer, _), version in sorted(versions.items()):
            by_layer.setdefault(f"layer{layer:02d}", []).append(version)
    return told | ({"plt": manifest.extra["plt"]} if "plt" in manifest.extra else {})


def files_of(checkpoint: Place) -> tuple[dict[str, Place], dict[str, Any]]:
    """The files of an artifact by their names in it, and what is said of a checkpoint: a file, a directory, or one in a
    store.

    Raises:
        CheckpointError, OSError: it is damaged, or has been pruned meanwhile.
    """
    if isinstance(checkpoint, Path) and checkpoint.is_file():
        found = re.search(r"step[-=](\d+)", checkpoint.name)
        return {checkpoint.name: checkpoint}, {"step": int(found[1]) if found else 0}
    manifest, root = read_manifest(checkpoint), _straight(checkpoint.parent)
    names = [MANIFEST, *(record.path for record in manifest.files.values())]
    places = [_straight(checkpoint / name) for name in names]  # ../step-.../file where links cannot be made
    return {"/".join(place.parts[len(root.parts) :]): place for place in places}, ages(manifest)


def _straight(place: Place) -> Place:
    return place.resolve() if isinstance(place, Path) else place


class CheckpointUploads:
    """Logs checkpoints as artifacts of one W&B run.

    Args:
        run: W&B's.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wandb-artifacts")
        self._waiting: Future[None] | None = None
        self._asked: set[str] = set()

    def log(self, checkpoint: Place, aliases: list[str], metadata: Mapping[str, Any]) -> None:
        """Log a checkpoint, unless that has been asked for; returns at once."""
        if str(checkpoint) in self._asked:
            return
        self._asked.add(str(checkpoint))
        if self._waiting is not None:
            self._waiting.cancel()  # it has not begun: this one is newer
        self._waiting = self._submit(self._log, checkpoint, aliases, metadata)

    def use(self, artifact: str) -> None:
        """Say that the run goes on from an artifact; returns at once. Offline only the run's configuration says so."""
        self._submit(self._use, artifact)

    def finish(self) -> None:
        """Wait until what was asked for is logged."""
        self._thread.submit(lambda: None).result()

    def _submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        def told() -> None:
            try:
                work(*arguments)
            except Exception as error:  # training goes on without it
                rank_zero_warn(f"W&B gets no artifact of {arguments[0]}: {one_line(error)}")

        return self._thread.submit(told)

    def _log(self, checkpoint: Place, aliases: list[str], metadata: Mapping[str, Any]) -> None:
        import wandb

        run = self._run
        files, told = files_of(checkpoint)
        artifact = wandb.Artifact(artifact_name(run.id), type="model", metadata={**told, **metadata})
        if isinstance(checkpoint, Path):
            _add_copies(artifact, {name: Path(place) for name, place in files.items()}, checkpoint.parent.parent)
        else:
            for name, place in files.items():
                artifact.add_reference(str(place), name=name, checksum=False)  # ours are in the manifest
        run.log_artifact(artifact, aliases=["latest", step_alias(told["step"]), *aliases])

    def _use(self, artifact: str) -> None:
        run = self._run
        run.config.update({"resumed_from": artifact}, allow_val_change=True)
        if not run.offline:
            run.use_artifact(artifact)


def _add_copies(artifact: Any, files: Mapping[str, Path], folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        links = {name: Path(temporary) / str(index) for index, name in enumerate(files)}
        for name, link in links.items():  # all at once: then pruning may go on
            _link(files[name], link)
        for name, link in links.items():
            artifact.add_file(str(link), name=name)  # copied, which W&B undoes after the upload


def _link(place: Path, name: Path) -> None:
    try:
        name.hardlink_to(place)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(place, name)
