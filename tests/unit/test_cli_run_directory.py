"""Run directories: the newest checkpoint, and an earlier run that is moved, never deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.errors import ConfigurationError


def _with_checkpoints(folder: Path, *names: str) -> RunDirectory:
    directory = RunDirectory(folder / "run")
    directory.checkpoints.mkdir(parents=True)
    for name in names:
        (directory.checkpoints / name).touch()
    return directory


def test_newest_checkpoint_is_that_of_the_highest_step(tmp_path: Path) -> None:
    newest = _with_checkpoints(tmp_path, "step-0000090.ckpt", "step-0000200.ckpt", "step-1.txt").newest_checkpoint()
    assert newest is not None
    assert (newest.step, newest.path.name) == (200, "step-0000200.ckpt")


def test_steps_beyond_seven_digits_are_numbers_too(tmp_path: Path) -> None:
    newest = _with_checkpoints(tmp_path, "step-9999999.ckpt", "step-10000000.ckpt").newest_checkpoint()
    assert newest is not None
    assert newest.step == 10_000_000


def test_no_checkpoint(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "nothing").newest_checkpoint() is None
    assert _with_checkpoints(tmp_path, "last.ckpt").newest_checkpoint() is None


def test_earlier_runs_move_to_the_first_free_number(tmp_path: Path) -> None:
    places = []
    for content in ("first", "second"):
        directory = RunDirectory(tmp_path / "run")
        directory.create()
        (directory.path / "content").write_text(content)
        places.append(directory.move_aside())
    assert places == [tmp_path / "run.1", tmp_path / "run.2"]
    assert (tmp_path / "run.1" / "content").read_text() == "first"
    assert (tmp_path / "run.2" / "content").read_text() == "second"


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
