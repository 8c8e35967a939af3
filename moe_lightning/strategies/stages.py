"""Pipeline stages of a module: where it is cut, the parts on this rank, and their state.

A model is cut at its blocks, the elements of a ModuleList. Its modules before them belong to the first stage, those
after them to the last one. Every rank runs the user's step, whatever its arguments for the blocks are: blocks of other
stages pass hidden states through, the first block of a stage gets those that have arrived, and at the first block of
the next stage the step ends. Parameters of other stages outside blocks are zeros without memory. Keys and numbers in
checkpoints are those of a run without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from moe_lightning.arrays import cut
from moe_lightning.checkpoint.full_state import full_model_state
from moe_lightning.compat import private_torch
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.experts import Experts
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.losses import AbsentBlock
from moe_lightning.parallel.collectives import all_gather_json, check_agreement, fingerprint
from moe_lightning.parallel.context import World, all_reduce_, broadcast_
from moe_lightning.parallel.mesh import stage_ranks
from moe_lightning.state.tensors import cuts_of, whole_shape
from moe_lightning.strategies.placed_experts import MigrationReport, PlacedExperts
from moe_lightning.strategies.worlds import Worlds


def blocks_of(module: nn.Module, num_stages: int) -> nn.ModuleList:
    """Return the longest of the outermost ModuleLists.

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
        raise ConfigurationError(
            f"{num_stages} stages of mesh.pp are more than the {number} blocks of {name}: use at most {number}"
        )
    return chosen


class Left(BaseException):
    """Ends a step with its hidden states: the rest of it belongs to other stages."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class StageCut:
    """Parts of a module on this rank: parts of other stages are removed, and restored without values.

    Args:
        module: the whole module; `apply` cuts it.
        stages: of this rank, ascending.
        num_stages: of all ranks.

    Attributes:
        module: as given.
        gathered_values: dense values of other stages, by part and name, for `restore_values`.
        bounds: index of the first block of each stage, and the number of blocks.
        entering: functions of hidden states that run before a block, by its number, on every stage.

    Raises:
        ConfigurationError: no blocks are found, fewer than stages, or parameters are in several stages.
    """

    def __init__(self, module: nn.Module, stages: Sequence[int], num_stages: int) -> None:
        self.stages, self.num_stages = tuple(stages), num_stages
        self.module = module
        self._list = blocks_of(module, num_stages)
        self._blocks = list(self._list)
        self.bounds = cut(len(self._blocks), num_stages)
        self._stage_of = self._owners()
        self._check_shared()
        self._absent = [AbsentBlock() for _ in self._blocks]
        self._placeholders: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.flow = _Flow(self)
        self.gathered_values: dict[tuple[nn.Module, str], Tensor] = {}
        self.entering: dict[int, Callable[[Tensor], Tensor]] = {}
        self._is_applied, self._device = False, torch.device("cpu")

    # ------------------------------------------------------------------ stages of parts

    def stage_of_block(self, index: int) -> int:
        """Return the stage that computes a block."""
        return next(stage for stage in range(self.num_stages) if index < self.bounds[stage + 1])

    def stage_of(self, part: nn.Module) -> int:
        """Return the stage that holds the parameters of a part of the module."""
        return self._stage_of[part]

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
                first, stage = seen.setdefault(parameter, (name, self._stage_of[part]))
                if stage != self._stage_of[part]:
                    raise ConfigurationError(
                        f"{name} is {first} too, in another stage of mesh.pp, and both would train apart: untie them "
                        "(model.tie_embeddings=false), or drop mesh.pp"
                    )

    def layers(self) -> list[tuple[MoELayer, int]]:
        """Return all MoE layers of the whole module in order, each with its stage."""
        with self.whole():
            return [(part, self._stage_of[part]) for part in self.module.modules() if isinstance(part, MoELayer)]

    def shares_buffer(self, name: str) -> bool:
        """True if every stage has a buffer, because it is outside the blocks."""
        owner = self.module.get_submodule(name.rpartition(".")[0])
        return all(owner not in set(block.modules()) for block in self._blocks)

    # ------------------------------------------------------------------ cutting

    @torch.no_grad()
    def apply(self, device: torch.device) -> None:
        """Cut the module and drop values of other stages. A rank that holds all stages runs whole steps."""
        if self._is_applied:
            return
        self._device, self._is_applied = device, True
        self._drop_values({})
        if self.is_whole:
            return
        for index, block in enumerate(self._blocks):
            is_own = self.stage_of_block(index) in self.stages
            here = block if is_own else self._absent[index]
            here.forward = _Gate(self.flow, index, here)
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
    def hold(self, stages: Collection[int]) -> dict[nn.Parameter, nn.Parameter]:
        """Hold other stages from now on. Their parameters get memory without values, experts no rows; values of stages
        that go are dropped.

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
                self._blocks[index].train(self.module.training)  # the calls of train() and eval() that it missed
            self._drop_values(others)
        return others

    def undo(self) -> None:
        """Restore all parts; those of other stages have no values."""
        if not self._is_applied:
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
        self._is_applied = False

    def dense(self) -> Iterator[tuple[nn.Module, str, nn.Parameter, int]]:
        """Yield (part, name, parameter, stage) of every dense parameter of the whole module; inside `whole`."""
        for part, stage in self._stage_of.items():
            for name, parameter in part.named_parameters(recurse=False) if not isinstance(part, Experts) else ():
                yield part, name, parameter, stage

    def restore_values(self) -> dict[nn.Parameter, nn.Parameter]:
        """Restore all parts at the end of the Trainer, with the gathered values of other stages.

        Returns:
            New parameters by those that they replace.
        """
        self.undo()
        others: dict[nn.Parameter, nn.Parameter] = {}
        for part, stage in self._stage_of.items():
            if isinstance(part, Experts) and stage not in self.stages:
                for name, parameter in part.stacked_parameters().items():  # of no expert
                    _put(part, name, torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype), others)
        for (part, name), values in self.gathered_values.items():
            _put(part, name, values, others)
        self.gathered_values = {}
        return others

    @contextmanager
    def whole(self) -> Generator[None, None, None]:
        """Restore all parts inside, for code that counts or numbers parameters."""
        if not self._is_applied:
            yield
            return
        self.undo()
        try:
            yield
        finally:
            self.apply(self._device)

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the placeholders of parameters that were converted to another precision."""
        for part, name, parameter in self._placeholders:
            if parameter.is_floating_point():
                part.__dict__[name] = part.__dict__[name][(0,) * parameter.ndim].to(dtype).expand(parameter.shape)
        for part, stage in self._stage_of.items():
            for own in part.parameters(recurse=False) if stage not in self.stages else ():
                own.data = (
                    own.data.to(dtype) if own.is_floating_point() else own.data
                )  # should its stage move to this rank

    def _drop_values(self, others: dict[nn.Parameter, nn.Parameter]) -> None:
        for part, stage in self._stage_of.items():
            if stage not in self.stages and isinstance(part, Experts):
                part.slot_experts = ()
            for name, parameter in list(part.named_parameters(recurse=False)):
                if stage not in self.stages and not parameter.is_meta:
                    _put(part, name, torch.empty(whole_shape(parameter), dtype=parameter.dtype, device="meta"), others)
                elif stage in self.stages and parameter.is_meta and not isinstance(part, Experts):
                    raise ConfigurationError(
                        "this module holds the parts of other stages of a pipeline only, as another training has left "
                        "it: build it again and load a checkpoint"
                    )

    def borrowed(self) -> dict[int, tuple[str, int]]:
        """Return name and stage of each parameter that is zeros here, by the id of the zeros."""
        names = {part: name for name, part in self.module.named_modules()}
        return {
            id(part.__dict__[name]): (f"{names[part]}.{name}", self._stage_of[part])
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
    others.setdefault(before, nn.Parameter(values, requires_grad=before.requires_grad))
    setattr(part, name, others[before])


class _Gate:
    """Replacement of a block's forward method."""

    def __init__(self, flow: _Flow, index: int, block: nn.Module) -> None:
        self._flow, self._index, self._own = flow, index, block.forward
        self._replaced = block.__dict__.get("forward")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._flow.through_block(self._index, self._own, arguments, named)

    def undo(self, block: nn.Module) -> None:
        del block.__dict__["forward"]
        if self._replaced is not None:
            block.__dict__["forward"] = self._replaced


def is_gated(part: nn.Module) -> bool:
    """True if a module is a block of a model cut in stages, whose calls may be answered without its own code."""
    return isinstance(part.__dict__.get("forward"), _Gate)


class _Flow:
    """Hidden states in the blocks while a step computes `stage`."""

    def __init__(self, stages: StageCut) -> None:
        self._stages = stages
        self.stage: int | None = None
        self._arrived: Tensor | None = None
        self._next = 0
        self._is_probe = False
        self.is_inside = False

    @contextmanager
    def of(self, stage: int, arrived: Tensor | None) -> Generator[None, None, None]:
        """Compute one stage in the step inside.

        Args:
            arrived: flat hidden states of the stage before, perhaps with padding behind them.
        """
        self.stage, self._arrived, self._next = stage, arrived, self._stages.bounds[stage]
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
                "steps), where mesh.pp has no hidden states for it: drop that, or mesh.pp"
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
        if index == chunk[0] and self._arrived is not None:
            hidden = self._arrived[: hidden.numel()].view(hidden.shape)
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

    Before the blocks those of the first stage may be used, because the hidden states are replaced later.
    """

    def __init__(self, borrowed: dict[int, tuple[str, int]], flow: _Flow) -> None:
        super().__init__()
        self._borrowed, self._flow = borrowed, flow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in private_torch.tree_leaves((args, kwargs)):
            name, stage = self._borrowed.get(id(leaf), ("", 0))
            if name and (stage or self._flow.is_inside):
                where = "after" if self._flow.is_inside else "before"
                raise ConfigurationError(
                    f"{name} is used {where} the blocks at which mesh.pp cuts the model, and another stage holds it: "
                    "declare what is used before the blocks before them and the rest after them, or drop mesh.pp"
                )
        return func(*args, **(kwargs or {}))


def _shown(value: object) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


T = TypeVar("T")


def stages_of(trainer: pl.Trainer) -> StageState | None:
    """Return the stages of a run; None without a pipeline."""
    return getattr(getattr(trainer.strategy, "state", None), "stages", None)


class StageState:
    """State of the stages on this rank.

    Args:
        cut: the parts of the module on this rank.
        worlds: the present world.

    Attributes:
        held: stages whose dense values are here; others of the cut get theirs later.
        placements: of all layers, each among the ranks of its stage.
        ranks: global ranks that hold each stage.
    """

    def __init__(self, cut: StageCut, worlds: Worlds) -> None:
        self.cut, self._worlds, self.held = cut, worlds, cut.stages
        self._layers = cut.layers()
        self.placements: list[Placement] = []
        size, axes = worlds.present.size, worlds.axes
        everyone = range(size) if worlds.is_passing(size) else None
        self.ranks: list[Sequence[int]] = [everyone or stage_ranks(s, size, axes) for s in range(cut.num_stages)]
        with cut.whole():
            self._names = list(cut.module.state_dict(keep_vars=True))
            self._stage_of = {
                f"{prefix}.{name}".lstrip("."): cut.stage_of(part)
                for prefix, part in cut.module.named_modules(remove_duplicate=False)
                for name in (*private_torch.parameters_of(part), *private_torch.buffers_of(part))
            }
            self._shared = {name for name, _ in cut.module.named_buffers() if cut.shares_buffer(name)}

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters and buffers of all stages."""
        return self._stage_of

    def parts(self) -> list[str]:
        """Return the names of the stages, for inventories."""
        return [f"dense stage {stage} of {self.cut.num_stages}" for stage in range(self.cut.num_stages)]

    def stage_of(self, name: str) -> int:
        """Return the stage that has a parameter."""
        return self._stage_of[name]

    def belongs(self, name: str, stage: int) -> bool:
        """True if a stage has a parameter or buffer; buffers outside of blocks are in all."""
        return name in self._shared or self._stage_of[name] == stage

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the global ranks that hold a parameter or buffer. All have a buffer outside of blocks, and the last
        stage, which runs whole steps, has the valid values.
        """
        return tuple(self.ranks[self.cut.num_stages - 1 if name in self._shared else self._stage_of.get(name, 0)])

    # ------------------------------------------------------------------ experts

    def set_placements(self, placements: Sequence[Placement]) -> list[Placement]:
        """Set the placements of all layers, and return those of the layers here."""
        self.placements = list(placements)
        return self.own(placements)

    def own(self, of_layers: Sequence[T]) -> list[T]:
        """Select the entries of the layers here from those of all layers."""
        return [one for one, (_, stage) in zip(of_layers, self._layers, strict=True) if stage in self.cut.stages]

    def replace(
        self, experts: PlacedExperts, placements: Sequence[Placement], optimizers: Sequence[Optimizer]
    ) -> MigrationReport:
        """See `ExpertParallelStrategy.replace_experts`; collective over all ranks, and `moved_states` are those of all.

        Raises:
            ConfigurationError: on every rank, the refusal of one of them, before anything moves.
        """
        if len(placements) != len(self._layers):
            raise ConfigurationError(
                f"{len(placements)} placements do not fit the {len(self._layers)} MoE layers of all stages of mesh.pp: "
                "give one for each"
            )
        wanted = fingerprint(*(placement.replicas for placement in placements))
        check_agreement(wanted, "the new placement", self.whole)
        refusals = all_gather_json(experts.refusal(self.own(placements)), self._worlds.present.pipe)
        if refusal := next(filter(None, refusals), None):
            raise ConfigurationError(refusal)
        report = experts.replace(self.set_placements(placements), optimizers, self.nodes(self._worlds.present.nodes))
        moved = torch.tensor(report.moved_states, device=self.whole.device)
        all_reduce_(moved, self._worlds.present.pipe)
        return replace(report, moved_states=int(moved))

    def placements_of_all(self, own: Sequence[Placement]) -> list[Placement]:
        """Return the placements of all layers from those of the layers here; collective over the stages."""
        experts = max((layer.num_experts for layer in self.layers), default=0)
        tables = [torch.tensor(placement.replicas) for placement in own]
        tables_LEN = self.counts_of_all(
            torch.stack(tables) if tables else torch.zeros(0, experts, self.num_ranks).long()
        )
        return [] if tables_LEN is None else [Placement(replicas=table) for table in tables_LEN.cpu().numpy()]

    @property
    def own_ranks(self) -> Sequence[int]:
        """Global ranks that hold the stages here."""
        return self.ranks[self.cut.stages[0]]

    def nodes(self, of_ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes of the ranks of the stages here, numbered from 0, from those of all ranks."""
        found = [of_ranks[rank] for rank in self.own_ranks]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(found))}
        return tuple(numbers[node] for node in found)

    def stacks(self, experts: PlacedExperts) -> list[ExpertStack]:
        """Return the stacks of all layers over all ranks; those of other stages have no slots here."""
        own = dict(zip(experts.layers, experts.stacks, strict=True))
        found = []
        for (layer, stage), first in zip(self._layers, self.placements, strict=True):
            stack = own.get(layer)
            here = first if stack is None else stack.placement
            found.append(
                ExpertStack(
                    parameters=layer.experts.stacked_parameters() if stack is None else stack.parameters,
                    slot_experts=() if stack is None else stack.slot_experts,
                    placement=here.over(self.ranks[stage], self._worlds.present.size),
                    rank=self._worlds.present.rank,
                    base=layer.experts.base_names,
                )
            )
        return found

    def counts_of_all(self, own_LE: Tensor | None) -> Tensor | None:
        """Return a number for each expert, or any other values of each layer, int64 [L, ...], from those of the layers
        here; None if all are 0. Collective.

        Args:
            own_LE: of the layers here; None on all ranks of a stage: zeros [L, E].
        """
        experts = max((layer.num_experts for layer, _ in self._layers), default=0)
        device, shape = self._worlds.present.device, (experts,) if own_LE is None else own_LE.shape[1:]
        all_LE = torch.zeros(len(self._layers), *shape, dtype=torch.int64, device=device)
        if own_LE is not None:
            all_LE[self.numbers] = own_LE.to(device)
        all_reduce_(all_LE, self._worlds.present.pipe)
        return all_LE if bool(all_LE.any()) else None

    @property
    def layers(self) -> list[MoELayer]:
        """The MoE layers of all stages."""
        return [layer for layer, _ in self._layers]

    @property
    def numbers(self) -> list[int]:
        """Numbers of the MoE layers here among those of the whole module."""
        return self.own(range(len(self._layers)))

    @property
    def without_layers(self) -> list[int]:
        """Stages whose ranks have no MoE layer at all; the ranks of several stages may be the same."""
        with_layers = {tuple(self.ranks[stage]) for _, stage in self._layers}
        return [stage for stage, ranks in enumerate(self.ranks) if tuple(ranks) not in with_layers]

    @property
    def pipe(self) -> World:
        """The ranks of the other stages for this rank's samples."""
        return self._worlds.present.pipe

    @property
    def num_ranks(self) -> int:
        """Number of ranks of a stage."""
        return self._worlds.present.stage.size

    @property
    def whole(self) -> World:
        """The ranks of all stages."""
        return self._worlds.present

    def ranks_of_layers(self, ranks: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the ranks that hold each layer.

        Args:
            ranks: those that hold each stage.
        """
        return [ranks[stage] for _, stage in self._layers]

    # ------------------------------------------------------------------ after training

    @torch.no_grad()
    def gather(self, most_bytes: int) -> None:
        """Gather the dense values of all stages on every rank, unless they take more than this on some rank;
        collective.
        """
        with self.cut.whole():
            entries = list(self.cut.dense())
        size = sum(whole_shape(p).numel() * p.element_size() for *_, p, _ in entries)
        if size > min(all_gather_json(most_bytes, self.whole)):
            rank_zero_warn(
                "training has ended, and the dense parameters are larger than what a rank may keep of them: every rank "
                "has those of its stages only, so continue from a checkpoint"
            )
            return
        for part, name, parameter, stage in entries:
            values = torch.empty_like(parameter, device=self.whole.device) if parameter.is_meta else parameter.detach()
            broadcast_(values, self.ranks[stage][0], self.whole)
            if parameter.is_meta:
                self.cut.gathered_values[part, name] = values.cpu()

    # ------------------------------------------------------------------ optimizers

    def leave_absent(self, optimizers: Sequence[Optimizer]) -> None:
        """Remove absent parameters from the optimizers, which were built with all parameters."""
        here = set(self.cut.module.parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in here:
                        optimizer.state.pop(parameter, None)
                group["params"] = [p for p in group["params"] if p in here]

    # ------------------------------------------------------------------ one file

    def full_model_state(self, state: Mapping[str, Any], stacks: Sequence[ExpertStack]) -> dict[str, Any]:
        """Return the whole module's state_dict on rank 0; empty on the others. Collective.

        Args:
            state: state_dict of this rank's parts.
            stacks: those of all layers.
        """
        owners: dict[nn.Parameter, ExpertStack] = {p: stack for stack in stacks for p in stack.parameters.values()}
        with self.cut.whole():
            named = self.cut.module.named_parameters(remove_duplicate=False)
            experts = {name: owners[parameter] for name, parameter in named if parameter in owners}
            cuts = cuts_of(self.cut.module)
        own = {name: v for name, v in state.items() if not (isinstance(v, Tensor) and v.is_meta)}
        rank = self._worlds.present.rank
        whole_here = own.keys() - experts.keys() - cuts.keys()
        spoken = {name: own[name] for name in whole_here if self.holders(name)[0] == rank}
        whole = full_model_state(own, experts, self._worlds.present, cuts=cuts, spoken=spoken)
        return {name: whole[name] for name in self._names} if whole else {}

    def own_part(self, full: Mapping[str, Any], *, strict: bool) -> Mapping[str, Any]:
        """Select the entries of a whole state_dict that are on this rank, and those that are in no stage."""
        others = set(self._names) - set(self.cut.module.state_dict(keep_vars=True))
        return {name: value for name, value in full.items() if name not in others}
