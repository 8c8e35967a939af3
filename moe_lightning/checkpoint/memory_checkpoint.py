"""A checkpoint in memory: pieces from this node's arenas and from peers, read like one from storage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from moe_lightning.algorithms.placement import IntArray
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.reader import CheckpointSource, Held
from moe_lightning.checkpoint.snapshot_index import digest_of
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import OBJECT, Piece, is_partial, parse_expert_key


@dataclass(frozen=True, kw_only=True, eq=False)
class FetchedPiece:
    """A piece of a snapshot.

    Attributes:
        data: uint8 [nbytes]; None where another rank has it.
    """

    piece: Piece
    data: torch.Tensor | None


class MemoryCheckpoint(CheckpointSource):
    """The state at a step, put together from snapshots; every piece is compared with its checksum when it is read.

    It is valid until the arenas of this node are written again, except for its objects, which are copied.

    Args:
        step: updates contained in it.
        pieces: of all keys; those that this rank did not ask for are listed without data.
        versions: int64 [L, E], the version of every expert.
        storage: the checkpoint that has what is not in memory.
        experts_on_storage: (layer, expert) pairs to be read from there.
        rest_on_storage: whether everything that is no expert is read from there, too.
    """

    def __init__(
        self,
        step: int,
        pieces: Iterable[FetchedPiece],
        *,
        versions: IntArray,
        storage: Checkpoint | None = None,
        experts_on_storage: Iterable[tuple[int, int]] = (),
        rest_on_storage: bool = False,
    ) -> None:
        self.path = Path(f"the snapshot of step {step}")
        self._step, self._versions, self._storage = step, versions, storage
        self._fetched = [_kept(piece) for piece in pieces]
        self._experts_on_storage, self._rest_on_storage = set(experts_on_storage), rest_on_storage

    @property
    @override
    def step(self) -> int:
        return self._step

    @override
    def expert_versions(self) -> IntArray:
        return self._versions.copy()

    def release(self) -> None:
        """Let go of all tensors; objects can still be read."""
        self._fetched = [
            p if p.piece.dtype == OBJECT else FetchedPiece(piece=p.piece, data=None) for p in self._fetched
        ]
        self.__dict__.pop("_pieces", None)

    @cached_property
    @override
    def _pieces(self) -> Mapping[str, Sequence[Held]]:
        found: dict[str, list[Held]] = defaultdict(list)
        for item in sorted(self._fetched, key=lambda item: item.piece.first_row):
            found[item.piece.key].append(item)
        if self._storage is not None:
            for key, items in self._storage._pieces.items():
                if self._is_on_storage(key):
                    found.setdefault(key, list(items))
        return dict(found)

    def _is_on_storage(self, key: str) -> bool:
        if not is_partial(key):
            return self._rest_on_storage
        return parse_expert_key(key)[:2] in self._experts_on_storage

    @override
    def _raw(self, item: Any) -> torch.Tensor:
        if not isinstance(item, FetchedPiece):
            assert self._storage is not None
            return self._storage._raw(item)
        if item.data is None:
            raise CheckpointError(f"{item.piece.key} of {self.path} is on another rank: fetch it before it is read")
        if digest_of(item.data) != item.piece.xxh3:
            raise CheckpointError(f"{item.piece.key} of {self.path} is damaged: its checksum does not match")
        data: torch.Tensor = item.data
        return data


def _kept(item: FetchedPiece) -> FetchedPiece:
    """Objects are small and may be asked for later than tensors."""
    if item.data is None or item.piece.dtype != OBJECT:
        return item
    return FetchedPiece(piece=item.piece, data=item.data.clone())
