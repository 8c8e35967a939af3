"""Dense parameters that ranks share, in parts by rows and by tensor index, and the owners of their optimizer states.

Under mesh.tp a model's `tensor_parallel_plan` says how its layers are cut: each rank of a tensor group stores, updates
and computes with a part. Parameters stay the same objects with a part of their values, so optimizers and other code see
plain tensors, and fully_shard may shard their rows. Everything else is on every rank of a tensor group, sees some
positions of each sequence or all, and gets the sum of the gradients of all ranks.

In a new world nothing is changed before everything has arrived: a fault during the transfer leaves the parts of the
former world unchanged. Parts are transferred block by block, so no rank ever has the values of a whole model.
A rank may also repeat the optimizer updates of a peer on its host, and so hold the optimizer states of the peer's dense
parameters (REFT's AOR).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.checkpoint.optimizer_shards import AdamWReplay, verify_replays
from moe_lightning.compat import private_lightning
from moe_lightning.compat.fsdp import drop_accumulated, resting_parameters
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, all_reduce_, broadcast_, in_buckets
from moe_lightning.parallel.mesh import Part, RowCut, TensorCut
from moe_lightning.parallel.tensor import (
    Embedding,
    Parted,
    PartedForward,
    TensorRanks,
    planned_cuts,
    planned_styles,
    undo_parts,
)
from moe_lightning.state.pieces import Block
from moe_lightning.state.table import State
from moe_lightning.state.tensors import (
    blocks_of,
    cut_of,
    cuts_of,
    is_sharded,
    local,
    mark,
    part_of_whole,
    preserved_marks,
    replacement,
    whole_shape,
)
from moe_lightning.state.transfer import Unit, Units, install, reshard, without_memory
from moe_lightning.strategies.checks import identical_buffers
from moe_lightning.strategies.dense_sharding import DENSE_SHARDINGS, DenseSharding, ReplicatedDense, has_owners
from moe_lightning.strategies.fsdp import (
    is_fully_sharded,
    materialise,
    replace_parameters,
    reshard_units,
    shard_dense,
    undo_shard,
)
from moe_lightning.strategies.worlds import Worlds

if TYPE_CHECKING:
    from moe_lightning.strategies.train_state import TrainState


def has_index(parameter: nn.Parameter) -> bool:
    """True if a parameter is cut by tensor index."""
    cut = cut_of(parameter)
    return cut is not None and bool(cut.sections)


class DenseParts:
    """Dense parameters of a rank's module that are sharded, and their transfer between worlds.

    Args:
        state: of the rank.
        in_rows: True if rows are sharded over the ranks.
        tensors: parts of each layer by tensor index, if ranks are a multiple of so many; 1: layers are not cut.
        with_moments: True if the holder of a part has its optimizer states too.

    Attributes:
        with_moments: as given.
        cut: into which parts the module is cut and which is here, and the ranks that have each, of the world for which
            it is cut: on the way into another world still the former one.
    """

    def __init__(self, state: TrainState, *, in_rows: bool, tensors: int, with_moments: bool) -> None:
        self._state, self._in_rows, self._tensors, self.with_moments = state, in_rows, tensors, with_moments
        self.cut = RowCut.whole(1)
        self._buffers: list[str] = []
        self._scalars: list[nn.Parameter] = []
        self._sums = 0  # of gradients, in the present world

    @property
    def is_enabled(self) -> bool:
        """True if ranks share copies of the dense parameters, given enough ranks."""
        return self._in_rows or self._tensors > 1

    @property
    def is_sharded(self) -> bool:
        """True if this rank holds parts of parameters only."""
        return any(is_sharded(parameter) for parameter in self._state.module.parameters())

    @property
    def is_in_rows(self) -> bool:
        """True if this rank holds rows of parameters."""
        return self._in_rows and is_fully_sharded(self._state.module)

    @property
    def layers_are_cut(self) -> bool:
        """True if this rank computes parts of layers."""
        return any(has_index(parameter) for parameter in self._state.module.parameters())

    def ways(self) -> dict[str, TensorCut]:
        """Return the cut of each parameter by name, present or planned."""
        dense = self._state.training_state().dense
        cuts = self._layer_cuts()
        if not self._in_rows:
            return {name: cuts[parameter] for name, parameter in dense.items() if parameter in cuts}
        return {
            name: cuts.get(parameter) or TensorCut(shape=tuple(whole_shape(parameter)))
            for name, parameter in dense.items()
            if parameter.ndim
        }

    def begin_run(self, world: World) -> None:
        """Set the world for which the module is cut: by an earlier training, or in this run. Not collective."""
        self.cut = world.row_cut

    # ------------------------------------------------------------------ layers cut by tensor index

    def begin_layers(self, world: World) -> None:
        """Broadcast rank 0's values and cut them to this rank's part; collective. A module that an earlier training has
        left in parts keeps its own.

        Raises:
            ConfigurationError: see `_layer_cuts`.
        """
        if not cuts_of(self._state.module):
            for parameter, cut in self._layer_cuts().items():
                if not parameter.is_meta:  # as those of other stages are
                    broadcast_(parameter.data, 0, world)
                    own = part_of_whole(parameter.data, cut, replace(self.cut.part, row=0, rows=1))
                    parameter.data = own.clone(memory_format=torch.contiguous_format)
                mark(parameter, cut)
        self._cut_layers(world)

    def _layer_cuts(self) -> dict[nn.Parameter, TensorCut]:
        """Return the cut of each parameter by tensor index, present or planned.

        Raises:
            ConfigurationError: a module without a plan, or layers that cannot be cut equally.
        """
        if self._tensors == 1:
            return {}
        module = self._state.module
        with self._state.stages.whole_module():
            cuts = {p: cut for p in module.parameters() if (cut := cut_of(p)) is not None and cut.sections}
            return cuts or planned_cuts(module, self._tensors)

    def _cut_layers(self, world: World) -> None:
        """Compute this rank's parts with the ranks of a world; or whole layers, if it has those."""
        self._undo_layers()
        if not self.layers_are_cut:
            return
        module, stages = self._state.module, self._state.stages
        ranks = TensorRanks(world.groups["tp"], self.cut.part.tensor, self._tensors)
        with stages.whole_module():  # plans are for whole models
            for name, style in planned_styles(module, self._tensors):
                part = module.get_submodule(name)
                if style == Parted() and stages.transform_hidden(part, partial(ranks.own, dim=1)):
                    continue  # the hidden states of other stages are parts, too
                if not (isinstance(style, Embedding) and part.weight.is_meta):  # else zeros, which are not summed
                    PartedForward(part, style, ranks)

    def _undo_layers(self) -> None:
        """Restore the forward methods of layers; parameters stay parts."""
        if self._tensors > 1:
            with self._state.stages.whole_module():
                undo_parts(self._state.module)

    @torch.no_grad()
    def _sum_parts(self, world: World) -> None:
        """Sum the gradients that are summed nowhere else: those of parts over the ranks that hold them, or where
        torch's fully_shard does that, those of the rest over the ranks of a tensor group.
        """
        in_rows = "shard" in world.groups
        group = world.group("tp" if in_rows else "copy")
        if group is None:
            return
        module, stack_of = self._state.module, self._state.experts.stack_of
        dense = [p for p in module.parameters() if p not in stack_of and p.ndim and has_index(p) != in_rows]
        reduce = partial(dist.all_reduce, group=group)
        if in_rows:
            in_buckets([local(p.grad) for p in dense if p.grad is not None], reduce)
        else:  # other slices of the data may have used other layers
            sum_gradients(dense, reduce, world.device)

    # ------------------------------------------------------------------ a world that stays

    def begin(self, world: World) -> None:
        """Shard the rows of rank 0's parameters, or of this rank's parts by tensor index; collective. A module that is
        sharded already stays as it is.
        """
        private_lightning.evaluate_without_inference_mode(self._state.module.trainer)
        self._sums = 0
        if self.is_in_rows:
            return
        dense = self._state.training_state().dense.values()
        replicated = (parameter.detach() for parameter in dense if not is_sharded(parameter))
        for tensor in (*replicated, *self._state.module.buffers()):
            broadcast_(tensor, 0, world)
        self._shard(world)
        self._mark_absent(self._layer_cuts())

    def _shard(self, world: World) -> None:
        module, stack_of = self._state.module, self._state.experts.stack_of
        with preserved_marks(module):
            shard_dense(module, stack_of, world)
        alike = set(identical_buffers(module))
        self._buffers = [name for name, _ in module.named_buffers() if name not in alike]
        dense = (p for p in module.parameters() if p not in stack_of)
        self._scalars = [p for p in dense if not p.ndim]

    def _mark_absent(self, cuts: Mapping[nn.Parameter, TensorCut]) -> None:
        """Mark parameters of other stages, which have no values here, as cut there.

        Args:
            cuts: by tensor index.
        """
        for parameter in self._state.stages.cut.absent_parameters():
            if parameter.ndim:
                rows = TensorCut(shape=tuple(parameter.shape)) if self.is_in_rows else None
                mark(parameter, cuts.get(parameter, rows))

    @torch.no_grad()
    def gather(self, world: World, most_bytes: int) -> bool:
        """Give every rank whole parameters, unless they take more than this on some rank; collective if they are cut.
        True if this was done.
        """
        if not self.is_sharded:
            return False
        self._state.before_reading()
        if not _fits_every_rank(self._state.training_state().dense.values(), most_bytes, world):
            return False
        whole = reshard(self.held(), without_memory(self.blocks(Part())), world)
        self.leave_world()
        self.install(whole, World.single(world.device))
        with self._state.stages.whole_module():
            for parameter in self._state.module.parameters():
                mark(parameter, None)
        return True

    # ------------------------------------------------------------------ a step

    def broadcast_buffers(self, world: World) -> None:
        """Broadcast rank 0's buffers before a forward pass, as under DDP, but those that all ranks compute alike;
        collective.
        """
        if self.is_in_rows and self._buffers:
            for name, buffer in self._state.module.named_buffers():  # a user may have set one to None
                if name in self._buffers:
                    broadcast_(buffer, 0, world)

    @contextmanager
    def summing_later(self) -> Generator[None, None, None]:
        """Leave the sum of gradients over ranks to a later backward pass, inside."""
        if not self.is_in_rows:
            yield
            return
        module: Any = self._state.module
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if self.is_in_rows:  # a fault may have undone it
                module.set_requires_gradient_sync(True)

    def drop_unsummed(self) -> None:
        """Drop the gradients of a step that was left before its last backward pass, in which ranks sum them."""
        if self.is_in_rows:
            drop_accumulated(self._state.module)

    def resting_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the module's parameters as they are between steps, also inside of a step."""
        return resting_parameters(self._state.module) if self.is_in_rows else self._state.module.parameters()

    def sum_rest(self, world: World) -> None:
        """Sum gradients over ranks that the backward pass has not summed; collective.

        Raises:
            ConfigurationError: on every rank; gradients of different parameters were summed.
        """
        if self.is_in_rows:
            self._require_same_use(world)
            sum_scalars([p for p in self._scalars if p.requires_grad], world)
        if self._tensors > 1:
            self._sum_parts(world)

    def _require_same_use(self, world: World) -> None:
        """Compare, for the first sums and then more and more rarely, whose gradients the ranks have summed: torch sums
        those of a unit by their places.
        """
        self._sums += 1
        if self._sums & (self._sums - 1):
            return
        stack_of = self._state.experts.stack_of
        dense = [(name, p) for name, p in self._state.module.named_parameters() if p not in stack_of and p.ndim]
        uses = all_gather_json("".join(str(int(p.grad is not None)) for _, p in dense), world)
        for rank, others in enumerate(uses):
            for (name, _), first, other in zip(dense, uses[0], others, strict=True):
                if first != other:
                    user, idle = (0, rank) if first > other else (rank, 0)
                    raise ConfigurationError(
                        f"{name} got a gradient on rank {user} and none on rank {idle}, and dense=fsdp and hsdp sum "
                        "the gradients that ranks have by their places: use dense=ddp or zero1 with "
                        "find_unused_parameters=True, or compute every layer on every rank"
                    )

    def reshard(self) -> None:
        """Reshard gathered parameters after a forward pass without a backward pass."""
        if self.is_in_rows:
            reshard_units(self._state.module)

    def abort_step(self, world: World) -> None:
        """Restore rows as between steps when the Trainer stops because of an error. Not collective."""
        if self.is_in_rows and self._state.module.trainer.interrupted:
            self.leave_world()
            dense = self._state.training_state().dense
            if all(is_sharded(dense[name]) for name in self.ways()):  # a hook that failed may have replaced some
                self.install(self.held(), world)

    # ------------------------------------------------------------------ from world to world

    def leave_world(self) -> None:
        """Leave a world that has ended: parts stay, what computes with those of other ranks is removed."""
        self._undo_layers()
        if self.is_in_rows:
            undo_shard(self._state.module)

    def blocks(self, part: Part) -> list[Unit]:
        """Return the blocks of a part of the parameters that are, or can be, cut."""
        return [(name, block) for name, cut in self.ways().items() for _, block in blocks_of(cut, part)]

    def held(self) -> dict[Unit, dict[str, Tensor]]:
        """Return those of this rank, with their moments if the holder of a part has these."""
        state = self._state.training_state()
        return {
            (name, block): {scope: tensor[here] for scope, tensor in self.scopes(state, name).items()}
            for name, cut in self.ways().items()
            for here, block in blocks_of(cut, self.cut.part)
        }

    def scopes(self, state: State, name: str) -> dict[str, Tensor]:
        """Return the values of a parameter here, and its moments if all who have a parameter have these."""
        parameter = state.dense[name]
        return {"weight": local(parameter.detach())} | (state.moments(parameter) if self.with_moments else {})

    @torch.no_grad()
    def install(self, units: Units, world: World) -> None:
        """Cut the parameters for a world, if its ranks share them, and set these values; others are restored next. Not
        collective.
        """
        self.cut = world.row_cut
        if not self.is_enabled:
            return
        state, part = self._state.training_state(), self.cut.part
        ways, cuts = self.ways(), self._layer_cuts()
        before = {name: state.dense[name] for name in ways}
        moments = {name: state.moments(p) if self.with_moments else {} for name, p in before.items()}
        after = self._anew(before, ways, world) if self._in_rows else before
        for name, cut in ways.items():
            parameter = after[name]
            if not self._in_rows:
                parameter.data = parameter.data.new_empty(cut.shape_of(part))
            mark(parameter, cut if part.tensors > 1 else None)
            scopes = {"weight": local(parameter.detach())}
            for scope, tensor in moments[name].items():
                scopes[scope] = self._state.state_of(parameter)[scope] = tensor.new_empty(scopes["weight"].shape)
            for here, block in blocks_of(cut, part):
                values = units.get((name, block), {})
                install((tensor[here], values[scope]) for scope, tensor in scopes.items() if values)
        self._mark_absent(cuts if part.tensors > 1 else {})
        self._cut_layers(world)

    def _anew(
        self, before: Mapping[str, nn.Parameter], ways: Mapping[str, TensorCut], world: World
    ) -> dict[str, nn.Parameter]:
        """Replace parameters by new ones without values, in rows if the world has ranks for that."""
        module, part = self._state.module, replace(self.cut.part, row=0, rows=1)
        empty = {
            p: replacement(p, torch.empty(ways[name].shape_of(part), dtype=p.dtype, device="meta"))
            for name, p in before.items()
        }
        replace_parameters(module, empty)
        if "shard" in world.groups:
            self._shard(world)
        else:
            materialise(module, world.device)
        after = dict(module.named_parameters())
        self._state.replace_parameters({old: after[name] for name, old in before.items()})
        return after


def _fits_every_rank(parameters: Iterable[nn.Parameter], most_bytes: int, world: World) -> bool:
    """True if every rank may keep whole parameters after training, else rank 0 warns; collective.

    Args:
        most_bytes: that this rank may keep.
    """
    nbytes = sum(whole_shape(parameter).numel() * parameter.element_size() for parameter in parameters)
    fits: bool = nbytes <= min(all_gather_json(most_bytes, world))
    if not fits:
        rank_zero_warn(
            "training has ended, and the dense parameters are larger than what a rank may keep of them: every rank has "
            "its part only, so continue from a checkpoint"
        )
    return fits


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter], reduce: Callable[[Tensor], object], device: torch.device) -> None:
    """Sum gradients over ranks; a gradient that no rank has stays None. Collective.

    Args:
        reduce: sums a tensor over the ranks, in place.
    """
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    reduce(has)
    found = [p for p, count in zip(parameters, has.tolist(), strict=True) if count]
    for parameter in found:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    in_buckets([local(p.grad) for p in found if p.grad is not None], reduce)


@torch.no_grad()
def sum_scalars(scalars: Sequence[nn.Parameter], world: World) -> None:
    """Sum the gradients of scalar parameters, which cannot be sharded while others are; collective."""
    if not scalars:
        return
    found = [[p.grad, torch.ones_like(p)] if p.grad is not None else [torch.zeros_like(p)] * 2 for p in scalars]
    numbers = [[float(value) for value in pair] for pair in found]
    sums = torch.tensor(numbers, dtype=torch.float64, device=world.device)
    all_reduce_(sums, world)
    for parameter, (total, count) in zip(scalars, sums, strict=True):
        if count > 0:
            parameter.grad = total.to(parameter.dtype).reshape(parameter.shape)


class DenseShards:
    """Optimizer states of dense parameters that a rank has for others, and groups of the optimizers that fit them.

    Args:
        state: of the rank.
        parts: its dense parameters that ranks share.
        worlds: the present world.
        kind: sharding of dense parameters and their optimizer states, a name of DENSE_SHARDINGS.

    Attributes:
        kind: as given.
        numbers: in the whole world, of the ranks that may have them.
        replay: copy of another rank's optimizer states; None without one.
    """

    def __init__(self, state: TrainState, parts: DenseParts, worlds: Worlds, kind: str) -> None:
        self._state, self._parts, self._worlds, self.kind = state, parts, worlds, kind
        self._sharding: DenseSharding = ReplicatedDense((), World.single())
        self._rank = 0
        self.numbers: Sequence[int] = ()
        self._has_whole_groups = False
        self.replay: AdamWReplay | None = None

    @property
    def shares_weights(self) -> bool:
        """True if ranks share copies of the dense parameters, given enough ranks."""
        return self._state.stages.num_stages > 1 or self._parts.is_enabled

    @property
    def shares_optimizers(self) -> bool:
        """True if one rank has the optimizer state of each dense parameter for all."""
        return bool(self._sharding.owners) and self._worlds.present.size > 1

    @property
    def unowned(self) -> list[nn.Parameter]:
        """Dense parameters whose updates another rank computes."""
        return [parameter for parameter, owner in self._sharding.owners.items() if owner != self._rank]

    @property
    def ranks(self) -> dict[nn.Parameter, int]:
        """The rank that has the optimizer state of each dense parameter; empty if all have all."""
        return {parameter: self.numbers[owner] for parameter, owner in self._sharding.owners.items()}

    def begin(self) -> None:
        """Reduce each new optimizer of a fit to this rank's share of the dense parameters."""
        self.forget_replay()  # of a former fit
        sharers, numbers = self._state.stages.sharers(self._worlds.present)
        self.assign(self.build(sharers), sharers.rank, numbers)

    def broadcast_updates(self, optimizer: Optimizer) -> None:
        """Broadcast the updates that one rank has computed for all of an optimizer's parameters; collective."""
        if self._sharding.owners:
            self._sharding.spread_updates(self._state.parameters_of(optimizer))

    def build(self, ranks: World) -> DenseSharding:
        """Build the sharding of the optimizers' dense parameters, frozen now or not, among the ranks that hold them.

        Raises:
            ConfigurationError: one with owners that says that it has none.
        """
        state = self._state
        updated = {p for optimizer in state.optimizers for p in state.parameters_of(optimizer)}
        dense = [p for p in state.module.parameters() if p in updated and p not in state.experts.stack_of]
        leaving = self._worlds.spares if state.stages.num_stages == 1 else 0  # they hold nothing for others
        staying = replace(ranks, size=ranks.size - leaving)
        sharding: DenseSharding = DENSE_SHARDINGS.make(self.kind, dense, staying)
        if sharding.owners and not has_owners(self.kind):  # a recovery would leave the states behind
            raise ConfigurationError(
                f"dense={self.kind} gives optimizer states to single ranks and does not say so: set has_owners = True "
                "on its class"
            )
        return sharding

    def assign(self, sharding: DenseSharding, rank: int, numbers: Sequence[int]) -> None:
        """Reduce each optimizer to this rank's share of the dense parameters.

        Args:
            rank: this one, among those that the sharding counts: of their world, which a recovery leaves before this
                rank has the states that it owns in the next one.
            numbers: in the whole world, of the ranks that the sharding counts.
        """
        self._sharding, self._rank, self.numbers = sharding, rank, numbers
        self._state.set_groups(own=True)

    @contextmanager
    def whole_groups(self) -> Generator[None, None, None]:
        """Let the optimizers' groups inside, except in updates, also have the parameters that other ranks update: hooks
        change the gradients of what is in them, and steps of manual optimization clear and freeze it.
        """
        if self._has_whole_groups or not self.shares_optimizers:
            yield
            return
        self._has_whole_groups = True
        self._state.set_groups()
        try:
            yield
        finally:
            self._has_whole_groups = False
            self._state.set_groups(own=True)

    @contextmanager
    def own_groups(self) -> Generator[None, None, None]:
        """Let the optimizers' groups inside of `whole_groups` have what this rank updates alone."""
        if not self._has_whole_groups:
            yield
            return
        self._state.set_groups(own=True)
        try:
            yield
        finally:
            self._state.set_groups()

    # ------------------------------------------------------------------ updates of a peer

    def replay_peer(self, peer: int) -> None:
        """Repeat a peer's updates from now on.

        Raises:
            ConfigurationError: no sharding, several optimizers, or one whose updates cannot be repeated exactly.
        """
        owners, state, module = self.owners(), self._state.training_state(), self._state.module
        if state.averages is not None:
            raise ConfigurationError(
                "optimizer_replay repeats a peer's moments and not its averages: use optimizer_replay=false, and "
                "protection=arc for what only one rank keeps, or drop the averages"
            )
        if not owners or len(state.optimizers) != 1:
            raise ConfigurationError("updates of a peer can be repeated for one optimizer under dense=zero1 only")
        names = {id(p): name for name, p in module.named_parameters()}
        optimizer, groups = state.optimizers[0]
        own = [{names[id(p)]: p.detach() for p in group if owners.get(names[id(p)]) == peer} for group in groups]
        self.replay = AdamWReplay(optimizer, own, version=module.trainer.global_step)

    def forget_replay(self) -> None:
        """Repeat no updates: the peer is one of a former world."""
        self.replay = None

    def replay_update(self, optimizer: Optimizer) -> None:
        """Repeat the update that the peer is about to make, if there is one."""
        if self.replay is not None:
            parameters = self._state.module.named_parameters()
            self.replay.replay({name: p.grad for name, p in parameters if p.grad is not None}, optimizer)

    def verify_replay(self) -> int:
        """Compare every repeated shard with its owner, and return the number of corrections. Collective."""
        module, world = self._state.module, self._worlds.present
        version = module.trainer.global_step
        if self.replay is None or version == 0:  # at first there are no states yet, and the weights are alike
            return 0
        owners, optimizer = self.owners(), self._state.optimizers[0]
        owned = {
            name: {"weight": p.detach(), **optimizer.state[p]}
            for name, p in module.named_parameters()
            if owners.get(name) == world.rank and p in optimizer.state
        }
        return sum(len(names) for names in verify_replays(self.replay, owned, version, world).values())

    # ------------------------------------------------------------------ what this rank has for others

    def owners(self) -> dict[str, int]:
        """Return the rank that has the optimizer state of each dense parameter, by name; empty without sharding."""
        names = {parameter: name for name, parameter in self._state.module.named_parameters()}
        owners = self._sharding.owners.items()
        return {names[parameter]: rank for parameter, rank in owners if parameter in names}  # others have left

    def owned_states(self) -> dict[str, Units]:
        """Return the optimizer states that this rank has for others, by their names in inventories."""
        owners, found = self.owners(), dict[str, Units]()
        if not owners:
            return found
        part, dense = self._parts.cut.part, dict(self._state.module.named_parameters())
        for name, owner in owners.items():
            if owner == self._rank:
                tensor = part.tensor if is_sharded(dense[name]) else None
                found[state_name(name, tensor)] = {
                    (f"{name}/moments", block): {
                        scope: value[here] if value.shape == dense[name].shape else value
                        for scope, value in self._state.state_of(dense[name]).items()
                        if isinstance(value, Tensor)
                    }
                    for here, block in places_of(dense[name], part)
                }
        return found


def places_of(parameter: nn.Parameter, part: Part) -> list[tuple[tuple[slice, ...], Block]]:
    """Return the blocks of a parameter that a rank with a part of the tensor indices has, see `blocks_of`."""
    cut = cut_of(parameter)
    if cut is None:
        return [((), Block.of(parameter.shape))]
    return list(blocks_of(cut, replace(part, row=0, rows=1)))


def state_name(name: str, tensor: int | None) -> str:
    """Return the name of the optimizer state of a parameter, or of one of its parts by tensor index, in inventories."""
    return name if tensor is None else f"{name}, part {tensor}"
