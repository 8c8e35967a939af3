"""Where a simulated recovery takes state from: the library's own recovery plan, fed with what the nodes hold."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from moe_lightning.checkpoint.recovery_plan import plan_recovery
from moe_lightning.simulate.cluster import HeldSnapshot, Mark, SavedState, inventories
from moe_lightning.simulate.event_loop import simulate
from moe_lightning.simulate.failures import NS, Event
from moe_lightning.simulate.policy import Policy, policy
from tests.unit.simulated import NODES, scenario, small_workload

EXPERTS = 8
START = Event(time_ns=0, joined=tuple(range(NODES)))


def _saved(chosen: Policy) -> SavedState:
    return SavedState(
        small_workload(), chosen, num_layers=1, planned_assignments=10**6, interval_steps=10, planned_steps=1000
    )


def _level(chosen: Policy, failed: tuple[int, ...]) -> str:
    """Of the plan after six nodes took a snapshot at step 20, wrote it, took one at 30 and lost some at 35."""
    saved = _saved(chosen)
    writers = (np.arange(EXPERTS) % NODES)[None]
    nodes = tuple(range(NODES))
    saved.begin(Mark(step=20), nodes, writers, done_ns=5, nbytes=1.0)
    saved.commit_written(5)
    saved.begin(Mark(step=30), nodes, writers, done_ns=50, nbytes=1.0)
    saved.lose(failed)
    holders = {node: tuple((0, e) for e in range(EXPERTS) if node in (e % NODES, (e + 1) % NODES)) for node in nodes}
    left = [node for node in nodes if node not in failed]
    found = inventories(left, {n: holders[n] for n in left}, 35, chosen, newest=saved.newest, written=saved.written)
    plan = plan_recovery(found, saved.on_storage(), num_layers=1, num_experts=EXPERTS)
    mark = saved.restore(plan, Mark(step=35))
    assert mark.step == {"live": 35, "memory": 30, "storage": 20}[plan.level]
    return plan.level


@pytest.mark.parametrize("count", [1, 2, 3])
def test_protection_survives_what_its_layout_says(count: int) -> None:
    for method in ("aec", "arc"):
        chosen = policy("reft", protection=method, protection_group=6)
        for failed in combinations(range(NODES), count):
            expected = "memory" if chosen.layout_of(NODES).survives(failed) else "storage"
            assert _level(chosen, failed) == expected, (method, failed)


def test_live_replicas_come_first_and_storage_last() -> None:
    assert _level(policy("lazarus"), (0,)) == "live"
    assert _level(policy("lazarus"), (0, 1)) == "storage"  # both replicas of an expert
    assert _level(policy("ours", protection="arc"), (0, 2)) == "live"
    assert _level(policy("ours", protection="arc", protection_copies=2), (0, 1)) == "memory"
    assert _level(policy("ds"), (0,)) == "storage"


def test_partial_snapshots_are_found_stale() -> None:
    """Two-level recovery: what survivors hold is as new as memory, the rest as old as storage; the ledger counts it."""
    chosen = policy("moc", k_snapshot=4, k_persist=1, plt_threshold=None)
    plt = {}
    for failed in ((), tuple(range(NODES))):
        saved = _saved(chosen)
        writers = (np.arange(EXPERTS) % NODES)[None]
        nodes = tuple(range(NODES))
        for step in (10, 20, 30):
            saved.record(np.full((1, EXPERTS), 100))
            saved.begin(Mark(step=step), nodes, writers, done_ns=step, nbytes=1.0)
            saved.commit_written(step)
        saved.lose(failed)
        left = [node for node in nodes if node not in failed] or [NODES]
        found = inventories(left, {}, 30, chosen, newest=saved.newest, written=saved.written)
        plan = plan_recovery(found, saved.on_storage(), num_layers=1, num_experts=EXPERTS)
        assert plan.version == 30
        saved.restore(plan, Mark(step=35))
        plt[len(failed)] = saved.plt
    # Storage lacks 6 experts by 200 tokens and 1 by 100; memory, where 4 of 8 are taken at a time, 4 by 100.
    assert plt[NODES] == pytest.approx(1300 / 10**6)
    assert plt[0] == pytest.approx(400 / 10**6)


def test_lost_nodes_keep_nothing() -> None:
    taken = HeldSnapshot(
        mark=Mark(step=3), nodes=(4, 5, 6), versions_LE=np.full((1, 3), 3), writer_LE=np.array([[0, 1, 2]]), lost={5}
    )
    parts = taken.on_nodes(policy("reft", protection_group=3), protected=True)
    assert set(parts) == {4, 6}
    kinds = sorted((part.kind, part.writer) for part in parts[4])
    assert kinds == [("arena", 0), ("parity", 1), ("parity", 2)]


def test_a_node_that_comes_back_brings_no_memory() -> None:
    away = Event(time_ns=1000 * NS, failed=(2,), joined=(2,))
    again = Event(time_ns=1001 * NS, failed=(3,))
    report = simulate(scenario("reft", events=[START, away, again], protection_group=6, interval_steps=50))
    assert [recovery.source for recovery in report.recoveries] == ["protected memory", "storage"]
