"""Searches over moe-train: the objective reaches the sweeper whoever trains, and a search goes on where it ended."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml
from hydra.errors import MissingConfigException

from moe_lightning.cli.composition import composition_errors
from moe_lightning.cli.train import main
from moe_lightning.errors import ConfigurationError
from tests.commands import TINY, write_words
from tests.programs import exit_code, run_program

COMMAND = ["-m", "moe_lightning.cli.train"]
SMALL = (
    *(key for key in TINY if not key.startswith("run_name=")),
    "trainer.max_steps=2",
    "trainer.log_every_n_steps=1",
)
SEARCH = ("-m", "recipes=optuna", *SMALL, "ranks=1", "hydra.sweeper.n_trials=2")
FOUND = Path("outputs") / "optuna"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_words(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


def moe_train(*arguments: str) -> object:
    return exit_code(main, arguments)


def logged(run: Path, name: str) -> float:
    """The last value of a metric in a run's table."""
    with next(run.glob("csv/version_*/metrics.csv")).open() as file:
        return float([row[name] for row in csv.DictReader(file) if row[name]][-1])


def best(folder: Path) -> float:
    found = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert set(found["best_params"]) == {"optimizer.lr", "model.num_experts", "model.router.top_k"}
    return float(found["best_value"])


@pytest.mark.slow
def test_optuna_minimizes_the_objective(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs moe-lightning[optuna]")
    assert moe_train(*SEARCH) == 0
    runs = [path for path in FOUND.iterdir() if path.is_dir()]
    assert len(runs) == 2
    assert best(FOUND) == pytest.approx(min(logged(run, "val/loss") for run in runs), rel=1e-5)
    (FOUND / "optimization_results.yaml").unlink()
    capsys.readouterr()
    assert moe_train(*SEARCH) == 0, "finished trials answer from their folders"
    assert capsys.readouterr().out.count("has finished its 2 steps") == 2
    assert best(FOUND) == pytest.approx(min(logged(run, "val/loss") for run in runs), rel=1e-5)
    assert moe_train(*SEARCH, "objective=val/los") == 2, "no trial has succeeded"
    assert "did you mean 'val/loss'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choice", "extra"), [("hydra/sweeper/optuna", "optuna"), ("hydra/launcher/submitit_slurm", "submitit")]
)
def test_a_missing_plugin_names_its_extra(choice: str, extra: str) -> None:
    sentence = rf"needs a plugin of Hydra: run pip install 'moe-lightning\[{extra}\]'"
    with pytest.raises(ConfigurationError, match=sentence), composition_errors(()):
        raise MissingConfigException("there is none", choice, ["basic"])


@pytest.mark.slow
@pytest.mark.parametrize("more", [("callbacks=fault_recovery",), ()], ids=["elastic", "local"])
def test_ranks_of_their_own_bring_the_objective_back(tmp_path: Path, more: tuple[str, ...]) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs moe-lightning[optuna]")
    done = run_program(*COMMAND, *SEARCH, "ranks=2", "hydra.sweeper.n_trials=1", *more, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = [path for path in (tmp_path / FOUND).iterdir() if path.is_dir()]
    assert best(tmp_path / FOUND) == pytest.approx(logged(run, "val/loss"), rel=1e-5)


@pytest.mark.slow
def test_submitit_runs_trials_at_once(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs moe-lightning[submitit]")
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs moe-lightning[optuna]")
    search = (*SEARCH, "recipes=submitit", "hydra/launcher=submitit_local")
    done = run_program(*COMMAND, *search, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = tmp_path / "outputs" / "submitit"
    runs = [path for path in found.iterdir() if list(path.glob("checkpoints/*"))]
    assert len(runs) == 2
    assert best(found) == pytest.approx(min(logged(run, "val/loss") for run in runs), rel=1e-5)
    assert len(list(found.glob(".submitit/*/*_result.pkl"))) == 2
    wrong = run_program(*COMMAND, *search, "strategy.replicas=9", "run_name=wrong", folder=tmp_path)
    assert wrong.returncode == 2
    assert "replicas=9" in wrong.stderr
