"""Loggers: missing packages, and no files before the first metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import MLFlowLogger

from moe_lightning.callbacks import loggers
from moe_lightning.callbacks.loggers import CSV, TensorBoard
from moe_lightning.cli.composition import build_object, check_arguments
from moe_lightning.errors import ConfigurationError
from tests.unit.test_cli_validation import composed


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'moe-lightning\[tensorboard\]'"):
        TensorBoard(save_dir=tmp_path)


def test_the_address_of_mlflow_is_in_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "postgresql://user:password@host/db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    node = composed("logger=mlflow")["logger"]["mlflow"]
    assert "password" not in str(node)
    given: dict[str, object] = {}
    monkeypatch.setattr(MLFlowLogger, "__init__", lambda self, **options: given.update(options))
    build_object(node, "logger.mlflow")
    assert given["tracking_uri"] == address
    build_object(node | {"tracking_uri": "sqlite:///other.db"}, "logger.mlflow")
    assert given["tracking_uri"] == "sqlite:///other.db"


@pytest.mark.parametrize(("option", "value"), [("experimnt_name", "x"), ("synchronous", "nope"), ("run_name", 3)])
def test_wrong_options_of_mlflow_are_refused(option: str, value: object) -> None:
    node = composed("logger=mlflow")["logger"]["mlflow"] | {option: value}
    with pytest.raises(ConfigurationError, match=option):
        check_arguments(node, "logger.mlflow")


@pytest.mark.parametrize("kind", [CSV, TensorBoard])
def test_nothing_is_written_before_the_first_numbers(kind: type, tmp_path: Path) -> None:
    if kind is TensorBoard:
        pytest.importorskip("tensorboard")
    logger = kind(save_dir=tmp_path / "run")
    _ = logger.experiment  # as Lightning asks before it checks anything
    logger.log_hyperparams({"lr": 0.5})
    logger.save()
    assert not (tmp_path / "run").exists()

    logger.log_metrics({"loss": 2.0}, step=1)
    logger.save()
    logger.finalize("success")
    written = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert "hparams.yaml" in written
    assert any(name == "metrics.csv" or "tfevents" in name for name in written)
    assert "lr: 0.5" in next((tmp_path / "run").rglob("hparams.yaml")).read_text()
