"""What a restore reads from: a checkpoint on storage or snapshots in memory, by key, in pieces that may be rows of a
tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.plain_values import load_plain
from moe_lightning.checkpoint.storage import Place
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import DTYPES, OBJECT, Block, Piece, is_expert_key, parse_expert_key, replay_key


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
    """

    path: Place

    @property
    @abstractmethod
    def step(self) -> int:
        """Updates contained in everything but stale experts."""

    @property
    def first_step(self) -> int:
        """The step after which what is no expert was taken: training goes on from there, and from `step` on its state
        is whole (`replay_window.py`). Of all but windows `step`."""
        return self.step

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
        """Everything was restored: let go of tensors in memory. What is asked for later can still be read."""

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

    def read_into(self, key: str, out: torch.Tensor, *, first_row: int = 0, block: Block | None = None) -> None:
        """Fill `out` with rows of the tensor under a key, beginning at `first_row`, or with a block of it; converts
        dtype and device where they differ.

        Raises:
            CheckpointError: no such key, or the shapes do not fit.
        """
        pieces = self._tensor_pieces(key)
        shape = pieces[0].block.whole
        wanted = block or Block.of_rows(out.shape, first_row, shape[0] if shape else 0)
        if wanted.whole != shape or not wanted.is_inside:
            raise CheckpointError(
                f"{key} has shape {list(shape)} in {self.path.name}: rows from {first_row} do not fit {list(out.shape)}"
            )
        for piece in pieces:
            shared = wanted.common(piece.block)
            if shared is not None:
                target, part = shared
                out[target].copy_(self._raw(piece).view(DTYPES[piece.dtype]).view(piece.block.sizes)[part])

    def read_object(self, key: str) -> Any:
        """The object under a key.

        Raises:
            CheckpointError: no such key, it is a tensor, or its bytes do not match their checksum.
        """
        piece = self._pieces_of(key)[0]
        if piece.dtype != OBJECT:
            raise CheckpointError(f"{key} is a tensor in {self.path.name}: use read")
        data = self._raw(piece).numpy().tobytes()
        if xxhash.xxh3_64_hexdigest(data) != piece.xxh3:
            raise CheckpointError(f"{self.path} is damaged: the checksum of {key} does not match")
        return load_plain(data, f"{key} in {self.path}")

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
