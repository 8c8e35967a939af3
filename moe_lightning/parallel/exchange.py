"""Uneven all-to-all of rows with autograd, and in the background.

Every rank derives its send and receive splits from the same plan, so no sizes travel. Dispatch, combine, the sums of
replica gradients, shadow experts and migrations are exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_lightning.parallel.context import World

OverlapFn = Callable[[], None] | None
"""Work of this process while rows travel."""


def exchange_rows(
    rows_MD: Tensor,
    send_rows: Sequence[int],
    recv_rows: Sequence[int],
    world: World,
    overlap_fn: OverlapFn = None,
) -> Tensor:
    """Send consecutive blocks of rows to ranks 0..N-1 and receive theirs, in rank order; the gradient travels back
    the same way.

    Args:
        rows_MD: [sum(send_rows), D].
        send_rows: rows for each rank.
        recv_rows: rows from each rank.
        overlap_fn: called while the rows travel; not called in a world of one rank.

    Returns:
        [sum(recv_rows), D].
    """
    if world.size == 1:
        return rows_MD
    return linear(
        rows_MD,
        lambda rows_MD: _all_to_all(rows_MD, send_rows, recv_rows, world, overlap_fn),
        lambda gradient_MD: _all_to_all(gradient_MD, recv_rows, send_rows, world, None),
    )


def all_gather_counts(counts_E: Tensor, world: World) -> Tensor:
    """Every rank's counts, [N, E] int64, on the host; the one extra collective of a layer.

    Raises:
        WorldAbortedError: the world was aborted, so the counts are not valid.
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
        ctx.maps = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        there, back = ctx.maps
        return linear(gradients[0], back, there), None, None  # has a gradient itself where create_graph=True


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


WAITS = frozenset({PendingExchange.wait.__code__, _all_to_all.__code__})
"""Functions that wait for other ranks themselves, not in a collective of torch."""
