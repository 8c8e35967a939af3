"""Rows of dense parameters and their optimizer states on their way from the parts of one cut to those of another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from moe_lightning.algorithms.dense_shards import RowCut, TensorCut, part_of
from moe_lightning.checkpoint.peer_buffers import PeerBuffer, exchange_parcels
from moe_lightning.comm.world import World
from moe_lightning.kernels import pack, packed_bytes, unpack
from moe_lightning.state.row_blocks import local
from moe_lightning.state.table import State

Rows = Mapping[str, Tensor]
"""Key of a piece -> the rows that this rank will hold, on the host."""

Range = tuple[int, int]
"""(first, last) along the dimension in which a tensor is cut."""


class RowMoves:
    """Which rows this rank sends and gets. Where there is a source at all, each of several ranks is at one end of a way
    to another one, so all of them take part in the exchange or none does.

    Rows are counted along the dimension in which a tensor is cut, whichever that is.

    Args:
        state: of this rank under the former cut.
        ways: how parameters are cut, by name.
        sources: (name of a part, the rank that has it); of a rank -1 nothing comes.
        cuts: that every rank will have.
        world: the ranks.
        entrusted: parts of other ranks that this one has, by name.
    """

    def __init__(
        self,
        state: State,
        ways: Mapping[str, TensorCut],
        sources: Sequence[tuple[str, int]],
        cuts: Sequence[RowCut],
        world: World,
        entrusted: Mapping[str, Rows] | None = None,
    ) -> None:
        self._cuts, self._world = cuts, world
        held = held_rows(state, ways)
        self._of = {key: ways[key.removeprefix("dense/").rpartition("/")[0]] for key in held}
        self._own = self._turned(held)
        self._held = {(state.cut.part, state.cut.parts): self._own}
        self._held |= {part_of(name): self._turned(rows) for name, rows in (entrusted or {}).items()}
        self._ways = [
            (part_of(name), source, target, self._common(part_of(name), target))
            for name, source in sources
            if source >= 0
            for target in (range(world.size) if source == world.rank else (world.rank,))
        ]

    def _turned(self, rows: Rows) -> dict[str, Tensor]:
        return {key: tensor.movedim(self._of[key].dim, 0) for key, tensor in rows.items()}

    @torch.no_grad()
    def exchange(self) -> dict[str, Tensor]:
        """What this rank will hold; collective. Rows that have no source are any."""
        parcels = [
            PeerBuffer(source=source, target=target, nbytes=self._nbytes(common))
            for _, source, target, common in self._ways
        ]
        arrived = exchange_parcels(parcels, self._packed, self._world)
        own = self._cuts[self._world.rank]
        ranges = {key: way.ranges(own.part, own.parts) for key, way in self._of.items()}
        rows = {key: self._empty(key, sum(last - first for first, last in ranges[key]), "cpu") for key in self._of}
        for at, data in arrived.items():
            *_, common = self._ways[at]
            targets = [_rows(rows[key], ranges[key], wanted) for key, wanted in common]
            if targets:
                unpack(data, targets)
        return {key: tensor.movedim(0, self._of[key].dim) for key, tensor in rows.items()}

    def _common(self, part: tuple[int, int], target: int) -> list[tuple[str, Range]]:
        """Rows of the whole tensors that a part and what a rank will hold have in common."""
        found, cut = [], self._cuts[target]
        for key, way in self._of.items():
            for (first, last), (low, high) in product(way.ranges(*part), way.ranges(cut.part, cut.parts)):
                if max(first, low) < min(last, high):
                    found.append((key, (max(first, low), min(last, high))))
        return found

    def _packed(self, at: int) -> Tensor:
        part, *_, common = self._ways[at]
        held = self._held.get(part, {})
        rows = [_rows(held[key], self._of[key].ranges(*part), wanted).contiguous() for key, wanted in common]
        return pack(rows).cpu() if rows else torch.empty(0, dtype=torch.uint8)

    def _nbytes(self, common: Sequence[tuple[str, Range]]) -> int:
        return packed_bytes([self._empty(key, last - first, "meta") for key, (first, last) in common])

    def _empty(self, key: str, num_rows: int, device: str) -> Tensor:
        own = self._own[key]
        return torch.empty((num_rows, *own.shape[1:]), dtype=own.dtype, device=device)


def _rows(held: Tensor, ranges: Sequence[Range], wanted: Range) -> Tensor:
    """Some rows of the whole tensor, which lie in one of the ranges that are held."""
    at = 0
    for first, last in ranges:
        if first <= wanted[0] < last:
            return held[at + wanted[0] - first : at + wanted[1] - first]
        at += last - first
    raise AssertionError("nobody asks for rows that are elsewhere")


@torch.no_grad()
def held_rows(state: State, names: Collection[str]) -> dict[str, Tensor]:
    """What this rank has of dense parameters that are, or can be, cut."""
    return {
        f"dense/{name}/{scope}": tensor
        for name, parameter in state.dense.items()
        if name in names
        for scope, tensor in ({"weight": local(parameter.detach())} | state.moments(parameter)).items()
    }
