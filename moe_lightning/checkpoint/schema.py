"""What a manifest may say: types, limits, and that every piece lies inside its file. A checksum vouches for bytes, not
for who wrote them, so nothing of a manifest is computed with before it was checked here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moe_lightning.checkpoint.frames import StoredPiece
from moe_lightning.checkpoint.records import DTYPES, OBJECT, Piece, is_partial, parse_expert_key
from moe_lightning.errors import CheckpointError, ConfigurationError

_LARGEST = 2**63 - 1
_END_OF_TIME_S = 253_402_300_799  # the last second of the year 9999
_MOST_EXPERTS = 1 << 24  # of all layers together
_MOST_DIMENSIONS = 64
_KEY_LENGTH = 4096
_DIGEST = re.compile(r"[0-9a-f]{16}")


def is_whole(value: object, low: int = 0, high: int = _LARGEST) -> bool:
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
    "extra": lambda value: isinstance(value, dict) and all(_EXTRA[n](v) for n, v in value.items() if n in _EXTRA),
}
_EXTRA: Mapping[str, Callable[[Any], bool]] = {
    "num_layers": lambda value: is_whole(value, 0, _MOST_EXPERTS),
    "num_experts": lambda value: is_whole(value, 0, _MOST_EXPERTS),
    "plt": lambda value: value is None or (type(value) in (int, float) and abs(value) <= _LARGEST),
}


def check_record(values: Mapping[str, Any], names: Iterable[str], origin: str) -> None:
    """The entries of a manifest or a part, `files` and `stored` not looked into.

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


def check_pieces(stored: Iterable[StoredPiece], file_bytes: Mapping[str, int], origin: str) -> None:
    """Every piece is one of a tensor or an object and lies inside its file.

    Args:
        file_bytes: file name -> its size.

    Raises:
        CheckpointError: the first piece that is or does not.
    """
    layers = experts = 0
    for item in stored:
        problem = _problem_of(item.piece) or _problem_of_place(item, file_bytes)
        if problem:
            raise _refused(origin, f"{_short(item.piece.key)} {problem}")
        if is_partial(item.piece.key):
            try:
                layer, expert, _, _ = parse_expert_key(item.piece.key)
            except (ConfigurationError, ValueError) as error:
                raise _refused(origin, f"{_short(item.piece.key)} is no expert's key") from error
            layers, experts = max(layers, layer + 1), max(experts, expert + 1)
            if layers * experts > _MOST_EXPERTS:
                raise _refused(origin, f"{_short(item.piece.key)} is one of more than {_MOST_EXPERTS} experts")


def _problem_of(piece: Piece) -> str | None:
    if not (_is_text(piece.key) and _is_text(piece.group) and _is_text(piece.dtype)):
        return "has a key, group or dtype that is no text"
    if piece.dtype != OBJECT and piece.dtype not in DTYPES:
        return f"has the unknown dtype {_short(piece.dtype)}"
    if not (_is_digest(piece.xxh3) and is_whole(piece.version, -1) and is_whole(piece.nbytes)):
        return "has a checksum, version or size that cannot be"
    sizes = (*piece.shape, piece.first_row, piece.num_rows)
    if len(piece.shape) > _MOST_DIMENSIONS or not all(is_whole(size) for size in sizes):
        return f"has the shape {_short(list(sizes))}"
    if piece.dtype == OBJECT:
        return f"is an object with the shape {_short(list(piece.shape))}" if piece.shape else None
    itemsize = DTYPES[piece.dtype].itemsize
    if math.prod(max(1, size) for size in piece.global_shape) * itemsize > _LARGEST:
        return f"has the shape {_short(list(piece.global_shape))}"
    if math.prod(piece.shape) * itemsize != piece.nbytes:
        return f"has {piece.nbytes} bytes, which its shape {_short(list(piece.shape))} has not"
    if piece.first_row + (piece.shape[0] if piece.shape else 0) > piece.num_rows:
        return f"has rows behind its last one, {piece.num_rows}"
    return None


def _problem_of_place(item: StoredPiece, file_bytes: Mapping[str, int]) -> str | None:
    places = item.offset, item.length, item.data_offset
    if not _is_text(item.file) or item.file not in file_bytes:
        return f"lies in the file {_short(item.file)}, which is not listed"
    if not all(is_whole(place) for place in places) or item.offset + item.length > file_bytes[item.file]:
        return f"lies outside {item.file}"
    if not item.offset <= item.data_offset <= item.offset + item.length - item.piece.nbytes:
        return f"has data outside its place in {item.file}"
    return None


def _is_digest(value: object) -> bool:
    return type(value) is str and _DIGEST.fullmatch(value) is not None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refused(origin: str, problem: str) -> CheckpointError:
    return CheckpointError(f"{origin} was written by something else: {problem}")
