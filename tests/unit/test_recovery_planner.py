"""The recovery plan against brute force: worlds with replicas, partial snapshots, copies, parities and storage lose
every set of their nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner import recovery_rows
from benchmarks.recovery_probability import recovery_probabilities
from moe_lightning.arrays import IntArray
from moe_lightning.balancing.migration import plan_migration
from moe_lightning.balancing.replica_placement import mro_plus
from moe_lightning.checkpoint.memory import RecoverySources
from moe_lightning.checkpoint.protection import ProtectionLayout, aec_layout, arc_layout, no_protection
from moe_lightning.checkpoint.recovery_plan import (
    HeldExpert,
    Origin,
    RankInventory,
    RecoveryPlan,
    SnapshotInventory,
    StorageInventory,
    plan_recovery,
    without_snapshots,
)
from moe_lightning.dispatch.placement import Placement
from moe_lightning.elastic.worker import PeerFailed
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.strategies.recovery import RecoveryPlanner


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A world of one rank a node, just before nodes fail.

    Attributes:
        held: bool [L, E, N].
        live: version of the live state; -1 where all processes are new.
        snapshots: step -> int64 [L, E], the version of every expert in the snapshots of that step.
        protected: the steps that are protected under the layout.
    """

    held: Any
    live: int
    snapshots: dict[int, IntArray]
    protected: frozenset[int]
    layout: ProtectionLayout
    storage: StorageInventory | None

    @property
    def num_nodes(self) -> int:
        return int(self.held.shape[2])

    @property
    def writers(self) -> IntArray:
        """int64 [L, E]"""
        writers: IntArray = self.held.argmax(axis=2)
        return writers

    def readable(self, step: int, writer: int, failed: Sequence[int]) -> bool:
        """Whether a writer's snapshot of a step can be had without the failed nodes."""
        if writer not in failed:
            return True
        if step not in self.protected:
            return False
        group = self.layout.group_of(writer)
        return any(h not in failed for h in self.layout.holders[writer]) or bool(
            group and set(group) & set(failed) == {writer}
        )


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    layers, experts, nodes = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(2, 4))
    held = np.array(draw(st.lists(st.booleans(), min_size=layers * experts * nodes, max_size=layers * experts * nodes)))
    held = held.reshape(layers, experts, nodes)
    for layer, expert in np.argwhere(~held.any(axis=2)).tolist():
        held[layer, expert, draw(st.integers(0, nodes - 1))] = True
    steps = sorted(draw(st.sets(st.integers(1, 6), max_size=3)))
    versions, snapshots = np.full((layers, experts), steps[0] if steps else 0), {}
    for step in steps:
        fresh = np.array(draw(st.lists(st.booleans(), min_size=experts, max_size=experts)))
        versions = np.where(fresh, step, versions)
        snapshots[step] = versions
    choices = [no_protection(range(nodes)), arc_layout(range(nodes)), aec_layout(range(nodes))]
    storage = None
    if draw(st.booleans()):
        step = draw(st.sampled_from(steps or [3]))
        table = draw(st.lists(st.sampled_from([step, max(0, step - 2)]), min_size=experts, max_size=experts))
        storage = StorageInventory(
            session=draw(st.sampled_from(["0", "1"])), step=step, resumes_at=step, versions=(tuple(table),) * layers
        )
    return Scene(
        held=held,
        live=draw(st.sampled_from([-1, max(steps, default=0), max(steps, default=0) + 1])),
        snapshots=snapshots,
        protected=frozenset(draw(st.sets(st.sampled_from(steps)))) if steps else frozenset(),
        layout=draw(st.sampled_from(choices)),
        storage=storage,
    )


def inventories_of(scene: Scene, failed: Sequence[int]) -> list[RankInventory]:
    """What the survivors report."""
    found = []
    for rank, node in enumerate(n for n in range(scene.num_nodes) if n not in failed):
        experts = tuple((la, e) for la, e in np.argwhere(scene.held[:, :, node]).tolist()) if scene.live >= 0 else ()
        snapshots = [entry(scene, "arena", node, step) for step in scene.snapshots]
        for step in sorted(scene.protected):
            snapshots += [entry(scene, "copy", writer, step) for writer in scene.layout.copied_writers(node)]
            group = scene.layout.group_of(node)
            others = [member for member in group if member != node]
            snapshots += [replace(entry(scene, "parity", w, step), holder=node, members=group) for w in others]
        inventory = RankInventory(rank=rank, node=str(node), live_version=scene.live, experts=experts)
        found.append(inventory.with_snapshots(snapshots))
    return found


def entry(scene: Scene, kind: str, writer: int, step: int) -> SnapshotInventory:
    mine = np.argwhere(scene.writers == writer).tolist()
    versions = scene.snapshots[step]
    experts = tuple(HeldExpert(la, e, int(versions[la, e]), int(versions[la, e])) for la, e in mine)
    return SnapshotInventory(
        kind=Origin[kind.upper()],
        writer=writer,
        session="1",
        step=step,
        resumes_at=step,
        world_size=scene.num_nodes,
        experts=experts,
    )


def plan_of(scene: Scene, failed: Sequence[int]) -> RecoveryPlan:
    layers, experts, _ = scene.held.shape
    return plan_recovery(inventories_of(scene, failed), scene.storage, num_layers=layers, num_experts=experts)


def brute_force(scene: Scene, failed: Sequence[int]) -> tuple[str, int, list[int]] | None:
    """(level, version, version of every expert) by the rule, tried for every level and version."""
    points = []
    alive = [node for node in range(scene.num_nodes) if node not in failed]
    for order, level, version in [
        *((2, "live", v) for v in range(8) if v == scene.live),
        *((1, "memory", v) for v in scene.snapshots),
        *((0, "storage", v) for v in range(8) if scene.storage and v == scene.storage.step),
    ]:
        if level == "memory" and not all(scene.readable(version, w, failed) for w in range(scene.num_nodes)):
            continue
        session = {"live": "2", "memory": "1", "storage": scene.storage.session if scene.storage else ""}[level]
        versions = []
        for pair in np.ndindex(scene.held.shape[:2]):
            found = [version] if level == "live" and scene.held[pair][alive].any() else []
            if session != "0":  # the snapshots are of session 1
                found += [
                    int(table[pair])
                    for step, table in scene.snapshots.items()
                    if table[pair] <= version and scene.readable(step, int(scene.writers[pair]), failed)
                ]
            if scene.storage is not None and scene.storage.step <= version:
                found.append(scene.storage.versions[pair[0]][pair[1]])
            versions.append(max(found, default=-1))
        if min(versions) >= 0:
            stale = sum(v < version for v in versions)
            points.append(((session, version), stale, order, level, versions))
    if not points:
        return None
    whole = [point for point in points if point[1] == 0]
    limit = (scene.storage.session, scene.storage.step) if scene.storage else ("", -1)
    if whole and max(point[0] for point in whole) >= limit:
        points = whole
    best = max(points, key=lambda point: (point[0], -point[1], point[2]))
    return best[3], best[0][1], best[4]


@settings(deadline=None, max_examples=60)
@given(scenes())
def test_the_plan_is_what_trying_everything_finds(scene: Scene) -> None:
    for number in range(scene.num_nodes):
        for failed in combinations(range(scene.num_nodes), number):
            plan = plan_of(scene, failed)
            expected = brute_force(scene, failed)
            if expected is None:
                assert plan.level == "nothing"
                continue
            assert (plan.level, plan.version, plan.versions.ravel().tolist()) == expected
            assert plan.stale == {(la, e): v for (la, e), v in np.ndenumerate(plan.versions) if v < plan.version}
            assert_can_be_carried_out(plan, scene, failed)


def assert_can_be_carried_out(plan: RecoveryPlan, scene: Scene, failed: Sequence[int]) -> None:
    """Every unit has exactly one source, which exists, and whoever reads it can."""
    alive = [node for node in range(scene.num_nodes) if node not in failed]
    layers, experts, _ = scene.held.shape
    read = [r.expert for r in plan.reads if r.expert is not None]
    assert len(set(read)) == len(read)
    live = [pair for pair in np.ndindex(layers, experts) if plan.origins[pair] == Origin.LIVE]
    assert sorted([*read, *live, *plan.from_storage]) == list(np.ndindex(layers, experts))
    for pair in np.ndindex(layers, experts):
        assert plan.origins[pair] == nearest(plan, scene, failed, pair)
    rests = sorted(r.writer for r in plan.reads if r.expert is None)
    assert rests == (list(range(scene.num_nodes)) if plan.level == "memory" else [])
    decodable = {(decode.writer, decode.step) for decode in plan.decodes}
    for item in plan.reads:
        step = item.step
        if item.expert is not None:
            assert scene.snapshots[step][item.expert] == plan.versions[item.expert] <= plan.version
            assert scene.writers[item.expert] == item.writer
        else:
            assert step == plan.version
        if item.origin is Origin.PARITY:
            assert (item.writer, step) in decodable
        else:
            node = alive[item.reader]
            assert item.node == str(node), "one rank a node: only it can read"
            assert node == item.writer or node in scene.layout.holders[item.writer]
    for decode in plan.decodes:
        others = [member for member in decode.members if member != decode.writer]
        assert decode.step in scene.protected
        assert decode.parities == tuple((member, alive.index(member)) for member in others)
        assert decode.shards in (decode.parities, ()), "a group of two needs no shards"
    if plan.level == "live":
        assert plan.live_ranks == tuple(range(len(alive)))
        assert np.array_equal(plan.held, scene.held[:, :, alive])
    else:
        assert not plan.held.any()


def nearest(plan: RecoveryPlan, scene: Scene, failed: Sequence[int], pair: tuple[int, ...]) -> Origin:
    """The first origin, in the order of preference, that has an expert's chosen version."""
    version, writer = plan.versions[pair], int(scene.writers[pair])
    if (
        plan.level == "live"
        and version == scene.live
        and any(n not in failed for n in np.flatnonzero(scene.held[pair]))
    ):
        return Origin.LIVE
    is_void = plan.level == "storage" and scene.storage is not None and scene.storage.session == "0"
    steps = [step for step, table in scene.snapshots.items() if table[pair] == version and not is_void]
    if steps and writer not in failed:
        return Origin.ARENA
    readable = [step for step in steps if scene.readable(step, writer, failed)]
    if readable:
        return Origin.COPY if scene.layout.holders[writer] else Origin.PARITY
    return Origin.STORAGE


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_live_recoveries_are_as_likely_as_the_placement_says(data: st.DataObject) -> None:
    nodes, slots = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    node_slots = np.full(nodes, slots)
    experts = data.draw(st.integers(1, nodes * slots))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    tables = []
    for _ in range(2):
        replicas = np.ones(experts, dtype=np.int64)
        for _ in range(nodes * slots - experts):
            replicas[rng.integers(experts)] += 1
        tables.append(mro_plus(replicas, node_slots))
    held = np.stack([table > 0 for table in tables])
    scene = Scene(
        held=held, live=3, snapshots={}, protected=frozenset(), layout=no_protection(range(nodes)), storage=None
    )
    predicted = recovery_probabilities(tables)
    for number in range(nodes):
        sets = list(combinations(range(nodes), number))
        recovered = [plan_of(scene, failed).level == "live" for failed in sets]
        assert np.mean(recovered) == pytest.approx(predicted[number])


def snapshot(
    step: int, *experts: tuple[int, int], kind: str = "arena", writer: int = 0, session: str = "1", world_size: int = 1
) -> SnapshotInventory:
    """Snapshot of experts of layer 0, each an (expert, version)."""
    return SnapshotInventory(
        kind=Origin[kind.upper()], writer=writer, session=session, step=step, resumes_at=step, world_size=world_size,
        experts=tuple(HeldExpert(0, expert, version, version) for expert, version in experts),
    )  # fmt: skip


def survivor(rank: int, **values: Any) -> RankInventory:
    return RankInventory(rank=rank, node=str(rank), **values)


def plan_for(*inventories: RankInventory, storage: StorageInventory | None = None) -> RecoveryPlan:
    return plan_recovery(inventories, storage, num_layers=1, num_experts=2)


def test_a_prepared_update_is_applied_where_somebody_has_applied_it() -> None:
    plan = plan_for(
        survivor(0, live_version=7, prepared=True, experts=((0, 0),)),
        survivor(1, live_version=8, experts=((0, 1),)),
        survivor(2),
    )
    assert (plan.level, plan.version, plan.apply_prepared, plan.live_ranks) == ("live", 8, (0,), (0, 1))
    assert plan.held[0].tolist() == [[True, False, False], [False, True, False]]


def test_a_prepared_update_that_nobody_has_applied_is_dropped() -> None:
    plan = plan_for(
        survivor(0, live_version=7, prepared=True, experts=((0, 0),)), survivor(1, live_version=7, experts=((0, 1),))
    )
    assert (plan.level, plan.version, plan.apply_prepared) == ("live", 7, ())


def test_a_rank_that_was_left_behind_receives_its_state_anew() -> None:
    both = ((0, 0), (0, 1))
    plan = plan_for(survivor(0, live_version=8, experts=both), survivor(1, live_version=7, experts=both))
    assert plan.live_ranks == (0,)
    transfers = plan_migration(plan.held, [Placement(replicas=np.ones((2, 2), dtype=np.int64))])
    assert [(t.expert, t.source, t.target) for t in transfers] == [(0, 0, 1), (1, 0, 1)]


def test_a_lost_optimizer_shard_comes_from_its_replay_or_rolls_everybody_back() -> None:
    experts, names = ((0, 0), (0, 1)), ("a", "b")
    first = survivor(0, live_version=5, experts=experts, sharded_dense=names, owned_dense=("a",))
    replaying = replace(first, replayed_dense=("b",), replay_version=5)
    assert plan_for(replaying, survivor(1)).shards == (("a", 0), ("b", 0))
    late = replace(replaying, replay_version=4)
    assert plan_for(late, survivor(1)).level == "nothing"
    snapshots = tuple(
        snapshot(step, (w, step), kind=kind, writer=w, world_size=2)
        for kind, w, step in (("arena", 0, 4), ("copy", 1, 4), ("arena", 0, 5))
    )
    rolled = plan_for(replace(first, snapshots=snapshots), survivor(1))
    assert (rolled.level, rolled.version) == ("memory", 4)
    copy = snapshot(5, kind="copy", writer=1, world_size=2)
    exact = plan_for(replace(first, snapshots=(*snapshots, copy)), survivor(1))
    assert (exact.level, exact.version, exact.shards) == ("live", 5, (("a", 0), ("b", -1)))
    assert exact.lacks_dense
    assert any(read.expert is None for read in exact.reads)


def test_partly_copied_experts_are_not_newer_than_the_version() -> None:
    """An expert whose weights are of step 6 and whose moments are of step 4 is neither."""
    mixed = replace(snapshot(6), experts=(HeldExpert(0, 0, 4, 6), HeldExpert(0, 1, 6, 6)))
    old = replace(mixed, step=5, resumes_at=5, experts=(HeldExpert(0, 0, 3, 3), HeldExpert(0, 1, 5, 5)))
    storage = StorageInventory(session="1", step=5, resumes_at=5, versions=((2, 2),))
    plan = plan_for(replace(survivor(0), snapshots=(mixed, old)), storage=storage)
    assert (plan.version, plan.versions.tolist()) == (6, [[4, 6]])
    plan = plan_for(replace(survivor(0), snapshots=(replace(mixed, step=6, world_size=2), old)), storage=storage)
    assert (plan.version, plan.versions.tolist()) == (5, [[3, 5]])


def test_a_later_session_wins_over_a_later_step() -> None:
    """The steps of the former session that lie behind the new one's start were rolled back."""

    both = survivor(0, snapshots=(snapshot(9, (0, 9), (1, 9)), snapshot(7, (0, 7), (1, 7), session="2")))
    plan = plan_for(both)
    assert (plan.session, plan.version) == ("2", 7)
    damaged = without_snapshots([both], {("0", "arena", 0, 7)})
    assert plan_for(*damaged).version == 9


def test_parities_are_of_no_use_without_the_other_shards() -> None:
    """Member 2 of three is lost; member 1 has its parity, but its own snapshot is damaged."""
    member = snapshot(4, world_size=3)
    parity = replace(member, kind=Origin.PARITY, writer=2, members=(0, 1, 2), experts=(HeldExpert(0, 1, 4, 4),))
    first = survivor(0, snapshots=(replace(member, experts=(HeldExpert(0, 0, 4, 4),)), replace(parity, holder=0)))
    second = survivor(1, snapshots=(replace(member, writer=1), replace(parity, holder=1)))
    plan = plan_for(first, second)
    assert plan.version == 4
    assert plan.decodes[0].assembler == 0
    assert plan_for(*without_snapshots([first, second], {("1", "arena", 1, 4)})).level == "nothing"
    assert plan_for(*without_snapshots([first, second], {("1", "parity", 2, 4)})).level == "nothing"
    storage = StorageInventory(session="1", step=5, resumes_at=5, versions=((2, 2),))
    assert plan_for(first, second, storage=storage).versions.tolist() == [[4, 4]]
    damaged = without_snapshots([first, second], {("1", "arena", 1, 4)})
    assert plan_for(*damaged, storage=storage).versions.tolist() == [[4, 2]]


def test_a_snapshot_that_was_computed_wrong_is_not_planned_again() -> None:
    member = snapshot(4, world_size=3)
    parity = replace(member, kind=Origin.PARITY, writer=2, members=(0, 1, 2))
    ranks = [survivor(rank, snapshots=(replace(parity, holder=rank),)) for rank in (0, 1)]
    assert [rank.snapshots for rank in without_snapshots(ranks, {("", "parity", 2, 4)})] == [(), ()]


class Sources:
    """Snapshots in memory, and no checkpoint."""

    def __init__(self, *found: SnapshotInventory) -> None:
        self.found = list(found)

    def snapshots(self) -> list[SnapshotInventory]:
        return self.found

    def newest_checkpoint(self, damages_of: object) -> None:
        return None


def planned_version(planner: RecoveryPlanner, **options: Any) -> int:
    """The version that a rank plans, which has nothing itself."""
    asked = {"num_layers": 1, "num_experts": 2, "last_step": 5, "has_trained": True}
    return planner.plan([RankInventory(rank=0, node="0")], World.single(), **asked, **options)[0].version


def test_memory_in_which_all_is_damaged_is_not_planned_again() -> None:
    found = snapshot(4, (0, 4), (1, 4))
    planner = RecoveryPlanner(Sources(found))
    assert planned_version(planner) == 4
    with pytest.raises(ConfigurationError, match="no rank, snapshot or checkpoint"):
        planned_version(planner, damaged={("0", *found.place)})


def test_a_snapshot_that_was_being_copied_when_damage_was_found_is_not_used() -> None:
    sources, copied = Sources(snapshot(3, (0, 3), (1, 3))), snapshot(5, (0, 5), (1, 5), session="2")
    planner = RecoveryPlanner(sources, lambda: copied in sources.found or sources.found.append(copied))
    planner.distrust_after(3, marks=False)
    assert planned_version(planner) == 3


def test_what_was_saved_after_a_first_damage_is_not_used_after_a_second_one() -> None:
    planner = RecoveryPlanner(Sources(*(snapshot(step, (0, step), (1, step)) for step in (3, 5))))
    planner.distrust_after(3, marks=False)
    planner.distrust_after(9, marks=False)
    assert planned_version(planner) == 3


def test_memory_that_cannot_be_read_ends_a_recovery_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = PermissionError(13, "Permission denied", "/dev/shm/run")
    monkeypatch.setattr(Sources, "snapshots", Mock(side_effect=denied))
    with pytest.raises(CheckpointError, match=r"/dev/shm/run cannot be used \(Permission denied\)"):
        planned_version(RecoveryPlanner(Sources()))


def test_ranks_of_a_node_take_turns_as_readers() -> None:
    tables = tuple(snapshot(1, (w, 1), writer=w, world_size=2) for w in (0, 1))
    ranks = [RankInventory(rank=rank, node="a", snapshots=tables if rank == 0 else ()) for rank in (0, 1)]
    assert {(read.writer, read.reader) for read in plan_for(*ranks).reads} == {(0, 0), (1, 1)}


@settings(deadline=None, max_examples=30)
@given(scenes())
def test_inventories_survive_the_journey(scene: Scene) -> None:
    for inventory in inventories_of(scene, []):
        assert RankInventory.from_json(inventory.to_json()) == inventory
    if scene.storage is not None:
        assert StorageInventory.from_json(scene.storage.to_json()) == scene.storage


def test_the_sentence_for_the_console() -> None:
    held = tuple((0, e) for e in range(14))
    inventory = survivor(0, live_version=9, experts=held, snapshots=(snapshot(9, (14, 9), (15, 9)),))
    storage = StorageInventory(session="0", step=3, resumes_at=3, versions=((3,) * 17,))
    plan = plan_recovery([inventory], storage, num_layers=1, num_experts=17)
    assert plan.level == "storage", "a whole version, though older, before a stale expert"
    fresh = replace(inventory, experts=(*held, (0, 16)))
    plan = plan_recovery([fresh], storage, num_layers=1, num_experts=17)
    assert plan.describe() == "15 experts from replicas, 2 from arenas, 0 stale"
    assert plan_for(survivor(0)).describe() == "no source is left"


# ----------------------------------------------------------------------
# What a recovery does when nobody holds a part of the dense parameters any more.


NAMES = ("dense rows 0 of 2", "dense rows 1 of 2")


def planned(version: int, *, has_trained: bool, sources: RecoverySources | None = None) -> str:
    """The level of the plan of a rank that is left with the first of two parts."""
    planner = RecoveryPlanner(sources)
    survivor = RankInventory(
        rank=0, node="0", live_version=version, sharded_dense=NAMES, owned_dense=NAMES[:1], experts=((0, 0),)
    )
    plan, _ = planner.plan(
        [survivor], World.single(), num_layers=1, num_experts=1, last_step=version, has_trained=has_trained
    )
    return plan.level


def test_where_nobody_has_trained_all_ranks_start_anew() -> None:
    with pytest.raises(PeerFailed, match=r"no rank that has trained is left, .* start over") as caught:
        planned(0, has_trained=False)
    assert caught.value.kind == "death"


def test_later_the_sentence_names_the_cures() -> None:
    with pytest.raises(ConfigurationError, match=r"last committed step was 5: .*dense=hsdp.*PartialExpertsCheckpoint"):
        planned(5, has_trained=True)


def test_who_saves_already_is_told_another_cure(tmp_path: Path) -> None:
    """A rank was lost with its memory before anything was written."""
    sources = RecoverySources(root=tmp_path, name="run", node="0", fallback=tmp_path, report=print)
    with pytest.raises(ConfigurationError, match=r"step was 5: .*dense=hsdp.*protection=arc$"):
        planned(5, has_trained=True, sources=sources)


# ----------------------------------------------------------------------
# The rows of the planner's benchmark that belong to recoveries.


def test_every_plan_of_a_recovery_has_a_row() -> None:
    rows = list(recovery_rows(32, 16, 3))
    assert Counter(row.name.split(",")[0] for row in rows) == {"repair": 2, "plan_recovery": 2, "sampled_recovery": 2}
    assert all((row.ranks, row.experts, row.layers) == (32, 16, 3) for row in rows)
    assert all(row.seconds > 0 and row.peak_mib > 0 for row in rows)


@pytest.mark.slow
def test_recoveries_of_4096_ranks_are_planned_in_seconds() -> None:
    """One second each on a free core; the bound leaves room for a machine that is shared."""
    for row in recovery_rows(4096, 512, 1):
        assert row.processor_s < 3, row
