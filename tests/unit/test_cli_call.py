"""moe_lightning.train: settings as words of the command line, which Hydra reads as the same values."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import wandb
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

import moe_lightning
from moe_lightning import ConfigurationError
from moe_lightning.cli.call import overrides
from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.cli.train import main
from tests.documented import ROOT
from tests.programs import exit_code

TINY: dict[str, Any] = {
    "ranks": 1,
    "trainer": {"max_steps": 2, "limit_val_batches": 1},
    "model": {"num_layers": 2, "d_model": 32, "num_heads": 2, "d_hidden": 32, "num_experts": 4},
}


@pytest.mark.parametrize(
    "value",
    [
        *(
            1,
            0.5,
            1e-5,
            True,
            None,
            "gpt",
            "true",
            "null",
            "1e3",
            "",
            "a b",
            "it's",
            "back\\",
            "\\'",
            "a,b",
            "x=1",
            "~/a",
        ),
        *(["gpt", "a b", 1], {}, []),
        *(np.int64(3), np.float64(1e-3), np.float32(0.1), np.bool_(True), [np.float64(0.9)]),
    ],
)
def test_values_come_through_the_grammar(value: Any) -> None:
    (word,) = overrides({"data": {"path": value}})
    (read,) = OverridesParser.create().parse_overrides([word])
    assert read.key_or_group == "data.path"
    found = read.value()
    if isinstance(found, list):
        found = [getattr(one, "text", one) for one in found]
    assert getattr(found, "text", found) == value


def test_dictionaries_are_keys_and_objects_are_refused() -> None:
    words = list(overrides({"strategy": {"mesh.tp": 2, "mesh": {"cp": 1}}, "ranks": 2, "path": Path("/a")}))
    assert words == ["strategy.mesh.tp=2", "strategy.mesh.cp=1", "ranks=2", "path='/a'"]
    assert list(overrides({"resume": "~/x"})) == list(overrides({"resume": Path.home() / "x"})), "as the command does"
    with pytest.raises(ConfigurationError, match="model is of type object, which no configuration holds"):
        list(overrides({"model": object()}))


def test_a_run_returns_its_directory_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    run = moe_lightning.train("quickstart", run_name="mine", **TINY)
    assert "HYDRA_FULL_ERROR" not in os.environ
    assert run.directory == tmp_path / "outputs" / "mine"
    assert run.metrics["val/loss"] > 0
    assert list(run.directory.glob("wandb/offline-run-*"))
    assert wandb.run is None, "another training begins a run of its own"
    with pytest.raises(ConfigurationError, match=r"trained with other settings: seed 1 -> 7"):
        moe_lightning.train("quickstart", run_name="mine", **{**TINY, "seed": 7})
    with pytest.raises(ConfigurationError, match="max_stepz"):
        moe_lightning.train("quickstart", trainer={"max_stepz": 3})
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_the_doctor_returns_the_directory_of_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moe_lightning.cli.train._launch", lambda *of_run, external: None)
    examined = RunDirectory(tmp_path / "outputs" / "mine")
    examined.create()
    examined.write_metrics("train", {"val/loss": 1.0})
    run = moe_lightning.train("quickstart", run_name="mine", doctor=True, **TINY)
    assert (run.directory, run.metrics) == (examined.path / "doctor", {})


def test_every_job_of_a_multirun_has_a_wandb_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list[object]()

    def begin(composed: DictConfig, **options: object) -> None:
        before.append(wandb.run)
        run = Mock()
        run.finish.side_effect = lambda exit_code: setattr(wandb, "run", None)
        wandb.run = run

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.setattr("moe_lightning.cli.train.run_job", begin)
    assert exit_code(main, ["-m", "seed=1,2"]) == 0
    assert before == [None, None]


def test_the_page_of_metrics_marks_every_area(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = "\n".join(importlib.import_module("generated").metrics())
    assert "`train/step_ms`" in page
    assert "`ranks/slowest`" in page


def test_keywords_have_the_types_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    generated = importlib.import_module("generated")
    made, stored = ast.parse(generated.settings()), ast.parse(generated.SETTINGS.read_text())
    assert ast.dump(made) == ast.dump(stored), "run: python docs/generated.py"
