"""State of a rank: module, experts in slots, optimizers, shards of dense state; and its transfer between worlds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
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
from moe_lightning.checkpoint.training_state import TrainingState, WindowReplay, replay_of, restore_random_state
from moe_lightning.dispatch.placement import Placement
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.router import Router
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, agree
from moe_lightning.parallel.mesh import Part, TensorCut
from moe_lightning.state.averages import AVERAGE
from moe_lightning.state.pieces import Block
from moe_lightning.state.table import numbers_among
from moe_lightning.state.tensors import (
    Updates,
    cut_of,
    cuts_of,
    home_of_moments,
    local,
    mark,
    swap_parameters,
)
from moe_lightning.state.transfer import NO_UNITS, Unit, Units, reshard, unit_of, unit_row, without_memory
from moe_lightning.strategies.averaging import Averaging
from moe_lightning.strategies.checks import require_automatic_optimization, require_own_sharding
from moe_lightning.strategies.dense_parameters import DenseParts, DenseShards, places_of, state_name
from moe_lightning.strategies.dense_sharding import ReplicatedDense, cuts_rows, has_owners
from moe_lightning.strategies.optimizer_checks import (
    require_host_updates,
    require_one_closure_call,
    require_one_optimizer_each,
    require_updates_by_expert,
)
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.stages import StageMap
from moe_lightning.strategies.worlds import Worlds

FIXED_GROUPS = (
    "groups cannot be added during training under dense=zero1, fsdp or hsdp, mesh.tp, mesh.pp and FaultRecovery: give "
    "all parameters to configure_optimizers and unfreeze them later, or use dense=ddp without FaultRecovery"
)

_REPLACED = (
    "trainer.optimizers were replaced during a fit: change the options of their parameter groups instead, or begin "
    "another fit"
)


class TrainState:
    """Live state of this rank in any world.

    Args:
        worlds: the present world.
        dense: sharding of dense parameters and their optimizer states, a name of DENSE_SHARDINGS.
        on_host: True if optimizer states of dense parameters stay in host memory.

    Attributes:
        parts: the dense parameters that ranks share.
        shards: the dense state that only some ranks have.
        transfer: transfer of this state between worlds.
        stages: of the module, those on this rank; of an empty one before one is placed.
        optimizers: of the running fit.
        updates: parameters as the optimizers update them.
        averaging: averages of the weights, of a fit that has them.
        restored: the directory checkpoint, or the snapshots, restored last; None without any.
        window_replay: the steps that are repeated until the state is whole; None if it is.
    """

    def __init__(self, worlds: Worlds, *, dense: str, on_host: bool = False) -> None:
        self._worlds = worlds
        self._module: pl.LightningModule | None = None
        self._experts: PlacedExperts | None = None
        self._recorded: list[list[list[nn.Parameter]]] = []
        self.stages = StageMap(nn.Module(), worlds)
        with_moments = not has_owners(dense)
        self.parts = DenseParts(self, in_rows=cuts_rows(dense), tensors=worlds.axes.tp, with_moments=with_moments)
        self.shards = DenseShards(self, self.parts, worlds, dense)
        self.transfer = StateTransfer(self, worlds)
        self.optimizers: Sequence[Optimizer] = []
        self.updates = Updates(on_host=on_host)
        self.averaging = Averaging(self)
        self.restored: CheckpointSource | None = None
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
        return self.stages.num_stages > 1 or known.is_up_to_date()  # a pipeline keeps its layers

    def set_module(self, module: pl.LightningModule, experts: PlacedExperts, stages: StageMap) -> None:
        """Set the module whose experts are placed, or some stages of it; raises as `require_own_sharding`."""
        if self._worlds.is_elastic and self._worlds.axes.pp > 1:
            require_own_sharding(self.shards.kind, f"elastic.enabled=true, mesh.pp={self._worlds.axes.pp}")
        self._module, self._experts, self.stages = module, experts, stages

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Set the optimizers of a fit; raises as `require_host_updates` if they update on the host, and as
        `require_one_optimizer_each` if ranks share parameters.
        """
        if self.updates.on_host:
            require_host_updates(optimizers)
        self.optimizers = list(optimizers)
        for state in chain.from_iterable(o.state.values() for o in optimizers):  # Adagrad's constructor creates it
            state.update({name: local(v) if isinstance(v, Tensor) else v for name, v in state.items()})
        self._recorded = _groups_of(optimizers)
        if self.parts.is_enabled and self._worlds.may_have_peers:
            self.require_one_optimizer_each(beside="mesh.tp", cure="dense=ddp or zero1 without mesh.tp")
        self.transfer.begin()
        self.shards.begin()

    def require_same_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """
        Raises:
            ConfigurationError: a user has replaced some since the fit began.
        """
        if list(optimizers) != self.optimizers:
            raise ConfigurationError(_REPLACED)

    def training_state(self) -> TrainingState:
        """Return the live tensors of the run under their checkpoint keys."""
        ranks = self._worlds.present
        return TrainingState(
            self.module,
            self.stages.stacks(self.experts),
            list(zip(self.optimizers, self._groups, strict=True)),
            state_ranks=self.shards.ranks,
            rank=ranks.rank,
            world_size=ranks.size,
            cut=self.parts.cut,
            holders=self.stages.holders,
            on_host=self.updates.on_host,
            averages=self.averaging.averages,
        )

    def before_reading(self) -> None:
        """Restore parameters as they are between steps. Called before anything reads them there: a callback may have
        called the module, which leaves whole parameters beside optimizer states of rows. Not collective.
        """
        self.parts.reshard()

    def after_writing(self) -> None:
        """Update what follows from parameters. Called after anything but the optimizers has written them: finds experts
        with equal router rows, see `Router.find_twins`. Not collective.
        """
        for layer in self.experts.layers:
            if isinstance(layer.router, Router) and not self.shards.shares_weights:  # sharded rows are not compared
                layer.router.find_twins()

    @property
    def fixes_groups(self) -> bool:
        """True if parameter groups must stay as `configure_optimizers` made them, because optimizers here have a part
        of them, or ranks that join later have only these.
        """
        is_whole = self.parts.with_moments and not self.parts.is_enabled and self._worlds.axes.pp == 1
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
        """Return the sizes of the parameter groups and which parameters are trained; alike on all ranks of a stage."""
        sizes = [len(group) for groups in self._groups for group in groups]
        return sizes, [parameter.requires_grad for parameter in self.module.parameters()]

    def may_make_states(self) -> bool:
        """Return True if an update may add optimizer states on this rank without a change of `trained` that all ranks
        see, as they see none of parameters in other stages.
        """
        if self.stages.num_stages > 1:
            return True
        for optimizer in self.optimizers:
            if type(optimizer).__module__.partition(".")[0] not in ("torch", "moe_lightning"):
                return True
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            trained = (p for p in parameters if p.requires_grad and p.numel() and not p.is_meta)
            if not all(optimizer.state.get(p, {}).keys() - {AVERAGE} for p in trained):
                return True
        return False

    def set_groups(self, *, own: bool = False) -> None:
        """Set the parameters of the optimizers' groups to those on this rank; drop states of those in other stages.

        Args:
            own: leave out those that another rank updates for all.
        """
        everyones = self._groups
        elsewhere = set(self.shards.unowned) if own else set[nn.Parameter]()
        if self.stages.num_stages > 1:
            absent = {p for groups in everyones for group in groups for p in group} - set(self.module.parameters())
            elsewhere |= absent
            for optimizer in self.optimizers:
                for parameter in absent:
                    optimizer.state.pop(parameter, None)
        for optimizer, groups in zip(self.optimizers, everyones, strict=True):
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [parameter for parameter in parameters if parameter not in elsewhere]

    def replace_parameters(self, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace parameters in the optimizers, with their states."""
        for optimizer in self.optimizers:
            swap_parameters(optimizer, others)
        self._recorded = [[[others.get(p, p) for p in group] for group in groups] for groups in self._recorded]

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's state of a parameter, which may be changed; an empty dict if no optimizer has one."""
        return next((o.state[parameter] for o in self.optimizers if parameter in o.state), {})

    def number_of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer.

        Raises:
            ConfigurationError: it is not one of this fit.
        """
        bare = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        for number, known in enumerate(self.optimizers):
            if known is bare:
                return number
        raise ConfigurationError(_REPLACED)

    def parameters_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters that an optimizer updates on some rank, in an order that all ranks share."""
        return [parameter for group in self._groups[self.number_of(optimizer)] for parameter in group]

    def require_one_optimizer_each(self, *, beside: str, cure: str) -> None:
        """Raises as `checks.require_one_optimizer_each`."""
        require_one_optimizer_each(self._groups, self.module, beside=beside, cure=cure)

    def require_replayable(self) -> None:
        """
        Raises:
            ConfigurationError: steps that cannot be run again with some experts frozen, to the bit.
        """
        if self.stages.num_stages > 1:
            raise ConfigurationError("lossless=True cannot work with mesh.pp yet: drop it, or use mesh.pp=1")
        require_automatic_optimization(self.module, "lossless=True runs steps again", cure="lossless=False")
        if self.averaging.averages is not None:
            raise ConfigurationError(
                "lossless=True runs steps again whose averages it has not saved: use lossless=False, or drop the "
                "averages"
            )
        require_updates_by_expert(self.optimizers, self.experts.stack_of)

    def resume_from(self, restored: CheckpointSource) -> None:
        """Restore this rank's random generators, after everything else. Raises as `replay_of`."""
        self.restored = restored
        restore_random_state(restored, self._worlds.present)
        self.window_replay = replay_of(restored, self.trainer.max_steps)

    # ------------------------------------------------------------------ a step

    @contextmanager
    def updating(self, optimizer: Optimizer) -> Generator[Callable[[], None], None, None]:
        """From the call of what it yields to its end, the optimizer sees what it is to update: see `Updates.around`.

        Raises:
            ConfigurationError: it is called again, and ranks share what is updated.
        """
        has_begun = False
        with self.shards.whole_groups(), ExitStack() as entered:

            def begin() -> None:
                nonlocal has_begun
                if self.shards.shares_optimizers or self.parts.is_in_rows:
                    require_one_closure_call(optimizer, has_begun, self.shards.kind)
                has_begun = True
                entered.enter_context(self.shards.own_groups())
                entered.enter_context(self.averaging.hidden(optimizer))
                entered.enter_context(self.updates.around(optimizer, self.experts.stack_of))

            yield begin

    def apply_update(self, optimizer: Optimizer) -> None:
        """Apply an update that this rank was prepared for, outside of a step."""
        with self.updating(optimizer) as begin:
            begin()
            optimizer.step()
        self.after_update(optimizer)

    def after_update(self, optimizer: Optimizer) -> None:
        """Update the biases of routers whose layers the optimizer trains, averages, and a window replay, after every
        update of the parameters, on each rank by itself.
        """
        updated = set(self.parameters_of(optimizer))
        for layer in self.experts.layers:
            if any(p.requires_grad and p in updated for p in layer.parameters()):
                layer.router.update_bias()
        self.averaging.follow()
        if self.window_replay is not None:
            self.window_replay.advance(self.training_state())
            if self.window_replay.is_over:
                self.window_replay = None
                assert self.restored is not None
                self.restored.release()

    def forget_restored(self) -> None:
        """Forget the checkpoint that the state came from, and steps that are repeated: the state comes from elsewhere
        now, or another fit begins.
        """
        self.restored = self.window_replay = None

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

    def home_of(self, parameter: nn.Parameter) -> torch.device:
        """Return the device of the moments of a parameter, as `State.home_of`."""
        return home_of_moments(parameter, self.experts.stack_of, on_host=self.updates.on_host)


class StateTransfer:
    """Transfer of a rank's state between worlds. A rank of a pipeline may hold other stages in the next world; until
    everything has arrived it holds its former stages and the new ones.

    Ranks that leave on notice or become spares make `hand_over` with the others first. A recovery then calls, on all
    ranks of the next world and in this order: `names`, `fetch` (only if live ranks have all state), `enter_world`, and
    once the next world is the present one `install` and `move_moments`. What this rank has for others is kept beside
    its parameters from `hand_over` or `fetch` to `move_moments`, because parameters may leave or change their parts.

    Args:
        state: the state of this rank.
        worlds: the present world.
    """

    def __init__(self, state: TrainState, worlds: Worlds) -> None:
        self._state, self._worlds = state, worlds
        self._detached: dict[str, Units] = {}  # what this rank keeps for the next world, by name in inventories
        self._listed: set[str] = set()  # what all ranks had when they handed over, by these names

    def begin(self) -> None:
        """Forget what was kept in a former fit."""
        self._detached, self._listed = {}, set()

    # ------------------------------------------------------------------ inventories

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of all dense state that some ranks only have, and of what this rank has of it: parts of
        stages, and optimizer states.
        """
        stages, shards, cut = self._state.stages, self._state.shards, self._state.parts.cut
        parted = cuts_of(self._state.module)
        everyones, own = set(self._listed), {*shards.owned_states(), *self._detached}
        if shards.shares_weights:
            everyones |= {_part_name(stage, part) for stage in range(stages.num_stages) for part in cut.parts}
            own |= {_part_name(stage, cut.part) for stage in stages.held}
        for name in shards.owners():
            tensors = range(cut.tensors) if name in parted else (None,)
            everyones |= {state_name(name, tensor) for tensor in tensors}
        return tuple(sorted(everyones)), tuple(sorted(own))

    @property
    def moves_optimizers(self) -> bool:
        """True if optimizer states may change hands on the way into the present world: until then ranks lack some."""
        keeps = self._detached and not self._state.parts.with_moments  # else what is kept are parts of parameters
        return bool(self._state.shards.ranks or keeps) and self._worlds.present.size > 1

    # ------------------------------------------------------------------ dense values

    def fetch(self, world: World, live: Collection[int], behind: Collection[int]) -> Units:
        """Transfer the dense values that this rank will hold in a world and lacks, with hyperparameters and scalars of
        optimizers; collective there if a rank may lack any. Values of live ranks stay unchanged.

        Args:
            live: ranks whose values are valid. Those of others are overwritten.
            behind: live ranks that lack hyperparameters only.

        Returns:
            Values for `install`.
        """
        state, stages = self._state, self._state.stages
        if world.rank in live:
            self._detached |= state.shards.owned_states()
        else:
            stages.lose_values()
        if not (state.shards.shares_weights or behind or len(live) < world.size):
            return NO_UNITS
        return self._fetch(stages.ranks_in(range(world.size)), world, world.row_cut.part, behind)

    def _fetch(self, ranks: Sequence[Sequence[int]], world: World, part: Part, behind: Collection[int] = ()) -> Units:
        """
        Args:
            ranks: those that will hold each stage.
            part: the part of its stages that this rank will hold, if ranks share copies.
        """
        stages, parts = self._state.stages, self._state.parts
        held, own = stages.held, wanted_stages(ranks, world.rank)
        self._hold({*held, *own})
        lacking = [stage for stage in own if stage not in held]
        if (averages := self._state.averaging.averages) is not None:
            averages.drop_buffers({name for name in averages.buffers for s in lacking if stages.belongs(name, s)})
        listed = all_gather_json([held, lacking], world)
        # Hyperparameters change after an update, so they come from a rank that is not behind.
        order = sorted(range(world.size), key=lambda rank: (rank not in behind, -rank))
        first = {stage: rank for rank in order for stage in listed[rank][0]}
        targets = defaultdict[int, set[int]](set)
        for rank, (has, lacks) in enumerate(listed):
            for stage in (*lacks, *(has if rank in behind else ())):
                if stage in first:
                    targets[first[stage]].add(rank)
        for source in sorted(targets):
            broadcast_optimizers(self._state.training_state(), targets[source], world, source)
        have = {
            unit: tensors
            for stage in held
            for unit, tensors in self._units(stage).items()
            if first[stage] == world.rank or "buffer" not in tensors  # which ranks may change on their own
        }
        have |= {unit: tensors for unit, tensors in parts.held().items() if stages.stage_of(unit[0]) in held}
        want = {unit: tensors for stage in lacking for unit, tensors in self._units(stage).items()}
        blocks = (unit for unit in parts.blocks(part) if stages.stage_of(unit[0]) in own)
        return reshard({**have, **self._kept(self._detached)}, {**want, **without_memory(blocks)}, world)

    def _units(self, stage: int) -> Units:
        """Return the tensors of a stage that are equal on all of its ranks: dense parameters, with their moments, and
        buffers.
        """
        state, stages, parts = self._state.training_state(), self._state.stages, self._state.parts
        cut, found = parts.ways(), dict[str, dict[str, Tensor]]()
        for name in state.dense:
            if name not in cut and stages.belongs(name, stage):
                found[name] = parts.scopes(state, name)
        for name, buffer in self._state.module.named_buffers():
            if stages.belongs(name, stage):
                average = state.averaged_buffers.get(name)
                found[name] = {"buffer": buffer} | ({} if average is None else {AVERAGE: average})
        blocks = {name: Block.of(next(iter(tensors.values())).shape) for name, tensors in found.items()}
        return {(f"{stage}/{name}", blocks[name]): tensors for name, tensors in found.items()}

    def _hold(self, wanted: Collection[int]) -> None:
        """Hold these stages of a pipeline, and their layers."""
        stages, experts = self._state.stages, self._state.experts
        if stages.num_stages == 1:
            return
        placements: dict[Any, Placement] = dict(zip(stages.layers, stages.placements, strict=True))
        placements |= dict(zip(experts.layers, experts.placements, strict=True))
        # A validation that a fault has interrupted ends in the mode before it, which blocks that come now did not have.
        is_training = self._state.module.training or self._state.trainer.validating
        others = stages.cut.hold(wanted, training=is_training)
        for before, after in others.items():
            mark(after, cut_of(before))
        self._state.replace_parameters(others)
        self._state.set_groups()
        layers = stages.own(stages.layers)
        experts.hold(layers, [placements[layer] for layer in layers])

    def install(self, units: Units, world: World) -> None:
        """Cut the parameters for a world and set the parts that this rank holds there, if ranks share them; others are
        restored next. Not collective.
        """
        self._state.stages.values_arrived()
        self._state.parts.install(units, world)

    # ------------------------------------------------------------------ optimizer states that one rank has for others

    def move_moments(self, sources: Sequence[tuple[str, int]]) -> None:
        """Give optimizer states to the ranks of the present world that have them for others; collective if they move.

        Args:
            sources: (name, rank) of all dense state that a rank has, live or replayed, and others may lack; what no
                rank has is restored later.
        """
        world = self._worlds.present
        ranks, numbers = self._state.stages.sharers(world)
        self._share([name for name, rank in sources if rank == world.rank], world, ranks, numbers)
        self._detached, self._listed = {}, set()

    def gather(self, world: World, most_bytes: int) -> None:
        """Give every rank whole dense parameters after training, unless they take more than this on some rank;
        collective if they are cut.

        Args:
            world: the ranks of this rank's stage.
        """
        self._detached |= self._state.shards.owned_states()
        if self._state.parts.gather(world, most_bytes):
            groups = {name: group for name, group in world.groups.items() if name != "copy"}
            whole = replace(world, shards=(), groups=groups)
            self._share(list(self._detached), whole, whole, self._state.shards.numbers)
        self._detached = {}

    def _share(self, names: Collection[str], world: World, ranks: World, numbers: Sequence[int]) -> None:
        """Transfer optimizer states to the ranks of a world that hold them from now on, if any holds them for others;
        collective.

        Args:
            names: of the states, kept or replayed, that this rank sends.
            ranks, numbers: those that hold the same parameters as this one, and their numbers in the whole world.
        """
        state, shards, have = self._state, self._state.shards, self._kept(names)
        sharding = shards.build(ranks)
        if not sharding.owners and (state.stages.num_stages == 1 or state.parts.with_moments):
            return
        dense = {name: p for name, p in state.module.named_parameters() if p not in state.experts.stack_of}
        homes = {p: optimizer for optimizer in state.optimizers for p in state.parameters_of(optimizer)}
        numbers_of = {optimizer: numbers_among(optimizer) for optimizer in state.optimizers}
        shards.assign(sharding, ranks.rank, numbers)
        for parameter in filter(homes.__contains__, dense.values()):  # a frozen one may be in no optimizer
            homes[parameter].state.pop(parameter, None)
        table, own = state.training_state(), dict[nn.Parameter, list[Unit]]()
        for name, owner in shards.owners().items():
            if owner == ranks.rank and dense[name] in homes:
                places = places_of(dense[name], state.parts.cut.part)
                own[dense[name]] = [(f"{name}/moments", block) for _, block in places]
        arrived = reshard(have, without_memory(unit for units in own.values() for unit in units), world)
        for parameter, units in own.items():
            if units and all(arrived.get(unit) for unit in units):
                states = _joined([arrived[unit] for unit in units], cut_of(parameter))
                home = homes[parameter]
                home.state[parameter] = numbers_of[home] | table.placed(home, parameter, states)
        shards.forget_replay()

    def _kept(self, names: Collection[str]) -> dict[Unit, Mapping[str, Tensor]]:
        """Return optimizer states by name, kept for the next world or replayed for a lost peer."""
        found, replay = dict[Unit, Mapping[str, Tensor]](), self._state.shards.replay
        for name in names:
            if name in self._detached:
                found |= self._detached[name]
            elif replay is not None and name in replay.names:
                states = replay.states(name)
                block = Block.of(states.pop("weight").shape)
                found[f"{name}/moments", block] = states
        return found

    # ------------------------------------------------------------------ stages and experts

    def enter_world(self, world: World, placements: Sequence[Placement], held: BoolArray) -> None:
        """Move experts to the ranks of a world's placements, and drop the stages that this rank will not hold;
        collective there.

        Args:
            placements: one for each layer of all stages, over all ranks.
            held: bool [L, E, N], what each rank still holds.
        """
        stages = self._state.stages
        among, _ = stages.sharers(world)
        self._move_experts(world, placements, held, stages.ranks_in(range(world.size)), among)

    def _move_experts(
        self,
        world: World,
        placements: Sequence[Placement],
        held: BoolArray,
        ranks: Sequence[Sequence[int]],
        among: World,
    ) -> None:
        """Move experts to the ranks that will hold each stage, and dispatch the layers here among some of them."""
        stages, experts, optimizers = self._state.stages, self._state.experts, self._state.optimizers
        own = wanted_stages(ranks, world.rank)
        self._hold({*stages.held, *own})
        here = stages.numbers
        at = {number: index for index, number in enumerate(here)}  # sources are chosen with a view to all layers
        everyones = plan_migration(held, placements, world.nodes)
        transfers = [replace(way, layer=at[way.layer]) for way in everyones if way.layer in at]
        experts.enter_world(world, [placements[number] for number in here], held[here], optimizers, transfers)
        self._hold(set(own))
        stages.assign(ranks, placements)
        experts.dispatch_among(stages.own(stages.layers), stages.own(stages.placements), among)

    # ------------------------------------------------------------------ ranks that leave on notice

    def hand_over(self, staying: Sequence[int], world: World, nodes: Sequence[str], *, min_replicas: int) -> None:
        """Transfer the state that only leaving ranks hold to ranks that stay, in their present world, and in a pipeline
        the stages that these will hold; collective.

        Args:
            nodes: of all ranks.
            min_replicas: nodes that shall hold each expert.
        """
        state, stages = self._state, self._state.stages
        self._hand_over_dense(staying, world)
        ranks = stages.ranks_in(staying)
        placements = [stack.placement for stack in stages.stacks(state.experts)]
        held = held_states(placements) if placements else np.zeros((0, 0, world.size), dtype=np.bool_)
        repair = repair_stages(
            held,
            stages.layers_of(ranks),
            nodes=nodes,
            min_replicas=min_replicas,
            max_slots=state.experts.options.slots,
        )
        if stages.num_stages == 1:
            self._move_experts(world, repair.placements, held, ranks, world)
            return
        state.parts.leave_world()
        units = self._fetch(ranks, world, Part())
        agree(world)
        peers = next((own for own in ranks if world.rank in own), [world.rank])  # in the next world
        offline = World.offline(peers.index(world.rank), len(peers), world.device)
        self._move_experts(world, repair.placements, held, ranks, offline)
        self.install(units, World.offline(world.rank, world.size, world.device))  # where nothing is cut

    def _hand_over_dense(self, staying: Sequence[int], world: World) -> None:
        """Transfer the dense state that only leaving ranks have to ranks that stay; collective."""
        state, shards = self._state, self._state.shards
        own, is_pipeline = shards.owned_states(), state.stages.num_stages > 1
        if is_pipeline:
            self._detached |= own
        elif state.parts.is_enabled:
            own[_part_name(0, state.parts.cut.part)] = state.parts.held()
        listed = all_gather_json({name: [unit_row(unit) for unit in units] for name, units in own.items()}, world)
        kept = {name for rank in staying for name in listed[rank]}
        lost = sorted({name: rows for one in listed for name, rows in one.items() if name not in kept}.items())
        next_one = {name: staying[number % len(staying)] for number, (name, _) in enumerate(lost)}
        coming = {name: [unit_of(row) for row in rows] for name, rows in lost if next_one[name] == world.rank}
        have = {unit: tensors for name in own.keys() - kept for unit, tensors in own[name].items()}
        arrived = reshard(have, without_memory(unit for units in coming.values() for unit in units), world)
        self._detached |= {name: {unit: arrived[unit] for unit in units} for name, units in coming.items()}
        if is_pipeline:
            self._listed = {name for one in listed for name in one}
            shards.assign(ReplicatedDense((), world), 0, ())  # all states are kept here: parameters may leave now


def _joined(blocks: Sequence[Mapping[str, Tensor]], cut: TensorCut | None) -> dict[str, Tensor]:
    """Return the states of a part of a parameter from those of its blocks."""
    if cut is None or len(blocks) == 1:
        return dict(blocks[0])
    return {
        scope: torch.cat([states[scope] for states in blocks], cut.dim) if value.ndim else value
        for scope, value in blocks[0].items()
    }


def _part_name(stage: int, part: Part) -> str:
    """Return the name of a part of a stage in inventories."""
    return f"stage {stage}, {part.name}"


def wanted_stages(ranks: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Return the stages that a rank holds.

    Args:
        ranks: those that hold each stage.
    """
    return [stage for stage, own in enumerate(ranks) if rank in own]


def _groups_of(optimizers: Sequence[Optimizer]) -> list[list[list[nn.Parameter]]]:
    return [[list(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
