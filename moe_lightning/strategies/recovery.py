"""Recovery of a run in a new world: sources of state and its transfer.

`RecoveryPlanner` restores live state if nothing of it is lost, else saved state. `StateRecovery` brings all ranks to
the version of its plan.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from moe_lightning.balancing.repair import Repair, repair_stages
from moe_lightning.checkpoint.directory import is_sound, mark_damaged
from moe_lightning.checkpoint.full_state import broadcast_frozen
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.memory import (
    DamagedSnapshots,
    MemoryCheckpoint,
    RecoverySources,
    fetch,
    storage_inventory,
)
from moe_lightning.checkpoint.recovery_plan import (
    RankInventory,
    RecoveryPlan,
    StorageInventory,
    plan_recovery,
    without_snapshots,
)
from moe_lightning.checkpoint.storage import place_of
from moe_lightning.compat import private_lightning
from moe_lightning.elastic.worker import PeerFailed
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json, failing_together
from moe_lightning.parallel.context import World, agree
from moe_lightning.state.transfer import Units
from moe_lightning.strategies.checkpoints import verified_together
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import ExpertParallelCallback, call_hook

if TYPE_CHECKING:
    from moe_lightning.strategies.committed_step import CommittedStep
    from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy

Phase = Literal["leaving", "rendezvous", "groups", "plan", "movement", "resume"]

PHASES: tuple[str, ...] = get_args(Phase)
"""Phases of a recovery, in their order."""


@dataclass
class Stopwatch:
    """Seconds of the phases of a recovery."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class RecoveryPlanner:
    """Planner that reads saved state only if live state is not enough: that reads files, and all ranks wait for the
    plan.

    Args:
        sources: places of saved state; None if nothing is saved.
        publish: publishes a snapshot that is being copied; called before snapshots are looked for.

    Attributes:
        sources: as given.
        storage: the checkpoint that the last plan uses; None if it uses none.
    """

    def __init__(self, sources: RecoverySources | None, publish: Callable[[], None] = lambda: None) -> None:
        self.sources, self._publish = sources, publish
        self.storage: Checkpoint | None = None
        self._damaged: dict[str, int] = {}  # last good step, by session

    def distrust_after(self, step: int, *, marks: bool) -> None:
        """Use nothing that was saved after a step so far: it may be damaged.

        Args:
            marks: True on one rank, which records it for later runs.
        """
        assert self.sources is not None
        self._publish()  # a first snapshot of its session that is being copied counts, too
        sessions = {snapshot.session for snapshot in self.sources.snapshots()}
        self._damaged |= {session: min(step, self._damaged.get(session, step)) for session in sessions}
        if marks and sessions:
            mark_damaged(self.sources.root, max(sessions), step)

    def plan(
        self,
        inventories: list[RankInventory],
        world: World,
        *,
        num_layers: int,
        num_experts: int,
        last_step: int,
        has_trained: bool,
        damaged: Collection[tuple[str, str, int, int]] = (),
    ) -> tuple[RecoveryPlan, list[RankInventory]]:
        """Return the plan, the same on every rank, and its inventories; collective.

        Args:
            inventories: of all ranks, with snapshots or without.
            num_layers, num_experts: L and E.
            last_step: last step that this rank committed.
            has_trained: True if this rank's values may differ from the initial ones.
            damaged: snapshots that are not used, see `DamagedSnapshots`; the same on every rank.

        Raises:
            ConfigurationError: no source is left.
            PeerFailed: no source existed yet: fresh processes have the initial values.
        """
        shape = {"num_layers": num_layers, "num_experts": num_experts}
        plan = plan_recovery(inventories, None, **shape)
        if plan.level == "live" and not plan.reads and not plan.stale:
            return plan, inventories
        if self.sources is not None:
            if not any(inventory.snapshots for inventory in inventories):
                inventories = self._with_snapshots(inventories, self.sources, world)
            inventories = without_snapshots(inventories, damaged)
            plan = plan_recovery(inventories, self._newest_on_storage(self.sources, world), **shape)
        if plan.level == "nothing" and not any(all_gather_json(has_trained, world)):
            fresh = [replace(inventory, live_version=0) for inventory in inventories]
            plan = plan_recovery(fresh, None, **shape)  # no rank has trained yet: the state is the initial one
            if plan.level == "nothing":
                raise PeerFailed(
                    "no rank that has trained is left, and parameters that only lost ranks had are saved nowhere, so "
                    "all ranks start over",
                    "death",
                )
        if plan.level == "nothing":
            saves = "save more often or with protection=arc" if self.sources else "add a PartialExpertsCheckpoint"
            raise ConfigurationError(
                f"no rank, snapshot or checkpoint holds every expert and every part of dense parameters any more, the "
                f"last committed step was {last_step}: raise min_replicas, use dense=hsdp instead of fsdp, or {saves}"
            )
        return plan, inventories

    def _with_snapshots(
        self, inventories: list[RankInventory], sources: RecoverySources, world: World
    ) -> list[RankInventory]:
        """Add the snapshots in each node's memory, which its first rank reports."""
        self._publish()
        mine = inventories[world.rank]
        first = next(inventory.rank for inventory in inventories if inventory.node == mine.node)
        with failing_together(world):
            saved = sources.snapshots() if world.rank == first else []
            found = [each for each in saved if is_sound(each.session, each.step, self._damaged)]
        return [RankInventory.from_json(e) for e in all_gather_json(mine.with_snapshots(found).to_json(), world)]

    def _newest_on_storage(self, sources: RecoverySources, world: World) -> StorageInventory | None:
        """Return the inventory of the newest checkpoint that is whole or can be repaired, as rank 0 finds it."""
        own = None
        checkpoint = verified_together(sources.newest_checkpoint, world, range(world.size))
        with failing_together(world):
            if checkpoint is not None:
                own = [str(checkpoint.path), checkpoint.substitutes, storage_inventory(checkpoint).to_json()]
        found = all_gather_json(own, world)[0]
        self.storage = None
        if found is None:
            return None
        with failing_together(world):
            self.storage = checkpoint or Checkpoint(place_of(found[0]), substitutes=found[1])
        return StorageInventory.from_json(found[2])


def set_up_data(trainer: pl.Trainer) -> None:
    """Build all loaders of a fit before its first world trains or before this process joins one: Lightning builds them
    when they are needed, with barriers in which ranks with loaders do not take part.
    """
    loop = trainer.fit_loop
    loop.setup_data()
    if trainer.enable_validation and trainer.val_dataloaders is None:
        with private_lightning.validating(trainer):
            loop.epoch_loop.val_loop.setup_data()


def inventory_of(
    state: TrainState, *, rank: int, node: str, version: int, counts: bool, is_prepared: bool
) -> RankInventory:
    """Return the inventory of a rank that leaves its former world.

    Args:
        rank, node: its place in the new one.
        version: committed optimizer steps of its live state.
        counts: True if that state is whole and of this run.
        is_prepared: True if it was ready for the update after that.
    """
    experts, (sharded, owned) = state.experts, state.transfer.names()
    numbers = {layer: number for number, layer in enumerate(state.stages.layers)}
    stacks = zip(experts.layers, experts.stacks, strict=True)
    held = [(numbers[layer], expert) for layer, stack in stacks for _, expert in stack.held()]
    return RankInventory(
        rank=rank,
        node=node,
        live_version=version if counts else -1,
        prepared=counts and is_prepared,
        experts=tuple(held),
        sharded_dense=sharded if counts or not state.shards.shares_weights else (),
        owned_dense=owned,
        replayed_dense=state.shards.replay.names if state.shards.replay is not None else (),
        replay_version=state.shards.replay.version if state.shards.replay is not None and counts else -1,
    )


def repaired(plan: RecoveryPlan, state: TrainState, world: World, *, min_replicas: int) -> Repair:
    """Return the placements of the new world; rank 0 warns if slots are too few for the wanted replicas.

    Args:
        min_replicas: wanted nodes that hold each expert, or ranks where there are fewer nodes.
    """
    ranks = state.stages.layers_of(state.stages.ranks_in(range(world.size)))
    max_slots = state.experts.options.slots
    repair = repair_stages(plan.held, ranks, nodes=plan.nodes, min_replicas=min_replicas, max_slots=max_slots)
    if repair.min_replicas < min([min_replicas, *map(len, ranks)]):
        rank_zero_warn(
            f"slots are left for {repair.min_replicas} instead of {min_replicas} replicas of each expert: "
            "another lost one may cost state until ranks come back"
        )
    return repair


def fetch_missing(
    planner: RecoveryPlanner, plan: RecoveryPlan, repair: Repair, world: World, *, is_trusted: bool
) -> MemoryCheckpoint | None:
    """Return the state that the plan restores from snapshots and storage, as far as this rank needs it; None if it is
    none.

    Args:
        is_trusted: see `CheckpointSource`.

    Raises:
        DamagedSnapshots: on every rank.
    """
    if plan.level == "live" and not plan.reads and not plan.from_storage:
        return None
    assert planner.sources is not None
    needed = {
        (index, expert)
        for index, placement in enumerate(repair.placements)
        for expert in placement.experts_on(world.rank)
        if not plan.held[index, expert].any()
    }
    saved = fetch(plan, world, planner.sources.arenas, needed, storage=planner.storage)
    if is_trusted:
        saved.trust()
    return saved


def fetch_dense(state: TrainState, plan: RecoveryPlan, world: World) -> Units:
    """Transfer the dense values that this rank will hold in another world and lacks; collective there if a rank may
    lack any. Values of live ranks stay unchanged.
    """
    units = state.transfer.fetch(world, plan.live_ranks, plan.apply_prepared)
    if state.shards.shares_weights:
        agree(world)  # all have theirs and continue, or none does
    return units


def restore_missing(state: TrainState, plan: RecoveryPlan, saved: MemoryCheckpoint | None) -> None:
    """Restore the state that the plan reads from snapshots and storage.

    Args:
        saved: the state that was fetched; None: nothing is restored.
    """
    if saved is None:
        return
    own = state.training_state()
    if plan.level == "live":
        if plan.lacks_dense:
            own.restore_dense(saved)
        own.restore_experts(saved, {(la, e) for la, e in np.argwhere(~plan.held.any(axis=2)).tolist()})
        return
    own.restore_model(saved)
    own.restore_optimizers(saved)
    state.resume_from(saved)


class StateRecovery:
    """Recovery of the state of this rank in a new world, where all ranks come to one version.

    Args:
        strategy: of this rank.
        step: the last one that was committed.

    Attributes:
        planner: of the running fit.
    """

    def __init__(self, strategy: ExpertParallelStrategy, step: CommittedStep) -> None:
        self._strategy, self._step = strategy, step
        self.planner = RecoveryPlanner(None)

    def begin_fit(self, sources: RecoverySources | None) -> None:
        """Plan by the places of saved state of a fit; None if nothing is saved."""
        publish = partial(call_hook, self._strategy.state.module, ExpertParallelCallback.on_before_recovery)
        self.planner = RecoveryPlanner(sources, publish)

    def recover(
        self, world: World, watch: Stopwatch, *, node: str, is_newcomer: bool, min_replicas: int
    ) -> tuple[RecoveryPlan, Repair]:
        """Plan with all ranks of a world, and move to the planned version; collective.

        Args:
            node: of this rank.
            is_newcomer: this process holds nothing of the run yet.
            min_replicas: nodes that shall hold each expert.

        Raises:
            ConfigurationError, PeerFailed: see `RecoveryPlanner.plan`.
        """
        state, step = self._strategy.state, self._step
        layers = state.stages.layers
        offers = step.is_whole and not is_newcomer
        known = all_gather_json(step.version if offers and step.is_restorable else -1, world)
        own = inventory_of(
            state,
            rank=world.rank,
            node=node,
            version=step.version,
            counts=offers and step.version in known,  # the fit loop of a rank there is to be had
            is_prepared=step.prepared is not None and not state.shards.shares_optimizers,  # others' updates lack
        )
        inventories = [RankInventory.from_json(entry) for entry in all_gather_json(own.to_json(), world)]
        damaged = set[tuple[str, str, int, int]]()  # snapshots
        while True:
            with watch.phase("plan"):
                plan, inventories = self.planner.plan(
                    inventories,
                    world,
                    num_layers=len(layers),
                    num_experts=max((layer.num_experts for layer in layers), default=0),
                    last_step=step.version,
                    has_trained=step.version > 0 or step.is_torn,
                    damaged=damaged,
                )
                repair = repaired(plan, state, world, min_replicas=min_replicas)
            try:
                with watch.phase("movement"):
                    self._move(plan, repair, world, is_newcomer=is_newcomer)
                return plan, repair
            except DamagedSnapshots as damage:
                damaged.update(damage.damaged)

    def _move(self, plan: RecoveryPlan, repair: Repair, world: World, *, is_newcomer: bool) -> None:
        """Transfer the state of the plan's version to the ranks of the placements."""
        state, step = self._strategy.state, self._step
        if world.rank in plan.apply_prepared:
            step.apply_prepared()
        saved = fetch_missing(self.planner, plan, repair, world, is_trusted=self._strategy.checkpoints.reads_objects)
        step.forget_prepared()
        # Values of ranks that are not live are overwritten; another fault leaves those of live ranks as they were, or
        # whole in the new world, except where optimizer shards change hands or something is restored.
        is_replaced = plan.level != "live" or world.rank not in plan.live_ranks
        if is_replaced and not (is_newcomer and plan.level == "live"):
            step.begin_overwriting()
        if is_replaced:
            state.forget_restored()  # not before: until the window is repeated, its state is not whole
        units = fetch_dense(state, plan, world) if plan.level == "live" else {}
        state.transfer.enter_world(world, repair.placements, plan.held)
        self._strategy.set_present(world)  # from here on the new world is the present one
        if plan.level != "live":  # else it comes with the optimizers
            is_old = all_gather_json(not is_newcomer, world)
            if any(is_old):
                newcomers = {rank for rank, old in enumerate(is_old) if not old}
                broadcast_frozen(state.module, newcomers, world, is_old.index(True))
        if saved is not None or state.transfer.moves_optimizers:
            step.begin_overwriting()
        state.transfer.install(units, world)
        state.transfer.move_moments(plan.shards if plan.level == "live" else ())
        restore_missing(state, plan, saved)
        state.after_writing()
        agree(world)
        step.end_overwriting()
