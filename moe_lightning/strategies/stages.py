"""Pipeline stages of a module: where it is cut, the parts on this rank, and the ranks that hold each stage.

A model is cut at its blocks, the elements of a ModuleList. Its modules before them belong to the first stage, those
after them to the last one. Every rank runs the user's step, whatever its arguments for the blocks are: blocks of other
stages pass hidden states through, the first block of a stage gets those that have arrived, and at the first block of
the next stage the step ends. Parameters of other stages outside blocks are zeros without memory. Keys and numbers in
checkpoints are those of a run without a pipeline. Without a pipeline a model has one stage, the whole of it, on every
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from moe_lightning.arrays import cut
from moe_lightning.checkpoint.full_state import full_model_state
from moe_lightning.compat import private_torch
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.experts import Experts
from moe_lightning.moe.layer import MoELayer, moe_layers
from moe_lightning.moe.losses import AbsentBlock
from moe_lightning.parallel.collectives import all_gather_json, check_agreement, fingerprint
from moe_lightning.parallel.context import World, all_reduce_
from moe_lightning.parallel.mesh import stage_ranks
from moe_lightning.state.tensors import cuts_of, replacement, whole_shape
from moe_lightning.strategies.worlds import Worlds

if TYPE_CHECKING:
    from moe_lightning.strategies.placed_experts import MigrationReport, PlacedExperts


def find_blocks(module: nn.Module, num_stages: int, stages_per_rank: int) -> nn.ModuleList:
    """Return the longest of the outermost ModuleLists, which num_stages stages share.

    Raises:
        ConfigurationError: there is none, or it cannot be cut into so many stages.
    """
    found = [
        (len(part), name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and not any(type(e).forward is nn.Module.forward for e in part)
    ]
    outer = [(n, name, part) for n, name, part in found if not any(name.startswith(f"{o}.") for _, o, _ in found)]
    if not outer:
        raise ConfigurationError(
            f"{type(module).__name__} has no ModuleList of blocks at which mesh.pp could cut it: keep the blocks of "
            "the model in one, or drop mesh.pp"
        )
    number, name, chosen = max(outer, key=lambda entry: entry[0])
    if len(set(chosen)) < number:
        raise ConfigurationError(f"some blocks of {name} are the same module, which mesh.pp cannot cut: drop mesh.pp")
    if number < num_stages:
        schedule = "" if stages_per_rank == 1 else f", or schedule=1f1b and at most {number}"
        raise ConfigurationError(
            f"mesh.pp={num_stages // stages_per_rank} cuts a model in {num_stages} stages, more than the {number} "
            f"blocks of {name}: use at most {max(1, number // stages_per_rank)}{schedule}"
        )
    return chosen


class Left(BaseException):
    """Ends a step with its hidden states: the rest of it belongs to other stages."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class StageCut:
    """Parts of a module on this rank: parts of other stages are removed, and restored without values. A module of one
    stage stays as it is.

    Args:
        module: the whole module; `apply` cuts it.
        stages: of this rank, ascending.
        num_stages: of all ranks.

    Attributes:
        module, num_stages: as given.
        bounds: index of the first block of each stage, and the number of blocks.
        layers: all MoE layers of the whole module in order, each with its stage.
        is_applied: the module is cut now.
        entering: functions of hidden states that run before a block, by its number, on every stage.

    Raises:
        ConfigurationError: no blocks are found, fewer than stages, or parameters are in several stages.
    """

    def __init__(self, module: nn.Module, stages: Sequence[int], num_stages: int) -> None:
        self.stages, self.num_stages = tuple(stages), num_stages
        self.module = module
        self._list = find_blocks(module, num_stages, len(self.stages)) if num_stages > 1 else nn.ModuleList()
        self._blocks = list(self._list)
        self.bounds = cut(len(self._blocks), num_stages)
        self._stage_of: dict[nn.Module, int] = {}
        if num_stages > 1:
            self._stage_of = self._owners()
            self._check_shared()
        self.layers = [(layer, self.stage_of(layer)) for layer in moe_layers(module)]
        self._absent = [AbsentBlock() for _ in self._blocks]
        self._placeholders: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.flow = _Flow(self)
        self.entering: dict[int, Callable[[Tensor], Tensor]] = {}
        self.is_applied, self._device = False, torch.device("cpu")

    # ------------------------------------------------------------------ stages of parts

    def stage_of_block(self, index: int) -> int:
        """Return the stage that computes a block."""
        return next(stage for stage in range(self.num_stages) if index < self.bounds[stage + 1])

    def stage_of(self, part: nn.Module) -> int:
        """Return the stage that holds the parameters of a part of the module."""
        return self._stage_of.get(part, 0)

    def _owners(self) -> dict[nn.Module, int]:
        found: dict[nn.Module, int] = {}
        inside = {part: number for number, block in enumerate(self._blocks) for part in block.modules()}
        has_passed = False
        for part in self.module.modules():
            has_passed |= part is self._list
            if part in inside:
                found[part] = self.stage_of_block(inside[part])
            else:
                found[part] = self.num_stages - 1 if has_passed else 0
                if isinstance(part, MoELayer):
                    raise ConfigurationError(
                        f"an MoELayer is outside the {len(self._blocks)} blocks at which mesh.pp cuts the model: put "
                        "it into a block, or drop mesh.pp"
                    )
        return found

    def _check_shared(self) -> None:
        seen: dict[nn.Parameter, tuple[str, int]] = {}
        for prefix, part in self.module.named_modules(remove_duplicate=False):
            for name, parameter in part.named_parameters(prefix, recurse=False):
                first, stage = seen.setdefault(parameter, (name, self.stage_of(part)))
                if stage != self.stage_of(part):
                    raise ConfigurationError(
                        f"{name} is {first} too, in another stage of mesh.pp, and both would train apart: untie them "
                        "(model.tie_embeddings=false), or drop mesh.pp"
                    )

    def is_outside(self, part: nn.Module) -> bool:
        """True if a part of the module is in no block, so that every stage runs its code."""
        return not any(part is inner for block in self._blocks for inner in block.modules())

    # ------------------------------------------------------------------ cutting

    @torch.no_grad()
    def apply(self, device: torch.device) -> None:
        """Cut the module and drop values of other stages. A rank that holds all stages runs whole steps.

        Raises:
            ConfigurationError: own parts have no values.
        """
        if self.is_applied:
            return
        self._device, self.is_applied = device, True
        self._require_values()
        self._drop_values({})
        if self.is_whole:
            return
        for index, block in enumerate(self._blocks):
            is_own = self.stage_of_block(index) in self.stages
            here = block if is_own else self._absent[index]
            here.forward = _Gate(self, index, here)
            self._list[index] = here
        for part in self.module.modules():
            if part in self._stage_of and self._stage_of[part] not in self.stages:
                for name, parameter in list(part.named_parameters(recurse=False)):
                    del private_torch.parameters_of(part)[name]
                    zeros = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
                    part.__dict__[name] = zeros
                    self._placeholders.append((part, name, parameter))

    @property
    def is_whole(self) -> bool:
        """True if this rank holds all stages."""
        return len(self.stages) == self.num_stages

    @torch.no_grad()
    def hold(self, stages: Collection[int], *, training: bool) -> dict[nn.Parameter, nn.Parameter]:
        """Hold other stages from now on. Their parameters get memory without values, experts no rows; values of stages
        that go are dropped.

        Args:
            training: mode of the blocks that come, which have missed the calls of train() and eval().

        Returns:
            New parameters by those that they replace.
        """
        coming = set(stages) - set(self.stages)
        others: dict[nn.Parameter, nn.Parameter] = {}
        with self.whole():
            self.stages = tuple(sorted(stages))
            for part in (part for part, stage in self._stage_of.items() if stage in coming):
                for name, parameter in list(part.named_parameters(recurse=False)):
                    shape = (0, *parameter.shape[1:]) if isinstance(part, Experts) else parameter.shape
                    values = torch.zeros(shape, dtype=parameter.dtype, device=self._device)
                    _put(part, name, values, others)
                for name, buffer in list(part.named_buffers(recurse=False)):
                    private_torch.buffers_of(part)[name] = buffer.to(self._device)
            for index in (index for stage in coming for index in self.chunk(stage)):
                self._blocks[index].train(training)
            self._drop_values(others)
        return others

    def undo(self) -> None:
        """Restore all parts; those of other stages have no values."""
        if not self.is_applied:
            return
        for part, name, parameter in self._placeholders:
            del part.__dict__[name]
            part.register_parameter(name, parameter)
        self._placeholders = []
        for index, block in enumerate(self._blocks):
            for gated in (block, self._absent[index]):
                if isinstance(gate := gated.__dict__.get("forward"), _Gate):
                    gate.undo(gated)
            self._list[index] = block
        self.is_applied = False

    def absent_parameters(self) -> list[nn.Parameter]:
        """Return the dense parameters of other stages, which have no values here."""
        with self.whole():
            parts = [part for part in self._stage_of if not isinstance(part, Experts)]
            return [p for part in parts for p in part.parameters(recurse=False) if p.is_meta]

    @contextmanager
    def whole(self) -> Generator[None, None, None]:
        """Restore all parts inside, for code that counts or numbers parameters."""
        if not (self.is_applied and self._blocks):
            yield
            return
        self.undo()
        try:
            yield
        finally:
            self.apply(self._device)

    def _require_values(self) -> None:
        for prefix, part in self.module.named_modules():
            for name, parameter in part.named_parameters(prefix, recurse=False):
                if parameter.is_meta and self.stage_of(part) in self.stages and not isinstance(part, Experts):
                    raise ConfigurationError(
                        f"{name} is on the meta device and has no values, as parameters of other stages after a "
                        "training with mesh.pp: build the module again, and load a checkpoint if it was trained"
                    )

    def _drop_values(self, others: dict[nn.Parameter, nn.Parameter]) -> None:
        for part in (part for part, stage in self._stage_of.items() if stage not in self.stages):
            if isinstance(part, Experts):
                part.drop_slots()
            for name, parameter in list(part.named_parameters(recurse=False)):
                if not parameter.is_meta:
                    _put(part, name, torch.empty(whole_shape(parameter), dtype=parameter.dtype, device="meta"), others)

    def borrowed(self) -> Mapping[Tensor, tuple[str, int]]:
        """Return name and stage of each parameter that is zeros here, by the zeros."""
        names = {part: name for name, part in self.module.named_modules()}
        return {
            part.__dict__[name]: (f"{names[part]}.{name}".lstrip("."), self._stage_of[part])
            for part, name, _ in self._placeholders
        }

    def number_of(self, part: nn.Module) -> int | None:
        """Return the number of a block; None if the part is none."""
        return next((index for index, block in enumerate(self._blocks) if block is part), None)

    def chunk(self, stage: int) -> range:
        """Return the numbers of the blocks of a stage."""
        return range(*self.bounds[stage : stage + 2])

    def chunk_layers(self, stage: int) -> list[MoELayer]:
        """Return the MoE layers of a stage of this rank."""
        return [part for at in self.chunk(stage) for part in self._blocks[at].modules() if isinstance(part, MoELayer)]

    def block_before(self, stage: int) -> AbsentBlock:
        """Return the placeholder of the block before a stage, which is on another rank."""
        return self._absent[self.bounds[stage] - 1]


def _put(part: nn.Module, name: str, values: Tensor, others: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replace a parameter in all of its places."""
    before = part.get_parameter(name)
    others.setdefault(before, replacement(before, values))
    setattr(part, name, others[before])


class _Gate:
    """Replacement of a block's forward method."""

    def __init__(self, cut: StageCut, index: int, block: nn.Module) -> None:
        self.cut, self._index, self._own = cut, index, block.forward
        self._replaced = block.__dict__.get("forward")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.cut.flow.through_block(self._index, self._own, arguments, named)

    def __reduce__(self) -> str:
        raise ConfigurationError(
            "a module that mesh.pp has cut into stages can be neither copied nor pickled: save a checkpoint with the "
            "Trainer that cut it (trainer.save_checkpoint), and load that into another module"
        )

    def undo(self, block: nn.Module) -> None:
        del block.__dict__["forward"]
        if self._replaced is not None:
            block.__dict__["forward"] = self._replaced


def is_gated(part: nn.Module) -> bool:
    """True if a module is a block of a model cut in stages, whose calls may be answered without its own code."""
    return isinstance(part.__dict__.get("forward"), _Gate)


def undo_cut(module: nn.Module) -> None:
    """Restore the parts of a module that another training may have left cut; those of other stages have no values."""
    gates = (part.__dict__.get("forward") for part in module.modules())
    gate = next((gate for gate in gates if isinstance(gate, _Gate)), None)
    if gate is not None:
        gate.cut.undo()


class _Flow:
    """Hidden states in the blocks while a step computes `stage`."""

    def __init__(self, stages: StageCut) -> None:
        self._stages = stages
        self.stage: int | None = None
        self._arrived: Tensor | None = None
        self._enter: Callable[[], None]
        self._next = 0
        self._is_probe = False
        self.is_inside = False

    @contextmanager
    def of(self, stage: int, arrived: Tensor | None, enter: Callable[[], None]) -> Generator[None, None, None]:
        """Compute one stage in the step inside.

        Args:
            arrived: flat hidden states of the stage before, perhaps with padding behind them.
            enter: called before the first block of the stage.
        """
        self.stage, self._arrived, self._next, self._enter = stage, arrived, self._stages.bounds[stage], enter
        self.is_inside = False
        try:
            yield
        finally:
            self.stage = self._arrived = None

    @contextmanager
    def probing(self) -> Generator[None, None, None]:
        """End the step inside at its first block, with the argument of that."""
        self._is_probe = True
        try:
            with self.watching():
                yield
        finally:
            self._is_probe = False

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Refuse the use of a parameter of another stage inside."""
        self.is_inside = False
        with _Watch(self._stages.borrowed(), self):
            yield

    def through_block(
        self, index: int, own: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        hidden = arguments[0] if arguments else None
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            raise ConfigurationError(
                "mesh.pp needs blocks whose first argument is the hidden states, given by position: drop mesh.pp"
            )
        if index in self._stages.entering:
            hidden = self._stages.entering[index](hidden)
        if self._is_probe:
            raise Left(hidden)
        if self.stage is None:
            raise ConfigurationError(
                "a block was called outside of the forward pass of a step (activation checkpointing, or a call between "
                "steps or after training), where mesh.pp has no hidden states for it: drop that, or mesh.pp, or load a "
                "checkpoint into another module"
            )
        chunk = self._stages.chunk(self.stage)
        if index == chunk.stop:
            raise Left(hidden)
        if index not in chunk:
            return hidden
        if index != self._next:
            raise ConfigurationError(
                f"block {index} was called where mesh.pp expects block {self._next}: blocks must be called one after "
                "the other, each once in a step"
            )
        self._next += 1
        if index == chunk[0]:
            self._enter()
        if index == chunk[0] and self._arrived is not None:
            # A block may change its argument in place, but not the receive buffer, a leaf that requires gradients.
            hidden = self._arrived[: hidden.numel()].view(hidden.shape).clone()
        self.is_inside = True
        out = own(hidden, *arguments[1:], **named)
        if not isinstance(out, Tensor) or (out.shape, out.dtype) != (hidden.shape, hidden.dtype):
            raise ConfigurationError(
                "mesh.pp needs blocks that return hidden states of the shape and dtype that they get, and nothing "
                f"else, but block {index} returns {_shown(out)} for {_shown(hidden)}: drop mesh.pp"
            )
        return out


class _Watch(TorchFunctionMode):
    """Guard against computing with the zeros that replace other stages' parameters.

    Before the blocks those of the first stage may be used, because the hidden states are replaced later; what else is
    computed from them there may not be used in the blocks of this stage or after them.
    """

    def __init__(self, borrowed: Mapping[Tensor, tuple[str, int]], flow: _Flow) -> None:
        super().__init__()
        self._borrowed, self._flow = borrowed, flow
        self._made: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()  # from which parameter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [leaf for leaf in private_torch.tree_leaves(result) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", "")
        if name == "__setitem__":
            found.append(args[0])
        if (not found and name not in _READS) or name.endswith("_like") or name.startswith("new_"):
            return result  # which depends on shapes, dtypes and devices only
        used = args[:1] if name == "to" or name.endswith("_as") else (args, kwargs)
        for leaf in private_torch.tree_leaves(used):
            if isinstance(leaf, Tensor) and (source := self._source(leaf)):
                for made in found:
                    self._made[made] = source
        return result

    def _source(self, value: Tensor) -> str | None:
        """Return the name of the parameter that a value comes from; None if it may be used, or comes from none."""
        name, stage = self._borrowed.get(value, ("", 0))
        if name and (stage or self._flow.is_inside):
            where = "after" if self._flow.is_inside else "before"
            raise ConfigurationError(
                f"{name} is used {where} the blocks at which mesh.pp cuts the model, and another stage holds it: "
                "declare what is used before the blocks before them and the rest after them, or drop mesh.pp"
            )
        made_of = self._made.get(value)
        if made_of and self._flow.is_inside:
            raise ConfigurationError(
                f"a tensor computed before the blocks from {made_of} is used in or after them, and mesh.pp sends "
                "hidden states only to the stages without that parameter: compute it in the blocks, make it a part of "
                "the hidden states, or drop mesh.pp"
            )
        return name or made_of


_READS = frozenset({
    "item", "tolist", "numpy", "__float__", "__int__", "__bool__", "is_nonzero", "equal", "allclose",
})  # fmt: skip
"""Functions that return values of a tensor as no tensor."""


def _shown(value: object) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


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
        placements: of all layers, each among the ranks of its stage.
    """

    def __init__(self, module: nn.Module, worlds: Worlds, cut: StageCut | None = None) -> None:
        self.cut, self._module, self._worlds = cut or StageCut(module, (0,), 1), module, worlds
        self.num_stages = self.cut.num_stages
        self.held: Sequence[int] = self.cut.stages
        self.placements: list[Placement] = []
        self._ranks: Sequence[Sequence[int]] | None = None  # that hold each stage; None: all hold the one that there is
        self._names: list[str] = []  # in the whole state_dict
        self._stage_of: dict[str, int] = {}  # by name of a parameter or buffer
        self._shared: set[str] = set()  # buffers that every stage has
        if cut is None:
            return
        everyone = range(worlds.present.size)
        needs_others = worlds.cannot_train(len(everyone))
        self._ranks = [everyone] * cut.num_stages if needs_others else self.ranks_in(everyone)
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
        return [range(self.world.size)] if self._ranks is None else self._ranks

    @property
    def num_ranks(self) -> int:
        """Number of ranks of a stage."""
        return self.world.stage.size if self._worlds.is_joined else 1

    def assign(self, ranks: Sequence[Sequence[int]], placements: Sequence[Placement]) -> None:
        """Set the ranks that hold each stage, and the placements of all layers; all ranks hold an only stage, whatever
        `ranks` says of the next world.

        Args:
            placements: over all ranks.
        """
        if self.num_stages > 1:
            self._ranks = ranks
            pairs = zip(placements, self.layers_of(ranks), strict=True)
            placements = [placement.among(its) for placement, its in pairs]
        self.placements = list(placements)

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
        found = [of_ranks[rank] for rank in self.ranks[self.cut.stages[0]]]
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
        if self.num_stages == 1:
            return self.world.row_cut.holders
        return [tuple(ranks) for ranks in self.ranks]

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
                    placement=here.over(self.ranks[stage], self.world.size),
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
            all_LE[torch.tensor(self.numbers, dtype=torch.int64, device=device)] = own_LE.to(device)
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
