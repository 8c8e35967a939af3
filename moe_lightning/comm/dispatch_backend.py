"""How rows travel to experts and back, once it is planned who computes what: the protocol, and the uneven all-to-all.

Shapes: T tokens and K choices of this rank, E experts, N ranks, C experts that this rank computes (its slots, then its
shadows), M rows, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_lightning import kernels as ops
from moe_lightning.arrays import IntArray
from moe_lightning.comm.device_plan import DevicePlan, lay_out
from moe_lightning.kernels.buffers import upload
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import Meanwhile, exchange_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchPlan:
    """Who computes which rows of one micro-batch of one layer, alike on all ranks.

    Attributes:
        tokens_EN: int64, assignments of every rank to every expert.
        send_EN: int64, rows of each expert that this rank sends to each rank, itself included.
        recv_EN: int64, rows of each expert that it receives from each.
        experts_C: the expert of each of this rank's slots, -1 where it is vacant, and of each of its shadows.
        num_experts_N: int64, experts that each rank computes, shadows included.
        loads_N: int64, rows that each rank computes.
    """

    tokens_EN: IntArray
    send_EN: IntArray
    recv_EN: IntArray
    experts_C: tuple[int, ...]
    num_experts_N: IntArray
    loads_N: IntArray


class DispatchBackend(Protocol):
    """Carries rows; one is made for every layer whenever its experts have moved. `ExchangeBackend` has all of it: one
    that carries rows otherwise overrides `exchange`.

    Attributes:
        sent_rows, sent_bytes: that left this rank in the last dispatch.
    """

    sent_rows: int
    sent_bytes: int

    def dispatch(
        self, x_TD: Tensor, expert_ids_TK: Tensor, plan: Any, meanwhile: Meanwhile
    ) -> tuple[Tensor, Tensor, Any]:
        """Bring the tokens of all ranks to the ranks that compute them; collective, differentiable.

        Args:
            x_TD: this rank's tokens.
            expert_ids_TK: their choices, -1 where dropped.
            plan: who computes what: a `DispatchPlan`; a `DevicePlan` where the backend says `takes_device_plans`.
            meanwhile: to be called while the rows travel.

        Returns:
            The rows [M, D] in the order of slots and shadows (those of a `DevicePlan` end with some that nobody
            counts); how many belong to each, int64 [C], where x_TD is; and a
            handle for `combine`.
        """

    def combine(self, rows_MD: Tensor, handle: Any, weights_TK: Tensor) -> Tensor:
        """Bring the results back: of each token the weighted sum over its choices, [T, D]; collective, differentiable.

        Dropped choices count nothing.
        """


class BackendFactory(Protocol):
    """Makes a layer's `DispatchBackend`."""

    def __call__(self, world: World, /) -> DispatchBackend:
        """For these ranks; `world.compute` is the group to communicate in."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """How the rows of a dispatch lie.

    Attributes:
        plan: of the dispatch.
        order_M: int64, flat assignment (t * K + k) of each row in the order of sending: by target rank, then expert.
        inverse_TK: int64, row of each assignment, -1 where dropped.
        send_rows, recv_rows: rows to and from each rank; of a `DevicePlan` their blocks, or, packed, tensors.
        slot_order_M: index that sorts the received rows by slot, shadows last, and its inverse.
    """

    plan: DispatchPlan | DevicePlan
    order_M: Tensor
    inverse_TK: Tensor
    send_rows: Sequence[int] | Tensor
    recv_rows: Sequence[int] | Tensor
    slot_order_M: Tensor
    slot_inverse_M: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Trip:
    """One way of the rows of a dispatch.

    Attributes:
        send, recv: rows for and from each rank; of a `DevicePlan` their blocks, or, packed, tensors.
        plan: of the dispatch.
        is_return: back to the ranks whose tokens they are.
        meanwhile: to be called while the rows travel.
    """

    send: Sequence[int] | Tensor
    recv: Sequence[int] | Tensor
    plan: DispatchPlan | DevicePlan
    is_return: bool = False
    meanwhile: Meanwhile = None


class ExchangeBackend:
    """One uneven all-to-all there and one back.

    Args:
        world: the ranks.

    Attributes:
        takes_device_plans: whether `dispatch` takes a `DevicePlan`, too.
        is_packed: whether its rows of all ranks follow each other under such a plan, and how many they are stands in
            tensors; else they travel in blocks of one size.
    """

    takes_device_plans = True
    is_packed = False

    def __init__(self, world: World, /) -> None:
        self.world = world
        self.sent_rows = self.sent_bytes = 0

    def dispatch(
        self, x_TD: Tensor, expert_ids_TK: Tensor, plan: DispatchPlan | DevicePlan, meanwhile: Meanwhile
    ) -> tuple[Tensor, Tensor, Route]:
        """See `DispatchBackend`."""
        if isinstance(plan, DispatchPlan):
            route, tokens_C = _route(expert_ids_TK, plan)
        else:
            if not len(x_TD):  # a row that nobody takes: blocks are filled with rows that there are
                x_TD, expert_ids_TK = F.pad(x_TD, (0, 0, 0, 1)), F.pad(expert_ids_TK, (0, 0, 0, 1), value=-1)
            route, tokens_C = _device_route(expert_ids_TK, plan, is_packed=self.is_packed)
        rows_MD = ops.permute(x_TD, route.order_M, route.inverse_TK, may_pad=isinstance(plan, DevicePlan))
        if not isinstance(route.send_rows, Tensor):
            self.sent_rows = sum(route.send_rows) - route.send_rows[self.world.rank]
        self.sent_bytes = self.sent_rows * rows_MD.shape[-1] * rows_MD.element_size()
        trip = Trip(send=route.send_rows, recv=route.recv_rows, plan=plan, meanwhile=meanwhile)
        rows_MD = self.exchange(rows_MD, trip)
        return ops.gather_rows(rows_MD, route.slot_order_M, route.slot_inverse_M), tokens_C, route

    def combine(self, rows_MD: Tensor, handle: Route, weights_TK: Tensor) -> Tensor:
        """See `DispatchBackend`."""
        rows_MD = ops.gather_rows(rows_MD, handle.slot_inverse_M, handle.slot_order_M)
        trip = Trip(send=handle.recv_rows, recv=handle.send_rows, plan=handle.plan, is_return=True)
        rows_MD = self.exchange(rows_MD, trip)
        if isinstance(handle.plan, DispatchPlan):
            return ops.unpermute(rows_MD, handle.inverse_TK, handle.order_M, weights_TK)
        num_tokens = len(weights_TK)
        weights_TK = weights_TK if num_tokens else F.pad(weights_TK, (0, 0, 0, 1))
        out_TD = ops.unpermute(rows_MD, handle.inverse_TK, handle.order_M, weights_TK, may_pad=True)
        return out_TD if num_tokens else out_TD[:0]

    def exchange(self, rows_MD: Tensor, trip: Trip) -> Tensor:
        """Send consecutive blocks of rows to ranks 0..N-1 and receive theirs, in rank order; differentiable."""
        return exchange_rows(rows_MD, trip.send, trip.recv, self.world, trip.meanwhile)


def _route(expert_ids_TK: Tensor, plan: DispatchPlan) -> tuple[Route, Tensor]:
    """Small tables are made on the host and go up in one copy; what is as long as the rows is made on the device."""
    num_experts, own = len(plan.send_EN), int(plan.send_EN.sum())
    by_expert = ops.sort_by_expert(expert_ids_TK, num_experts, num_rows=own)
    tokens_C, here = _by_slot(plan.recv_EN, plan.experts_C)
    there = _chunks(plan.send_EN.T.ravel(), _starts(plan.send_EN).T.ravel())
    tables = np.concatenate([tokens_C, *there, *here])
    sizes = [len(tokens_C), *map(len, there), *map(len, here)]
    uploaded = upload(torch.from_numpy(tables), expert_ids_TK.device)
    tokens, old_send, new_send, old_recv, new_recv = torch.split(uploaded, sizes)
    by_target_M, row_M = ops.reorder_chunks(old_send, new_send, own)
    slot_order_M, slot_inverse_M = ops.reorder_chunks(old_recv, new_recv, int(plan.recv_EN.sum()))
    inverse_TK = by_expert.inverse_TK
    if own == inverse_TK.numel():
        inverse_TK = row_M[inverse_TK]
    elif own:
        inverse_TK = row_M[inverse_TK.clamp_min(0)].masked_fill(inverse_TK < 0, -1)
    route = Route(
        plan=plan,
        order_M=by_expert.order_M[by_target_M],
        inverse_TK=inverse_TK,
        send_rows=plan.send_EN.sum(axis=0).tolist(),
        recv_rows=plan.recv_EN.sum(axis=0).tolist(),
        slot_order_M=slot_order_M,
        slot_inverse_M=slot_inverse_M,
    )
    return route, tokens


def _device_route(expert_ids_TK: Tensor, plan: DevicePlan, *, is_packed: bool) -> tuple[Route, Tensor]:
    layout = lay_out(expert_ids_TK, plan, is_packed=is_packed)
    blocks = [plan.block] * plan.send_EN.shape[1]
    route = Route(
        plan=plan,
        order_M=layout.order_M,
        inverse_TK=layout.inverse_TK,
        send_rows=layout.send_N if is_packed else blocks,
        recv_rows=layout.recv_N if is_packed else blocks,
        slot_order_M=layout.slot_order_M,
        slot_inverse_M=layout.slot_inverse_M,
    )
    return route, layout.tokens_C


def _by_slot(recv_EN: IntArray, experts_C: Sequence[int]) -> tuple[IntArray, tuple[IntArray, IntArray]]:
    """Rows of each slot, int64 [C], and the chunks that sort the received rows by slot, see `_chunks`.

    Rows arrive by source and, of one source, by ascending expert; slots may hold experts in any order, or none.

    Args:
        recv_EN: rows of each expert from each rank.
        experts_C: the expert of each slot, -1 where vacant.
    """
    held = [expert for expert in experts_C if expert >= 0]
    arrived = np.zeros_like(recv_EN)
    arrived[held] = recv_EN[held]
    starts_EN = _starts(np.ascontiguousarray(arrived.T)).T
    tokens_C = np.array([arrived[expert].sum() if expert >= 0 else 0 for expert in experts_C], dtype=np.int64)
    return tokens_C, _chunks(arrived[held].ravel(), starts_EN[held].ravel())


def _starts(sizes: IntArray) -> IntArray:
    """Where each chunk begins, chunks row by row."""
    return (sizes.ravel().cumsum() - sizes.ravel()).reshape(sizes.shape)


def _chunks(sizes: IntArray, starts: IntArray) -> tuple[IntArray, IntArray]:
    """What `kernels.reorder_chunks` takes: where the chunks begin, and where they end in the order given."""
    return starts.astype(np.int64), sizes.cumsum().astype(np.int64)
