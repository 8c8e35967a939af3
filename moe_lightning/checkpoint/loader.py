"""Reads checkpoints: verified first, by key, for any number of ranks, without unpickling tensors.

Verification compares the checksum of every file, `.metadata` included, with the manifest, and checks that every key is
there exactly once. Tensors are then read as raw bytes at the offsets that the manifest gives; objects are unpickled
with `weights_only=True`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import xxhash
from typing_extensions import override

from moe_lightning.checkpoint.frames import StoredPiece
from moe_lightning.checkpoint.manifest import MANIFEST, METADATA, Manifest, check_coverage
from moe_lightning.checkpoint.source import CheckpointSource
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


class Checkpoint(CheckpointSource):
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
    @override
    def _pieces(self) -> dict[str, list[StoredPiece]]:
        return self.manifest.pieces()

    @property
    @override
    def step(self) -> int:
        return self.manifest.step

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

    @override
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
