"""Experts of a model under their placements: slots of this rank, migration, replica gradients and shadows.

Slots are fixed rows of stacked parameters. An expert that stays on a rank keeps its slot, so only rows that change
ranks are written, and neither parameters nor optimizers are rebuilt. Experts migrate between steps with all their
state, by a plan of `balancing.migration`.

Shapes: S slots of this rank, E experts, L layers, N ranks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.balancing.migration import Transfer, held_states, plan_migration
from moe_lightning.dispatch.dispatcher import DISPATCH_BACKENDS, Dispatcher, PlanPlace, QuotaPolicy
from moe_lightning.dispatch.placement import Placement, dispatch_groups, parse_placements, uniform_placement
from moe_lightning.dispatch.quota import ShadowPlan
from moe_lightning.dispatch.replicas import ExpertStack, ReplicaSum, stacked_states
from moe_lightning.dispatch.shadow_exchange import StepShadowTransfers
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import MOST_BYTES, check_regular, read_text
from moe_lightning.kernels import BackendName, set_backend
from moe_lightning.moe.experts import VACANT
from moe_lightning.moe.layer import MoELayer, moe_layers
from moe_lightning.parallel.collectives import (
    all_gather_json,
    failing_together,
    require_agreement,
)
from moe_lightning.parallel.context import World, agree, broadcast_
from moe_lightning.state.transfer import install, transfer

if TYPE_CHECKING:
    from moe_lightning.strategies.stages import StageMap


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Options of placement and dispatch: see ExpertParallelStrategy.

    Attributes:
        promised_replicas: nodes that hold each expert if slots allow; recovery relies on it.

    Raises:
        ConfigurationError: two placements, or an unknown dispatch.
    """

    ep_size: int | None = None
    replicas: int | None = None
    placement: str | os.PathLike[str] | Sequence[Any] | None = None
    quota: QuotaPolicy = "balanced"
    dispatch: str = "exchange"
    plan: PlanPlace = "host"
    slots: int | None = None
    kernels: BackendName | None = None
    promised_replicas: int = 1

    def __post_init__(self) -> None:
        if self.placement is not None and self.replicas is not None:
            raise ConfigurationError(
                f"replicas={self.replicas} belongs to the uniform placement: give either replicas or placement, not "
                "both"
            )
        DISPATCH_BACKENDS.find(self.dispatch)

    def promising(self, nodes: int, num_ranks: int) -> PlacementOptions:
        """Return these options with so many nodes for each expert, in later placements too. The uniform placement holds
        each that often, if there are as many ranks.

        Raises:
            ConfigurationError: dispatch groups, which a changing number of ranks cannot keep.
        """
        if self.ep_size is not None:
            raise ConfigurationError(
                f"ep_size={self.ep_size} cuts the ranks into groups, which do not survive a lost rank: drop ep_size"
            )
        if self.replicas is None and self.placement is None:
            return replace(self, replicas=min(nodes, num_ranks), promised_replicas=nodes)
        return replace(self, promised_replicas=nodes)

    def place(self, module: nn.Module, world: World, stages: StageMap) -> PlacedExperts:
        """Put a module's experts into slots; collective.

        Args:
            world: the ranks, of each stage of a pipeline.
            stages: of the module.
        """
        if self.kernels is not None:
            set_backend(self.kernels)
        with stages.whole_module():
            placements = self.placements_of(module, world.size)
        return PlacedExperts(module, stages.set_placements(placements), world, self)

    def placements_of(self, module: nn.Module, num_ranks: int) -> list[Placement]:
        """Return the placement of each MoE layer: uniform with so many replicas, or from a table or file.

        Raises:
            ConfigurationError: a file or table that is missing, malformed or made for other sizes.
        """
        layers = moe_layers(module)
        if self.placement is None:
            replicas = self.replicas or max(1, num_ranks // (self.ep_size or num_ranks))
            return [uniform_placement(layer.num_experts, num_ranks, replicas) for layer in layers]
        if len({layer.num_experts for layer in layers}) > 1:
            raise ConfigurationError(
                "a placement table needs the same number of experts in every MoE layer: use replicas instead"
            )
        table, origin = _read_table(self.placement)
        experts = layers[0].num_experts if layers else 0
        return parse_placements(table, num_layers=len(layers), num_experts=experts, num_ranks=num_ranks, origin=origin)


def _read_table(source: str | os.PathLike[str] | Sequence[Any]) -> tuple[object, str]:
    if not isinstance(source, str | os.PathLike):
        return list(source), "placement"
    path = Path(source)
    if not path.is_file():
        raise ConfigurationError(
            f"the placement file {path} does not exist: give a .json or .npy table [layers, experts, ranks]"
        )
    try:
        if path.suffix == ".npy":
            check_regular(path, most_bytes=MOST_BYTES)
            return np.array(np.load(path, mmap_mode="r", allow_pickle=False)), str(path)
        return json.loads(read_text(path)), str(path)
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise ConfigurationError(f"the placement file {path} is not a .json or .npy table: {error}") from error


def next_slots(slots: Sequence[int], experts: Collection[int]) -> tuple[int, ...]:
    """Return the slots of a rank after a new placement: experts that stay keep theirs, new ones fill the free slots in
    ascending order, and -1 marks vacant slots.

    Args:
        slots: expert of each slot so far, -1 where vacant.
        experts: experts of the rank under the new placement; at most as many as there are slots.
    """
    assert len(set(experts)) <= len(slots)
    staying = [expert if expert in experts else -1 for expert in slots]
    coming = iter(sorted(set(experts) - set(staying)))
    return tuple(next(coming, -1) if expert < 0 else expert for expert in staying)


@torch.no_grad()
def migrate_rows(
    before: Sequence[ExpertStack],
    after: Sequence[ExpertStack],
    optimizers: Sequence[Optimizer],
    transfers: Sequence[Transfer],
    world: World,
) -> int:
    """Execute the transfers and zero the rows that become vacant; collective.

    Args:
        before, after: the same parameters of each layer, in order, under other slots.
        optimizers: their states move with the experts.
        transfers: of the layers given, by all ranks.

    Returns:
        Bytes that this rank has sent.
    """
    tensors = [stack.tensors(optimizers) for stack in before]

    def rows(stacks: Sequence[ExpertStack], way: Transfer) -> list[Tensor]:
        slot = stacks[way.layer].slot_experts.index(way.expert)
        return [tensor[slot] for tensor in tensors[way.layer]]

    ordered = sorted(transfers)
    live = {way: rows(after, way) for way in ordered if way.target == world.rank}
    arrived = {way: [torch.empty_like(row) for row in of_expert] for way, of_expert in live.items()}
    sent_bytes = transfer(ordered, lambda way: rows(before, way), arrived.__getitem__, world)
    agree(world)  # all have theirs, or none gives its own up
    # A leaving expert may lie where an arriving one will.
    for layer, old, new in zip(tensors, before, after, strict=True):
        _clear(layer, old.slot_experts, new.slot_experts)
    install(pair for way in live for pair in zip(live[way], arrived[way], strict=True))
    return sent_bytes


def _clear(tensors: Sequence[Tensor], before: Sequence[int], after: Sequence[int]) -> None:
    """Zero the rows of slots that become vacant."""
    for slot, (old, new) in enumerate(zip(before, after, strict=True)):
        if old >= 0 and new < 0:
            for tensor in tensors:
                tensor[slot].zero_()


def in_slots(placement: Placement, rank: int, slots: int | None) -> tuple[int, ...]:
    """Return the experts of a rank in its slots, ascending, and -1 in vacant ones. All ranks have equally many slots,
    at most as many as there are experts.
    """
    needed = max(len(placement.experts_on(n)) for n in range(placement.num_ranks))
    if slots is not None and slots < needed:
        raise ConfigurationError(
            f"slots={slots} cannot hold the {needed} experts that the placement puts on a rank: use at least {needed}"
        )
    held = placement.experts_on(rank)
    num_slots = needed if slots is None else min(slots, placement.num_experts)
    return held + (-1,) * (num_slots - len(held))


@torch.no_grad()
def grow(layer: MoELayer, slots: int, optimizers: Sequence[Optimizer]) -> None:
    """Grow a layer's stacks to so many slots with vacant rows; parameters and states stay the same objects."""
    vacant = slots - layer.experts.num_slots
    if vacant <= 0:
        return
    for parameter in layer.experts.stacked_parameters().values():
        for optimizer, name, value in list(stacked_states(parameter, optimizers)):
            optimizer.state[parameter][name] = torch.cat([value, value.new_zeros(vacant, *value.shape[1:])])
    layer.experts.add_slots(vacant)


def broadcast_experts(layer: MoELayer, world: World) -> None:
    """Broadcast rank 0's experts, as DDP does with dense parameters: its weights, or its seed if none are allocated.

    Raises:
        ConfigurationError: some ranks have allocated them, others have not.
    """
    experts = layer.experts
    if world.is_connected:
        require_agreement(
            all_gather_json(int(experts.is_deferred), world), "what configure_model loads into the experts"
        )
    if experts.is_deferred:
        experts.broadcast_seed(world)
    elif layer.dispatcher.world.size == 1 and world.size > 1:  # never placed: all ranks agree on that
        for parameter in experts.stacked_parameters().values():
            values = parameter.data.to(world.device)
            broadcast_(values, 0, world)
            parameter.data.copy_(values)


@dataclass(frozen=True, kw_only=True)
class MigrationReport:
    """Cost of a new placement.

    Attributes:
        moved_states: (layer, expert) states that changed ranks, over all ranks.
        sent_bytes: bytes that this rank has sent.
        migration_s: host seconds.
    """

    moved_states: int
    sent_bytes: int
    migration_s: float


class PlacedExperts:
    """Experts of every MoE layer in this rank's slots, and their dispatchers.

    Args:
        module: the model; its layers start from rank 0's weights.
        placements: one for each MoE layer.
        world: the ranks.
        options: of dispatch and slots. None: the defaults.

    Attributes:
        module, world, options: as given.
        layers: the model's MoE layers.
        stacks: of each layer, the experts in this rank's slots.
        stack_of: the stack that each expert parameter is in.
        shadow_transfers: of the running step; None without shadow experts.
        speeds: int64 [N], speeds at which ranks compute experts; None: all equal, as in every new world.

    Raises:
        ConfigurationError: a placement that does not fit the world, a dispatch group, the slots, or the experts that
            the module still has.
    """

    def __init__(
        self,
        module: nn.Module,
        placements: Sequence[Placement],
        world: World,
        options: PlacementOptions | None = None,
    ) -> None:
        self.module = module
        self.options = options = options or PlacementOptions()
        self.layers = moe_layers(module)
        self.shadow_transfers: StepShadowTransfers | None = None
        self.speeds: IntArray | None = None
        self.world = world
        self._groups = dispatch_groups(world.size, options.ep_size or world.size)
        self._new_dispatcher = partial(Dispatcher, quota=options.quota, backend=options.dispatch, plan_on=options.plan)
        for index, (layer, placement) in enumerate(zip(self.layers, placements, strict=True)):
            if world.is_connected:
                broadcast_experts(layer, world)
            held = in_slots(placement, world.rank, options.slots)
            layer.place(self._dispatcher(index, placement, held), world.device)
        self._set_stacks(self._stacks([layer.experts.slot_experts for layer in self.layers], placements))
        self._replica_sum = ReplicaSum(self.stacks, world)

    def _dispatcher(self, layer: int, placement: Placement, slots: Sequence[int]) -> Dispatcher:
        """Build a dispatcher of a layer in the present world."""
        return self._new_dispatcher(placement, self.world, self._groups, slot_experts=slots, layer=layer)

    @property
    def placements(self) -> list[Placement]:
        """Placement of each layer."""
        return [stack.placement for stack in self.stacks]

    def _stacks(self, slots: Sequence[tuple[int, ...]], placements: Sequence[Placement]) -> list[ExpertStack]:
        """Return the layers' parameters under these slots and placements."""
        return [
            ExpertStack(
                parameters=layer.experts.stacked_parameters(),
                slot_experts=held,
                placement=p,
                rank=self.world.rank,
                base=layer.experts.base_names,
            )
            for layer, held, p in zip(self.layers, slots, placements, strict=True)
        ]

    def _set_stacks(self, stacks: list[ExpertStack]) -> None:
        self.stacks = stacks
        self.stack_of = {parameter: stack for stack in stacks for parameter in stack.parameters.values()}

    def _use(self, dispatchers: Sequence[Dispatcher]) -> None:
        """Give the layers dispatchers of their present slots."""
        for layer, dispatcher in zip(self.layers, dispatchers, strict=True):
            layer.dispatch_by(dispatcher)
        self._replica_sum = ReplicaSum(self.stacks, self.world)
        self.set_speeds(self.speeds)

    def is_up_to_date(self) -> bool:
        """True if the module's layers and their parameters are still those that were placed."""
        if not same_objects(moe_layers(self.module), self.layers):
            return False
        placed = [parameter for stack in self.stacks for parameter in stack.parameters.values()]
        return same_objects([p for layer in self.layers for p in layer.experts.stacked_parameters().values()], placed)

    def sum_replica_gradients(self) -> None:
        """Send the gradients of shadows to the experts' ranks, then sum those of each expert over its holders, in rank
        order.
        """
        if self.shadow_transfers is not None:
            self.shadow_transfers.finish()
            self._drop_shadows()
        self._replica_sum()

    def set_speeds(self, speeds: IntArray | None) -> None:
        """Split tokens by the speeds of the ranks from the next step on; the same on every rank."""
        self.speeds = speeds
        for layer in self.layers:
            layer.dispatcher.set_speeds(speeds)

    # ------------------------------------------------------------------ new placements

    def replace(
        self,
        placements: Sequence[Placement],
        optimizers: Sequence[Optimizer],
        nodes: Sequence[Hashable],
        pipe: World,
    ) -> MigrationReport:
        """Move experts, with all their optimizer states, to the ranks that new placements name; collective.

        To be called between steps. Parameters and optimizers survive; only rows change. Gradients are dropped.

        Args:
            placements: one for each layer, the same on every rank.
            optimizers: their states move with the experts.
            nodes: of the ranks; experts come from the own node where they can.
            pipe: the ranks of the other stages, which move theirs.

        Raises:
            ConfigurationError: on every rank, a placement that does not fit the world, a dispatch group or a rank's
                slots.
        """
        began = time.perf_counter()
        with failing_together(pipe):
            dispatchers = self._dispatchers(placements)
        before = [layer.experts.slot_experts for layer in self.layers]
        transfers = plan_migration(held_states(self.placements), placements, nodes)
        after = [dispatcher.slot_experts for dispatcher in dispatchers]
        sent = self._move(placements, before, after, optimizers, transfers)
        self._use(dispatchers)
        return MigrationReport(moved_states=len(transfers), sent_bytes=sent, migration_s=time.perf_counter() - began)

    def enter_world(
        self,
        world: World,
        placements: Sequence[Placement],
        held: BoolArray,
        optimizers: Sequence[Optimizer],
        transfers: Sequence[Transfer],
    ) -> None:
        """Move experts to the ranks of placements in another world, where `dispatch_among` follows; collective.

        Slots grow where a placement needs more, or other ranks have more: all have the same number.
        Parameters and optimizers stay the same objects.

        Args:
            world: the new ranks.
            placements: one for each layer, for these ranks.
            held: bool [L, E, N], experts that each rank still holds, whole; an expert that no rank holds gets a row of
                zeros, which is restored later.
            optimizers: their states move with the experts; every rank must have built them.
            transfers: of these layers, by all ranks.
        """
        needed = max((len(p.experts_on(rank)) for p in placements for rank in range(world.size)), default=0)
        slots = max(all_gather_json(max([needed, *(layer.experts.num_slots for layer in self.layers)]), world))
        self.world = world
        before, after = [], []
        for index, (layer, placement) in enumerate(zip(self.layers, placements, strict=True)):
            grow(layer, slots, optimizers)
            mine = held[index, :, world.rank]
            before.append(tuple(e if e >= 0 and mine[e] else VACANT for e in layer.experts.slot_experts))
            # Rows that are out of date keep their slots, too: what is frozen in them is never out of date.
            after.append(next_slots(layer.experts.slot_experts, placement.experts_on(world.rank)))
        self._move(placements, before, after, optimizers, transfers)

    def hold(self, layers: Sequence[MoELayer], placements: Sequence[Placement]) -> None:
        """Set the layers, in the slots as they are, until `dispatch_among` gives them dispatchers.

        Args:
            placements: of each layer, or those of a former world.
        """
        for layer in set(self.layers) - set(layers):
            layer.leave_ranks()
        self.layers = list(layers)
        self._set_stacks(self._stacks([layer.experts.slot_experts for layer in layers], placements))

    def dispatch_among(self, layers: Sequence[MoELayer], placements: Sequence[Placement], world: World) -> None:
        """Set the layers and give them dispatchers among these ranks, in the slots as they are: dispatch groups span
        all ranks, whose speeds are taken for equal.
        """
        self.world, self._groups, self.speeds = world, dispatch_groups(world.size, world.size), None
        self.hold(layers, placements)
        dispatchers = []
        for index, (layer, placement) in enumerate(zip(layers, placements, strict=True)):
            dispatchers.append(self._dispatcher(index, placement, layer.experts.slot_experts))
        self._use(dispatchers)

    def _move(
        self,
        placements: Sequence[Placement],
        before: Sequence[tuple[int, ...]],
        after: Sequence[tuple[int, ...]],
        optimizers: Sequence[Optimizer],
        transfers: Sequence[Transfer],
    ) -> int:
        """Transfer rows to the placements' ranks, and return the bytes that this rank has sent.

        Args:
            before, after: experts in the slots of each layer.
        """
        for parameter in self.stack_of:
            parameter.grad = None
        stacks = self._stacks(after, placements)
        sent_bytes = migrate_rows(self._stacks(before, placements), stacks, optimizers, transfers, self.world)
        here = [t for t in transfers if t.target == self.world.rank]
        for index, (layer, slots) in enumerate(zip(self.layers, after, strict=True)):
            layer.experts.move(slots, {t.expert for t in here if t.layer == index})
        self._set_stacks(stacks)
        return sent_bytes

    def _dispatchers(self, placements: Sequence[Placement]) -> list[Dispatcher]:
        """Build the dispatchers of new placements. Every rank checks all ranks, so that either all move experts or none
        does.
        """
        result = []
        for index, (layer, placement, old) in enumerate(zip(self.layers, placements, self.placements, strict=True)):
            if placement.replicas.shape != old.replicas.shape:
                raise ConfigurationError(
                    f"the placement of MoE layer {index} has shape {placement.replicas.shape}, but this run needs "
                    f"{old.replicas.shape} (experts, ranks)"
                )
            num_slots = layer.experts.num_slots
            for rank in range(self.world.size):
                if len(placement.experts_on(rank)) > num_slots:
                    raise ConfigurationError(
                        f"the placement of MoE layer {index} puts {len(placement.experts_on(rank))} experts on rank "
                        f"{rank}, which keeps {num_slots} slots: raise the strategy's slots"
                    )
            slots = next_slots(layer.experts.slot_experts, placement.experts_on(self.world.rank))
            result.append(self._dispatcher(index, placement, slots))
        return result

    # ------------------------------------------------------------------ shadows

    def start_shadows(self, plans: Sequence[ShadowPlan], dtype: torch.dtype, early_shares: Sequence[float]) -> None:
        """Start the shadow experts of the next step, which last until its gradients are summed; collective.

        Args:
            plans: one for each layer, the same on every rank.
            dtype: what experts compute in.
            early_shares: see `ShadowTransfers`, for each layer.

        Raises:
            ConfigurationError: plans for other placements, or dispatch groups smaller than the world.
        """
        self._drop_shadows()
        if not any(plan.num_copies for plan in plans):
            return
        step = StepShadowTransfers(self.world, dtype)
        for layer, plan, share in zip(self.layers, plans, early_shares, strict=True):
            parameters, slots = layer.experts.stacked_parameters(), layer.experts.slot_experts
            layer.start_shadows(plan, step.add_layer(parameters, slots, plan, share))
        self.shadow_transfers = step
        step.begin()

    def release_graphs(self) -> None:
        """Release the graphs of the last step, which would hold the model and its process groups for ever."""
        for layer in self.layers:
            layer.release_graph()

    def forget_step(self) -> None:
        """Release what an aborted step has left in the layers: graphs, statistics, shadows."""
        self._drop_shadows()
        for layer in self.layers:
            layer.forget_step()

    def _drop_shadows(self) -> None:
        if self.shadow_transfers is not None:
            self.shadow_transfers.release()
        self.shadow_transfers = None
        for layer in self.layers:
            layer.drop_shadows()

    def keys(self, module: nn.Module) -> dict[str, ExpertStack]:
        """Return the state_dict keys of the expert parameters, with their stacks."""
        named = module.named_parameters(remove_duplicate=False)
        return {name: self.stack_of[parameter] for name, parameter in named if parameter in self.stack_of}


def same_objects(these: Sequence[object], those: Sequence[object]) -> bool:
    """True if two sequences hold the same objects, whatever these compare as."""
    return len(these) == len(those) and all(one is other for one, other in zip(these, those, strict=True))
