"""Recovery of a run in a new world: sources of state, transfer, progress of the fit loop, and report.

`RecoveryPlanner` restores live state if nothing of it is lost, else saved state. `FitProgress` is the state of
Lightning's loops, schedulers and loaders after a committed step, in memory. Lightning resumes it with the next batch;
`finish_step` first does what was due after the step: a validation and the end of an epoch.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from moe_lightning.balancing.repair import Repair, repair_stages
from moe_lightning.checkpoint.files import PlainValues
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.memory import MemoryCheckpoint, RecoverySources, fetch, storage_inventory
from moe_lightning.checkpoint.recovery_plan import RankInventory, RecoveryPlan, StorageInventory, plan_recovery
from moe_lightning.checkpoint.storage import place_of
from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.compat.containers import AS_PLAIN
from moe_lightning.data.loader import StepLoader, follow_schedule
from moe_lightning.elastic.worker import PeerFailed
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json, broadcast_object
from moe_lightning.parallel.context import World, agree
from moe_lightning.state.transfer import Units
from moe_lightning.strategies.step_data import LOADERS_KEY, loader_states
from moe_lightning.strategies.train_state import TrainState

Phase = Literal["leaving", "rendezvous", "groups", "plan", "movement", "settling"]

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

    def plan(
        self,
        inventories: list[RankInventory],
        world: World,
        *,
        num_layers: int,
        num_experts: int,
        last_step: int,
        has_trained: bool,
    ) -> tuple[RecoveryPlan, list[RankInventory]]:
        """Return the plan, the same on every rank, and its inventories; collective.

        Args:
            inventories: of all ranks, with snapshots or without.
            num_layers, num_experts: L and E.
            last_step: last step that this rank committed.
            has_trained: True if this rank's values may differ from the initial ones.

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
        found = sources.snapshots() if world.rank == first else []
        return [RankInventory.from_json(e) for e in all_gather_json(mine.with_snapshots(found).to_json(), world)]

    def _newest_on_storage(self, sources: RecoverySources, world: World) -> StorageInventory | None:
        """Return the inventory of the newest checkpoint that is whole or can be repaired, as rank 0 finds it."""
        checkpoint = sources.newest_checkpoint() if world.rank == 0 else None
        own = None
        if checkpoint is not None:
            own = [str(checkpoint.path), checkpoint.substitutes, storage_inventory(checkpoint).to_json()]
        found = all_gather_json(own, world)[0]
        self.storage = None
        if found is None:
            return None
        self.storage = checkpoint or Checkpoint(place_of(found[0]), substitutes=found[1])
        return StorageInventory.from_json(found[2])


_LOOPS, _LOADERS, _CALLBACKS = "loops", "loaders", "callbacks"
_SCHEDULERS, _NEXT_SCHEDULERS = "lr_schedulers", "lr_schedulers_next_epoch"
_PRECISION = "precision"


@dataclass(frozen=True, kw_only=True)
class FitProgress:
    """State of the fit loop as in a checkpoint of this moment.

    Attributes:
        step: optimizer steps done.
        loops: state_dict of the fit loop and its parts.
        loaders: positions of the training loaders.
        lr_schedulers: their state_dicts.
        lr_schedulers_next_epoch: the same after the end of the epoch, at which plateaus count; None before.
        precision: state of the precision plugin: the scale of the loss under float16.
        validation_is_due: a validation follows this step, and has not ended yet.
        epoch_is_over: the step is the last one of an epoch, whose end has not run yet.
    """

    step: int
    loops: dict[str, Any]
    loaders: list[dict[str, Any]]
    lr_schedulers: list[dict[str, Any]]
    lr_schedulers_next_epoch: list[dict[str, Any]] | None = None
    precision: dict[str, Any] = field(default_factory=dict)
    validation_is_due: bool = False
    epoch_is_over: bool = False

    @classmethod
    def of(cls, trainer: pl.Trainer, *, after_step: bool) -> FitProgress:
        """Record the progress of a trainer in `on_train_batch_end` after an optimizer step, or in `on_train_start`."""
        loop = trainer.fit_loop
        return cls(
            validation_is_due=after_step and private_lightning.is_validation_due(trainer),
            epoch_is_over=after_step and loop.epoch_loop.batch_progress.is_last_batch,
            step=trainer.global_step,
            loops=copy.deepcopy(loop.state_dict()),
            loaders=loader_states(trainer.train_dataloader),
            lr_schedulers=_schedulers(trainer),
            precision=trainer.precision_plugin.state_dict(),
        )

    def after_epoch(self, trainer: pl.Trainer) -> FitProgress:
        """Return the progress after the same step, in `on_train_epoch_start` of the next epoch."""
        return replace(self, epoch_is_over=False, lr_schedulers_next_epoch=_schedulers(trainer))

    def dump(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return the progress for another rank, with the live state of the callbacks; tensors and plain values."""
        progress = {
            "step": self.step,
            _LOOPS: self.loops,
            _LOADERS: self.loaders,
            _SCHEDULERS: self.lr_schedulers,
            _NEXT_SCHEDULERS: self.lr_schedulers_next_epoch,
            _PRECISION: self.precision,
            _CALLBACKS: private_lightning.callback_states(trainer),
        }
        plain, _ = PlainValues(AS_PLAIN).convert(progress)
        return dict(plain)

    @classmethod
    def adopt(cls, dump: dict[str, Any], trainer: pl.Trainer, *, with_callbacks: bool) -> FitProgress:
        """Load another rank's progress, and the state of its callbacks if this rank has none of the run."""
        if with_callbacks:
            private_lightning.load_callbacks(trainer, dump, is_checkpoint=False)
        return cls(
            step=dump["step"],
            loops=dump[_LOOPS],
            loaders=dump[_LOADERS],
            lr_schedulers=dump[_SCHEDULERS],
            lr_schedulers_next_epoch=dump[_NEXT_SCHEDULERS],
            precision=dump[_PRECISION],
        )

    @classmethod
    def from_checkpoint(cls, dump: dict[str, Any], trainer: pl.Trainer) -> FitProgress:
        """Load the progress in a checkpoint of Lightning's, with the state of the callbacks; `restore` it, then call
        `with_dues`.
        """
        private_lightning.load_callbacks(trainer, dump, is_checkpoint=True)
        return cls(
            step=dump["global_step"],
            loops=dump["loops"]["fit_loop"],
            loaders=dump[LOADERS_KEY],
            lr_schedulers=dump["lr_schedulers"],
            precision=dump.get(type(trainer.precision_plugin).__qualname__, {}),
        )

    def with_dues(self, trainer: pl.Trainer) -> FitProgress:
        """Return the progress with what was due when the checkpoint was saved; after the trainer was restored to it."""
        loop = trainer.fit_loop.epoch_loop
        batches: Any = loop.batch_progress
        if batches.total.completed == batches.total.processed:  # saved at the end of training
            return self
        is_due = not private_lightning.validates_by_time(trainer) and private_lightning.is_validation_due(
            trainer
        )  # clocks of ranks differ
        return replace(self, validation_is_due=is_due, epoch_is_over=batches.is_last_batch)

    def restore(self, trainer: pl.Trainer) -> None:
        """Restore the fit loop to this progress; its next run resumes here.

        Raises:
            ConfigurationError: a training loader that has no position to go back to.
        """
        loop = trainer.fit_loop
        private_lightning.abandon_validation(trainer)  # the fault may have come in the middle of one
        loop.load_state_dict(copy.deepcopy(self.loops))
        follow_schedule(trainer)
        ended = None if self.epoch_is_over else self.lr_schedulers_next_epoch
        for config, state in zip(trainer.lr_scheduler_configs, ended or self.lr_schedulers, strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(state))
        if self.precision:
            trainer.precision_plugin.load_state_dict(self.precision)
        loaders = list(private_torch.tree_leaves(trainer.train_dataloader))
        if not all(isinstance(loader, StepLoader) for loader in loaders):
            raise ConfigurationError(
                "in-process recovery needs training loaders that can go back to a step: return a torch DataLoader "
                "over a map-style dataset, or a StepLoader"
            )
        for loader, state in zip(loaders, self.loaders, strict=True):
            loader.load_state_dict(dict(state))
        private_lightning.restart_loaders(trainer)


def finish_step(trainer: pl.Trainer, progress: FitProgress | None, *, with_newcomers: bool) -> None:
    """Run what was due after the step that a fit was restored to; collective.

    Lightning itself, restored to this state, skips both.

    Args:
        with_newcomers: some ranks joined during the epoch; the logged values of its steps are then dropped, because
            the ranks cannot reduce them together.
    """
    assert progress is not None, "a recovery restored it"
    if progress.validation_is_due:
        private_lightning.run_validation(trainer)
    if progress.epoch_is_over:
        private_lightning.end_epoch(trainer, drop_logged=with_newcomers)


def _schedulers(trainer: pl.Trainer) -> list[dict[str, Any]]:
    return [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]


def shared_progress(
    own: FitProgress | None, trainer: pl.Trainer, version: int, world: World, *, is_live: bool
) -> FitProgress:
    """Return the progress at a version, from a rank that has it; collective.

    Args:
        own: progress to which this rank could restore its fit loop.
        is_live: True if this rank's state is valid.
    """
    if is_live and _step_of(own) != version == trainer.global_step:
        # It failed between the update and the end of its step, or before its first one.
        own = FitProgress.of(trainer, after_step=own is not None)
    mine = [own.step, own.validation_is_due, own.epoch_is_over] if is_live and own is not None else [-1] * 3
    everyones = all_gather_json(mine, world)
    steps = [step for step, _, _ in everyones]
    if any(step != version for step in steps):
        source = steps.index(version)
        dump = own.dump(trainer) if world.rank == source and own is not None else None
        dump = broadcast_object(dump, source, world)
        if _step_of(own) != version or not is_live:
            own = FitProgress.adopt(dump, trainer, with_callbacks=not is_live)
    assert own is not None
    # A rank that was ahead of others repeats what is still due there.
    validation, epoch = (any(entry[i] for entry in everyones if entry[0] == version) for i in (1, 2))
    return replace(own, validation_is_due=validation, epoch_is_over=epoch)


def _step_of(own: FitProgress | None) -> int:
    return own.step if own is not None else -1


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
    state: TrainState, *, former: World, rank: int, node: str, version: int, counts: bool, is_prepared: bool
) -> RankInventory:
    """Return the inventory of a rank that leaves its former world.

    Args:
        former: that world.
        rank, node: its place in the new one.
        version: committed optimizer steps of its live state.
        counts: True if that state is whole and of this run.
        is_prepared: True if it was ready for the update after that.
    """
    experts, (sharded, owned) = state.experts, state.shards(former)
    numbers = {layer: number for number, layer in enumerate(state.stages.layers)}
    stacks = zip(experts.layers, experts.stacks, strict=True)
    held = [(numbers[layer], expert) for layer, stack in stacks for _, expert in stack.held()]
    return RankInventory(
        rank=rank,
        node=node,
        live_version=version if counts else -1,
        prepared=counts and is_prepared,
        experts=tuple(held),
        sharded_dense=sharded if counts or not state.is_shared else (),
        owned_dense=owned,
        replayed_dense=state.replay.names if state.replay is not None else (),
        replay_version=state.replay.version if state.replay is not None and counts else -1,
    )


def repaired(plan: RecoveryPlan, state: TrainState, world: World, *, min_replicas: int) -> Repair:
    """Return the placements of the new world; rank 0 warns if slots are too few for the wanted replicas.

    Args:
        min_replicas: wanted nodes that hold each expert, or ranks where there are fewer nodes.
    """
    ranks = state.stages.ranks_of_layers(world)
    repair = repair_stages(plan.held, ranks, nodes=plan.nodes, min_replicas=min_replicas, max_slots=state.max_slots)
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
    return fetch(plan, world, planner.sources.arenas, needed, storage=planner.storage, is_trusted=is_trusted)


def fetch_dense(state: TrainState, plan: RecoveryPlan, world: World) -> Units:
    """Transfer the dense values that this rank will hold in another world and lacks; collective there if a rank may
    lack any. Values of live ranks stay unchanged.
    """
    units = state.transfer.fetch(world, plan.live_ranks, plan.apply_prepared)
    if state.is_shared:
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


def newcomers_of(plan: RecoveryPlan, world: World) -> tuple[int, ...]:
    """Return the ranks whose own state is not valid."""
    return tuple(rank for rank in range(world.size) if rank not in plan.live_ranks)


def transfer_progress(own: FitProgress | None, state: TrainState, plan: RecoveryPlan, world: World) -> FitProgress:
    """Return the fit loop's progress at the plan's version, from a rank that has it; collective.

    Args:
        own: progress to which this rank could restore its fit loop.
    """
    trainer = state.trainer
    if plan.level == "live":
        is_live = world.rank not in newcomers_of(plan, world)
        return shared_progress(own, trainer, plan.version, world, is_live=is_live)
    saved = state.restored
    assert saved is not None
    return FitProgress.from_checkpoint(saved.read_object("trainer"), trainer)
