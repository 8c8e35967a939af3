"""Recovery plans around an edit of experts: states of before it and of after it are never combined."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_lightning.algorithms.inventory import HeldExpert, SnapshotInventory, SnapshotKind
from moe_lightning.algorithms.recovery_planner import RankInventory, RecoveryPlan, StorageInventory, plan_recovery


def snapshot(session: str, step: int, num_experts: int, edits: int) -> SnapshotInventory:
    experts = tuple(HeldExpert(0, expert, step, step) for expert in range(num_experts))
    kind, room = SnapshotKind.ARENA, {"num_experts": num_experts, "edits": edits}
    return SnapshotInventory(kind=kind, writer=0, session=session, step=step, world_size=1, experts=experts, **room)


def plan(held: int, *snapshots: SnapshotInventory, storage: StorageInventory | None = None) -> RecoveryPlan:
    """Of a rank that lives after step 5, with the first ones of 4 experts, which were 3 before an edit."""
    experts = tuple((0, expert) for expert in range(held))
    rank = RankInventory(rank=0, node="0", live_version=5, experts=experts, snapshots=snapshots)
    return plan_recovery([rank], storage, num_layers=1, num_experts=4, edits=1)


BEFORE, AFTER = snapshot("1", 4, 3, 0), snapshot("2", 5, 4, 1)


def test_live_experts_are_completed_by_snapshots_of_the_same_experts() -> None:
    found = plan(2, BEFORE, AFTER)
    assert (found.level, found.version, found.session) == ("live", 5, "2")
    assert found.versions.tolist() == [[5, 5, 5, 5]]


@pytest.mark.parametrize("later", [(), (replace(AFTER, experts=AFTER.experts[:3]),)], ids=["none", "without one"])
def test_else_the_run_goes_back_to_before_the_edit(later: tuple[SnapshotInventory, ...]) -> None:
    found = plan(3, BEFORE, *later)
    assert (found.level, found.version) == ("memory", 4)
    assert found.versions.tolist() == [[4, 4, 4]]
    assert found.held.shape == (1, 3, 1)


def test_storage_of_before_the_edit_completes_nothing_of_after_it() -> None:
    old, new = (StorageInventory(session="1", step=5, versions=((5,) * e,), edits=n) for e, n in ((3, 0), (4, 1)))
    assert (plan(3, storage=old).level, plan(3, storage=old).versions.shape) == ("storage", (1, 3))
    assert (plan(3, storage=new).level, plan(3, storage=new).versions.shape) == ("live", (1, 4))
    assert plan(4, storage=old).level == "live"
