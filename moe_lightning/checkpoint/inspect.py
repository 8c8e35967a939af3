"""Inspection of checkpoints and removal of abandoned snapshot buffers, for `moe-ckpt`.

Sizes, verification of whole directories, export; and removal of arenas that no agent serves and no process writes,
which runs leave in memory when their agents are killed as well.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor

from moe_lightning.checkpoint.agent_handle import LOCK, LOG, STATUS, STOP, lock_record
from moe_lightning.checkpoint.arena import ARENAS, MEMORY, NAMED, Arena, is_own
from moe_lightning.checkpoint.directory import (
    RECORD,
    has_manifest,
    headings,
    run_record_problem,
    unreadable,
)
from moe_lightning.checkpoint.files import SUFFIX, read_checkpoint, read_file
from moe_lightning.checkpoint.loader import Checkpoint, find_newest
from moe_lightning.checkpoint.manifest import Manifest
from moe_lightning.checkpoint.names import newest_first
from moe_lightning.checkpoint.storage import storage_of
from moe_lightning.checkpoint.storage.interface import Place, exists
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.files import replacing, save_safetensors
from moe_lightning.state.pieces import OBJECT, is_moment, is_replayed

T = TypeVar("T")

_MOST_LOOKS = 10


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of verifying one checkpoint.

    Attributes:
        problem: None where it is whole.
        is_pruned: it was deleted, by a run that goes on, while it was looked at.
    """

    name: str
    problem: str | None
    is_pruned: bool = False

    @property
    def is_whole(self) -> bool:
        return self.problem is None and not self.is_pruned


def resolve(path: Place, report: Callable[[str], None] | None = None) -> Checkpoint:
    """The checkpoint that a path means: a checkpoint directory itself, or the newest whole one in a directory of them.

    Args:
        path: of either.
        report: called with a sentence for every damaged one that is passed over.

    Raises:
        ConfigurationError: there is no such directory, or nothing in it.
        CheckpointError: there are checkpoints, but none is whole.
    """
    if not storage_of(path).is_dir(path):
        raise ConfigurationError(
            f"{path} is not a directory of checkpoints: give the directory of a run, or of one or several checkpoints"
        )
    if has_manifest(path):
        return Checkpoint(path)
    found = find_newest(path)
    if found.checkpoint is not None:
        if report is not None:
            for problem in found.problems:
                report(problem)
        return found.checkpoint
    if found.problems:
        raise CheckpointError(
            f"{path} holds no complete checkpoint: {found.problems[0]}; restore one from a copy, or name another "
            "directory"
        )
    raise _none_in(path)


def _none_in(path: Place) -> ConfigurationError:
    """The error of a directory without checkpoints, which may hold runs that have some."""
    runs = sorted(path.glob("*/checkpoints/step-*")) if isinstance(path, Path) else []
    cure = f"give a run in it, such as {runs[-1].parents[1]}" if runs else "name a checkpoint, or the directory of some"
    return ConfigurationError(f"{path} holds no checkpoint: {cure}")


def scope_bytes(manifest: Manifest) -> dict[str, int]:
    """Payload of the experts by kind of state, of frozen experts' weights under `replay`, and of everything else under
    `dense` and `objects`."""
    sizes: dict[str, int] = {}
    for piece in manifest.stored:
        parts = piece.key.split("/")
        rest = "objects" if piece.dtype == OBJECT else "replay" if is_replayed(piece.key) else "dense"
        scope = parts[3] if parts[0] == "expert" else rest
        sizes[scope] = sizes.get(scope, 0) + piece.nbytes
    return dict(sorted(sizes.items()))


def verify_all(path: Place) -> list[Verdict]:
    """Verify a checkpoint, or the checkpoint files of a directory and then its checkpoint directories.

    Raises:
        ConfigurationError: there is nothing to verify.
    """
    verdicts = [Verdict(name=found.name, problem=_problem_of_file(found)) for found in checkpoint_files(path)]
    verdicts += verify_directories(path)
    if not verdicts:
        raise _none_in(path)
    return verdicts


def verify_directories(path: Place) -> list[Verdict]:
    """Verify a checkpoint directory, or those in a directory, newest first; damaged manifests come last, and then the
    record of the directory's run where it is damaged. No verdicts where there is none.
    """
    for _ in range(_MOST_LOOKS):
        verdicts = [_verdict(found) for found in _directories(path)]
        if not all(verdict.is_pruned for verdict in verdicts):
            break  # else newer ones have come meanwhile
    record_problem = run_record_problem(path) if verdicts else None
    return verdicts if record_problem is None else [*verdicts, Verdict(name=RECORD, problem=record_problem)]


def _directories(path: Place) -> list[Place]:
    """The checkpoint that a path is, or those in it."""
    if has_manifest(path):
        return [path]
    return [*(found for found, _ in headings(path)), *unreadable(path)]


def _verdict(path: Place) -> Verdict:
    try:
        checkpoint = Checkpoint(path)
        checkpoint.verify()
        checkpoint.check_objects()
    except CheckpointError as error:
        # Pruning removes the manifest before anything else.
        is_pruned = not has_manifest(path)
        return Verdict(name=path.name, problem=None if is_pruned else str(error), is_pruned=is_pruned)
    return Verdict(name=path.name, problem=None)


def export(checkpoint: Checkpoint, target: Place) -> int:
    """Write the tensors into one safetensors file, and beside it the tokenizer that the run has trained
    (`tokenizer_beside`); returns the tensors' bytes.

    The checkpoint is verified first; objects are left out. Of a window whose steps are run again the model is written
    as it was after the first of them, without optimizer states: nothing else is whole.

    Raises:
        ConfigurationError: the target exists, or there is no tensor.
        CheckpointError: the checkpoint is damaged.
    """
    _check_free(target)
    checkpoint.verify()
    values = checkpoint.read_object("trainer") if "trainer" in checkpoint.keys("trainer") else {}
    left_out = {piece.key for piece in checkpoint.manifest.stored if piece.dtype == OBJECT or is_replayed(piece.key)}
    keys = [key for key in checkpoint.keys("") if key not in left_out]
    if checkpoint.first_step < checkpoint.step:
        keys = [key for key in keys if not is_moment(key)]
    if not keys:
        raise ConfigurationError(f"{checkpoint.path.name} has no tensors to export")
    tensors: dict[str, torch.Tensor] = {key: checkpoint.read_first(key) for key in keys}
    metadata = {"step": str(checkpoint.first_step), "run": checkpoint.manifest.run}
    return _write(tensors, target, metadata, trained_tokenizer(values))


def export_file(path: Path, target: Place) -> int:
    """The same for the model's tensors of a checkpoint file."""
    _check_free(target)
    values = read_file(path)
    tensors = model_tensors(values, path)
    if not tensors:
        raise ConfigurationError(f"{path.name} has no tensors to export")
    return _write(tensors, target, {"step": str(step_of_file(values, path))}, trained_tokenizer(values))


def tokenizer_beside(target: Place) -> Place:
    """Return the path of an exported tokenizer: model.tokenizer.json beside model.safetensors."""
    return target.with_suffix(".tokenizer.json")


def _check_free(target: Place) -> None:
    if exists(storage_of(target), target):
        raise ConfigurationError(f"{target} exists already: name another file")


def _write(tensors: dict[str, torch.Tensor], target: Place, metadata: dict[str, str], tokenizer: str | None) -> int:
    if tokenizer is not None:
        _check_free(tokenizer_beside(target))
    if isinstance(target, Path):
        with replacing(target) as staged:
            save_safetensors(tensors, staged, metadata)
    else:
        storage_of(target).write(target, [save(tensors, metadata=metadata)])
    if tokenizer is not None:
        storage_of(target).put(tokenizer_beside(target), tokenizer.encode())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _problem_of_file(path: Path) -> str | None:
    try:
        read_file(path)
    except CheckpointError as error:
        return str(error)
    return None


_OURS = re.compile(
    rf"(rank|held|parity)[\w.-]+\.(arena|copy|parity|alive|new)|\.?({LOCK}|{LOG}|{STATUS}|{STOP})(\.[0-9a-f]+\.new)?"
)


@dataclass(frozen=True, kw_only=True)
class Orphan:
    """A directory of arenas whose agent and ranks are dead.

    Attributes:
        nbytes: that it takes.
        root: where its checkpoints were written; None where that is not recorded.
        unwritten: step of its newest snapshot that no checkpoint holds; None where there is none.
        problems: a sentence for each damaged arena.
    """

    path: Path
    nbytes: int
    root: str | None
    unwritten: int | None
    problems: tuple[str, ...]


def orphans(rooms: Iterable[Path] = ()) -> list[Orphan]:
    """Those of this user in shared memory and in other rooms, such as directories of checkpoints."""
    found = []
    for room in dict.fromkeys([MEMORY, *rooms]):
        for path in sorted(room.glob(f"{NAMED}*")):
            with suppress(FileNotFoundError):  # another process deletes it meanwhile
                if is_own(path) and ((path / LOCK).is_file() or any(path.glob(ARENAS))):
                    with _claimed(path) as is_free:
                        if is_free:
                            found.append(_described(path))
    return found


def remove(orphan: Orphan) -> bool:
    """Delete its files, and the directory if nothing else lies in it; False if a process uses it by now."""
    with _claimed(orphan.path) as is_free:
        if not is_free:
            return False
        for name in os.listdir(orphan.path):
            path = orphan.path / name
            if _OURS.fullmatch(name) and not path.is_symlink() and path.is_file():
                path.unlink()
        if not os.listdir(orphan.path):
            orphan.path.rmdir()
    return True


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Lock all locks of the directory for the context; yield False if another process holds one."""
    with ExitStack() as stack:
        try:
            for lock in [path / LOCK, *path.glob("*.alive")]:
                fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or not ours to look at
            yield False
        else:
            yield True


def _described(path: Path) -> Orphan:
    waiting: list[int] = []
    problems: list[str] = []
    for file in sorted(path.glob(ARENAS)):
        try:
            arena = Arena(file)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            waiting += arena.state.waiting
            arena.close()
    return Orphan(
        path=path,
        nbytes=sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        root=lock_record(path).get("root"),
        unwritten=max(waiting, default=None),
        problems=tuple(problems),
    )


def checkpoint_values(path: Place) -> dict[str, Any]:
    """Read Lightning's values of a checkpoint, without tensors.

    The path is a file, a checkpoint directory, or a directory of which the newest readable checkpoint is taken. Only
    what is read is compared with a checksum.

    Raises:
        CheckpointError: there is none.
        OSError: the storage failed.
    """
    if isinstance(path, Path) and path.is_file():
        return read_checkpoint(path)
    candidates = [path] if has_manifest(path) else [found for found, _ in headings(path)]
    problem: CheckpointError | None = None
    for directory in candidates:
        try:
            values: dict[str, Any] = Checkpoint(directory).read_object("trainer")
            return values
        except CheckpointError as error:
            problem = problem or error
    raise problem or CheckpointError(f"{path} holds no checkpoint")


def trained_tokenizer(values: Any) -> str | None:
    """The tokenizer.json that the run of a checkpoint has trained, from `checkpoint_values`; None where it has not."""
    return _recorded_by_data(values, "trained_tokenizer", str)


def chat_template(values: Any) -> str | None:
    """The chat template that no file of a run's tokenizer has, from `checkpoint_values`; None where one has it."""
    return _recorded_by_data(values, "chat_template", str)


def end_of_text(values: Any) -> int | None:
    """The token that ended the answers or documents of a run's data, from `checkpoint_values`; None without one."""
    return _recorded_by_data(values, "end_of_text", int)


def tokenizer_origin(values: Any) -> str | None:
    """The tokenizer that a run's data named, from `checkpoint_values`; None where they named no file."""
    return _recorded_by_data(values, "tokenizer_origin", str)


def _recorded_by_data(values: Any, name: str, kind: type[T]) -> T | None:
    states = (value for value in values.values() if isinstance(value, Mapping)) if isinstance(values, Mapping) else ()
    found = next((state[name] for state in states if name in state), None)
    return found if isinstance(found, kind) else None


def checkpoint_files(path: Place) -> list[Path]:
    """The checkpoint file that a path is, or those in a directory, newest first; a URL holds none.

    If all have names of LatestCheckpoint, their steps order them, since a copy of a directory has other times.
    """
    if not isinstance(path, Path):
        return []
    if path.is_dir():
        files = [file for file in path.glob(f"*{SUFFIX}") if file.is_file()]
        named = [file for _, file in newest_first(path) if file.is_file()]
        return named if len(named) == len(files) else sorted(files, key=_written_at, reverse=True)
    return [path] if path.is_file() else []


def _written_at(file: Path) -> int:
    return file.stat().st_mtime_ns


def newest_files(path: Place) -> list[Path]:
    """The checkpoint files that a path means, newest first: itself, or those in a directory that are newer than its
    checkpoint directories.
    """
    named = [found for _, found in newest_first(path)] if isinstance(path, Path) else []
    if any(found.is_dir() for found in named):
        return list(takewhile(Path.is_file, named))
    return checkpoint_files(path)


def newest_file(path: Place) -> Path | None:
    """The checkpoint file that a path means; None where it means a checkpoint directory, or holds nothing."""
    return next(iter(newest_files(path)), None)


def step_of_file(values: Mapping[str, Any], path: Path) -> int:
    """Optimizer steps taken before a checkpoint file was written.

    Raises:
        CheckpointError: Lightning did not write it.
    """
    step = values.get("global_step", 0)
    if not isinstance(step, int):
        raise CheckpointError(f"{path} has no global_step: Lightning did not write it, give the path of a .ckpt file")
    return step


def model_tensors(values: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """The model's tensors of a checkpoint file; names of one tensor get a copy each.

    Raises:
        CheckpointError: one is no dense tensor.
    """
    found: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, value in values["state_dict"].items():
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_meta:
                raise CheckpointError(
                    f"{path}: {name} is sparse or has no values, and only dense tensors are exported: train without it"
                )
            storage = value.untyped_storage().data_ptr()
            found[name] = value.clone() if storage in storages else value.contiguous()
            storages.add(storage)
    return found


def dense_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, sparse ones left out."""
    return sum(tensor.nbytes for tensor in tensors if tensor.layout == torch.strided)
