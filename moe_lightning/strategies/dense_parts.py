"""The dense parameters of a run of which ranks have parts, from world to world: rows (`fully_sharded.py`), parts by
tensor index (`tensor_parts.py`), or rows of these.

In a new world nothing is changed before everything has arrived: a fault on the way leaves the parts of the former world
as they were. Parts travel block by block, so no rank ever has the values of a whole model.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from moe_lightning import seams
from moe_lightning.fsdp_seams import end_backward
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, all_reduce_, broadcast_
from moe_lightning.parallel.fsdp import (
    is_sharded,
    let_go_of_gathered,
    materialise,
    replace_parameters,
    shard_dense,
    sum_gradients,
    undo_shard,
)
from moe_lightning.parallel.mesh import Part, RowCut, TensorCut
from moe_lightning.state.table import State
from moe_lightning.state.tensors import cuts_of, is_cut, local, mark, whole_shape
from moe_lightning.strategies.module_checks import identical_buffers
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.row_moves import RowMoves, Rows, held_rows
from moe_lightning.strategies.stage_state import StageState
from moe_lightning.strategies.tensor_parts import TensorParts, has_index


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
        seams.evaluate_without_inference_mode(self._state.module.trainer)
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
