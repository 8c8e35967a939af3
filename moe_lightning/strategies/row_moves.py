"""Rows of dense parameters and their optimizer states on their way from the blocks of one cut to those of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_lightning.algorithms.dense_shards import RowCut, part_bounds, part_of
from moe_lightning.checkpoint.peer_buffers import PeerBuffer, exchange_parcels
from moe_lightning.comm.world import World
from moe_lightning.kernels import pack, packed_bytes, unpack
from moe_lightning.state.row_blocks import local
from moe_lightning.state.table import State

Rows = Mapping[str, Tensor]
"""Key of a piece -> the rows that this rank will hold, on the host."""

Bounds = tuple[int, int]


class RowMoves:
    """Which rows this rank sends and gets. Where there is a source at all, each of several ranks is at one end of a way
    to another one, so all of them take part in the exchange or none does.

    Args:
        state: of this rank under the former cut.
        sources: (name of a part, the rank that has it); of a rank -1 nothing comes.
        cuts: that every rank will have.
        world: the ranks.
        entrusted: parts of other ranks that this one has, by name.
    """

    def __init__(
        self,
        state: State,
        sources: Sequence[tuple[str, int]],
        cuts: Sequence[RowCut],
        world: World,
        entrusted: Mapping[str, Rows] | None = None,
    ) -> None:
        self._cuts, self._world = cuts, world
        self._own, shapes = held_rows(state), {name: parameter.shape for name, parameter in state.dense.items()}
        self._shapes = {key: shapes[key.removeprefix("dense/").rpartition("/")[0]] for key in self._own}
        self._held: dict[tuple[int, int], Rows] = {(state.cut.part, state.cut.parts): self._own}
        self._held |= {part_of(name): rows for name, rows in (entrusted or {}).items()}
        self._ways = [
            (part_of(name), source, target, self._common(part_of(name), target))
            for name, source in sources
            if source >= 0
            for target in (range(world.size) if source == world.rank else (world.rank,))
        ]

    @torch.no_grad()
    def exchange(self) -> dict[str, Tensor]:
        """What this rank will hold; collective. Rows that have no source are any."""
        rank = self._world.rank
        parcels = [
            PeerBuffer(source=source, target=target, nbytes=self._nbytes(common))
            for _, source, target, common in self._ways
        ]
        arrived = exchange_parcels(parcels, self._packed, self._world)
        held = {key: self._cuts[rank].bounds(shape[0]) for key, shape in self._shapes.items()}
        rows = {key: self._empty(key, *held[key], device="cpu") for key in self._shapes}
        for at, data in arrived.items():
            *_, common = self._ways[at]
            targets = [rows[key][first - held[key][0] : last - held[key][0]] for key, (first, last) in common.items()]
            if targets:
                unpack(data, targets)
        return rows

    def _common(self, part: tuple[int, int], target: int) -> dict[str, Bounds]:
        """First and last row, of the whole tensor, that a part and what a rank will hold have in common, by key."""
        found = {}
        for key, shape in self._shapes.items():
            (first, last), (low, high) = part_bounds(shape[0], *part), self._cuts[target].bounds(shape[0])
            if max(first, low) < min(last, high):
                found[key] = max(first, low), min(last, high)
        return found

    def _packed(self, at: int) -> Tensor:
        part, *_, common = self._ways[at]
        rows = []
        for key, (first, last) in common.items():
            begin, _ = part_bounds(self._shapes[key][0], *part)
            rows.append(self._held[part][key][first - begin : last - begin])
        return pack(rows).cpu() if rows else torch.empty(0, dtype=torch.uint8)

    def _nbytes(self, common: Mapping[str, Bounds]) -> int:
        return packed_bytes([self._empty(key, *bounds, device="meta") for key, bounds in common.items()])

    def _empty(self, key: str, first: int, last: int, *, device: str) -> Tensor:
        return torch.empty((last - first, *self._shapes[key][1:]), dtype=self._own[key].dtype, device=device)


@torch.no_grad()
def held_rows(state: State) -> dict[str, Tensor]:
    """What this rank has of the dense parameters that are, or can be, cut."""
    return {
        f"dense/{name}/{scope}": tensor
        for name, parameter in state.dense.items()
        if parameter.ndim
        for scope, tensor in ({"weight": local(parameter.detach())} | state.moments(parameter)).items()
    }
