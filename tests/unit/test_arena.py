"""The triple buffer, the arena in shared memory, and snapshots that are torn, too large, or read after their writer's
death."""

from __future__ import annotations

import os
import signal
import socket
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.checkpoint import arena as arena_module
from moe_lightning.checkpoint.agent import Agent
from moe_lightning.checkpoint.arena import (
    NO_STEP,
    Arena,
    Status,
    TripleBuffer,
    arena_bytes,
    arena_directory,
    arena_path,
    capacity_of,
    newest_common,
)
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.memory import local_inventory
from moe_lightning.checkpoint.schedule import Window
from moe_lightning.checkpoint.session import SavingPlace, _node_name
from moe_lightning.checkpoint.snapshotter import CopyWindows, Snapshotter
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.parallel.mesh import Layout, MeshShape
from tests.forks import PATIENCE_S, forked
from tests.unit.checkpoint_state import Node, expert_keys, node, whole_state


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["begin", "finish", "abort", "start", "done", "fail"]), max_size=80))
def test_random_walks_keep_the_invariants(actions: list[str]) -> None:
    state, step, recovered = TripleBuffer(), 0, NO_STEP
    for action in actions:
        if action == "begin" and state.writing is None:
            before = state
            state = state.begin_snapshot()
            assert state.writing is not None
            assert before.buffers[state.writing].status is Status.SNAPSHOT, "never overwrites P or R"
        elif action == "finish" and state.writing is not None:
            step += 1
            state = state.finish_snapshot(step)
        elif action == "abort":
            state = state.abort_snapshot()
        elif action == "start" and state.waiting and state.persisting is None:
            state = state.start_persist(max(state.waiting))
            assert not state.waiting, "older waiting snapshots are dropped"
        elif action == "done" and state.persisting is not None:
            state = state.finish_persist()
        elif action == "fail" and state.persisting is not None:
            state = state.fail_persist()
        statuses = [b.status for b in state.buffers]
        assert statuses.count(Status.PERSIST) <= 1
        assert statuses.count(Status.RECOVERY) <= 1
        assert statuses.count(Status.SNAPSHOT) >= 1
        if recovered != NO_STEP:
            assert state.recovery is not None
        if state.recovery is not None:
            assert state.buffers[state.recovery].step >= recovered
            recovered = state.buffers[state.recovery].step


def test_the_papers_timeline() -> None:
    state, written = TripleBuffer(), []
    for step in (1, 2, 3, 4):
        state = state.begin_snapshot()
        written.append(state.writing)
        state = state.finish_snapshot(step).start_persist(step).finish_persist()
    assert written == [0, 1, 2, 0]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sets(st.integers(0, 6)), max_size=4))
def test_all_ranks_of_a_node_persist_the_same_step(waiting: list[set[int]]) -> None:
    common = {step for step in range(7) if waiting and all(step in steps for steps in waiting)}
    assert newest_common(waiting) == max(common, default=None)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["begin", "finish", "start", "done", "want"]), max_size=80), st.integers(1, 4))
def test_the_first_snapshot_that_is_wanted_is_held(actions: list[str], ahead: int) -> None:
    state, step, wanted, promised = TripleBuffer(), 0, NO_STEP, None
    for action in actions:
        if action == "begin" and state.writing is None:
            state = state.begin_snapshot()
        elif action == "finish" and state.writing is not None:
            step += 1
            state = state.finish_snapshot(step)
            if wanted != NO_STEP and promised is None and step >= wanted:
                promised = step
        elif action == "want" and state.persisting is None and wanted == NO_STEP:
            wanted = step + ahead
            state = state.want(wanted)
            assert state.wanted == wanted, "what has not come can be held"
            assert step == 0 or state.want(0) == state, "what has gone cannot"
        elif action == "start" and promised is not None and state.persisting is None:
            state = state.start_persist(promised)
            wanted, promised = NO_STEP, None
        elif action == "done" and state.persisting is not None:
            state = state.finish_persist()
        assert state.newest == (step or NO_STEP)
        assert state.held == promised


def test_memory_is_reserved_up_front_and_bounded(tmp_path: Path) -> None:
    with node(tmp_path, world_size=1) as made:
        arena = made.ranks[0].arena
        size = arena.path.stat().st_size
        state = whole_state(0)
        sizes = [t.numel() * t.element_size() for t in state.values()] + [4096] * 2
        assert size == arena_bytes(capacity_of(sizes), arena.table_bytes)
        assert os.stat(arena.path).st_blocks * 512 >= size
        for step in range(1, 12):
            made.snapshot(step, fresh=[step % 4])
        assert arena.path.stat().st_size == size


def test_every_snapshot_names_a_copy_of_every_expert(tmp_path: Path) -> None:
    with node(tmp_path, world_size=1) as made:
        versions = dict.fromkeys(range(4), 1)
        made.snapshot(1)
        for step in range(2, 10):
            versions[step % 4] = step
            made.snapshot(step, fresh=[step % 4])
            for table in made.ranks[0].arena.tables():
                for piece in table.placed:
                    if piece.dtype == "object":
                        continue
                    bytes_then = whole_state(piece.version)[piece.key].contiguous().view(-1).view(torch.uint8)
                    assert torch.equal(made.ranks[0].arena.payload(piece), bytes_then), (table.step, piece.key)
            newest = made.ranks[0].arena.tables()[0]
            experts = {p.key: p.version for p in newest.placed if p.key.startswith("expert/")}
            assert experts == {key: versions[int(key.split("/")[2])] for key in experts}
            assert len(experts) == len(expert_keys(range(4)))


def test_a_torn_snapshot_is_not_read(tmp_path: Path) -> None:
    with node(tmp_path, world_size=1) as made:
        made.snapshot(1)
        made.snapshot(2)
        reader = Arena(made.ranks[0].arena.path)
        assert [t.step for t in reader.tables()] == [2, 1]
        index = reader.state.waiting[2]
        reader.begin_table(index)  # as a writer does that dies before it finishes
        assert reader.table(index) is None
        assert [t.step for t in reader.tables()] == [1]
        reader.close()


def test_a_state_torn_by_death_falls_back_to_the_other_copy(tmp_path: Path) -> None:
    with node(tmp_path, world_size=1) as made:
        made.snapshot(1)
        arena = made.ranks[0].arena
        before = arena.state
        after = arena.transition(lambda s: s.begin_snapshot())
        assert arena.state == after
        at = arena._state_at + arena._newest_state().number % 2 * 4096
        arena._map[at + 20] ^= 1
        assert arena.state == before


def test_a_damaged_superblock_is_passed_over_with_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with node(tmp_path, world_size=2) as made:
        made.snapshot(1)
        path, arenas, root = made.ranks[0].arena.path, made.arenas, made.root
    pristine = path.read_bytes()
    used = len(pristine[:4096].rstrip(b"\0"))
    descriptors = len(os.listdir("/proc/self/fd"))
    for position in range(used):
        with open(path, "r+b") as file:
            file.seek(position)
            file.write(bytes([pristine[position] ^ 0x10]))
        with pytest.raises(CheckpointError, match=rf"{path.name} is (damaged|not an arena).*; delete it$"):
            Arena(path)
        with open(path, "r+b") as file:
            file.write(pristine[:4096])
    assert len(os.listdir("/proc/self/fd")) == descriptors
    path.write_bytes(pristine[:40] + b"\xff" + pristine[41:])

    assert [found.writer for found in local_inventory(arenas, "run")] == [1]
    assert f"{path} is damaged: the checksum of its superblock" in caplog.text
    agent = Agent(arenas, root)
    agent.serve_once()
    agent.serve_once()
    assert capsys.readouterr().out.count("its snapshots are passed over") == 1
    with node(tmp_path, world_size=2, session="2") as made:
        assert "a new one takes its place" in caplog.text
        made.save(2)
        assert [path.name for path, _ in checkpoints(made.root)] == ["step-00000002"]


def write_and_die(path: Path) -> None:
    state = {"expert/0/0/weight/w": torch.arange(1000.0)}
    writer = Snapshotter(path, run="r", session="1", rank=0, world_size=1, state=state)
    writer.start(7, state)
    writer.finish()
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_writer_can_be_read_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "rank00000.arena"
    with forked(write_and_die, path) as writer:
        writer.join(PATIENCE_S)
        assert writer.exitcode == -signal.SIGKILL
    reader = Arena(path)
    assert not reader.writer_alive
    (table,) = reader.tables()
    assert table.step == 7
    assert torch.equal(reader.payload(table.placed[0]).view(torch.float32), torch.arange(1000.0))
    assert os.stat(path).st_mode & 0o777 == 0o600
    reader.close()


def test_only_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lightning.checkpoint.arena._LOCK_TIMEOUT_S", 0.05)
    with node(tmp_path, world_size=1) as made:
        assert Arena(made.ranks[0].arena.path).writer_alive
        with pytest.raises(CheckpointError, match="another process writes snapshots"):
            Node(tmp_path, world_size=1)


def test_an_arena_is_taken_over_with_its_snapshots(tmp_path: Path) -> None:
    with node(tmp_path, world_size=1) as made:
        made.save(1)
        inode = made.ranks[0].arena.path.stat().st_ino
    with node(tmp_path, world_size=1, session="2") as made:
        arena = made.ranks[0].arena
        assert arena.path.stat().st_ino == inode
        assert [t.step for t in arena.tables()] == [1], "memory recovery still finds the last persisted snapshot"
        made.snapshot(2, fresh=[0])
        assert {p.version for p in arena.tables()[0].placed} == {2}, "nothing is carried over between sessions"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    huge = {1 << 50: 4}
    with pytest.raises(ConfigurationError, match=r"the arena needs 12582912\.\d\d GiB"):
        Arena.create(tmp_path / "rank00000.arena", capacity=huge, table_bytes=4096)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigurationError, match=r"need 1048576\.00 GiB"):
        arena_directory("test-huge", sizes={0: 1 << 50}, fallback=tmp_path)
    fallback = arena_directory("small", sizes={0: 1 << 10}, fallback=tmp_path, memory=tmp_path / "no-such-directory")
    assert fallback == tmp_path / "moe-lightning-small"
    assert fallback.stat().st_mode & 0o777 == 0o700


def test_snapshots_on_disk_are_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    with patch.object(arena_module, "_free_bytes", lambda room: 0 if room == memory else 1 << 30):
        arena_directory("run", sizes={0: 1 << 20}, fallback=tmp_path, memory=memory)
    assert "--shm-size" in caplog.text


def test_shared_memory_has_no_more_room_than_processes_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it reports: the kernel would kill the process that takes more."""
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(arena_module, "MEMORY", memory)
    monkeypatch.setattr(arena_module, "available_memory", lambda: 1 << 20)
    arenas = arena_directory("run", sizes={0: 2 << 20}, fallback=tmp_path, memory=memory)
    assert (arenas.parent, "has 0.00" in caplog.text) == (tmp_path, True)
    arenas = arena_directory("small", sizes={0: 1 << 10}, fallback=tmp_path, memory=memory)
    with pytest.raises(ConfigurationError, match=r"GiB in .*small, where 0\.00 GiB are free"):
        Arena.create(arena_path(arenas, 0), capacity={1 << 20: 1}, table_bytes=4096)
    assert list(arenas.iterdir()) == []


@pytest.mark.parametrize("maps_them", [False, True])
def test_arenas_of_a_world_of_other_ranks_give_their_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, maps_them: bool
) -> None:
    """Also where an agent has mapped them, which frees them when it looks again."""
    memory, room_bytes, small, large = tmp_path / "shm", 5 << 20, {1 << 18: 1}, {1 << 19: 1}
    memory.mkdir()
    mapped: list[Arena] = []

    def free_bytes(room: Path) -> int:
        held = {path.stat().st_ino: path.stat().st_size for path in memory.rglob("*.arena")}
        held |= {os.fstat(arena._fd).st_ino: arena.memory.numel() for arena in mapped}
        return room_bytes - sum(held.values())

    def look_again(seconds: float) -> None:
        gone = [arena for arena in mapped if arena.replaced]
        mapped[:] = [arena for arena in mapped if not arena.replaced]
        for arena in gone:
            arena.close()

    monkeypatch.setattr(arena_module, "_free_bytes", free_bytes)
    monkeypatch.setattr("time.sleep", look_again)
    place = partial(arena_directory, "run", fallback=tmp_path / "none", memory=memory)
    folder = place(sizes=dict.fromkeys(range(4), arena_bytes(small, 4096)))
    for rank in range(4):
        Arena.create(arena_path(folder, rank), capacity=small, table_bytes=4096).close()
    kept = arena_path(folder, 0).stat().st_ino
    if maps_them:
        mapped = [Arena(path) for path in folder.glob("*.arena")]
    place(sizes={0: arena_bytes(small, 4096), 1: arena_bytes(large, 4096), 9: arena_bytes(large, 4096)})
    Arena.create(arena_path(folder, 0), capacity=small, table_bytes=4096).close()
    for rank in (1, 9):
        Arena.create(arena_path(folder, rank), capacity=large, table_bytes=4096).close()
    assert arena_path(folder, 0).stat().st_ino == kept
    assert sorted(path.name for path in folder.glob("*.arena")) == [arena_path(folder, r).name for r in (0, 1, 9)]


def test_damaged_arenas_of_other_ranks_are_deleted_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def free_bytes(room: Path) -> int:
        return (3 << 20) - sum(path.stat().st_size for path in tmp_path.rglob("*.arena"))

    monkeypatch.setattr(arena_module, "_free_bytes", free_bytes)
    monkeypatch.setattr(arena_module, "_FREED_S", 0)
    place = partial(arena_directory, "run", fallback=tmp_path / "none", memory=tmp_path)
    arena_path(place(sizes={1: 2 << 20}), 1).write_bytes(bytes(2 << 20))
    assert list(place(sizes={0: 2 << 20}).glob("*.arena")) == []


def test_nodes_whose_arenas_lie_in_one_folder_have_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def name(nodes: tuple[int, ...], host: str, node: str = "") -> str:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        world = World.offline(0, len(nodes), torch.device("cpu"), Layout(shape=MeshShape(dp=len(nodes)), nodes=nodes))
        return _node_name(SavingPlace(root=tmp_path, name="run", node=node, leave_mark=lambda: 0), world)

    assert name((0, 1), "a") != name((0, 1), "b")
    assert name((0, 0), "a") == name((0, 0), "b") == "", "a run that starts again finds its own under any host's name"
    assert name((0, 1), "a", "node7") == "node7"


def test_what_a_killed_rank_reserved_is_given_back(tmp_path: Path) -> None:
    folder = arena_directory("run", sizes={0: 1 << 10}, fallback=tmp_path, memory=tmp_path / "none")
    left, report = folder / f"rank00000.{os.getpid()}.new", folder / ".status.json.0123456789ab.new"
    left.write_bytes(b"reserved")
    report.write_bytes(b"of an agent that is alive")
    Arena.create(arena_path(folder, 0), capacity={64: 1}, table_bytes=4096).close()
    arena_directory("run", sizes={0: 1 << 10}, fallback=tmp_path, memory=tmp_path / "none")
    assert not left.exists()
    assert report.exists()
    assert arena_path(folder, 0).exists()


def test_a_state_that_outgrows_its_arena_is_refused(tmp_path: Path) -> None:
    with node(tmp_path, world_size=1) as made:
        snapshotter = made.ranks[0]
        made.snapshot(1)
        with pytest.raises(ConfigurationError, match=r"has no room in the arena, .*: give buffers a fixed shape"):
            snapshotter.start(2, whole_state(2) | {"dense/new": torch.zeros(1000)})
        with pytest.raises(ConfigurationError, match="the arena has room for 4096: keep less"):
            snapshotter.start(2, whole_state(2), objects={"trainer": torch.zeros(5000)})
        with pytest.raises(ConfigurationError, match="cannot hold"):
            snapshotter.start(2, {"dense/x": torch.zeros(2, dtype=torch.complex64)})
        made.snapshot(3)
        assert snapshotter.arena.tables()[0].step == 3, "a refused snapshot does not block the next"
    with pytest.raises(ConfigurationError, match="becomes part of file names"):
        Snapshotter(tmp_path / "x.arena", run="a/b", session="1", rank=0, world_size=1, state={})


def test_a_closed_window_holds_the_copy_and_the_update_releases_it(tmp_path: Path) -> None:
    state = whole_state(1)
    windows = CopyWindows(World.single(), separate_link=False)
    windows.step.begin_batch()
    windows._plan = lambda num_bytes: (frozenset({Window.IDLE}), 0.0)  # type: ignore[method-assign]
    with node(tmp_path, world_size=1) as made:
        snapshotter = made.ranks[0]
        snapshotter.windows = windows
        snapshotter.start(1, state)
        assert not snapshotter._copied.wait(0.05)
        snapshotter.wait_before_update()
        for tensor in state.values():
            tensor.zero_()  # the update
        report = snapshotter.finish()
        assert report.copied_bytes == sum(t.numel() * t.element_size() for t in state.values())
        assert report.copied_by_window[Window.COMPUTE] == report.copied_bytes, "it was hurried"
        (table,) = snapshotter.arena.tables()
        for placed in table.placed:
            expected = whole_state(1)[placed.key].contiguous().view(-1).view(torch.uint8)
            assert torch.equal(snapshotter.arena.payload(placed), expected)


def test_strided_tensors_are_copied_in_order(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    snapshotter = Snapshotter(
        tmp_path / "rank00000.arena", run="r", session="1", rank=0, world_size=1, state={"dense/t": tensor}
    )
    snapshotter.start(1, {"dense/t": tensor})
    snapshotter.finish()
    (placed,) = snapshotter.arena.tables()[0].placed
    assert torch.equal(snapshotter.arena.payload(placed).view(torch.float32).view(4, 3), tensor)
    snapshotter.close()
