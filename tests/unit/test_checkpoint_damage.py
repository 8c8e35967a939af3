"""Damage and failing storage: detected, named in one sentence, and never at the cost of the last whole checkpoint."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moe_lightning.checkpoint import commit
from moe_lightning.checkpoint import directory as store
from moe_lightning.checkpoint.agent import Agent, main
from moe_lightning.checkpoint.agent_handle import agent_alive, read_status, request_stop, start_agent
from moe_lightning.checkpoint.agreement import next_job
from moe_lightning.checkpoint.arena import arena_path
from moe_lightning.checkpoint.inspect import scope_bytes
from moe_lightning.checkpoint.loader import Checkpoint, find_newest
from moe_lightning.checkpoint.manifest import FileRecord, Manifest, RankPart, check_coverage, is_tiled
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.checkpoint.storage import interface, posix
from moe_lightning.errors import CheckpointError
from moe_lightning.state.pieces import Block, Location, Piece
from tests.programs import run_program
from tests.unit.checkpoint_state import EXPERTS, EXTRA, Node, assert_holds, node, state_of, two_checkpoints


@pytest.fixture(name="two_checkpoints")
def saved_twice(tmp_path: Path) -> Iterator[Path]:
    with two_checkpoints(tmp_path) as root:
        yield root


def unshare(path: Path) -> None:
    """Give a hard-linked file an inode of its own, so that damage does not reach the older checkpoint."""
    copy = path.read_bytes()
    path.unlink()
    path.write_bytes(copy)


def kinds_of_files(root: Path) -> list[str]:
    directory = root / "step-00000002"
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "grow"])
def test_every_kind_of_file_is_guarded(two_checkpoints: Path, harm: str) -> None:
    names = kinds_of_files(two_checkpoints)
    assert {name.split(".")[0] for name in names} >= {"dense", "experts", "objects", "", "MANIFEST"}
    pristine = two_checkpoints.parent / "pristine"
    shutil.copytree(two_checkpoints, pristine)
    for name in names:
        path = two_checkpoints / "step-00000002" / name
        unshare(path)
        data = bytearray(path.read_bytes())
        if harm == "flip":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif harm == "truncate":
            path.write_bytes(data[: len(data) // 2])
        elif harm == "grow":
            path.write_bytes(bytes(data) + b"x")
        else:
            path.unlink()
        found = find_newest(two_checkpoints)
        assert found.checkpoint.manifest.step == 1, name
        if name == MANIFEST and harm == "delete":
            assert found.problems == (), "without a manifest it never was a checkpoint"
        else:
            (problem,) = found.problems
            assert str(path) in problem
            assert "\n" not in problem
        assert_holds(found.checkpoint, dict.fromkeys(range(EXPERTS), 1))
        shutil.copy(pristine / "step-00000002" / name, path)
    assert find_newest(two_checkpoints).problems == ()


def test_a_flipped_byte_anywhere_is_found(two_checkpoints: Path) -> None:
    path = next((two_checkpoints / "step-00000002").glob("experts.rank00000.step00000002*"))
    data = path.read_bytes()
    for position in range(0, len(data), 97):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        with pytest.raises(CheckpointError, match="checksum does not match"):
            Checkpoint(path.parent).verify()
    path.write_bytes(data)
    Checkpoint(path.parent).verify()


def test_a_manifest_from_elsewhere(two_checkpoints: Path, tmp_path: Path) -> None:
    ours = two_checkpoints / "step-00000002" / MANIFEST
    shutil.copy(two_checkpoints / "step-00000001" / MANIFEST, ours)
    assert "belongs to step 1, not to step-00000002" in find_newest(two_checkpoints).problems[0]
    other = tmp_path / "other"
    other.mkdir()
    with node(other, run="another") as made:
        made.save(2)
        shutil.copy(made.root / "step-00000002" / MANIFEST, ours)
    found = find_newest(two_checkpoints)
    assert "belongs to run another, but" in found.problems[0]
    assert found.checkpoint.manifest.step == 1


def test_a_manifest_that_points_outside_is_refused(two_checkpoints: Path) -> None:
    path = two_checkpoints / "step-00000002"
    manifest = Checkpoint(path).manifest
    name = next(iter(manifest.files))
    record = manifest.files[name]
    for evil in (f"/etc/{name}", f"../../{name}", f"../step-1/../../{name}"):
        harmed = Manifest(**{**vars(manifest), "files": {name: type(record)(**{**vars(record), "path": evil})}})
        (path / MANIFEST).write_bytes(harmed.dump())
        with pytest.raises(CheckpointError, match="was written by something else: it names the file"):
            Checkpoint(path)


def test_a_manifest_of_another_format(two_checkpoints: Path) -> None:
    path = two_checkpoints / "step-00000002" / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'{"format":1,', b'{"format":99,', 1))
    with pytest.raises(CheckpointError, match="format 99"):
        Checkpoint(path.parent)
    for body in (b"{}", b'{"files":{}}', b"[]"):
        sealed = b'{"format":1,"xxh3":"%s","body":%s}\n' % (xxhash.xxh3_64_hexdigest(body).encode(), body)
        path.write_bytes(sealed)
        with pytest.raises(CheckpointError, match="was written by something else"):
            Checkpoint(path.parent)
        path.write_bytes(sealed.replace(body, b"x" * len(body)))
        with pytest.raises(CheckpointError, match="checksum"):
            Checkpoint(path.parent)


HUGE = 2**63
WRONG: list[object] = [None, True, -7, HUGE, 10**30, 1.5, float("nan"), "x", "", [], {}, [[1]], {"a": 1}]
DEEP = b"[" * 200_000 + b"]" * 200_000


def sealed(body: bytes) -> bytes:
    return b'{"format":1,"xxh3":"%s","body":%s}\n' % (xxhash.xxh3_64_hexdigest(body).encode(), body)


def forgeries(body: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """(what was forged, the body); values that are as right as the old ones are left out."""
    first_file = next(iter(body["files"]))
    places = {"manifest": [], "file": ["files", first_file], "extra": ["extra"]}
    piece: list[Any] = ["stored", 0]
    places |= {"piece": piece, "block": [*piece, "block"], "location": [*piece, "location"]}
    for kind, keys in places.items():
        for name in reduce(getitem, keys, body):
            for wrong in [*WRONG, "missing"]:
                forged = copy.deepcopy(body)
                entry = reduce(getitem, keys, forged)
                if wrong == "missing":
                    del entry[name]
                else:
                    entry[name] = wrong
                yield f"{kind}/{name}={wrong!r}", json.dumps(forged).encode()
    for key in ("expert/0/99999999999/weight/w", "expert/x", "expert/0/" + "9" * 5000 + "/weight/w", "k" * 10**6):
        forged = copy.deepcopy(body)
        forged["stored"][0]["key"] = key
        yield f"key {key[:40]}", json.dumps(forged).encode()
    for shape in ([0, 2**62, 2**62], [1] * 100):
        forged = copy.deepcopy(body)
        forged["stored"][0] |= {"nbytes": 0, "block": {"offsets": [0] * len(shape), "sizes": shape, "whole": shape}}
        yield f"shape {shape}", json.dumps(forged).encode()
    yield "deep", DEEP
    yield "deep inside", json.dumps(body | {"extra": "@"}).encode().replace(b'"@"', DEEP)
    yield "a number too long to convert", json.dumps(body | {"step": "@"}).encode().replace(b'"@"', b"1" * 5000)


def refusal(path: Path) -> str | None:
    """What is said of a checkpoint that is read and verified; anything but a CheckpointError is an error."""
    try:
        checkpoint = Checkpoint(path)
        scope_bytes(checkpoint.manifest)
        checkpoint.verify()
    except CheckpointError as error:
        return str(error)
    return None


def test_a_forged_manifest_gets_one_sentence_and_is_passed_over(two_checkpoints: Path) -> None:
    path = two_checkpoints / "step-00000002" / MANIFEST
    body = json.loads(path.read_bytes())["body"]
    free = (
        "world='missing'", "extra=", "extra/", "previous=", "run=", "session=", "created_s=", "group=", "key=", "due=",
        "location/offset='missing'",
    )  # fmt: skip
    refused, accepted = 0, []
    for what, forged in forgeries(body):
        path.write_bytes(sealed(forged))
        problem = refusal(path.parent)
        if problem is None:
            accepted.append(what)
            continue
        refused += 1
        assert "\n" not in problem, what
        assert len(problem) < len(str(path)) + 400, what
    assert refused > 250
    assert not [what for what in accepted if not any(name in what for name in free)]
    path.write_bytes(sealed(DEEP))
    found = find_newest(two_checkpoints)
    assert found.checkpoint.step == 1
    assert len(found.problems) == 1


@pytest.mark.parametrize("data", [DEEP, b'{"run": 7}', b'{"run": {}}', b"[]", b"{}", b"\xff"])
def test_a_forged_run_record_gets_one_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"run\.json is damaged .*: restore or delete it"):
        store.run_of(tmp_path)


def test_a_directory_with_nothing_readable_is_given_to_no_run(two_checkpoints: Path) -> None:
    for path in (two_checkpoints / "run.json", *two_checkpoints.glob(f"step-*/{MANIFEST}")):
        path.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"run\.json is damaged .*, and no checkpoint tells its run"):
        store.claim(two_checkpoints, "another")
    assert (two_checkpoints / "run.json").read_bytes() == b"damaged"


def test_a_manifest_that_cannot_be_read_is_passed_over(two_checkpoints: Path) -> None:
    path = two_checkpoints / "step-00000002" / MANIFEST
    path.unlink()
    path.mkdir()
    found = find_newest(two_checkpoints)
    assert found.checkpoint.step == 1
    assert f"{path} cannot be read" in found.problems[0]


def test_coverage_names_the_hole(two_checkpoints: Path) -> None:
    stored = list(Checkpoint(two_checkpoints / "step-00000001").manifest.stored)
    check_coverage(stored)
    rows = [s for s in stored if s.key == "dense/embedding/weight"]
    assert len(rows) == 2
    scalar = next(s for s in stored if s.key == "dense/step")
    for damaged in ([s for s in stored if s is not rows[0]], [*stored, rows[1]]):
        with pytest.raises(CheckpointError, match="parts of dense/embedding/weight are missing or there twice"):
            check_coverage(damaged)
    with pytest.raises(CheckpointError, match="parts of dense/step are missing or there twice"):
        check_coverage([*stored, scalar])
    gone = "expert/1/2/weight/b"
    with pytest.raises(CheckpointError, match="expert 2 of layer 1 lacks weight/b"):
        check_coverage([s for s in stored if s.key != gone])


def is_tiled_by_pairs(whole: Sequence[int], blocks: Sequence[Block]) -> bool:
    overlap = any(a.intersection(b) for a, b in itertools.combinations(blocks, 2))
    return sum(block.numel for block in blocks) == math.prod(whole) and not overlap


@given(st.data())
def test_tilings_with_gaps_overlaps_and_empty_blocks(data: st.DataObject) -> None:
    whole = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    parts = [Block.of(whole)]
    for _ in range(data.draw(st.integers(0, 4))):
        outer = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        dim = data.draw(st.integers(0, len(whole) - 1))
        size = data.draw(st.integers(0, outer.sizes[dim]))
        inner = replace(outer, sizes=(*outer.sizes[:dim], size, *outer.sizes[dim + 1 :]))
        rest = replace(
            outer,
            offsets=(*outer.offsets[:dim], outer.offsets[dim] + size, *outer.offsets[dim + 1 :]),
            sizes=(*outer.sizes[:dim], outer.sizes[dim] - size, *outer.sizes[dim + 1 :]),
        )
        parts += [inner, rest]
    picked = data.draw(st.just(parts) | st.lists(st.sampled_from(parts), min_size=1, max_size=6))
    assert is_tiled(whole, picked) == is_tiled_by_pairs(whole, picked)


def test_tensors_of_many_blocks_are_checked_in_time_in_proportion() -> None:
    whole = (128, 128)
    blocks = [Block(offsets=(i, j), sizes=(1, 1), whole=whole) for i in range(128) for j in range(128)]
    began = time.monotonic()
    assert is_tiled(whole, blocks)
    assert not is_tiled(whole, [*blocks[1:], blocks[1]])
    assert time.monotonic() - began < 20, "pairs take minutes"


def test_a_checkpoint_of_many_files_is_assembled_in_time_in_proportion(tmp_path: Path) -> None:
    ranks, each = 2000, 10
    parts = []
    for rank in range(ranks):
        name = f"dense.rank{rank:05d}.step00000001.distcp"
        stored = tuple(
            Piece(
                key=f"dense/{rank}-{index}",
                block=Block.of((1,)),
                dtype="uint8",
                version=1,
                group="dense",
                nbytes=1,
                xxh3="0" * 16,
                location=Location(file=name, offset=index, length=1, data_offset=index),
            )
            for index in range(each)
        )
        files = {name: FileRecord(path=name, nbytes=each, xxh3="0" * 16)}
        parts.append(
            RankPart(
                run="r", session="1", step=1, rank=rank, world=0, world_size=ranks, files=files, stored=stored, extra={}
            )
        )
    began = time.monotonic()
    manifest = commit._assemble(tmp_path, tmp_path, parts)
    assert len(manifest.files) == ranks + 1
    assert time.monotonic() - began < 8, "files times pieces take longer"


@pytest.mark.parametrize("refused", ["write", "fsync", "mkdir", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_failing_storage_is_reported_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, code: int
) -> None:
    """Each operation on the storage is refused in turn; memory (the arenas' directory) stays writable."""
    with node(tmp_path) as made:
        made.save(1)
        storage = str(made.root)

        def refuse(path: object) -> None:
            if str(path).startswith(storage):
                raise OSError(code, os.strerror(code), str(path))

        with monkeypatch.context() as patch:
            if refused == "mkdir":
                real_mkdir = Path.mkdir
                patch.setattr(Path, "mkdir", lambda self, *a, **k: (refuse(self), real_mkdir(self, *a, **k))[1])
            elif refused == "rename":
                real_rename = os.rename
                patch.setattr(interface.os, "rename", lambda a, b: (refuse(b), real_rename(a, b))[1])
            elif refused == "fsync":
                real_fsync = os.fsync
                patch.setattr(
                    interface.os, "fsync", lambda fd: (refuse(os.readlink(f"/proc/self/fd/{fd}")), real_fsync(fd))[1]
                )
            else:

                class Full(io.BufferedWriter):
                    def write(self, data: object, /) -> int:
                        raise OSError(code, os.strerror(code), storage)

                def opened(path: Path, mode: str, **options: Any) -> Any:
                    return Full(io.FileIO(path, mode.replace("b", ""))) if "x" in mode else open(path, mode, **options)

                patch.setattr(posix, "open", opened, raising=False)
            made.snapshot(2, fresh=[0])
            for _ in range(3):
                made.agent.serve_once()
            status = read_status(made.arenas)
            assert status.errors >= 1
            assert os.strerror(code) in str(status.error)
            assert storage in str(status.error)
            assert "\n" not in str(status.error)
            found = find_newest(made.root)
            assert found.checkpoint.manifest.step == 1
        made.persist()
        assert read_status(made.arenas).error is None
        found = find_newest(made.root)
        assert_holds(found.checkpoint, {0: 2, 1: 1, 2: 1, 3: 1})


def test_no_temporary_folder_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    commit.frame_of.cache_clear()
    with node(tmp_path) as made:
        made.save(1)
        assert made.agent.status.error is None
    assert find_newest(tmp_path / "checkpoints").checkpoint.manifest.step == 1


def test_file_systems_that_cannot_sync_a_directory_hold_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    with node(tmp_path) as made:
        made.save(1)
        assert made.agent.status.error is None
    assert find_newest(tmp_path / "checkpoints").checkpoint.manifest.step == 1


def test_a_vanished_directory_gets_a_full_checkpoint(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        made.save(1)
        shutil.rmtree(made.root)
        made.save(2, fresh=[0])
        found = find_newest(made.root)
        assert_holds(found.checkpoint, {0: 2, 1: 1, 2: 1, 3: 1})


@pytest.mark.slow
def test_a_file_size_limit_stops_a_real_agent_but_not_the_checkpoint(tmp_path: Path) -> None:
    """The operating system itself refuses to write, by its limit on file sizes."""
    with node(tmp_path) as made:
        made.save(1)
        made.snapshot(2, fresh=[0])
        limited = (
            "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000));"
            "from moe_lightning.checkpoint.agent import main; sys.exit(main(sys.argv[1:]))"
        )
        request_stop(made.arenas)
        arguments = ["--arenas", str(made.arenas), "--checkpoints", str(made.root), "--retry-s", "0.01"]
        done = run_program("-B", "-c", limited, *arguments)  # the limit would cut byte code that Python writes
        assert done.returncode == 1
        assert "File too large" in str(read_status(made.arenas).error)
        found = find_newest(made.root)
        assert found.checkpoint.manifest.step == 1
        assert len(list(made.arenas.glob("*.arena"))) == 2, "unsaved snapshots stay in memory"
        made.persist()
        assert find_newest(made.root).checkpoint.manifest.step == 2  # type: ignore[union-attr]


@pytest.mark.slow
def test_an_agent_process_outlives_its_workers(tmp_path: Path) -> None:
    made = Node(tmp_path)
    made.snapshot(1)
    made.close()  # all workers are gone before an agent looked
    process = start_agent(made.arenas, made.root, grace_s=0.2, keep_last=3)
    assert process.wait(timeout=120) == 0
    assert not agent_alive(made.arenas)
    status = read_status(made.arenas)
    assert (status.committed_step, status.error) == (1, None)
    assert status.persist_bytes > 0
    found = find_newest(made.root)
    assert_holds(found.checkpoint, dict.fromkeys(range(EXPERTS), 1))
    assert not list(made.arenas.glob("*.arena")), "memory is given back"


@pytest.mark.slow
def test_an_agent_whose_snapshots_are_taken_away_leaves(tmp_path: Path) -> None:
    made = Node(tmp_path)
    made.snapshot(1)
    process = start_agent(made.arenas, made.root, grace_s=600.0, poll_s=0.01)
    while read_status(made.arenas).committed_step is None:
        assert process.poll() is None
        time.sleep(0.01)
    shutil.rmtree(made.arenas)
    process.wait(timeout=60)
    made.close()
    assert main(["--arenas", str(made.arenas), "--checkpoints", str(made.root)]) == 0


def test_a_second_agent_leaves_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arenas = tmp_path / "arenas"
    arenas.mkdir()
    with contextlib.ExitStack() as stack:
        import fcntl

        lock = stack.enter_context(open(arenas / "agent.lock", "a"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert agent_alive(arenas)
        assert main(["--arenas", str(arenas), "--checkpoints", str(tmp_path / "c")]) == 0
    assert "another agent serves" in capsys.readouterr().out


def test_an_agent_takes_up_what_another_left(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        made.snapshot(1)
        made.agent._find_arenas()
        made.agent._choose_job()
        made.agent._write()  # and dies here: parts written, nothing committed
        heir = Agent(made.arenas, made.root, retry_s=0.0)
        assert heir.serve_once()
        assert find_newest(made.root).checkpoint is not None
        assert all(rank.arena.state.recovery is not None for rank in made.ranks)


def test_what_ranks_left_on_their_former_nodes_does_not_hold_a_checkpoint_up(tmp_path: Path) -> None:
    """Two ranks change places: each node still has the arena of the rank that was there before."""
    agents = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir(mode=0o700)
        agents.append(Agent(tmp_path / name, tmp_path / "checkpoints", retry_s=0.0))
    for session, nodes in (("1", "ab"), ("2", "ba")):
        writers = [
            Snapshotter(
                arena_path(tmp_path / nodes[rank], rank),
                run="run",
                session=session,
                rank=rank,
                world_size=2,
                state=state_of(rank, 2, 0),
                objects=0,
            )
            for rank in range(2)
        ]
        for rank, writer in enumerate(writers):
            writer.start(int(session), state_of(rank, 2, int(session)), extra=EXTRA)
            writer.wait_before_update()
            writer.finish()
        if session == "1":
            for writer in writers:
                writer.close()
    for _ in range(5):
        for agent in agents:
            agent.serve_once()
    for writer in writers:
        writer.close()
    found = find_newest(tmp_path / "checkpoints").checkpoint
    assert found.step == 2


def test_the_last_snapshot_of_a_new_session_does_not_wait_for_a_lost_rank_of_the_former_one(tmp_path: Path) -> None:
    """Rank 1 dies before its part of the last step is written; rank 0 saves the step alone, and leaves its arena."""
    with node(tmp_path, session="1") as made:
        made.snapshot(1)
        made.ranks.pop().close()
        arena_path(made.arenas, 1).unlink()  # on a node that was lost
        made.agent.serve_once()
        made.close()
        alone = Snapshotter(
            arena_path(made.arenas, 0),
            run="run",
            session="2",
            rank=0,
            world_size=1,
            state=state_of(0, 1, 0),
            objects=0,
        )
        alone.start(1, state_of(0, 1, 1), extra=EXTRA)
        alone.finish()
        alone.close()
        made.ranks = []
        made.agent._job.looked_at = 0.0  # type: ignore[union-attr]
        for _ in range(5):
            made.agent.serve_once()
    found = find_newest(made.root).checkpoint
    assert found.manifest.session == "2"


def test_a_step_that_a_former_session_had_persisted_is_not_waited_for(tmp_path: Path) -> None:
    """Training came back to before step 2; a rank's second snapshot of it gives way to newer ones while an agent has
    begun to write the other rank's."""
    with node(tmp_path, session="1") as made:
        made.save(2)
    with node(tmp_path, session="2") as made:
        made.snapshot(2)
        made.agent._find_arenas()
        arenas = list(made.agent._arenas.values())
        made.agent._job = next_job(made.root, "2", arenas)
        arenas[0].transition(lambda state: state.start_persist(2))
        for step in (3, 4, 5):
            made.snapshot(step)
        for _ in range(5):
            made.agent.serve_once()
            if made.agent._job is not None:
                made.agent._job.looked_at = 0.0
        assert made.agent.status.committed_step == 5
