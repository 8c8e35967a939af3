"""Experts of a model under their placements: slots of this rank, migration, replica gradients and shadows.

Slots are fixed rows of stacked parameters. An expert that stays on a rank keeps its slot, so only rows that change
ranks are written, and neither parameters nor optimizers are rebuilt. Experts migrate between steps with all their
state, by a plan of `balancing.migration`.

`StageMap` says which ranks hold which part of a model. Without a pipeline a model has one stage, the whole of it, on
every rank.

Shapes: S slots of this rank, E experts, L layers, N ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.balancing.migration import Transfer, held_states, plan_migration
from moe_lightning.checkpoint.full_state import full_model_state
from moe_lightning.compat import private_torch
from moe_lightning.dispatch.dispatcher import Dispatcher, PlanPlace, QuotaPolicy
from moe_lightning.dispatch.placement import Placement, dispatch_groups
from moe_lightning.dispatch.quota import ShadowPlan
from moe_lightning.dispatch.replicas import ExpertStack, ReplicaSum, stacked_states
from moe_lightning.dispatch.shadow_exchange import StepShadowTransfers
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.experts import VACANT
from moe_lightning.moe.layer import MoELayer, moe_layers
from moe_lightning.parallel.collectives import (
    all_gather_json,
    check_agreement,
    failing_together,
    fingerprint,
    require_agreement,
)
from moe_lightning.parallel.context import World, agree, all_reduce_, broadcast_
from moe_lightning.parallel.mesh import stage_ranks
from moe_lightning.state.tensors import cuts_of
from moe_lightning.state.transfer import install, transfer
from moe_lightning.strategies.stages import StageCut
from moe_lightning.strategies.worlds import Worlds


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
        ep_size: ranks of a dispatch group; None: all.
        quota: split of an expert's tokens over its replicas.
        dispatch: transport of tokens: a name in `dispatch.dispatcher.DISPATCH_BACKENDS`.
        plan_on: "host" or "device", see `dispatch.dispatcher.Dispatcher`.
        slots: expert rows that every rank keeps for each layer, so that later placements have room; None: as many as
            the first placement needs on some rank.

    Attributes:
        module, world: as given.
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
        *,
        ep_size: int | None = None,
        quota: QuotaPolicy = "balanced",
        dispatch: str = "exchange",
        plan_on: PlanPlace = "host",
        slots: int | None = None,
    ) -> None:
        self.module = module
        self.layers = moe_layers(module)
        self.shadow_transfers: StepShadowTransfers | None = None
        self.speeds: IntArray | None = None
        self.world = world
        self._groups = dispatch_groups(world.size, ep_size or world.size)
        self._new_dispatcher = partial(Dispatcher, quota=quota, backend=dispatch, plan_on=plan_on)
        for index, (layer, placement) in enumerate(zip(self.layers, placements, strict=True)):
            if world.is_connected:
                broadcast_experts(layer, world)
            held = in_slots(placement, world.rank, slots)
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
        pairs = zip(self.layers, self.stacks, strict=True)
        idle = [stack for layer, stack in pairs if not layer.take_has_run()]
        by_hand = not self.module.automatic_optimization  # a step has several sums then
        self._replica_sum(self.stacks if by_hand else idle)

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


T = TypeVar("T")


def stages_of(trainer: pl.Trainer) -> StageMap:
    """Return the stages of a run under any strategy."""
    state = getattr(trainer.strategy, "state", None)
    stages: StageMap = StageMap(trainer.lightning_module, Worlds()) if state is None else state.stages
    return stages


class StageMap:
    """Stages of a model on the ranks.

    Args:
        module: the model.
        worlds: the present world.
        cut: the stages of a pipeline on this rank; None: the model is one stage, which every rank holds.

    Attributes:
        cut: the stages on this rank.
        num_stages: of the model.
        held: stages whose dense values are on this rank.
        placements: of all layers of a pipeline, each among the ranks of its stage.
    """

    def __init__(self, module: nn.Module, worlds: Worlds, cut: StageCut | None = None) -> None:
        self.cut, self._module, self._worlds = cut or StageCut(module, (0,), 1), module, worlds
        self.num_stages = self.cut.num_stages
        self.held: Sequence[int] = self.cut.stages
        self.placements: list[Placement] = []
        self._ranks: list[Sequence[int]] = []  # that hold each stage of a pipeline
        self._names: list[str] = []  # in the whole state_dict
        self._stage_of: dict[str, int] = {}  # by name of a parameter or buffer
        self._shared: set[str] = set()  # buffers that every stage has
        if cut is None:
            return
        size, axes = worlds.present.size, worlds.axes
        everyone = range(size) if worlds.cannot_train(size) else None
        self._ranks = [everyone or stage_ranks(s, size, axes) for s in range(cut.num_stages)]
        with cut.whole():
            self._names = list(module.state_dict(keep_vars=True))
            self._stage_of = {
                f"{prefix}.{name}".lstrip("."): cut.stage_of(part)
                for prefix, part in module.named_modules(remove_duplicate=False)
                for name in (*private_torch.parameters_of(part), *private_torch.buffers_of(part))
            }
            owners = {name: module.get_submodule(name.rpartition(".")[0]) for name, _ in module.named_buffers()}
            self._shared = {name for name, owner in owners.items() if cut.is_outside(owner)}

    @property
    def world(self) -> World:
        """The ranks of all stages."""
        return self._worlds.present

    @property
    def pipe(self) -> World:
        """The ranks of the other stages for this rank's samples."""
        return self._worlds.present.pipe

    # ------------------------------------------------------------------ stages and ranks

    def lose_values(self) -> None:
        """The dense values on this rank are not those of the run."""
        self.held = ()

    def values_arrived(self) -> None:
        """All stages on this rank have their dense values."""
        self.held = self.cut.stages

    @property
    def ranks(self) -> Sequence[Sequence[int]]:
        """Global ranks that hold each stage."""
        return self._ranks or [range(self.world.size)]

    @property
    def own_ranks(self) -> Sequence[int]:
        """Global ranks that hold the stages here."""
        return self.ranks[self.cut.stages[0]]

    @property
    def num_ranks(self) -> int:
        """Number of ranks of a stage."""
        return self.world.stage.size if self._worlds.is_joined else 1

    def assign(self, ranks: Sequence[Sequence[int]], placements: Sequence[Placement]) -> None:
        """Set the ranks that hold each stage of a pipeline, and the placements of all layers.

        Args:
            placements: over all ranks.
        """
        self._ranks = list(ranks)
        pairs = zip(placements, self.layers_of(ranks), strict=True)
        self.placements = [placement.among(its) for placement, its in pairs]

    def ranks_in(self, ranks: Sequence[int]) -> list[Sequence[int]]:
        """Return which of these ranks will hold each stage, once they are a world."""
        if self.num_stages == 1:
            return [ranks]
        axes = self._worlds.axes
        return [[ranks[at] for at in stage_ranks(stage, len(ranks), axes)] for stage in range(self.num_stages)]

    def sharers(self, world: World) -> tuple[World, Sequence[int]]:
        """Return the ranks of a world that hold the same stages as this one, and their numbers there."""
        peers = next((own for own in self.ranks_in(range(world.size)) if world.rank in own), [world.rank])
        if len(peers) == world.size:
            return world, peers
        return world.own_stage or World.offline(peers.index(world.rank), len(peers), world.device), peers

    def layers_of(self, of_stages: Sequence[T]) -> list[T]:
        """Return the entry of each layer's stage."""
        return [of_stages[stage] for _, stage in self.cut.layers]

    def nodes(self, of_ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes of the ranks of the stages here, numbered from 0, from those of all ranks."""
        found = [of_ranks[rank] for rank in self.own_ranks]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(found))}
        return tuple(numbers[node] for node in found)

    # ------------------------------------------------------------------ the module

    def whole_module(self) -> AbstractContextManager[None]:
        """Restore the parts of all stages inside, for code that counts or numbers parameters."""
        return self.cut.whole()

    def transform_hidden(self, part: nn.Module, function: Callable[[Tensor], Tensor]) -> bool:
        """Apply a function to the hidden states before a part, on every stage, if it is a block at which the model is
        cut. Returns True if it is one.
        """
        block = self.cut.number_of(part)
        if block is not None:
            self.cut.entering[block] = function
        return block is not None

    # ------------------------------------------------------------------ dense values

    def stage_of(self, name: str) -> int:
        """Return the stage that has a parameter."""
        return self._stage_of.get(name, 0)

    def belongs(self, name: str, stage: int) -> bool:
        """True if a stage has a parameter or buffer; buffers outside of blocks are in all."""
        return name in self._shared or self.stage_of(name) == stage

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the global ranks that hold a parameter or buffer. All have a buffer outside of blocks, and the last
        stage, which runs whole steps, has the valid values.
        """
        return tuple(self.ranks[self.num_stages - 1 if name in self._shared else self.stage_of(name)])

    @property
    def dense_holders(self) -> Sequence[tuple[int, ...]]:
        """Global ranks that hold each part of the dense parameters."""
        return [tuple(ranks) for ranks in self._ranks] or self.world.row_cut.holders

    def leave_absent(self, optimizers: Sequence[Optimizer]) -> None:
        """Remove absent parameters from the optimizers, which were built with all parameters."""
        if self.num_stages == 1:
            return
        here = set(self._module.parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in here:
                        optimizer.state.pop(parameter, None)
                group["params"] = [p for p in group["params"] if p in here]

    # ------------------------------------------------------------------ experts

    @property
    def layers(self) -> list[MoELayer]:
        """The MoE layers of all stages."""
        return [layer for layer, _ in self.cut.layers]

    @property
    def numbers(self) -> list[int]:
        """Numbers of the MoE layers here among those of the whole module."""
        return self.own(range(len(self.layers)))

    @property
    def without_layers(self) -> list[int]:
        """Stages of a pipeline whose ranks, which may be those of several, have no MoE layer at all."""
        with_layers = {tuple(ranks) for ranks in self.layers_of(self.ranks)}
        return [stage for stage, ranks in enumerate(self.ranks) if tuple(ranks) not in with_layers]

    def own(self, of_layers: Sequence[T]) -> list[T]:
        """Select the entries of the layers here from those of all layers."""
        stages = self.layers_of(range(self.num_stages))
        return [one for one, stage in zip(of_layers, stages, strict=True) if stage in self.cut.stages]

    def stacks(self, experts: PlacedExperts) -> list[ExpertStack]:
        """Return the stacks of all layers over all ranks; those of other stages have no slots here."""
        if self.num_stages == 1:
            return experts.stacks
        own = dict(zip(experts.layers, experts.stacks, strict=True))
        found = []
        for (layer, stage), first in zip(self.cut.layers, self.placements, strict=True):
            stack = own.get(layer)
            here = first if stack is None else stack.placement
            found.append(
                ExpertStack(
                    parameters=layer.experts.stacked_parameters() if stack is None else stack.parameters,
                    slot_experts=() if stack is None else stack.slot_experts,
                    placement=here.over(self._ranks[stage], self.world.size),
                    rank=self.world.rank,
                    base=layer.experts.base_names,
                )
            )
        return found

    def set_placements(self, placements: Sequence[Placement]) -> list[Placement]:
        """Set the placements of all layers, and return those of the layers here."""
        self.placements = list(placements)
        return self.own(placements)

    def placements_of_all(self, own: Sequence[Placement]) -> list[Placement]:
        """Return the placements of all layers from those of the layers here; collective over the stages."""
        if self.num_stages == 1:
            return list(own)
        experts = max((layer.num_experts for layer in self.layers), default=0)
        tables = [torch.tensor(placement.replicas) for placement in own]
        tables_LEN = self.counts_of_all(
            torch.stack(tables) if tables else torch.zeros(0, experts, self.num_ranks).long()
        )
        return [] if tables_LEN is None else [Placement(replicas=table) for table in tables_LEN.cpu().numpy()]

    def replace(
        self,
        experts: PlacedExperts,
        placements: Sequence[Placement],
        optimizers: Sequence[Optimizer],
        nodes: Sequence[int],
    ) -> MigrationReport:
        """See `ExpertParallelStrategy.replace_experts`; collective over all ranks, and `moved_states` are those of all.

        Args:
            nodes: of all ranks.

        Raises:
            ConfigurationError: on every rank, the refusal of one of them, before anything moves.
        """
        wanted = fingerprint(*(placement.replicas for placement in placements))
        check_agreement(wanted, "the new placement", self.world)  # first: what is refused then, every rank refuses
        if len(placements) != len(self.layers):
            raise ConfigurationError(
                f"{len(placements)} placements do not fit the {len(self.layers)} MoE layers of the model: give one for "
                "each"
            )
        report = experts.replace(self.own(placements), optimizers, self.nodes(nodes), self.pipe)
        self.set_placements(placements)
        return replace(report, moved_states=sum(all_gather_json(report.moved_states, self.pipe)))

    def counts_of_all(self, own_LE: Tensor | None) -> Tensor | None:
        """Return a number for each expert, or any other values of each layer, int64 [L, ...], from those of the layers
        here; None where there are none, or in a pipeline only zeros. Collective in a pipeline.

        Args:
            own_LE: of the layers here; None on all ranks of a stage: zeros [L, E].
        """
        if self.num_stages == 1:
            return own_LE
        experts = max((layer.num_experts for layer in self.layers), default=0)
        device, shape = self.world.device, (experts,) if own_LE is None else own_LE.shape[1:]
        all_LE = torch.zeros(len(self.layers), *shape, dtype=torch.int64, device=device)
        if own_LE is not None:
            all_LE[self.numbers] = own_LE.to(device)
        all_reduce_(all_LE, self.pipe)
        return all_LE if bool(all_LE.any()) else None

    # ------------------------------------------------------------------ one file

    def full_model_state(self, state: Mapping[str, Any], experts: PlacedExperts) -> dict[str, Any]:
        """Return the whole module's state_dict on rank 0; empty on the others. Collective.

        Args:
            state: state_dict of this rank's parts.
        """
        if self.num_stages == 1:
            return full_model_state(state, experts.keys(self._module), self.world, cuts=cuts_of(self._module))
        owners = {parameter: stack for stack in self.stacks(experts) for parameter in stack.parameters.values()}
        with self.cut.whole():
            named, cuts = self._module.named_parameters(remove_duplicate=False), cuts_of(self._module)
            keys = {name: owners[parameter] for name, parameter in named if parameter in owners}
        own = {name: v for name, v in state.items() if not (isinstance(v, Tensor) and v.is_meta)}
        whole_here = own.keys() - keys.keys() - cuts.keys()
        first = [
            name for name in whole_here if self.holders(name)[0] == self.world.rank and isinstance(own[name], Tensor)
        ]
        whole = full_model_state(own, keys, self.world, cuts=cuts, elsewhere=first)
        return {name: whole[name] for name in self._names} if whole else {}

    def own_part(self, full: Mapping[str, Any]) -> Mapping[str, Any]:
        """Select the entries of a whole state_dict that are on this rank, and those that are in no stage."""
        if self.num_stages == 1:
            return full
        others = set(self._names) - set(self._module.state_dict(keep_vars=True))
        return {name: value for name, value in full.items() if name not in others}
