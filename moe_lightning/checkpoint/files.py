"""Lightning checkpoint files (`.ckpt`), for `moe-ckpt`: which one a path means, what it holds, whether it is whole.

torch writes a file as a zip archive with a CRC-32 for every tensor's bytes; loading does not compare them.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_lightning.checkpoint.full_state import read_checkpoint
from moe_lightning.checkpoint.manifest import MANIFEST
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


def checkpoint_files(path: Path) -> list[Path]:
    """The checkpoint file that a path is, or those in a directory, newest first; none where it holds none."""
    if path.is_dir():
        return sorted((f for f in path.glob(f"*{SUFFIX}") if f.is_file()), key=lambda f: -f.stat().st_mtime_ns)
    return [path] if path.is_file() else []


def newest_file(path: Path) -> Path | None:
    """The newest checkpoint file that a path means; None where it means checkpoint directories, or holds nothing."""
    if path.is_dir() and ((path / MANIFEST).exists() or any(path.glob(f"step-*/{MANIFEST}"))):
        return None
    return next(iter(checkpoint_files(path)), None)


def summarise_file(path: Path) -> FileSummary:
    """Sizes and step of a checkpoint file.

    Raises:
        CheckpointError: it is damaged, or Lightning did not write it.
    """
    checkpoint = read_checkpoint(path)
    model = list(_tensors(checkpoint["state_dict"]))
    step = checkpoint.get("global_step", 0)
    if not isinstance(step, int):
        raise CheckpointError(f"{path} has no global_step: Lightning did not write it, give the path of a .ckpt file")
    return FileSummary(
        name=path.name,
        step=step,
        tensors=len(model),
        model_bytes=sum(tensor.nbytes for tensor in model),
        optimizer_bytes=sum(tensor.nbytes for tensor in _tensors(checkpoint.get("optimizer_states"))),
        disk_bytes=path.stat().st_size,
    )


def verify_file(path: Path) -> None:
    """Compare everything in a checkpoint file with its CRC-32.

    Raises:
        CheckpointError: it is damaged, or Lightning did not write it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} in it does not match")
    read_checkpoint(path)


def model_tensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """The model's tensors whose names begin with a prefix, verified; names of one tensor get a copy each.

    Raises:
        CheckpointError: the file is damaged.
    """
    verify_file(path)
    found: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, value in read_checkpoint(path)["state_dict"].items():
        if isinstance(value, Tensor) and name.startswith(prefix):
            storage = value.untyped_storage().data_ptr()
            found[name] = value.clone() if storage in storages else value.contiguous()
            storages.add(storage)
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(entry)
