"""What ranks tell each other when a user saves with `torch.distributed.checkpoint`, taken apart and put together again.

Exactly the classes below travel, each with fields of the types that it declares; a failure of a rank travels as words.
What is made of a message is data that torch's planners look at: none of the constructors runs anything of a sender's.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import traceback
import types
from collections.abc import Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

_PACKAGE = "torch.distributed.checkpoint"
_CLASSES = {
    "api": ("CheckpointException",),
    "filesystem": ("_StorageInfo", "_StoragePrefix"),
    "metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    ),
    "planner": (
        "BytesIOWriteData",
        "LoadItemType",
        "LoadPlan",
        "ReadItem",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    ),
    "storage": ("WriteResult",),
}
_FAILURE = "failure"
_FRAME = [str, int, str, str]  # file, line, function, code
_CONSTANTS = {
    kind.__name__: {str(value): value for value in vars(torch).values() if type(value) is kind}
    for kind in (torch.layout, torch.memory_format)
}


def taken_apart(value: Any) -> tuple[str, list[Any]] | None:
    """Name and fields of a record that may travel; None for anything else."""
    kind = type(value)
    if kind in (torch.layout, torch.memory_format):
        return kind.__name__, [str(value)]
    if _is_failure(value):
        error, stack = value
        frames = [[frame.filename, frame.lineno or 0, frame.name, frame.line or ""] for frame in stack]
        return _FAILURE, [f"{type(error).__name__}: {error}", frames]
    if not kind.__module__.startswith(_PACKAGE) or _classes().get(kind.__name__) is not kind:
        return None
    if issubclass(kind, Enum):
        return kind.__name__, [value.name]
    if issubclass(kind, BaseException):
        return kind.__name__, [str(value.args[0]), value.failures]
    return kind.__name__, [getattr(value, field.name) for field in dataclasses.fields(value)]


def put_together(name: str, fields: list[Any]) -> Any:
    """The record of a message.

    Raises:
        ValueError: there is no such record, or its fields are none of it.
    """
    if name in _CONSTANTS:
        return _CONSTANTS[name][fields[0]]
    if name == _FAILURE:
        words, frames = fields
        if not _fits(frames, list[list[int | str]]) or any(list(map(type, frame)) != _FRAME for frame in frames):
            raise ValueError("a stack in it is none")
        return RuntimeError(str(words)), traceback.StackSummary.from_list(map(tuple, frames))
    kind = _classes().get(name)
    if kind is None:
        raise ValueError(f"it holds a record {name!r}, which is not known")
    if issubclass(kind, Enum):
        return kind[fields[0]]
    if issubclass(kind, BaseException):
        step, failures = fields
        if not _fits(failures, dict[int, Any]) or not all(map(_is_failure, failures.values())):
            raise ValueError("a failure in it is none")
        return kind(str(step), failures)
    hints = _hints(name)
    if len(fields) != len(hints) or not all(map(_fits, fields, hints.values())):
        raise ValueError(f"a field of its {name} is of another type")
    named = dict(zip(hints, fields, strict=True))
    if any(_leads_away(named.get(field, "")) for field in ("prefix", "relative_path")):
        raise ValueError(f"a path of its {name} leads out of the checkpoint")
    return kind(**named)


@functools.cache
def _classes() -> dict[str, type[Any]]:
    """Imported at the first use: few runs save in this format."""
    found: dict[str, type[Any]] = {}
    for module, names in _CLASSES.items():
        imported = __import__(f"{_PACKAGE}.{module}", fromlist=names)
        found |= {name: getattr(imported, name) for name in names}
    return found


@functools.cache
def _hints(name: str) -> dict[str, Any]:
    kind = _classes()[name]
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of exactly the type that a field declares."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is dict:
        return type(value) is dict and all(_fits(k, arguments[0]) and _fits(v, arguments[1]) for k, v in value.items())
    if origin in (list, Sequence):
        return type(value) is list and all(_fits(item, arguments[0]) for item in value)
    if hint is os.PathLike:
        return isinstance(value, PurePath)
    return type(value) is hint


def _is_failure(value: Any) -> bool:
    """Whether it is an exception with the stack that it came from, as torch sends them."""
    is_pair = type(value) is tuple and len(value) == 2
    return is_pair and isinstance(value[0], BaseException) and type(value[1]) is traceback.StackSummary


def _leads_away(path: str) -> bool:
    return path.startswith("/") or ".." in path.split("/")
