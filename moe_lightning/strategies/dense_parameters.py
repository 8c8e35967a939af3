"""Dense parameters of which ranks hold parts: rows, tensor parts, optimizer states, and their transfer.

Who keeps dense parameters and their optimizer states: every rank all of them (DDP); the states one rank each, which
updates the parameter and hands the new values to the others (ZeRO-1); or all of it in rows over the ranks (FSDP), and
over each of several groups of ranks (hybrid FSDP).

Parts of dense parameters and their optimizer states on their way from one cut to another.

Optimizer states that one rank keeps for all that hold the same values (ZeRO-1), as they travel: in units, each the
state of a parameter, or where layers are cut by tensor index, of one of its parts.

Dense parameters of which each rank of a tensor group keeps, updates and computes with a part (mesh.tp).

A model says by `tensor_parallel_plan` how its layers are cut. Parameters stay the objects that they are, with a part of
their values, so that optimizers and other code see plain tensors; fully_shard may deal the rows of these out. What is
not cut is on every rank of a tensor group, sees some positions of each sequence or everything, and gets the sum of the
gradients of all ranks.

The dense parameters of a run of which ranks have parts, from world to world: rows (`fully_sharded.py`), parts by
tensor index (`tensor_parts.py`), or rows of these.

In a new world nothing is changed before everything has arrived: a fault on the way leaves the parts of the former world
as they were. Parts travel block by block, so no rank ever has the values of a whole model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.checkpoint.optimizer_shards import States
from moe_lightning.checkpoint.sharding import longest_processing_time
from moe_lightning.compat import private_lightning
from moe_lightning.compat.fsdp import end_backward
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import pack, packed_bytes, unpack
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, all_reduce_, broadcast_
from moe_lightning.parallel.exchange import PeerBuffer, exchange_buffers
from moe_lightning.parallel.mesh import Groups, MeshShape, Part, RowCut, TensorCut, hybrid_shard_size, shard_groups
from moe_lightning.parallel.tensor import Embedding, Parted, PartedForward, Shares, Style, TensorRanks, undo_parts
from moe_lightning.registry import Registry
from moe_lightning.state.table import State
from moe_lightning.state.tensors import (
    blocks_of,
    cut_of,
    cuts_of,
    is_cut,
    joined,
    local,
    mark,
    part_of_whole,
    whole_shape,
)
from moe_lightning.strategies.checks import cut_parameters, identical_buffers
from moe_lightning.strategies.fsdp import (
    is_sharded,
    let_go_of_gathered,
    materialise,
    replace_parameters,
    shard_dense,
    sum_gradients,
    undo_shard,
)
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.stages import StageCut, StageState


class DenseSharding(Protocol):
    """Shares the optimizer states of dense parameters out; made anew for every world. `DenseOptimizerShards` has all of
    it: one that deals the parameters out otherwise sets `owners`.

    Attributes:
        owners: the rank that keeps the state of each parameter, alike on all ranks that hold the same values of it;
            empty where all keep all.
    """

    owners: Mapping[nn.Parameter, int]

    def shard(self, optimizer: Optimizer) -> None:
        """Take the parameters of other ranks out of the optimizer's groups."""

    def spread_updates(self, updated: Collection[nn.Parameter]) -> None:
        """Bring the values that a step gave to these parameters to every rank; collective."""


class DenseFactory(Protocol):
    """Makes a `DenseSharding`. One that has `cut_size(nodes, wanted)`, as FullySharded has, also cuts the parameters by
    rows over groups of so many ranks, whatever it does with optimizers.
    """

    def __call__(self, parameters: Sequence[nn.Parameter], world: World, /) -> DenseSharding:
        """Of dense parameters, in an order that all ranks share."""


def dense_sharding_name(dense: str, *, zero1: bool, shard_size: int | None) -> str:
    """What a user chose: `zero1` is short for dense="zero1".

    Raises:
        ConfigurationError: two choices, or an unknown one, or a `shard_size` that it has no use for.
    """
    if zero1 and dense not in ("ddp", "zero1"):
        raise ConfigurationError(f"zero1=true is short for dense=zero1, but dense={dense!r}: give one of them")
    chosen = "zero1" if zero1 else dense
    factory = DENSE_SHARDINGS.find(chosen)
    if shard_size is not None and not hasattr(factory, "cut_size"):
        raise ConfigurationError(f"shard_size={shard_size} is for dense=hsdp, not dense={chosen}: drop one of them")
    return chosen


class ReplicatedDense:
    """Every rank keeps every state, and makes every update (DDP)."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, /) -> None:
        self.owners: Mapping[nn.Parameter, int] = {}

    def shard(self, optimizer: Optimizer) -> None:
        """Nothing to do."""

    def spread_updates(self, updated: Collection[nn.Parameter]) -> None:
        """Nothing to do."""


class FullySharded(ReplicatedDense):
    """Each rank keeps some rows of every parameter, with their gradients and states; one copy in all (FSDP)."""

    @staticmethod
    def cut_size(nodes: Sequence[object], wanted: int | None) -> int:
        """Ranks that share one copy.

        Args:
            nodes: of each rank.
            wanted: the user's `shard_size`.

        Raises:
            ConfigurationError: a wish that only hsdp can fulfil.
        """
        if wanted is not None and wanted < len(nodes):
            raise ConfigurationError(
                f"shard_size={wanted} asks for several copies, and dense=fsdp keeps one over all {len(nodes)} ranks: "
                "use dense=hsdp"
            )
        return len(nodes)


class HybridSharded(ReplicatedDense):
    """As FullySharded, in several copies, so that a lost rank's rows are elsewhere (hybrid FSDP)."""

    cut_size = staticmethod(hybrid_shard_size)


class DenseOptimizerShards:
    """Leaves each optimizer only the dense parameters that this rank owns; expert parameters stay with their holders.

    Args:
        parameters: dense parameters in an order that all ranks share.
        world: the ranks.

    Attributes:
        owners: rank of each parameter, one of those that hold the same values; the largest parameters are dealt first
            (LPT over elements).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, /) -> None:
        self._world = world
        self._twins = world.row_cut.holders[world.row_cut.index]  # of the same parts
        self.owners: Mapping[nn.Parameter, int] = {}
        for is_part in (False, True):
            chosen = [p for p in parameters if is_cut(p) == is_part]
            holders = self._twins if is_part else range(world.size)
            places = longest_processing_time([p.numel() for p in chosen], len(holders))
            self.owners |= {p: holders[place] for p, place in zip(chosen, places, strict=True)}

    def shard(self, optimizer: Optimizer) -> None:
        """Take the parameters of other ranks out of the optimizer's groups."""
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if self.owners.get(p, self._world.rank) == self._world.rank]

    @torch.no_grad()
    def spread_updates(self, updated: Collection[nn.Parameter]) -> None:
        """After a step of these parameters: every rank gets the owner's values; gradients that no optimizer of this
        rank will clear are dropped.
        """
        chosen = set(updated) if self._world.is_connected else set()
        for is_part in (False, True):
            parameters = [p for p in self.owners if p in chosen and is_cut(p) == is_part]
            if is_part and self._world.copy_group is None:
                continue  # nobody else has them
            for dtype, owner in product(sorted({p.dtype for p in parameters}, key=str), range(self._world.size)):
                mine = [p for p in parameters if self.owners[p] == owner and p.dtype == dtype]
                if not mine:
                    continue
                flat = torch.cat([p.detach().reshape(-1) for p in mine])
                source, group = (sorted(self._twins).index(owner), self._world.copy_group) if is_part else (owner, None)
                broadcast_(flat, source, self._world, group)
                if owner != self._world.rank:
                    for parameter, values in zip(mine, torch.split(flat, [p.numel() for p in mine]), strict=True):
                        parameter.copy_(values.view_as(parameter))
                        parameter.grad = None


DENSE_SHARDINGS: Registry[DenseFactory] = Registry(
    "dense",
    DenseFactory,
    {"ddp": ReplicatedDense, "zero1": DenseOptimizerShards, "fsdp": FullySharded, "hsdp": HybridSharded},
    makes=DenseSharding,
)


def cut_groups(dense: str, nodes: Sequence[object], wanted: int | None, tensors: int = 1) -> Groups:
    """The ranks that share one copy of the dense parameters, by copy, those of a tensor index side by side; empty where
    each has a copy of its own.

    Args:
        dense: a name of DENSE_SHARDINGS.
        nodes: of each rank.
        wanted: the user's `shard_size`.
        tensors: neighbouring ranks that compute parts of layers together.

    Raises:
        ConfigurationError: a `shard_size` that does not fit the ranks.
    """
    size_of = getattr(DENSE_SHARDINGS.find(dense), "cut_size", None)
    firsts = nodes[::tensors]
    least = None if wanted is None else -(-wanted // tensors)
    size = 1 if size_of is None or len(firsts) == 1 else size_of(firsts, least)
    if size * tensors == 1:
        return ()
    groups = shard_groups(firsts, size)
    return tuple(tuple(first * tensors + t for t in range(tensors) for first in group) for group in groups)


Rows = Mapping[str, Tensor]
"""Key of a piece -> the part that this rank will hold, on the host."""

Shared = Sequence[tuple[str, tuple[slice, ...], tuple[slice, ...]]]
"""(key, where it lies in one part, where in another) of what two parts have in common."""


class RowMoves:
    """What this rank sends and gets. Where there is a source at all, each of several ranks is at one end of a way to
    another one, so all of them take part in the exchange or none does.

    Args:
        state: of this rank under the former cut, in a pipeline with the stages that it had and those that it will have.
        ways: how parameters are cut, by name.
        sources: (name of a part, the rank that has it); of a rank -1 nothing comes.
        targets: the parts that every rank will have, at most one of each stage.
        world: the ranks.
        entrusted: parts of other ranks that this one has, by name.
        held: its own parts under that cut.
        with_moments: whether optimizer states travel with their parameters.
        stage_of: the stage of a parameter, by its name.
    """

    def __init__(
        self,
        state: State,
        ways: Mapping[str, TensorCut],
        sources: Sequence[tuple[str, int]],
        targets: Sequence[Sequence[Part]],
        world: World,
        entrusted: Mapping[str, Rows],
        *,
        held: Sequence[Part],
        with_moments: bool,
        stage_of: Callable[[str], int],
    ) -> None:
        self._world = world
        own = held_rows(state, ways, with_moments=with_moments)
        names = {key: key.removeprefix("dense/").rpartition("/")[0] for key in own}
        self._cuts = {key: ways[name] for key, name in names.items()}
        self._stages = {key: stage_of(name) for key, name in names.items()}
        self._dtypes = {key: tensor.dtype for key, tensor in own.items()}
        self._held: dict[Part, Rows] = dict.fromkeys(held, own)
        self._held |= {Part.named(name): rows for name, rows in entrusted.items()}
        self._wanted = {part.stage: part for part in targets[world.rank]}
        self._ways = [
            (part, source, target, self._common(part, targets[target]))
            for part, source in ((Part.named(name), source) for name, source in sources if source >= 0)
            for target in (range(world.size) if source == world.rank else (world.rank,))
        ]

    @torch.no_grad()
    def exchange(self) -> dict[str, Tensor]:
        """What this rank will hold; collective. What has no source is any."""
        parcels = [
            PeerBuffer(source=source, target=target, nbytes=self._nbytes(common))
            for _, source, target, common in self._ways
        ]
        arrived = exchange_buffers(parcels, self._packed, self._world)
        rows = {
            key: torch.empty(cut.shape_of(self._wanted[stage]), dtype=self._dtypes[key])
            for key, cut in self._cuts.items()
            if (stage := self._stages[key]) in self._wanted
        }
        for at, data in arrived.items():
            *_, common = self._ways[at]
            if common:
                unpack(data, [rows[key][there] for key, _, there in common])
        return rows

    def _common(self, source: Part, targets: Sequence[Part]) -> Shared:
        """What a part has of what a rank will hold."""
        found: list[tuple[str, tuple[slice, ...], tuple[slice, ...]]] = []
        target = next((part for part in targets if part.stage == source.stage), None)
        if target is None:
            return found
        for key, cut in self._cuts.items():
            if self._stages[key] != source.stage or not (cut.sections or source.speaks_to(target)):
                continue
            wanted = list(blocks_of(cut, target))
            for here, block in blocks_of(cut, source):
                for there, other in wanted:
                    if (common := block.common(other)) is not None:
                        found.append((key, _within(here, common[0]), _within(there, common[1])))
        return found

    def _packed(self, at: int) -> Tensor:
        part, *_, common = self._ways[at]
        held = self._held.get(part, {})
        rows = [held[key][here].cpu().contiguous() for key, here, _ in common]  # moments may lie on the host already
        return pack(rows) if rows else torch.empty(0, dtype=torch.uint8)

    def _nbytes(self, common: Shared) -> int:
        sizes = ((key, tuple(at.stop - at.start for at in here)) for key, here, _ in common)
        return packed_bytes([torch.empty(size, dtype=self._dtypes[key], device="meta") for key, size in sizes])


def _within(block: Sequence[slice], common: Sequence[slice]) -> tuple[slice, ...]:
    """Of the tensor that holds a block, what is common to it and another one."""
    return tuple(
        slice(outer.start + inner.start, outer.start + inner.stop) for outer, inner in zip(block, common, strict=True)
    )


@torch.no_grad()
def held_rows(state: State, names: Collection[str], *, with_moments: bool = True) -> dict[str, Tensor]:
    """What this rank has of dense parameters that are, or can be, cut."""
    return {
        f"dense/{name}/{scope}": tensor
        for name, parameter in state.dense.items()
        if name in names
        for scope, tensor in (
            {"weight": local(parameter.detach())} | (state.moments(parameter) if with_moments else {})
        ).items()
    }


_OF = ": "  # no parameter has it in its name


def keepers_of_units(owners: Mapping[str, int], parted: Collection[str], cut: RowCut) -> dict[str, int]:
    """The rank that keeps each unit of a world.

    Args:
        owners: of each parameter, or of this rank's part of it, by name.
        parted: names of those that are cut by tensor index there.
        cut: of that world.
    """
    found: dict[str, int] = {}
    for name, owner in owners.items():
        if name not in parted:
            found[name] = owner
            continue
        for tensor in range(cut.tensors):
            part = Part(tensor=tensor, tensors=cut.tensors)
            found[f"{name}{_OF}{part.name}"] = cut.twin(owner, tensor)
    return found


def is_of_states(name: str) -> bool:
    """Whether the name of an inventory is a unit's, not that of parameters' values."""
    return not name.startswith("dense ")


def name_of(unit: str) -> str:
    """Of the parameter."""
    return unit.partition(_OF)[0]


def takers_of(unit: str, keepers: Mapping[str, int]) -> tuple[int, ...]:
    """The ranks of another world that make their units of this one, or of this and others."""
    name = name_of(unit)
    if unit in keepers:
        return (keepers[unit],)
    if name in keepers:
        return (keepers[name],)
    return tuple(keeper for other, keeper in keepers.items() if name_of(other) == name)


def made_of(arrived: Mapping[str, States], wanted: str, cut: TensorCut | None) -> States:
    """The state of a unit from those that have arrived of its parameter; empty where some are lacking.

    Args:
        cut: of the parameter; None: it is never cut by tensor index.
    """
    if wanted in arrived or cut is None:
        return arrived.get(wanted, {})
    name, part = name_of(wanted), _part_of(wanted)
    if name in arrived:  # a whole one, of which this is a part
        return {k: part_of_whole(v, cut, part).clone() if v.ndim else v for k, v in arrived[name].items()}
    found = {_part_of(unit): states for unit, states in arrived.items() if name_of(unit) == name}
    if not found or len(found) < next(iter(found)).tensors:
        return {}

    def whole(scope: str, of_first: Tensor) -> Tensor:
        return joined({part: states[scope] for part, states in found.items()}, cut) if of_first.ndim else of_first

    return {scope: whole(scope, value) for scope, value in next(iter(found.values())).items()}


def _part_of(unit: str) -> Part:
    _, is_part, part = unit.partition(_OF)
    return Part.named(part) if is_part else Part()


def check_parts(axes: MeshShape, dense: str) -> None:
    """
    Raises:
        ConfigurationError: what tensor parallelism does not go with.
    """
    if axes.tp > 1 and dense not in ("ddp", "zero1", "fsdp", "hsdp"):
        raise ConfigurationError(
            f"mesh.tp={axes.tp} and dense={dense} do not go together: use dense=ddp, zero1, fsdp or hsdp"
        )


class TensorParts:
    """Cuts the layers of modules, and computes with their parts.

    Args:
        size: parts of each layer.

    Attributes:
        stages: of a pipeline, those on this rank; None without one.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.stages: StageCut | None = None

    def _all_layers(self) -> AbstractContextManager[None]:
        """Inside, the module has the layers of all stages, because plans are of whole models."""
        return nullcontext() if self.stages is None else self.stages.whole()

    def begin(self, module: pl.LightningModule, world: World) -> None:
        """Leave this rank its part of what rank 0 has; collective. A module that an earlier training has left in parts
        keeps its own.

        Raises:
            ConfigurationError: a module without a plan, or layers that cannot be dealt out equally.
        """
        if not cut_parameters(module):
            for parameter, cut in self.cuts(module).items():
                if not parameter.is_meta:  # as those of other stages are
                    broadcast_(parameter.data, 0, world)
                    own = part_of_whole(parameter.data, cut, replace(world.row_cut.part, row=0, rows=1))
                    parameter.data = own.clone(memory_format=torch.contiguous_format)
                mark(parameter, cut)
        self.enter(module, world)

    def enter(self, module: pl.LightningModule, world: World) -> None:
        """Compute the parts that this rank has, with the ranks of a world; or everything, where it has that."""
        self.leave(module)
        if not any(has_index(parameter) for parameter in module.parameters()):
            return
        ranks = TensorRanks(world.axis_groups["tp"], world.row_cut.part.tensor, self._size)
        with self._all_layers():
            for name, style in _styles(module, self._size):
                self._cut_layer(module.get_submodule(name), style, ranks)

    def _cut_layer(self, part: nn.Module, style: Style, ranks: TensorRanks) -> None:
        block = None if self.stages is None else self.stages.number_of(part)
        if self.stages is not None and block is not None and style == Parted():
            self.stages.entering[block] = partial(ranks.own, dim=1)  # what comes to other stages are parts, too
        elif not (isinstance(style, Embedding) and part.weight.is_meta):  # else zeros, of which there is no sum to make
            PartedForward(part, style, ranks)

    def leave(self, module: pl.LightningModule) -> None:
        """Parts stay, and layers compute by themselves."""
        with self._all_layers():
            undo_parts(module)

    def forget(self, module: pl.LightningModule) -> None:
        """Parameters are whole again, those of other stages among them."""
        with self._all_layers():
            for parameter in module.parameters():
                mark(parameter, None)

    def cuts(self, module: pl.LightningModule) -> dict[nn.Parameter, TensorCut]:
        """How parameters are cut by tensor index, or will be.

        Raises:
            ConfigurationError: as of `begin`.
        """
        with self._all_layers():
            cuts = {parameter: cut_of(parameter) for parameter in module.parameters() if has_index(parameter)}
            known = {parameter: cut for parameter, cut in cuts.items() if cut is not None}
            return known or _cuts(module, dict(_styles(module, self._size)), self._size)

    @torch.no_grad()
    def sum_gradients(self, dense: Iterable[nn.Parameter], world: World) -> None:
        """Sum over ranks what nobody else does: gradients of parts over the ranks that hold them, or where torch's
        fully_shard does that, those of the rest over the ranks of a tensor group; collective.
        """
        in_rows = world.shard_group is not None
        group = world.axis_groups.get("tp") if in_rows else world.copy_group
        parameters = [p for p in dense if p.ndim and has_index(p) != in_rows]
        found = [local(p.grad) for p in parameters if p.grad is not None]
        for dtype in sorted({gradient.dtype for gradient in found}, key=str) if group is not None else ():
            gradients = [gradient for gradient in found if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, values in zip(gradients, parts, strict=True):
                gradient.copy_(values.view_as(gradient))


def has_index(parameter: nn.Parameter) -> bool:
    """Whether it is cut by tensor index."""
    cut = cut_of(parameter)
    return cut is not None and bool(cut.sections)


def _styles(module: pl.LightningModule, size: int) -> Iterator[tuple[str, Style]]:
    """Of the modules that are cut, by their names.

    Raises:
        ConfigurationError: nobody has a plan.
    """
    planned: list[str] = []
    names = [name for name, _ in module.named_modules()]
    for prefix, part in module.named_modules():
        if any(prefix.startswith(f"{done}.") or not done for done in planned):
            continue
        plan = getattr(part, "tensor_parallel_plan", None)
        if plan is None:
            continue
        planned.append(prefix)
        for pattern, style in plan().items():
            wanted = re.compile(
                (f"{prefix}.{pattern}" if prefix else pattern).replace(".", r"\.").replace("*", r"[^.]+")
            )
            yield from ((name, style) for name in names if wanted.fullmatch(name))
    if not planned:
        raise ConfigurationError(
            f"mesh.tp={size} cuts layers, and {type(module).__name__} does not say which: give it a method "
            "tensor_parallel_plan (docs/expert-parallelism.md), or use dense=fsdp to share memory"
        )


def _cuts(module: nn.Module, styles: Mapping[str, Style], size: int) -> dict[nn.Parameter, TensorCut]:
    """How parameters are cut.

    Raises:
        ConfigurationError: they cannot be dealt out equally, or one is to be cut in two ways.
    """
    found: dict[nn.Parameter, TensorCut] = {}
    for name, style in styles.items():
        part = module.get_submodule(name)
        for own_name, share in style.shares(part).items():
            parameter = part.get_parameter(own_name)
            _require_equal(name, share, size)
            cut = TensorCut(shape=tuple(parameter.shape), dim=share.dim, sections=tuple(share.sections))
            if found.setdefault(parameter, cut) != cut or sum(cut.sections) != parameter.shape[cut.dim]:
                raise ConfigurationError(f"{name}.{own_name} cannot be cut as the plan says: give it one way to be cut")
    return found


def _require_equal(name: str, share: Shares, size: int) -> None:
    for section in share.sections:
        units, rest = divmod(section, share.unit)
        if units % size or rest:
            raise ConfigurationError(
                f"mesh.tp={size} does not divide the {units} {share.of} of {name}: use a divisor, or another model"
            )


class Holder(Protocol):
    """The state of a rank, `RankState`, as far as parts of parameters concern it."""

    @property
    def module(self) -> pl.LightningModule: ...

    @property
    def experts(self) -> PlacedExperts: ...

    @property
    def stages(self) -> StageState | None: ...

    def training_state(self) -> State: ...

    def replace_parameters(self, others: Mapping[nn.Parameter, nn.Parameter]) -> None: ...

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]: ...


class DenseParts:
    """Cuts the dense parameters of a rank's module, and brings their parts across.

    Args:
        state: of the rank.
        in_rows: whether rows are dealt over ranks, where there are several for them.
        tensors: parts of each layer by tensor index, where ranks are a multiple of so many; 1: layers are not cut.
        with_moments: whether who holds a part keeps its optimizer states.

    Attributes:
        with_moments: as given.
        layers: the parts by tensor index.
        entrusted: parts that ranks have left here before they went, by name, until the next world has them.
    """

    def __init__(self, state: Holder, *, in_rows: bool, tensors: int, with_moments: bool) -> None:
        self._state, self._in_rows, self._tensors, self.with_moments = state, in_rows, tensors, with_moments
        self.layers = TensorParts(tensors)
        self.entrusted: dict[str, Rows] = {}
        self._buffers: list[str] = []
        self._scalars: list[nn.Parameter] = []

    @property
    def is_wished(self) -> bool:
        """Whether ranks share copies of the dense parameters, where there are enough."""
        return self._in_rows or self._tensors > 1

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds parts of parameters only."""
        return any(is_cut(parameter) for parameter in self._state.module.parameters())

    @property
    def is_in_rows(self) -> bool:
        """Whether it holds rows of them."""
        return is_sharded(self._state.module)

    @property
    def layers_are_cut(self) -> bool:
        """Whether it computes parts of layers."""
        return any(has_index(parameter) for parameter in self._state.module.parameters())

    def ways(self) -> dict[str, TensorCut]:
        """How parameters are cut, or will be where there are ranks to share them, by name."""
        dense = self._state.training_state().dense
        cuts = self.layers.cuts(self._state.module) if self._tensors > 1 else {}
        if not self._in_rows:
            return {name: cuts[parameter] for name, parameter in dense.items() if parameter in cuts}
        return {
            name: cuts.get(parameter) or TensorCut(shape=tuple(whole_shape(parameter)))
            for name, parameter in dense.items()
            if parameter.ndim
        }

    # ------------------------------------------------------------------ a world that stays

    def begin(self, world: World) -> None:
        """Deal the rows of what rank 0 has, or of this rank's parts by tensor index; collective. A module that is in
        rows already stays as it is.
        """
        private_lightning.evaluate_without_inference_mode(self._state.module.trainer)
        if self.is_in_rows:
            return
        for tensor in self._replicated():
            broadcast_(tensor, 0, world)
        self._shard(world)
        self._mark_absent(self.layers.cuts(self._state.module) if self._tensors > 1 else {})

    def _shard(self, world: World) -> None:
        module, stack_of = self._state.module, self._state.experts.stack_of
        cuts = cuts_of(module)
        shard_dense(module, stack_of, world)
        for name, parameter in module.named_parameters():
            mark(parameter, cuts.get(name))
        alike = set(identical_buffers(module))
        self._buffers = [name for name, _ in module.named_buffers() if name not in alike]
        dense = (p for p in module.parameters() if p not in stack_of)
        self._scalars = [p for p in dense if not p.ndim and p.requires_grad]

    def _mark_absent(self, cuts: Mapping[nn.Parameter, TensorCut]) -> None:
        """Parameters of other stages, which have no values here, are cut there.

        Args:
            cuts: by tensor index.
        """
        if (stages := self._state.stages) is None:
            return
        with stages.cut.whole():
            for *_, parameter, _ in stages.cut.dense():
                if parameter.is_meta and parameter.ndim:
                    rows = TensorCut(shape=tuple(parameter.shape)) if self.is_in_rows else None
                    mark(parameter, cuts.get(parameter, rows))

    @torch.no_grad()
    def gather(self, world: World, most_bytes: int) -> bool:
        """Give every rank whole parameters, where they take no more than this on any rank; collective where they are
        cut. Whether this was done.
        """
        if not self.is_cut:
            return False
        self.rest()  # a callback may have called the module
        dense = self._state.training_state().dense.values()
        nbytes = sum(whole_shape(p).numel() * p.element_size() for p in dense)
        if nbytes > min(all_gather_json(most_bytes, world)):
            rank_zero_warn(
                "training has ended, and the dense parameters are larger than what a rank may keep of them: every rank "
                "has its part only, so go on from a checkpoint"
            )
            return False
        cut = world.row_cut
        sources = [
            (part.name, ranks[0])
            for whose, ranks in zip(cut.parts, cut.holders, strict=True)
            for part in self._in_stages(whose, self._stages_here)
        ]
        targets = [self._in_stages(Part(), self._stages_here)] * world.size
        rows = self._moves(sources, targets, world).exchange()
        self.leave()
        self.install(rows, World.single(world.device))
        self.layers.forget(self._state.module)
        return True

    def _replicated(self) -> Iterator[Tensor]:
        dense, module = self._state.training_state().dense, self._state.module
        yield from (parameter.detach() for parameter in dense.values() if not is_cut(parameter))
        yield from (buffer for _, buffer in module.named_buffers())

    # ------------------------------------------------------------------ a step

    def take_buffers(self, world: World) -> None:
        """Before a forward pass: rank 0's buffers, as under DDP, but those that all ranks compute alike; collective."""
        if self.is_in_rows and self._buffers:
            for name, buffer in self._state.module.named_buffers():  # a user may have set one to None
                if name in self._buffers:
                    broadcast_(buffer, 0, world)

    @contextmanager
    def summing_later(self) -> Generator[None, None, None]:
        """Inside, backward passes leave the sum of gradients over ranks to a later one."""
        if not self.is_in_rows:
            yield
            return
        sum_gradients(self._state.module, now=False)
        try:
            yield
        finally:
            if self.is_in_rows:  # a fault may have undone it
                sum_gradients(self._state.module, now=True)

    def end_backward(self) -> None:
        """After a backward pass inside of a step method, whose loss torch has not seen leave that method: gradients of
        what is in no unit are summed over ranks, where they are not yet; collective.
        """
        if self.is_in_rows:
            end_backward(self._state.module)

    def drop_frozen(self) -> None:
        """After a backward pass: no gradients for parameters that were frozen when their values were gathered already,
        as `toggle_optimizer` does inside of a step.
        """
        for parameter in self._state.module.parameters() if self.is_in_rows else ():
            if not parameter.requires_grad:
                parameter.grad = None

    def sum_rest(self, world: World) -> None:
        """Sum what the backward pass has left of the sums over ranks; collective."""
        if self.is_in_rows:
            self._sum_scalars(world)
        if self._tensors > 1:
            stack_of = self._state.experts.stack_of
            self.layers.sum_gradients((p for p in self._state.module.parameters() if p not in stack_of), world)

    @torch.no_grad()
    def _sum_scalars(self, world: World) -> None:
        """Sum the gradients of scalar parameters, which cannot be cut, where others are."""
        scalars = self._scalars
        if not scalars:
            return
        found = [[p.grad, torch.ones_like(p)] if p.grad is not None else [torch.zeros_like(p)] * 2 for p in scalars]
        sums = torch.tensor([[float(value) for value in pair] for pair in found], device=world.device)
        all_reduce_(sums, world)
        for parameter, (total, count) in zip(scalars, sums, strict=True):
            if count > 0:
                parameter.grad = total.to(parameter.dtype).reshape(parameter.shape)

    def rest(self) -> None:
        """After a forward pass without a backward one: nothing that was gathered stays."""
        if self.is_in_rows:
            let_go_of_gathered(self._state.module)

    def give_step_up(self, world: World) -> None:
        """When the Trainer stops because of an error: rows as between steps, ready for another one. Not collective."""
        if self.is_in_rows and self._state.module.trainer.interrupted:
            self.leave()
            state, ways = self._state.training_state(), self.ways()
            if all(is_cut(state.dense[name]) for name in ways):  # a hook that failed may have replaced some
                self.install(held_rows(state, ways), world)

    # ------------------------------------------------------------------ from world to world

    def leave(self) -> None:
        """The world has ended: parts stay, what computes with those of other ranks goes."""
        self.layers.leave(self._state.module)
        if self.is_in_rows:
            undo_shard(self._state.module)

    def named(self, cut: RowCut) -> tuple[list[str], list[str]]:
        """Names of all parts of a cut, and of those of this rank, where ranks share copies."""
        if not self.is_wished:
            return [], []
        stages = (0,) if self._state.stages is None else range(self._state.stages.cut.num_stages)
        everyones = [part.name for whose in cut.parts for part in self._in_stages(whose, stages)]
        return everyones, [part.name for part in self._in_stages(cut.part, self._stages_here)] + [*self.entrusted]

    @property
    def _stages_here(self) -> Sequence[int]:
        return (0,) if self._state.stages is None else self._state.stages.held

    def _in_stages(self, part: Part, stages: Sequence[int]) -> list[Part]:
        """The same part of each of some stages."""
        count = 1 if self._state.stages is None else self._state.stages.cut.num_stages
        return [replace(part, stage=stage, stages=count) for stage in stages]

    def fetch(
        self, sources: Sequence[tuple[str, int]], part: Part, world: World, stages: Sequence[int] = (0,)
    ) -> dict[str, Tensor]:
        """What this rank will hold in a world, from those that have it; collective there.

        Args:
            sources: (name of a part, its rank in the new world); of a rank -1 nothing comes.
            part: that this rank will hold, of each of these stages.
        """
        told = all_gather_json([own.name for own in self._in_stages(part, stages)], world)
        return self._moves(sources, [[Part.named(name) for name in names] for names in told], world).exchange()

    def _moves(self, sources: Sequence[tuple[str, int]], targets: Sequence[Sequence[Part]], world: World) -> RowMoves:
        state, stages = self._state.training_state(), self._state.stages
        return RowMoves(
            state,
            self.ways(),
            [(name, rank) for name, rank in sources if Part.is_name(name)],
            targets,
            world,
            self.entrusted,
            held=self._in_stages(state.cut.part, self._stages_here),
            with_moments=self.with_moments,
            stage_of=(lambda _: 0) if stages is None else stages.stage_of,
        )

    def hand_over(self, staying: Sequence[int], world: World) -> None:
        """Before ranks leave: the parts that only they have go to ranks that stay; collective where anything is cut."""
        if not self.is_cut:
            return
        cut, names = world.row_cut, world.row_cut.names()
        lost = [index for index, ranks in enumerate(cut.holders) if not set(ranks) & set(staying)]
        for number, index in enumerate(lost):
            keeper, part = staying[number % len(staying)], cut.parts[index]
            targets = [[part] if rank == keeper else [] for rank in range(world.size)]
            rows = self._moves([(names[index], cut.holders[index][0])], targets, world).exchange()
            if world.rank == keeper:
                self.entrusted[names[index]] = rows

    @torch.no_grad()
    def install(self, rows: Rows | None, world: World) -> None:
        """Cut the parameters for a world and give them these values; None: whoever restores them next does.

        Not collective.
        """
        state, module, part = self._state.training_state(), self._state.module, world.row_cut.part
        ways, cuts = self.ways(), self.layers.cuts(module) if self._tensors > 1 else {}
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
            if rows is not None:
                for scope, tensor in scopes.items():
                    tensor.copy_(rows[f"dense/{name}/{scope}"])
        self.entrusted = {}
        self._mark_absent(cuts if part.tensors > 1 else {})
        self.layers.enter(module, world)

    def _anew(
        self, before: Mapping[str, nn.Parameter], ways: Mapping[str, TensorCut], world: World
    ) -> dict[str, nn.Parameter]:
        """Other parameters in the places of these, in rows where the world has ranks for that; with no values."""
        module, part = self._state.module, replace(world.row_cut.part, row=0, rows=1)
        empty = {
            p: nn.Parameter(
                torch.empty(ways[name].shape_of(part), dtype=p.dtype, device="meta"), requires_grad=p.requires_grad
            )
            for name, p in before.items()
        }
        replace_parameters(module, empty)
        if world.shard_group is not None:
            self._shard(world)
        else:
            materialise(module, world.device)
        after = dict(module.named_parameters())
        self._state.replace_parameters({old: after[name] for name, old in before.items()})
        return after
