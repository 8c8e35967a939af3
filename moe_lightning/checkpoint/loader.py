"""Reads checkpoints: verified first, by key, for any number of ranks, without unpickling tensors.

Verification compares the checksum of every file, `.metadata` included, with the manifest, and checks that every key is
there exactly once. Tensors are then read as raw bytes at the offsets that the manifest gives; objects are unpickled
with `weights_only=True`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from moe_lightning.algorithms.placement import IntArray
from moe_lightning.checkpoint.frames import StoredPiece
from moe_lightning.checkpoint.manifest import MANIFEST, METADATA, Manifest, check_coverage
from moe_lightning.checkpoint.records import DTYPES, OBJECT, is_partial, parse_expert_key
from moe_lightning.checkpoint.store import checkpoints, read_manifest
from moe_lightning.errors import CheckpointError

_HASH_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest whole checkpoint, and what was wrong with the newer ones.

    Attributes:
        checkpoint: verified; None where there is none.
        problems: one sentence per checkpoint that was passed over.
    """

    checkpoint: Checkpoint | None
    problems: tuple[str, ...]


class Checkpoint:
    """One checkpoint directory.

    Args:
        path: the directory.
        run: the run that it must belong to, if that matters.

    Raises:
        CheckpointError: there is no undamaged manifest, or it belongs to another run.
    """

    def __init__(self, path: Path, *, run: str | None = None) -> None:
        self.path = path
        try:
            self.manifest: Manifest = read_manifest(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}") from error
        if run is not None and self.manifest.run != run:
            raise CheckpointError(f"{path} belongs to run {self.manifest.run}, not to {run}: name the right directory")

    @cached_property
    def _pieces(self) -> dict[str, list[StoredPiece]]:
        return self.manifest.pieces()

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that begin with a prefix, sorted."""
        return sorted(key for key in self._pieces if key.startswith(prefix))

    def verify(self) -> None:
        """Compare every file with its checksum, and check coverage.

        Raises:
            CheckpointError: the first file or key that is not as it should be.
        """
        if METADATA not in self.manifest.files:
            raise CheckpointError(f"{self.path / MANIFEST} does not list {METADATA}")
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            for problem in pool.map(self._check_file, sorted(self.manifest.files)):
                if problem:
                    raise CheckpointError(problem)
        check_coverage(self.manifest.stored, extra=self.manifest.extra)
        for item in self.manifest.stored:
            if item.offset + item.length > self.manifest.files[item.file].nbytes:
                raise CheckpointError(f"{item.piece.key} lies outside {self._file(item.file)}")

    def _check_file(self, name: str) -> str | None:
        record, path = self.manifest.files[name], self._file(name)
        digest = xxhash.xxh3_64()
        try:
            size = path.stat().st_size
            if size != record.nbytes:
                return f"{path} is damaged: it has {size} bytes instead of {record.nbytes}"
            with open(path, "rb", buffering=0) as file:
                while chunk := file.read(_HASH_CHUNK_BYTES):
                    digest.update(chunk)
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        return None if digest.hexdigest() == record.xxh3 else f"{path} is damaged: its checksum does not match"

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor under a key.

        Raises:
            CheckpointError: no such key, or it is an object.
        """
        first = self._tensor_pieces(key)[0].piece
        out = torch.empty(first.global_shape, dtype=DTYPES[first.dtype])
        self.read_into(key, out)
        return out

    def read_into(self, key: str, out: torch.Tensor, *, first_row: int = 0) -> None:
        """Fill `out` with rows of the tensor under a key, beginning at `first_row`; converts dtype and device where
        they differ.

        Raises:
            CheckpointError: no such key, or the shapes do not fit.
        """
        pieces = self._tensor_pieces(key)
        shape = pieces[0].piece.global_shape
        fits = out.shape[1:] == shape[1:] and out.dim() == len(shape)
        last_row = first_row + out.shape[0] if shape and fits else 1
        if not fits or (shape and not 0 <= first_row <= last_row <= shape[0]):
            raise CheckpointError(
                f"{key} has shape {list(shape)} in {self.path.name}: rows from {first_row} do not fit {list(out.shape)}"
            )
        for item in pieces:
            piece = item.piece
            if not shape:
                out.copy_(self._raw(item).view(DTYPES[piece.dtype]).view(()))
                continue
            low, high = max(first_row, piece.first_row), min(last_row, piece.first_row + piece.shape[0])
            if low < high:
                rows = self._raw(item).view(DTYPES[piece.dtype]).view(piece.shape)
                out[low - first_row : high - first_row].copy_(rows[low - piece.first_row : high - piece.first_row])

    def read_object(self, key: str) -> Any:
        """The object under a key.

        Raises:
            CheckpointError: no such key, it is a tensor, or its bytes do not match their checksum.
        """
        item = self._pieces_of(key)[0]
        if item.piece.dtype != OBJECT:
            raise CheckpointError(f"{key} is a tensor in {self.path.name}: use read")
        data = self._raw(item).numpy().tobytes()
        if xxhash.xxh3_64_hexdigest(data) != item.piece.xxh3:
            raise CheckpointError(f"{self._file(item.file)} is damaged: the checksum of {key} does not match")
        return torch.load(io.BytesIO(data), weights_only=True)

    def version(self, key: str) -> int:
        """The step after which the state under a key was taken."""
        return min(item.piece.version for item in self._pieces_of(key))

    def expert_versions(self) -> IntArray:
        """int64 [L, E]: the oldest version among the tensors of each expert (-1: no such expert)."""
        versions: dict[tuple[int, int], int] = {}
        for key in self._pieces:
            if is_partial(key):
                layer, expert, _, _ = parse_expert_key(key)
                versions[layer, expert] = min(self.version(key), versions.get((layer, expert), self.manifest.step))
        table = np.full(
            (1 + max((k[0] for k in versions), default=-1), 1 + max((k[1] for k in versions), default=-1)), -1
        )
        for pair, version in versions.items():
            table[pair] = version
        return table.astype(np.int64)

    def _pieces_of(self, key: str) -> list[StoredPiece]:
        if key not in self._pieces:
            raise CheckpointError(
                f"{self.path.name} has no {key!r}: it holds {len(self._pieces)} keys, such as {min(self._pieces)!r}"
            )
        return self._pieces[key]

    def _tensor_pieces(self, key: str) -> list[StoredPiece]:
        items = self._pieces_of(key)
        if items[0].piece.dtype == OBJECT:
            raise CheckpointError(f"{key} is an object in {self.path.name}: use read_object")
        return items

    def _raw(self, item: StoredPiece) -> torch.Tensor:
        """uint8 [nbytes]: a piece's payload, mapped from its file."""
        if item.piece.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        mapped = np.memmap(
            self._file(item.file), mode="c", dtype=np.uint8, offset=item.data_offset, shape=item.piece.nbytes
        )
        return torch.from_numpy(mapped)

    def _file(self, name: str) -> Path:
        return self.path / self.manifest.files[name].path


def find_newest(root: Path, *, run: str | None = None, report: Callable[[str], None] | None = None) -> Found:
    """Verify checkpoints from the newest to the oldest and return the first that is whole.

    Args:
        root: a directory of checkpoints; it may be empty or missing.
        run: the run that they must belong to, if that matters.
        report: told each problem as it is found.
    """
    problems: list[str] = []

    def note(problem: str) -> None:
        problems.append(problem)
        if report is not None:
            report(problem)

    readable = [path for path, _ in checkpoints(root)]
    for path in sorted(root.glob("step-*"), reverse=True):
        if path not in readable and (path / MANIFEST).exists():
            try:
                Checkpoint(path)
            except CheckpointError as error:
                note(str(error))
    for path in readable:
        try:
            checkpoint = Checkpoint(path, run=run)
            checkpoint.verify()
        except CheckpointError as error:
            note(str(error))
        else:
            return Found(checkpoint=checkpoint, problems=tuple(problems))
    return Found(checkpoint=None, problems=tuple(problems))
