"""Single-file checkpoints (`.ckpt`) of Lightning, written durably with a checksum.

For `moe-ckpt`: the file that a path means, its content, and its verification.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from moe_lightning.checkpoint.checksum import ChecksummedFile, check_file
from moe_lightning.checkpoint.directory import directories, has_manifest, headings
from moe_lightning.checkpoint.full_state import read_checkpoint
from moe_lightning.checkpoint.loader import Checkpoint, tensors_in
from moe_lightning.checkpoint.storage.interface import Place, sync_directory
from moe_lightning.errors import CheckpointError

SUFFIX = ".ckpt"


@dataclass(frozen=True, kw_only=True)
class FileSummary:
    """One checkpoint file in numbers.

    Attributes:
        step: optimizer steps taken.
        tensors: of the model.
        model_bytes: of these.
        optimizer_bytes: of the optimizers' states.
        disk_bytes: of the file.
    """

    name: str
    step: int
    tensors: int
    model_bytes: int
    optimizer_bytes: int
    disk_bytes: int


def write_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint file with its checksum, whole or not at all; it is on disk when this returns.

    torch and stock Lightning read it.


    Raises:
        OSError: the storage failed; what was written is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left_over in path.parent.glob(f".{path.name}.*.new"):  # by a process that died while it wrote
        left_over.unlink(missing_ok=True)
    staged = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    try:
        with open(staged, "wb") as file:
            target = ChecksummedFile(file)
            try:
                torch.save(checkpoint, cast(IO[bytes], target))  # it needs write and flush only
            except RuntimeError as error:
                raise target.error or error from error
            target.finish()
        os.rename(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def read_file(path: Path) -> dict[str, Any]:
    """A checkpoint file, compared with its checksums and read without unpickling code.

    Raises:
        CheckpointError: it is missing or damaged, or Lightning did not write it.
    """
    check_file(path)
    return read_checkpoint(path)


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
    states = (value for value in values.values() if isinstance(value, Mapping)) if isinstance(values, Mapping) else ()
    found = next((state["trained_tokenizer"] for state in states if "trained_tokenizer" in state), None)
    return found if isinstance(found, str) else None


def checkpoint_files(path: Place) -> list[Path]:
    """The checkpoint file that a path is, or those in a directory, newest first; a URL holds none."""
    if not isinstance(path, Path):
        return []
    if path.is_dir():
        return sorted((f for f in path.glob(f"*{SUFFIX}") if f.is_file()), key=lambda f: -f.stat().st_mtime_ns)
    return [path] if path.is_file() else []


def newest_file(path: Place) -> Path | None:
    """The newest checkpoint file that a path means; None where it means checkpoint directories, or holds nothing."""
    if has_manifest(path) or any(has_manifest(found) for found in directories(path)):
        return None
    return next(iter(checkpoint_files(path)), None)


def summarise_file(path: Path) -> FileSummary:
    """Sizes and step of a checkpoint file.

    Raises:
        CheckpointError: it is damaged, or Lightning did not write it.
    """
    checkpoint = read_checkpoint(path)
    model = list(tensors_in(checkpoint["state_dict"]))
    step = checkpoint.get("global_step", 0)
    if not isinstance(step, int):
        raise CheckpointError(f"{path} has no global_step: Lightning did not write it, give the path of a .ckpt file")
    return FileSummary(
        name=path.name,
        step=step,
        tensors=len(model),
        model_bytes=_nbytes(model),
        optimizer_bytes=_nbytes(tensors_in(checkpoint.get("optimizer_states"))),
        disk_bytes=path.stat().st_size,
    )


def model_tensors(values: Mapping[str, Any], path: Path, prefix: str) -> dict[str, Tensor]:
    """The model's tensors of a checkpoint file whose names begin with a prefix; names of one tensor get a copy each.

    Raises:
        CheckpointError: one is no dense tensor.
    """
    found: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, value in values["state_dict"].items():
        if isinstance(value, Tensor) and str(name).startswith(prefix):
            if value.layout != torch.strided or value.is_meta:
                raise CheckpointError(f"{path}: {name} is sparse or has no values, and only dense tensors are exported")
            storage = value.untyped_storage().data_ptr()
            found[name] = value.clone() if storage in storages else value.contiguous()
            storages.add(storage)
    return found


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.layout == torch.strided)
