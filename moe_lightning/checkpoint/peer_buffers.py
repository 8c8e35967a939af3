"""Byte buffers that travel between ranks in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moe_lightning.comm.exchange import PendingExchange
from moe_lightning.comm.world import World


@dataclass(frozen=True, kw_only=True)
class PeerBuffer:
    """Bytes that one rank has for another."""

    source: int
    target: int
    nbytes: int


class PendingParcels:
    """Parcels on their way on the background group; `wait` delivers those for this rank.

    Args:
        parcels: of all ranks, or at least those from and to this rank, in one order at both ends. Where any rank lists
            one that crosses ranks, every rank lists such a one, or all of them wait for each other.
        payload: index of a parcel -> its uint8 bytes; asked for parcels from this rank only.
    """

    def __init__(self, parcels: Sequence[PeerBuffer], payload: Callable[[int], torch.Tensor], world: World) -> None:
        self._world = world
        self._delivered: dict[int, torch.Tensor] = {}
        send, recv = [0] * world.size, [0] * world.size
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(world.size)]
        incoming: list[list[int]] = [[] for _ in range(world.size)]
        for index, parcel in enumerate(parcels):
            if parcel.source == parcel.target:
                if parcel.source == world.rank:
                    self._delivered[index] = payload(index)
            elif parcel.source == world.rank:
                outgoing[parcel.target].append(payload(index))
                send[parcel.target] += parcel.nbytes
            elif parcel.target == world.rank:
                incoming[parcel.source].append(index)
                recv[parcel.source] += parcel.nbytes
        self._order = [index for indices in incoming for index in indices]
        self._sizes = [parcels[index].nbytes for index in self._order]
        self.sent_bytes = sum(send)
        self._exchange: PendingExchange | None = None
        if any(parcel.source != parcel.target for parcel in parcels):
            flat = _joined([buffer for target in outgoing for buffer in target])
            self._exchange = PendingExchange(flat.to(world.device), send, recv, world)

    def wait(self) -> dict[int, torch.Tensor]:
        """Index -> uint8 bytes on the host, of every parcel for this rank; raises as `World.read`."""
        if self._exchange is not None:
            parts = torch.split(self._exchange.read(self._world), self._sizes)
            self._delivered |= dict(zip(self._order, parts, strict=True))
            self._exchange = None
        return self._delivered


def exchange_parcels(
    parcels: Sequence[PeerBuffer], payload: Callable[[int], torch.Tensor], world: World
) -> dict[int, torch.Tensor]:
    """Send and deliver at once; collective."""
    return PendingParcels(parcels, payload, world).wait()


def _joined(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all buffers one behind the other; buffers that lie so in memory are not copied."""
    if not buffers:
        return torch.empty(0, dtype=torch.uint8)
    ends = [buffer.data_ptr() + buffer.numel() for buffer in buffers]
    first = buffers[0]
    one_memory = all(b.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for b in buffers)
    if one_memory and all(b.data_ptr() == end for b, end in zip(buffers[1:], ends, strict=False)):
        return first.as_strided((ends[-1] - first.data_ptr(),), (1,))
    return torch.cat(list(buffers))
