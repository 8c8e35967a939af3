"""Slow references of planners: every effect tabulated, nothing kept from one step to the next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.cost_model import ONE_COPY, BlockCosts, TransferMethod, predict_block
from moe_lightning.balancing.planner import BalancePlanner
from moe_lightning.balancing.shadow_search import no_shadows
from moe_lightning.checkpoint.protection import ProtectionLayout, sub_shard
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.quota import ShadowPlan, balanced_quota, choose_homes, shadow_quota


def rebalance(planner: BalancePlanner) -> list[Placement] | None:
    """Count one step; new placements where they are due and any layer gains by them."""
    placements = planner.due_placements()
    return placements if placements != planner._placements else None


def searched_shadows(tokens: np.ndarray, placement: Placement, costs: BlockCosts, *, alpha: float = 0.1) -> ShadowPlan:
    """`search_shadows` on at most 17 ranks: tables [B, E, 4, N] of all moves, all moves made, all plans predicted."""
    values = np.arange(placement.num_ranks - 1)
    homes = choose_homes(placement, tokens.sum(axis=1))
    resident = placement.replicas > 0
    order = np.argsort(np.where(resident, tokens.max() + 1, tokens), axis=1, kind="stable")
    position = np.argsort(order, axis=1, kind="stable")
    shadows = ~resident & (position >= values[:, None, None])
    speeds = np.ones(placement.num_ranks, dtype=np.int64) if costs.speeds is None else costs.speeds
    base = balanced_quota(tokens.sum(axis=1), placement.replicas, speeds)
    change = row_volumes(tokens, _moved_quota(tokens, base, shadows)) - row_volumes(tokens, base)
    copies = copy_volumes(shadows, homes, costs.transfer)
    chosen, seconds = [], []
    for index in range(len(values)):
        volumes, copied = row_volumes(tokens, base).sum(axis=0), np.zeros_like(copies[index, 0])
        moved: list[int] = []
        best, best_s = list(moved), float(predict_block(volumes, copied, costs).total_s)
        while np.ptp(times := -(-volumes[0] * speeds.max() // speeds)) >= (
            alpha * (tokens.sum() * speeds.max() / speeds.sum())
        ):
            relief = base[:, times.argmax()] * shadows[index].any(axis=1)
            relief[moved] = 0
            if not relief.any():
                break
            moved.append(int(relief.argmax()))
            volumes = volumes + change[index, moved[-1]]
            copied = copied + copies[index, moved[-1]]
            total_s = float(predict_block(volumes, copied, costs).total_s)
            if total_s < best_s:
                best, best_s = list(moved), total_s
        chosen.append(shadows[index] * np.isin(np.arange(len(tokens)), best)[:, None])
        seconds.append(best_s)

    def predicted_s(plan: ShadowPlan) -> float:
        rows = row_volumes(tokens, shadow_quota(tokens, placement, plan, speeds)).sum(axis=0)
        totals = copy_volumes(plan.shadows, plan.homes, costs.transfer).sum(axis=0)
        return float(predict_block(rows, totals, costs).total_s)

    local = ShadowPlan(shadows=chosen[int(np.argmin(seconds))], homes=homes, quota_rule="local")
    widest = replace(local, shadows=max(chosen, key=np.sum))
    balanced = [replace(plan, quota_rule="balanced") for plan in (local, widest)]
    return min((no_shadows(tokens, placement), local, *balanced), key=predicted_s)


def _moved_quota(tokens: np.ndarray, base: np.ndarray, shadows: np.ndarray) -> np.ndarray:
    """int64 [B, E, N]: shadows keep their rank's tokens, residents share the rest."""
    kept = tokens * shadows
    load = base.sum(axis=1)[:, None]
    rest = (load.T - kept.sum(axis=2))[..., None]
    upto = np.cumsum(base, axis=1)
    return kept + rest * upto // np.maximum(load, 1) - rest * (upto - base) // np.maximum(load, 1)


def spread_one_by_one(replicas: np.ndarray, node_slots: np.ndarray) -> np.ndarray:
    """`spread` with a cursor that looks at every node."""
    table = np.zeros((len(replicas), len(node_slots)), dtype=np.int64)
    cursor = 0
    for expert, count in enumerate(replicas):
        for _ in range(count):
            nodes = [(cursor + step) % len(node_slots) for step in range(len(node_slots))]
            open_nodes = [node for node in nodes if table[:, node].sum() < node_slots[node]]
            node = min(open_nodes, key=lambda node: table[expert, node])
            table[expert, node] += 1
            cursor = node + 1
    return table


def dealt_one_by_one(table: np.ndarray, cluster: Cluster, load: np.ndarray) -> np.ndarray:
    """`deal_to_ranks`, one replica after the other."""
    replicas = np.zeros((len(table), cluster.num_ranks), dtype=np.int64)
    carried = [0] * cluster.num_ranks
    share = 720_720 * load // np.maximum(table.sum(axis=1), 1)
    for node in range(cluster.num_nodes):
        for expert in sorted(range(len(table)), key=lambda expert: (-share[expert], expert)):
            for _ in range(table[expert, node]):
                used = replicas.sum(axis=0)
                open_ranks = [rank for rank in cluster.ranks_by_node()[node] if used[rank] < cluster.slots_per_rank]
                rank = min(open_ranks, key=lambda rank: (replicas[expert, rank], carried[rank], used[rank], rank))
                replicas[expert, rank] += 1
                carried[rank] += int(share[expert])
    return replicas


def by_node(cluster: Cluster, per_rank: np.ndarray) -> np.ndarray:
    """Sums of the last axis over the ranks of each node."""
    return np.stack([per_rank[..., ranks].sum(axis=-1) for ranks in cluster.ranks_by_node()], axis=-1)


def missing_nodes(table: np.ndarray, cluster: Cluster, floor: int) -> int:
    """Distinct nodes that are missing, over all experts."""
    nodes = [{cluster.node_of[rank] for rank in np.flatnonzero(row)} for row in table]
    return sum(max(0, floor - len(held)) for held in nodes)


def row_volumes(tokens: np.ndarray, quota: np.ndarray) -> np.ndarray:
    """int64 [..., 4, N] of each expert: rows computed, sent, received, and 1 where the rank computes any.

    The two first are Pro-Prophet's H and the counterpart of its R, which is the third. Sum over experts for a rank's
    totals.

    Args:
        tokens: int64 [..., N], assignments of an expert on each rank before dispatch.
        quota: int64 [..., N], assignments of it that each rank computes.
    """
    surplus = tokens - quota
    return np.stack([quota, np.maximum(surplus, 0), np.maximum(-surplus, 0), (quota > 0).astype(np.int64)], axis=-2)


def copy_volumes(shadows: np.ndarray, homes: np.ndarray, transfer: TransferMethod) -> np.ndarray:
    """int64 [..., E, 2, N]: copies of each expert that each rank sends (0) and receives (1) in Trans, in units of
    1 / ONE_COPY.

    Agg is the same in reverse. Sum over experts for a rank's totals.

    Args:
        shadows: bool [..., E, N], where the shadows go; never the home.
        homes: int64 [..., E], the rank that sends each expert's weights.
        transfer: see `TransferMethod`.
    """
    num_ranks = shadows.shape[-1]
    count = shadows.sum(axis=-1, keepdims=True)
    moved = (count > 0).astype(np.int64)
    at_home = homes[..., None] == np.arange(num_ranks)
    if transfer == "average":
        evenly = np.broadcast_to(ONE_COPY * (count + moved) // num_ranks, shadows.shape)
        return np.stack([evenly, evenly], axis=-2)
    return np.stack([at_home * ONE_COPY * count, shadows * ONE_COPY], axis=-2)


def survives(layout: ProtectionLayout, failed: tuple[int, ...]) -> bool:
    """Return True if the bytes on the nodes that are left determine all shards, by the rank of the system over GF(2):
    every shard is cut into as many unknown words as its group has parts."""
    parts = {rank: max(1, len(layout.group_of(rank)) - 1) for rank in range(len(layout.node_of))}
    first = {rank: sum(parts[r] for r in range(rank)) for rank in parts}
    width = sum(parts.values())
    rows: list[NDArray[np.int64]] = []

    def row(*words: int) -> None:
        rows.append(np.isin(np.arange(width), words).astype(np.int64))

    for rank, node in enumerate(layout.node_of):
        if node in failed:
            continue
        for writer in (rank, *layout.copied_writers(rank)):
            for part in range(parts[writer]):
                row(first[writer] + part)
        group = layout.group_of(rank)
        if group:
            i = group.index(rank)
            row(*(first[j] + sub_shard(i, group.index(j)) for j in group if j != rank))
    return _rank_over_gf2(rows, width) == width


def _rank_over_gf2(rows: list[NDArray[np.int64]], width: int) -> int:
    table, rank = np.array(rows).reshape(-1, width), 0
    for column in range(width):
        pivots = np.flatnonzero(table[rank:, column]) + rank
        if not pivots.size:
            continue
        table[[rank, pivots[0]]] = table[[pivots[0], rank]]
        others = np.flatnonzero(table[:, column])
        others = others[others != rank]
        table[others] ^= table[rank]
        rank += 1
    return rank
