"""Dispatch without a word from the device: who computes what is planned there, and rows lie in blocks of one size.

A block has room for all rows that a rank can send to another, so that none is ever lost: a token chooses an expert
once, so these are at most its tokens times the choices, or the experts that the other holds, whichever are fewer.

Shapes: T tokens and K choices of this rank, E experts, N ranks, C slots of this rank, M = N * block rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_lightning import kernels as ops
from moe_lightning.algorithms.placement import Placement
from moe_lightning.algorithms.quota import sharing_rounds
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels.buffers import upload
from moe_lightning.parallel.collectives import require_agreement
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import all_gather_counts, all_gather_flat


@dataclass(frozen=True, kw_only=True, eq=False)
class DevicePlan:
    """Who computes which rows of one micro-batch of one layer; all tensors lie where the tokens are.

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
        """Room for what this rank receives, and for what it sends."""
        return self.block * self.send_EN.shape[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """How the rows of a dispatch lie in their blocks.

    Attributes:
        order_M: int64, flat assignment of each row to be sent; of room that is left over, any.
        inverse_TK: int64, row of each assignment, -1 where dropped.
        slot_order_M, slot_inverse_M: index that sorts the received rows by slot, what is no row last, and its inverse.
        tokens_C: int64, rows of each slot.
        send_N, recv_N: int64, rows to and from each rank.
    """

    order_M: Tensor
    inverse_TK: Tensor
    slot_order_M: Tensor
    slot_inverse_M: Tensor
    tokens_C: Tensor
    send_N: Tensor
    recv_N: Tensor


def lay_out(expert_ids_TK: Tensor, plan: DevicePlan, *, is_packed: bool) -> Layout:
    """Where rows lie when they are sent and when they have arrived; nothing is read on the host.

    Args:
        expert_ids_TK: -1 where dropped; T is at least 1.
        plan: of the same micro-batch.
        is_packed: the rows of all ranks follow each other; else every rank's begin a block.
    """
    num_experts = len(plan.send_EN)
    behind_TK = expert_ids_TK.remainder(num_experts + 1)  # what is dropped, -1, sorts behind the last expert
    by_expert = ops.sort_by_expert(behind_TK, num_experts + 1, may_drop=False)
    runs = ops.plan_runs(plan.send_EN, plan.recv_EN, plan.slots_C, plan.block, is_packed=is_packed)
    num_kept = runs.send_starts[num_experts]  # behind all that is sent lies what fills the first block
    order_M, inverse_A = ops.fill_blocks(by_expert.order_M, runs.send_starts, runs.send_ends, num_kept, plan.num_rows)
    slot_order_M, slot_inverse_M = ops.reorder_chunks(runs.recv_starts, runs.recv_ends, plan.num_rows)
    return Layout(
        order_M=order_M,
        inverse_TK=inverse_A.view(expert_ids_TK.shape),
        slot_order_M=slot_order_M,
        slot_inverse_M=slot_inverse_M,
        tokens_C=runs.tokens_C,
        send_N=runs.send_N,
        recv_N=runs.recv_N,
    )


class DevicePlanner:
    """Plans one layer's dispatch on the device of its counts.

    The host waits once, in the first micro-batch of training and the first of evaluation: for the most tokens that any
    rank has. That this rank plans by the placement of all others is read when it has arrived, a micro-batch later.

    Args:
        placement: replicas [E, N].
        world: the ranks.
        is_balanced: whether quotas are balanced over ranks, or equal for each replica.
        slot_experts: this rank's slots, -1 where vacant.
        fingerprint: of what it plans by.
        what: that describes, for messages.

    Raises:
        ConfigurationError: a world that may be cut, whose aborted counts nobody would notice.
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
        if world.may_be_cut:
            raise ConfigurationError(
                "plan='device' reads nothing before it is used, so a world that loses a rank would compute with what "
                "is left of its counts: use plan='host' in elastic runs"
            )
        self._world = world
        self._what = what
        num_experts = placement.num_experts
        self._most_held = int((placement.replicas > 0).sum(axis=0).max())
        self._tables = [
            torch.from_numpy(placement.replicas.copy()),
            torch.tensor([expert if expert >= 0 else num_experts for expert in slot_experts], dtype=torch.int64),
            torch.tensor([fingerprint]),
        ]
        self._rules = ops.Sharing(*sharing_rounds(len(placement.pairs.ranks)))
        if not is_balanced:
            self._rules = self._rules._replace(rounds=0)
        self._most_tokens: dict[bool, int] = {}
        self._told: tuple[Tensor, Any] | None = None

    def gather_counts(self, counts_E: Tensor) -> Tensor:
        """All ranks' assignments per expert, int64 [N, E], where they were counted.

        Raises:
            ConfigurationError: in an earlier micro-batch some rank planned otherwise than others.
        """
        device = counts_E.device
        self._check_last()
        if self._tables[0].device != device:
            self._tables = [upload(table, device) for table in self._tables]
        gathered = counts_E.new_empty(self._world.size * (counts_E.numel() + 1))
        with self._world.exchanges.exchange(device):
            all_gather_flat(gathered, torch.cat([counts_E, self._tables[2]]), group=self._world.compute)
        gathered_NE1 = gathered.view(self._world.size, -1)
        self._told = read_later(gathered_NE1[:, -1])
        return gathered_NE1[:, :-1]

    def plan(self, counts_NE: Tensor, num_tokens: int, top_k: int, *, is_training: bool) -> DevicePlan:
        """Where every assignment goes.

        Args:
            counts_NE: from `gather_counts`.
            num_tokens: T of this rank.
            top_k: K.
            is_training: whether this is no evaluation.

        Raises:
            ConfigurationError: more tokens than any rank had at first.
        """
        most = self._most_tokens.get(is_training)
        if most is None:
            told = all_gather_counts(torch.tensor([num_tokens], device=counts_NE.device), self._world)
            most = self._most_tokens[is_training] = max(1, int(told.max()))
        if num_tokens > most:
            raise ConfigurationError(
                f"plan='device' has made room for the {most} tokens that a rank had at first, but this batch has "
                f"{num_tokens}: use batches of one size, or plan='host'"
            )
        block = most * min(top_k, self._most_held)
        if block * self._world.size == most * top_k:
            block += 1  # more room than assignments: then everybody knows that some of it may be left over
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
        if self._told is None:
            return
        told, arrived = self._told
        if arrived is None or arrived.query():
            self._told = None
            require_agreement(told.tolist(), self._what)


def read_later(words_N: Tensor) -> tuple[Tensor, Any]:
    """A copy on the host that nobody waits for, and the event of its arrival; None: it is there."""
    if words_N.device.type == "cpu":
        return torch.empty(words_N.shape, dtype=words_N.dtype).copy_(words_N, non_blocking=True), None
    host = torch.empty(words_N.shape, dtype=words_N.dtype, pin_memory=True).copy_(words_N, non_blocking=True)
    event = torch.Event(device=words_N.device)
    event.record(torch.accelerator.current_stream(words_N.device))
    return host, event
