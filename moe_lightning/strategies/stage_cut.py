"""The parts of a module that the stages of a pipeline on this rank hold.

A model is cut at its blocks, the elements of a ModuleList. What it has before them belongs to the first stage, what it
has after them to the last one. Every rank runs the user's step, whatever it hands to its blocks: those of other stages
hand hidden states on, the first of a stage takes what has arrived, and before the first of the next one the step
is left. Keys do not change; parameters of other stages outside blocks are zeros without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_lightning import seams
from moe_lightning.arrays import cut
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.experts import Experts
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.losses import AbsentBlock
from moe_lightning.state.tensors import whole_shape
from moe_lightning.strategies.stage_blocks import blocks_of


class Left(BaseException):
    """Carries hidden states out of a step: the rest of it belongs to other stages."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class StageCut:
    """Takes away from a module what other stages hold, and gives it back, without values.

    Args:
        module: the whole; it is cut by `apply`.
        stages: of this rank, ascending.
        num_stages: of all ranks.

    Attributes:
        module: as given.
        kept: dense values of other stages, by part and name, for `hand_back`.
        bounds: where the blocks of each stage begin, and their end.
        entering: what is done with hidden states before a block, by its number, in whatever stage that is.

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
        self.kept: dict[tuple[nn.Module, str], Tensor] = {}
        self.entering: dict[int, Callable[[Tensor], Tensor]] = {}
        self._is_applied, self._device = False, torch.device("cpu")

    # ------------------------------------------------------------------ who holds what

    def stage_of_block(self, index: int) -> int:
        """The stage that computes a block."""
        return next(stage for stage in range(self.num_stages) if index < self.bounds[stage + 1])

    def stage_of(self, part: nn.Module) -> int:
        """The stage that holds the parameters of a part of the module."""
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
                        f"a MoELayer lies outside the {len(self._blocks)} blocks at which mesh.pp cuts the model: put "
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
        """All MoE layers of the whole in order, each with its stage."""
        with self.whole():
            return [(part, self._stage_of[part]) for part in self.module.modules() if isinstance(part, MoELayer)]

    def shares_buffer(self, name: str) -> bool:
        """Whether every stage has a buffer: it is outside the blocks."""
        owner = self.module.get_submodule(name.rpartition(".")[0])
        return all(owner not in set(block.modules()) for block in self._blocks)

    # ------------------------------------------------------------------ cutting

    @torch.no_grad()
    def apply(self, device: torch.device) -> None:
        """Cut; values that other stages hold are dropped. A rank that holds all stages runs whole steps."""
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
                    del part._parameters[name]
                    zeros = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
                    part.__dict__[name] = zeros
                    self._placeholders.append((part, name, parameter))

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all stages."""
        return len(self.stages) == self.num_stages

    @torch.no_grad()
    def hold(self, stages: Collection[int]) -> dict[nn.Parameter, nn.Parameter]:
        """Have other stages from now on. Parameters that come have memory and no values yet, experts no rows; values of
        those that go are dropped.

        Returns:
            Parameters that took the place of others.
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
                    part._buffers[name] = buffer.to(self._device)
            for index in (index for stage in coming for index in self.chunk(stage)):
                self._blocks[index].train(self.module.training)  # it missed what the others were told
            self._drop_values(others)
        return others

    def undo(self) -> None:
        """All parts are there again; those of other stages have no values."""
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
        """(part, name, parameter, stage) of every dense parameter of the whole; inside `whole`."""
        for part, stage in self._stage_of.items():
            for name, parameter in part.named_parameters(recurse=False) if not isinstance(part, Experts) else ():
                yield part, name, parameter, stage

    def hand_back(self) -> dict[nn.Parameter, nn.Parameter]:
        """The Trainer has ended: all parts are there again, with the values that were kept of other stages.

        Returns:
            Parameters that took the place of others.
        """
        self.undo()
        others: dict[nn.Parameter, nn.Parameter] = {}
        for part, stage in self._stage_of.items():
            if isinstance(part, Experts) and stage not in self.stages:
                for name, parameter in part.stacked_parameters().items():  # of no expert, which others fill or miss
                    _put(part, name, torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype), others)
        for (part, name), values in self.kept.items():
            _put(part, name, values, others)
        self.kept = {}
        return others

    @contextmanager
    def whole(self) -> Generator[None, None, None]:
        """Inside, all parts are there, for who counts or numbers parameters."""
        if not self._is_applied:
            yield
            return
        self.undo()
        try:
            yield
        finally:
            self.apply(self._device)

    def convert(self, dtype: torch.dtype) -> None:
        """Follow parameters that were converted to another precision."""
        for part, name, parameter in self._placeholders:
            if parameter.is_floating_point():
                part.__dict__[name] = part.__dict__[name][(0,) * parameter.ndim].to(dtype).expand(parameter.shape)
        for part, stage in self._stage_of.items():
            for own in part.parameters(recurse=False) if stage not in self.stages else ():
                own.data = own.data.to(dtype) if own.is_floating_point() else own.data  # should it come here one day

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
                        "it: build it anew and load a checkpoint"
                    )

    def borrowed(self) -> dict[int, tuple[str, int]]:
        """Name and stage of each parameter that is zeros here, by the zeros' id."""
        names = {part: name for name, part in self.module.named_modules()}
        return {
            id(part.__dict__[name]): (f"{names[part]}.{name}", self._stage_of[part])
            for part, name, _ in self._placeholders
        }

    def number_of(self, part: nn.Module) -> int | None:
        """Which block a part is; None: it is none."""
        return next((index for index, block in enumerate(self._blocks) if block is part), None)

    def chunk(self, stage: int) -> range:
        """The blocks of a stage."""
        return range(*self.bounds[stage : stage + 2])

    def chunk_layers(self, stage: int) -> list[MoELayer]:
        """The MoE layers of a stage of this rank."""
        return [part for at in self.chunk(stage) for part in self._blocks[at].modules() if isinstance(part, MoELayer)]

    def block_before(self, stage: int) -> AbsentBlock:
        """What stands for the block before a stage, which is another rank's."""
        return self._absent[self.bounds[stage] - 1]


def _put(part: nn.Module, name: str, values: Tensor, others: dict[nn.Parameter, nn.Parameter]) -> None:
    """Another parameter in the place of one, the same in all places of that."""
    before = part.get_parameter(name)
    others.setdefault(before, nn.Parameter(values, requires_grad=before.requires_grad))
    setattr(part, name, others[before])


class _Gate:
    """In the place of a block's forward method."""

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
    """Whether it is a block of a model that is cut in stages: calls of it may be answered without its own code."""
    return isinstance(part.__dict__.get("forward"), _Gate)


class _Flow:
    """What the blocks do with hidden states while a step runs for `stage`."""

    def __init__(self, stages: StageCut) -> None:
        self._stages = stages
        self.stage: int | None = None
        self._arrived: Tensor | None = None
        self._next = 0
        self._is_probe = False
        self.is_inside = False

    @contextmanager
    def of(self, stage: int, arrived: Tensor | None) -> Generator[None, None, None]:
        """Inside, a step computes one stage.

        Args:
            arrived: flat hidden states of the stage before, and perhaps more numbers behind them.
        """
        self.stage, self._arrived, self._next = stage, arrived, self._stages.bounds[stage]
        self.is_inside = False
        try:
            yield
        finally:
            self.stage = self._arrived = None

    @contextmanager
    def probing(self) -> Generator[None, None, None]:
        """Inside, a step is left at its first block, with what it gives to that."""
        self._is_probe = True
        try:
            with self.watching():
                yield
        finally:
            self._is_probe = False

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Inside, the use of a parameter that another stage holds is refused."""
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
    """Refuses what would compute with the zeros that stand for other stages' parameters.

    Before the blocks those of the first stage may be used, because hidden states that come of them are replaced.
    """

    def __init__(self, borrowed: dict[int, tuple[str, int]], flow: _Flow) -> None:
        super().__init__()
        self._borrowed, self._flow = borrowed, flow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in seams.tree_leaves((args, kwargs)):
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
