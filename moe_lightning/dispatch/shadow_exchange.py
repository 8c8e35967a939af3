"""Transfers of shadow experts in one step: weights to other ranks (Trans), gradients to the home rank (Agg).

Both are exchanges on the background group. Trans of the next block starts under the experts of this block and continues
under its dense layers, split as in `balancing.cost_model`. Agg starts as soon as the gradients of a block exist, before
those of its residents are computed, and all Aggs end before replica gradients are summed. Pro-Prophet (V) splits Agg,
too, and starts each part under a stated computation; starting it at once needs no hooks in the backward pass.

Parameters do not change inside a step, so micro-batches share one Trans, accumulate gradients, and share one Agg.

Shapes: H shadows on this rank, P numbers in an expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import torch
from torch import Tensor, nn

from moe_lightning.dispatch.quota import ShadowPlan
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import ExchangeClock, World
from moe_lightning.parallel.exchange import PendingExchange


@dataclass
class TransferCosts:
    """Costs of the transfers of shadow experts.

    Attributes:
        sent_bytes: that left this rank so far.
        trans_waits, agg_waits: of the host on the CPU, else of the device; they are what the transfers cost.
    """

    sent_bytes: int = 0
    trans_waits: ExchangeClock = field(default_factory=ExchangeClock)
    agg_waits: ExchangeClock = field(default_factory=ExchangeClock)

    def __post_init__(self) -> None:
        self.trans_waits.watch()
        self.agg_waits.watch()


class ShadowTransfers:
    """Transfers of one layer's shadow experts in one step.

    Args:
        parameters: the layer's stacks [S, ...] by name, in an order that all ranks share.
        slot_experts: expert of each slot of this rank, -1 where vacant.
        plan: shadow experts of the step; may be empty.
        step: of all layers.
        early_share: part of every expert's bytes that travels under the experts of the block before, the rest under
            its dense layers; in [0, 1].
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        slot_experts: Sequence[int],
        plan: ShadowPlan,
        step: StepShadowTransfers,
        early_share: float,
    ) -> None:
        self._parameters, self._step, self._world = parameters, step, step.world
        experts, ranks = np.nonzero(plan.shadows)
        copies = list(zip(experts.tolist(), plan.homes[experts].tolist(), ranks.tolist(), strict=True))
        # (peer, expert): in the order of sending and receiving, which is by rank and then by expert.
        self._received_from = sorted((home, expert) for expert, home, rank in copies if rank == self._world.rank)
        self._sent_to = sorted((rank, expert) for expert, home, rank in copies if home == self._world.rank)
        self._slot_of = {expert: slot for slot, expert in enumerate(slot_experts)}
        num_numbers = sum(_size(parameter) for parameter in parameters.values())
        cut = round(early_share * num_numbers)
        parts = ((0, cut), (cut, num_numbers)) if copies else ()
        self._parts = [part for part in parts if part[0] < part[1]]
        self._early_parts = 1 if cut else 0
        self._pending: list[PendingExchange] = []
        self._stacks: dict[str, Tensor] | None = None
        self._gradients_seen = 0
        self._is_sent = False  # every gradient so far
        self._aggs: list[PendingExchange] = []  # several where parts of a step have backward passes of their own

    # ------------------------------------------------------------------ called by the layer

    def require_precision(self, computed_in: torch.dtype) -> None:
        """
        Args:
            computed_in: dtype that the layer's experts compute in.

        Raises:
            ConfigurationError: shadows would compute with weights that were rounded to a narrower one.
        """
        widest = max(parameter.dtype.itemsize for parameter in self._parameters.values())
        if min(computed_in.itemsize, widest) > self._step.dtype.itemsize:
            computed, sent = (str(dtype).removeprefix("torch.") for dtype in (computed_in, self._step.dtype))
            raise ConfigurationError(
                f"experts compute in {computed}, but weights of shadow experts travel in {sent}: call the MoE layer "
                "inside of autocast, or set the balancer's shadows to none"
            )

    def start_next(self, *, early: bool = False) -> None:
        """Start the next layer's Trans, or only its early part; collective."""
        self._step.start_after(self, early=early)

    def weights(self) -> dict[str, Tensor]:
        """Wait for the shadows' weights and return them: stacks [H, ...] by parameter name, ascending by expert, leaves
        that accumulate gradients.
        """
        if self._stacks is None:
            self.start_trans()
            with self._step.costs.trans_waits.exchange(self._world.device):
                arrived = [pending.wait() for pending in self._pending]
            lengths = [last - first for first, last in self._parts]
            rows = [part.view(len(self._received_from), length) for part, length in zip(arrived, lengths, strict=True)]
            self._stacks = self._stack(torch.cat(rows, dim=1))
            self._pending = []
        return self._stacks

    # ------------------------------------------------------------------ transfers

    @property
    def has_gradients(self) -> bool:
        """True if a backward pass has gone through the layer; the same on all ranks."""
        return any(self._parameters[name].grad is not None for name in self._trained())

    def start_trans(self, early: bool = False) -> None:
        """Start Trans, or only its early part; collective."""
        if self._stacks is not None:
            return
        while len(self._pending) < (min(self._early_parts, len(self._parts)) if early else len(self._parts)):
            first, last = self._parts[len(self._pending)]
            rows = {expert: self._row(expert, first, last) for _, expert in self._sent_to}
            send = [rows[expert] for _, expert in self._sent_to]
            length = last - first
            self._pending.append(self._exchange(send, self._sent_to, self._received_from, length, self._step.dtype))

    def start_agg(self) -> None:
        """Send the gradients of the shadows to their home ranks, and drop them here; collective."""
        if not self._parts or self._is_sent:
            return
        self._is_sent = True
        names = self._trained()
        ascending = sorted(expert for _, expert in self._received_from)
        send = []
        for _, expert in self._received_from:
            for name in names:
                gradient = self._stacks[name].grad if self._stacks is not None else None
                parameter = self._parameters[name]
                empty = torch.zeros(_size(parameter), dtype=parameter.dtype, device=parameter.device)
                send.append(empty if gradient is None else gradient[ascending.index(expert)].reshape(-1))
        length = sum(_size(self._parameters[name]) for name in names)
        dtype = reduce(torch.promote_types, (self._parameters[name].dtype for name in names))
        self._aggs.append(self._exchange(send, self._received_from, self._sent_to, length, dtype))
        for stack in (self._stacks or {}).values():
            stack.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Add the received gradients of shadows to those of the resident experts, in rank order."""
        for agg in self._aggs:
            with self._step.costs.agg_waits.exchange(self._world.device):
                arrived = agg.wait()
            self._add(arrived)

    def _add(self, arrived: Tensor) -> None:
        start = 0
        for _, expert in self._sent_to:
            for name in self._trained():
                parameter = self._parameters[name]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                row = parameter.grad[self._slot_of[expert]]
                row += arrived[start : start + row.numel()].view_as(row)
                start += row.numel()

    def release(self) -> None:
        """Free the shadows' memory, which their gradient hooks would otherwise keep alive."""
        self._stacks, self._aggs, self._pending = None, [], []

    def _exchange(
        self,
        rows: Sequence[Tensor],
        to: Sequence[tuple[int, int]],
        source: Sequence[tuple[int, int]],
        length: int,
        dtype: torch.dtype,
    ) -> PendingExchange:
        send, recv = [0] * self._world.size, [0] * self._world.size
        for rank, _ in to:
            send[rank] += length
        for rank, _ in source:
            recv[rank] += length
        flat = torch.cat(list(rows)) if rows else torch.empty(0, dtype=dtype, device=self._world.device)
        self._step.costs.sent_bytes += flat.numel() * flat.element_size()
        return PendingExchange(flat, send, recv, self._world)

    # ------------------------------------------------------------------ rows and stacks

    def _row(self, expert: int, first: int, last: int) -> Tensor:
        """Return numbers first..last of an expert of this rank in the dtype of transfers."""
        slot = self._slot_of[expert]
        row = torch.cat([p.detach()[slot].reshape(-1).to(self._step.dtype) for p in self._parameters.values()])
        return row[first:last]

    def _stack(self, rows_HP: Tensor) -> dict[str, Tensor]:
        order = sorted(range(len(self._received_from)), key=lambda index: self._received_from[index][1])
        columns = torch.split(rows_HP[order], list(map(_size, self._parameters.values())), dim=1)
        stacks = {}
        for (name, parameter), column in zip(self._parameters.items(), columns, strict=True):
            stack = column.to(parameter.dtype).reshape(len(order), *parameter.shape[1:])
            if parameter.requires_grad:
                stack.requires_grad_()
                stack.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            stacks[name] = stack
        return stacks

    def _on_gradient(self, _: Tensor) -> None:
        self._gradients_seen += 1
        self._is_sent = False
        complete = self._gradients_seen % len(self._trained()) == 0
        if complete and self._step.is_last_backward:
            self.start_agg()

    def _trained(self) -> list[str]:
        return [name for name, parameter in self._parameters.items() if parameter.requires_grad]


def _size(parameter: nn.Parameter) -> int:
    """Numbers of one expert."""
    return parameter.shape[1:].numel()


class StepShadowTransfers:
    """Transfers of the shadow experts of all layers in one step.

    Args:
        world: the ranks.
        dtype: of weights in flight; what the experts compute in, so that nothing is lost by it.

    Attributes:
        costs: of all layers so far.
        is_last_backward: True if the running backward pass is the step's last, so that Agg may start in it.
    """

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self.world, self.dtype = world, dtype
        self.costs = TransferCosts()
        self.is_last_backward = False
        self._layers: list[ShadowTransfers] = []

    def add_layer(
        self,
        parameters: Mapping[str, nn.Parameter],
        slot_experts: Sequence[int],
        plan: ShadowPlan,
        early_share: float = 1.0,
    ) -> ShadowTransfers:
        """Return the transfers of the next MoE layer in the order of the forward pass; see there."""
        layer = ShadowTransfers(parameters, slot_experts, plan, self, early_share)
        self._layers.append(layer)
        return layer

    def begin(self) -> None:
        """Start the first layer's Trans, which no MoE layer precedes; collective."""
        self._layers[0].start_trans()

    def start_after(self, layer: ShadowTransfers, *, early: bool) -> None:
        """Start the Trans of the layer behind a layer, or only its early part; collective."""
        index = self._layers.index(layer) + 1
        if index < len(self._layers):
            self._layers[index].start_trans(early=early)

    def begin_backward(self, *, is_last: bool) -> None:
        """Begin a backward pass of the step; in the last one Agg starts."""
        self.is_last_backward = is_last

    def finish(self) -> None:
        """Send all gradients to their home ranks and add them there; collective. A layer without any is left alone."""
        for layer in reversed(self._layers):
            if layer.has_gradients:
                layer.start_agg()
        for layer in reversed(self._layers):
            layer.finish()

    def release(self) -> None:
        """Free the shadows of all layers; counters stay."""
        for layer in self._layers:
            layer.release()
