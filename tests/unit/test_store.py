"""Checkpoint directories: what is written, carried over, read back by stock torch and by us, and pruned."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from moe_lightning.checkpoint import commit
from moe_lightning.checkpoint.arena import arena_directory, arenas_name, existing_arenas
from moe_lightning.checkpoint.commit import prune
from moe_lightning.checkpoint.directory import checkpoints, claim, run_of
from moe_lightning.checkpoint.loader import Checkpoint, find_newest
from moe_lightning.checkpoint.manifest import PRUNED
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.storage.posix import PosixStorage
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.state.pieces import Block
from tests.no_locks import refuse_locks
from tests.unit.checkpoint_state import EXPERTS, Node, assert_holds, expert_keys, node, whole_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def staging_path(root: Path, session: str, step: int) -> Path:
    return Path(PosixStorage().staging(root, session, step, 0))


def newest(root: Path) -> Checkpoint:
    found = find_newest(root)
    assert found.checkpoint is not None, found.problems
    assert found.problems == ()
    return found.checkpoint


def stock_load(path: Path, *, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torch.distributed.checkpoint itself reads from a directory."""
    state = {key: torch.full_like(tensor, -1) for key, tensor in like.items()}
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


def test_what_is_asked_for_later_outlives_its_checkpoint(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        made.save(3)
        checkpoint = newest(made.root)
    checkpoint.release()
    shutil.rmtree(checkpoint.path)
    assert checkpoint.read_object("trainer") == 3


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_full_checkpoint_reads_back(tmp_path: Path, world_size: int) -> None:
    with node(tmp_path, world_size=world_size) as made:
        made.save(3)
        checkpoint = newest(made.root)
        assert_holds(checkpoint, dict.fromkeys(range(EXPERTS), 3))
        for key, tensor in stock_load(checkpoint.path, like=whole_state(3)).items():
            assert torch.equal(tensor, whole_state(3)[key]), key
        for rank in range(world_size):
            assert checkpoint.read_object(f"rng/{rank}")["state"].tolist() == [rank, 3]
        rng: dict[str, object] = {"rng/0": None}
        dcp.load(rng, checkpoint_id=str(checkpoint.path), no_dist=True)
        assert rng["rng/0"]["state"].tolist() == [0, 3]  # type: ignore[index]
        assert checkpoint.manifest.new_bytes == checkpoint.manifest.payload_bytes


@pytest.mark.parametrize("links", [True, False], ids=["links", "references"])
def test_partial_checkpoints_carry_experts_over(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:

        def refuse(source: object, target: object) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(commit.os, "link", refuse)
    versions = dict.fromkeys(range(EXPERTS), 1)
    with node(tmp_path, keep_last=2) as made:
        made.save(1)
        for step in range(2, 9):
            saved = step % EXPERTS
            made.save(step, fresh=[saved])
            versions[saved] = step
            checkpoint = newest(made.root)
            assert_holds(checkpoint, versions)
            read = stock_load(checkpoint.path, like=whole_state(step))
            for key, tensor in read.items():
                assert torch.equal(tensor, checkpoint.read(key)), key
            assert checkpoint.expert_versions().tolist() == [[versions[e] for e in range(EXPERTS)]] * 2
            experts = [item for item in checkpoint.manifest.stored if item.key.startswith("expert/")]
            new_bytes = sum(piece.nbytes for piece in experts if piece.version == step)
            assert new_bytes * EXPERTS == sum(piece.nbytes for piece in experts)
        assert len(checkpoints(made.root)) == 2, "older directories were deleted, the newest still reads"
        directories = sorted(path.name for path in made.root.glob("step-*"))
        if links:
            assert directories == ["step-00000007", "step-00000008"]
        else:
            referred = {path.name for path in made.root.glob("step-*") if not (path / MANIFEST).exists()}
            assert 0 < len(referred) <= 4, "directories whose files are still referred to, and no others"


def test_persist_less_than_the_snapshot_holds(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        made.save(1)
        made.save(2, fresh=[0, 1], persist=[1])
        assert_holds(newest(made.root), {0: 1, 1: 2, 2: 1, 3: 1})
        in_memory = {p.key: p.version for p in made.ranks[0].arena.tables()[0].placed}
        assert in_memory["expert/0/0/weight/w1"] == 2, "memory holds the fresher copy"
        assert in_memory["expert/0/2/weight/w1"] == 1


def test_a_new_session_writes_everything_again(tmp_path: Path) -> None:
    with node(tmp_path, session="1") as made:
        made.save(1)
        made.save(4, fresh=[0])
    with node(tmp_path, session="2") as made:
        made.save(2, fresh=[0], persist=[0])
        checkpoint = newest(made.root)
        assert checkpoint.manifest.step == 2, "newest is what was committed last, not the highest step"
        assert checkpoint.manifest.previous is None
        assert_holds(checkpoint, dict.fromkeys(range(EXPERTS), 2))
        made.save(4, fresh=[1])
        assert newest(made.root).path.name == "step-00000004-2"
        assert_holds(newest(made.root), {0: 2, 1: 4, 2: 2, 3: 2})


def test_another_number_of_ranks_reads_rows(tmp_path: Path) -> None:
    with node(tmp_path, world_size=4) as made:
        made.save(1)
        checkpoint = newest(made.root)
        expected = whole_state(1)["dense/embedding/weight"]
        for world_size in (1, 2, 3, 5):
            bounds = [rank * 11 // world_size for rank in range(world_size + 1)]
            for low, high in pairwise(bounds):
                out = torch.empty(high - low, 3, dtype=torch.float64)
                checkpoint.read_into("dense/embedding/weight", out, block=Block.of_rows(out.shape, low, 11))
                assert torch.equal(out.float(), expected[low:high])
        for out, block in ((torch.empty(5, 3), Block.of_rows((5, 3), 8, 11)), (torch.empty(5, 4), None)):
            with pytest.raises(CheckpointError, match="is no part of it"):
                checkpoint.read_into("dense/embedding/weight", out, block=block)


def test_copies_of_several_runs_belong_to_none(tmp_path: Path) -> None:
    for run, step in (("one", 1), ("two", 2)):
        with node(tmp_path / run, run=run) as made:
            made.save(step)
            assert run_of(tmp_path / "copies") == (None if step == 1 else "one")
            name = f"step-{step:08d}"
            shutil.copytree(made.root / name, tmp_path / "copies" / name)
    with pytest.raises(CheckpointError, match=r"checkpoints of 2 runs and no run.json: move"):
        run_of(tmp_path / "copies")


def test_a_missing_part_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lightning.checkpoint.agent._HOPE_S", 0.0)
    with node(tmp_path) as made:
        elsewhere = made.ranks.pop()  # as if rank 1 lived on another node
        elsewhere.close()
        elsewhere.arena.path.unlink()
        made.save(1)
        assert checkpoints(made.root) == []
        assert (staging_path(made.root, "1", 1) / "part-00000.json").exists()
        made.agent.commit_timeout_s = 0.0
        time.sleep(made.agent._job.written_at - made.agent._job.began)  # type: ignore[union-attr]
        made.agent.serve_once()
        assert "ranks [1]" in str(made.agent.status.error)


def test_an_agent_outlives_a_storage_that_fails_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with node(tmp_path) as made:
        made.save(1)
        made.snapshot(2, fresh=[0])
        made.agent._choose_job()
        with monkeypatch.context() as patch:
            patch.setattr(PosixStorage, "names", fail)
            assert made.agent.serve_once()
            assert "Input/output error" in str(made.agent.status.error)
            assert made.agent._pending(), "it stays for what waits"
        made.persist()
        assert checkpoints(made.root)[0][1].step == 2


def test_names_of_runs_may_be_long(tmp_path: Path) -> None:
    name = arenas_name("ж" * 120, "a" * 32, "node", tmp_path)
    made = arena_directory(name, sizes={0: 1}, fallback=tmp_path, memory=tmp_path)
    assert existing_arenas(name, tmp_path) == made


def test_a_full_storage_keeps_nothing_of_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = PosixStorage.write

    def fill(storage: PosixStorage, path: Path, data: Iterable[bytes]) -> None:
        if ".rank00001." in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(storage, path, data)

    with node(tmp_path) as made:
        with monkeypatch.context() as patch:
            patch.setattr(PosixStorage, "write", fill)
            for step in (1, 2):
                made.snapshot(step)
                made.persist_attempts(3)
                assert "No space left" in str(made.agent.status.error)
            assert not [*made.root.rglob("*.distcp")]
        made.persist()
        assert checkpoints(made.root)[0][1].step == 2


def test_a_key_that_vanishes_is_refused(tmp_path: Path) -> None:
    with node(tmp_path, world_size=1) as made:
        made.save(1)
        state = whole_state(2)
        del state["dense/norm/weight"]
        made.ranks[0].start(2, state, objects={"rng/0": 1})
        made.ranks[0].finish()
        made.agent.serve_once()
        assert "dense/norm/weight is missing" in str(made.agent.status.error)
        assert_holds(newest(made.root), dict.fromkeys(range(EXPERTS), 1))
        made.save(3)
        assert made.agent.status.error is None
        assert newest(made.root).manifest.step == 3


def test_an_incomplete_first_checkpoint_is_refused(tmp_path: Path) -> None:
    with node(tmp_path, world_size=1) as made:
        state = {key: t for key, t in whole_state(1).items() if key not in expert_keys([EXPERTS - 1])}
        made.ranks[0].start(1, state, extra={"num_layers": 2, "num_experts": EXPERTS})
        made.ranks[0].finish()
        made.agent.serve_once()
        assert "expert 3 of layer 0 lacks" in str(made.agent.status.error)


def test_slow_storage_drops_snapshots_but_keeps_the_newest(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        made.save(1)
        for step in range(2, 7):
            made.snapshot(step, fresh=[step % EXPERTS])
        made.persist()
        assert newest(made.root).manifest.step == 6
        assert [path.name for path, _ in checkpoints(made.root)] == ["step-00000006", "step-00000001"]
        # What the dropped snapshots would have saved is still in memory, and was due.
        assert_holds(newest(made.root), {0: 4, 1: 5, 2: 6, 3: 3})


def test_prune_keeps_the_only_checkpoint_and_foreign_files(tmp_path: Path) -> None:
    with node(tmp_path, keep_last=1) as made:
        made.save(1)
        foreign = made.root / "step-00000099"
        foreign.mkdir()
        (foreign / "notes.txt").write_text("mine")
        assert prune(made.root, 0) == []
        assert len(checkpoints(made.root)) == 1
        assert (foreign / "notes.txt").exists()


def test_prune_deletes_only_what_a_manifest_or_a_save_names(tmp_path: Path) -> None:
    with node(tmp_path, keep_last=10, session="7") as made:
        for step in (1, 2, 3):
            made.save(step)
    root, elsewhere = made.root, tmp_path / "elsewhere"
    shutil.copytree(root / "step-00000001", elsewhere)
    foreign = [root / "step-mine" / name for name in ("model.distcp", ".metadata", "weights.bin")]
    foreign += [root / "step-00000009" / "shard.distcp", root / "step-00000001" / "notes.distcp"]
    foreign += [root / ".staging-my-20261122" / "thesis.tex", root / ".swept-floor" / "plan.txt"]
    foreign += [staging_path(root, "7", 1) / "mine.txt", *(elsewhere / path.name for path in elsewhere.iterdir())]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    leftover = staging_path(root, "7", 1) / "dense.rank00000.step00000001.distcp"
    leftover.touch()
    (root / "step-00000001-2").symlink_to(elsewhere)
    (root / "step-1").symlink_to(tmp_path / "unmarked")
    (tmp_path / "unmarked").mkdir()
    foreign.append(tmp_path / "unmarked" / "shard.distcp")
    foreign[-1].touch()
    (staging_path(root, "7", 2)).symlink_to(tmp_path / "unmarked")

    assert prune(root, 1) == ["step-00000001", "step-00000002"]

    assert not [path for path in foreign if not path.exists()]
    assert [path.name for path in (root / "step-00000001").iterdir()] == ["notes.distcp"]
    assert not (root / "step-00000002").exists()
    assert not leftover.exists()
    newest(root).verify()


def test_a_file_system_without_locks_is_written_pruned_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch, tmp_path / "checkpoints", errno.ENOSYS)
    with node(tmp_path, keep_last=2) as made:
        for step in (1, 2, 3):
            made.save(step, fresh=[step])
        claim(made.root, "run")
        assert [manifest.step for _, manifest in checkpoints(made.root)] == [3, 2]
    with PosixStorage().lease(newest(made.root).path):
        newest(made.root).verify()


def test_where_locks_fail_for_a_while_nothing_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node(tmp_path, keep_last=10) as made:
        for step in (1, 2):
            made.save(step)
    refuse_locks(monkeypatch, made.root, errno.ENOLCK)
    with PosixStorage().unread(made.root / "step-00000001") as is_free:
        assert not is_free
    with PosixStorage().lease(made.root / "step-00000001"):
        pass
    with pytest.raises(OSError, match=r"'.*/\.lock'"), PosixStorage().lock(made.root, ".lock"):
        pass


def test_snapshots_need_a_file_system_with_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_locks(monkeypatch, tmp_path, errno.ENOSYS)
    with pytest.raises(ConfigurationError, match=r"cannot be locked \(Function not implemented\): enlarge /dev/"):
        arena_directory("run", sizes={0: 1}, fallback=tmp_path, memory=tmp_path / "none")


def test_a_prune_that_was_interrupted_is_finished_by_the_next(tmp_path: Path) -> None:
    with node(tmp_path, keep_last=10) as made:
        for step in (1, 2):
            made.save(step)
    os.rename(made.root / "step-00000001" / MANIFEST, made.root / "step-00000001" / PRUNED)
    assert prune(made.root, 5) == []
    assert [path.name for path in made.root.glob("step-*")] == ["step-00000002"]


def test_files_are_private_and_nothing_temporary_stays(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        made.save(1)
        checkpoint = newest(made.root)
        names = {path.name for path in checkpoint.path.iterdir()}
        assert names == {MANIFEST, *checkpoint.manifest.files}
        assert not list(made.root.glob(".staging*"))
        for path in made.arenas.glob("rank*"):
            assert os.stat(path).st_mode & 0o077 == 0, path


def test_two_runs_cannot_share_a_directory(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        made.save(1)
    other = Node(tmp_path, session="2", run="other")
    try:
        other.snapshot(1)
        other.agent.serve_once()
        assert "holds the checkpoints of run run, not of other" in str(other.agent.status.error)
    finally:
        other.close()
    with pytest.raises(CheckpointError, match="belongs to run run, not to other"):
        Checkpoint(tmp_path / "checkpoints" / "step-00000001", run="other")


def test_of_runs_that_begin_at_one_moment_one_gets_the_directory(tmp_path: Path) -> None:
    for number in range(10):
        root, gate, refused = tmp_path / str(number), threading.Barrier(4), []

        def begin(run: str, root: Path = root, gate: threading.Barrier = gate, refused: list[str] = refused) -> None:
            gate.wait()
            try:
                claim(root, run)
            except CheckpointError:
                refused.append(run)

        threads = [threading.Thread(target=begin, args=(run,)) for run in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted([*refused, run_of(root)]) == [*"abcd"]


def test_no_checkpoint_is_committed_whose_data_another_node_has_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As may happen on a file system without locks, between the look at the parts and the commit."""
    assemble = commit._assemble

    def withdrawn_meanwhile(root: Path, held: Path, parts: list[Any]) -> Any:
        manifest = assemble(root, held, parts)
        for path in held.glob("*.rank00001.*.distcp"):
            path.unlink()
        return manifest

    with node(tmp_path) as made:
        made.snapshot(1)
        with monkeypatch.context() as failing:
            failing.setattr(commit, "_assemble", withdrawn_meanwhile)
            made.agent.serve_once()
        assert "rank00001" in str(made.agent.status.error)
        assert "was withdrawn" in str(made.agent.status.error)
        assert not checkpoints(made.root)
        made.persist()
        assert [manifest.step for _, manifest in checkpoints(made.root)] == [1]


def test_what_is_being_committed_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an agent that was started again, after another node's has removed its part."""
    with node(tmp_path) as made:
        made.snapshot(1)
        with monkeypatch.context() as failing:
            failing.setattr(PosixStorage, "_free_name", lambda *_: made.root / "no" / "such")
            failing.setattr(commit, "withdraw_part", lambda *_, **__: None)
            made.agent.serve_once()
        (staging,) = made.root.glob(".staging-*")
        assert not list(staging.glob("part-*"))
        before = {path: path.stat().st_ino for path in staging.iterdir()}
        arena = made.ranks[0].arena
        assert commit.write_part(made.root, arena.tables()[0], arena.payload).files == {}
        assert {path: path.stat().st_ino for path in staging.iterdir()} == before
        made.persist()
        assert [manifest.step for _, manifest in checkpoints(made.root)] == [1]


def test_a_part_whose_put_fails_after_it_has_arrived_lists_no_deleted_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = PosixStorage.put

    def arrive_and_fail(self: PosixStorage, path: Path, data: bytes) -> None:
        put(self, path, data)
        if path.name == "part-00001.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with node(tmp_path) as made:
        made.snapshot(1)
        tables = [(rank.arena, rank.arena.tables()[0]) for rank in made.ranks]
        commit.write_part(made.root, tables[0][1], tables[0][0].payload)
        monkeypatch.setattr(PosixStorage, "put", arrive_and_fail)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            commit.write_part(made.root, tables[1][1], tables[1][0].payload)
        assert commit.try_commit(made.root, "1", 1, 2) is None
        monkeypatch.setattr(PosixStorage, "put", put)
        commit.write_part(made.root, tables[1][1], tables[1][0].payload)
        assert commit.try_commit(made.root, "1", 1, 2) is not None
        newest(made.root).verify()


def test_a_manifest_that_could_not_be_read_once_counts_again_and_loses_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, link = PosixStorage.read, PosixStorage.link

    def fail_once(self: PosixStorage, path: Path) -> bytes:
        if path == root / "step-00000003" / MANIFEST:
            monkeypatch.setattr(PosixStorage, "read", read)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, path)

    monkeypatch.setattr(PosixStorage, "link", lambda *_: False)
    with node(tmp_path, keep_last=9) as made:
        root = made.root
        for step, fresh in ((1, None), (2, [0]), (3, [1]), (4, None)):
            made.save(step, fresh=fresh)
    monkeypatch.setattr(PosixStorage, "link", link)
    os.utime(root / "step-00000003" / MANIFEST)  # read anew
    monkeypatch.setattr(PosixStorage, "read", fail_once)
    prune(root, 1)
    Checkpoint(root / "step-00000003").verify()
    assert [manifest.step for _, manifest in checkpoints(root)] == [4, 3]
    assert prune(root, 1) == ["step-00000003"]


def test_a_smaller_world_goes_on_without_the_ranks_that_left(tmp_path: Path) -> None:
    with node(tmp_path, world_size=3) as made:
        made.save(1)
    with node(tmp_path, world_size=2, session="2") as made:
        assert len(list(made.arenas.glob("*.arena"))) == 3, "rank 2 can still be recovered from memory"
        made.save(2)
        assert made.agent.status.error is None
        assert_holds(newest(made.root), dict.fromkeys(range(EXPERTS), 2))
        assert len(list(made.arenas.glob("*.arena"))) == 2, "its memory is given back after the first commit without it"


def test_an_agent_that_leaves_does_not_take_a_living_writers_arena(tmp_path: Path) -> None:
    with node(tmp_path, world_size=2) as made:
        made.ranks[1].close()
        assert made.agent.serve_once() is False
        made.agent._leave()
        assert [path.name for path in made.arenas.glob("*.arena")] == ["rank00000.arena"]


def test_snapshots_that_make_no_whole_checkpoint_are_given_up(tmp_path: Path) -> None:
    with node(tmp_path, world_size=1) as made:
        state = {key: t for key, t in whole_state(1).items() if key not in expert_keys([0])}
        made.ranks[0].start(1, state)
        made.ranks[0].finish()
        attempts = sum(made.agent.serve_once() for _ in range(30))
        assert 1 < attempts < 10, "tried again, but not for ever"
        assert made.agent.status.errors == attempts
        made.save(2)
        assert newest(made.root).manifest.step == 2
