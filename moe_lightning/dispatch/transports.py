"""Transports of dispatched rows: all-to-all planned on the host or on the device.

`ExchangeBackend` sends rows in one uneven all-to-all each way. Under a `DevicePlan` the host reads nothing: rows lie in
blocks of one size. A block has room for all rows that a rank can send to another, so no row is dropped: a token chooses
an expert once, so these are at most its tokens times the choices, or the experts of the other rank, whichever are
fewer.

Shapes: T tokens and K choices of this rank, E experts, N ranks, C experts computed by this rank (its slots, then its
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
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.quota import sharing_rounds
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import require_agreement
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import OverlapFn, all_gather_counts, all_gather_flat, exchange_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class DevicePlan:
    """Dispatch plan of one micro-batch of one layer as tensors on the device of the tokens.

    Attributes:
        send_EN: int64, rows of each expert that this rank sends to each rank, itself included.
        recv_EN: int64, rows of each expert that it receives from each.
        slots_C: int64, the expert of each of this rank's slots, E where it is vacant.
        block: rows that a rank may send to another.
    """

    send_EN: Tensor
    recv_EN: Tensor
    slots_C: Tensor
    block: int

    @property
    def num_rows(self) -> int:
        """Rows in the buffers of this rank, for sending as for receiving."""
        return self.block * self.send_EN.shape[1]


class DevicePlanner:
    """Planner of one layer's dispatch on the device of its counts.

    The host waits once, in the first micro-batch of training and the first of evaluation: for the most tokens that any
    rank has. That this rank plans by the placement of all others is read when it has arrived, a micro-batch later.

    Args:
        placement: replicas [E, N].
        world: the ranks.
        is_balanced: True if quotas are balanced over ranks, False if equal for each replica.
        slot_experts: experts of this rank's slots, -1 where vacant.
        fingerprint: hash of the placement and the rules.
        what: name of what is hashed, for messages.
    """

    def __init__(
        self,
        placement: Placement,
        world: World,
        *,
        is_balanced: bool,
        slot_experts: Sequence[int],
        fingerprint: int,
        what: str,
    ) -> None:
        self._world = world
        self._what = what
        num_experts = placement.num_experts
        self._most_held = int((placement.replicas > 0).sum(axis=0).max())
        self._tables = [
            torch.from_numpy(placement.replicas.copy()),
            torch.tensor([expert if expert >= 0 else num_experts for expert in slot_experts], dtype=torch.int64),
            torch.tensor([fingerprint]),
        ]
        self._rules = ops.QuotaRounds(*sharing_rounds(len(placement.pairs.ranks)))
        if not is_balanced:
            self._rules = self._rules._replace(rounds=0)
        self._most_tokens: dict[bool, int] = {}
        self._gathered_prints: tuple[Tensor, Any] | None = None

    def gather_counts(self, counts_E: Tensor) -> Tensor:
        """All ranks' assignments per expert, int64 [N, E], where they were counted.

        Raises:
            ConfigurationError: in an earlier micro-batch some rank planned otherwise than others.
        """
        device = counts_E.device
        self._check_last()
        if self._tables[0].device != device:
            self._tables = [ops.upload(table, device) for table in self._tables]
        gathered = counts_E.new_empty(self._world.size * (counts_E.numel() + 1))
        with self._world.exchanges.exchange(device):
            all_gather_flat(gathered, torch.cat([counts_E, self._tables[2]]), group=self._world.compute)
        gathered_NE1 = gathered.view(self._world.size, -1)
        self._gathered_prints = read_later(gathered_NE1[:, -1])
        return gathered_NE1[:, :-1]

    def plan(self, counts_NE: Tensor, num_tokens: int, top_k: int, *, is_training: bool) -> DevicePlan:
        """Return the plan of one micro-batch.

        Args:
            counts_NE: from `gather_counts`.
            num_tokens: T of this rank.
            top_k: K.
            is_training: False in evaluation.

        Raises:
            ConfigurationError: more tokens than any rank had at first.
        """
        most = self._most_tokens.get(is_training)
        if most is None:
            tokens_N = all_gather_counts(torch.tensor([num_tokens], device=counts_NE.device), self._world)
            most = self._most_tokens[is_training] = max(1, int(tokens_N.max()))
        if num_tokens > most:
            raise ConfigurationError(
                f"plan='device' has made room for the {most} tokens that a rank had at first, but this batch has "
                f"{num_tokens}: use batches of one size, or plan='host'"
            )
        block = most * min(top_k, self._most_held)
        if block * self._world.size == most * top_k:
            block += 1  # more rows than assignments: then all ranks allow for padding
        replicas_EN, slots_C, _ = self._tables
        send_EN, recv_EN = ops.plan_rows(counts_NE.t(), replicas_EN, self._world.rank, self._rules)
        return DevicePlan(
            send_EN=send_EN,
            recv_EN=recv_EN,
            slots_C=slots_C,
            block=block,
        )

    def _check_last(self) -> None:
        """Compare the ranks' fingerprints of the last micro-batch, if they are here."""
        if self._gathered_prints is None:
            return
        prints_N, arrived = self._gathered_prints
        if arrived is None or arrived.query():
            self._gathered_prints = None
            require_agreement(prints_N.tolist(), self._what)


def read_later(words_N: Tensor) -> tuple[Tensor, Any]:
    """Start a copy to the host; return it and the event of its arrival, None if it is complete."""
    if words_N.device.type == "cpu":
        return torch.empty(words_N.shape, dtype=words_N.dtype).copy_(words_N, non_blocking=True), None
    host = torch.empty(words_N.shape, dtype=words_N.dtype, pin_memory=True).copy_(words_N, non_blocking=True)
    event = torch.Event(device=words_N.device)
    event.record(torch.accelerator.current_stream(words_N.device))
    return host, event


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchPlan:
    """Dispatch plan of one micro-batch of one layer, made by the same rules on every rank.

    Attributes:
        tokens_EN: int64, assignments of every rank to every expert.
        send_EN: int64, rows of each expert that this rank sends to each rank, itself included.
        recv_EN: int64, rows of each expert that it receives from each.
        experts_C: the expert of each of this rank's slots, -1 where it is vacant, and of each of its shadows.
        num_experts_N: int64, experts that each rank computes, shadows included.
    """

    tokens_EN: IntArray
    send_EN: IntArray
    recv_EN: IntArray
    experts_C: tuple[int, ...]
    num_experts_N: IntArray


class DispatchBackend(Protocol):
    """Transport of one layer's rows; built anew whenever its experts have moved. `ExchangeBackend` implements all of
    it; a transport with another all-to-all overrides its `exchange`.

    Attributes:
        sent_rows, sent_bytes: that left this rank in the last dispatch.
    """

    @property
    def sent_rows(self) -> int: ...
    @property
    def sent_bytes(self) -> int: ...

    def dispatch(
        self, x_TD: Tensor, expert_ids_TK: Tensor, plan: Any, overlap_fn: OverlapFn
    ) -> tuple[Tensor, Tensor, Any]:
        """Send the tokens of all ranks to the ranks that compute them; collective, differentiable.

        Args:
            x_TD: this rank's tokens.
            expert_ids_TK: their choices, -1 where dropped.
            plan: a `DispatchPlan`; a `DevicePlan` where the backend sets `takes_device_plans`.
            overlap_fn: to be called while the rows travel.

        Returns:
            The rows [M, D] in the order of slots and shadows (those of a `DevicePlan` end with rows of padding); the
            rows of each, int64 [C], on the device of x_TD; and a handle for `combine`.
        """

    def combine(self, rows_MD: Tensor, handle: Any, weights_TK: Tensor) -> Tensor:
        """Send the results back and return, of each token, the weighted sum over its choices, [T, D]; collective,
        differentiable.

        Dropped choices count nothing.
        """


class BackendFactory(Protocol):
    """Factory of a layer's `DispatchBackend`."""

    def __call__(self, world: World, /) -> DispatchBackend:
        """Return a transport of these ranks; `world.compute` is the group to communicate in."""


@dataclass(frozen=True, kw_only=True)
class DispatchHandle:
    """Order of the rows of a dispatch, kept for its combine.

    Attributes:
        plan: of the dispatch.
        order_M: int64, flat assignment (t * K + k) of each row in the order of sending: by target rank, then expert.
        inverse_TK: int64, row of each assignment, -1 where dropped.
        send_rows, recv_rows: rows to and from each rank; of a `DevicePlan` their blocks.
        slot_order_M: index that sorts the received rows by slot, shadows last, and its inverse.
    """

    plan: DispatchPlan | DevicePlan
    order_M: Tensor
    inverse_TK: Tensor
    send_rows: Sequence[int]
    recv_rows: Sequence[int]
    slot_order_M: Tensor
    slot_inverse_M: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AllToAllSpec:
    """Arguments of one all-to-all of the rows of a dispatch or combine.

    Attributes:
        send_splits, recv_splits: rows to and from each rank; of a `DevicePlan` their blocks.
        plan: of the dispatch.
        is_return: True in combine.
        overlap_fn: to be called while the rows travel.
    """

    send_splits: Sequence[int]
    recv_splits: Sequence[int]
    plan: DispatchPlan | DevicePlan
    is_return: bool = False
    overlap_fn: OverlapFn = None


class ExchangeBackend:
    """One uneven all-to-all for dispatch and one for combine.

    Args:
        world: the ranks.

    Attributes:
        takes_device_plans: True if `dispatch` accepts a `DevicePlan`, too.
        rows_to_ranks: of the last dispatch, those that stay on this rank included.
    """

    takes_device_plans = True

    def __init__(self, world: World, /) -> None:
        self.world = world
        self.rows_to_ranks: Sequence[int] = [0] * world.size
        self._row_bytes = 0

    @property
    def sent_rows(self) -> int:
        """Rows that left this rank in the last dispatch, padding of blocks included."""
        return sum(self.rows_to_ranks) - self.rows_to_ranks[self.world.rank]

    @property
    def sent_bytes(self) -> int:
        """Their bytes."""
        return self.sent_rows * self._row_bytes

    def dispatch(
        self, x_TD: Tensor, expert_ids_TK: Tensor, plan: DispatchPlan | DevicePlan, overlap_fn: OverlapFn
    ) -> tuple[Tensor, Tensor, DispatchHandle]:
        """See `DispatchBackend`."""
        if isinstance(plan, DispatchPlan):
            handle, tokens_C = _handle(expert_ids_TK, plan)
        else:
            if not len(x_TD):  # a row that is routed nowhere: blocks are padded with existing rows
                x_TD, expert_ids_TK = F.pad(x_TD, (0, 0, 0, 1)), F.pad(expert_ids_TK, (0, 0, 0, 1), value=-1)
            handle, tokens_C = _device_handle(expert_ids_TK, plan)
        rows_MD = ops.permute(x_TD, handle.order_M, handle.inverse_TK)
        self.rows_to_ranks, self._row_bytes = handle.send_rows, rows_MD.shape[-1] * rows_MD.element_size()
        spec = AllToAllSpec(
            send_splits=handle.send_rows, recv_splits=handle.recv_rows, plan=plan, overlap_fn=overlap_fn
        )
        rows_MD = self.exchange(rows_MD, spec)
        return ops.permute(rows_MD, handle.slot_order_M, handle.slot_inverse_M.unsqueeze(1)), tokens_C, handle

    def combine(self, rows_MD: Tensor, handle: DispatchHandle, weights_TK: Tensor) -> Tensor:
        """See `DispatchBackend`."""
        rows_MD = ops.permute(rows_MD, handle.slot_inverse_M, handle.slot_order_M.unsqueeze(1))
        spec = AllToAllSpec(
            send_splits=handle.recv_rows, recv_splits=handle.send_rows, plan=handle.plan, is_return=True
        )
        rows_MD = self.exchange(rows_MD, spec)
        is_padded = len(handle.inverse_TK) > len(weights_TK)  # by the row that `dispatch` has added to none
        if is_padded:
            weights_TK = F.pad(weights_TK, (0, 0, 0, 1))
        out_TD = ops.unpermute(rows_MD, handle.inverse_TK, handle.order_M, weights_TK)
        return out_TD[:0] if is_padded else out_TD

    def exchange(self, rows_MD: Tensor, spec: AllToAllSpec) -> Tensor:
        """Send consecutive blocks of rows to ranks 0..N-1 and receive theirs, in rank order; differentiable."""
        return exchange_rows(rows_MD, spec.send_splits, spec.recv_splits, self.world, spec.overlap_fn)


def _handle(expert_ids_TK: Tensor, plan: DispatchPlan) -> tuple[DispatchHandle, Tensor]:
    """Build small tables on the host, uploaded in one copy; tables as long as the rows are built on the device."""
    num_experts, own = len(plan.send_EN), int(plan.send_EN.sum())
    by_expert = ops.sort_by_expert(expert_ids_TK, num_experts, num_rows=own)
    tokens_C, here = _by_slot(plan.recv_EN, plan.experts_C)
    there = _chunks(plan.send_EN.T.ravel(), _starts(plan.send_EN).T.ravel())
    tables = np.concatenate([tokens_C, *there, *here])
    sizes = [len(tokens_C), *map(len, there), *map(len, here)]
    uploaded = ops.upload(torch.from_numpy(tables), expert_ids_TK.device)
    tokens, old_send, new_send, old_recv, new_recv = torch.split(uploaded, sizes)
    by_target_M, row_M = ops.reorder_chunks(old_send, new_send, own)
    slot_order_M, slot_inverse_M = ops.reorder_chunks(old_recv, new_recv, int(plan.recv_EN.sum()))
    inverse_TK = by_expert.inverse_TK
    if own == inverse_TK.numel():
        inverse_TK = row_M[inverse_TK]
    elif own:
        inverse_TK = row_M[inverse_TK.clamp_min(0)].masked_fill(inverse_TK < 0, -1)
    handle = DispatchHandle(
        plan=plan,
        order_M=by_expert.order_M[by_target_M],
        inverse_TK=inverse_TK,
        send_rows=plan.send_EN.sum(axis=0).tolist(),
        recv_rows=plan.recv_EN.sum(axis=0).tolist(),
        slot_order_M=slot_order_M,
        slot_inverse_M=slot_inverse_M,
    )
    return handle, tokens


def _device_handle(expert_ids_TK: Tensor, plan: DevicePlan) -> tuple[DispatchHandle, Tensor]:
    """Order rows as they are sent and as they arrive, and count those of each slot; nothing is read on the host.

    Args:
        expert_ids_TK: -1 where dropped; T is at least 1.
        plan: of the same micro-batch.
    """
    num_experts = len(plan.send_EN)
    behind_TK = expert_ids_TK.remainder(num_experts + 1)  # what is dropped, -1, sorts behind the last expert
    by_expert = ops.sort_by_expert(behind_TK, num_experts + 1, num_rows=behind_TK.numel())
    runs = ops.plan_runs(plan.send_EN, plan.recv_EN, plan.slots_C, plan.block)
    num_routed = runs.send_starts[num_experts]  # behind all that is sent lies what fills the first block
    order_M, inverse_A = ops.fill_blocks(by_expert.order_M, runs.send_starts, runs.send_ends, num_routed, plan.num_rows)
    slot_order_M, slot_inverse_M = ops.reorder_chunks(runs.recv_starts, runs.recv_ends, plan.num_rows)
    blocks = [plan.block] * plan.send_EN.shape[1]
    handle = DispatchHandle(
        plan=plan,
        order_M=order_M,
        inverse_TK=inverse_A.view(expert_ids_TK.shape),
        send_rows=blocks,
        recv_rows=blocks,
        slot_order_M=slot_order_M,
        slot_inverse_M=slot_inverse_M,
    )
    return handle, runs.tokens_C


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
    """Offsets of the chunks, row by row."""
    return (sizes.ravel().cumsum() - sizes.ravel()).reshape(sizes.shape)


def _chunks(sizes: IntArray, starts: IntArray) -> tuple[IntArray, IntArray]:
    """Arguments of `kernels.reorder_chunks`: the chunks' starts, and their ends in the given order."""
    return starts.astype(np.int64), sizes.cumsum().astype(np.int64)
