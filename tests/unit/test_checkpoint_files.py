"""Checkpoint files: every flipped bit is found, stock torch and Lightning read them, and they are on disk in time."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.callbacks.latest_checkpoint import LatestCheckpoint
from moe_lightning.checkpoint import commit, files, session
from moe_lightning.checkpoint.agent_handle import LOCK, AgentHandle, AgentStatus
from moe_lightning.checkpoint.commit import dump_object
from moe_lightning.checkpoint.directory import mark_damaged
from moe_lightning.checkpoint.files import check_file, load_plain, load_trusted, read_file, write_file
from moe_lightning.checkpoint.session import CheckpointSession, Opening
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.checkpoint.storage import storage_of
from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.errors import CheckpointError
from moe_lightning.files import open_regular
from moe_lightning.parallel.context import World
from moe_lightning.strategies.checkpoints import DurableCheckpointIO, with_durable_io
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from moe_lightning.strategies.train_state import TrainState
from tests.distributed.harness import run_ranks
from tests.distributed.training import OwnModule, RandomTokens, make_trainer, quiet_trainer
from tests.unit.checkpoint_state import two_checkpoints

STATE: dict[str, Any] = {
    "state_dict": {"w": torch.arange(3000.0).view(30, 100), "b": torch.ones(7, dtype=torch.bfloat16)},
    "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(30, 100)}}, "param_groups": [{"lr": 0.1}]}],
    "global_step": 4,
    "pytorch-lightning_version": "2.6.6",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step-0000004.ckpt"
    write_file(STATE, path)
    return path


def flip(path: Path, whole: bytes, position: int, bit: int = 0) -> None:
    path.write_bytes(whole[:position] + bytes([whole[position] ^ (1 << bit)]) + whole[position + 1 :])


def test_torch_reads_a_sealed_file(file: Path) -> None:
    for mmap in (False, True):
        loaded = torch.load(file, weights_only=True, mmap=mmap)
        assert torch.equal(loaded["state_dict"]["w"], STATE["state_dict"]["w"])
    assert read_file(file)["global_step"] == 4
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_every_flipped_bit_is_found(file: Path) -> None:
    whole, dice = file.read_bytes(), random.Random(4)
    ends = {*range(100), *range(len(whole) - 100, len(whole))}
    for position in sorted(ends | {dice.randrange(len(whole)) for _ in range(100)}):
        flip(file, whole, position, bit=dice.randrange(8))
        with pytest.raises(CheckpointError, match=f"^{file} is damaged"):
            read_file(file)
    file.write_bytes(whole)
    read_file(file)


@pytest.mark.parametrize("length", [0, 1, 21, 40, -100, -35, -37, -1, 1_000_000])
def test_a_file_of_another_length_is_found(file: Path, length: int) -> None:
    whole = file.read_bytes()
    file.write_bytes((whole + bytes(length))[:length] if length > len(whole) else whole[:length])
    with pytest.raises(CheckpointError, match="is damaged"):
        read_file(file)


def test_a_file_of_stock_lightning_is_compared_with_its_crc(tmp_path: Path) -> None:
    path = tmp_path / "stock.ckpt"
    torch.save(STATE, path)
    check_file(path)
    whole = path.read_bytes()
    flip(path, whole, whole.index(STATE["state_dict"]["w"].numpy().tobytes()) + 77)
    with pytest.raises(CheckpointError, match="the checksum of"):
        read_file(path)


def test_a_file_is_read_once_while_it_is_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        opened.append(arguments)
        return open_regular(*arguments, **options)

    monkeypatch.setattr(files, "open_regular", watched)
    check_file(file)
    check_file(file)
    assert len(opened) == 1
    flip(file, file.read_bytes(), 1000)
    with pytest.raises(CheckpointError):
        check_file(file)


def test_a_save_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    path = tmp_path / "step-0000004.ckpt"
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    write_file(STATE, path)
    staged, renamed, directory = events
    assert staged.startswith(f".{path.name}.")
    assert (renamed, directory) == ("rename", tmp_path.name)
    assert fsync is not os.fsync


@pytest.mark.parametrize("refused", ["write", "fsync"])
def test_a_full_disk_leaves_the_file_before_and_nothing_else(
    file: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    before = file.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    class Full:
        def __init__(self, opened: Any) -> None:
            self._opened, self._written = opened, 0

        def write(self, data: Any) -> int:
            self._written += len(data)
            if self._written > 5000:
                refuse()
            return int(self._opened.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._opened, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self._opened.close()

    if refused == "fsync":
        monkeypatch.setattr(os, "fsync", refuse)
    else:
        monkeypatch.setattr(files, "open", lambda *a: Full(open(*a)), raising=False)  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        write_file(STATE, file)
    with pytest.raises(CheckpointError, match=rf"^{file} cannot be written \(No space left on device\): "):
        DurableCheckpointIO().save_checkpoint(STATE, str(file))
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("name", ["last.ckpt", "epoch=1[best].ckpt"])
def test_what_a_killed_save_left_is_taken_away(file: Path, name: str) -> None:
    file = file.rename(file.with_name(name))
    left = file.with_name(f".{file.name}.0123456789ab.new")
    left.write_bytes(b"half")
    write_file(STATE, file)
    assert list(file.parent.iterdir()) == [file]


def test_a_checkpoint_of_step_0_is_committed_like_others() -> None:
    status = AgentStatus(committed_session="1", committed_step=0)
    own: Any = SimpleNamespace(status=lambda: status, _opening=SimpleNamespace(session="1"))
    assert CheckpointSession._has_committed(own, 0)
    assert not CheckpointSession._has_committed(own, 1)


def test_an_agent_that_serves_on_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One arena was deleted, but not the directory."""
    handle = AgentHandle(tmp_path, tmp_path)
    monkeypatch.setattr(handle, "_process", SimpleNamespace(poll=lambda: None))
    monkeypatch.setattr("moe_lightning.checkpoint.agent_handle.time.sleep", lambda _: pytest.fail("it waits"))
    with (tmp_path / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        handle.wait_for_end()


def test_an_agent_that_was_killed_is_replaced_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    handle = AgentHandle(tmp_path, tmp_path)
    for _ in range(2):
        handle.ensure()
        assert handle._process is not None
        handle._process.kill()
        handle._process.wait()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"the agent of {tmp_path} has failed (exit code -9): another one is started" in caplog.text


def test_an_agent_is_started_only_where_the_snapshots_are(tmp_path: Path) -> None:
    """The next save makes them anew."""
    handle = AgentHandle(tmp_path / "arenas", tmp_path)
    handle.ensure()
    assert not handle.runs


def fit(folder: Path, steps: int, **options: Any) -> pl.Trainer:
    trainer = make_trainer(
        0,
        1,
        max_steps=steps,
        enable_checkpointing=True,
        callbacks=[LatestCheckpoint(folder, every_n_train_steps=2, save_top_k=options.pop("save_top_k", 1))],
    )
    trainer.fit(OwnModule(), DataLoader(RandomTokens(), batch_size=12), **options)
    return trainer


def test_our_strategy_seals_and_stock_lightning_goes_on(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    (path,) = tmp_path.iterdir()
    assert path.read_bytes()[-35:].startswith(b"moe-lightning xxh3 ")
    stock = quiet_trainer(max_steps=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.fit(OwnModule(), DataLoader(RandomTokens(), batch_size=12), ckpt_path=str(path))
    assert stock.global_step == 6
    flip(path, path.read_bytes(), path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=f"{path} is damaged: its checksum does not match"):
        fit(tmp_path / "more", 6, ckpt_path=str(path))


def test_the_file_before_is_deleted_once_the_new_one_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    sync, remove = files.sync_directory, ExpertParallelStrategy.remove_checkpoint

    def synced(path: Path) -> None:
        sync(path)
        events.append(("on disk", max(p.name for p in path.iterdir())))

    def removed(self: ExpertParallelStrategy, path: Any) -> None:
        events.append(("deleted", Path(path).name))
        remove(self, path)

    monkeypatch.setattr(files, "sync_directory", synced)
    monkeypatch.setattr(ExpertParallelStrategy, "remove_checkpoint", removed)
    fit(tmp_path, 4)
    first, second = "step-0000002.ckpt", "step-0000004.ckpt"
    assert events == [("on disk", first), ("on disk", second), ("deleted", first)]


class Wrapper(_WrappingCheckpointIO):
    """One of a user's own."""


@pytest.mark.parametrize("io", [AsyncCheckpointIO(TorchCheckpointIO()), Wrapper(Wrapper(TorchCheckpointIO()))])
def test_files_are_durable_below_any_wrapper(io: CheckpointIO) -> None:
    innermost = with_durable_io(io)
    while isinstance(inner := getattr(innermost, "checkpoint_io", None), CheckpointIO):
        innermost = inner
    assert isinstance(innermost, DurableCheckpointIO)


def fit_in_a_thread(folder: Path) -> pl.Trainer:
    """Two saves, the second in place of the first."""
    saver = LatestCheckpoint(folder, every_n_train_steps=2)
    trainer = make_trainer(
        0, 1, max_steps=4, enable_checkpointing=True, callbacks=[saver], plugins=[AsyncCheckpointIO()]
    )
    trainer.fit(OwnModule(), DataLoader(RandomTokens(), batch_size=12))
    return trainer


def test_a_file_written_in_a_thread_is_there_before_the_older_one_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_due, before = threading.Event(), []
    save, remove = DurableCheckpointIO.save_checkpoint, ExpertParallelStrategy.remove_checkpoint

    def saved(self: DurableCheckpointIO, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if checkpoint["global_step"] == 4:
            assert is_due.wait(60)
            before.extend(file.name for file in tmp_path.iterdir())
        save(self, checkpoint, path, storage_options)

    def removed(self: ExpertParallelStrategy, path: Any) -> None:
        remove(self, path)
        is_due.set()

    monkeypatch.setattr(DurableCheckpointIO, "save_checkpoint", saved)
    monkeypatch.setattr(ExpertParallelStrategy, "remove_checkpoint", removed)
    fit_in_a_thread(tmp_path)
    (path,) = tmp_path.iterdir()
    assert (before, path.name) == (["step-0000002.ckpt"], "step-0000004.ckpt")
    check_file(path)
    assert path.read_bytes()[-35:].startswith(b"moe-lightning xxh3 ")


def test_the_older_file_stays_if_a_thread_cannot_write_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.sync_directory

    def full(path: Path) -> None:
        if len(list(tmp_path.glob("*.ckpt"))) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path)

    monkeypatch.setattr(files, "sync_directory", full)
    with pytest.raises(CheckpointError, match="cannot be written"):
        fit_in_a_thread(tmp_path)
    check_file(tmp_path / "step-0000002.ckpt")


def resume_from(rank: int, world_size: int, path: str) -> str | None:
    trainer = make_trainer(rank, world_size, max_steps=6)
    try:
        trainer.fit(OwnModule(), DataLoader(RandomTokens(), batch_size=12), ckpt_path=path)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_all_ranks_refuse_a_damaged_file_together(file: Path) -> None:
    flip(file, file.read_bytes(), 1000)
    cure = "restore it from a copy, name another checkpoint, or start over"
    sentence = f"{file} is damaged: its checksum does not match; {cure}"
    assert run_ranks(2, resume_from, str(file)) == [sentence, sentence]


def test_the_newest_whole_file_is_gone_on_from(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for step in (2, 4, 6):
        write_file(STATE, directory.checkpoints / f"step-{step:07d}.ckpt")
    newest = directory.checkpoints / "step-0000006.ckpt"
    assert directory.has_reached(6) is not None
    flip(newest, newest.read_bytes(), 500)
    told: list[str] = []
    found = directory.newest_intact(told.append)
    assert found.step == 4
    (sentence,) = told
    assert sentence.startswith(f"{newest} is damaged: ")
    assert sentence.endswith("step-0000004.ckpt, the one before it, is used")
    assert directory.has_reached(6) is None
    assert directory.has_reached(4) is not None
    for path in directory.checkpoints.iterdir():
        flip(path, path.read_bytes(), 600)
    with pytest.raises(CheckpointError, match=r"is damaged: .*, and there is no complete one before it"):
        directory.newest_intact()


class WithTest(OwnModule):
    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("test/loss", self.embed(batch[0]).sum())


@pytest.mark.parametrize("name", ["only.ckpt", "state.pt", "model.safetensors"])
def test_weights_alone_are_nothing_to_resume_from(name: str, tmp_path: Path) -> None:
    path, module = tmp_path / name, WithTest()
    if path.suffix == ".ckpt":
        fit(tmp_path / "run", 2).save_checkpoint(path, weights_only=True)
    elif path.suffix == ".pt":
        torch.save(module.state_dict(), path)
    else:
        save_file(module.state_dict(), path)
    with pytest.raises(CheckpointError, match=rf"{name} holds the weights of a model, and not the state of its train"):
        fit(tmp_path / "run", 4, ckpt_path=str(path))
    if path.suffix == ".ckpt":  # which is enough to test it
        trainer = make_trainer(0, 1)
        trainer.test(module, DataLoader(RandomTokens(8), batch_size=4), ckpt_path=path, verbose=False)
        assert torch.equal(module.out.weight, torch.load(path)["state_dict"]["out.weight"])


def test_a_damaged_file_is_named_with_its_cure(tmp_path: Path) -> None:
    path, module = tmp_path / "last.ckpt", WithTest()
    fit(tmp_path / "run", 2).save_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"last.ckpt is damaged .*; restore it from a copy, name another"):
        make_trainer(0, 1).test(module, DataLoader(RandomTokens(8), batch_size=4), ckpt_path=path, verbose=False)


# ----------------------------------------------------------------------
# Commits that other agents have made.


def test_a_part_written_anew_after_the_commit_hides_it_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that gave up and began again comes with its part when the others have committed."""
    staging = storage_of(tmp_path).staging(tmp_path, "session", 8, 0)
    storage_of(tmp_path).make(staging)
    (Path(str(staging)) / commit.part_name(0)).write_text("{}")
    known = [(tmp_path / "step-00000008", SimpleNamespace(session="session", step=8))]
    monkeypatch.setattr(commit, "headings", lambda root: known)
    assert commit.try_commit(tmp_path, "session", 8, 2, has_written=True) == known[0][0]
    assert commit.try_commit(tmp_path, "former", 8, 2, has_written=True) is None


# ----------------------------------------------------------------------
# The end of a checkpoint session whose newest snapshot is not committed.


def closing(path: Path, **changes: Any) -> Any:
    snapshotter = SimpleNamespace(give_up=lambda: None, newest_step=20, close=lambda: None)
    status = changes.pop("status", AgentStatus())
    return SimpleNamespace(
        _snapshotter=snapshotter, _protector=None, _world=World.single(), _has_committed=lambda step: False,
        _opening=SimpleNamespace(
            agent=SimpleNamespace(runs=changes.pop("runs", True), ensure=lambda: None),
            root=path, arenas=path, world_number=1,
        ),
        status=lambda: status,
        _is_broken=lambda: False,
    )  # fmt: skip


def test_objects_of_a_gpu_are_read_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
        data = dump_object({"best_score": torch.tensor(1.5)})
    for value in (load_plain(data, "x"), load_trusted(data, "x")):
        assert value["best_score"].device.type == "cpu"
        assert value["best_score"] == 1.5


@pytest.mark.parametrize(
    ("changes", "timeout_s", "said"),
    [
        ({"runs": False}, 600.0, r"is not written after 0\.\d s \(its process has ended\): there is no whole one"),
        ({}, 0.2, r"is not written after 0\.[2-9] s \(it did not answer\): there is no whole one"),
        (
            {"runs": False, "status": AgentStatus(committed_step=10, error="disk full")},
            600.0,
            r"is not written after 0\.\d s \(disk full\): the last whole one is step 10",
        ),
    ],
)
def test_the_time_that_was_waited_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], timeout_s: float, said: str
) -> None:
    monkeypatch.setattr(session, "check_world", lambda *_: None)
    began = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        CheckpointSession.close(closing(tmp_path, **changes), timeout_s=timeout_s)
    assert time.monotonic() - began < 5
    assert re.search(f"the checkpoint of step 20 {said}$", str(raised.value)), raised.value


def test_a_copy_that_failed_neither_keeps_the_arena_open_nor_hides_the_error_that_ends_the_run(tmp_path: Path) -> None:
    state = {"dense/w": torch.ones(4)}
    snapshotter = Snapshotter(tmp_path / "0.arena", run="r", session="1", rank=0, world_size=1, state=state)
    opening = Opening(root=tmp_path, run="r", session="1", arenas=tmp_path, world_number=1, agent=None)
    closed: list[str] = []
    protector: Any = SimpleNamespace(close=lambda: closed.append("protector"))
    contents: Any = None
    saver = PartialExpertsCheckpoint(str(tmp_path / "checkpoints"))
    saver.session = CheckpointSession(World.single(), contents, opening, snapshotter, protector, lambda: False)

    def refuse(*_: Any) -> None:
        raise OSError("no space left")

    snapshotter._copy_one = refuse  # type: ignore[method-assign]
    snapshotter.start(1, state)
    error, trainer, module = ValueError("the user's"), pl.Trainer(logger=False), OwnModule()
    saver.on_exception(trainer, module, error)
    assert error.__notes__ == ["the snapshot failed: no space left"]
    assert closed == ["protector"]
    open_files = {os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()}
    assert str(tmp_path / "0.alive") not in open_files, "the agent sees that this rank writes no longer"


def test_a_training_that_continues_from_an_older_checkpoint_is_warned_of_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = ExpertParallelStrategy()
    strategy.decide = lambda choose: choose()  # type: ignore[method-assign]
    monkeypatch.setattr(TrainState, "require_one_optimizer_each", lambda *_, **__: None)
    with two_checkpoints(tmp_path) as root:
        saver = PartialExpertsCheckpoint(str(root))

        def warnings_at(step: int) -> list[str]:
            trainer: Any = SimpleNamespace(strategy=strategy, global_step=step, fast_dev_run=False)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                saver.on_train_start(trainer, OwnModule())
            return [str(each.message) for each in found if "checkpoint" in str(each.message)]

        assert "has a checkpoint of step 2, this training continues from step 1, and until" in warnings_at(1)[0]
        assert warnings_at(2) == []
        mark_damaged(root, "1", 1)
        assert warnings_at(1) == [], "nothing goes back to a damaged one"


def test_directories_have_the_ledger_in_its_own_place_only(tmp_path: Path) -> None:
    saver = PartialExpertsCheckpoint(str(tmp_path))
    saver._is_elastic = True
    saver.lost.checkpoint_ledger = SimpleNamespace(state_dict=lambda: {"lost": 7})  # type: ignore[assignment]
    states = {saver.state_key: saver.state_dict(), "Telemetry": {"tokens_seen": 9}}
    assert states[saver.state_key] == {"checkpoint_ledger": {"lost": 7}, "lost_plt": 0.0}
    for objects in ({"trainer": {"callbacks": states}, "rng/0": []}, {"rng/1": []}):
        checkpoints = SimpleNamespace(training_objects=lambda *, is_first, objects=objects: objects)
        strategy: Any = SimpleNamespace(checkpoints=checkpoints)
        assert saver._objects(strategy) is objects
    assert states == {"Telemetry": {"tokens_seen": 9}}
