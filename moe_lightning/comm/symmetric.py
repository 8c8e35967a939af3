"""Rows through symmetric memory: every rank reads what is meant for it out of the others' buffers, and how many rows
travel is said on the device alone. It has not run on a GPU; a fake of torch's operation stands in for it in tests.

Buffers are as large on every rank. Torch's operation begins when all ranks have come to it, and ends on each by itself:
a peer may still be reading this rank's last rows. So two sets of buffers take turns, and a set is written again only
after the exchange in between, to which all came.

Shapes: M rows, D model width, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from moe_lightning.comm.device_plan import DevicePlan
from moe_lightning.comm.dispatch_backend import ExchangeBackend, Trip
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels.buffers import upload
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import Carry, Meanwhile, exchange_rows

_MOST_RANKS = 32
"""Of torch's operation: the ranks of a warp's sum."""


class SymmetricBackend(ExchangeBackend):
    """An `ExchangeBackend` whose rows go through symmetric memory; the results are the same.

    Raises:
        ConfigurationError: ranks that are not on CUDA, too many, or may be cut; a torch without NVSHMEM.
    """

    is_packed = True

    def __init__(self, world: World, /) -> None:
        super().__init__(world)
        sentence = refusal(world)
        if sentence is not None:
            raise ConfigurationError(f"{sentence}: use dispatch='exchange'")

    @override
    def exchange(self, rows_MD: Tensor, trip: Trip) -> Tensor:
        """In buffers that hold the fullest rank's rows, sent or computed; of a `DevicePlan`, all its blocks."""
        if isinstance(trip.plan, DevicePlan):
            moved: Carry = partial(_carry_all, capacity=trip.plan.num_rows)
        else:
            most = max(int(trip.plan.tokens_EN.sum(axis=0).max()), int(trip.plan.loads_N.max()))
            moved = partial(_carry_some, capacity=most)
        return exchange_rows(rows_MD, trip.send, trip.recv, self.world, trip.meanwhile, moved)


def _carry_some(
    rows_MD: Tensor, send: Sequence[int], recv: Sequence[int], world: World, meanwhile: Meanwhile, *, capacity: int
) -> Tensor:
    splits_N = upload(torch.tensor(send), rows_MD.device)
    return carry(rows_MD, splits_N, world, meanwhile, capacity=capacity)[: sum(recv)]


def _carry_all(
    rows_MD: Tensor, send_N: Tensor, recv_N: Tensor, world: World, meanwhile: Meanwhile, *, capacity: int
) -> Tensor:
    return carry(rows_MD, send_N, world, meanwhile, capacity=capacity)


def carry(rows_MD: Tensor, splits_N: Tensor, world: World, meanwhile: Meanwhile, *, capacity: int) -> Tensor:
    """Send consecutive blocks of rows to ranks 0..N-1; collective, and nothing is read on the host.

    Args:
        rows_MD: at most `capacity` rows; those behind the blocks stay here.
        splits_N: int64 on the device, rows for each rank.
        capacity: at least the rows that any rank sends, and receives; the same on every rank.

    Returns:
        [capacity, D]: what arrived, in rank order, and anything behind it.
    """
    assert world.compute is not None
    room = _rooms.get(world.compute)
    if room is None:
        room = _rooms[world.compute] = _Room(world)
    buffers = room.next(capacity * rows_MD.shape[1] * rows_MD.element_size())
    sent, received = (buffer_as(flat, capacity, rows_MD) for flat in (buffers.sent, buffers.received))
    with world.exchanges.exchange(rows_MD.device):
        sent[: len(rows_MD)].copy_(rows_MD)
        buffers.splits_N.copy_(splits_N)
        _all_to_all(sent, received, buffers.splits_N, buffers.out_2N, world.compute.group_name, 1)
        if meanwhile is not None:
            meanwhile()
    return received.clone()


def buffer_as(flat: Tensor, num_rows: int, like_MD: Tensor) -> Tensor:
    """[num_rows, D] at the head of a buffer of bytes."""
    num_bytes = num_rows * like_MD.shape[1] * like_MD.element_size()
    return flat[:num_bytes].view(like_MD.dtype).view(num_rows, like_MD.shape[1])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Buffers:
    """Symmetric memory of one exchange.

    Attributes:
        sent, received: bytes.
        splits_N: int64, rows for each rank.
        out_2N: int64 [2, N], rows from each, and where they begin.
    """

    sent: Tensor
    received: Tensor
    splits_N: Tensor
    out_2N: Tensor


class _Room:
    """Two sets of buffers for the exchanges of one group, made anew, by all ranks alike, when they become too small."""

    def __init__(self, world: World) -> None:
        self._device, self._size = world.device, world.size
        assert world.compute is not None
        self._group_name = world.compute.group_name
        self._sets: list[_Buffers] = []

    def next(self, num_bytes: int) -> _Buffers:
        """The set that no peer reads any more; collective where it is too small."""
        if not self._sets or self._sets[0].sent.numel() < num_bytes:
            if self._sets:
                torch.accelerator.synchronize(self._device)  # peers may be reading
            self._sets = [self._made(num_bytes + num_bytes // 4) for _ in range(2)]
        self._sets.reverse()
        return self._sets[0]

    def _made(self, num_bytes: int) -> _Buffers:
        num_bytes = -(-num_bytes // 256) * 256
        made = _Buffers(
            sent=self._empty(num_bytes, dtype=torch.uint8),
            received=self._empty(num_bytes, dtype=torch.uint8),
            splits_N=self._empty(self._size, dtype=torch.int64),
            out_2N=self._empty(2, self._size, dtype=torch.int64),
        )
        for tensor in vars(made).values():
            _library().rendezvous(tensor, self._group_name)
        return made

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        made: Tensor = _library().empty(*shape, dtype=dtype, device=self._device)
        return made


_rooms: WeakKeyDictionary[ProcessGroup, _Room] = WeakKeyDictionary()


def _library() -> Any:
    import torch.distributed._symmetric_memory as library

    return library


def _all_to_all(sent: Tensor, received: Tensor, splits_N: Tensor, out_2N: Tensor, group: str, align: int) -> None:
    """Torch's operation, with one block of rows for each rank."""
    torch.ops.symm_mem.all_to_all_vdev_2d(sent, received, splits_N, out_2N, group, align)


def refusal(world: World) -> str | None:
    """Why rows cannot go this way here, as a sentence; chooses NVSHMEM where they can."""
    if world.device.type != "cuda":
        return f"dispatch='symmetric' needs ranks on CUDA devices, but this one is on {world.device}"
    if world.size > _MOST_RANKS:
        return f"dispatch='symmetric' serves at most {_MOST_RANKS} ranks, but {world.size} are running"
    if world.may_be_cut:
        return "dispatch='symmetric' waits on the device for ranks that may have died, which elastic runs must not"
    library = _library()
    if not hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d") or not library.is_nvshmem_available():
        return f"dispatch='symmetric' needs a torch with NVSHMEM, but {torch.__version__} has none here"
    if library.get_backend(world.device) != "NVSHMEM":
        library.set_backend("NVSHMEM")
    return None
