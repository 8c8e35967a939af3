"""Dispatcher: sends each token to a replica of its expert and the result back.

Shapes: T tokens and K choices of this rank, E experts, N ranks, S slots and H shadows of this rank, M rows, D model
width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from moe_lightning import kernels as ops
from moe_lightning.arrays import IntArray, Pairs
from moe_lightning.dispatch.placement import Placement, uniform_placement
from moe_lightning.dispatch.quota import ShadowPlan, balanced_split, dispatch_splits, divide, equal_split, uneven
from moe_lightning.dispatch.transports import (
    BackendFactory,
    DevicePlanner,
    DispatchBackend,
    DispatchPlan,
    ExchangeBackend,
)
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import fingerprint, require_agreement
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import all_gather_counts
from moe_lightning.registry import Registry

QuotaPolicy = Literal["balanced", "equal"]
PlanPlace = Literal["host", "device"]


DISPATCH_BACKENDS: Registry[BackendFactory] = Registry(
    "dispatch",
    BackendFactory,
    {"exchange": ExchangeBackend},
    makes=DispatchBackend,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """One micro-batch's rows where they are computed.

    Attributes:
        rows_MD: for this rank's slots and then for its shadows, sorted by both; differentiable.
        tokens_per_slot_S: int64, rows that this rank computes for each of its slots.
        tokens_per_shadow_H: int64, rows for each shadow expert on this rank, ascending; None where no expert of the
            layer has a shadow.
        resident_rows: sum of tokens_per_slot_S, on the host.
        handle: for `Dispatcher.combine`.
    """

    rows_MD: Tensor
    tokens_per_slot_S: Tensor
    tokens_per_shadow_H: Tensor | None = None
    resident_rows: int = 0
    handle: Any


class _Quotas:
    """Division of each expert's tokens over its holders in the groups, by the shadows and speeds of the running step.

    Args:
        placement: replicas [E, N].
        groups: dispatch groups.
        is_balanced: True if quotas are balanced over ranks, False if equal for each replica.

    Attributes:
        shadows: None without any.
        speeds: int64 [N], of the ranks; None: all are equally fast.
    """

    def __init__(self, placement: Placement, groups: Sequence[Sequence[int]], *, is_balanced: bool) -> None:
        self._rule = balanced_split if is_balanced else equal_split
        self._groups = [
            (list(group), Pairs.of_table(np.ascontiguousarray(placement.replicas[:, list(group)]))) for group in groups
        ]
        self.shadows: ShadowPlan | None = None
        self.speeds: IntArray | None = None
        self._rules_print = self._last_print = 0

    @property
    def fingerprint(self) -> int:
        """Hash of shadows, speeds and the last quotas: a quota's is sent with the next counts, not by itself."""
        return self._rules_print ^ self._last_print

    def set_rules(self, shadows: ShadowPlan | None, speeds: IntArray | None) -> None:
        """Divide by these from now on."""
        self.shadows, self.speeds, self._rules_print = shadows, speeds, 0
        if shadows is not None:
            self._rules_print ^= fingerprint(shadows.shadows, shadows.homes, shadows.quota_rule)
        if speeds is not None:
            self._rules_print ^= fingerprint(speeds)

    def divide(self, tokens_EN: IntArray, shadows: ShadowPlan | None) -> IntArray:
        """int64 [E, N]: tokens of each expert that each rank computes for its group.

        Args:
            tokens_EN: assignments of every rank.
            shadows: those that take part.
        """
        quota_EN = np.zeros_like(tokens_EN)
        for ranks, pairs in self._groups:
            split = partial(self._rule, speeds=None if self.speeds is None else self.speeds[ranks])
            quota_EN[:, ranks] = divide(np.ascontiguousarray(tokens_EN[:, ranks]), pairs, shadows, split)
        self._last_print = fingerprint(quota_EN)
        return quota_EN


class Dispatcher:
    """Dispatcher of one layer under its placement; between micro-batches it keeps only statistics of the last one.

    Args:
        placement: replicas [E, N].
        world: the ranks.
        groups: dispatch groups; tokens are sent only inside the group of their rank.
        quota: "balanced" over ranks, or "equal" per replica.
        slot_experts: this rank's slots in their order, -1 where vacant; None: its experts, ascending.
        layer: ordinal of the MoE layer, for messages.
        backend: transport of the rows: a name in `DISPATCH_BACKENDS`.
        plan_on: "host", which waits for the counts of every micro-batch, or "device", see `dispatch.transports`.

    Attributes:
        last_rank_loads: int64 [N], rows that each rank computed in the last planned micro-batch; None for a world of
            one rank, and where the host does not know.
        plans_on_device: True if the host reads no counts.

    Raises:
        ConfigurationError: the placement does not fit the world, a group lacks an expert, or what a
            plan on the device does not do: dispatch groups, some backends, elastic runs, speeds, shadows.
    """

    def __init__(
        self,
        placement: Placement,
        world: World,
        groups: Sequence[Sequence[int]],
        quota: QuotaPolicy = "balanced",
        slot_experts: Sequence[int] | None = None,
        layer: int = 0,
        backend: str = "exchange",
        plan_on: PlanPlace = "host",
    ) -> None:
        if placement.num_ranks != world.size:
            raise ConfigurationError(f"the placement is for {placement.num_ranks} ranks, but {world.size} are running")
        placement.check_groups(groups)
        self.placement = placement
        self.world = world
        self.groups = tuple(tuple(group) for group in groups)
        is_balanced = quota == "balanced"
        self._quotas = _Quotas(placement, groups, is_balanced=is_balanced)
        held = placement.experts_on(world.rank)
        self.slot_experts = held if slot_experts is None else tuple(slot_experts)
        assert sorted(expert for expert in self.slot_experts if expert >= 0) == list(held)
        self._layer = layer
        self._backend: DispatchBackend = DISPATCH_BACKENDS.make(backend, world)
        self.plans_on_device = plan_on == "device"
        placed = (placement.replicas, repr(self.groups), quota, backend, *([plan_on] if self.plans_on_device else []))
        self._placement_print = fingerprint(*placed)
        self.last_rank_loads: IntArray | None = None
        self._planner: DevicePlanner | None = None
        self.require_host_plan(len(self.groups) > 1, "dispatch groups (ep_size)")
        self.require_host_plan(not getattr(self._backend, "takes_device_plans", False), f"dispatch={backend!r}")
        self.require_host_plan(world.may_be_cut, "elastic runs")
        if self.plans_on_device and world.size > 1:
            self._planner = DevicePlanner(
                placement,
                world,
                is_balanced=is_balanced,
                slot_experts=self.slot_experts,
                fingerprint=self._placement_print,
                what=f"the placement of MoE layer {layer}",
            )

    @classmethod
    def local(cls, num_experts: int) -> Dispatcher:
        """Return a dispatcher of one rank with all experts."""
        return cls(uniform_placement(num_experts, 1), World.single(), [(0,)])

    @property
    def last_sent_rows(self) -> int:
        """Rows that this rank sent in the last dispatch."""
        return self._backend.sent_rows

    @property
    def last_sent_bytes(self) -> int:
        """Bytes that this rank sent in the last dispatch."""
        return self._backend.sent_bytes

    @property
    def shadows(self) -> ShadowPlan | None:
        """Shadow experts of the running step; None without any."""
        return self._quotas.shadows

    def set_shadows(self, plan: ShadowPlan | None) -> None:
        """Set the shadow experts of the next micro-batches; None: there are none.

        Raises:
            ConfigurationError: a plan that does not fit the placement, the dispatch groups or a plan on the device.
        """
        if plan is not None:
            self.require_host_plan(plan.num_copies > 0, "shadows")
            plan.check(self.placement)
            if len(self.groups) > 1:
                raise ConfigurationError(
                    f"shadows need one dispatch group, but ep_size cuts the ranks into {len(self.groups)}: drop ep_size"
                )
        self._quotas.set_rules(plan if plan is not None and plan.num_copies else None, self.speeds)

    @property
    def speeds(self) -> IntArray | None:
        """int64 [N]: of the ranks, see `dispatch.quota`; None: all are equally fast."""
        return self._quotas.speeds

    def set_speeds(self, speeds: IntArray | None) -> None:
        """Share tokens out by the speeds of the ranks from the next micro-batch on; the same on every rank.

        Raises:
            ConfigurationError: plans are made on the device.
        """
        speeds = uneven(speeds)
        self.require_host_plan(speeds is not None, "ranks of unequal speeds")
        self._quotas.set_rules(self.shadows, speeds)

    def require_host_plan(self, is_needed: bool, what: str) -> None:
        """Raise ConfigurationError if something needs plans on the host, and they are made on the device."""
        if is_needed and self.plans_on_device:
            raise ConfigurationError(f"plan='device' does not support {what}: use plan='host'")

    def gather_counts(self, counts_E: Tensor) -> Tensor:
        """All ranks' assignments per expert, int64 [N, E], on the host; the layer's one synchronisation of host and
        device with several ranks. On the device, and no synchronisation, where plans are made there.

        A hash of this rank's placement, shadows, speeds and latest quota is sent along.

        Raises:
            ConfigurationError: on every rank, some plan otherwise than others.
        """
        if self.world.size == 1:
            return counts_E.unsqueeze(0)
        if self._planner is not None:
            return self._planner.gather_counts(counts_E)
        own = torch.tensor([self._placement_print ^ self._quotas.fingerprint])
        gathered_NE1 = all_gather_counts(torch.cat([counts_E, ops.upload(own, counts_E.device)]), self.world)
        prints = gathered_NE1[:, -1].tolist()
        if prints.count(prints[0]) < len(prints):
            require_agreement(prints, f"the plan (placement, shadows, quotas) of MoE layer {self._layer}")
        return gathered_NE1[:, :-1]

    def plan(self, counts_NE: Tensor, *, is_training: bool = True) -> DispatchPlan:
        """Return the plan of one micro-batch, in a world of several ranks; arguments as of `dispatch`."""
        tokens_EN, shadows = counts_NE.numpy().T, self.shadows if is_training else None
        quota_EN = self._quotas.divide(tokens_EN, shadows)
        self.last_rank_loads = quota_EN.sum(axis=0)
        send_EN, recv_EN = self._send_and_receive(tokens_EN, quota_EN)
        num_experts_N, shadow_experts = np.bincount(self.placement.pairs.ranks, minlength=self.world.size), []
        if shadows is not None:
            num_experts_N += shadows.shadows.sum(axis=0)
            shadow_experts = np.flatnonzero(shadows.shadows[:, self.world.rank]).tolist()
        return DispatchPlan(
            tokens_EN=tokens_EN,
            send_EN=send_EN,
            recv_EN=recv_EN,
            experts_C=(*self.slot_experts, *shadow_experts),
            num_experts_N=num_experts_N,
        )

    def dispatch(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        counts_NE: Tensor,
        overlap_fn: Callable[[], None] | None = None,
        *,
        is_training: bool = True,
    ) -> Dispatched:
        """Send this rank's tokens to their experts, and receive those of other ranks.

        Args:
            x_TD: tokens.
            expert_ids_TK: their choices, -1 where dropped.
            counts_NE: assignments of every rank after drops, from `gather_counts`.
            overlap_fn: called while the rows travel; not called in a world of one rank.
            is_training: False in evaluation, in which shadows take no part: weights may be others than in the step.
        """
        if self.world.size == 1:
            by_expert = self.sorted_by_slot(expert_ids_TK)
            rows_MD = ops.permute(x_TD, by_expert.order_M, by_expert.inverse_TK)
            return Dispatched(rows_MD=rows_MD, tokens_per_slot_S=by_expert.tokens_per_expert_E, handle=by_expert)
        if self._planner is not None:
            self.require_host_plan(overlap_fn is not None, "callbacks that read the counts, such as LoadBalancer")
            on_device = self._planner.plan(counts_NE, *expert_ids_TK.shape, is_training=is_training)
            rows_MD, tokens_S, handle = self._backend.dispatch(x_TD, expert_ids_TK, on_device, None)
            return Dispatched(rows_MD=rows_MD, tokens_per_slot_S=tokens_S, handle=handle)
        plan, num_slots = self.plan(counts_NE, is_training=is_training), len(self.slot_experts)
        rows_MD, tokens_C, handle = self._backend.dispatch(x_TD, expert_ids_TK, plan, overlap_fn)
        return Dispatched(
            rows_MD=rows_MD,
            tokens_per_slot_S=tokens_C[:num_slots],
            tokens_per_shadow_H=tokens_C[num_slots:] if is_training and self.shadows is not None else None,
            resident_rows=int(plan.recv_EN[[expert for expert in self.slot_experts if expert >= 0]].sum()),
            handle=handle,
        )

    def combine(self, rows_MD: Tensor, sent: Dispatched, weights_TK: Tensor) -> Tensor:
        """Weighted sum of the K results of each token, [T, D]; differentiable."""
        if self.world.size == 1:
            return ops.unpermute(rows_MD, sent.handle.inverse_TK, sent.handle.order_M, weights_TK)
        return self._backend.combine(rows_MD, sent.handle, weights_TK)

    def sorted_by_slot(self, expert_ids_TK: Tensor, *, num_rows: int | None = None) -> ops.ExpertSort:
        """The assignments by slot, in a world of one rank.

        Args:
            num_rows: how many choices are not -1, where the host knows it; then nothing is read on the host.
        """
        return ops.sort_by_expert(self._slots_of(expert_ids_TK), len(self.slot_experts), num_rows=num_rows)

    def _slots_of(self, expert_ids_TK: Tensor) -> Tensor:
        """The slot of each chosen expert, in a world of one rank; after a larger world slots are in any order."""
        if self.slot_experts == tuple(range(self.placement.num_experts)):
            return expert_ids_TK
        slots = [self.slot_experts.index(expert) for expert in range(self.placement.num_experts)]
        slot_E = torch.tensor([*slots, -1], device=expert_ids_TK.device)  # a dropped choice, -1, takes the last entry
        return slot_E[expert_ids_TK]

    def _send_and_receive(self, tokens_EN: IntArray, quota_EN: IntArray) -> tuple[IntArray, IntArray]:
        """This rank's row and column of the dispatch tensor, zero outside its group."""
        if len(self.groups) > 1:
            group = next(group for group in self.groups if self.world.rank in group)
            in_group_N = np.isin(np.arange(self.world.size), group)
            tokens_EN, quota_EN = tokens_EN * in_group_N, quota_EN * in_group_N
        return dispatch_splits(tokens_EN, quota_EN, self.world.rank)
