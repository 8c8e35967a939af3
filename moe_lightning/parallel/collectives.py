"""Collectives for objects and named tensors without pickle, and agreement of ranks on plans and versions.

A received message can be wrong, but it cannot run code. A message is a JSON header followed by a file of safetensors
with its tensors, arrays and byte strings. JSON's own values represent themselves; every other value is an object
{"tag": content}, whose content consists of simpler values:

    bytes of the header, u64 | header | safetensors

Types are matched exactly: an instance of a subclass is refused. torch's own object collectives (`all_gather_object` and
others), which unpickle and which users' modules and metrics call, use the same codec in a process that trains with
others. So `torch.distributed.checkpoint` cannot save from there: its plans are objects of classes.

Ranks derive placements, shadows and quotas from the same numbers without communication. A rank with another result
(another library, another file) would send rows that no rank expects, so a hash of its plan is sent with its counts.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import platform
import re
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from moe_lightning.compat import private_torch
from moe_lightning.errors import (
    CheckpointError,
    ConfigurationError,
    ForeignMessageError,
    MissingCheckpointError,
    UnreadableCheckpointError,
)
from moe_lightning.parallel.context import World, broadcast_
from moe_lightning.parallel.exchange import all_gather_counts

MAX_BYTES = 1 << 31
"""Of a whole message: what a receiver allocates because a sender says so."""

MAX_HEADER_BYTES = 1 << 26
"""Of the JSON header, whose Python objects take many times its size."""

MAX_DEPTH = 100

_SENDABLE = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, Path, tensors, NumPy arrays and numbers"
)


def encode(value: Any) -> bytes:
    """Return the message of an object.

    Raises:
        ConfigurationError: it holds something else than plain values and tensors, is nested deeper than `MAX_DEPTH`
            or larger than a message may be.
    """
    tensors: dict[str, Tensor] = {}
    try:
        header = json.dumps(_node(value, tensors, 0), separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"an object cannot be sent to other ranks ({error}): send {_SENDABLE}") from None
    size = _HEAD + len(header) + sum(tensor.nbytes for tensor in tensors.values())
    if len(header) <= MAX_HEADER_BYTES and size <= MAX_BYTES:
        message = b"".join((len(header).to_bytes(_HEAD, "little"), header, save(tensors)))
        if len(message) <= MAX_BYTES:
            return message
    raise ConfigurationError(
        f"an object of {size} bytes, {len(header)} of them plain values, cannot be sent to other ranks (at most "
        f"{MAX_BYTES} and {MAX_HEADER_BYTES}): send large data as tensors by torch.distributed.broadcast"
    )


def decode(
    message: bytes | bytearray | memoryview, device: torch.device | None = None, *, sender: str = "another rank"
) -> Any:
    """Return the object of a message from any sender.

    Args:
        device: of tensors that the sender had on an accelerator; None: the host.
        sender: who is named where the message is none of ours.

    Raises:
        ForeignMessageError: this codec did not write it, or it was damaged.
    """
    try:
        return _read(memoryview(message), device)
    except _WRONG as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ForeignMessageError(
            f"a message of {sender} is not one of moe-lightning's ({reason}): nothing of it is used; use a private "
            "network, and the same version on all ranks"
        ) from None


_HEAD = 8  # bytes of the header's length
_WRONG = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError, SafetensorError,
)  # fmt: skip


def _read(view: memoryview, device: torch.device | None) -> Any:
    end = _HEAD + int.from_bytes(view[:_HEAD], "little")
    if not _HEAD < end <= min(len(view), _HEAD + MAX_HEADER_BYTES):
        raise ValueError(f"its header ends at byte {end} of {len(view)}")
    tensors = load(bytes(view[end:]))
    value = _value(json.loads(bytes(view[_HEAD:end])), tensors, device, 0)
    if tensors:
        raise ValueError(f"{len(tensors)} of its tensors belong to nothing")
    return value


def _node(value: Any, tensors: dict[str, Tensor], depth: int) -> Any:
    """Return the JSON of a value; its tensors are added to those of the message."""
    if depth > MAX_DEPTH:
        raise ConfigurationError(
            f"an object that is nested deeper than {MAX_DEPTH} levels cannot be sent to other ranks: flatten it"
        )
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_node(item, tensors, depth + 1) for item in value]
    tag = _TAGS.get(kind)
    if tag == "tensor":
        name = str(len(tensors))
        tensors[name] = _contiguous(value)
        return {"tensor": [name, value.device.type != "cpu", value.is_complex()]}
    if tag is None:
        raise ConfigurationError(
            f"an object of type {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks, for nothing that "
            f"travels is unpickled: send {_SENDABLE}"
        )
    return {tag: _node(_KINDS[tag].parts(value), tensors, depth)}


def _value(node: Any, tensors: dict[str, Tensor], device: torch.device | None, depth: int) -> Any:
    """Return the value of a JSON node; each tensor of the message belongs to one node."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if isinstance(node, list):
        return [_value(item, tensors, device, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, content),) = node.items()
    if tag == "tensor":
        name, on_accelerator, is_complex = content
        tensor = torch.view_as_complex(tensors.pop(name)) if is_complex else tensors.pop(name)
        return tensor.to(device) if on_accelerator and device is not None else tensor
    if tag not in _KINDS:
        raise ValueError(f"it holds {tag!r}, which is not known")
    parts = _value(content, tensors, device, depth)
    if type(parts) is not _KINDS[tag].content:
        raise ValueError(f"the content of a {tag} in it is of another type")
    return _KINDS[tag].build(parts)


def _contiguous(tensor: Tensor) -> Tensor:
    """Return a real copy on the host that shares no memory."""
    if tensor.layout is torch.strided and not tensor.is_meta:
        tensor = tensor.detach().resolve_conj()
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor.resolve_neg()
        if _TENSOR_DTYPE.fullmatch(str(real.dtype)):
            return real.to("cpu", copy=True, memory_format=torch.contiguous_format)
    raise ConfigurationError(
        f"a tensor of {tensor.dtype} and {tensor.layout} on {tensor.device} cannot be sent to other ranks: "
        "send dense tensors that hold data"
    )


_TENSOR_DTYPE = re.compile(r"torch\.(bool|bfloat16|float(16|32|64|8_e4m3fn|8_e5m2)|u?int(8|16|32|64))")


def _array_parts(value: np.ndarray[Any, Any] | np.generic) -> list[Any]:
    if not _ARRAY_DTYPE.fullmatch(value.dtype.str):
        raise ConfigurationError(f"a NumPy array of {value.dtype} cannot be sent to other ranks: send numbers or text")
    return [value.dtype.str, list(value.shape), value.tobytes()]


def _array(parts: list[Any]) -> np.ndarray[Any, Any]:
    name, shape, data = parts
    if not _ARRAY_DTYPE.fullmatch(name) or any(type(size) is not int for size in shape):
        raise ValueError(f"it holds an array of {name!r} and the shape {shape!r}")
    return np.frombuffer(data, dtype=name).reshape(shape).copy()


_ARRAY_DTYPE = re.compile(r"[<>|][biufcSU]\d{1,9}|[<>][mM]8(\[\d{0,9}[A-Za-z]{1,2}\])?")


class _Kind(NamedTuple):
    """Types whose values travel as simpler ones.

    Attributes:
        types: matched exactly.
        parts: their content, of values that can travel.
        build: the value of its content, whoever wrote it.
        content: type of the content.
    """

    types: Iterable[type]
    parts: Callable[[Any], Any]
    build: Callable[[Any], Any]
    content: type = list


def _flat(mapping: Mapping[Any, Any]) -> list[Any]:
    return list(itertools.chain.from_iterable(mapping.items()))


def _mapping(flat: list[Any]) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _octets(data: bytes | bytearray) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


_CONSTANT_TYPES = torch.dtype, torch.layout, torch.memory_format
_CONSTANTS = {str(value): value for value in vars(torch).values() if isinstance(value, _CONSTANT_TYPES)}
_KINDS = {
    "dict": _Kind([dict], _flat, _mapping),
    "ordered": _Kind([OrderedDict], _flat, lambda flat: OrderedDict(_mapping(flat))),
    "counter": _Kind([Counter], _flat, lambda flat: Counter(_mapping(flat))),
    "tuple": _Kind([tuple], list, tuple),
    "set": _Kind([set], list, set),
    "frozenset": _Kind([frozenset], list, frozenset),
    "size": _Kind([torch.Size], list, torch.Size),
    "complex": _Kind([complex], lambda value: [value.real, value.imag], lambda parts: complex(*map(float, parts))),
    "constant": _Kind(_CONSTANT_TYPES, str, _CONSTANTS.__getitem__, str),
    "device": _Kind([torch.device], str, torch.device, str),
    "path": _Kind([pathlib.PosixPath, pathlib.PurePosixPath], str, pathlib.Path, str),
    "bytes": _Kind([bytes], _octets, lambda octets: octets.numpy().tobytes(), Tensor),
    "bytearray": _Kind([bytearray], _octets, lambda octets: bytearray(octets.numpy().tobytes()), Tensor),
    "array": _Kind([np.ndarray], _array_parts, _array),
    "number": _Kind(set(np.sctypeDict.values()), _array_parts, lambda parts: _array(parts)[()]),
}
_TAGS = {kind: tag for tag, row in _KINDS.items() for kind in row.types} | {Tensor: "tensor"}


class _FileCodec:
    """In the place of `pickle.Pickler` and `pickle.Unpickler`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def dump(self, value: Any) -> None:
        self._file.write(encode(value))

    def load(self) -> Any:
        return decode(self._file.read())


def carry_objects_without_pickle() -> None:
    """Make every object collective of this process use the codec, whoever calls it, until the process ends."""
    private_torch.replace_pickler(_FileCodec, _FileCodec)


_REFUSED = -1
"""In the place of a size: the sender's object cannot travel."""


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
        value: plain values and tensors, see `encode`; of other ranks than the source it is not looked at.

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


_USER_ERRORS: tuple[type[Exception], ...] = (
    MissingCheckpointError,
    UnreadableCheckpointError,
    CheckpointError,
    ConfigurationError,
)


@contextmanager
def failing_together(world: World) -> Iterator[None]:
    """Raise what one rank cannot do inside on every rank: the first rank's error; collective at the end.

    Raises:
        ConfigurationError, CheckpointError: as inside; an error of storage becomes a CheckpointError.
    """
    own: Exception | None = None
    try:
        yield
    except _USER_ERRORS as error:
        own = error
    except OSError as error:
        own = CheckpointError(f"{error.filename or 'storage'} cannot be used ({error.strerror or error})")
    kind = next((index for index, kind in enumerate(_USER_ERRORS) if isinstance(own, kind)), None)
    found = all_gather_json([kind, str(own)], world)
    first = next((rank for rank, (kind, _) in enumerate(found) if kind is not None), None)
    if first is None:
        return
    kind, message = found[first]
    raise own if own is not None and first == world.rank else _USER_ERRORS[kind](message)


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


CURE = "give all ranks the same files, settings and versions of moe-lightning, Python, NumPy and torch"


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
    raise ConfigurationError(f"{what} of ranks {others} differs from that of rank {first}: {CURE}")


def check_agreement(value: int, what: str, world: World) -> None:
    """Compare a fingerprint over all ranks; collective, raises as `require_agreement`."""
    if world.is_connected:
        told = all_gather_counts(torch.tensor([value], device=world.device), world)
        require_agreement(told[:, 0].tolist(), what)


def check_versions(world: World, *, recovers: bool = False) -> None:
    """Compare the versions of what plans; collective, when ranks have just met.

    Ranks that differ from rank 0, the oldest of the world, are refused.

    Args:
        recovers: whether a world without the refused ranks is built again: the others are then warned only.

    Raises:
        ConfigurationError: on every rank, or on those that are refused: the moe-lightning, Python, NumPy or torch of
            some is not rank 0's.
    """
    told: list[Mapping[str, str]] = all_gather_json(versions(), world)
    found = {rank: words for rank, its in enumerate(told) if (words := different_versions(its, told[0], "rank 0 has"))}
    if not found:
        return
    listed = "; ".join(f"rank {rank} has {words}" for rank, words in found.items())
    sentence = f"{listed}, and would plan otherwise: install the same on all"
    if not recovers or world.rank in found:
        raise ConfigurationError(sentence)
    warnings.warn(sentence, stacklevel=2)


def different_versions(own: Mapping[str, str], common: Mapping[str, str], whose: str = "the others have") -> str:
    """Describe the versions because of which plans would differ from those of others; "" if there are none. Patches of
    the same library plan the same.

    Args:
        common: theirs.
    """

    def compared(name: str, version: str) -> object:
        return version if name == "moe-lightning" else version.split(".")[:2]

    names = [name for name in own if compared(name, own[name]) != compared(name, common.get(name, ""))]
    return ", ".join(f"{name} {own[name]} where {whose} {common.get(name)}" for name in names)


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
