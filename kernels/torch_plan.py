"""Quotas and the dispatch plan with torch: whole tables [E, N], fixed rounds, integers only; a GPU is not waited for.

Legend: E experts, N ranks, C slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_lightning.kernels.bodies import Runs, Sharing


def share_out(tokens_E: Tensor, replicas_EN: Tensor, sharing: Sharing) -> Tensor:
    """int64 [E, N]: see `kernels.share_out`."""
    if sharing.rounds == 0:
        return _split(tokens_E, replicas_EN)
    pull_EN, first_EN = _balancing_pull(tokens_E, replicas_EN, sharing)
    best_EN, first_EN = _split(tokens_E, pull_EN), _split(tokens_E, first_EN)
    return torch.where(first_EN.sum(0).max() < best_EN.sum(0).max(), first_EN, best_EN)


def _split(tokens_E: Tensor, pull_EN: Tensor) -> Tensor:
    """Tokens of each expert in proportion to its pulls, by cumulative rounding."""
    upto_EN, tokens_E1 = pull_EN.cumsum(1), tokens_E.unsqueeze(1)
    norm_E1 = upto_EN[:, -1:].clamp_min(1)
    return tokens_E1 * upto_EN // norm_E1 - tokens_E1 * (upto_EN - pull_EN) // norm_E1


def _balancing_pull(tokens_E: Tensor, replicas_EN: Tensor, sharing: Sharing) -> tuple[Tensor, Tensor]:
    """weight of the rank * replicas, for the best weights found and for the first."""
    tokens_E1, num_ranks = tokens_E.unsqueeze(1), replicas_EN.shape[1]
    mean = ((tokens_E.sum() + num_ranks - 1) // num_ranks).clamp_min(1)
    holders_E = (replicas_EN > 0).sum(1).clamp_min(1)
    bound = torch.maximum(mean, ((tokens_E + holders_E - 1) // holders_E).max())
    enough = bound + bound // sharing.slack
    largest = (replicas_EN.sum(1) * tokens_E).max().clamp_min(1)
    one = ((1 << 62) // largest).clamp(1, sharing.one)
    weights_N = one.expand(num_ranks)
    best_EN = first_EN = replicas_EN
    best_load = torch.full_like(mean, torch.iinfo(torch.int64).max)
    best_round = torch.zeros_like(mean)
    is_over = torch.zeros_like(mean, dtype=torch.bool)
    for index in range(sharing.rounds):
        pull_EN = weights_N * replicas_EN
        load_N = (tokens_E1 * pull_EN // pull_EN.sum(1, keepdim=True).clamp_min(1)).sum(0)
        most = load_N.max()
        if not index:
            first_EN = pull_EN
        is_better = (most < best_load) & ~is_over
        best_EN, best_load = torch.where(is_better, pull_EN, best_EN), torch.where(is_better, most, best_load)
        best_round = torch.where(is_better, index, best_round)
        is_stuck = (index - best_round >= sharing.patience) & (best_load <= enough)
        is_over = is_over | is_stuck | (most * 500 <= bound * 501)
        weights_N = weights_N * mean // torch.maximum(load_N, (mean // 64).clamp_min(1))
        weights_N = (weights_N * one // weights_N.max().clamp_min(1)).clamp_min(1)
    return best_EN, first_EN


def send_and_receive(tokens_EN: Tensor, quota_EN: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """int64 [E, N] each: see `kernels.plan_rows`."""
    local_EN = torch.minimum(tokens_EN, quota_EN)
    surplus_EN, lack_EN = tokens_EN - local_EN, quota_EN - local_EN
    surplus_end_EN, lack_end_EN = surplus_EN.cumsum(1), lack_EN.cumsum(1)
    here = slice(rank, rank + 1)
    send_EN = _overlap(surplus_end_EN[:, here], surplus_EN[:, here], lack_end_EN, lack_EN)
    recv_EN = _overlap(lack_end_EN[:, here], lack_EN[:, here], surplus_end_EN, surplus_EN)
    # A rank lacks nothing of an expert of which it has too much: what stays here is in neither overlap.
    send_EN[:, here] = recv_EN[:, here] = local_EN[:, here]
    return send_EN, recv_EN


def _overlap(end: Tensor, length: Tensor, other_end: Tensor, other_length: Tensor) -> Tensor:
    """Length of what two intervals share that end there."""
    return (torch.minimum(end, other_end) - torch.maximum(end - length, other_end - other_length)).clamp_min(0)


def plan_rows(tokens_EN: Tensor, replicas_EN: Tensor, rank: int, sharing: Sharing) -> tuple[Tensor, Tensor]:
    """int64 [E, N] each: see `kernels.plan_rows`."""
    return send_and_receive(tokens_EN, share_out(tokens_EN.sum(1), replicas_EN, sharing), rank)


def runs(send_EN: Tensor, recv_EN: Tensor, slots_C: Tensor, block: int, is_packed: bool) -> Runs:
    """See `kernels.plan_runs`."""
    send_N, recv_N = send_EN.sum(0), recv_EN.sum(0)
    room_N = _blocks(send_N, block, is_packed)[1]
    send_sizes = torch.cat([send_EN, room_N.unsqueeze(0)]).t()
    send_starts = torch.cat([_starts(send_EN), (_starts(room_N) + send_N.sum()).unsqueeze(0)]).t()
    begin_N, room_N = _blocks(recv_N, block, is_packed)
    starts_EN = begin_N + recv_EN.cumsum(0) - recv_EN
    # A vacant slot names the row that is padded: its runs are empty, wherever they begin.
    slot_sizes, slot_starts = (F.pad(table, (0, 0, 0, 1))[slots_C] for table in (recv_EN, starts_EN))
    return Runs(
        send_starts=send_starts.reshape(-1),
        send_ends=send_sizes.reshape(-1).cumsum(0),
        recv_starts=torch.cat([slot_starts.reshape(-1), begin_N + recv_N]),
        recv_ends=torch.cat([slot_sizes.reshape(-1), room_N]).cumsum(0),
        tokens_C=slot_sizes.sum(1),
        send_N=send_N,
        recv_N=recv_N,
    )


def _blocks(rows_N: Tensor, block: int, is_packed: bool) -> tuple[Tensor, Tensor]:
    """Where each rank's rows begin, and how much room is left behind them."""
    if is_packed:
        return _starts(rows_N), F.pad((block * len(rows_N) - rows_N.sum()).view(1), (len(rows_N) - 1, 0))
    return torch.arange(len(rows_N), device=rows_N.device) * block, block - rows_N


def _starts(sizes: Tensor) -> Tensor:
    """Where each run begins, runs row by row."""
    return (sizes.reshape(-1).cumsum(0) - sizes.reshape(-1)).view(sizes.shape)
