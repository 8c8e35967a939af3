"""The dispatch plan on the device of the counts: nothing is read on the host.

Legend: E experts, N ranks.
"""

from __future__ import annotations

from torch import Tensor

from moe_lightning.kernels import backends, checks, torch_plan
from moe_lightning.kernels.bodies import Sharing


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
    return body.plan_rows(tokens_EN.contiguous(), replicas_EN.contiguous(), rank, sharing)
