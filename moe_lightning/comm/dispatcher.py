"""Brings each token to a replica of its expert and the result back.

Shapes: T tokens and K choices of this rank, E experts, N ranks, S slots and H shadows of this rank, M rows, D model
width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moe_lightning import kernels as ops
from moe_lightning.algorithms.dispatch import plan_dispatch
from moe_lightning.algorithms.placement import IntArray, Placement, uniform_placement
from moe_lightning.algorithms.quota import balanced_quota, equal_quota
from moe_lightning.algorithms.shadows import ShadowPlan
from moe_lightning.comm.decision_check import fingerprint, require_agreement
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
        slot_order_M: index that sorts the received rows by slot, shadows last, and its inverse; None where they
            already are.
        tokens_per_shadow_H: int64, rows for each expert that visits this rank, ascending; None where no expert of the
            layer visits any rank.
        resident_rows: sum of tokens_per_slot_S, on the host.
    """

    order_M: Tensor
    inverse_TK: Tensor
    tokens_per_slot_S: Tensor
    send_rows: Sequence[int]
    recv_rows: Sequence[int]
    slot_order_M: Tensor | None = None
    slot_inverse_M: Tensor | None = None
    tokens_per_shadow_H: Tensor | None = None
    resident_rows: int = 0


class Dispatcher:
    """Dispatch under one layer's placement; it keeps no state between micro-batches but the statistics of the last one.

    Args:
        placement: replicas [E, N].
        world: the ranks.
        groups: dispatch groups; tokens travel only inside the group of their rank.
        quota: "balanced" over ranks, or "equal" per replica.
        slot_experts: this rank's slots in their order, -1 where vacant; None: its experts, ascending.
        layer: ordinal of the MoE layer, for messages.

    Attributes:
        last_rank_loads: int64 [N], rows that each rank computed in the last planned micro-batch; None for a world of
            one rank.

    Raises:
        ConfigurationError: the placement does not fit the world, or a group lacks an expert.
    """

    def __init__(
        self,
        placement: Placement,
        world: World,
        groups: Sequence[Sequence[int]],
        quota: QuotaPolicy = "balanced",
        slot_experts: Sequence[int] | None = None,
        layer: int = 0,
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
        held = placement.experts_on(world.rank)
        self.slot_experts = held if slot_experts is None else tuple(slot_experts)
        assert sorted(expert for expert in self.slot_experts if expert >= 0) == list(held)
        self._layer = layer
        self._shadows: ShadowPlan | None = None
        placed = (placement.replicas, repr(self.groups), quota)
        self._placement_print = self._plan_print = fingerprint(*placed)
        self._quota_print = 0
        self.last_rank_loads: IntArray | None = None
        self.last_sent_rows = 0
        self.last_sent_bytes = 0

    @classmethod
    def local(cls, num_experts: int) -> Dispatcher:
        """All experts on the one rank there is."""
        return cls(uniform_placement(num_experts, 1), World.single(), [(0,)])

    @property
    def shadows(self) -> ShadowPlan | None:
        """Which experts visit which ranks in the running step; None: none at all."""
        return self._shadows

    @shadows.setter
    def shadows(self, plan: ShadowPlan | None) -> None:
        if plan is not None:
            plan.check(self.placement)
            if len(self.groups) > 1:
                raise ConfigurationError(
                    f"shadows need one dispatch group, but ep_size cuts the ranks into {len(self.groups)}: drop ep_size"
                )
        self._shadows = plan if plan is not None and plan.num_copies else None
        self._plan_print = self._placement_print
        if self._shadows is not None:
            visiting = fingerprint(self._shadows.shadows, self._shadows.homes, self._shadows.quota_rule)
            self._plan_print ^= visiting

    def gather_counts(self, counts_E: Tensor) -> Tensor:
        """All ranks' assignments per expert, int64 [N, E]; the layer's one synchronisation of host and device with
        several ranks.

        A hash of this rank's placement, shadows and latest quota travels along.

        Raises:
            ConfigurationError: on every rank, some plan otherwise than others.
        """
        if self.world.size == 1:
            return counts_E.unsqueeze(0)
        own_print = counts_E.new_full((1,), self._plan_print ^ self._quota_print)
        told_NE1 = all_gather_counts(torch.cat([counts_E, own_print]), self.world)
        require_agreement(told_NE1[:, -1].tolist(), f"the plan (placement, shadows, quotas) of MoE layer {self._layer}")
        return told_NE1[:, :-1]

    def plan(self, expert_ids_TK: Tensor, counts_NE: Tensor) -> Route:
        """Where every assignment goes.

        Args:
            expert_ids_TK: this rank's choices, -1 where dropped.
            counts_NE: assignments of every rank after drops, from `gather_counts`.
        """
        if self.world.size == 1:
            by_expert = ops.sort_by_expert(self._slots_of(expert_ids_TK), len(self.slot_experts))
            return Route(
                order_M=by_expert.order_M,
                inverse_TK=by_expert.inverse_TK,
                tokens_per_slot_S=by_expert.tokens_per_expert_E,
                send_rows=(),
                recv_rows=(),
            )
        by_expert = ops.sort_by_expert(expert_ids_TK, self.placement.num_experts)
        quota_EN = self._quotas(counts_NE.numpy().T)
        self._quota_print = fingerprint(quota_EN)  # travels with the next counts, not in an exchange of its own
        send_EN, recv_EN = self._send_and_receive(counts_NE.numpy().T, quota_EN)
        device = expert_ids_TK.device
        visiting = self._visiting()
        tokens_C, slot_order_M = _by_slot(recv_EN, (*self.slot_experts, *visiting), device)
        num_slots = len(self.slot_experts)
        by_target_M = ops.chunk_order(torch.from_numpy(send_EN), device)
        row_M = ops.invert(by_target_M)
        dropped_TK = by_expert.inverse_TK < 0
        inverse_TK = row_M[by_expert.inverse_TK.clamp_min(0)] if row_M.numel() else by_expert.inverse_TK
        return Route(
            order_M=by_expert.order_M[by_target_M],
            inverse_TK=inverse_TK.masked_fill(dropped_TK, -1),
            tokens_per_slot_S=tokens_C[:num_slots].to(device),
            send_rows=send_EN.sum(axis=0).tolist(),
            recv_rows=recv_EN.sum(axis=0).tolist(),
            slot_order_M=slot_order_M,
            slot_inverse_M=ops.invert(slot_order_M),
            tokens_per_shadow_H=tokens_C[num_slots:].to(device) if self._shadows is not None else None,
            resident_rows=int(tokens_C[:num_slots].sum()),
        )

    def _slots_of(self, expert_ids_TK: Tensor) -> Tensor:
        """The slot of each chosen expert, in a world of one rank; after a larger world slots are in any order."""
        if self.slot_experts == tuple(range(self.placement.num_experts)):
            return expert_ids_TK
        slots = [self.slot_experts.index(expert) for expert in range(self.placement.num_experts)]
        slot_E = torch.tensor([*slots, -1], device=expert_ids_TK.device)  # a dropped choice, -1, takes the last entry
        return slot_E[expert_ids_TK]

    def _visiting(self) -> tuple[int, ...]:
        """Experts with a shadow on this rank, ascending."""
        if self._shadows is None:
            return ()
        return tuple(int(expert) for expert in np.flatnonzero(self._shadows.shadows[:, self.world.rank]))

    def _quotas(self, tokens_EN: IntArray) -> IntArray:
        """int64 [E, N]: tokens of each expert that each rank computes for its group; remembers every rank's load."""
        quota_EN = np.zeros_like(tokens_EN)
        for group in self.groups:
            ranks = list(group)
            replicas = np.ascontiguousarray(self.placement.replicas[:, ranks])
            quota_EN[:, ranks] = self._share_out(np.ascontiguousarray(tokens_EN[:, ranks]), replicas)
        self.last_rank_loads = quota_EN.sum(axis=0)
        return quota_EN

    def _send_and_receive(self, tokens_EN: IntArray, quota_EN: IntArray) -> tuple[IntArray, IntArray]:
        """This rank's row and column of the dispatch tensor, zero outside its group."""
        send, recv = np.zeros_like(tokens_EN), np.zeros_like(tokens_EN)
        ranks = list(next(group for group in self.groups if self.world.rank in group))
        tokens, quota = (np.ascontiguousarray(table[:, ranks]) for table in (tokens_EN, quota_EN))
        plan = plan_dispatch(tokens, quota, ranks.index(self.world.rank))
        send[:, ranks], recv[:, ranks] = plan.send, plan.recv
        return send, recv

    def _share_out(self, tokens_EN: IntArray, replicas_EN: IntArray) -> IntArray:
        """int64 [E, N]: how many tokens of each expert each rank of a group computes, shadows included."""
        if self._shadows is None:
            return self._quota(tokens_EN.sum(axis=1), replicas_EN)
        shadows_EN = self._shadows.shadows
        if self._shadows.quota_rule == "balanced":
            return self._quota(tokens_EN.sum(axis=1), replicas_EN + shadows_EN)
        kept_EN = tokens_EN * shadows_EN
        return kept_EN + self._quota((tokens_EN - kept_EN).sum(axis=1), replicas_EN)

    def dispatch(self, x_TD: Tensor, route: Route, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """Rows for this rank's slots and then for its shadows, sorted by both; differentiable.

        Args:
            meanwhile: what this process does while the rows travel; not called in a world of one rank.
        """
        rows_MD = ops.permute(x_TD, route.order_M, route.inverse_TK)
        if route.slot_order_M is None:
            return rows_MD
        self.last_sent_rows = sum(route.send_rows) - route.send_rows[self.world.rank]
        self.last_sent_bytes = self.last_sent_rows * rows_MD.shape[-1] * rows_MD.element_size()
        rows_MD = self._exchange(rows_MD, route.send_rows, route.recv_rows, meanwhile=meanwhile)
        return ops.gather_rows(rows_MD, route.slot_order_M, route.slot_inverse_M)

    def combine(self, rows_MD: Tensor, route: Route, weights_TK: Tensor) -> Tensor:
        """Weighted sum of the K results of each token, [T, D]; differentiable."""
        if route.slot_order_M is not None and route.slot_inverse_M is not None:
            rows_MD = ops.gather_rows(rows_MD, route.slot_inverse_M, route.slot_order_M)
            rows_MD = self._exchange(rows_MD, route.recv_rows, route.send_rows, is_return=True)
        return ops.unpermute(rows_MD, route.inverse_TK, route.order_M, weights_TK)

    def _exchange(
        self,
        rows_MD: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
        *,
        is_return: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        return exchange_rows(rows_MD, send, recv, self.world, meanwhile)


def _by_slot(recv_EN: IntArray, experts_C: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of each slot, int64 [C] on the host, and the index that sorts the received rows by slot.

    Rows arrive by source and, of one source, by ascending expert; slots may hold experts in any order, or none.

    Args:
        recv_EN: rows of each expert from each rank.
        experts_C: the expert of each slot, -1 where vacant.
    """
    slots = [slot for slot, expert in enumerate(experts_C) if expert >= 0]
    ascending = sorted(slots, key=lambda slot: experts_C[slot])
    recv_NC = torch.from_numpy(np.ascontiguousarray(recv_EN[[experts_C[slot] for slot in ascending]].T))
    sizes = recv_NC.sum(dim=0)
    tokens_C = torch.zeros(len(experts_C), dtype=torch.int64)
    tokens_C[ascending] = sizes
    order_M = ops.chunk_order(recv_NC, device)
    if ascending != slots:
        pieces = dict(zip(ascending, torch.split(order_M, sizes.tolist()), strict=True))
        order_M = torch.cat([pieces[slot] for slot in slots])
    return tokens_C, order_M
