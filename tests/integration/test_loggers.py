"""Loggers beside W&B, CSV and TensorBoard: Lightning's own, as conf/logger names them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tests.commands import TINY, write_words
from tests.programs import run_program

COMMAND = ["-m", "moe_lightning.cli.train"]
RUN = (*(key for key in TINY if key != "logger=csv"), "trainer.log_every_n_steps=1", "ranks=2")

pytestmark = pytest.mark.slow


def train(folder: Path, *arguments: str) -> None:
    done = run_program(*COMMAND, *RUN, *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_mlflow_records_each_start_as_a_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs moe-lightning[mlflow]")
    pytest.importorskip("alembic", reason="needs moe-lightning[mlflow]")
    from mlflow.tracking import MlflowClient

    write_words(tmp_path)
    train(tmp_path, "logger=mlflow", "trainer.max_steps=2")
    train(tmp_path, "logger=mlflow", "trainer.max_steps=4")
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("moe-lightning")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    assert [run.data.params["trainer/max_steps"] for run in runs] == ["2", "4"]
    run = runs[-1]
    assert run.info.run_name == "tiny"
    assert run.info.status == "FINISHED"
    assert int(run.data.params["parameters/whole"]) > 0
    assert {"train/loss", "val/loss", "moe/layer00/expert_imbalance_ratio"} <= set(run.data.metrics)
    steps = {metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert steps == {2, 3}


def test_comet_leaves_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("comet_ml", reason="needs moe-lightning[comet]")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    write_words(tmp_path)
    train(tmp_path, "logger=comet", "trainer.max_steps=2")
    (archive,) = (tmp_path / "outputs" / "tiny").glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        messages = [json.loads(line) for line in file.read("messages.json").splitlines()]
    names = {message["payload"].get("metric", {}).get("metricName") for message in messages}
    assert {"train/loss", "val/loss"} <= names
