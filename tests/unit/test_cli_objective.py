"""What a search gets of a run: a finite metric, or one sentence; failures travel between processes."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.cli.train import objective_of
from moe_lightning.elastic.launcher import RanksFailed
from moe_lightning.elastic.worker import RankFailure
from moe_lightning.errors import ConfigurationError

METRICS = {"val/loss": 1.5, "train/loss": float("nan"), "train/lr": 1e-3}


def metrics_in(folder: Path) -> Path:
    directory = RunDirectory(folder)
    directory.create()
    directory.write_metrics(METRICS)
    return directory.metrics


def test_the_last_value_of_a_metric(tmp_path: Path) -> None:
    assert objective_of(metrics_in(tmp_path), "val/loss") == 1.5
    assert [path.name for path in (tmp_path / "ranks").iterdir()] == ["metrics.json"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "val/los",
            "not a metric that the run logged (did you mean 'val/loss'?): it logged train/loss, train/lr, val/loss",
        ),
        ("reward", "not a metric that the run logged: it logged train/loss, train/lr, val/loss"),
        ("train/loss", "objective=train/loss came out as nan, which nothing can be compared with"),
    ],
)
def test_what_cannot_be_an_objective_is_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        objective_of(metrics_in(tmp_path), name)


@pytest.mark.parametrize("text", [None, "", "{"])
def test_a_run_without_metrics_is_one_sentence(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"has left no metrics in .*: give the same command"):
        objective_of(tmp_path / "metrics.json", "val/loss")


def test_a_failure_of_ranks_can_be_sent_to_another_process() -> None:
    failure = RankFailure(rank=1, kind="mistake", message="lr=0 is wrong", details="", time_s=0.0)
    received = pickle.loads(pickle.dumps(RanksFailed(failure)))  # noqa: S301
    assert received.failure == failure
    assert str(received) == "lr=0 is wrong"
