"""Run directory: files, lock, newest checkpoint, moving an old run aside.

The lock admits one command at a time: two would write the same files, and one could move the other's away.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from moe_lightning.checkpoint.names import newest_first
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.files import open_regular, replace_text
from moe_lightning.hub import TOKENIZER

_LOCK = ".lock"
DOCTOR = "doctor"
"""Folder of the short run of doctor=true, in the directory of the run that it examines."""

_OF_DOCTOR = re.compile(rf"{DOCTOR}(\.\d+)?")
"""Names of that folder and of those of earlier examinations, see `RunDirectory.move_aside`."""

_LEAVINGS = ("ranks", _LOCK, "csv", "tensorboard", "wandb", "mlflow_run_id")
"""What a command may leave that was killed before it trained, those of loggers included."""

_SHARED_AFTER_S = 1.0
"""The first command of several machines has the lock alone until it has written who may share it; on NFS each of these
calls takes milliseconds."""


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A checkpoint, a file or a directory, and the optimizer steps that were done when it was written."""

    path: Path
    step: int

    def check(self) -> int:
        """Compare it with its checksums; the step that training goes on from.

        Raises:
            CheckpointError: it is damaged.
        """
        from moe_lightning.checkpoint import files, loader  # import torch

        if self.path.is_dir():
            checkpoint = loader.Checkpoint(self.path)
            checkpoint.verify()
            return checkpoint.first_step
        files.check_file(self.path)
        return self.step


@dataclass(frozen=True, kw_only=True)
class Traces:
    """Files that commands have left in a run directory before another one begins.

    Attributes:
        paths: its lock, and its logs with their folder.
        command: content of `RunDirectory.command`; None without one.
    """

    paths: frozenset[Path]
    command: bytes | None


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
    def lock(self) -> Path:
        """Held by the command that is at work here."""
        return self.path / _LOCK

    @property
    def logs(self) -> Path:
        """Folder of the output of ranks above 0, and of the failures of all."""
        return self.path / "ranks"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def command(self) -> Path:
        """The configuration of the command that runs or ran last, whatever came of it; workers read this one."""
        return self.logs / "command.yaml"

    @property
    def passed_over(self) -> Path:
        """Left in an earlier run by a command with resume=false; its repetition then does not resume that run."""
        return self.logs / "passed_over"

    def metrics(self, task: str) -> Path:
        """The last value of every metric, once a command of this task has come to its end: a validation may measure
        other data or parts of them than the training.
        """
        return self.logs / ("metrics.json" if task == "train" else "validation.json")

    def newest_checkpoint(self) -> SavedStep | None:
        """The checkpoint of the highest step, or None; whether it is whole is not looked at."""
        return next(iter(checkpoints(self.checkpoints)), None)

    def newest_intact(self, report: Callable[[str], None] = lambda problem: None) -> SavedStep | None:
        """The checkpoint that a run goes on from: the newest, but of files the newest whole one; None where there is
        nothing. Of directories the loader itself chooses.

        Args:
            report: told what is wrong with files that are passed over.

        Raises:
            CheckpointError: there are files, and none is whole.
        """
        problems: list[str] = []
        for checkpoint in checkpoints(self.checkpoints):
            if checkpoint.path.is_dir():
                return checkpoint
            try:
                checkpoint.check()
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                report(f"{problem}; {checkpoint.path.name}, the one before it, is used")
            return checkpoint
        if problems:
            raise CheckpointError(
                f"{problems[0]}, and there is no complete one before it: start over with resume=false"
            )
        return None

    def has_reached(self, step: int) -> SavedStep | None:
        """A whole checkpoint of this step or a later one, or None; a lossless window counts as its first step."""
        for checkpoint in checkpoints(self.checkpoints):
            if checkpoint.step >= step:
                with contextlib.suppress(CheckpointError):
                    if checkpoint.check() >= step:
                        return checkpoint
        return None

    def holds_run(self) -> bool:
        """True if a run of moe-train has trained here."""
        return (self.config.is_file() and self.logs.is_dir()) or self.newest_checkpoint() is not None

    def record(self, config: Mapping[str, Any]) -> None:
        """Make this the directory's configuration; another one that trained before stays as config.1.yaml, ..."""
        text = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
        if self.config.is_file() and not _holds(self.config, text.encode()):
            self.config.rename(_first_free(self.path, "config.{}.yaml"))
        replace_text(self.config, text)

    def keep_tokenizer(self, content: str) -> None:
        """Leave the tokenizer.json that the run has trained in its directory; its checkpoints hold it, too."""
        replace_text(self.path / TOKENIZER, content)

    def read_metrics(self, task: str) -> dict[str, float]:
        """Return the last value of every metric; none before a command of this task has come to its end."""
        path = self.metrics(task)
        metrics: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        return metrics

    def write_metrics(self, task: str, metrics: Mapping[str, float]) -> None:
        """Leave the last value of every logged metric: the whole file or none. Those of a training stay where its
        command finds nothing left to train, and only validates.
        """
        former = self.read_metrics(task) if task == "train" else {}
        replace_text(self.metrics(task), json.dumps(former | dict(metrics), indent=2) + "\n")

    def check_movable(self) -> bool:
        """True if there is an earlier run to move; what a command left that never trained is none.

        Raises:
            ConfigurationError: the directory holds something else, or more than this run.
        """
        if not self.path.is_dir() or (self._holds_leavings() and not self.holds_run()):
            return False
        where = f"resume=false would move {self} aside"
        if not self.holds_run():
            raise ConfigurationError(
                f"{where}, but it contains no run of moe-train: give another run_name, or empty that folder"
            )
        folders = [path for path in self.path.iterdir() if path.is_dir() and not _OF_DOCTOR.fullmatch(path.name)]
        others = [path.name for path in folders if RunDirectory(path).holds_run()]
        if others or Path.cwd().resolve().is_relative_to(self.path.resolve()):
            what = f"the run {min(others)}" if others else "the folder that this command was started in"
            raise ConfigurationError(f"{where} and with it {what}: give another run_name or hydra.run.dir")
        return True

    def move_aside(self) -> Path | None:
        """Rename the directory to the first free NAME.1, NAME.2, ... where it holds a run; its new place.

        Raises:
            ConfigurationError: it holds something else, or cannot be renamed.
        """
        if not self.check_movable():
            return None
        place = _first_free(self.path.parent, f"{self.path.name}.{{}}")
        try:
            self.path.rename(place)
        except OSError as error:
            raise ConfigurationError(
                f"the earlier run {self.path} cannot be moved to {place.name} ({error.strerror}): "
                "give this run another name with run_name=..."
            ) from error
        return place

    def _holds_leavings(self) -> bool:
        """True if nothing lies here but what a command that never trained, or only examined, may have left."""
        return all(path.name in _LEAVINGS or _OF_DOCTOR.fullmatch(path.name) for path in self.path.iterdir())

    def put_back(self, earlier: Path) -> bool:
        """Undo `move_aside` where nothing has trained since: the earlier run gets its place again; False if it has
        not.
        """
        if self.holds_run() or not self._holds_leavings():
            return False
        shutil.rmtree(self.path)
        earlier.rename(self.path)
        return True

    def traces(self) -> Traces:
        """Return what a command must leave as it was if it is refused."""
        paths = (self.lock, self.logs, *self.logs.rglob("*"))
        command = self.command.read_bytes() if self.command.is_file() else None
        return Traces(paths=frozenset(path for path in paths if path.exists()), command=command)

    def clear(self, before: Traces) -> None:
        """Remove what a refused command made that never trained; what loggers left may be another's.

        Args:
            before: traces of earlier commands, whose logs may be wanted; the folder may even be another's.
        """
        if not self.holds_run():
            for path in sorted(self.traces().paths - before.paths, reverse=True):  # files before their folder
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()
            remove_empty(self.path)
        if before.command is not None:
            self.command.write_bytes(before.command)

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


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty, and then those above it up to the current one."""
    here = Path.cwd()
    with contextlib.suppress(OSError):  # not empty, or not ours
        folder.rmdir()
        for parent in folder.absolute().parents:
            if parent == here or not parent.is_relative_to(here):
                return
            parent.rmdir()


def _holds(path: Path, content: bytes) -> bool:
    with open_regular(path) as file:
        return file.read(len(content) + 1) == content


def _first_free(folder: Path, pattern: str) -> Path:
    """`pattern` with the first of 1, 2, ... that names nothing in the folder yet."""
    return next(path for n in itertools.count(1) if not (path := folder / pattern.format(n)).exists())


def checkpoints(folder: Path) -> list[SavedStep]:
    """Return the checkpoints of a folder in the order of `newest_first`."""
    return [SavedStep(path=path, step=step) for step, path in newest_first(folder)]


@contextmanager
def locked(directory: RunDirectory, party: str | None = None) -> Iterator[bool]:
    """Hold the directory's lock; the kernel lets go of it when this process ends, however it ends.

    Args:
        directory: exists.
        party: address of the rendezvous host that the commands of several machines share; None for a command that
            runs alone.

    Yields whether no other command of the party is there yet.

    Raises:
        ConfigurationError: another command is at work in the directory.
    """
    descriptor, is_first = _acquired(directory, party)
    try:
        yield is_first
    finally:
        os.close(descriptor)


def _acquired(directory: RunDirectory, party: str | None) -> tuple[int, bool]:
    while True:
        descriptor = os.open(directory.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_first = _lock(descriptor, directory, party)
            if directory.lock.exists() and os.path.samestat(os.fstat(descriptor), directory.lock.stat()):
                return descriptor, is_first
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the directory was moved aside meanwhile
        directory.create()


def _lock(descriptor: int, directory: RunDirectory, party: str | None) -> bool:
    deadline = time.monotonic() + _SHARED_AFTER_S
    while not _try(descriptor, fcntl.LOCK_EX):
        is_shared = party is not None and _try(descriptor, fcntl.LOCK_SH)
        owner = _owner(descriptor)  # under a lock, since NFS reads anew what another machine has written only there
        if is_shared and owner.get("party") == party:
            return False
        if is_shared:
            _try(descriptor, fcntl.LOCK_UN)
        if party is None or time.monotonic() > deadline:
            raise ConfigurationError(
                f"{directory} is in use by process {owner.get('pid', '?')} on {owner.get('host', '?')}: wait for its "
                "end, or give this run another name with run_name=... (and resume=CHECKPOINT to start from one of "
                "that run)"
            )
        time.sleep(0.1)
    own = {"pid": os.getpid(), "host": socket.gethostname(), "party": party}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(own).encode(), 0)
    if party is not None:
        _try(descriptor, fcntl.LOCK_SH)
    return True


def _try(descriptor: int, kind: int) -> bool:
    """Lock a file; True if the lock was free. On a file system without locks it is always free."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _owner(descriptor: int) -> Mapping[str, object]:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except ValueError:  # it is being written
        return {}
    return owner if isinstance(owner, Mapping) else {}
