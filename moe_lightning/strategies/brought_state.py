"""What a rank brings into a new world, what the world then lacks, and how ranks get it from each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from moe_lightning.balancing.repair import Repair, repair_placements, repair_stages
from moe_lightning.checkpoint.full_state import broadcast_dense, share_optimizers
from moe_lightning.checkpoint.memory import MemoryCheckpoint, fetch
from moe_lightning.checkpoint.recovery_plan import RankInventory, RecoveryPlan
from moe_lightning.parallel.context import World, agree
from moe_lightning.strategies.fit_progress import FitProgress, shared_progress
from moe_lightning.strategies.rank_state import RankState
from moe_lightning.strategies.recovery_planning import RecoveryPlanner
from moe_lightning.strategies.row_moves import Rows


def inventory_of(
    state: RankState, *, former: World, rank: int, node: str, version: int, counts: bool, is_prepared: bool
) -> RankInventory:
    """What a rank holds as it leaves its former world.

    Args:
        former: that world.
        rank, node: its place in the new one.
        version: committed optimizer steps of its live state.
        counts: whether that state is whole and of this run.
        is_prepared: it was ready for the update after that.
    """
    experts, (sharded, owned) = state.experts, state.dense_parts(former)
    numbers = {layer: number for number, layer in enumerate(state.layers)}
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


def repaired(plan: RecoveryPlan, state: RankState, world: World, *, min_replicas: int) -> Repair:
    """The placements of the new world; rank 0 warns where slots are too few for what is wished for.

    Args:
        min_replicas: nodes that shall hold each expert.
    """
    options: dict[str, Any] = {"nodes": plan.nodes, "min_replicas": min_replicas, "max_slots": state.max_slots}
    if state.stages is None:
        repair, most = repair_placements(plan.held, **options), len(set(plan.nodes))
    else:
        ranks = state.moves.ranks_of_layers(world)
        repair = repair_stages(plan.held, ranks, **options)
        most = min((len({plan.nodes[rank] for rank in own}) for own in ranks), default=1)
    if repair.min_replicas < min(min_replicas, most):
        rank_zero_warn(
            f"slots are left for {repair.min_replicas} instead of {min_replicas} replicas of each expert: "
            "another lost node may cost state until ranks come back"
        )
    return repair


def fetch_missing(
    planner: RecoveryPlanner, plan: RecoveryPlan, repair: Repair, world: World
) -> MemoryCheckpoint | None:
    """What the plan takes from snapshots and from storage, as far as this rank needs it; None where it is nothing.

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
    return fetch(plan, world, planner.sources.arenas, needed, storage=planner.storage)


def share_state(state: RankState, plan: RecoveryPlan, world: World) -> None:
    """Newcomers get what every rank has; those that made up for an update get what went with it; collective."""
    newcomers = newcomers_of(plan, world)
    if not (newcomers or plan.apply_prepared):
        return
    source, own = plan.live_ranks[0], state.training_state()
    share_optimizers(own, {*newcomers, *plan.apply_prepared}, world, source)
    if newcomers:
        broadcast_dense(own, world, source, but=state.shared_names())


def fetch_rows(state: RankState, plan: RecoveryPlan, world: World) -> Rows | None:
    """What this rank will hold of the dense parameters in another world, where ranks share them; collective there, and
    changes nothing yet that counts.
    """
    if state.stages is not None:
        rows = state.moves.fetch(plan.shards, world, is_live=world.rank in plan.live_ranks)
    elif state.parts.is_wished:
        rows = state.parts.fetch(plan.shards, world.row_cut.part, world)
    else:
        return None
    agree(world)  # all have theirs, and go on, or none does
    return rows


def enter_experts(state: RankState, plan: RecoveryPlan, repair: Repair, world: World) -> None:
    """Bring experts to where the placements of another world want them; collective there."""
    if state.stages is not None:
        state.moves.enter_world(world, repair.placements, plan.held, plan.nodes)
    else:
        state.experts.enter_world(world, repair.placements, plan.held, state.optimizers, plan.nodes)


def restore_missing(state: RankState, plan: RecoveryPlan, saved: MemoryCheckpoint | None) -> None:
    """Read what the plan takes from snapshots and storage into the live state.

    Args:
        saved: what was fetched of it.
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
    state.restored = saved
    state.go_on_from(saved)


def newcomers_of(plan: RecoveryPlan, world: World) -> tuple[int, ...]:
    """Ranks whose own state does not count."""
    return tuple(rank for rank in range(world.size) if rank not in plan.live_ranks)


def brought_progress(kept: FitProgress | None, state: RankState, plan: RecoveryPlan, world: World) -> FitProgress:
    """The fit loop's progress at the plan's version, from whoever has it; collective.

    Args:
        kept: what this rank could take its fit loop back to.
    """
    trainer = state.trainer
    if plan.level == "live":
        is_live = world.rank not in newcomers_of(plan, world)
        return shared_progress(kept, trainer, plan.version, world, is_live=is_live)
    saved = state.restored
    assert saved is not None
    return FitProgress.from_checkpoint(saved.read_object("trainer"), trainer)
