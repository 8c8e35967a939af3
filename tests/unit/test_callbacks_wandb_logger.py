"""W&B never asks: offline without a login, and its options reach the logger."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb

from moe_lightning.callbacks.loggers import QuietWandbLogger, has_wandb_login, persistent_run_id
from moe_lightning.callbacks.summary import _files


@pytest.fixture(autouse=True)
def _no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_login_is_a_key_or_an_entry_of_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_wandb_login()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    assert has_wandb_login()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_login()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert has_wandb_login()


def test_a_broken_netrc_is_no_login(tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("what is this\n")
    assert not has_wandb_login()


def test_offline_unless_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert QuietWandbLogger(save_dir=str(tmp_path))._offline
    assert not QuietWandbLogger(save_dir=str(tmp_path), offline=False)._offline
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert not QuietWandbLogger(save_dir=str(tmp_path))._offline
    assert QuietWandbLogger(save_dir=str(tmp_path), offline=True)._offline


def test_options_reach_wandb(tmp_path: Path) -> None:
    logger = QuietWandbLogger(save_dir=str(tmp_path), name="run", project="books", group="g", tags=["a", "b"])
    assert logger._wandb_init["project"] == "books"
    assert logger._wandb_init["group"] == "g"
    assert logger._wandb_init["tags"] == ["a", "b"]
    assert not {"group", "tags"} & set(QuietWandbLogger(save_dir=str(tmp_path))._wandb_init), "W&B's variables count"
    assert "anonymous" not in logger._wandb_init


def test_one_folder_has_one_run_id(tmp_path: Path) -> None:
    first = persistent_run_id(tmp_path / "run")
    assert persistent_run_id(tmp_path / "run") == first
    assert persistent_run_id(tmp_path / "other") != first


@pytest.mark.parametrize(("earlier", "first"), [("", 0), ("7\n", 7), ("seven", 0)])
def test_an_offline_run_continues_the_steps_of_its_folder(earlier: str, first: int, tmp_path: Path) -> None:
    if earlier:
        (tmp_path / "wandb_step").write_text(earlier)
    logger = QuietWandbLogger(save_dir=str(tmp_path), offline=True)
    for step in range(3):
        logger.log_metrics({"loss": 1.0}, step)
    assert logger.experiment.step == first + 3
    assert (tmp_path / "wandb_step").read_text() == f"{first + 3}\n"
    wandb.finish()


def test_a_disabled_run_has_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under WANDB_MODE=disabled W&B names a folder that it does not make."""
    run = SimpleNamespace(dir=str(tmp_path / "wandb" / "run-dummy" / "files"))
    monkeypatch.setattr(QuietWandbLogger, "experiment", run)
    trainer = SimpleNamespace(checkpoint_callback=None, loggers=[QuietWandbLogger(save_dir=str(tmp_path))])
    assert _files(trainer) == {}
    Path(run.dir).mkdir(parents=True)
    assert list(_files(trainer)) == ["W&B"]


def test_a_damaged_run_id_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "wandb_run_id").write_text("../../somewhere else\n")
    assert re.fullmatch("[0-9a-f]{8}", persistent_run_id(tmp_path))


def test_a_run_begins_with_its_first_numbers(tmp_path: Path) -> None:
    """Lightning asks for the experiment before it has checked anything: a command that fails then leaves no run."""
    logger = QuietWandbLogger(save_dir=str(tmp_path), offline=True)
    assert logger.experiment is not None
    logger.log_hyperparams({"lr": 0.5})
    assert list(tmp_path.iterdir()) == []
    logger.log_metrics({"loss": 1.0}, 0)
    assert logger.experiment.config["lr"] == 0.5
    assert logger.experiment.id == persistent_run_id(tmp_path)
    logger.log_hyperparams({"seed": 3})
    assert logger.experiment.config["seed"] == 3
    wandb.finish()
