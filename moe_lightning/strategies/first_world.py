"""The first world of the processes of a run, before any of them has trained."""

from __future__ import annotations

from collections.abc import Callable

from moe_lightning.elastic.membership import Members, Membership
from moe_lightning.parallel.context import World
from moe_lightning.strategies.leaving import drop_groups
from moe_lightning.strategies.world_faults import is_worlds_fault, reason_of, scrub

_ATTEMPTS = 3


def first_world(engine: Membership, build: Callable[[Members], World]) -> tuple[Members, World] | None:
    """Joined at once with all others; None where a run is under way.

    Where nobody was lost, its groups are built again: a machine with more to do than it has cores may not have
    connected all ranks within `build_timeout_s`.

    Args:
        build: the groups of a membership.
    """
    if engine.world_exists():
        return None
    attempts = 0
    while True:
        attempts += 1
        members = engine.join()
        if engine.comes_too_early(members):
            return None
        try:
            return members, build(members)
        except Exception as error:
            if attempts == _ATTEMPTS or not is_worlds_fault(error, engine.reason):
                raise
            engine.break_up(reason_of(error, engine.reason))
            drop_groups()
            if engine.wait_for_cause() is not None:
                raise
            scrub(error)
