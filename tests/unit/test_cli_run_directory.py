"""Run directories: the newest checkpoint, and an earlier run that is moved, never deleted."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import moe_lightning
from moe_lightning.checkpoint.directory import directories
from moe_lightning.checkpoint.files import write_file
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.storage import storage_of
from moe_lightning.cli import run_directory
from moe_lightning.cli.run_directory import RunDirectory, checkpoints, locked
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import save_safetensors
from moe_lightning.models.huggingface.weights import write_weights
from tests.forks import FORKS, fork, kill


def _with_checkpoints(folder: Path, *names: str) -> RunDirectory:
    directory = RunDirectory(folder / "run")
    directory.checkpoints.mkdir(parents=True)
    for name in names:
        (directory.checkpoints / name).touch()
    return directory


def test_newest_checkpoint_is_that_of_the_highest_step(tmp_path: Path) -> None:
    newest = _with_checkpoints(tmp_path, "step-0000090.ckpt", "step-0000200.ckpt", "step-1.txt").newest_checkpoint()
    assert (newest.step, newest.path.name) == (200, "step-0000200.ckpt")


def test_steps_beyond_seven_digits_are_numbers_too(tmp_path: Path) -> None:
    newest = _with_checkpoints(tmp_path, "step-9999999.ckpt", "step-10000000.ckpt").newest_checkpoint()
    assert newest.step == 10_000_000


def test_names_of_object_stores_are_checkpoints_too(tmp_path: Path) -> None:
    """Copied from there, or written by this file system where a name was taken."""
    newest_first = ["step-00000120-w10-0001", "step-00000120-w5-0001", "step-00000100-2", "step-00000100"]
    for name in (*newest_first, "step-00000200-copy", "step-00000300.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).touch()
    assert [saved.path.name for saved in checkpoints(tmp_path)] == newest_first
    assert [path.name for path in directories(tmp_path)] == sorted(newest_first), "the library takes the same"


def test_no_checkpoint(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "nothing").newest_checkpoint() is None
    assert _with_checkpoints(tmp_path, "last.ckpt").newest_checkpoint() is None


def _trained(folder: Path, content: str) -> RunDirectory:
    directory = RunDirectory(folder)
    directory.create()
    directory.record({"run_name": content})
    return directory


def test_earlier_runs_move_to_the_first_free_number(tmp_path: Path) -> None:
    places = [_trained(tmp_path / "run", content).move_aside() for content in ("first", "second")]
    assert places == [tmp_path / "run.1", tmp_path / "run.2"]
    assert (tmp_path / "run.1" / "config.yaml").read_text() == "run_name: first\n"
    assert (tmp_path / "run.2" / "config.yaml").read_text() == "run_name: second\n"


def test_only_a_folder_of_a_run_is_moved(tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").touch()
    with pytest.raises(ConfigurationError, match=r"resume=false would move .*thesis aside, but it contains no run"):
        RunDirectory(folder).move_aside()
    assert (folder / "chapter.tex").exists()


def test_a_folder_of_several_runs_is_not_moved(tmp_path: Path) -> None:
    outputs = _trained(tmp_path / "outputs", "by mistake")
    _trained(tmp_path / "outputs" / "other", "other")
    with pytest.raises(ConfigurationError, match="and with it the run other"):
        outputs.move_aside()
    assert outputs.config.is_file()


def test_a_run_that_the_doctor_has_examined_is_moved(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    _trained(run.path / "doctor", "of the doctor")
    RunDirectory(run.path / "doctor").move_aside()
    _trained(run.path / "doctor", "of the doctor again")
    assert not run.check_movable(), "it has not trained"
    _trained(run.path, "its own")
    assert run.check_movable()


@pytest.mark.parametrize("below", ["", "data"])
def test_the_folder_one_stands_in_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    directory = _trained(tmp_path / "run", "here")
    (directory.path / below).mkdir(exist_ok=True)
    monkeypatch.chdir(directory.path / below)
    with pytest.raises(ConfigurationError, match="the folder that this command was started in"):
        directory.move_aside()


def test_what_a_failed_command_left_is_no_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.command.write_text("run_name: wrong")
    directory.lock.touch()
    assert directory.move_aside() is None
    assert directory.command.is_file()


def test_another_configuration_keeps_the_former_one(tmp_path: Path) -> None:
    directory = _trained(tmp_path / "run", "a")
    directory.record({"run_name": "a"})
    assert sorted(path.name for path in directory.path.glob("config*")) == ["config.yaml"]
    directory.record({"run_name": "b"})
    directory.record({"run_name": "c"})
    contents = {path.name: path.read_text() for path in directory.path.glob("config*")}
    names = {"config.1.yaml": "a", "config.2.yaml": "b", "config.yaml": "c"}
    assert contents == {name: f"run_name: {content}\n" for name, content in names.items()}


def test_an_empty_directory_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert RunDirectory(tmp_path / "run").move_aside() is None
    assert (tmp_path / "run").is_dir()


def test_a_directory_that_cannot_be_made_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"file/run cannot be written .*hydra\.run\.dir"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_shown_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(RunDirectory(tmp_path / "outputs" / "x")) == "outputs/x"
    assert str(RunDirectory(Path("/elsewhere/x"))) == "/elsewhere/x"


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_of_a_run_follow_the_umask(tmp_path: Path, umask: int) -> None:
    former = os.umask(umask)
    try:
        directory = RunDirectory(tmp_path / "run")
        directory.create()
        directory.record({"run_name": "run"})
        directory.keep_tokenizer("{}")
        write_file({"state_dict": {}}, directory.checkpoints / "step-0000001.ckpt")
        storage_of(tmp_path).write(directory.path / "part", [b"data"])
        storage_of(tmp_path).put(directory.path / "MANIFEST.json", b"data")
    finally:
        os.umask(former)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.path.rglob("*")}
    assert modes.pop("ranks") == 0o700
    assert modes.pop("checkpoints") == 0o777 & ~umask
    assert len(modes) == 5
    assert set(modes.values()) == {0o666 & ~umask}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_exported_weights_follow_the_umask(tmp_path: Path, umask: int) -> None:
    former = os.umask(umask)
    try:
        save_safetensors({"a": torch.ones(1)}, tmp_path / "one.safetensors", {})
        write_weights(tmp_path, [{"b": torch.ones(1)}])
    finally:
        os.umask(former)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()]
    assert modes == 3 * [0o666 & ~umask]


def test_safetensors_own_writer_makes_private_files_only() -> None:
    """It ignores the umask: who writes for others to read uses `save_safetensors`."""
    package = Path(moe_lightning.__file__).parent
    users = {p.name for p in package.rglob("*.py") if re.search(r"import .*\bsave_file\b", p.read_text())}
    assert users == {"files.py"}


# ----------------------------------------------------------------------
# The lock of a run directory, between processes.


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create()
    return made


def _hold(path: Path, party: str | None, pipe: Connection) -> None:
    try:
        with locked(RunDirectory(path), party) as is_first:
            pipe.send(is_first)
            pipe.recv()
    except ConfigurationError as error:
        pipe.send(str(error))


class Other:
    """Another process that holds, or tries to hold, the lock; `said` whether it is the first, or why it may not."""

    def __init__(self, path: Path, party: str | None = None) -> None:
        self.pipe, end = FORKS.Pipe()
        self.process = fork(_hold, path, party, end)
        end.close()
        self.said = self.pipe.recv()

    def end(self) -> None:
        kill([self.process])
        self.pipe.close()


def test_a_second_command_is_told_who_holds_it(directory: RunDirectory) -> None:
    other = Other(directory.path)
    try:
        assert other.said is True
        with pytest.raises(ConfigurationError, match=f"run is in use by process {other.process.pid} on .*run_name="):
            locked(directory).__enter__()
    finally:
        other.end()
    with locked(directory) as is_first:  # whoever is killed lets go
        assert is_first


def test_a_moved_directory_takes_its_lock_along(directory: RunDirectory) -> None:
    directory.record({})
    with locked(directory):
        directory.move_aside()
        directory.create()
        with locked(directory):
            other = Other(directory.path)
            other.end()
            assert "in use" in other.said


def test_machines_of_one_run_share_it(directory: RunDirectory) -> None:
    host = Other(directory.path, "host:29400")
    others = [Other(directory.path, party) for party in ("host:29400", "host:29401", None)]
    for process in (host, *others):
        process.end()
    assert (host.said, others[0].said) == (True, False)
    assert "in use" in others[1].said
    assert "in use" in others[2].said


def _share_late(path: Path, text: str, pipe: Connection) -> None:
    with open(RunDirectory(path).lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        pipe.send(True)
        pipe.recv()
        time.sleep(0.2)
        file.write(text)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_SH)
        pipe.recv()


@pytest.mark.parametrize("on_nfs", [False, True])
def test_machines_that_start_together_wait_until_the_first_shares_it(
    directory: RunDirectory, on_nfs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS reads anew what another machine has written only under a lock."""
    try_lock, owner_of, held = run_directory._try, run_directory._owner, 0

    def try_and_see(descriptor: int, kind: int) -> bool:
        nonlocal held
        is_free = try_lock(descriptor, kind)
        held = kind if is_free else held
        return is_free

    if on_nfs:
        monkeypatch.setattr(run_directory, "_try", try_and_see)
        monkeypatch.setattr(run_directory, "_owner", lambda file: owner_of(file) if held == fcntl.LOCK_SH else {})
    pipe, end = FORKS.Pipe()
    process = fork(_share_late, directory.path, '{"party": "host:29400"}', end)
    try:
        pipe.recv()
        pipe.send(None)
        with locked(directory, "host:29400") as is_first:
            assert not is_first
    finally:
        kill([process])
