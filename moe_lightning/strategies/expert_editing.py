"""Experts pruned, merged and duplicated while a run goes on: weights, moments, router rows and placements of every
layer become those of another number of experts, at a step boundary.

Like a step, an edit has two phases: when every rank has all that it needs, each changes by itself. A rank that a fault
keeps from hearing that all are ready learns in the next world whether others have changed, and then changes, too, or
the edit is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from moe_lightning.algorithms.migration import Transfer
from moe_lightning.algorithms.placement import Placement, uniform_placement
from moe_lightning.checkpoint.reader import CheckpointSource
from moe_lightning.comm.collect import all_gather_json
from moe_lightning.comm.decision_check import check_agreement, fingerprint
from moe_lightning.comm.expert_migration import migrate_rows, next_slots
from moe_lightning.comm.world import World, agree
from moe_lightning.config import PositiveInt, build_config, validated
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.modules.experts import VACANT
from moe_lightning.modules.moe_layer import MoELayer
from moe_lightning.modules.router import Router
from moe_lightning.state.expert_mixing import mixed, mixed_slots
from moe_lightning.state.expert_stacks import stacked_states
from moe_lightning.strategies.expert_slots import grow, in_slots
from moe_lightning.strategies.rank_state import RankState
from moe_lightning.strategies.worlds import Worlds

EDITS_KEY = "expert_edits"
"""In a checkpoint: the `EditHistory` of its run."""

Table = NDArray[np.float64]
"""Shares [new experts, old experts], see `algorithms.expert_edits`."""


@validated
@dataclass(frozen=True, kw_only=True)
class EditHistory:
    """What became of a run's experts.

    Attributes:
        built: experts of a layer as the run's configuration has them.
        steps: after which the layers were edited.
        num_experts: of a layer, now.
    """

    built: PositiveInt
    steps: Sequence[PositiveInt] = ()
    num_experts: PositiveInt

    def after(self, step: int, num_experts: int) -> EditHistory:
        """With one more edit."""
        return replace(self, steps=(*self.steps, step), num_experts=num_experts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"steps": list(self.steps)}


class EditListener:
    """A callback that keeps something for each expert of a layer."""

    def forget_experts(self, trainer: pl.Trainer) -> None:
        """The layers have other experts from now on: what was kept for those before is void."""

    def experts_edited(self, trainer: pl.Trainer) -> None:
        """Begin anew with the experts that there are; not called where a recovery follows on the edit. Collective."""


class ExpertEditing:
    """Edits the experts of a run, and remembers it.

    Args:
        worlds: whose ranks hold them.
        state: of this rank.

    Attributes:
        history: None until there is something to tell.
    """

    def __init__(self, worlds: Worlds, state: RankState) -> None:
        self._worlds, self._state = worlds, state
        self.history: EditHistory | None = None
        self._prepared: Callable[[], None] | None = None

    @property
    def num_experts(self) -> int:
        """Of a layer."""
        return self._state.experts.layers[0].num_experts

    def require_editable(self) -> None:
        """
        Raises:
            ConfigurationError: experts that cannot become more or fewer.
        """
        layers, axes = self._state.experts.layers, self._worlds.axes
        refusals = {
            "a model without MoE layers": not layers,
            "layers with different numbers of experts": len({layer.num_experts for layer in layers}) > 1,
            f"mesh.pp={axes.pp} or mesh.tp={axes.tp}": axes.pp > 1 or axes.tp > 1,
            "dense=fsdp or hsdp, which cut router rows,": self._state.is_shared,
            "dispatch groups (ep_size)": any(len(layer.dispatcher.groups) > 1 for layer in layers),
            "adapters or frozen experts": any(m.experts.adapter or m.experts.base_names for m in layers),
            "a router of one's own": any(not isinstance(layer.router, Router) for layer in layers),
            "an adapted router": any(getattr(layer.router, "adapter", None) is not None for layer in layers),
            "router.num_groups": any(
                isinstance(layer.router, Router) and layer.router.config.num_groups > 1 for layer in layers
            ),
        }
        for what, is_so in refusals.items():
            if is_so:
                raise ConfigurationError(f"{what} cannot be combined with live edits of experts: drop one of them")

    def check_size(self, num_experts: int) -> None:
        """
        Raises:
            ConfigurationError: a number of experts that routers or slots cannot serve.
        """
        for layer in self._state.experts.layers:
            layer.router.config.check(num_experts)
        for placement in self._placements(num_experts):
            in_slots(placement, 0, self._state.max_slots)

    def edit(self, tables: Sequence[Table], step: int) -> None:
        """Make every layer's experts of the old ones; collective, between steps.

        Args:
            tables: of each layer, all for equally many new experts.
            step: after which this happens.
        """
        known = self.history or EditHistory(built=tables[0].shape[1], num_experts=tables[0].shape[1])
        self._apply(tables, known.after(step, len(tables[0])))
        self._tell_callbacks()

    def tell(self, checkpoint: dict[str, Any]) -> None:
        """Put the history into a checkpoint."""
        if self.history is not None:
            checkpoint[EDITS_KEY] = self.history.to_json()

    def follow(self, checkpoint: Mapping[str, Any], held: int | None) -> bool:
        """Have as many experts as a checkpoint's run, whose values are loaded next; collective where there is
        something to do. Whether there was.

        Args:
            held: experts of a layer whose values the checkpoint has; None: not known.

        Raises:
            ConfigurationError: the module has neither the experts that the checkpoint's run began with nor those that
                it had.
            CheckpointError: the checkpoint tells something else.
        """
        history = read_history(checkpoint.get(EDITS_KEY), held)
        if history is None or not self._state.experts.layers:
            return False
        here, wanted = self.num_experts, history.num_experts
        if here not in (wanted, history.built):
            raise ConfigurationError(
                f"the checkpoint's run began with {history.built} experts a layer and has {wanted} since the edit "
                f"after step {history.steps[-1]}, but the module has {here}: build it with one of these numbers"
            )
        if here != wanted:
            self.require_editable()
            self._apply([_repeated(here, wanted)] * len(self._state.experts.layers), history)
        self._remember(history)
        return here != wanted

    # ------------------------------------------------------------------ recovering

    def meet(self, world: World, version: int) -> None:
        """In a new world, before anybody says what it holds: have the experts of the newest state that lives. Whoever
        was ready for the last edit makes it where others have; whoever has nothing gets room. Collective.

        Args:
            version: committed steps of this rank's live state; -1: it does not count.
        """
        told = all_gather_json([version, None if self.history is None else self.history.to_json()], world)
        prepared, self._prepared = self._prepared, None
        newest = max(told, key=lambda one: (one[0], 0 if one[1] is None else len(one[1]["steps"])))
        if newest[0] < 0:
            return  # nothing lives
        history = read_history(newest[1])
        if prepared is not None and version >= 0 and self.history != history:
            prepared()
            self._tell_callbacks()
        self._make_room(history)

    def go_back(self, restored: CheckpointSource) -> None:
        """Have room for the experts of a saved state, which come next."""
        told, held = restored.read_object("trainer").get(EDITS_KEY), restored.expert_versions().shape[1]
        self._make_room(read_history(told, held))

    def find_twins(self) -> None:
        """Rows of routers have arrived: where experts are copies of each other, every rank knows it."""
        for layer in self._state.experts.layers if self.history is not None else ():
            if isinstance(layer.router, Router):
                layer.router.find_twins()

    @torch.no_grad()
    def _make_room(self, history: EditHistory | None) -> None:
        """Have as many experts as this history has left, none of which is here, where it is another one."""
        if history == self.history:
            return
        known = history or self.history
        assert known is not None
        num_experts = known.built if history is None else known.num_experts
        experts, table = self._state.experts, _repeated(self.num_experts, num_experts)
        experts.forget_step()
        for layer in experts.layers:
            layer.experts.num_experts = num_experts
            layer.experts.slot_experts = (VACANT,) * layer.experts.num_slots
            _edit_router(layer, table, self._state.optimizers)
        experts.hold(experts.layers, [uniform_placement(num_experts, p.num_ranks) for p in experts.placements])
        self._remember(history)
        self._tell_module(num_experts)
        self._tell_callbacks()

    # ------------------------------------------------------------------ changing

    @torch.no_grad()
    def _apply(self, tables: Sequence[Table], history: EditHistory) -> None:
        experts, world, optimizers = self._state.experts, self._worlds.mesh.world, self._state.optimizers
        check_agreement(fingerprint(*(table.view(np.int64) for table in tables)), "the edit of experts", world)
        placements = self._placements(len(tables[0]))
        slots = [in_slots(placement, world.rank, self._room(placement)) for placement in placements]
        transfers = [
            t for i, table in enumerate(tables) for t in _lacking(i, table, experts.placements[i], placements[i])
        ]
        arriving = [{t.expert for t in transfers if (t.layer, t.target) == (i, world.rank)} for i in range(len(tables))]
        for parameter in self._state.module.parameters():
            parameter.grad = None
        for layer, coming in zip(experts.layers, arriving, strict=True):
            held = sum(expert >= 0 for expert in layer.experts.slot_experts)
            grow(layer, held + len(coming), optimizers)
        before = [
            replace(stack, slot_experts=layer.experts.slot_experts)
            for stack, layer in zip(experts.stacks, experts.layers, strict=True)
        ]
        after = [
            replace(stack, slot_experts=next_slots(stack.slot_experts, {*stack.slot_experts, *coming} - {-1}))
            for stack, coming in zip(before, arriving, strict=True)
        ]
        migrate_rows(before, after, optimizers, transfers, world)
        self._prepared = partial(self._change, tables, placements, [s.slot_experts for s in after], slots, history)
        agree(world)  # from here on nobody waits for anybody: all ranks change, or none
        prepared, self._prepared = self._prepared, None
        prepared()

    @torch.no_grad()
    def _change(
        self,
        tables: Sequence[Table],
        placements: Sequence[Placement],
        slots: Sequence[tuple[int, ...]],
        wanted: Sequence[tuple[int, ...]],
        history: EditHistory,
    ) -> None:
        """The second phase: this rank has all old experts that its new ones are made of.

        Args:
            slots, wanted: the old experts, and the new ones, in the slots of each layer.
        """
        experts, optimizers = self._state.experts, self._state.optimizers
        for layer, old, new, table in zip(experts.layers, slots, wanted, tables, strict=True):
            _edit_experts(layer, old, new, table, optimizers)
            _edit_router(layer, table, optimizers)
        experts.forget_step()
        experts.settle(experts.layers, placements, experts.world)
        experts.take_speeds(experts.speeds)
        self._remember(history)
        self._tell_module(len(tables[0]))

    def _remember(self, history: EditHistory | None) -> None:
        self.history = history
        self._state.edits = 0 if history is None else len(history.steps)

    def _tell_module(self, num_experts: int) -> None:
        told = getattr(self._state.module, "experts_edited", None)
        if told is not None:
            told(num_experts)

    def _tell_callbacks(self) -> None:
        trainer = self._state.trainer
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EditListener):
                callback.forget_experts(trainer)

    def _placements(self, num_experts: int) -> list[Placement]:
        """Of each layer: uniform, with as many copies as every expert has so far. A balancer goes on from there."""
        placements = self._state.experts.placements
        copies = min((int(p.pairs.num_holders.min()) for p in placements), default=1)
        return [uniform_placement(num_experts, p.num_ranks, copies) for p in placements]

    def _room(self, placement: Placement) -> int:
        """Slots of every rank: all have equally many."""
        most = max(len(placement.experts_on(rank)) for rank in range(placement.num_ranks))
        return most if self._state.max_slots is None else self._state.max_slots


def read_history(told: Any, held: int | None = None) -> EditHistory | None:
    """What a checkpoint, or another rank, tells of edits; None: there were none.

    Args:
        held: experts of a layer whose values the checkpoint has; None: not known. Room is made for no others.

    Raises:
        CheckpointError: it is no history, or that of other experts.
    """
    if told is None:
        return None
    try:
        history: EditHistory = build_config(EditHistory, told, key=EDITS_KEY)
    except ConfigurationError as error:
        raise CheckpointError(f"the checkpoint is damaged, or nothing of ours wrote it: {error}") from error
    problem = ""
    if not history.steps:
        problem = f"{EDITS_KEY} names no step"
    elif held not in (None, history.num_experts):
        problem = f"{EDITS_KEY}.num_experts={history.num_experts}, but it holds {held} experts a layer"
    if problem:
        raise CheckpointError(f"the checkpoint is damaged, or nothing of ours wrote it: {problem}")
    return replace(history, steps=tuple(history.steps))


def _repeated(num_experts: int, wanted: int) -> Table:
    """For so many experts, whose values come next, in the place of others."""
    table: Table = np.eye(num_experts)[np.arange(wanted) % num_experts]
    return table


def _lacking(layer: int, table: Table, now: Placement, then: Placement) -> list[Transfer]:
    """The old experts that ranks need for the new ones and do not hold."""
    transfers = []
    for rank in range(then.num_ranks):
        needed = np.flatnonzero(table[list(then.experts_on(rank))].any(axis=0)).tolist()
        for expert in sorted(set(needed) - set(now.experts_on(rank))):
            holders = now.holders(expert)
            transfers.append(Transfer(layer=layer, expert=expert, source=holders[rank % len(holders)], target=rank))
    return transfers


def _edit_experts(
    layer: MoELayer, slots: tuple[int, ...], wanted: tuple[int, ...], table: Table, optimizers: Sequence[Optimizer]
) -> None:
    for parameter in layer.experts.stacked_parameters().values():
        for optimizer, name, value in list(stacked_states(parameter, optimizers)):
            optimizer.state[parameter][name] = mixed_slots(value, slots, wanted, table)
        parameter.data = mixed_slots(parameter.data, slots, wanted, table)
    layer.experts.num_experts, layer.experts.slot_experts = len(table), wanted


def _edit_router(layer: MoELayer, table: Table, optimizers: Sequence[Optimizer]) -> None:
    router = layer.router
    assert isinstance(router, Router)
    for parameter in router.parameters():
        for optimizer in optimizers:
            state = optimizer.state.get(parameter, {})
            state.update({name: mixed(v, table) for name, v in state.items() if isinstance(v, torch.Tensor)})
        parameter.data = mixed(parameter.data, table)
    router.resize(len(table), {name: mixed(value, table) for name, value in router.named_buffers()})
