"""Parts of dense parameters and their optimizer states on their way from one cut to another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from moe_lightning.kernels import pack, packed_bytes, unpack
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PeerBuffer, exchange_parcels
from moe_lightning.parallel.mesh import Part, TensorCut
from moe_lightning.state.table import State
from moe_lightning.state.tensors import blocks_of, local

Rows = Mapping[str, Tensor]
"""Key of a piece -> the part that this rank will hold, on the host."""

Shared = Sequence[tuple[str, tuple[slice, ...], tuple[slice, ...]]]
"""(key, where it lies in one part, where in another) of what two parts have in common."""


class RowMoves:
    """What this rank sends and gets. Where there is a source at all, each of several ranks is at one end of a way to
    another one, so all of them take part in the exchange or none does.

    Args:
        state: of this rank under the former cut, in a pipeline with the stages that it had and those that it will have.
        ways: how parameters are cut, by name.
        sources: (name of a part, the rank that has it); of a rank -1 nothing comes.
        targets: the parts that every rank will have, at most one of each stage.
        world: the ranks.
        entrusted: parts of other ranks that this one has, by name.
        held: its own parts under that cut.
        with_moments: whether optimizer states travel with their parameters.
        stage_of: the stage of a parameter, by its name.
    """

    def __init__(
        self,
        state: State,
        ways: Mapping[str, TensorCut],
        sources: Sequence[tuple[str, int]],
        targets: Sequence[Sequence[Part]],
        world: World,
        entrusted: Mapping[str, Rows],
        *,
        held: Sequence[Part],
        with_moments: bool,
        stage_of: Callable[[str], int],
    ) -> None:
        self._world = world
        own = held_rows(state, ways, with_moments=with_moments)
        names = {key: key.removeprefix("dense/").rpartition("/")[0] for key in own}
        self._cuts = {key: ways[name] for key, name in names.items()}
        self._stages = {key: stage_of(name) for key, name in names.items()}
        self._dtypes = {key: tensor.dtype for key, tensor in own.items()}
        self._held: dict[Part, Rows] = dict.fromkeys(held, own)
        self._held |= {Part.named(name): rows for name, rows in entrusted.items()}
        self._wanted = {part.stage: part for part in targets[world.rank]}
        self._ways = [
            (part, source, target, self._common(part, targets[target]))
            for part, source in ((Part.named(name), source) for name, source in sources if source >= 0)
            for target in (range(world.size) if source == world.rank else (world.rank,))
        ]

    @torch.no_grad()
    def exchange(self) -> dict[str, Tensor]:
        """What this rank will hold; collective. What has no source is any."""
        parcels = [
            PeerBuffer(source=source, target=target, nbytes=self._nbytes(common))
            for _, source, target, common in self._ways
        ]
        arrived = exchange_parcels(parcels, self._packed, self._world)
        rows = {
            key: torch.empty(cut.shape_of(self._wanted[stage]), dtype=self._dtypes[key])
            for key, cut in self._cuts.items()
            if (stage := self._stages[key]) in self._wanted
        }
        for at, data in arrived.items():
            *_, common = self._ways[at]
            if common:
                unpack(data, [rows[key][there] for key, _, there in common])
        return rows

    def _common(self, source: Part, targets: Sequence[Part]) -> Shared:
        """What a part has of what a rank will hold."""
        found: list[tuple[str, tuple[slice, ...], tuple[slice, ...]]] = []
        target = next((part for part in targets if part.stage == source.stage), None)
        if target is None:
            return found
        for key, cut in self._cuts.items():
            if self._stages[key] != source.stage or not (cut.sections or source.speaks_to(target)):
                continue
            wanted = list(blocks_of(cut, target))
            for here, block in blocks_of(cut, source):
                for there, other in wanted:
                    if (common := block.common(other)) is not None:
                        found.append((key, _within(here, common[0]), _within(there, common[1])))
        return found

    def _packed(self, at: int) -> Tensor:
        part, *_, common = self._ways[at]
        held = self._held.get(part, {})
        rows = [held[key][here].cpu().contiguous() for key, here, _ in common]  # moments may lie on the host already
        return pack(rows) if rows else torch.empty(0, dtype=torch.uint8)

    def _nbytes(self, common: Shared) -> int:
        sizes = ((key, tuple(at.stop - at.start for at in here)) for key, here, _ in common)
        return packed_bytes([torch.empty(size, dtype=self._dtypes[key], device="meta") for key, size in sizes])


def _within(block: Sequence[slice], common: Sequence[slice]) -> tuple[slice, ...]:
    """Of the tensor that holds a block, what is common to it and another one."""
    return tuple(
        slice(outer.start + inner.start, outer.start + inner.stop) for outer, inner in zip(block, common, strict=True)
    )


@torch.no_grad()
def held_rows(state: State, names: Collection[str], *, with_moments: bool = True) -> dict[str, Tensor]:
    """What this rank has of dense parameters that are, or can be, cut."""
    return {
        f"dense/{name}/{scope}": tensor
        for name, parameter in state.dense.items()
        if name in names
        for scope, tensor in (
            {"weight": local(parameter.detach())} | (state.moments(parameter) if with_moments else {})
        ).items()
    }
