"""The directory of a run: where its files lie, its newest checkpoint, and how an old run makes room for a new one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moe_lightning.errors import ConfigurationError

MANIFEST = "MANIFEST.json"
"""What makes a directory a whole checkpoint; named here because importing the checkpoint library costs seconds."""

_CHECKPOINT_NAME = re.compile(r"step-(\d+)(\.ckpt)?")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint, a file or a directory, and the optimizer steps that were done when it was written."""

    path: Path
    step: int


@dataclass(frozen=True)
class RunDirectory:
    """`outputs/RUN_NAME` and what lies in it."""

    path: Path

    def __str__(self) -> str:
        """The path as seen from the current folder."""
        path, here = self.path.absolute(), Path.cwd()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    @property
    def config(self) -> Path:
        """The composed configuration, as the workers read it."""
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        """What the ranks above 0 wrote, and the failures of all."""
        return self.path / "ranks"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def newest_checkpoint(self) -> Checkpoint | None:
        """The checkpoint of the highest step, or None."""
        return newest_checkpoint(self.checkpoints)

    def move_aside(self) -> Path | None:
        """Rename the directory to the first free NAME.1, NAME.2, ... where it holds anything; its new place.

        Raises:
            ConfigurationError: it cannot be renamed.
        """
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return None
        number = 1
        while (place := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        try:
            self.path.rename(place)
        except OSError as error:
            raise ConfigurationError(
                f"the earlier run {self.path} cannot be moved to {place.name} ({error.strerror}): "
                "give this run another name with run_name=..."
            ) from error
        return place

    def create(self) -> None:
        """Make the directory.

        Raises:
            ConfigurationError: it cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"the run directory {self.path} cannot be written ({error.strerror}): "
                "start from a folder of yours, or give hydra.run.dir=..."
            ) from error


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint of the highest step in a folder, or None."""
    found = []
    for path in folder.glob("step-*") if folder.is_dir() else ():
        match = _CHECKPOINT_NAME.fullmatch(path.name)
        if match and (path.is_file() or (path / MANIFEST).is_file()):
            found.append(Checkpoint(path=path, step=int(match[1])))
    return max(found, key=lambda checkpoint: checkpoint.step, default=None)
