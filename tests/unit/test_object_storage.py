"""Checkpoints in an object store: what is put, referred to, refused, retried and pruned, over the S3 protocol."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import _registry as registry
from lightning.fabric.utilities.cloud_io import get_filesystem

from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.checkpoint import inspect
from moe_lightning.checkpoint.agent import Agent
from moe_lightning.checkpoint.arena import arena_path
from moe_lightning.checkpoint.directory import Superseded, check_world, checkpoints, enter_world, make_staging
from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.checkpoint.manifest import METADATA, PRUNED
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.checkpoint.storage import objects, place_of, shared_place, storage_of
from moe_lightning.checkpoint.storage.interface import URL
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.strategies.checkpoints import is_directory_of_ours
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from tests.object_stores import BUCKET, FAULTS, Faults
from tests.parameters import slow
from tests.unit.checkpoint_state import EXPERTS, Node, assert_holds, node

FULL = dict.fromkeys(range(EXPERTS), 1)


@pytest.fixture
def root(faults: Faults) -> URL:
    place = place_of(f"s3://{BUCKET}/{uuid.uuid4().hex}/checkpoints")
    assert isinstance(place, URL)
    return place


def commits(made: Node, steps: range, versions: dict[int, int]) -> None:
    """Partial checkpoints, each of which holds what it should."""
    for step in steps:
        made.save(step, fresh=[step % EXPERTS])
        versions[step % EXPERTS] = step
        found = find_newest(made.root)
        assert found.problems == ()
        assert found.checkpoint is not None, made.agent.status
        assert_holds(found.checkpoint, versions)


def test_names_are_put_together_like_paths() -> None:
    place = place_of("S3://bucket/a//b/")
    assert str(place) == "s3://bucket/a/b"
    assert str(place / "c" / "../d") == "s3://bucket/a/b/d"
    assert (place.name, str(place.parent)) == ("b", "s3://bucket/a")
    assert place == place_of(str(place))
    assert place_of("file:///tmp/x") == Path("/tmp/x")
    assert place_of("a/b") == Path("a/b")
    assert place_of("~/a") == Path.home() / "a"


@pytest.mark.slow
def test_partial_checkpoints_refer_to_what_they_carry_over(root: URL, tmp_path: Path) -> None:
    versions = dict(FULL)
    with node(tmp_path, root=root, keep_last=2) as made:
        made.save(1)
        commits(made, range(2, 7), versions)
        assert [m.step for _, m in checkpoints(root)] == [6, 5]
        storage = storage_of(root)
        places = [root / name for name in storage.names(root) if name.startswith("step-")]
        data = [p / name for p in places for name in storage.names(p) if name.endswith(".distcp")]
        named = {path / r.path for path, m in checkpoints(root) for r in m.files.values() if r.path.endswith("distcp")}
        assert set(data) == named, "what no checkpoint needs is deleted, what one refers to is there"
        assert all(verdict.is_whole for verdict in inspect.verify_all(root))


def test_fewer_bytes_travel_for_fewer_experts(root: URL, faults: Faults, tmp_path: Path) -> None:
    with node(tmp_path, root=root) as made:
        made.save(1)
        full = sum(size for path, size in faults.put_bytes.items() if "/experts" in path)
        faults.put_bytes.clear()
        made.save(2, fresh=[0])
        assert sum(size for path, size in faults.put_bytes.items() if "/experts" in path) <= full / EXPERTS + 2048


@pytest.mark.slow
def test_one_of_16_experts_of_a_gpt_350m_takes_a_fifth_of_the_bytes(root: URL, faults: Faults, tmp_path: Path) -> None:
    """24 layers of width 1024, every other one with 16 experts, 50257 tokens; here all widths are a sixteenth."""
    width, layers, experts = 64, 24, 16
    scopes = ("weight", "exp_avg", "exp_avg_sq")

    def state(step: int) -> dict[str, torch.Tensor]:
        dense: dict[str, tuple[int, ...]] = {"embedding": (50257 // 16, width)}
        dense |= {f"attention{layer}": (4, width, width) for layer in range(layers)}
        dense |= {f"ffn{layer}": (2, width, 4 * width) for layer in range(0, layers, 2)}
        keys = {f"dense/{name}/{scope}": shape for name, shape in dense.items() for scope in scopes}
        for layer, expert, scope in itertools.product(range(layers // 2), range(experts), scopes):
            keys[f"expert/{layer}/{expert}/{scope}/w"] = 2, width, 4 * width
        return {key: torch.full(shape, float(step)) for key, shape in keys.items()}

    arenas = tmp_path / "arenas"
    arenas.mkdir(mode=0o700)
    snapshotter = Snapshotter(
        arena_path(arenas, 0), run="run", session="1", rank=0, world_size=1, state=state(0), objects=0
    )
    agent, sent = Agent(arenas, root), []
    for step in (1, 2):
        faults.put_bytes.clear()
        fresh = None if step == 1 else {key for key in state(0) if key.split("/")[2] == "3" and key[0] == "e"}
        snapshotter.start(step, state(step), fresh=fresh, extra={"num_layers": layers // 2, "num_experts": experts})
        snapshotter.finish()
        while agent.serve_once():
            pass
        assert agent.status.committed_step == step
        sent.append(sum(faults.put_bytes.values()))
    snapshotter.close()
    assert sent[1] <= 0.2 * sent[0], sent


@pytest.mark.parametrize("kinds", [FAULTS, *(slow((kind,)) for kind in FAULTS)], ids="-".join)
def test_faults_of_the_store_are_survived(kinds: tuple[str, ...], root: URL, faults: Faults, tmp_path: Path) -> None:
    faults.at_random(7, 0.2, *kinds)
    versions = dict(FULL)
    with node(tmp_path, root=root, keep_last=3) as made:
        for step in range(1, 5):
            made.snapshot(step, fresh=None if step == 1 else [step % EXPERTS])
            if step > 1:
                versions[step % EXPERTS] = step
            for _ in range(40):
                made.agent.serve_once()
                if made.agent.status.committed_step == step:
                    break
        assert all(faults.done[kind] > (3 if len(kinds) == 1 else 0) for kind in kinds), faults.done
        faults.choose = lambda *_: None
        found = find_newest(root)
        assert found.problems == ()
        assert found.checkpoint.step == 4
        assert all(verdict.is_whole for verdict in inspect.verify_all(root))


def test_the_time_of_the_last_checkpoint_is_known(root: URL, tmp_path: Path) -> None:
    with node(tmp_path, root=root) as made:
        made.save(1)
    saver, strategy = PartialExpertsCheckpoint(str(root)), ExpertParallelStrategy()
    strategy.decide = lambda choose: choose()  # type: ignore[method-assign]
    trainer: Any = SimpleNamespace(strategy=strategy, state=SimpleNamespace(fn="validate"))
    (last,) = saver.last_checkpoints(trainer)
    assert get_filesystem(last).modified(last), "Lightning compares times of candidates"


def test_closing_what_is_committed_does_not_read_its_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of large runs have hundreds of megabytes."""
    storage, place = objects.FsspecStorage("memory"), place_of("memory://bucket/committed")
    storage.put(place / MANIFEST, b"m" * 100)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "read_range", None)
        storage.close(place)
    assert storage.read(place / MANIFEST) == b"m" * 100


@pytest.mark.slow
def test_a_store_that_is_away_is_waited_for(root: URL, faults: Faults, tmp_path: Path) -> None:
    with node(tmp_path, root=root) as made:
        made.save(1)
        faults.choose = lambda *_: "error"
        made.snapshot(2, fresh=[0])
        made.agent.serve_once()
        assert "failed (try again)" in str(made.agent.status.error)
        assert "\n" not in str(made.agent.status.error)
        faults.choose = lambda *_: None
        made.persist()
        assert made.agent.status.error is None
        assert checkpoints(root)[0][1].step == 2


@pytest.mark.slow
def test_what_is_cut_short_in_the_store_is_found(root: URL, tmp_path: Path) -> None:
    with node(tmp_path, root=root) as made:
        for step in (1, 2):
            made.save(step)
    storage = storage_of(root)
    path, manifest = checkpoints(root)[0]
    name = next(name for name in manifest.files if name.startswith("dense"))
    data = storage.read(path / name)
    for cut in (data[:-1], b"x" + data[1:]):
        storage.put(path / name, cut)
        found = find_newest(root)
        assert found.checkpoint.step == 1
        assert "is damaged" in found.problems[0]


def test_what_cannot_be_put_on_a_condition_is_not_put_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer world may have closed the name between two attempts."""

    class Flaky(MemoryFileSystem):
        store: ClassVar[dict[str, object]] = {}

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: object) -> None:
            raise OSError("try again")

    monkeypatch.setattr(objects, "_ATTEMPTS", 1)
    monkeypatch.setattr(objects, "_store", lambda *_: Flaky())
    place = place_of("memory://bucket/step") / MANIFEST
    with pytest.raises(OSError, match="try again"):
        objects.FsspecStorage("memory").put_if_absent(place, b"manifest")
    assert Flaky.store == {}


def test_ranks_that_begin_together_write_to_no_common_name(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, root = objects.FsspecStorage("memory"), place_of("memory://bucket/together")
    staging, written = root / "step-00000001-w1-1", []
    with monkeypatch.context() as patch:
        patch.setattr(storage, "put", lambda path, data: written.append(path))
        for _ in range(8):
            storage.begin(staging)
    assert len(set(written)) == 8
    for path in written:
        storage.put(path, b"")
    assert storage.is_dir(staging)
    storage.commit(staging, staging, b"m" * 100, [], lambda: None)
    assert storage.names(staging) == [MANIFEST]


def test_large_buffers_are_uploaded_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of fsspec copies what it gets at once, and some send it in one request."""
    sizes, write = [], MemoryFile.write

    def counted(self: MemoryFile, data: memoryview) -> int:
        sizes.append(len(data))
        return write(self, data)

    monkeypatch.setattr(MemoryFile, "write", counted)
    monkeypatch.setattr(objects, "_CHUNK_BYTES", 1000)
    storage, place, data = objects.FsspecStorage("memory"), place_of("memory://bucket/chunks"), os.urandom(2500)
    storage.write(place, [data[:2400], b"", data[2400:]])
    assert sizes == [1000, 1000, 400, 100]
    assert storage.read(place) == data


class Expiring(MemoryFileSystem):
    """Reads its credentials when it is made."""

    protocol = "expiring"
    valid: ClassVar[str] = "first"

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._credentials = self.valid

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        if self._credentials != self.valid or self.valid == "none":
            raise PermissionError("The provided token has expired.")
        return b"data"


@pytest.fixture
def expiring(monkeypatch: pytest.MonkeyPatch) -> Iterator[objects.FsspecStorage]:
    with monkeypatch.context() as patch:
        patch.setitem(registry, "expiring", Expiring)
        objects._store.cache_clear()
        yield objects.FsspecStorage("expiring")
    objects._store.cache_clear()


def test_credentials_that_were_renewed_are_read_again(
    expiring: objects.FsspecStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of("memory://bucket/renewed")
    for valid in ("first", "second", "third"):
        monkeypatch.setattr(Expiring, "valid", valid)
        assert expiring.read(place) == b"data"


def test_a_refusal_names_its_cure(expiring: objects.FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expiring, "valid", "none")
    with pytest.raises(PermissionError, match=r"access was refused \(The provided token has expired.\): give cred"):
        expiring.read(place_of("memory://bucket/refused"))


def test_a_refusal_of_the_last_attempt_is_one(expiring: objects.FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_ATTEMPTS", 1)
    monkeypatch.setattr(Expiring, "valid", "none")
    with pytest.raises(PermissionError, match="memory://bucket/refused"):
        expiring.read(place_of("memory://bucket/refused"))


def test_a_store_that_refuses_has_no_directory_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that loads from there may have credentials of its own."""

    def refuse(*_: object, **options: object) -> None:
        raise PermissionError("Access Denied")

    for name in ("exists", "info", "ls", "cat_file"):
        monkeypatch.setattr(MemoryFileSystem, name, refuse)
    assert not is_directory_of_ours("memory://bucket/of-a-plugin")


def test_an_older_world_commits_nothing_once_a_newer_one_has_begun(root: URL, tmp_path: Path) -> None:
    storage = storage_of(root)
    with node(tmp_path, root=root, world=4) as old:
        old.save(1)
        staging = make_staging(root, "9", 7, 4)
        old.snapshot(2)
        enter_world(root, 5)
        with pytest.raises(CheckpointError, match="was closed while it was written"):
            storage.commit(staging, staging, b"x" * 100, [], lambda: None)
        with pytest.raises(Superseded):
            storage.commit(staging, staging, b"x" * 100, [], lambda: check_world(root, 4))
        old.persist()
        assert "world 4 may not write" in (old.agent.status.error or "")
    assert [m.step for _, m in checkpoints(root)] == [1]


def test_metadata_of_a_part_that_was_withdrawn_is_replaced(root: URL, faults: Faults, tmp_path: Path) -> None:
    with node(tmp_path, root=root) as made:
        made.snapshot(1)
        faults.choose = lambda method, path, _: "error" if method == "PUT" and MANIFEST in path else None
        made.agent.serve_once()
        assert made.agent.status.error is not None
        faults.choose = lambda *_: None
        made.persist()
    ((path, manifest),) = checkpoints(root)
    metadata = storage_of(root).read(path / METADATA)
    assert all(name.encode() in metadata for name in manifest.files if name != METADATA)


def test_who_commits_second_finds_the_first(root: URL, tmp_path: Path) -> None:
    storage = storage_of(root)
    staging = make_staging(root, "9", 7, 1)
    first = b"1" * 100
    assert storage.commit(staging, staging, first, [], lambda: None) == staging
    assert storage.commit(staging, staging, b"2" * 100, [], lambda: None) == staging
    assert storage.read(staging / MANIFEST) == first
    storage.discard(staging)
    assert storage.read(staging / MANIFEST) == first, "what is committed is not discarded"
    storage.retire(staging)
    with pytest.raises(FileNotFoundError):
        storage.read(staging / MANIFEST)
    assert storage.read(staging / PRUNED) == first
    with pytest.raises(CheckpointError, match="was closed"):
        storage.commit(staging, staging, b"2" * 100, [], lambda: None)


def test_void_names_are_free_after_an_hour(root: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of(root)
    staging = make_staging(root, "9", 7, 1)
    storage.discard(staging)
    assert storage.names(staging) == [MANIFEST]
    assert not storage.is_dir(staging)
    monkeypatch.setattr(objects, "_VOID_S", -10.0)
    storage.discard(staging)
    assert storage.names(staging) == []


def test_tensors_come_out_of_blocks(root: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_BLOCK_BYTES", 7)
    storage, data = storage_of(root), bytes(range(50))
    storage.put(root / "x", data)
    for offset, nbytes in ((0, 3), (5, 6), (6, 1), (13, 20), (43, 7)):
        expected = torch.tensor(list(data[offset : offset + nbytes]), dtype=torch.uint8)
        assert torch.equal(storage.tensor(root / "x", offset=offset, nbytes=nbytes), expected)
    with pytest.raises(ValueError, match="ends before byte 53"):
        storage.tensor(root / "x", offset=49, nbytes=4)


def test_mistakes_are_sentences(root: URL, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="='s4' is not a known storage: use one of s3, gs, az"):
        place_of("s4://bucket/x")
    with pytest.raises(ConfigurationError, match="s3:// names no bucket: give s3://BUCKET/NAME"):
        place_of("s3://")
    with pytest.raises(ConfigurationError, match="is in the memory of one process"):
        shared_place("memory://x")
    with pytest.raises(ConfigurationError, match=r"gs:// needs gcsfs, which is not installed: pip install"):
        place_of("gs://bucket/x")
    with pytest.raises(FileNotFoundError, match="there is no such bucket: make it first"):
        storage_of(root).put(place_of("s3://nowhere/x/run.json"), b"")
    with pytest.raises(ConfigurationError, match=r"s3://nowhere/x is not a directory of checkpoints"):
        inspect.resolve(place_of("s3://nowhere/x"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    from tests.object_stores import forget_stores

    forget_stores()
    with pytest.raises(PermissionError, match=r"access was refused .*: give credentials in the ways of s3fs"):
        storage_of(root).put(root / "run.json", b"")
