"""Verified reads of checkpoints by key, for any number of ranks, without unpickling tensors.

Verification compares the checksum of every file, `.metadata` included, with the manifest, and checks that every key is
there exactly once. Tensors are then read as raw bytes at the offsets that the manifest gives; objects are unpickled
with `weights_only=True`. `CheckpointSource` is the interface of restores: a checkpoint on storage or snapshots in
memory, in pieces that may be rows of a tensor.

Every piece has a checksum of its own, so damage is located to the tensor. A damaged expert tensor is read in the newest
version, not younger than its own, that is undamaged in any stored checkpoint: a second copy of the same version costs
nothing, an older one the tokens in between (`CheckpointSource.expert_versions`, counted by the ledger). If there is
none, no checkpoint with that expert can be used. Everything else is new in each checkpoint: if it is damaged, the
checkpoint before is tried. The same holds for windows whose steps are run again, because those promise that nothing is
lost.

Sources for falling back by expert: PEC 3.1 (experts tolerate older state); the papers do not treat damage on storage.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash
from typing_extensions import override

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.directory import (
    damaged_after,
    headings,
    is_sound,
    read_manifest,
    run_record_problem,
    unreadable,
)
from moe_lightning.checkpoint.files import CURE_OF_DAMAGE, TRUST_ADVICE, load_plain, load_trusted
from moe_lightning.checkpoint.manifest import METADATA, Manifest, check_coverage
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.policy import unseen_tokens
from moe_lightning.checkpoint.storage import storage_of
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.errors import CheckpointError, UnreadableCheckpointError
from moe_lightning.state.pieces import DTYPES, OBJECT, Block, Piece, by_key, is_expert_key, parse_expert_key, replay_key


def oldest_versions(pieces: Iterable[Piece]) -> dict[tuple[int, int], int]:
    """By (layer, expert): the oldest version among its tensors."""
    versions: dict[tuple[int, int], int] = {}
    for piece in pieces:
        if is_expert_key(piece.key):
            layer, expert, _, _ = parse_expert_key(piece.key)
            versions[layer, expert] = min(piece.version, versions.get((layer, expert), piece.version))
    return versions


class CheckpointSource(ABC):
    """The state of a run at a step, by key.

    Attributes:
        path: where it lies; its name stands in messages.
        step: updates contained in everything but stale experts.
        first_step: the step after which what is no expert was taken: training goes on from there, and from `step` on
            its state is whole (`training_state.py`). Of all but windows `step`.
        is_trusted: objects are unpickled, which may run code of whoever wrote them; else only tensors and plain values
            are read.
    """

    path: Place
    step: int
    first_step: int
    is_trusted = False

    def trust(self) -> None:
        """Unpickle objects from now on."""
        self.is_trusted = True

    def key_at(self, key: str, step: int) -> str:
        """Under which key an expert's weights of a step of the window lie, given that of its whole state."""
        layer, expert, _, name = parse_expert_key(key)
        frozen = replay_key(layer, expert, step, name)
        return frozen if frozen in self._pieces else key

    def read_first(self, key: str) -> torch.Tensor:
        """A value of the model as it was after `first_step`, in its own dtype.

        Raises:
            CheckpointError: no such key, or it is an object.
        """
        key_then = self.key_at(key, self.first_step) if is_expert_key(key) else key
        return self.read(key_then).to(DTYPES[self._tensor_pieces(key)[0].dtype])

    @property
    @abstractmethod
    def _pieces(self) -> Mapping[str, Sequence[Piece]]:
        """The pieces of every key, by their offsets."""

    @abstractmethod
    def _raw(self, piece: Piece) -> torch.Tensor:
        """uint8 [nbytes]: the payload of a piece."""

    def release(self) -> None:  # noqa: B027  # most hold none
        """Release tensors in memory after a restore. Later reads still work."""

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that begin with a prefix, sorted."""
        return sorted(key for key in self._pieces if key.startswith(prefix))

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor under a key.

        Raises:
            CheckpointError: no such key, or it is an object.
        """
        first = self._tensor_pieces(key)[0]
        out = torch.empty(first.block.whole, dtype=DTYPES[first.dtype])
        self.read_into(key, out)
        return out

    def read_into(self, key: str, out: torch.Tensor, *, block: Block | None = None) -> None:
        """Fill `out` with the tensor under a key, or with a block of it; converts dtype and device where they differ.

        Raises:
            CheckpointError: no such key, or the shapes do not fit.
        """
        pieces = self._tensor_pieces(key)
        shape = pieces[0].block.whole
        wanted = block or Block.of(out.shape)
        if wanted.whole != shape or not wanted.is_inside:
            raise CheckpointError(
                f"{key} has shape {list(shape)} in {self.path.name}: {list(out.shape)} is no part of it"
            )
        for piece in pieces:
            shared = wanted.intersection(piece.block)
            if shared is not None:
                stored = self._raw(piece).view(DTYPES[piece.dtype]).view(piece.block.sizes)
                out[shared.within(wanted)].copy_(stored[shared.within(piece.block)])

    def read_object(self, key: str) -> Any:
        """The object under a key.

        Raises:
            CheckpointError: no such key, it is a tensor, its bytes do not match their checksum, or it holds what is not
                read.
        """
        piece = self._pieces_of(key)[0]
        if piece.dtype != OBJECT:
            raise CheckpointError(f"{key} is a tensor in {self.path.name}: use read")
        data = self._raw(piece).numpy().tobytes()
        if xxhash.xxh3_64_hexdigest(data) != piece.xxh3:
            raise UnreadableCheckpointError(f"{self.path} is damaged: the checksum of {key} does not match")
        origin = f"{key} in {self.path}"
        return load_trusted(data, origin) if self.is_trusted else load_plain(data, origin, TRUST_ADVICE)

    def check_objects(self) -> None:
        """Read every object.

        Raises:
            CheckpointError: one is damaged, or holds more than tensors and plain values.
        """
        for key, pieces in self._pieces.items():
            if pieces[0].dtype == OBJECT:
                self.read_object(key)

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of every tensor."""
        firsts = {key: pieces[0] for key, pieces in self._pieces.items()}
        return {key: (first.dtype, first.block.whole) for key, first in firsts.items() if first.dtype != OBJECT}

    def version(self, key: str) -> int:
        """The step after which the state under a key was taken."""
        return min(piece.version for piece in self._pieces_of(key))

    def expert_versions(self) -> IntArray:
        """int64 [L, E]: the oldest version among the tensors of each expert (-1: no such expert)."""
        versions = oldest_versions(piece for pieces in self._pieces.values() for piece in pieces)
        table = np.full(
            (1 + max((k[0] for k in versions), default=-1), 1 + max((k[1] for k in versions), default=-1)), -1
        )
        for pair, version in versions.items():
            table[pair] = min(version, self.step)
        return table.astype(np.int64)

    def _pieces_of(self, key: str) -> Sequence[Piece]:
        if key not in self._pieces:
            raise CheckpointError(
                f"{self.path.name} has no {key!r}: it holds {len(self._pieces)} keys, such as {min(self._pieces)!r}"
            )
        return self._pieces[key]

    def _tensor_pieces(self, key: str) -> Sequence[Piece]:
        pieces = self._pieces_of(key)
        if pieces[0].dtype == OBJECT:
            raise CheckpointError(f"{key} is an object in {self.path.name}: use read_object")
        return pieces


_ASKED_FOR_LATER = ("ledger", "trainer")
"""Objects."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A verified checkpoint, and what was wrong with it and with newer ones.

    Attributes:
        checkpoint: verified; None where there is none.
        problems: one sentence for each damage that was repaired and each checkpoint that was passed over.
    """

    checkpoint: Checkpoint | None
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DamagedFile:
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
        substitutes: key of a damaged expert tensor -> the name of the checkpoint beside this one that it is read from.
            Whoever chose them has compared what is read with its checksums.

    Raises:
        CheckpointError: there is no undamaged manifest, or it belongs to another run.
    """

    def __init__(self, path: Place, *, run: str | None = None, substitutes: Mapping[str, str] | None = None) -> None:
        self.path, self._storage = path, storage_of(path)
        self._held: dict[str, torch.Tensor] = {}
        self.substitutes = dict(substitutes or {})
        try:
            self.manifest: Manifest = read_manifest(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UnreadableCheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}") from error
        if run is not None and self.manifest.run != run:
            raise CheckpointError(f"{path} belongs to run {self.manifest.run}, not to {run}: name the right directory")
        self.step, self.first_step = self.manifest.step, self.manifest.first_step

    @cached_property
    @override
    def _pieces(self) -> Mapping[str, Sequence[Piece]]:
        return {**self._stored} | {key: self._others[name].stored(key) for key, name in self.substitutes.items()}

    def stored(self, key: str) -> Sequence[Piece]:
        """Return the manifest's pieces of a key; none if it is unknown."""
        return self._stored.get(key, ())

    @cached_property
    def _stored(self) -> Mapping[str, Sequence[Piece]]:
        return by_key(self.manifest.stored)

    @cached_property
    def _others(self) -> Mapping[str, Checkpoint]:
        """The checkpoints that its substitutes are read from."""
        return {name: Checkpoint(self.path.parent / name) for name in {*self.substitutes.values()}}

    def outline(self, key: str) -> list[tuple[str, Block]]:
        """Dtype and block of every piece that the manifest lists."""
        return [(piece.dtype, piece.block) for piece in self.stored(key)]

    @property
    def directories(self) -> list[Place]:
        """Its own, and those that its substitutes are read from."""
        return [self.path, *(self.path.parent / name for name in sorted({*self.substitutes.values()}))]

    def verify(self) -> None:
        """Compare every file with its checksum, and check coverage.

        Raises:
            CheckpointError: the first file or key that is not as it should be.
        """
        for damage in self.damages():
            raise UnreadableCheckpointError(damage.problem)

    def damages(self, *, share: tuple[int, int] = (0, 1)) -> list[DamagedFile]:
        """Every file that is not as it should be, and what of its contents is wrong.

        Args:
            share: (number, shares): only this one of so many shares of the files.

        Raises:
            CheckpointError: the manifest does not describe a whole checkpoint.
        """
        if METADATA not in self.manifest.files:
            raise UnreadableCheckpointError(f"{self.path / MANIFEST} does not list {METADATA}")
        check_coverage(self.manifest.stored, extra=self.manifest.extra)
        number, shares = share
        names = sorted(self.manifest.files)[number::shares]
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            problems = dict(zip(names, pool.map(self._check_file, names), strict=True))
        found = []
        for name, problem in problems.items():
            if problem is not None:
                pieces = (piece for piece in self.manifest.stored if piece.at.file == name)
                wrong = frozenset(piece.key for piece in pieces if not self.is_intact(piece))
                found.append(DamagedFile(problem=problem, keys=wrong))
        return found

    @property
    def has_intact_substitutes(self) -> bool:
        """True if what is read from checkpoints beside it matches the checksums there."""
        read = ((self._others[name], key) for key, name in self.substitutes.items())
        return all(other.is_intact(piece) for other, key in read for piece in other.stored(key))

    def is_intact(self, piece: Piece) -> bool:
        """Return True if the bytes of a piece match its checksum."""
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
            return self._others[self.substitutes[piece.key]]._raw(piece)
        if piece.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        path = self._file(piece.at.file)
        try:
            return self._storage.tensor(path, offset=piece.at.data_offset, nbytes=piece.nbytes)
        except (OSError, ValueError) as error:  # shorter than it was when it was verified
            raise CheckpointError(f"{path} has changed while it was read ({error}): start again") from error

    def _file(self, name: str) -> Place:
        return self.path / self.manifest.files[name].path


def find_newest(root: Place, *, run: str | None = None) -> Found:
    """Verify checkpoints from the newest to the oldest and return the first that is whole, and before whose save no
    memory was damaged.

    Args:
        root: a directory of checkpoints; it may be empty or missing.
        run: the run that they must belong to, if that matters.
    """

    def damages_of(checkpoint: Checkpoint) -> list[DamagedFile]:
        checkpoint.verify()
        return []

    return find_usable(root, run=run, damages_of=damages_of)


def _saved_soundly(root: Place) -> tuple[list[Place], list[str]]:
    """Return the readable checkpoints, newest first, without those that may hold damaged memory, and a sentence for
    each of these.
    """
    damaged, sound, problems = damaged_after(root), [], []
    for path, manifest in headings(root):
        if is_sound(manifest.session, manifest.step, damaged):
            sound.append(path)
        else:
            problems.append(_unsound(path, damaged[manifest.session]))
    return sound, problems


def _unsound(path: Place, last_good: int) -> str:
    return f"{path} may hold memory that was damaged after step {last_good}"


DamagesOf = Callable[[Checkpoint], Sequence[DamagedFile]]
"""As `Checkpoint.damages`."""


def find_usable(root: Place, *, run: str | None = None, damages_of: DamagesOf = Checkpoint.damages) -> Found:
    """The newest checkpoint that is whole or can be repaired, and no memory was damaged before it was saved.

    Args:
        root: a directory of checkpoints; it may be empty or missing.
        run: the run that they must belong to, if that matters.
        damages_of: compares the files of a checkpoint with their checksums.
    """
    problems: list[str] = []
    record_problem = run_record_problem(root)
    if record_problem is not None:
        problems.append(f"{record_problem}; the checkpoints beside it tell the run")
    for path in unreadable(root):
        try:
            Checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
    sound, others = _saved_soundly(root)
    problems += others
    for path in sound:
        try:
            checkpoint, sentences = _mend(Checkpoint(path, run=run), sound, damages_of)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return Found(checkpoint=checkpoint, problems=(*problems, *sentences))
    return Found(checkpoint=None, problems=tuple(problems))


def repaired(path: Place, *, damages_of: DamagesOf = Checkpoint.damages) -> Found:
    """One checkpoint, repaired from sound ones beside it where it is damaged.

    Args:
        damages_of: as for `find_usable`.

    Raises:
        CheckpointError: it is none, something else than experts is damaged, or an expert has no undamaged version.
    """
    named, since = Checkpoint(path), damaged_after(path.parent)
    session, step = named.manifest.session, named.manifest.step
    problems: list[str] = []
    if not is_sound(session, step, since):
        problems.append(f"{_unsound(path, since[session])}: name an older one, or give {path.parent}")
    try:
        checkpoint, sentences = _mend(named, _saved_soundly(path.parent)[0], damages_of)
    except UnreadableCheckpointError as error:
        raise CheckpointError(f"{error}; {CURE_OF_DAMAGE}") from error
    return Found(checkpoint=checkpoint, problems=(*problems, *sentences))


def _mend(checkpoint: Checkpoint, paths: Sequence[Place], damages_of: DamagesOf) -> tuple[Checkpoint, list[str]]:
    """A checkpoint of which everything can be read, and what was wrong with it and what that costs."""
    damages = damages_of(checkpoint)
    for damage in damages:
        if not all(is_expert_key(key) for key in damage.keys) or (
            damage.keys and checkpoint.first_step < checkpoint.step
        ):
            raise UnreadableCheckpointError(damage.problem)
    lost = sorted({key for damage in damages for key in damage.keys})
    if not lost:
        return checkpoint, [_harmless(damage) for damage in damages]
    others = list(_others(checkpoint, paths))
    substitutes = {}
    for key in lost:
        name = _newest_intact(key, checkpoint, others)
        if name is None:
            problem = next(damage.problem for damage in damages if key in damage.keys)
            layer, expert = parse_expert_key(key)[:2]
            raise UnreadableCheckpointError(
                f"{problem}, and no kept checkpoint has another version of expert {expert} of layer {layer}"
            )
        substitutes[key] = name
    whole = Checkpoint(checkpoint.path, substitutes=substitutes)
    costs = _costs(checkpoint, whole)
    return whole, [_sentence(d, whole, costs) if d.keys else _harmless(d) for d in damages]


def _others(checkpoint: Checkpoint, paths: Sequence[Place]) -> Iterator[Checkpoint]:
    for path in paths:
        if path != checkpoint.path:
            try:
                other = Checkpoint(path, run=checkpoint.manifest.run)
            except CheckpointError:
                continue  # pruned meanwhile, or another run's
            yield other


def _newest_intact(key: str, checkpoint: Checkpoint, others: Sequence[Checkpoint]) -> str | None:
    """The checkpoint with the newest undamaged version of a tensor that is no younger than the checkpoint's own."""
    wanted, newest = checkpoint.outline(key), checkpoint.version(key)
    fitting = [other for other in others if other.outline(key) == wanted and other.version(key) <= newest]
    for other in sorted(fitting, key=lambda other: -other.version(key)):
        if all(other.is_intact(piece) for piece in other.stored(key)):
            return other.path.name
    return None


def _costs(before: Checkpoint, after: Checkpoint) -> Mapping[tuple[int, int], int] | None:
    """(layer, expert) -> tokens lost by reading other versions; None where the checkpoint counts none."""
    if not before.keys("ledger"):
        return None
    saved = before.read_object("ledger")
    lost = unseen_tokens(saved, before.step, after.expert_versions())
    lost -= unseen_tokens(saved, before.step, before.expert_versions())
    return {(layer, expert): int(lost[layer, expert]) for layer, expert in np.argwhere(lost).tolist()}


def _harmless(damage: DamagedFile) -> str:
    return f"{damage.problem}; it holds no state, so nothing is lost"


def _sentence(damage: DamagedFile, after: Checkpoint, costs: Mapping[tuple[int, int], int] | None) -> str:
    """Describe the damage, where the experts in it are read instead, and the tokens lost."""
    experts = sorted({parse_expert_key(key)[:2] for key in damage.keys})
    layer, expert = experts[0]
    more = f" and {len(experts) - 1} more are" if len(experts) > 1 else " is"
    names = ", ".join(sorted({after.substitutes[key] for key in damage.keys}))
    lost = "tokens are not counted" if costs is None else f"{sum(costs.get(e, 0) for e in experts)} tokens are lost"
    return f"{damage.problem}; expert {expert} of layer {layer}{more} read from {names}; {lost}"
