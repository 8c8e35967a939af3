"""What manifests, parts and tables of snapshots may say: types, limits, and that every piece lies inside its file or
memory. A checksum vouches for bytes, not for who wrote them, so nothing is computed with before it was checked here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.state.pieces import DTYPES, OBJECT, Block, Piece, expert_of

LARGEST = 2**63 - 1
_END_OF_TIME_S = 253_402_300_799  # the last second of the year 9999
_MOST_EXPERTS = 1 << 24  # of all layers together
_MOST_DIMENSIONS = 64
_KEY_LENGTH = 4096
_DIGEST = re.compile(r"[0-9a-f]{16}")


def is_whole(value: object, low: int = 0, high: int = LARGEST) -> bool:
    """Whether a value is an integer within limits; booleans are none."""
    return type(value) is int and low <= value <= high


def _is_text(value: object) -> bool:
    return type(value) is str and len(value) <= _KEY_LENGTH


_RECORD: Mapping[str, Callable[[Any], bool]] = {
    "run": _is_text,
    "session": _is_text,
    "sequence": is_whole,
    "step": is_whole,
    "rank": is_whole,
    "world": is_whole,
    "world_size": lambda value: is_whole(value, 1),
    "created_s": lambda value: type(value) in (int, float) and 0 <= value <= _END_OF_TIME_S,
    "previous": lambda value: value is None or _is_text(value),
    "files": lambda value: isinstance(value, dict),
    "stored": lambda value: isinstance(value, list),
    "placed": lambda value: isinstance(value, list),
    "extra": lambda value: isinstance(value, dict) and all(_EXTRA[n](v) for n, v in value.items() if n in _EXTRA),
}
_EXTRA: Mapping[str, Callable[[Any], bool]] = {
    "num_layers": lambda value: is_whole(value, 0, _MOST_EXPERTS),
    "num_experts": lambda value: is_whole(value, 0, _MOST_EXPERTS),
    "replayed_from": is_whole,
    "plt": lambda value: value is None or (type(value) in (int, float) and abs(value) <= LARGEST),
}


def read_object(data: bytes, origin: str, *, subject: str = "it") -> dict[str, Any]:
    """A JSON object.

    Args:
        subject: what of the origin the data is, for messages.

    Raises:
        CheckpointError: the data is something else.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{origin} was written by something else: {subject} cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{origin} was written by something else: {subject} is no object")
    return values


def check_record(values: Mapping[str, Any], names: Iterable[str], origin: str) -> None:
    """The entries of a manifest, a part or a table, lists of files and pieces not looked into.

    Args:
        names: that it must have.

    Raises:
        CheckpointError: the first that is missing, or is not what it should be.
    """
    for name in names:
        if name not in values:
            raise _refused(origin, f"it lacks an entry ({name!r})")
    for name, value in values.items():
        if name in _RECORD and not _RECORD[name](value):
            raise _refused(origin, f"its {name} is {_short(value)}")


def check_file(name: str, entry: Any, origin: str) -> None:
    """A record of a file.

    Raises:
        CheckpointError: it is none.
    """
    whole = isinstance(entry, dict) and entry.keys() == {"path", "nbytes", "xxh3"}
    if not whole or not is_whole(entry["nbytes"]) or not _is_text(entry["path"]) or not _is_digest(entry["xxh3"]):
        raise _refused(origin, f"it lacks an entry of the file {_short(name)}, or one is not what it should be")


def check_pieces(pieces: Iterable[Piece], origin: str) -> None:
    """Every piece is one of a tensor or an object.

    Raises:
        CheckpointError: the first that is none.
    """
    layers = experts = 0
    for piece in pieces:
        problem, layer, expert = _examined(piece)
        if problem:
            raise _refused(origin, f"{_short(piece.key)} {problem}")
        layers, experts = max(layers, layer + 1), max(experts, expert + 1)
        if layers * experts > _MOST_EXPERTS:
            raise _refused(origin, f"{_short(piece.key)} is one of more than {_MOST_EXPERTS} experts")


def check_places(stored: Iterable[Piece], file_bytes: Mapping[str, int], origin: str) -> None:
    """Every checked piece lies inside its file.

    Args:
        file_bytes: file name -> its size.

    Raises:
        CheckpointError: the first that does not.
    """
    for piece in stored:
        problem = _problem_of_place(piece, file_bytes)
        if problem:
            raise _refused(origin, f"{_short(piece.key)} {problem}")


def check_blocks(placed: Iterable[Piece], memory_bytes: int, origin: str) -> None:
    """Every checked piece lies inside a memory, and its turn is a step.

    Raises:
        CheckpointError: the first that does not.
    """
    for piece in placed:
        if not is_whole(piece.at.data_offset) or piece.at.data_offset + piece.nbytes > memory_bytes:
            raise _refused(origin, f"{_short(piece.key)} lies outside of its {memory_bytes} bytes")
        if not is_whole(piece.due, -1):
            raise _refused(origin, f"the turn of {_short(piece.key)} is {_short(piece.due)}")


def _examined(piece: Piece) -> tuple[str | None, int, int]:
    """(what is wrong with a piece, its layer, its expert); -1 of what is no expert's."""
    if not (_is_text(piece.key) and _is_text(piece.group) and _is_text(piece.dtype)):
        return "has a key, group or dtype that is no text", -1, -1
    if not (_is_digest(piece.xxh3) and is_whole(piece.version, -1) and is_whole(piece.nbytes)):
        return "has a checksum, version or size that cannot be", -1, -1
    block, numbers = piece.block, (*piece.block.sizes, *piece.block.offsets, *piece.block.whole)
    alike = len(block.sizes) == len(block.offsets) == len(block.whole) <= _MOST_DIMENSIONS
    if not alike or not all(type(number) is int and 0 <= number <= LARGEST for number in numbers):
        return f"has the shape {_short(list(numbers))}", -1, -1
    return _examined_outline(piece.key, piece.dtype, block, piece.nbytes)


@lru_cache(maxsize=1 << 14)
def _examined_outline(key: str, dtype: str, block: Block, nbytes: int) -> tuple[str | None, int, int]:
    """What stays the same from one snapshot to the next, so that it is looked at once."""
    problem, layer, expert = _problem_of_sizes(dtype, block, nbytes), -1, -1
    if problem is None:
        try:
            layer, expert = expert_of(key) or (-1, -1)
        except (ConfigurationError, ValueError):
            problem = "is no expert's key"
    return problem, layer, expert


def _problem_of_sizes(dtype: str, block: Block, nbytes: int) -> str | None:
    shape, whole = block.sizes, block.whole
    if dtype == OBJECT:
        return f"is an object with the shape {_short(list(shape))}" if shape else None
    if dtype not in DTYPES:
        return f"has the unknown dtype {_short(dtype)}"
    itemsize = DTYPES[dtype].itemsize
    if math.prod(max(1, size) for size in whole) * itemsize > LARGEST:
        return f"has the shape {_short(list(whole))}"
    if math.prod(shape) * itemsize != nbytes:
        return f"has {nbytes} bytes, which its shape {_short(list(shape))} has not"
    if any(sum(ends) > size for *ends, size in zip(block.offsets, shape, whole, strict=True)):
        return f"ends behind the tensor, whose shape is {_short(list(whole))}"
    return None


def _problem_of_place(piece: Piece, file_bytes: Mapping[str, int]) -> str | None:
    at = piece.at
    places = at.offset, at.length, at.data_offset
    if not _is_text(at.file) or at.file not in file_bytes:
        return f"lies in the file {_short(at.file)}, which is not listed"
    if not all(is_whole(place) for place in places) or at.offset + at.length > file_bytes[at.file]:
        return f"lies outside {at.file}"
    if not at.offset <= at.data_offset <= at.offset + at.length - piece.nbytes:
        return f"has data outside its place in {at.file}"
    return None


def _is_digest(value: object) -> bool:
    return type(value) is str and _DIGEST.fullmatch(value) is not None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refused(origin: str, problem: str) -> CheckpointError:
    return CheckpointError(f"{origin} was written by something else: {problem}")
