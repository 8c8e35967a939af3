"""The manifest: what a checkpoint directory holds, with checksums; written last, it is the commit.

A manifest, and the part that each rank contributes to it, is JSON in an envelope with its own checksum. Nothing of a
checkpoint is interpreted in any other way before the manifest vouched for it.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, Self

import xxhash

from moe_lightning.checkpoint.schema import LARGEST, check_file, check_pieces, check_places, check_record, read_object
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import (
    DTYPES,
    OBJECT,
    WEIGHTS,
    Piece,
    by_key,
    is_expert_key,
    parse_expert_key,
    replay_key,
)

MANIFEST = "MANIFEST.json"
METADATA = ".metadata"
PRUNED = "PRUNED.json"
"""What becomes of the manifest of a checkpoint that is being deleted."""
_FORMATS = 1, 2
"""Of what holds a state, and of what holds a window whose steps are run again after a restore, which older versions of
this project would take for a state."""
_ENVELOPE = re.compile(rb'\{"format":(\d{1,9}),"xxh3":"([0-9a-f]{16})","body":')
_SAFE_PATH = re.compile(r"(\.\./step-\d+(-[\w-]+)?/)?[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of a checkpoint: path relative to its directory (in the directory itself or in a sibling), size and
    hexadecimal xxh3."""

    path: str
    nbytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What parts and manifests have in common.

    Attributes:
        run: the training run it belongs to.
        session: the start of that run that wrote it; experts are carried over only within a session.
        step: training step after which the state was taken.
        world_size: ranks that wrote it.
        files: file name -> record, `.metadata` included.
        stored: every piece of every key.
        extra: what rank 0 gave to `Snapshotter.start`.
        world: number of the world that wrote it (`fence.py`); 0: of none.
    """

    run: str
    session: str
    step: int
    world_size: int
    files: Mapping[str, FileRecord]
    stored: tuple[Piece, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    world: int = 0

    @property
    def first_step(self) -> int:
        """The step after which the oldest of a window was taken (`replay_window.py`): a restore runs the steps from
        there to `step` again. Of any other checkpoint `step`."""
        return min(self.step, int(self.extra.get("replayed_from", self.step)))

    def dump(self) -> bytes:
        return _seal(_jsonable(self), _FORMATS[self.first_step < self.step])

    @classmethod
    def parse(cls, data: bytes, origin: str) -> Self:
        """Read a record.

        Raises:
            CheckpointError: it is damaged, of another format, or names files outside its directory.
        """
        return cls(**_typed(_unseal(data, origin), cls, origin))


@dataclass(frozen=True, kw_only=True)
class Part(_Record):
    """What one rank wrote for one checkpoint."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class Manifest(_Record):
    """A whole checkpoint.

    Attributes:
        sequence: counts the commits of a directory: the newest checkpoint is the one with the highest, whatever its
            step.
        created_s: time of the commit, seconds since 1970.
        previous: name of the checkpoint that experts were carried over from, or None.
    """

    sequence: int
    created_s: float
    previous: str | None

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
    """Every key exactly once, every row of every tensor exactly once, every expert of a layer with the same tensors.

    Args:
        required: keys that must be there.
        extra: a manifest's extra entries; `num_layers` and `num_experts` are checked where they are given.

    Raises:
        CheckpointError: the first key for which that does not hold.
    """
    found = by_key(stored)
    missing = sorted(set(required) - found.keys())
    if missing:
        raise CheckpointError(f"{missing[0]} is missing ({len(missing)} keys are)")
    for key, pieces in found.items():
        _check_blocks(key, pieces)
    _check_experts(found.keys(), extra or {})
    _check_replay(found, extra or {})


def _check_blocks(key: str, pieces: list[Piece]) -> None:
    """Every number of a tensor once, in pieces by their offsets."""
    first = pieces[0]
    if first.dtype != OBJECT and first.dtype not in DTYPES:
        raise CheckpointError(f"{key} has the unknown dtype {first.dtype}")
    whole = first.block.whole
    if not whole:
        if len(pieces) != 1:
            raise CheckpointError(f"{key} is there {len(pieces)} times")
        return
    if any((piece.dtype, piece.block.whole) != (first.dtype, whole) for piece in pieces):
        raise CheckpointError(f"{key} has pieces of different dtypes or shapes")
    if not all(piece.block.is_rows for piece in pieces):
        numbers = sum(math.prod(piece.block.sizes) for piece in pieces)
        if numbers != math.prod(whole) or any(a.block.common(b.block) for a, b in itertools.combinations(pieces, 2)):
            raise CheckpointError(f"parts of {key} are missing or there twice")
        return
    row = 0
    for piece in pieces:
        first_row = piece.block.offsets[0]
        if first_row != row:
            raise CheckpointError(
                f"rows {min(row, first_row)} to {max(row, first_row)} of {key} are missing or there twice"
            )
        row += piece.block.sizes[0]
    if row != whole[0]:
        raise CheckpointError(f"rows {row} to {whole[0]} of {key} are missing")


def _check_experts(keys: Iterable[str], extra: Mapping[str, Any]) -> None:
    tensors: dict[int, dict[int, set[tuple[str, str]]]] = defaultdict(lambda: defaultdict(set))
    for key in keys:
        if is_expert_key(key):
            layer, expert, scope, name = parse_expert_key(key)
            tensors[layer][expert].add((scope, name))
    for layer in range(int(extra.get("num_layers", 0))):
        if layer not in tensors:
            raise CheckpointError(f"all experts of layer {layer} are missing")
    for layer, experts in tensors.items():
        num_experts = max(int(extra.get("num_experts", 0)), max(experts) + 1)
        everything = set().union(*experts.values())
        for expert in range(num_experts):
            lacking = everything - experts.get(expert, set())
            if lacking:
                raise CheckpointError(f"expert {expert} of layer {layer} lacks {'/'.join(min(lacking))}")


def _check_replay(found: Mapping[str, list[Piece]], extra: Mapping[str, Any]) -> None:
    """The weights of every step of a window at which an expert is frozen."""
    first = int(extra.get("replayed_from", LARGEST))
    for key in filter(is_expert_key, found):
        layer, expert, scope, name = parse_expert_key(key)
        for step in range(first, found[key][0].version) if scope in WEIGHTS else ():
            if replay_key(layer, expert, step, name) not in found:
                raise CheckpointError(f"expert {expert} of layer {layer} lacks its weights of step {step} ({name})")


def _jsonable(record: _Record) -> dict[str, Any]:
    values = dict(vars(record))
    values["files"] = {name: vars(entry) for name, entry in record.files.items()}
    values["stored"] = [piece.to_json() for piece in record.stored]
    return values


def _typed(values: dict[str, Any], record: type[_Record], origin: str) -> dict[str, Any]:
    known = {entry.name: entry for entry in fields(record)}
    needed = [name for name, entry in known.items() if entry.default is MISSING and entry.default_factory is MISSING]
    check_record(values, needed, origin)
    for name, entry in values["files"].items():
        check_file(name, entry, origin)
    try:
        files = {name: FileRecord(**entry) for name, entry in values["files"].items()}
        stored = tuple(Piece.from_json(item, "file") for item in values["stored"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{origin} was written by something else: it lacks an entry ({error})") from error
    for name, entry in files.items():
        if not _SAFE_PATH.fullmatch(entry.path) or PurePosixPath(entry.path).name != name or name in (".", ".."):
            raise CheckpointError(f"{origin} names the file {entry.path!r}, which no checkpoint of ours would hold")
    check_pieces(stored, origin)
    check_places(stored, {name: entry.nbytes for name, entry in files.items()}, origin)
    return {name: value for name, value in values.items() if name in known} | {"files": files, "stored": stored}


def _seal(values: dict[str, Any], form: int) -> bytes:
    body = json.dumps(values, separators=(",", ":")).encode()
    return b'{"format":%d,"xxh3":"%s","body":%s}\n' % (form, xxhash.xxh3_64_hexdigest(body).encode(), body)


def _unseal(data: bytes, origin: str) -> dict[str, Any]:
    """The body, if its bytes match the checksum before them."""
    envelope = _ENVELOPE.match(data)
    if envelope is None or not data.endswith(b"}\n"):
        raise CheckpointError(f"{origin} is damaged: it is no manifest")
    if int(envelope[1]) not in _FORMATS:
        raise CheckpointError(
            f"{origin} has format {int(envelope[1])}, not {_FORMATS[0]} or {_FORMATS[1]}: read it with the version "
            "that wrote it"
        )
    body = data[envelope.end() : -2]
    if xxhash.xxh3_64_hexdigest(body).encode() != envelope[2]:
        raise CheckpointError(f"{origin} is damaged: its checksum does not match")
    return read_object(body, origin, subject="its body")
