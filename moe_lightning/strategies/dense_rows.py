"""The dense parameters of a run whose rows are dealt over ranks, from world to world.

In a new world nothing is changed before everything has arrived: a fault on the way leaves the rows of the former world
as they were. Rows travel from block to block, so no rank ever has the values of a whole model.
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
from moe_lightning.algorithms.dense_shards import RowCut, TensorCut
from moe_lightning.comm.collect import all_gather_json
from moe_lightning.comm.world import World, all_reduce_, broadcast_
from moe_lightning.state.row_blocks import local
from moe_lightning.state.table import State
from moe_lightning.strategies.fully_sharded import (
    is_sharded,
    let_go_of_gathered,
    materialise,
    replace_parameters,
    shard_dense,
    sum_gradients,
    undo_shard,
)
from moe_lightning.strategies.module_checks import identical_buffers
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.row_moves import RowMoves, Rows, held_rows


class Holder(Protocol):
    """The state of a rank, `RankState`, as far as rows of parameters concern it."""

    @property
    def module(self) -> pl.LightningModule: ...

    @property
    def experts(self) -> PlacedExperts: ...

    def training_state(self) -> State: ...

    def replace_parameters(self, others: Mapping[nn.Parameter, nn.Parameter]) -> None: ...

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]: ...


class DenseRows:
    """Cuts the dense parameters of a rank's module, and brings their rows across.

    Args:
        state: of the rank.

    Attributes:
        entrusted: parts that ranks have left here before they went, by name, until the next world has its rows.
    """

    def __init__(self, state: Holder) -> None:
        self._state = state
        self.entrusted: dict[str, Rows] = {}
        self._buffers: list[str] = []
        self._scalars: list[nn.Parameter] = []

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds rows of parameters only."""
        return is_sharded(self._state.module)

    def names(self) -> set[str]:
        """Of the parameters that are cut where there are ranks to share them."""
        return set(self._ways())

    def _ways(self) -> dict[str, TensorCut]:
        """How they are cut."""
        dense = self._state.training_state().dense
        return {name: TensorCut(sections=(parameter.shape[0],)) for name, parameter in dense.items() if parameter.ndim}

    # ------------------------------------------------------------------ a world that stays

    def begin(self, world: World) -> None:
        """Cut what rank 0 has; collective. A module that is cut already stays as it is."""
        seams.evaluate_without_inference_mode(self._state.module.trainer)
        if self.is_cut:
            return
        for tensor in self._replicated():
            broadcast_(tensor, 0, world)
        self._shard(world)

    def _shard(self, world: World) -> None:
        module, stack_of = self._state.module, self._state.experts.stack_of
        shard_dense(module, stack_of, world)
        alike = set(identical_buffers(module))
        self._buffers = [name for name, _ in module.named_buffers() if name not in alike]
        dense = (p for p in module.parameters() if p not in stack_of)
        self._scalars = [p for p in dense if not p.ndim and p.requires_grad]

    @torch.no_grad()
    def gather(self, world: World, most_bytes: int) -> None:
        """Give every rank whole parameters, as before `begin`, where they take no more than this on any rank;
        collective where they are cut.
        """
        if not self.is_cut:
            return
        self.rest()  # a callback may have called the module
        dense = self._state.training_state().dense.values()
        if sum(p.numel() * p.element_size() for p in dense) > min(all_gather_json(most_bytes, world)):
            rank_zero_warn(
                "training has ended, and the dense parameters are larger than what a rank may keep of them: every rank "
                "has its rows only, so go on from a checkpoint"
            )
            return
        cut = world.row_cut
        sources = [(name, ranks[0]) for name, ranks in zip(cut.names(), cut.holders, strict=True)]
        whole = RowCut.whole(world.size).of_all()
        rows = RowMoves(self._state.training_state(), self._ways(), sources, whole, world).exchange()
        self.leave()
        self.install(rows, World.single(world.device))

    def _replicated(self) -> Iterator[Tensor]:
        dense, module = self._state.training_state().dense, self._state.module
        yield from (parameter.detach() for parameter in dense.values())
        yield from (buffer for _, buffer in module.named_buffers())

    # ------------------------------------------------------------------ a step

    def take_buffers(self, world: World) -> None:
        """Before a forward pass: rank 0's buffers, as under DDP, but those that all ranks compute alike; collective."""
        if self.is_cut and self._buffers:
            for name, buffer in self._state.module.named_buffers():  # a user may have set one to None
                if name in self._buffers:
                    broadcast_(buffer, 0, world)

    @contextmanager
    def summing_later(self) -> Generator[None, None, None]:
        """Inside, backward passes leave the sum of gradients over ranks to a later one."""
        if not self.is_cut:
            yield
            return
        sum_gradients(self._state.module, now=False)
        try:
            yield
        finally:
            if self.is_cut:  # a fault may have undone it
                sum_gradients(self._state.module, now=True)

    def drop_frozen(self) -> None:
        """After a backward pass: no gradients for parameters that were frozen when their values were gathered already,
        as `toggle_optimizer` does inside of a step.
        """
        for parameter in self._state.module.parameters() if self.is_cut else ():
            if not parameter.requires_grad:
                parameter.grad = None

    @torch.no_grad()
    def sum_scalars(self, world: World) -> None:
        """Sum the gradients of scalar parameters, which cannot be cut, where others are; collective."""
        scalars = self._scalars
        if not scalars or not self.is_cut:
            return
        found = [[p.grad, torch.ones_like(p)] if p.grad is not None else [torch.zeros_like(p)] * 2 for p in scalars]
        sums = torch.tensor([[float(value) for value in pair] for pair in found], device=world.device)
        all_reduce_(sums, world)
        for parameter, (total, count) in zip(scalars, sums, strict=True):
            if count > 0:
                parameter.grad = total.to(parameter.dtype).reshape(parameter.shape)

    def rest(self) -> None:
        """After a forward pass without a backward one: nothing that was gathered stays."""
        if self.is_cut:
            let_go_of_gathered(self._state.module)

    def give_step_up(self, world: World) -> None:
        """When the Trainer stops because of an error: rows as between steps, ready for another one. Not collective."""
        if self.is_cut and self._state.module.trainer.interrupted:
            self.leave()
            self.install(held_rows(self._state.training_state(), self._ways()), world)

    # ------------------------------------------------------------------ from world to world

    def leave(self) -> None:
        """The world has ended: blocks stay, what fully_shard added goes."""
        if self.is_cut:
            undo_shard(self._state.module)

    def fetch(self, sources: Sequence[tuple[str, int]], world: World) -> Rows:
        """What this rank will hold in a world, from those that have it; collective there.

        Args:
            sources: (name of a part, its rank in the new world); of a rank -1 nothing comes.
        """
        cuts = world.row_cut.of_all()
        return RowMoves(self._state.training_state(), self._ways(), sources, cuts, world, self.entrusted).exchange()

    def hand_over(self, staying: Sequence[int], world: World) -> None:
        """Before ranks leave: the parts that only they have go to ranks that stay; collective where anything is cut."""
        if not self.is_cut:
            return
        cut, names = world.row_cut, world.row_cut.names()
        lost = [part for part, ranks in enumerate(cut.holders) if not set(ranks) & set(staying)]
        for number, part in enumerate(lost):
            keeper = staying[number % len(staying)]
            nothing, whole_part = replace(cut, part=cut.parts), replace(cut, part=part)
            cuts = [whole_part if rank == keeper else nothing for rank in range(world.size)]
            source = [(names[part], cut.holders[part][0])]
            rows = RowMoves(self._state.training_state(), self._ways(), source, cuts, world).exchange()
            if world.rank == keeper:
                self.entrusted[names[part]] = rows

    @torch.no_grad()
    def install(self, rows: Rows | None, world: World) -> None:
        """Cut the parameters for a world and give them these rows; None: whoever restores them next does.

        Not collective.
        """
        state, module = self._state.training_state(), self._state.module
        before = {name: parameter for name, parameter in state.dense.items() if parameter.ndim}
        moments = {parameter: state.moments(parameter) for parameter in before.values()}
        empty = {
            p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)
            for p in before.values()
        }
        replace_parameters(module, empty)
        if world.shards:
            self._shard(world)
        else:
            materialise(module, world.device)
        after = dict(module.named_parameters())
        self._state.replace_parameters({before[name]: after[name] for name in before})
        for name, old in before.items():
            scopes = {"weight": local(after[name])}
            for scope, tensor in moments[old].items():
                scopes[scope] = self._state.state_of(after[name])[scope] = tensor.new_empty(local(after[name]).shape)
            if rows is not None:
                for scope, tensor in scopes.items():
                    tensor.copy_(rows[f"dense/{name}/{scope}"])
        self.entrusted = {}
