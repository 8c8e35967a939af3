"""Uneven all-to-all of rows with autograd, and of byte buffers between ranks.

Every rank derives its send and receive splits from the same plan, so no sizes travel. Dispatch, combine, the sums of
replica gradients, shadow experts and migrations are exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_lightning.parallel.context import World

OverlapFn = Callable[[], None] | None
"""Work of this process while rows travel."""

AllToAll = Callable[[Tensor, Any, Any, World, OverlapFn], Tensor]
"""(rows, send_splits, recv_splits, world, overlap_fn) -> received rows; splits are lists or tensors."""


def exchange_rows(
    rows_MD: Tensor,
    send_rows: Sequence[int] | Tensor,
    recv_rows: Sequence[int] | Tensor,
    world: World,
    overlap_fn: OverlapFn = None,
    all_to_all: AllToAll | None = None,
) -> Tensor:
    """Send consecutive blocks of rows to ranks 0..N-1 and receive theirs, in rank order; the gradient travels back
    the same way.

    Args:
        rows_MD: [sum(send_rows), D].
        send_rows: rows for each rank.
        recv_rows: rows from each rank.
        overlap_fn: called while the rows travel; not called in a world of one rank.
        all_to_all: implementation; None: all-to-all of the compute group.

    Returns:
        [sum(recv_rows), D].
    """
    if world.size == 1:
        return rows_MD
    moved: AllToAll = all_to_all or _all_to_all
    return linear(
        rows_MD,
        lambda rows_MD: moved(rows_MD, send_rows, recv_rows, world, overlap_fn),
        lambda gradient_MD: moved(gradient_MD, recv_rows, send_rows, world, None),
    )


def all_gather_counts(counts_E: Tensor, world: World) -> Tensor:
    """Every rank's counts, [N, E] int64, on the host; the one extra collective of a layer.

    Raises:
        WorldCutError: the world was aborted, so the counts are not valid.
    """
    if world.size == 1:
        return counts_E.unsqueeze(0).cpu()
    gathered = counts_E.new_empty(world.size * counts_E.numel())
    with world.exchanges.exchange(counts_E.device):
        all_gather_flat(gathered, counts_E.contiguous(), group=world.compute)
    return world.read(gathered).view(world.size, -1)


def all_gather_flat(out: Tensor, tensor: Tensor, group: Any) -> None:
    """Gather the tensors of all ranks into one, in one launch.

    torch 2.13 renamed the operation and warns of the old name, so the name depends on the version.
    """
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, tensor, group=group)


class PendingExchange:
    """A one-dimensional exchange in flight on the background group; `wait` returns what arrived.

    Args:
        flat: what this rank sends, by rank.
        send, recv: elements for and from each rank.
        received: memory for what arrives; None: new memory.
    """

    def __init__(
        self, flat: Tensor, send: Sequence[int], recv: Sequence[int], world: World, received: Tensor | None = None
    ) -> None:
        self._sent = flat  # kept alive until the exchange has finished
        self._received = flat.new_empty(sum(recv)) if received is None else received
        self._work: Any = dist.all_to_all_single(
            self._received, flat, list(recv), list(send), group=world.background, async_op=True
        )

    def wait(self) -> Tensor:
        self._work.wait()
        return self._received

    def read(self, world: World) -> Tensor:
        """Return the received numbers on the host; raises as `World.read`. Only the host waits: in a thread beside
        training the current stream is the training's.
        """
        device = self._received.device
        if device.type == "cpu":
            return world.read(self.wait())
        stream = torch.Stream(device=device)
        with stream:
            host = world.read(self.wait())
        stream.synchronize()  # where nothing arrives nothing was read, and what was sent may still be on its way
        return host


def linear(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a linear map over ranks to a tensor; `back`, its transpose, maps the gradient."""
    return _Linear.apply(x, there, back)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _all_to_all(rows: Tensor, send: Sequence[int], recv: Sequence[int], world: World, overlap_fn: OverlapFn) -> Tensor:
    received, rows = rows.new_empty(sum(recv), rows.shape[1]), rows.contiguous()
    with world.exchanges.exchange(rows.device):
        work: Any = dist.all_to_all_single(
            received, rows, list(recv), list(send), group=world.compute, async_op=overlap_fn is not None
        )
        if overlap_fn is not None:
            overlap_fn()
            work.wait()
    return received


@dataclass(frozen=True, kw_only=True)
class PeerBuffer:
    """Bytes that one rank has for another."""

    source: int
    target: int
    nbytes: int


class PendingBuffers:
    """Byte buffers in flight on the background group; `wait` returns those for this rank.

    Args:
        buffers: of all ranks, or at least those from and to this rank, in one order at both ends. If any rank lists
            one that crosses ranks, every rank must list one, because the exchange is collective.
        payload: index of a buffer -> its uint8 bytes; called for buffers from this rank only.
    """

    def __init__(self, buffers: Sequence[PeerBuffer], payload: Callable[[int], torch.Tensor], world: World) -> None:
        self._world = world
        self._delivered: dict[int, torch.Tensor] = {}
        send, recv = [0] * world.size, [0] * world.size
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(world.size)]
        incoming: list[list[int]] = [[] for _ in range(world.size)]
        for index, buffer in enumerate(buffers):
            if buffer.source == buffer.target:
                if buffer.source == world.rank:
                    self._delivered[index] = payload(index)
            elif buffer.source == world.rank:
                outgoing[buffer.target].append(payload(index))
                send[buffer.target] += buffer.nbytes
            elif buffer.target == world.rank:
                incoming[buffer.source].append(index)
                recv[buffer.source] += buffer.nbytes
        self._order = [index for indices in incoming for index in indices]
        self._sizes = [buffers[index].nbytes for index in self._order]
        self.sent_bytes = sum(send)
        self._exchange: PendingExchange | None = None
        if any(buffer.source != buffer.target for buffer in buffers):
            flat = _joined([buffer for target in outgoing for buffer in target])
            self._exchange = PendingExchange(flat.to(world.device), send, recv, world)

    def wait(self) -> dict[int, torch.Tensor]:
        """Return index -> uint8 bytes on the host of every buffer for this rank; raises as `World.read`."""
        if self._exchange is not None:
            parts = torch.split(self._exchange.read(self._world), self._sizes)
            self._delivered |= dict(zip(self._order, parts, strict=True))
            self._exchange = None
        return self._delivered


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
