"""The state of a run in stages: who holds what of the whole, so that keys and numbers in checkpoints are those of a run
without a pipeline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_lightning.checkpoint.full_state import full_model_state
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.collectives import all_gather_json, check_agreement, fingerprint
from moe_lightning.parallel.context import Mesh, World, all_reduce_, broadcast_
from moe_lightning.parallel.mesh import stage_ranks
from moe_lightning.state.tensors import cuts_of, whole_shape
from moe_lightning.strategies.placed_experts import MigrationReport, PlacedExperts
from moe_lightning.strategies.stage_cut import StageCut
from moe_lightning.strategies.worlds import Worlds

T = TypeVar("T")


def stages_of(trainer: pl.Trainer) -> StageState | None:
    """Of a run; None without a pipeline."""
    return getattr(getattr(trainer.strategy, "state", None), "stages", None)


class StageState:
    """Of the stages on this rank.

    Args:
        cut: which parts they are.
        worlds: the ranks.

    Attributes:
        held: stages whose dense values are here; others of the cut may wait for theirs.
        placements: of all layers, each among the ranks of its stage.
        ranks: of the whole that hold each stage.
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
                for name in (*part._parameters, *part._buffers)
            }
            self._shared = {name for name, _ in cut.module.named_buffers() if cut.shares_buffer(name)}

    @property
    def _mesh(self) -> Mesh:
        return self._worlds.mesh

    @property
    def names(self) -> Collection[str]:
        """Of the parameters and buffers of all stages."""
        return self._stage_of

    def parts(self) -> list[str]:
        """Names of the stages, for inventories."""
        return [f"dense stage {stage} of {self.cut.num_stages}" for stage in range(self.cut.num_stages)]

    def stage_of(self, name: str) -> int:
        """The stage that has a parameter."""
        return self._stage_of[name]

    def belongs(self, name: str, stage: int) -> bool:
        """Whether a stage has a parameter or buffer; buffers outside of blocks are in all."""
        return name in self._shared or self._stage_of[name] == stage

    def holders(self, name: str) -> tuple[int, ...]:
        """The ranks of the whole that hold a parameter or buffer. All have a buffer outside of blocks, and the last
        stage, which runs whole steps, has the right one.
        """
        return tuple(self.ranks[self.cut.num_stages - 1 if name in self._shared else self._stage_of.get(name, 0)])

    # ------------------------------------------------------------------ experts

    def take_placements(self, placements: Sequence[Placement]) -> list[Placement]:
        """Of the layers that are here, out of those of all layers."""
        self.placements = list(placements)
        return self.own(placements)

    def own(self, of_layers: Sequence[T]) -> list[T]:
        """What is of the layers that are here, out of what is of all."""
        return [one for one, (_, stage) in zip(of_layers, self._layers, strict=True) if stage in self.cut.stages]

    def replace(
        self, experts: PlacedExperts, placements: Sequence[Placement], optimizers: Sequence[Optimizer]
    ) -> MigrationReport:
        """See `ExpertParallelStrategy.replace_experts`; collective over all ranks, and `moved_states` are those of all.

        Raises:
            ConfigurationError: on every rank, what one of them refuses, before anything moves.
        """
        if len(placements) != len(self._layers):
            raise ConfigurationError(
                f"{len(placements)} placements do not fit the {len(self._layers)} MoE layers of all stages of mesh.pp: "
                "give one for each"
            )
        wanted = fingerprint(*(placement.replicas for placement in placements))
        check_agreement(wanted, "the new placement", self.whole)
        refusals = all_gather_json(experts.refusal(self.own(placements)), self._mesh.pipe)
        if refusal := next(filter(None, refusals), None):
            raise ConfigurationError(refusal)
        self._worlds.leave()
        report = experts.replace(self.take_placements(placements), optimizers, self.nodes(self._worlds.node_of))
        moved = torch.tensor(report.moved_states, device=self.whole.device)
        all_reduce_(moved, self._mesh.pipe)
        return replace(report, moved_states=int(moved))

    def placements_of_all(self, own: Sequence[Placement]) -> list[Placement]:
        """Of all layers, from those of the layers here; collective over the stages."""
        experts = max((layer.num_experts for layer in self.layers), default=0)
        tables = [torch.tensor(placement.replicas) for placement in own]
        told = self.counts_of_all(torch.stack(tables) if tables else torch.zeros(0, experts, self.num_ranks).long())
        return [] if told is None else [Placement(replicas=table) for table in told.cpu().numpy()]

    @property
    def own_ranks(self) -> Sequence[int]:
        """Of the whole, that hold the stages here."""
        return self.ranks[self.cut.stages[0]]

    def nodes(self, of_ranks: Sequence[int]) -> tuple[int, ...]:
        """Of the ranks of the stages here, numbered from 0, out of those of all ranks."""
        found = [of_ranks[rank] for rank in self.own_ranks]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(found))}
        return tuple(numbers[node] for node in found)

    def stacks(self, experts: PlacedExperts) -> list[ExpertStack]:
        """Of all layers, over all ranks; nothing lies here of those of other stages."""
        own = dict(zip(experts.layers, experts.stacks, strict=True))
        found = []
        for (layer, stage), first in zip(self._layers, self.placements, strict=True):
            stack = own.get(layer)
            here = first if stack is None else stack.placement
            found.append(
                ExpertStack(
                    parameters=layer.experts.stacked_parameters() if stack is None else stack.parameters,
                    slot_experts=() if stack is None else stack.slot_experts,
                    placement=here.over(self.ranks[stage], self._mesh.whole.size),
                    rank=self._mesh.whole.rank,
                    base=layer.experts.base_names,
                )
            )
        return found

    def counts_of_all(self, own_LE: Tensor | None) -> Tensor | None:
        """A number for each expert, or anything else of each layer, int64 [L, ...], from those of the layers here; None
        where all are 0. Collective.

        Args:
            own_LE: of the layers here; None on all ranks of a stage: zeros [L, E].
        """
        experts = max((layer.num_experts for layer, _ in self._layers), default=0)
        device, shape = self._mesh.whole.device, (experts,) if own_LE is None else own_LE.shape[1:]
        all_LE = torch.zeros(len(self._layers), *shape, dtype=torch.int64, device=device)
        if own_LE is not None:
            all_LE[self.numbers] = own_LE.to(device)
        all_reduce_(all_LE, self._mesh.pipe)
        return all_LE if bool(all_LE.any()) else None

    @property
    def layers(self) -> list[MoELayer]:
        """Of all stages."""
        return [layer for layer, _ in self._layers]

    @property
    def numbers(self) -> list[int]:
        """Which of the MoE layers of the whole are here."""
        return self.own(range(len(self._layers)))

    @property
    def without_layers(self) -> list[int]:
        """Stages whose ranks have no MoE layer at all; the ranks of several stages may be the same."""
        with_layers = {tuple(self.ranks[stage]) for _, stage in self._layers}
        return [stage for stage, ranks in enumerate(self.ranks) if tuple(ranks) not in with_layers]

    @property
    def pipe(self) -> World:
        """The ranks of the other stages for this rank's samples."""
        return self._mesh.pipe

    @property
    def num_ranks(self) -> int:
        """Of a stage."""
        return self._mesh.world.size

    @property
    def whole(self) -> World:
        """The ranks of all stages."""
        return self._mesh.whole

    def ranks_of_layers(self, ranks: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """That hold each layer.

        Args:
            ranks: that hold each stage.
        """
        return [ranks[stage] for _, stage in self._layers]

    # ------------------------------------------------------------------ after training

    @torch.no_grad()
    def gather(self, most_bytes: int) -> None:
        """Keep the dense values of all stages on every rank, where they take no more than this on any; collective."""
        with self.cut.whole():
            entries = list(self.cut.dense())
        size = sum(whole_shape(p).numel() * p.element_size() for *_, p, _ in entries)
        if size > min(all_gather_json(most_bytes, self.whole)):
            rank_zero_warn(
                "training has ended, and the dense parameters are larger than what a rank may keep of them: every rank "
                "has those of its stages only, so go on from a checkpoint"
            )
            return
        for part, name, parameter, stage in entries:
            values = torch.empty_like(parameter, device=self.whole.device) if parameter.is_meta else parameter.detach()
            broadcast_(values, self.ranks[stage][0], self.whole)
            if parameter.is_meta:
                self.cut.kept[part, name] = values.cpu()

    # ------------------------------------------------------------------ optimizers

    def leave_absent(self, optimizers: Sequence[Optimizer]) -> None:
        """Leave optimizers, which were made for all parameters, those that are here."""
        here = set(self.cut.module.parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in here:
                        optimizer.state.pop(parameter, None)
                group["params"] = [p for p in group["params"] if p in here]

    # ------------------------------------------------------------------ one file

    def full_model_state(self, state: Mapping[str, Any], stacks: Sequence[ExpertStack]) -> dict[str, Any]:
        """The whole module's state_dict on rank 0; empty on the others. Collective.

        Args:
            state: of this rank's parts.
            stacks: of all layers.
        """
        owners: dict[nn.Parameter, ExpertStack] = {p: stack for stack in stacks for p in stack.parameters.values()}
        with self.cut.whole():
            named = self.cut.module.named_parameters(remove_duplicate=False)
            experts = {name: owners[parameter] for name, parameter in named if parameter in owners}
            cuts = cuts_of(self.cut.module)
        own = {name: v for name, v in state.items() if not (isinstance(v, Tensor) and v.is_meta)}
        rank = self._mesh.whole.rank
        whole_here = own.keys() - experts.keys() - cuts.keys()
        spoken = {name: own[name] for name in whole_here if self.holders(name)[0] == rank}
        whole = full_model_state(own, experts, self._mesh.whole, cuts=cuts, spoken=spoken)
        return {name: whole[name] for name in self._names} if whole else {}

    def own_part(self, full: Mapping[str, Any], *, strict: bool) -> Mapping[str, Any]:
        """What a whole state_dict has for this rank, and what is in no stage."""
        others = set(self._names) - set(self.cut.module.state_dict(keep_vars=True))
        return {name: value for name, value in full.items() if name not in others}
