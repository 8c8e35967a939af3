"""Objects as bytes and back, without pickle: what arrives from another process can be wrong, but it cannot run code.

A message is a JSON tree and, behind it, the raw bytes of tensors, arrays and byte strings in the order in which the
tree names them. JSON's own values stand for themselves; everything else is a node {"tag": content}:

    magic "MOELOBJ1" | bytes of the tree, u64 | tree | bytes

Types are matched exactly: an instance of a subclass is refused rather than turned into what it inherits from. Of
classes only those of `records` travel.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_lightning.comm.records import put_together, taken_apart
from moe_lightning.errors import ConfigurationError, ForeignMessageError

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
            f"a message of {sender} is not one of moe-lightning's ({reason}): nothing of it is used; keep strangers "
            "off the run's network, and the same version on all ranks"
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
