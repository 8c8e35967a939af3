"""Reads checkpoints: verified first, by key, for any number of ranks, without unpickling tensors.

Verification compares the checksum of every file, `.metadata` included, with the manifest, and checks that every key is
there exactly once. Tensors are then read as raw bytes at the offsets that the manifest gives; objects are unpickled
with `weights_only=True`. A damaged tensor of an expert can be read from elsewhere (`mending.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import xxhash
from typing_extensions import override

from moe_lightning.checkpoint.manifest import MANIFEST, METADATA, Manifest, check_coverage
from moe_lightning.checkpoint.reader import CheckpointSource
from moe_lightning.checkpoint.storage import Place
from moe_lightning.checkpoint.storages import storage_of
from moe_lightning.checkpoint.store import checkpoints, directories, has_manifest, read_manifest
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import DTYPES, Block, Piece, by_key, is_expert_key, parse_expert_key

_ASKED_FOR_LATER = ("ledger", "trainer")
"""Objects."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest whole checkpoint, and what was wrong with the newer ones.

    Attributes:
        checkpoint: verified; None where there is none.
        problems: one sentence per checkpoint that was passed over.
    """

    checkpoint: Checkpoint | None
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A file that is not as the manifest says.

    Attributes:
        problem: a sentence that names it.
        keys: of the tensors and objects in it whose bytes are wrong; none where only what lies between them is.
    """

    problem: str
    keys: frozenset[str]


class Checkpoint(CheckpointSource):
    """One checkpoint directory.

    Args:
        path: the directory.
        run: the run that it must belong to, if that matters.
        substitutes: key of a damaged expert tensor -> the name of the checkpoint beside this one that it is read from,
            or None: the mean of the layer's other experts takes its place. Whoever chose them has compared what is
            read with its checksums.

    Raises:
        CheckpointError: there is no undamaged manifest, or it belongs to another run.
    """

    def __init__(
        self, path: Place, *, run: str | None = None, substitutes: Mapping[str, str | None] | None = None
    ) -> None:
        self.path, self._storage = path, storage_of(path)
        self._held: dict[str, torch.Tensor] = {}
        self.substitutes = dict(substitutes or {})
        try:
            self.manifest: Manifest = read_manifest(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}") from error
        if run is not None and self.manifest.run != run:
            raise CheckpointError(f"{path} belongs to run {self.manifest.run}, not to {run}: name the right directory")

    @cached_property
    @override
    def _pieces(self) -> Mapping[str, Sequence[Piece]]:
        return {**self._stored} | {
            key: self._others[name].stored(key) if name else [replace(piece, version=0) for piece in self.stored(key)]
            for key, name in self.substitutes.items()
        }

    def stored(self, key: str) -> Sequence[Piece]:
        """What the manifest says of a key; nothing where it has none."""
        return self._stored.get(key, ())

    @cached_property
    def _stored(self) -> Mapping[str, Sequence[Piece]]:
        return by_key(self.manifest.stored)

    @cached_property
    def _others(self) -> Mapping[str, Checkpoint]:
        """The checkpoints that its substitutes are read from."""
        return {name: Checkpoint(self.path.parent / name) for name in {*self.substitutes.values()} if name}

    def outline(self, key: str) -> list[tuple[str, Block]]:
        """Dtype and block of every piece that the manifest lists."""
        return [(piece.dtype, piece.block) for piece in self.stored(key)]

    def peers(self, key: str) -> list[str]:
        """Keys of the same tensor of the layer's other experts, whole ones with a version of their own."""
        layer, _, *which = parse_expert_key(key)

        def is_peer(other: str) -> bool:
            other_layer, _, *other_which = parse_expert_key(other)
            is_alike = (other_layer, other_which) == (layer, which) and self.outline(other) == self.outline(key)
            return is_alike and self.substitutes.get(other, "its own") is not None

        if len(self.stored(key)) != 1:
            return []
        return [other for other in self._stored if other != key and is_expert_key(other) and is_peer(other)]

    @property
    @override
    def step(self) -> int:
        return self.manifest.step

    @property
    @override
    def first_step(self) -> int:
        return self.manifest.first_step

    @property
    def directories(self) -> list[Place]:
        """Its own, and those that its substitutes are read from."""
        return [self.path, *(self.path.parent / name for name in sorted({*filter(None, self.substitutes.values())}))]

    def verify(self) -> None:
        """Compare every file with its checksum, and check coverage.

        Raises:
            CheckpointError: the first file or key that is not as it should be.
        """
        self._check_structure()
        for _, problem in self._file_problems():
            raise CheckpointError(problem)

    def damages(self) -> list[Damage]:
        """Every file that is not as it should be, and what of its contents is wrong.

        Raises:
            CheckpointError: the manifest does not describe a whole checkpoint.
        """
        self._check_structure()
        return [
            Damage(
                problem=problem,
                keys=frozenset(
                    piece.key for piece in self.manifest.stored if piece.at.file == name and not self.is_intact(piece)
                ),
            )
            for name, problem in self._file_problems()
        ]

    def is_intact(self, piece: Piece) -> bool:
        """Whether the bytes of a piece match its checksum."""
        try:
            digest, nbytes = self._digest(self._file(piece.at.file), piece.at.data_offset, piece.nbytes)
        except OSError:
            return False
        return (nbytes, digest) == (piece.nbytes, piece.xxh3)

    def _digest(self, path: Place, offset: int = 0, nbytes: int | None = None) -> tuple[str, int]:
        """(xxh3, size) of a file, or of as much as there is of a range."""
        digest, found = xxhash.xxh3_64(), 0
        for chunk in self._storage.chunks(path, offset=offset, nbytes=nbytes):
            digest.update(chunk)
            found += len(chunk)
        return digest.hexdigest(), found

    def _check_structure(self) -> None:
        if METADATA not in self.manifest.files:
            raise CheckpointError(f"{self.path / MANIFEST} does not list {METADATA}")
        check_coverage(self.manifest.stored, extra=self.manifest.extra)

    def _file_problems(self) -> Iterator[tuple[str, str]]:
        """(name, what is wrong with it) of every file that is not as it should be."""
        names = sorted(self.manifest.files)
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            for name, problem in zip(names, pool.map(self._check_file, names), strict=True):
                if problem:
                    yield name, problem

    def _check_file(self, name: str) -> str | None:
        record, path = self.manifest.files[name], self._file(name)
        try:
            size = self._storage.stat(path).nbytes
            if size != record.nbytes:
                return f"{path} is damaged: it has {size} bytes instead of {record.nbytes}"
            digest, _ = self._digest(path)
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        return None if digest == record.xxh3 else f"{path} is damaged: its checksum does not match"

    @override
    def release(self) -> None:
        """Training goes on from it now, and retention may remove it before what is asked for later is read."""
        self._held = {key: self._raw(self._pieces[key][0]) for key in _ASKED_FOR_LATER if key in self._pieces}

    @override
    def _raw(self, piece: Piece) -> torch.Tensor:
        """uint8 [nbytes]: a piece's payload, as its storage hands it out."""
        if piece.key in self._held:
            return self._held[piece.key]
        if piece.key in self.substitutes:
            name = self.substitutes[piece.key]
            return self._others[name]._raw(piece) if name else self._mean(piece)
        if piece.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        path = self._file(piece.at.file)
        try:
            return self._storage.tensor(path, offset=piece.at.data_offset, nbytes=piece.nbytes)
        except (OSError, ValueError) as error:  # shorter than it was when it was verified
            raise CheckpointError(f"{path} has changed while it was read ({error}): start again") from error

    def _mean(self, piece: Piece) -> torch.Tensor:
        """What takes the place of a piece whose every version is lost: the mean of the layer's other experts."""
        dtype, shape = DTYPES[piece.dtype], piece.block.sizes
        peers = [self._pieces[key][0] for key in self.peers(piece.key)]
        total = torch.zeros(shape, dtype=torch.float32)
        for peer in peers:
            total += self._raw(peer).view(dtype).view(shape).to(torch.float32)
        return (total / len(peers)).to(dtype).flatten().view(torch.uint8)

    def _file(self, name: str) -> Place:
        return self.path / self.manifest.files[name].path


def find_newest(root: Place, *, run: str | None = None) -> Found:
    """Verify checkpoints from the newest to the oldest and return the first that is whole.

    Args:
        root: a directory of checkpoints; it may be empty or missing.
        run: the run that they must belong to, if that matters.
    """
    problems = list(unreadable(root))
    for path, _ in checkpoints(root):
        try:
            checkpoint = Checkpoint(path, run=run)
            checkpoint.verify()
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return Found(checkpoint=checkpoint, problems=tuple(problems))
    return Found(checkpoint=None, problems=tuple(problems))


def unreadable(root: Place) -> Iterator[str]:
    """One sentence for every checkpoint of a directory whose manifest cannot be read, the newest first."""
    readable = {path for path, _ in checkpoints(root)}
    for path in reversed(directories(root)):
        if path not in readable and has_manifest(path):
            try:
                Checkpoint(path)
            except CheckpointError as error:
                yield str(error)
