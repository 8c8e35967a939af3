"""The dispatch plan on the device of the counts: nothing is read on the host.

Legend: E experts, N ranks, C slots, A assignments, M rows.
"""

from __future__ import annotations

from torch import Tensor

from moe_lightning.kernels import backends, checks, torch_plan, torch_routing
from moe_lightning.kernels.bodies import Runs, Sharing


def plan_rows(tokens_EN: Tensor, replicas_EN: Tensor, rank: int, sharing: Sharing) -> tuple[Tensor, Tensor]:
    """Rows of each expert that a rank sends to, and receives from, every rank: the integers of
    `algorithms.quota.settled_quota` or, without rounds, `equal_quota`, and of `algorithms.dispatch.plan_dispatch`.

    Args:
        tokens_EN: int64, assignments of every rank to every expert; every expert with some has a replica.
        replicas_EN: int64.
        rank: whose rows.
        sharing: how the holders of an expert share its tokens.

    Returns:
        (sent, received), int64 [E, N] each.
    """
    for name, table in (("tokens", tokens_EN), ("replicas", replicas_EN)):
        checks.index(name, table, 2, tokens_EN.device)
    checks.require(
        tokens_EN.shape == replicas_EN.shape and 0 <= rank < tokens_EN.shape[1],
        f"tokens {list(tokens_EN.shape)}, replicas {list(replicas_EN.shape)} and rank {rank} do not fit",
    )
    rooms = backends.bodies(tokens_EN.device)
    body = torch_plan if rooms is None else rooms.plan
    return body.plan_rows(tokens_EN, replicas_EN.contiguous(), rank, sharing)


def plan_runs(send_EN: Tensor, recv_EN: Tensor, slots_C: Tensor, block: int, *, is_packed: bool) -> Runs:
    """The runs of rows that bring a plan's assignments into blocks, one for each rank, and what arrives to its slots.

    Args:
        send_EN, recv_EN: from `plan_rows`.
        slots_C: int64, the expert of each slot, E where it is vacant.
        block: rows that a rank may send to another.
        is_packed: the rows of all ranks follow each other, and what is left over is the last's; else every rank's begin
            a block.
    """
    for name, table, dims in (("send", send_EN, 2), ("recv", recv_EN, 2), ("slots", slots_C, 1)):
        checks.index(name, table, dims, send_EN.device)
    checks.require(
        send_EN.shape == recv_EN.shape, f"send {list(send_EN.shape)} and recv {list(recv_EN.shape)} do not fit"
    )
    rooms = backends.bodies(send_EN.device)
    body = torch_plan if rooms is None else rooms.plan
    return body.runs(send_EN.contiguous(), recv_EN.contiguous(), slots_C.contiguous(), block, is_packed)


def fill_blocks(
    order_A: Tensor, starts_C: Tensor, ends_C: Tensor, num_kept: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """The assignments in the new order of their runs, and where each went.

    Args:
        order_A: int64, assignments sorted by expert, those that are dropped last; at least one.
        starts_C, ends_C: the runs that are sent, of `plan_runs`.
        num_kept: int64 [], how many are not dropped.
        num_rows: M, the last of `ends_C`; more than A.

    Returns:
        (int64 [M], the assignment of each row, any where the row is left over; int64 [A], the row of each assignment,
        -1 where it is dropped).
    """
    rooms = backends.bodies(order_A.device)
    body = torch_routing if rooms is None else rooms.routing
    return body.fill_blocks(order_A, starts_C, ends_C, num_kept, num_rows)
