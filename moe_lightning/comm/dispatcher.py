"""Brings each token to a replica of its expert and the result back.

Shapes: T tokens and K choices of this rank, E experts, N ranks, S slots of this rank, M rows, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moe_lightning import kernels as ops
from moe_lightning.algorithms.dispatch import plan_dispatch
from moe_lightning.algorithms.placement import IntArray, Placement, uniform_placement
from moe_lightning.algorithms.quota import balanced_quota, equal_quota
from moe_lightning.comm.exchange import all_gather_counts, exchange_rows
from moe_lightning.comm.world import World
from moe_lightning.errors import ConfigurationError

QuotaPolicy = Literal["balanced", "equal"]


@dataclass(frozen=True, kw_only=True)
class Route:
    """One micro-batch's way through one layer.

    Attributes:
        order_M: int64, flat assignment (t * K + k) of each row in the order of sending: by target rank, then expert.
        inverse_TK: int64, row of each assignment, -1 where dropped.
        tokens_per_slot_S: int64, rows that this rank computes for each of its slots.
        send_rows, recv_rows: rows to and from each rank.
        slot_order_M: index that sorts the received rows by slot, and its inverse; None where they already are.
    """

    order_M: Tensor
    inverse_TK: Tensor
    tokens_per_slot_S: Tensor
    send_rows: Sequence[int]
    recv_rows: Sequence[int]
    slot_order_M: Tensor | None = None
    slot_inverse_M: Tensor | None = None


class Dispatcher:
    """Dispatch under one layer's placement; it keeps no state between micro-batches but the statistics of the last one.

    Args:
        placement: replicas [E, N].
        world: the ranks.
        groups: dispatch groups; tokens travel only inside the group of their rank.
        quota: "balanced" over ranks, or "equal" per replica.
        exchange_dtype: dtype of rows in flight; None keeps that of the activations.

    Attributes:
        last_rank_loads: int64 [N], rows that each rank computed in the last planned micro-batch; None for a world of
            one rank.

    Raises:
        ConfigurationError: the placement does not fit the world, or a group lacks an expert.
    """

    def __init__(
        self, placement: Placement, world: World, groups: Sequence[Sequence[int]], quota: QuotaPolicy = "balanced"
    ) -> None:
        if placement.num_ranks != world.size:
            raise ConfigurationError(f"the placement is for {placement.num_ranks} ranks, but {world.size} are running")
        if quota not in ("balanced", "equal"):
            raise ConfigurationError(f"quota={quota!r} is not known: use 'balanced' or 'equal'")
        placement.check_groups(groups)
        self.placement = placement
        self.world = world
        self.groups = tuple(tuple(group) for group in groups)
        self._quota = balanced_quota if quota == "balanced" else equal_quota
        self._slots = placement.experts_on(world.rank)
        self.last_rank_loads: IntArray | None = None
        self.last_sent_rows = 0
        self.last_sent_bytes = 0

    @classmethod
    def local(cls, num_experts: int) -> Dispatcher:
        """All experts on the one rank there is."""
        return cls(uniform_placement(num_experts, 1), World.single(), [(0,)])

    def gather_counts(self, counts_E: Tensor) -> Tensor:
        """All ranks' assignments per expert, int64 [N, E]; the layer's one synchronisation of host and device with
        several ranks.
        """
        return counts_E.unsqueeze(0) if self.world.size == 1 else all_gather_counts(counts_E, self.world)

    def plan(self, expert_ids_TK: Tensor, counts_NE: Tensor) -> Route:
        """Where every assignment goes.

        Args:
            expert_ids_TK: this rank's choices, -1 where dropped.
            counts_NE: assignments of every rank after drops, from `gather_counts`.
        """
        by_expert = ops.sort_by_expert(expert_ids_TK, self.placement.num_experts)
        if self.world.size == 1:
            return Route(
                order_M=by_expert.order_M,
                inverse_TK=by_expert.inverse_TK,
                tokens_per_slot_S=by_expert.tokens_per_expert_E,
                send_rows=(),
                recv_rows=(),
            )
        send_EN, recv_EN = self._send_and_receive(counts_NE.numpy().T)
        device = expert_ids_TK.device
        by_target_M = ops.chunk_order(torch.from_numpy(send_EN), device)
        recv_NS = torch.from_numpy(np.ascontiguousarray(recv_EN[list(self._slots)].T))
        slot_order_M = ops.chunk_order(recv_NS, device)
        row_M = ops.invert(by_target_M)
        dropped_TK = by_expert.inverse_TK < 0
        inverse_TK = row_M[by_expert.inverse_TK.clamp_min(0)] if row_M.numel() else by_expert.inverse_TK
        return Route(
            order_M=by_expert.order_M[by_target_M],
            inverse_TK=inverse_TK.masked_fill(dropped_TK, -1),
            tokens_per_slot_S=recv_NS.sum(dim=0).to(device),
            send_rows=send_EN.sum(axis=0).tolist(),
            recv_rows=recv_EN.sum(axis=0).tolist(),
            slot_order_M=slot_order_M,
            slot_inverse_M=ops.invert(slot_order_M),
        )

    def _send_and_receive(self, tokens_EN: IntArray) -> tuple[IntArray, IntArray]:
        """This rank's row and column of the dispatch tensor, zero outside its group; remembers the load of every
        rank.
        """
        send, recv = np.zeros_like(tokens_EN), np.zeros_like(tokens_EN)
        loads = np.zeros(self.world.size, dtype=np.int64)
        for group in self.groups:
            ranks = list(group)
            tokens = np.ascontiguousarray(tokens_EN[:, ranks])
            quota = self._quota(tokens.sum(axis=1), np.ascontiguousarray(self.placement.replicas[:, ranks]))
            loads[ranks] = quota.sum(axis=0)
            if self.world.rank in group:
                plan = plan_dispatch(tokens, quota, ranks.index(self.world.rank))
                send[:, ranks], recv[:, ranks] = plan.send, plan.recv
        self.last_rank_loads = loads
        return send, recv

    def dispatch(self, x_TD: Tensor, route: Route) -> Tensor:
        """Rows for this rank's slots, sorted by slot; differentiable."""
        rows_MD = ops.permute(x_TD, route.order_M, route.inverse_TK)
        if route.slot_order_M is None:
            return rows_MD
        self.last_sent_rows = sum(route.send_rows) - route.send_rows[self.world.rank]
        self.last_sent_bytes = self.last_sent_rows * rows_MD.shape[-1] * rows_MD.element_size()
        rows_MD = exchange_rows(rows_MD, route.send_rows, route.recv_rows, self.world)
        return ops.gather_rows(rows_MD, route.slot_order_M, route.slot_inverse_M)

    def combine(self, rows_MD: Tensor, route: Route, weights_TK: Tensor) -> Tensor:
        """Weighted sum of the K results of each token, [T, D]; differentiable."""
        if route.slot_order_M is not None and route.slot_inverse_M is not None:
            rows_MD = ops.gather_rows(rows_MD, route.slot_inverse_M, route.slot_order_M)
            rows_MD = exchange_rows(rows_MD, route.recv_rows, route.send_rows, self.world)
        return ops.unpermute(rows_MD, route.inverse_TK, route.order_M, weights_TK)
