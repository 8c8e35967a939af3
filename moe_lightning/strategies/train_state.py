"""State of a rank: module, experts in slots, optimizers, and states that it holds for others.

`StageTransfer` moves the stages of a pipeline between worlds. A rank may also repeat the optimizer updates of a peer on
its host, and so hold the optimizer state of the peer's dense parameters (REFT's AOR).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.arrays import BoolArray
from moe_lightning.balancing.migration import held_states, plan_migration
from moe_lightning.balancing.repair import repair_stages
from moe_lightning.checkpoint.full_state import broadcast_optimizers
from moe_lightning.checkpoint.loader import CheckpointSource
from moe_lightning.checkpoint.optimizer_shards import AdamWReplay, exchange_shards, verify_replays
from moe_lightning.checkpoint.training_state import TrainingState, WindowReplay, replay_of, restore_random_state
from moe_lightning.dispatch.placement import Placement
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import pack, packed_bytes, unpack
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.router import Router
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, agree
from moe_lightning.parallel.exchange import PeerBuffer, exchange_buffers
from moe_lightning.parallel.mesh import Part, stage_ranks
from moe_lightning.state.tensors import Updates, cut_of, cuts_of, local, mark, swap_parameters
from moe_lightning.strategies.checks import check_for_recovery, require_host_updates, require_updates_by_expert
from moe_lightning.strategies.dense_parameters import (
    DENSE_SHARDINGS,
    DenseParts,
    DenseSharding,
    Rows,
    holders_of_units,
    is_unit_name,
    name_of,
    new_holders_of,
    unit_state,
)
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.stages import StageState
from moe_lightning.strategies.worlds import Worlds

FIXED_GROUPS = (
    "groups cannot be added during training under dense=zero1, fsdp or hsdp, mesh.tp, mesh.pp and FaultRecovery: give "
    "all parameters to configure_optimizers and unfreeze them later, or use dense=ddp without FaultRecovery"
)


class TrainState:
    """Live state of this rank in any world.

    Args:
        worlds: the present world.
        dense: sharding of dense parameters and their optimizer states, a name of DENSE_SHARDINGS.
        max_slots: experts that a rank can hold in a layer; None: no limit.
        on_host: True if optimizer states of dense parameters stay in host memory.

    Attributes:
        max_slots: as given.
        parts: the dense parameters that ranks share.
        stage_transfer: transfer of the stages of a pipeline between worlds.
        stages: of a pipeline, those on this rank; None without one.
        optimizers: of the running fit.
        updates: parameters as the optimizers update them.
        replay: copy of another rank's optimizer shard; None without one.
        restored: the directory checkpoint, or the snapshots, restored last; None without any.
        reads_objects: True if the user lets restores unpickle objects.
        window_replay: the steps that are repeated until the state is whole; None if it is.
    """

    def __init__(self, worlds: Worlds, *, dense: str, max_slots: int | None, on_host: bool = False) -> None:
        self._worlds, self._dense, self.max_slots, tensors = worlds, dense, max_slots, worlds.axes.tp
        in_rows = hasattr(DENSE_SHARDINGS.find(dense), "cut_size")
        self._module: pl.LightningModule | None = None
        self._experts: PlacedExperts | None = None
        self._recorded: list[list[list[nn.Parameter]]] = []
        self._shards: DenseSharding | None = None
        self._numbers: Sequence[int] = ()  # in the whole world, of the ranks that those count
        self._detached_states: dict[str, Mapping[str, Tensor]] = {}
        self._own_forward: Any = None
        self.stages: StageState | None = None
        self.parts = DenseParts(self, in_rows=in_rows, tensors=tensors, with_moments=dense != "zero1")
        self.stage_transfer = StageTransfer(self, worlds)
        self.optimizers: Sequence[Optimizer] = ()
        self.updates = Updates(on_host=on_host)
        self.replay: AdamWReplay | None = None
        self.restored: CheckpointSource | None = None
        self.reads_objects = False
        self.window_replay: WindowReplay | None = None

    @property
    def module(self) -> pl.LightningModule:
        """The user's module."""
        assert self._module is not None, "the strategy is not set up"
        return self._module

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer that runs it."""
        return self.module.trainer

    @property
    def experts(self) -> PlacedExperts:
        """The experts under their placements."""
        assert self._experts is not None, "the strategy is not set up"
        return self._experts

    def holds(self, module: nn.Module) -> bool:
        """True if this is the state of a module, in whatever world."""
        return self._module is module

    def has_placed(self, module: nn.Module) -> bool:
        """True if the experts are those of a module in the present world: a user may have replaced its layers since
        they were placed.
        """
        known = self._experts
        if known is None or known.module is not module or known.world is not self._worlds.present.stage:
            return False
        return self.stages is not None or known.is_up_to_date()

    def set_module(self, module: pl.LightningModule, experts: PlacedExperts, stages: StageState | None = None) -> None:
        """Set the module whose experts are placed, or some stages of it; raises as `check_for_recovery`."""
        if self._worlds.is_elastic:
            check_for_recovery(self._worlds.axes, self._dense)
        self._module, self._experts, self.stages = module, experts, stages

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Set the optimizers of a fit; raises as `require_host_updates` if they update on the host."""
        if self.updates.on_host:
            require_host_updates(optimizers)
        self.optimizers = optimizers
        for state in (
            state for optimizer in optimizers for state in optimizer.state.values()
        ):  # Adagrad creates it in its constructor
            state.update({name: local(v) if isinstance(v, Tensor) else v for name, v in state.items()})
        self._recorded = _groups_of(optimizers)
        self.fill_groups()
        sharers, self._numbers = self.stage_transfer.sharers(self._worlds.present)
        self._shard(self._dense_sharding(sharers))

    def training_state(self) -> TrainingState:
        """Return the live tensors of the run under their checkpoint keys."""
        ranks, numbers = self._worlds.present, self._numbers
        owners = {} if self._shards is None else self._shards.owners
        return TrainingState(
            self.module,
            self.experts.stacks if self.stages is None else self.stages.stacks(self.experts),
            list(zip(self.optimizers, self._groups, strict=True)),
            state_ranks={parameter: numbers[rank] for parameter, rank in owners.items()},
            rank=ranks.rank,
            world_size=ranks.size,
            cut=ranks.row_cut,
            holders=None if self.stages is None else self.stages.holders,
            on_host=self.updates.on_host,
        )

    def find_twins(self) -> None:
        """Find the experts with equal router rows after values have arrived, see `Router.find_twins`."""
        for layer in self.experts.layers:
            if isinstance(layer.router, Router) and not self.is_shared:  # sharded rows are not compared
                layer.router.find_twins()

    def require_one_stage(self, what: str) -> None:
        """
        Raises:
            ConfigurationError: a pipeline, whose ranks have the loads of their own layers only.
        """
        if self.stages is not None:
            raise ConfigurationError(f"{what} cannot work with mesh.pp yet: drop it, or use mesh.pp=1")

    def counts_of_all(self, counts_LE: Tensor | None) -> Tensor | None:
        """Return the counts of the MoE layers of all stages from those of this rank; collective in a pipeline."""
        return counts_LE if self.stages is None else self.stages.counts_of_all(counts_LE)

    @property
    def layers(self) -> Sequence[MoELayer]:
        """The MoE layers of all stages."""
        return self.experts.layers if self.stages is None else self.stages.layers

    @property
    def fixes_groups(self) -> bool:
        """True if parameter groups must stay as `configure_optimizers` made them, because optimizers here have a part
        of them, or ranks that join later have only these.
        """
        is_whole = self._dense == "ddp" and self._worlds.axes.pp == self._worlds.axes.tp == 1
        return self._worlds.is_elastic or (self._worlds.present.size > 1 and not is_whole)

    @property
    def _groups(self) -> list[list[list[nn.Parameter]]]:
        """The parameters of the optimizers' groups over all ranks; callbacks may add groups, as BaseFinetuning does.

        Raises:
            ConfigurationError: groups were added where they are fixed.
        """
        if not self.fixes_groups:
            return _groups_of(self.optimizers)
        for optimizer, known in zip(self.optimizers, self._recorded, strict=True):
            if len(optimizer.param_groups) != len(known):
                raise ConfigurationError(
                    f"the optimizer was made with {len(known)} parameter groups and has {len(optimizer.param_groups)} "
                    f"now: {FIXED_GROUPS}"
                )
        return self._recorded

    def trained(self) -> tuple[list[int], list[bool]]:
        """Return the sizes of the parameter groups and which parameters are trained; alike on all ranks."""
        sizes = [len(group) for groups in self._groups for group in groups]
        return sizes, [parameter.requires_grad for parameter in self.module.parameters()]

    def may_make_states(self) -> bool:
        """Return True if an update may add optimizer states on this rank without a change of `trained`."""
        for optimizer in self.optimizers:
            if type(optimizer).__module__.partition(".")[0] not in ("torch", "moe_lightning"):
                return True
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            trained = (p for p in parameters if p.requires_grad and p.numel() and not p.is_meta)
            if not all(optimizer.state.get(p) for p in trained):
                return True
        return False

    def fill_groups(self) -> None:
        """Set the parameters of the optimizers' groups to those on this rank."""
        for optimizer, groups in zip(self.optimizers, self._groups, strict=True):
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = list(parameters)
        if self.stages is not None:
            self.stages.leave_absent(self.optimizers)

    def replace_parameters(self, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace parameters in the optimizers, with their states."""
        for optimizer in self.optimizers:
            swap_parameters(optimizer, others)
        self._recorded = [[[others.get(p, p) for p in group] for group in groups] for groups in self._recorded]

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's state of a parameter, which may be changed; an empty dict if no optimizer has one."""
        return next((o.state[parameter] for o in self.optimizers if parameter in o.state), {})

    def number_of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer."""
        bare = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return next(i for i, known in enumerate(self.optimizers) if known is bare)

    def parameters_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters that an optimizer updates on some rank, in an order that all ranks share."""
        return [parameter for group in self._groups[self.number_of(optimizer)] for parameter in group]

    def require_replayable(self) -> None:
        """
        Raises:
            ConfigurationError: steps that cannot be run again with some experts frozen, to the bit.
        """
        self.require_one_stage("lossless=True")
        if not self.module.automatic_optimization:
            raise ConfigurationError(
                "lossless=True runs steps again, whose bounds manual optimization does not state: use automatic "
                "optimization, or lossless=False"
            )
        require_updates_by_expert(self.optimizers, self.experts.stack_of)

    def resume_from(self, restored: CheckpointSource) -> None:
        """Restore this rank's random generators, after everything else. Raises as `replay_of`."""
        restore_random_state(restored, self._worlds.present)
        self.window_replay = replay_of(restored, self.trainer.max_steps)

    # ------------------------------------------------------------------ a step

    def broadcast_updates(self, optimizer: Optimizer) -> None:
        """Broadcast the updates that one rank has computed for all of an optimizer's parameters; collective."""
        if self._shards is not None:
            self._shards.spread_updates(self.parameters_of(optimizer))

    def apply_update(self, optimizer: Optimizer) -> None:
        """Apply an update that this rank was prepared for, outside of a step."""
        with self.updates.around(optimizer, self.experts.stack_of) as see:
            see()
            optimizer.step()
        self.after_update(optimizer)

    def after_update(self, optimizer: Optimizer) -> None:
        """Update the biases of routers whose layers the optimizer trains, and a window replay, after every update of
        the parameters, on each rank by itself.
        """
        updated = set(self.parameters_of(optimizer))
        for layer in self.experts.layers:
            if any(p.requires_grad and p in updated for p in layer.parameters()):
                layer.router.update_bias()
        if self.window_replay is not None:
            self.window_replay.advance(self.training_state())
            if self.window_replay.is_over:
                self.window_replay = None
                assert self.restored is not None
                self.restored.release()

    def remember_forward(self) -> None:
        """Remember the module's own attribute `forward`, if it differs from that of its class: Lightning sets its own
        when DDP fails.
        """
        self._own_forward = self.module.__dict__.get("forward")

    def forget_step(self) -> None:
        """Release what an aborted step has left in the module."""
        self.module.__dict__.pop("forward", None)
        if self._own_forward is not None:
            self.module.forward = self._own_forward  # type: ignore[method-assign]
        self.experts.forget_step()

    def forget_update(self) -> None:
        """Drop the gradients and counts of an update that is left out, or of a former world."""
        for parameter in self.module.parameters():
            parameter.grad = None
        self.forget_counts()

    def forget_counts(self) -> None:
        """Drop the counts of a step that does not happen, on which router biases would follow."""
        for layer in self.experts.layers:
            layer.router.forget_counts()

    # ------------------------------------------------------------------ sharded dense parameters

    @property
    def is_shared(self) -> bool:
        """True if ranks share copies of the dense parameters, given enough ranks."""
        return self.stages is not None or self.parts.is_wished

    def shared_names(self) -> Collection[str]:
        """Return the parameters that ranks share, given enough ranks."""
        return self.parts.ways() if self.stages is None else self.stages.names

    def dense_parts(self, former: World) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of dense state that some ranks only have, and of this rank's part of that.

        Args:
            former: the former world of this rank.
        """
        names, parts = self.parts.named(former.row_cut)
        stages, held = ([], []) if self.stages is None else self.stage_transfer.named()
        holders = self._state_holders(*self.stage_transfer.sharers(former))
        own = {unit for unit, holder in holders.items() if holder == former.rank}
        return (*stages, *names, *sorted(holders)), (*held, *parts, *sorted(own | self._detached_states.keys()))

    @property
    def shards_optimizers(self) -> bool:
        """True if one rank has the optimizer state of each dense parameter for all."""
        return self._shards is not None and self._worlds.present.size > 1

    @property
    def shard_owners(self) -> dict[str, int]:
        """Return the rank that has the optimizer state of each dense parameter, by name; empty without sharding."""
        if self._shards is None:
            return {}
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        owners = self._shards.owners.items()
        return {names[parameter]: rank for parameter, rank in owners if parameter in names}  # others have left

    def _state_holders(self, ranks: World, numbers: Sequence[int]) -> dict[str, int]:
        """Return the rank that has each unit of the optimizer states here; empty without sharding.

        Args:
            ranks, numbers: see `StageTransfer.sharers`.
        """
        units = holders_of_units(self.shard_owners, cuts_of(self.module), ranks.row_cut)
        return {unit: numbers[rank] for unit, rank in units.items()}

    def _everyones(self, holders: Mapping[str, int], world: World) -> Mapping[str, int]:
        """Return the holders of all stages; collective in a pipeline."""
        everyones = [holders] if self.stages is None else all_gather_json(dict(holders), world)
        return {unit: rank for one in everyones for unit, rank in one.items()}

    def _dense_sharding(self, ranks: World) -> DenseSharding:
        """Build the sharding of the dense parameters among the ranks that hold them."""
        dense = [p for p in self.module.parameters() if p.requires_grad and p not in self.experts.stack_of]
        leaving = self._worlds.spares if self.stages is None else 0  # they hold nothing for others
        staying = replace(ranks, size=ranks.size - leaving)
        sharding: DenseSharding = DENSE_SHARDINGS.make(self._dense, dense, staying)
        return sharding

    def _shard(self, sharding: DenseSharding) -> None:
        """Reduce each optimizer to this rank's share of the dense parameters."""
        if not sharding.owners:
            return
        self._shards = sharding
        for optimizer in self.optimizers:
            self._shards.shard(optimizer)

    def reshard(self, sources: Sequence[tuple[str, int]], rows: Rows | None = None) -> None:
        """Reshard the dense state over the ranks of the present world; collective if optimizer states move.

        Args:
            sources: (name, rank) of every parameter whose state a rank has, live or replayed; the others are restored
                later by their new holders.
            rows: of the parameters that this rank will hold, if ranks share them; None: they are restored next.
        """
        world = self._worlds.present
        ranks, numbers = self.stage_transfer.sharers(world)
        if self.stages is not None:
            self.stage_transfer.install(rows, ranks)
        elif self.parts.is_wished:
            self.parts.install(rows, world)
        self._share_states([(unit, rank) for unit, rank in sources if is_unit_name(unit)], world, ranks, numbers)

    def gather(self, world: World, most_bytes: int) -> None:
        """Give every rank whole dense parameters after training, unless they take more than this on some rank;
        collective if they are cut.
        """
        units = list(self._state_holders(world, range(world.size)).items())
        if self.parts.gather(world, most_bytes):
            groups = {name: group for name, group in world.groups.items() if name != "copy"}
            world, numbers = replace(world, shards=(), groups=groups), self._numbers
            self._share_states(units, world, world, range(world.size))
            self._numbers = numbers

    def _share_states(
        self, sources: Sequence[tuple[str, int]], world: World, ranks: World, numbers: Sequence[int]
    ) -> None:
        """Transfer optimizer states to the ranks of a world that hold them from now on, if any holds them for others;
        collective.

        Args:
            sources: (unit, rank) of every state that a rank has.
            ranks, numbers: those that hold the same parameters as this one, and their numbers in the world.
        """
        sharding = self._dense_sharding(ranks)
        if not sharding.owners and (self.stages is None or self.parts.with_moments):
            return
        dense = {name: p for name, p in self.module.named_parameters() if p not in self.experts.stack_of}
        homes = {p: o for o, groups in zip(self.optimizers, self._groups, strict=True) for g in groups for p in g}
        local = self._held_states(name for name, rank in sources if rank == world.rank)
        self.fill_groups()
        self._shards, self._numbers = None, numbers
        self._shard(sharding)
        for parameter in dense.values():
            homes[parameter].state.pop(parameter, None)
        holders, ways = self._everyones(self._state_holders(ranks, numbers), world), self.parts.ways()
        table = self.training_state()
        targets = {unit: new_holders_of(unit, holders) for unit, _ in sources}
        arrived = exchange_shards(sources, targets, local, world)
        for unit in (unit for unit, holder in holders.items() if holder == world.rank):
            parameter = dense[name_of(unit)]
            if states := unit_state(arrived, unit, ways.get(name_of(unit))):
                homes[parameter].state[parameter] = table.placed(homes[parameter], parameter, states)
        self.replay, self._detached_states = None, {}  # of ranks of the former world

    def hand_over(self, staying: Sequence[int], world: World) -> None:
        """Transfer the dense state that only leaving ranks have to ranks that stay; collective."""
        own = self._state_holders(*self.stage_transfer.sharers(world))
        if self.stages is None:
            self.parts.hand_over(staying, world)
        else:
            self.detach_states(unit for unit, owner in own.items() if owner == world.rank)
        owners = self._everyones(own, world)
        lost = sorted(unit for unit, owner in owners.items() if owner not in staying)
        if lost:
            holders = {unit: [staying[number % len(staying)]] for number, unit in enumerate(lost)}
            local = self._held_states(unit for unit in lost if owners[unit] == world.rank)
            self._detached_states |= exchange_shards([(unit, owners[unit]) for unit in lost], holders, local, world)
        if self.stages is not None:
            self._shards = None  # all states are detached: parameters may leave now

    def detach_states(self, units: Iterable[str]) -> None:
        """Detach the states of these units from their parameters, which may leave, until the next world has them."""
        known = self.shard_owners
        self._detached_states |= self._held_states(unit for unit in units if name_of(unit) in known)

    def _held_states(self, units: Iterable[str]) -> dict[str, Mapping[str, Tensor]]:
        """Return optimizer states: live, detached, or replayed for a lost peer."""
        parameters, replayed = dict(self.module.named_parameters()), self.replay
        detached = self._detached_states
        here = {
            unit: detached[unit] if unit in detached else self.state_of(parameters[name_of(unit)]) for unit in units
        }
        return {unit: s if s or replayed is None else replayed.moments(unit) for unit, s in here.items()}


class StageTransfer:
    """Transfer of the stages of a pipeline between worlds, with their optimizer states and experts. A rank may hold
    other stages in the next world; until everything has arrived it holds its former stages and the new ones.

    Args:
        state: the state of this rank.
        worlds: the present world, with the axes of the mesh.
    """

    def __init__(self, state: TrainState, worlds: Worlds) -> None:
        self._state, self._worlds = state, worlds

    @property
    def _stages(self) -> StageState:
        assert self._state.stages is not None
        return self._state.stages

    def named(self) -> tuple[list[str], list[str]]:
        """Return the names of all stages, and of those whose dense values are here, or this rank's parts of them."""
        names = self._stages.parts()
        return names, [names[stage] for stage in self._stages.held]

    def sharers(self, world: World) -> tuple[World, Sequence[int]]:
        """Return the ranks of a world that hold the same stages as this one, and their numbers there."""
        if self._state.stages is None:
            return world, range(world.size)
        ranks = self.ranks_in(range(world.size))
        peers = next((own for own in ranks if world.rank in own), [world.rank])
        return world.own_stage or World.offline(peers.index(world.rank), len(peers), world.device), peers

    def ranks_in(self, ranks: Sequence[int]) -> list[Sequence[int]]:
        """Return which of these ranks will hold each stage, once they are a world."""
        axes, count = self._worlds.axes, self._stages.cut.num_stages
        return [[ranks[at] for at in stage_ranks(stage, len(ranks), axes)] for stage in range(count)]

    def ranks_of_layers(self, world: World) -> list[Sequence[int]]:
        """Return the ranks of a world that will hold each MoE layer."""
        return self._stages.ranks_of_layers(self.ranks_in(range(world.size)))

    # ------------------------------------------------------------------ dense values

    def fetch(self, sources: Sequence[tuple[str, int]], world: World, *, is_live: bool) -> Rows:
        """Transfer the missing parts of the stages that this rank will hold in a world, by part; collective there.

        Args:
            sources: (name of a stage, a rank that has it); a stage of rank -1 is not sent.
            is_live: True if the values of this rank are valid.
        """
        if not is_live:
            self._stages.held = ()
        self._state.detach_states(unit for unit, rank in sources if rank == world.rank)
        return self._fetch(dict(sources), self.ranks_in(range(world.size)), world, world.row_cut.part)

    def _fetch(self, sources: Mapping[str, int], ranks: list[Sequence[int]], world: World, part: Part) -> Rows:
        """
        Args:
            ranks: those that will hold each stage.
            part: the part of its stages that this rank will hold, if ranks share copies.
        """
        names, own, parts = self._stages.parts(), self._wanted(ranks, world), self._state.parts
        self._hold({*self._stages.held, *own})
        lacking = all_gather_json([stage for stage in own if stage not in self._stages.held], world)
        ways = [
            (stage, sources[names[stage]], target)
            for target, stages in enumerate(lacking)
            for stage in stages
            if sources[names[stage]] >= 0
        ]
        for source in sorted({source for _, source, _ in ways}):
            targets = {target for _, sender, target in ways if sender == source}
            broadcast_optimizers(self._state.training_state(), targets, world, source)
        here = {stage: self._tensors(stage) for stage in {*self._stages.held, *own}}
        parcels = [
            PeerBuffer(source=source, target=target, nbytes=packed_bytes(here[stage]) if stage in here else 0)
            for stage, source, target in ways
        ]
        arrived = exchange_buffers(parcels, lambda at: _packed(here[ways[at][0]]), world)
        rows = {names[ways[at][0]]: data for at, data in arrived.items()}
        return rows | (parts.fetch(list(sources.items()), part, world, own) if parts.is_wished else {})

    @torch.no_grad()
    def install(self, rows: Rows | None, world: World) -> None:
        """Set the values of the stages that this rank holds now; None: they are restored next.

        Not collective.

        Args:
            world: the ranks of these stages.
        """
        for stage, name in enumerate(self._stages.parts()):
            if rows is not None and name in rows and rows[name].numel():
                tensors = self._tensors(stage)
                here = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
                unpack(rows[name], here)
                for tensor, values in zip(tensors, here, strict=True):
                    tensor.copy_(values)
        self._stages.held = self._stages.cut.stages
        if self._state.parts.is_wished:
            self._state.parts.install(rows, world)

    def _wanted(self, ranks: Sequence[Sequence[int]], world: World) -> list[int]:
        """Return the stages that this rank will hold."""
        return [stage for stage, own in enumerate(ranks) if world.rank in own]

    def _tensors(self, stage: int) -> list[Tensor]:
        """Return the tensors of a stage that are equal on all of its ranks: dense parameters, their optimizer states
        and buffers, in an order that all ranks share.
        """
        state, stages, parts = self._state.training_state(), self._stages, self._state.parts
        found, cut = list[Tensor](), parts.ways() if parts.is_wished else {}
        for name, parameter in state.dense.items():
            if stages.belongs(name, stage) and name not in cut:
                found += [parameter.detach(), *(state.moments(parameter).values() if parts.with_moments else ())]
        return found + [buffer for name, buffer in self._state.module.named_buffers() if stages.belongs(name, stage)]

    def _hold(self, wanted: set[int]) -> None:
        """Hold these stages and their layers."""
        stages, experts = self._stages, self._state.experts
        placements: dict[Any, Placement] = dict(zip(stages.layers, stages.placements, strict=True))
        placements |= dict(zip(experts.layers, experts.placements, strict=True))
        others = stages.cut.hold(wanted)
        for before, after in others.items():
            mark(after, cut_of(before))
        self._state.replace_parameters(others)
        self._state.fill_groups()
        layers = stages.own(stages.layers)
        experts.hold(layers, [placements[layer] for layer in layers])

    # ------------------------------------------------------------------ experts

    def enter_world(self, world: World, placements: Sequence[Placement], held: BoolArray, nodes: Sequence[str]) -> None:
        """Bring experts to where the placements want them, then let go of the stages that this rank will not hold.
        Collective.

        Args:
            placements: one for each layer of all stages, over all ranks.
            held: bool [L, E, N], what each rank still holds.
            nodes: of the ranks.
        """
        ranks = self.ranks_in(range(world.size))
        everyone = world if all(len(own) == world.size for own in ranks) else None
        self._move_experts(world, placements, held, nodes, ranks, world.own_stage or everyone)

    def _move_experts(
        self,
        world: World,
        placements: Sequence[Placement],
        held: BoolArray,
        nodes: Sequence[str],
        ranks: list[Sequence[int]],
        among: World | None,
    ) -> None:
        """Move experts to the ranks that will hold each stage, and dispatch the layers here among some of them; None:
        not yet.
        """
        stages, experts, optimizers = self._stages, self._state.experts, self._state.optimizers
        own = self._wanted(ranks, world)
        self._hold({*stages.held, *own})
        here = stages.numbers
        dtypes = {str(tensor.dtype).removeprefix("torch.") for s in experts.stacks for tensor in s.tensors(optimizers)}
        everyones_dtypes = all_gather_json(sorted(dtypes), world) if _moves(placements, held) else []
        agreed = {getattr(torch, name) for names in everyones_dtypes for name in names}
        at = {number: index for index, number in enumerate(here)}  # sources are chosen with a view to all layers
        everyones = plan_migration(held, placements, nodes).transfers
        transfers = [replace(way, layer=at[way.layer]) for way in everyones if way.layer in at]
        placed = [placements[number] for number in here]
        experts.enter_world(world, placed, held[here], optimizers, nodes, agreed, transfers)
        self._hold(set(own))
        stages.ranks, layers = ranks, stages.own(stages.layers)
        stages.placements = [
            placement.among(own_ranks)
            for placement, own_ranks in zip(placements, stages.ranks_of_layers(ranks), strict=True)
        ]
        peers = ranks[own[0]] if own else [world.rank]
        offline = World.offline(peers.index(world.rank), len(peers), world.device)
        experts.dispatch_among(layers, stages.own(stages.placements), among or offline)

    # ------------------------------------------------------------------ before ranks leave

    def hand_over(self, staying: Sequence[int], world: World, nodes: Sequence[str], *, min_replicas: int) -> None:
        """Transfer to the ranks that stay the stages that they will hold, before others leave; collective.

        Args:
            nodes: of all ranks.
            min_replicas: nodes that shall hold each expert.
        """
        stages, ranks, parts = self._stages, self.ranks_in(staying), self._state.parts
        parts.leave()
        everyones = all_gather_json([*self.named()[1], *parts.named(world.row_cut)[1]], world)
        sources = dict.fromkeys(self.named()[0], -1)
        sources |= {name: rank for rank, names in reversed([*enumerate(everyones)]) for name in names}
        held = _held([stack.placement for stack in stages.stacks(self._state.experts)], world.size)
        options: dict[str, Any] = {"nodes": nodes, "min_replicas": min_replicas, "max_slots": self._state.max_slots}
        repair = repair_stages(held, stages.ranks_of_layers(ranks), **options)
        rows = self._fetch(sources, ranks, world, Part())
        agree(world)
        self._move_experts(world, repair.placements, held, nodes, ranks, None)
        alone = replace(World.offline(world.rank, world.size, world.device), nodes=world.nodes)
        self.install(rows, alone)
        self._worlds.take_place(alone)  # where nothing is cut


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return pack([tensor.cpu() for tensor in tensors]) if tensors else torch.empty(0, dtype=torch.uint8)


def _held(placements: Sequence[Placement], num_ranks: int) -> BoolArray:
    return held_states(placements) if placements else np.zeros((0, 0, num_ranks), dtype=np.bool_)


def _moves(placements: Sequence[Placement], held: BoolArray) -> bool:
    """True if any expert has to move."""
    lacking = _held(placements, held.shape[2]) & ~held
    return bool((lacking & held.any(axis=2, keepdims=True)).any()) if len(placements) else False


def _groups_of(optimizers: Sequence[Optimizer]) -> list[list[list[nn.Parameter]]]:
    return [[list(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]


def replay_peer(state: TrainState, peer: int, version: int) -> None:
    """Repeat a peer's updates from this version on.

    Raises:
        ConfigurationError: no sharding, several optimizers, or one whose updates cannot be repeated exactly.
    """
    owners, optimizers = state.shard_owners, state.training_state().optimizers
    if not owners or len(optimizers) != 1:
        raise ConfigurationError("updates of a peer can be repeated for one optimizer under dense=zero1 only")
    names = {id(p): name for name, p in state.module.named_parameters()}
    optimizer, groups = optimizers[0]
    own = [{names[id(p)]: p.detach() for p in group if owners.get(names[id(p)]) == peer} for group in groups]
    state.replay = AdamWReplay(optimizer, own, version=version)


def replay_update(state: TrainState, optimizer: Optimizer) -> None:
    """Repeat the update that a peer is about to make."""
    if state.replay is not None:
        parameters = state.module.named_parameters()
        state.replay.replay({name: p.grad for name, p in parameters if p.grad is not None}, optimizer)


def verify_replay(state: TrainState, version: int, world: World) -> int:
    """Compare every repeated shard with its owner, and return the number of corrections. Collective."""
    if state.replay is None or version == 0:  # at first there are no states yet, and the weights are alike
        return 0
    owners, optimizer = state.shard_owners, state.optimizers[0]
    owned = {
        name: {"weight": p.detach(), **optimizer.state[p]}
        for name, p in state.module.named_parameters()
        if owners.get(name) == world.rank and p in optimizer.state
    }
    return sum(len(names) for names in verify_replays(state.replay, owned, version, world).values())
