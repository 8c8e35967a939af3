"""Loggers of packages that are not installed say which extra brings them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_lightning.callbacks import comet_logger, mlflow_logger
from moe_lightning.callbacks.csv_logger import CSV
from moe_lightning.callbacks.tensorboard_logger import TensorBoard
from moe_lightning.errors import ConfigurationError


@pytest.mark.parametrize(
    ("module", "kind", "extra"),
    [(mlflow_logger, mlflow_logger.MLflow, "mlflow"), (comet_logger, comet_logger.Comet, "comet")],
)
def test_a_missing_package_names_its_extra(
    module: object, kind: type, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'moe-lightning\[{extra}\]'"):
        kind(save_dir=tmp_path)


@pytest.mark.slow
def test_a_place_that_mlflow_does_not_know_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs moe-lightning[mlflow]")
    logger = mlflow_logger.MLflow(tmp_path, tracking_uri="nowhere://x")
    with pytest.raises(ConfigurationError, match=r"no records at tracking_uri='nowhere://x' .*give sqlite:///FILE\.db"):
        _ = logger.experiment


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
