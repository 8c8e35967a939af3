"""The stages of a pipeline on their way from world to world: a rank may come to hold another stage than before.

In a new world nothing that counts is changed before everything has arrived. Meanwhile a rank holds the stages that it
had and those that it will have; what others will hold stays with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.arrays import BoolArray
from moe_lightning.balancing.migration import held_states, plan_migration
from moe_lightning.balancing.repair import repair_stages
from moe_lightning.checkpoint.full_state import share_optimizers
from moe_lightning.dispatch.placement import Placement
from moe_lightning.kernels import pack, packed_bytes, unpack
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, agree
from moe_lightning.parallel.exchange import PeerBuffer, exchange_buffers
from moe_lightning.parallel.mesh import Part, stage_ranks
from moe_lightning.state.table import State
from moe_lightning.state.tensors import cut_of, mark
from moe_lightning.strategies.dense_parameters import DenseParts, Rows
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.stages import StageState
from moe_lightning.strategies.worlds import Worlds


class Holder(Protocol):
    """The state of a rank, `RankState`, as far as stages concern it."""

    stages: StageState | None
    optimizers: Sequence[Optimizer]
    max_slots: int | None

    @property
    def module(self) -> pl.LightningModule: ...

    @property
    def experts(self) -> PlacedExperts: ...

    def training_state(self) -> State: ...

    @property
    def parts(self) -> DenseParts: ...

    def replace_parameters(self, others: Mapping[nn.Parameter, nn.Parameter]) -> None: ...

    def fill_groups(self) -> None: ...

    def keep_states(self, units: Iterable[str]) -> None: ...


class StageMoves:
    """Brings the stages of a pipeline across, with their optimizer states and experts.

    Args:
        state: of the rank.
        worlds: with the axes of their meshes.
    """

    def __init__(self, state: Holder, worlds: Worlds) -> None:
        self._state, self._worlds = state, worlds

    @property
    def _stages(self) -> StageState:
        assert self._state.stages is not None
        return self._state.stages

    def named(self) -> tuple[list[str], list[str]]:
        """Names of all stages, and of those whose dense values are here, or this rank's parts of them."""
        names = self._stages.parts()
        return names, [names[stage] for stage in self._stages.held]

    def sharers(self, world: World) -> tuple[World, Sequence[int]]:
        """The ranks of a world that hold the same stages as this one, and their numbers there."""
        if self._state.stages is None:
            return world, range(world.size)
        ranks = self.ranks_in(range(world.size))
        peers = next((own for own in ranks if world.rank in own), [world.rank])
        return world.stage or World.offline(peers.index(world.rank), len(peers), world.device), peers

    def ranks_in(self, ranks: Sequence[int]) -> list[Sequence[int]]:
        """Which of these ranks will hold each stage, once they are a world."""
        axes, count = self._worlds.axes, self._stages.cut.num_stages
        return [[ranks[at] for at in stage_ranks(stage, len(ranks), axes)] for stage in range(count)]

    def ranks_of_layers(self, world: World) -> list[Sequence[int]]:
        """The ranks of a world that will hold each MoE layer."""
        return self._stages.ranks_of_layers(self.ranks_in(range(world.size)))

    # ------------------------------------------------------------------ dense values

    def fetch(self, sources: Sequence[tuple[str, int]], world: World, *, is_live: bool) -> Rows:
        """What this rank lacks of the stages that it will hold in a world, by part; collective there.

        Args:
            sources: (name of a stage, a rank that has it); of a rank -1 nothing comes.
            is_live: whether what is here counts.
        """
        if not is_live:
            self._stages.held = ()
        self._state.keep_states(unit for unit, rank in sources if rank == world.rank)
        return self._fetch(dict(sources), self.ranks_in(range(world.size)), world, world.row_cut.part)

    def _fetch(self, sources: Mapping[str, int], ranks: list[Sequence[int]], world: World, part: Part) -> Rows:
        """
        Args:
            ranks: that will hold each stage.
            part: of its stages that this rank will hold, where ranks share copies.
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
            takers = {target for _, sender, target in ways if sender == source}
            share_optimizers(self._state.training_state(), takers, world, source)
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
        """Let the stages that this rank holds by now have these values; None: whoever restores them next gives them.

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
        """The stages that this rank will hold."""
        return [stage for stage, own in enumerate(ranks) if world.rank in own]

    def _tensors(self, stage: int) -> list[Tensor]:
        """What all ranks of a stage have alike of its dense parameters, their optimizer states and buffers, in an order
        that all ranks share.
        """
        state, stages, parts = self._state.training_state(), self._stages, self._state.parts
        found, cut = list[Tensor](), parts.ways() if parts.is_wished else {}
        for name, parameter in state.dense.items():
            if stages.belongs(name, stage) and name not in cut:
                found += [parameter.detach(), *(state.moments(parameter).values() if parts.with_moments else ())]
        return found + [buffer for name, buffer in self._state.module.named_buffers() if stages.belongs(name, stage)]

    def _hold(self, wanted: set[int]) -> None:
        """Have these stages, and the layers in them."""
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
        self._move_experts(world, placements, held, nodes, ranks, world.stage or everyone)

    def _move_experts(
        self,
        world: World,
        placements: Sequence[Placement],
        held: BoolArray,
        nodes: Sequence[str],
        ranks: list[Sequence[int]],
        among: World | None,
    ) -> None:
        """Given who will hold each stage, and who dispatches the layers here; None: nobody, until there are more."""
        stages, experts, optimizers = self._stages, self._state.experts, self._state.optimizers
        own = self._wanted(ranks, world)
        self._hold({*stages.held, *own})
        here = stages.numbers
        dtypes = {str(tensor.dtype).removeprefix("torch.") for s in experts.stacks for tensor in s.tensors(optimizers)}
        told = all_gather_json(sorted(dtypes), world) if _moves(placements, held) else []
        agreed = {getattr(torch, name) for names in told for name in names}
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
        experts.settle(layers, stages.own(stages.placements), among or offline)

    # ------------------------------------------------------------------ before ranks leave

    def hand_over(self, staying: Sequence[int], world: World, nodes: Sequence[str], *, min_replicas: int) -> None:
        """Before ranks leave: those that stay take the stages over that they will hold; collective.

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
        alone = World.offline(world.rank, world.size, world.device)
        self.install(rows, alone)
        self._worlds.take_place(alone)  # where nothing is cut


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return pack([tensor.cpu() for tensor in tensors]) if tensors else torch.empty(0, dtype=torch.uint8)


def _held(placements: Sequence[Placement], num_ranks: int) -> BoolArray:
    return held_states(placements) if placements else np.zeros((0, 0, num_ranks), dtype=np.bool_)


def _moves(placements: Sequence[Placement], held: BoolArray) -> bool:
    """Whether any expert has to travel."""
    lacking = _held(placements, held.shape[2]) & ~held
    return bool((lacking & held.any(axis=2, keepdims=True)).any()) if len(placements) else False
