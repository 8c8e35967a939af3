"""Collectives for objects and named tensors without pickle, and agreement of ranks on plans and versions.

A received message can be wrong, but it cannot run code. A message is a JSON tree and, behind it, the raw bytes of
tensors, arrays and byte strings in the order of the tree. JSON's own values stand for themselves; everything else is a
node {"tag": content}:

    magic "MOELOBJ1" | bytes of the tree, u64 | tree | bytes

Types are matched exactly: an instance of a subclass is refused. The only classes are those that
`torch.distributed.checkpoint` exchanges in a save, each with fields of its declared types; an error travels as text.
torch's own object collectives (`all_gather_object` and others), which unpickle and which users' modules and metrics
call, use the same codec in a process that trains with others.

Ranks derive placements, shadows and quotas from the same numbers without communication. A rank with another result
(another library, another file) would send rows that no rank expects, so a hash of its plan is sent with its counts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import platform
import re
import sys
import traceback
import types
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import IO, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from moe_lightning.compat import private_torch
from moe_lightning.errors import ConfigurationError, ForeignMessageError
from moe_lightning.parallel.context import World, broadcast_
from moe_lightning.parallel.exchange import all_gather_counts

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
    """Return True if a value is of exactly the type that a field declares."""
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
    """Return True for an exception with the stack that it came from, as torch sends them."""
    is_pair = type(value) is tuple and len(value) == 2
    return is_pair and isinstance(value[0], BaseException) and type(value[1]) is traceback.StackSummary


def _leads_away(path: str) -> bool:
    return path.startswith("/") or ".." in path.split("/")


MAGIC = b"MOELOBJ1"
MAX_BYTES = 1 << 31
"""Of a whole message: what a receiver allocates because a sender says so."""

MAX_TREE_BYTES = 1 << 26
"""Of the tree, whose Python objects take many times its size."""

MAX_DEPTH = 100

_DTYPE_NAME = re.compile(r"torch\.(bool|bfloat16|complex\d+|float\d+(_e\dm\d\w*)?|u?int(8|16|32|64))")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and _DTYPE_NAME.fullmatch(str(dtype))
}
_ARRAY_DTYPE = re.compile(r"[<>|][biufcSU]\d{1,9}|[<>][mM]8(\[\d{0,9}[A-Za-z]{1,2}\])?")
_SENDABLE = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, Path, tensors, NumPy arrays and numbers"
)


def encode(value: Any) -> bytes:
    """The message of an object.

    Raises:
        ConfigurationError: it holds something else than plain values and tensors, is nested deeper than `MAX_DEPTH`
            or larger than a message may be.
    """
    blobs: list[bytes] = []
    try:
        tree = json.dumps(_node(value, blobs, 0), separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"an object cannot be sent to other ranks ({error}): send {_SENDABLE}") from None
    size = len(MAGIC) + 8 + len(tree) + sum(map(len, blobs))
    if len(tree) > MAX_TREE_BYTES or size > MAX_BYTES:
        raise ConfigurationError(
            f"an object of {size} bytes, {len(tree)} of them plain values, cannot be sent to other ranks (at most "
            f"{MAX_BYTES} and {MAX_TREE_BYTES}): send large data as tensors by torch.distributed.broadcast"
        )
    return b"".join((MAGIC, len(tree).to_bytes(8, "little"), tree, *blobs))


def decode(
    message: bytes | bytearray | memoryview, device: torch.device | None = None, *, sender: str = "another rank"
) -> Any:
    """The object of a message, whoever wrote it.

    Args:
        device: of tensors that the sender had on an accelerator; None: the host.
        sender: who is named where the message is none of ours.

    Raises:
        ForeignMessageError: this codec did not write it, or it was damaged.
    """
    try:
        return _read(memoryview(message), device)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, MemoryError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ForeignMessageError(
            f"a message of {sender} is not one of moe-lightning's ({reason}): nothing of it is used; use a private "
            "network, and the same version on all ranks"
        ) from None


def _read(view: memoryview, device: torch.device | None) -> Any:
    start = len(MAGIC) + 8
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise ValueError("it begins otherwise")
    end = start + int.from_bytes(view[len(MAGIC) : start], "little")
    if not start <= end <= min(len(view), start + MAX_TREE_BYTES):
        raise ValueError(f"its tree ends at byte {end} of {len(view)}")
    reader = _Reader(view[end:], device)
    value = reader.read(json.loads(bytes(view[start:end])), 0)
    reader.check_end()
    return value


# ---------------------------------------------------------------------- writing


def _node(value: Any, blobs: list[bytes], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ConfigurationError(
            f"an object that is nested deeper than {MAX_DEPTH} levels cannot be sent to other ranks: flatten it"
        )
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_node(item, blobs, depth + 1) for item in value]
    if (record := taken_apart(value)) is not None:
        return {"record": [record[0], *_items(record[1], blobs, depth)]}
    if kind in _WRITERS:
        tag, content = _WRITERS[kind](value, blobs, depth)
        return {tag: content}
    if isinstance(value, np.generic) and _is_plain(value.dtype):
        return {"number": _array_content(np.asarray(value), blobs)}
    if isinstance(value, pathlib.PurePath) and kind.__module__.split(".")[0] == "pathlib":
        return {"path": str(value)}
    raise ConfigurationError(
        f"an object of type {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks, for nothing that "
        f"travels is unpickled: send {_SENDABLE}"
    )


def _items(value: Any, blobs: list[bytes], depth: int) -> list[Any]:
    return [_node(item, blobs, depth + 1) for item in value]


def _pairs(value: dict[Any, Any], blobs: list[bytes], depth: int) -> list[Any]:
    return [[_node(key, blobs, depth + 1), _node(item, blobs, depth + 1)] for key, item in value.items()]


def _blob(value: bytes | bytearray, blobs: list[bytes]) -> int:
    blobs.append(bytes(value))
    return len(value)


def _tensor_content(value: Tensor, blobs: list[bytes]) -> list[Any]:
    name = str(value.dtype).removeprefix("torch.")
    if value.layout is not torch.strided or name not in _DTYPES or value.is_meta:
        raise ConfigurationError(
            f"a tensor of {value.dtype} and {value.layout} on {value.device} cannot be sent to other ranks: "
            "send dense tensors that hold data"
        )
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    _blob(flat.view(torch.uint8).numpy().tobytes(), blobs)
    return [name, list(value.shape), value.device.type != "cpu"]


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return _ARRAY_DTYPE.fullmatch(dtype.str) is not None


def _array_content(value: np.ndarray[Any, Any], blobs: list[bytes]) -> list[Any]:
    if not _is_plain(value.dtype):
        raise ConfigurationError(f"a NumPy array of {value.dtype} cannot be sent to other ranks: send numbers or text")
    _blob(value.tobytes(), blobs)
    return [value.dtype.str, list(value.shape)]


_Writer = Callable[[Any, list[bytes], int], tuple[str, Any]]
_WRITERS: dict[type, _Writer] = {
    dict: lambda v, blobs, depth: ("dict", _pairs(v, blobs, depth)),
    OrderedDict: lambda v, blobs, depth: ("ordered", _pairs(v, blobs, depth)),
    Counter: lambda v, blobs, depth: ("counter", _pairs(v, blobs, depth)),
    tuple: lambda v, blobs, depth: ("tuple", _items(v, blobs, depth)),
    set: lambda v, blobs, depth: ("set", _items(v, blobs, depth)),
    frozenset: lambda v, blobs, depth: ("frozenset", _items(v, blobs, depth)),
    bytes: lambda v, blobs, _: ("bytes", _blob(v, blobs)),
    bytearray: lambda v, blobs, _: ("bytearray", _blob(v, blobs)),
    complex: lambda v, _, __: ("complex", [v.real, v.imag]),
    torch.Size: lambda v, _, __: ("size", list(v)),
    torch.dtype: lambda v, _, __: ("dtype", str(v).removeprefix("torch.")),
    torch.device: lambda v, _, __: ("device", str(v)),
    Tensor: lambda v, blobs, _: ("tensor", _tensor_content(v, blobs)),
    np.ndarray: lambda v, blobs, _: ("array", _array_content(v, blobs)),
}


# ---------------------------------------------------------------------- reading


class _Reader:
    """Builds the object of a tree; the bytes behind it are taken from front to back."""

    def __init__(self, data: memoryview, device: torch.device | None) -> None:
        self._data, self._device = data, device
        self._position = 0

    def check_end(self) -> None:
        if self._position != len(self._data):
            raise ValueError(f"{len(self._data) - self._position} bytes belong to nothing")

    def read(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, list):
            return [self.read(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            return node
        ((tag, content),) = node.items()
        if tag in _MAPPINGS:
            pairs = [(self.read(key, depth + 1), self.read(item, depth + 1)) for key, item in _list(content)]
            return _MAPPINGS[tag](pairs)
        if tag in _COLLECTIONS:
            return _COLLECTIONS[tag](self.read(item, depth + 1) for item in _list(content))
        if tag == "record":
            name, *fields = _list(content)
            return put_together(name, [self.read(field, depth + 1) for field in fields])
        if tag in _PLAIN:
            return _PLAIN[tag](content)
        if tag in ("bytes", "bytearray"):
            taken = self._take(content)
            return bytes(taken) if tag == "bytes" else bytearray(taken)
        if tag == "tensor":
            return self._tensor(*_list(content))
        if tag in ("array", "number"):
            array = self._array(*_list(content))
            return array if tag == "array" else array[()]
        raise ValueError(f"it holds {tag!r}, which is not known")

    def _take(self, length: Any) -> memoryview:
        if type(length) is not int or not 0 <= length <= len(self._data) - self._position:
            raise ValueError(f"it names {length!r} bytes, and {len(self._data) - self._position} are left")
        self._position += length
        return self._data[self._position - length : self._position]

    def _tensor(self, name: str, shape: Any, on_accelerator: bool) -> Tensor:
        dtype = _DTYPES[name]
        data = bytearray(self._take(_elements(shape) * dtype.itemsize))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        tensor = flat.view(dtype).reshape(shape)
        return tensor.to(self._device) if on_accelerator and self._device is not None else tensor

    def _array(self, name: str, shape: Any) -> np.ndarray[Any, Any]:
        if not _ARRAY_DTYPE.fullmatch(name):
            raise ValueError(f"it holds an array of {name!r}")
        dtype = np.dtype(name)
        data = self._take(_elements(shape) * dtype.itemsize)
        return np.frombuffer(bytearray(data), dtype=dtype, count=_elements(shape)).reshape(shape)


def _list(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError("a list is missing")
    return content


def _elements(shape: Any) -> int:
    if not all(type(size) is int and size >= 0 for size in _list(shape)):
        raise ValueError(f"it names the shape {shape!r}")
    return math.prod(shape)


_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}
_COLLECTIONS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_PLAIN: dict[str, Callable[[Any], Any]] = {
    "complex": lambda parts: complex(*map(float, _list(parts))),
    "size": lambda sizes: torch.Size(_list(sizes)),
    "dtype": lambda name: _DTYPES[name],
    "device": lambda name: torch.device(str(name)),
    "path": lambda text: pathlib.Path(str(text)),
}


class _Encoder:
    """In the place of `pickle.Pickler`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def dump(self, value: Any) -> None:
        self._file.write(encode(value))


class _Decoder:
    """In the place of `pickle.Unpickler`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def load(self) -> Any:
        return decode(self._file.read())


def carry_objects_without_pickle() -> None:
    """Make every object collective of this process use the codec, whoever calls it, until the process ends."""
    private_torch.replace_pickler(_Encoder, _Decoder)


_REFUSED = -1
"""In the place of a size: the sender's object cannot travel."""


class _Listed(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str


def collect_on_root(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Every rank's tensors by name, on rank 0 and on the host; an empty dict on the others.

    Args:
        tensors: what this rank contributes; a name may be given by one rank only.
    """
    if world.size == 1:
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    own = [_Listed(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
    listings = [[_Listed(n, tuple(s), d) for n, s, d in listing] for listing in all_gather_json(own, world)]
    result: dict[str, Tensor] = {}
    for dtype in sorted({item.dtype for listing in listings for item in listing}):
        result |= _collect_dtype(tensors, listings, dtype, world)
    return result


def all_gather_json(value: Any, world: World) -> list[Any]:
    """Every rank's JSON value, in rank order.

    Raises:
        ForeignMessageError: a rank sent something else.
    """
    text = json.dumps(value).encode()
    if world.size == 1:
        return [json.loads(text)]
    payload = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(world.device)
    sizes = torch.empty(world.size, 1, dtype=torch.int64, device=world.device)
    own_size = torch.tensor([payload.numel()], device=world.device)
    dist.all_gather(list(sizes.unbind()), own_size, group=world.background)
    sizes = world.read(sizes)
    for rank, size in enumerate(sizes.flatten().tolist()):
        _check_size(size, rank)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=world.device)
    padded[: payload.numel()] = payload
    rows = padded.new_empty(world.size, padded.numel())
    dist.all_gather(list(rows.unbind()), padded, group=world.background)
    texts = [row[: int(size)].numpy().tobytes() for row, size in zip(world.read(rows), sizes, strict=True)]
    return [_parsed(text, rank) for rank, text in enumerate(texts)]


def broadcast_object(value: Any, source: int, world: World) -> Any:
    """The source rank's value on every rank; the value itself where there is no other rank.

    Args:
        value: plain values and tensors, see `codec`; of other ranks than the source it is not looked at.

    Raises:
        ConfigurationError: on every rank, the source has an object that cannot travel.
        ForeignMessageError: what arrived is not what a rank of ours sends.
    """
    if not world.is_connected:
        return value
    is_source, message, refusal = world.rank == source, b"", None
    if is_source:
        try:
            message = encode(value)
        except ConfigurationError as error:
            refusal = error
    size = torch.tensor([_REFUSED if refusal is not None else len(message)], device=world.device)
    broadcast_(size, source, world)
    if refusal is not None:
        raise refusal
    num_bytes = int(world.read(size))
    if num_bytes == _REFUSED:
        raise ConfigurationError(f"rank {source} has an object that cannot be sent to other ranks: it says which")
    _check_size(num_bytes, source)
    data = (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if is_source
        else torch.empty(num_bytes, dtype=torch.uint8)
    )
    data = data.to(world.device)
    broadcast_(data, source, world)
    return value if is_source else decode(world.read(data).numpy().tobytes(), world.device, sender=f"rank {source}")


def _check_size(size: int, rank: int) -> None:
    if not 0 < size <= MAX_BYTES:
        raise ForeignMessageError(
            f"rank {rank} announces a message of {size} bytes, and at most {MAX_BYTES} are allowed: it is no rank of "
            "this run, or damaged; use a private network"
        )


def _parsed(text: bytes, rank: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ForeignMessageError(
            f"rank {rank} sent something else than JSON ({type(error).__name__}): nothing of it is used; keep "
            "strangers off the run's network, and the same version on all ranks"
        ) from None


def _collect_dtype(
    tensors: Mapping[str, Tensor], listings: Sequence[Sequence[_Listed]], dtype: str, world: World
) -> dict[str, Tensor]:
    listings = [[item for item in listing if item.dtype == dtype] for listing in listings]
    own = [tensors[item.name].detach().reshape(-1) for item in listings[world.rank]]
    flat = torch.cat(own).to(world.device) if own else torch.empty(0, dtype=getattr(torch, dtype), device=world.device)
    sizes = [sum(torch.Size(item.shape).numel() for item in listing) for listing in listings]
    is_root = world.rank == 0
    arrived = flat.new_empty(sum(sizes) if is_root else 0)
    send = [flat.numel()] + [0] * (world.size - 1)
    recv = sizes if is_root else [0] * world.size
    dist.all_to_all_single(arrived, flat, recv, send, group=world.background)
    if not is_root:
        return {}
    items = [item for listing in listings for item in listing]
    pieces = torch.split(world.read(arrived), [torch.Size(item.shape).numel() for item in items])
    return {item.name: piece.view(item.shape).clone() for item, piece in zip(items, pieces, strict=True)}


_CURE = "give all ranks the same files, settings and versions of moe-lightning, Python, NumPy and torch"


def fingerprint(*parts: np.ndarray | str) -> int:
    """A 63-bit hash of arrays, their shapes and words; of integers and truth values, so equal wherever they are."""
    digest = xxhash.xxh3_64()
    for part in parts:
        if isinstance(part, str):
            digest.update(f"{len(part)}:{part}".encode())
            continue
        assert part.dtype.kind in "biu", "floats that mean the same may differ in a bit"
        digest.update(f"{part.dtype.str}{part.shape}".encode())
        digest.update(np.ascontiguousarray(part).data)
    return digest.intdigest() >> 1


def require_agreement(fingerprints: Sequence[int], what: str) -> None:
    """Raise on every rank where the ranks' fingerprints differ.

    Args:
        what: they describe, with its article, for the message.

    Raises:
        ConfigurationError: naming the ranks that are fewest.
    """
    if len(set(fingerprints)) <= 1:
        return
    common = Counter(fingerprints).most_common(1)[0][0]
    others = [rank for rank, value in enumerate(fingerprints) if value != common]
    first = fingerprints.index(common)
    raise ConfigurationError(f"{what} of ranks {others} differs from that of rank {first}: {_CURE}")


def check_agreement(value: int, what: str, world: World) -> None:
    """Compare a fingerprint over all ranks; collective, raises as `require_agreement`."""
    if world.is_connected:
        told = all_gather_counts(torch.tensor([value], device=world.device), world)
        require_agreement(told[:, 0].tolist(), what)


def check_versions(world: World, *, recovers: bool = False) -> None:
    """Compare the versions of what plans; collective, when ranks have just met.

    Ranks that differ from rank 0, the oldest of the world, are refused. Another patch of a library is a warning.

    Args:
        recovers: whether a world without the refused ranks is built again: the others are then warned only.

    Raises:
        ConfigurationError: on every rank, or on those that are refused: the moe-lightning, Python, NumPy or torch of
            some is not rank 0's.
    """
    told: list[Mapping[str, str]] = all_gather_json(versions(), world)
    differences = [_differences(own, told[0]) for own in told]
    found = {rank: f"rank {rank} has {_difference(own, told[0])}" for rank, own in enumerate(told) if differences[rank]}
    refused = [rank for rank, names in enumerate(differences) if any(names.values())]
    if refused:
        sentence = f"{'; '.join(found[rank] for rank in refused)}, and would plan otherwise: install the same on all"
        if not recovers or world.rank in refused:
            raise ConfigurationError(sentence)
        warnings.warn(sentence, stacklevel=2)
    elif world.rank in found:
        warnings.warn(f"{found[world.rank]}: install the same on all ranks", stacklevel=2)


def _differences(own: Mapping[str, str], first: Mapping[str, str]) -> dict[str, bool]:
    """Return the names of what differs, and True if plans differ for it."""
    names = [name for name in own if own[name] != first.get(name)]
    return {name: _changes_plans(name, own[name], first.get(name, "")) for name in names}


def _difference(own: Mapping[str, str], first: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {own[name]} where rank 0 has {first.get(name)}" for name in _differences(own, first))


def versions() -> dict[str, str]:
    """Return the versions of everything that takes part in a plan; builds of one torch for different devices are one
    version.
    """
    return {
        "moe-lightning": sys.modules["moe_lightning"].__version__,
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "torch": torch.__version__.split("+")[0],
    }


def _changes_plans(name: str, one: str, other: str) -> bool:
    if name == "moe-lightning":
        return one != other
    return one.split(".")[:2] != other.split(".")[:2]
