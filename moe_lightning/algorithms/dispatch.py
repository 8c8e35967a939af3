"""Who sends which tokens to whom, so that every rank computes its exact quota and as few tokens as possible travel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_lightning.arrays import IntArray


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """One rank's row and column of the dispatch tensor D[e, i, j] (tokens of expert e that rank i sends to rank j).

    Attributes:
        send: int64 [E, N], send[e, j] = D[e, rank, j]; row sums are this rank's tokens of each expert.
        recv: int64 [E, N], recv[e, i] = D[e, i, rank]; row sums are this rank's quota.
    """

    send: IntArray
    recv: IntArray


def plan_dispatch(tokens: IntArray, quota: IntArray, rank: int) -> DispatchPlan:
    """Interval plan: tokens stay where they are up to the quota, then surplus intervals meet residual intervals.

    Order the surplus of all ranks on a line and the residual quota of all ranks on another: rank i sends to rank j what
    its interval and j's interval share (Lazarus Alg. 1 with its denominator corrected, in integers). The volume is the
    smallest possible. O(E * N), no communication.

    Args:
        tokens: int64 [E, N], tokens of expert e on rank n before dispatch.
        quota: int64 [E, N], tokens of expert e that rank n shall compute; row sums equal those of `tokens`.
        rank: whose row and column to return.
    """
    # An expert has few holders: only the pairs with a quota and the rows of this rank's experts are touched.
    num_ranks = tokens.shape[1]
    pairs = np.flatnonzero(quota != 0)
    experts, ranks = np.divmod(pairs, num_ranks)
    quotas = quota.reshape(-1)[pairs]
    local = np.minimum(tokens[experts, ranks], quotas)
    send, recv = (np.zeros(tokens.shape, dtype=np.int64) for _ in range(2))  # unlike zeros_like, touches no page yet

    residual = quotas - local
    total = np.cumsum(residual)
    starts = np.searchsorted(experts, np.arange(len(tokens)))
    residual_end = total - np.concatenate(([0], total))[starts][experts]
    mine = tokens[:, rank].copy()
    here = ranks == rank
    mine[experts[here]] -= local[here]
    kept_upto = np.bincount(experts, weights=np.where(ranks <= rank, local, 0), minlength=len(tokens)).astype(np.int64)
    mine_end = tokens[:, : rank + 1].sum(axis=1) - kept_upto
    send[experts, ranks] = _overlap(mine_end[experts], mine[experts], residual_end, residual)
    send[experts[here], rank] = local[here]

    held = experts[here]
    surplus = tokens[held] - np.minimum(tokens[held], quota[held])
    recv[held] = _overlap(residual_end[here, None], residual[here, None], np.cumsum(surplus, axis=1), surplus)
    recv[held, rank] = local[here]
    return DispatchPlan(send=send, recv=recv)


def _overlap(end: IntArray, length: IntArray, other_end: IntArray, other_length: IntArray) -> IntArray:
    """Length of what the intervals [end - length, end) and [other_end - other_length, other_end) share."""
    shared: IntArray = np.minimum(end, other_end) - np.maximum(end - length, other_end - other_length)
    return np.maximum(shared, 0, out=shared)


def padded_rows(tokens: IntArray) -> int:
    """Rows that a rank sends when each (expert, rank) buffer is padded to the fullest (DeepSpeed-MoE without drops)."""
    return int(tokens.max()) * int(tokens.shape[0])
