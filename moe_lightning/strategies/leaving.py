"""What ranks do between two worlds, or before their last: hand over what only they hold, or wait for more ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from moe_lightning.balancing.repair import repair_placements
from moe_lightning.comm.building import meet
from moe_lightning.elastic.membership import Membership
from moe_lightning.elastic.rendezvous_client import WorldTooSmall
from moe_lightning.elastic.worker import Preempted
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, any_says
from moe_lightning.strategies.rank_state import RankState

_LOOK_S = 0.1


class WorldChanged(Exception):
    """The ranks agreed, between two steps, to form another world: somebody wants in, or leaves."""


def hand_over(
    state: RankState,
    world: World,
    engine: Membership,
    notice: str | None,
    nodes: Sequence[str],
    min_replicas: int,
    timeout: timedelta,
    spares: int,
    reason: str,
) -> bool:
    """Before ranks leave, on notice or because the mesh has no place for them, the others take over what only those
    hold. Nobody returns, and so breaks the world up, while another rank still needs it to hand over.

    Args:
        notice: why this rank leaves, as a sentence; None: it stays.
        nodes: of all ranks.
        min_replicas: nodes that shall hold each expert.
        timeout: longest wait for a peer.
        spares: ranks, the last ones, that leave until there are enough for a multiple.
        reason: why the world changes; who has met all others breaks it up with this.

    Returns:
        Whether this rank is spare.

    Raises:
        Preempted: on the ranks that leave on notice.
    """
    notices = all_gather_json(notice, world)
    staying = [rank for rank, notice in enumerate(notices[: world.size - spares]) if notice is None]
    if 0 < len(staying) < world.size and world.is_connected and state.stages is not None:
        state.hand_over(staying, world)
        state.moves.hand_over(staying, world, nodes, min_replicas=min_replicas)
    elif 0 < len(staying) < world.size and world.is_connected:
        held = np.stack([p.replicas > 0 for p in state.experts.placements])
        repair = repair_placements(
            held[..., staying],
            nodes=[nodes[rank] for rank in staying],
            min_replicas=min_replicas,
            max_slots=state.max_slots,
        )
        state.experts.hand_over(staying, repair.placements, state.optimizers, nodes)
        state.hand_over(staying, world)
    try:
        meet(engine.store, "hand over", world.size, timeout.total_seconds())
    except (dist.DistError, TimeoutError):
        if engine.reason != reason:
            raise
    left = [f"left/{rank}" for rank, notice in enumerate(notices) if notice is not None]
    if notice is not None:
        with suppress(dist.DistError):  # the world breaks now for another reason, and this rank is done
            engine.store.set(f"left/{world.rank}", "")
        raise Preempted(notice)
    if left:
        engine.store.wait(left, timeout)
    return world.rank >= world.size - spares


def starts_anew(engine: Membership, world: World, timeout: timedelta, can_restore: bool) -> bool:
    """Whether a first world follows one that nobody survived, whose state can be taken up; collective.

    All ranks then break this world up. They do so when all have heard of it: gloo may never wake one that still listens
    to connections which others have given up.
    """
    is_later = can_restore and max(all_gather_json(engine.task.starts, world)) > 1
    if is_later and world.is_connected:
        meet(engine.store, "go back to what was saved", world.size, timeout.total_seconds())
    return is_later


def drop_groups() -> None:
    """Let go of the groups of a world that has ended, and of what is tied to them."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # What a failed backward pass left in autograd's queue of this thread goes with the next pass; until then it keeps
    # the gradient accumulators of parameters alive, which remember the old number of slots.
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    gc.collect()  # graphs of the failed step, their threads and connections


def wait_for_ranks(world: World, engine: Membership, limit: int) -> WorldTooSmall:
    """In a world that holds the state but is too small to train, wait until others come.

    Args:
        limit: ranks that train: `min_ranks`, or those that the mesh needs.

    Returns:
        After `join_timeout_s` without others, on all ranks: what to raise when the state is saved.

    Raises:
        WorldChanged: somebody came, or shall leave.
    """
    size, timeout_s = world.size, engine.settings.join_timeout_s
    name = "min_ranks" if limit == engine.settings.min_ranks else "strategy.mesh"
    rank_zero_warn(f"only {size} of at least {limit} ranks ({name}) are here: waiting up to {timeout_s:g} s")
    deadline = time.monotonic() + timeout_s
    while True:
        is_over = time.monotonic() > deadline
        changes, ends = any_says([engine.newcomers() or engine.notice is not None, is_over], world)
        if changes:
            raise WorldChanged(f"ranks come or leave while there are fewer than {limit}")
        if ends:
            return WorldTooSmall(
                f"only {size} of at least {limit} ranks ({name}) came together within {timeout_s:g} s: the run ends "
                f"here; start it again with more workers, or lower {name}"
            )
        time.sleep(_LOOK_S)
