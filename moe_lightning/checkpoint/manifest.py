"""Checkpoint manifest: content and checksums of a directory, with the schema of everything that is read.

The manifest is written last and is the commit. A manifest, and the part that each rank contributes to it, is JSON in an
envelope with its own checksum; nothing else of a checkpoint is interpreted before the manifest is verified. A checksum
does not prove who wrote the bytes, so types, limits, and that every piece lies inside its file or memory are checked
here before any use. Deletion of what interrupted saves left removes only files that a save writes, and follows no link.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

import xxhash
from annotated_types import Interval, Predicate

from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.errors import CheckpointError, ConfigurationError, UnreadableCheckpointError
from moe_lightning.state.pieces import (
    DTYPES,
    LARGEST,
    OBJECT,
    WEIGHTS,
    Block,
    Count,
    Piece,
    Size,
    Text,
    by_key,
    expert_of,
    is_expert_key,
    parse_expert_key,
    replay_key,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

_END_OF_TIME_S = 253_402_300_799  # the last second of the year 9999
_MOST_EXPERTS = 1 << 24  # of all layers together
_DIGEST = re.compile(r"[0-9a-f]{16}")


def _make_adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # a tenth of the time in which the package is imported

    return TypeAdapter(kind)


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(_make_adapter)


def dump_json(kind: type[T], value: T) -> bytes:
    """Return the JSON of a value of a type."""
    return _adapter(kind).dump_json(value)


def read_json(kind: type[T], data: bytes, origin: str) -> T:
    """Return the value of a type; its annotations are the limits of what is read.

    Raises:
        CheckpointError: the data is something else.
    """
    from pydantic import ValidationError

    try:
        value: T = _adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        raise _refused(origin, _first_problem(error)) from None
    return value


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"it lacks an entry ({_short(name)})"
    if first["type"] == "json_invalid":
        return f"it cannot be read ({first['msg']})"
    return f"its {name[:80] or 'content'} is {_short(first['input'])}"


_EXTRA: Mapping[str, Any] = {
    "num_experts": Annotated[int, Interval(ge=0, le=_MOST_EXPERTS)],
    "replayed_from": Size,
    "plt": Annotated[float, Interval(ge=-LARGEST, le=LARGEST)] | None,
}


def _is_extra(values: dict[str, Any]) -> bool:
    for name in _EXTRA.keys() & values.keys():
        _adapter(_EXTRA[name]).validate_python(values[name], strict=True)
    return True


Extra = Annotated[dict[str, Any], Predicate(_is_extra)]
"""Any entries, and limits of those that are used here."""


def check_pieces(pieces: Iterable[Piece], problem_of_place: Callable[[Piece], str | None], origin: str) -> None:
    """Every piece is one of a tensor or an object, and at its place.

    Args:
        problem_of_place: what is wrong with the place of a piece; None: nothing.

    Raises:
        CheckpointError: the first that is none, or elsewhere.
    """
    layers = experts = 0
    for piece in pieces:
        problem, layer, expert = _examined(piece)
        problem = problem or problem_of_place(piece)
        layers, experts = max(layers, layer + 1), max(experts, expert + 1)
        if problem is None and layers * experts > _MOST_EXPERTS:
            problem = f"is one of more than {_MOST_EXPERTS} experts"
        if problem:
            raise _refused(origin, f"{_short(piece.key)} {problem}")


def _examined(piece: Piece) -> tuple[str | None, int, int]:
    """Return (problem of a piece or None, layer, expert); layer and expert are -1 for dense state."""
    block = piece.block
    if _DIGEST.fullmatch(piece.xxh3) is None:
        return f"has the checksum {_short(piece.xxh3)}", -1, -1
    if not len(block.sizes) == len(block.offsets) == len(block.whole):
        return f"has the shape {_short([*block.sizes, *block.offsets, *block.whole])}", -1, -1
    return _examined_outline(piece.key, piece.dtype, block, piece.nbytes)


@lru_cache(maxsize=1 << 14)
def _examined_outline(key: str, dtype: str, block: Block, nbytes: int) -> tuple[str | None, int, int]:
    """Check what is equal in all snapshots of a piece, so that it is cached."""
    problem, layer, expert = _problem_of_sizes(dtype, block, nbytes), -1, -1
    if problem is None:
        try:
            layer, expert = expert_of(key) or (-1, -1)
        except (ConfigurationError, ValueError):
            problem = "is not the key of an expert"
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
    at = piece.location
    if at is None or at.file not in file_bytes:
        return f"lies in the file {_short(at.file if at else None)}, which is not listed"
    if at.offset + at.length > file_bytes[at.file]:
        return f"lies outside {at.file}"
    if not at.offset <= at.data_offset <= at.offset + at.length - piece.nbytes:
        return f"has data outside its place in {at.file}"
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refused(origin: str, problem: str) -> UnreadableCheckpointError:
    return UnreadableCheckpointError(f"{origin} was written by something else: {problem}")


METADATA = ".metadata"
PRUNED = "PRUNED.json"
"""What becomes of the manifest of a checkpoint that is being deleted."""
_FORMAT = 1
_ENVELOPE = re.compile(rb'\{"format":(\d{1,9}),"xxh3":"([0-9a-f]{16})","body":')
_SAFE_PATH = re.compile(r"(\.\./step-\d+(-[\w-]+)?/)?[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of a checkpoint: path relative to its directory (in the directory itself or in a sibling), size and
    hexadecimal xxh3."""

    path: Text
    nbytes: Size
    xxh3: Annotated[str, Predicate(lambda text: _DIGEST.fullmatch(text) is not None)]


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """Common fields of the tables of snapshots, of parts and of manifests.

    Attributes:
        run: the training run it belongs to.
        session: the start of that run that wrote it; experts are carried over only within a session.
        step: training step after which the state was taken.
        world_size: ranks that wrote it.
        extra: what rank 0 gave to `Snapshotter.start`.
        world: number of the world that wrote it (`directory.py`); 0: of none.
    """

    run: Text
    session: Text
    step: Size
    world_size: Count
    extra: Extra = field(default_factory=dict)
    world: Size = 0

    @property
    def first_step(self) -> int:
        """The step after which the oldest of a window was taken (`training_state.py`): a restore runs the steps from
        there to `step` again. Of any other checkpoint `step`."""
        return min(self.step, int(self.extra.get("replayed_from", self.step)))


@dataclass(frozen=True, kw_only=True)
class _Record(SavedStep):
    """Common fields of parts and manifests.

    Attributes:
        files: file name -> record, `.metadata` included.
        stored: every piece of every key.
    """

    files: dict[str, FileRecord]
    stored: tuple[Piece, ...]

    def dump(self) -> bytes:
        return _dump_envelope(dump_json(type(self), self))

    @classmethod
    def parse(cls, data: bytes, origin: str) -> Self:
        """Read a record.

        Raises:
            CheckpointError: it is damaged, of another format, or names files outside its directory.
        """
        record = read_json(cls, _parse_envelope(data, origin), origin)
        for name, entry in record.files.items():
            if not _SAFE_PATH.fullmatch(entry.path) or PurePosixPath(entry.path).name != name or name in (".", ".."):
                raise _refused(origin, f"it names the file {entry.path!r}")
        sizes = {name: entry.nbytes for name, entry in record.files.items()}
        check_pieces(record.stored, lambda piece: _problem_of_place(piece, sizes), origin)
        return record


@dataclass(frozen=True, kw_only=True)
class RankPart(_Record):
    """Record of what one rank wrote for one checkpoint."""

    rank: Size


@dataclass(frozen=True, kw_only=True)
class Manifest(_Record):
    """A whole checkpoint.

    Attributes:
        sequence: counts the commits of a directory: the newest checkpoint is the one with the highest, whatever its
            step.
        created_s: time of the commit, seconds since 1970.
        previous: name of the checkpoint that experts were carried over from, or None.
    """

    sequence: Size
    created_s: Annotated[float, Interval(ge=0, le=_END_OF_TIME_S)]
    previous: Text | None

    @property
    def payload_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.stored)

    @property
    def disk_bytes(self) -> int:
        """Its files, frames and metadata included, hard links counted in full."""
        return sum(record.nbytes for record in self.files.values())

    @property
    def plt(self) -> float | None:
        """Proportion of lost tokens as its ledger recorded it; None without a ledger."""
        plt = self.extra.get("plt")
        return None if plt is None else float(plt)

    @property
    def new_bytes(self) -> int:
        """Payload that this checkpoint wrote itself."""
        return sum(piece.nbytes for piece in self.stored if piece.version >= self.first_step)


def check_coverage(
    stored: Iterable[Piece], *, required: Iterable[str] = (), extra: Mapping[str, Any] | None = None
) -> None:
    """Every number of every tensor exactly once, and every expert of a layer with the same tensors.

    Args:
        required: keys that must be there.
        extra: a manifest's extra entries, with the number of experts of a layer.

    Raises:
        CheckpointError: the first key for which that does not hold.
    """
    found = by_key(stored)
    if not found:
        raise UnreadableCheckpointError("it holds no state")
    missing = sorted(set(required) - found.keys())
    if missing:
        raise UnreadableCheckpointError(f"{missing[0]} is missing ({len(missing)} keys are)")
    for key, pieces in found.items():
        whole = pieces[0].block.whole
        if any((piece.dtype, piece.block.whole) != (pieces[0].dtype, whole) for piece in pieces):
            raise UnreadableCheckpointError(f"{key} has pieces of different dtypes or shapes")
        if not is_tiled(whole, [piece.block for piece in pieces]):
            raise UnreadableCheckpointError(f"parts of {key} are missing or there twice")
    _check_experts(found.keys(), extra or {})
    _check_replay(found, extra or {})


_MOST_SHARDED = 8  # dimensions; a block has two to that power corners


def is_tiled(whole: Sequence[int], blocks: Sequence[Block]) -> bool:
    """Return True if blocks, each of which lies inside a tensor, hold each of its numbers once.

    Corners of blocks, counted with alternating signs, are what is left of the sum of the blocks after differences along
    each dimension, and determine it: inner ones cancel out. The time is proportional to the number of blocks.
    """
    if not math.prod(whole):
        return True
    sharded = [dim for dim, size in enumerate(whole) if any(block.sizes[dim] != size for block in blocks)]
    if len(sharded) > _MOST_SHARDED:
        return False
    corners = Counter[tuple[int, ...]]()
    for sign, block in [(-1, Block.of(whole)), *((1, block) for block in blocks)]:
        edges = [((block.offsets[dim], 1), (block.offsets[dim] + block.sizes[dim], -1)) for dim in sharded]
        for corner in itertools.product(*edges):
            corners[tuple(at for at, _ in corner)] += sign * math.prod(edge for _, edge in corner)
    return not any(corners.values())


def _check_experts(keys: Iterable[str], extra: Mapping[str, Any]) -> None:
    tensors: dict[int, dict[int, set[tuple[str, str]]]] = defaultdict(lambda: defaultdict(set))
    for key in keys:
        if is_expert_key(key):
            layer, expert, scope, name = parse_expert_key(key)
            tensors[layer][expert].add((scope, name))
    for layer, experts in tensors.items():
        num_experts = max(int(extra.get("num_experts", 0)), max(experts) + 1)
        everything = set().union(*experts.values())
        for expert in range(num_experts):
            lacking = everything - experts.get(expert, set())
            if lacking:
                raise UnreadableCheckpointError(f"expert {expert} of layer {layer} lacks {'/'.join(min(lacking))}")


def _check_replay(found: Mapping[str, list[Piece]], extra: Mapping[str, Any]) -> None:
    """The weights of every step of a window at which an expert is frozen."""
    first = int(extra.get("replayed_from", LARGEST))
    for key in filter(is_expert_key, found):
        layer, expert, scope, name = parse_expert_key(key)
        for step in range(first, found[key][0].version) if scope in WEIGHTS else ():
            if replay_key(layer, expert, step, name) not in found:
                raise UnreadableCheckpointError(
                    f"expert {expert} of layer {layer} lacks its weights of step {step} ({name})"
                )


def _dump_envelope(body: bytes) -> bytes:
    return b'{"format":%d,"xxh3":"%s","body":%s}\n' % (_FORMAT, xxhash.xxh3_64_hexdigest(body).encode(), body)


def _parse_envelope(data: bytes, origin: str) -> bytes:
    """The body, if its bytes match the checksum before them."""
    envelope = _ENVELOPE.match(data)
    if envelope is None or not data.endswith(b"}\n"):
        raise UnreadableCheckpointError(f"{origin} is damaged: it is not a manifest")
    if int(envelope[1]) != _FORMAT:
        raise CheckpointError(
            f"{origin} has format {int(envelope[1])}, not {_FORMAT}: read it with the version that wrote it"
        )
    body = data[envelope.end() : -2]
    if xxhash.xxh3_64_hexdigest(body).encode() != envelope[2]:
        raise UnreadableCheckpointError(f"{origin} is damaged: its checksum does not match")
    return body


_DATA = r"[\w.-]+\.rank\d+\.step\d+\.distcp"
_PART = r"part-\d+\.json"
_WHOLE = f"{_DATA}|{_PART}|{re.escape(MANIFEST)}|{re.escape(METADATA)}"
_WRITTEN_HERE = re.compile(rf"{_WHOLE}|\.({_WHOLE})\.[0-9a-f]+\.new")


def is_written_by_saves(name: str) -> bool:
    """Return True if saves write files of such a name."""
    return _WRITTEN_HERE.fullmatch(name) is not None


def delete_staging(path: Path) -> None:
    """Delete a staging directory; it stays where something lies in it that no save writes, or where it is a link.

    A process that is still writing there gets an error when it finds a file or the directory gone.
    """
    if path.is_symlink():
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            if is_written_by_saves(entry.name) and entry.is_file(follow_symlinks=False):
                (path / entry.name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()
