"""A checkpoint in memory: pieces from this node's arenas and from peers, read like one from storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from typing_extensions import override

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.reader import CheckpointSource
from moe_lightning.checkpoint.snapshot_index import digest_of
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import OBJECT, Piece, by_key, expert_of


class MemoryCheckpoint(CheckpointSource):
    """The state at a step, put together from snapshots; every piece is compared with its checksum when it is read.

    It is valid until the arenas of this node are written again, except for its objects, which are copied.

    Args:
        step: updates contained in it.
        pieces: of all keys, with their bytes, uint8 [nbytes]; None where this rank did not ask for them.
        versions: int64 [L, E], the version of every expert.
        first: the step that training goes on from; None: `step`.
        storage: the checkpoint that has what is not in memory.
        experts_on_storage: (layer, expert) pairs to be read from there.
        rest_on_storage: whether everything that is no expert is read from there, too.
    """

    def __init__(
        self,
        step: int,
        pieces: Iterable[tuple[Piece, torch.Tensor | None]],
        *,
        versions: IntArray,
        first: int | None = None,
        storage: Checkpoint | None = None,
        experts_on_storage: Iterable[tuple[int, int]] = (),
        rest_on_storage: bool = False,
    ) -> None:
        self.path = Path(f"the snapshot of step {step}")
        self._step, self._versions, self._storage = step, versions, storage
        self._first = step if first is None else first
        listed = list(pieces)
        self._listed = by_key(piece for piece, _ in listed)
        # Objects are small and may be asked for later than tensors.
        self._data = {_name(p): data.clone() if p.dtype == OBJECT else data for p, data in listed if data is not None}
        self._experts_on_storage, self._rest_on_storage = set(experts_on_storage), rest_on_storage

    @property
    @override
    def step(self) -> int:
        return self._step

    @property
    @override
    def first_step(self) -> int:
        return self._first

    @override
    def expert_versions(self) -> IntArray:
        return self._versions.copy()

    @override
    def release(self) -> None:
        objects = {_name(p) for pieces in self._listed.values() for p in pieces if p.dtype == OBJECT}
        self._data = {name: data for name, data in self._data.items() if name in objects}
        if self._storage is not None and self._rest_on_storage:
            self._storage.release()

    @cached_property
    @override
    def _pieces(self) -> Mapping[str, Sequence[Piece]]:
        stored = self._storage._pieces if self._storage is not None else {}
        return {key: pieces for key, pieces in stored.items() if self._is_on_storage(key)} | self._listed

    def _is_on_storage(self, key: str) -> bool:
        expert = expert_of(key)
        return self._rest_on_storage if expert is None else expert in self._experts_on_storage

    @override
    def _raw(self, piece: Piece) -> torch.Tensor:
        if piece.key not in self._listed:
            assert self._storage is not None
            return self._storage._raw(piece)
        data = self._data.get(_name(piece))
        if data is None:
            raise CheckpointError(f"{piece.key} of {self.path} is on another rank: fetch it before it is read")
        if digest_of(data) != piece.xxh3:
            raise CheckpointError(f"{piece.key} of {self.path} is damaged: its checksum does not match")
        return data


def _name(piece: Piece) -> tuple[str, tuple[int, ...]]:
    return piece.key, piece.block.offsets
