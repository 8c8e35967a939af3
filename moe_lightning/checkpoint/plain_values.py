"""Tensors and plain values from archives of torch, whoever wrote these: no code is unpickled, and nothing in one takes
more memory than the archive itself, but for tensors that repeat their numbers, within a limit.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_lightning.checkpoint.sealing import check_archive
from moe_lightning.errors import CheckpointError
from moe_lightning.files import open_regular

_EXPANDED_BYTES = 1 << 30
"""Limit for all expanded tensors of an archive that is smaller itself."""


def load_plain(source: Path | bytes, origin: str, advice: str = "") -> Any:
    """Load an archive that torch wrote. Tensors of a file are mapped, so a rank reads only what it keeps.

    Args:
        origin: name for messages.
        advice: end of the message about objects.

    Raises:
        CheckpointError: it is damaged, holds objects that only unsafe unpickling could read, or tensors that need far
            more memory than it has bytes.
        OSError: a file that is missing, or no regular one.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else open_regular(source) as file:
        size = file.seek(0, io.SEEK_END)
        check_archive(file, size, origin)
    is_file = isinstance(source, Path)
    try:
        value = torch.load(
            source if isinstance(source, Path) else io.BytesIO(source),
            map_location="cpu" if is_file else None,
            weights_only=True,
            mmap=is_file,
        )
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{origin} holds more than tensors and plain values ({reason}): it is not loaded{advice}"
        ) from error
    except Exception as error:  # a pickle that somebody wrote by hand raises what it likes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{origin} is damaged or no checkpoint: {reason}") from error
    _check_memory(value, size, origin)
    return value


def load_trusted(path: Path, origin: str) -> Any:
    """Load an archive with any objects in it, which may run code of whoever wrote it.

    Args:
        origin: name for messages.

    Raises:
        CheckpointError: it is damaged, or the classes of its objects are not known here.
        OSError: a file that is missing.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except (AttributeError, ImportError) as error:
        raise CheckpointError(
            f"{origin} holds an object of a class that cannot be imported here ({error}): import what defines it, or "
            "load the file where it was written"
        ) from error
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{origin} is damaged or no checkpoint: {reason}") from error


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested mappings, lists and tuples; each container is looked into once."""
    seen: set[int] = set()
    left = [value]
    while left:
        entry = left.pop()
        if isinstance(entry, Tensor):
            yield entry
        elif isinstance(entry, Mapping | list | tuple) and id(entry) not in seen:
            seen.add(id(entry))
            left += reversed(list(entry.values() if isinstance(entry, Mapping) else entry))


def _check_memory(value: Any, size: int, origin: str) -> None:
    """Refuse tensors that repeat a few numbers more often than anybody needs."""
    dense = (tensor for tensor in tensors_in(value) if tensor.layout == torch.strided)
    sizes = ((tensor.nbytes, 0 if tensor.is_meta else tensor.untyped_storage().nbytes()) for tensor in dense)
    expanded, most = sum(nbytes for nbytes, held in sizes if nbytes > held), max(size, _EXPANDED_BYTES)
    if expanded > most:
        raise CheckpointError(
            f"{origin} has {size} bytes, and expanded tensors in it stand for {expanded}: at most {most} are read"
        )
