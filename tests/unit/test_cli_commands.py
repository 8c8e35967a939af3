"""Entry points of the commands: imports, versions, headlines."""

from __future__ import annotations

import pickle
import re
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from moe_lightning import __version__
from moe_lightning.cli import ckpt, train, training
from moe_lightning.cli.commands import moe_bench, moe_ckpt, moe_data, moe_eval, moe_generate, moe_sim, moe_train
from moe_lightning.cli.composition import with_quotes
from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.cli.train import objective_of, with_ranks
from moe_lightning.elastic import rendezvous_host, run
from moe_lightning.elastic.launcher import RanksFailed
from moe_lightning.elastic.worker import RankFailure
from moe_lightning.errors import ConfigurationError
from moe_lightning.text_table import in_columns
from tests.options import options_of
from tests.programs import exit_code, run_program, users_environment

COMMANDS = {
    "moe-train": moe_train,
    "moe-sim": moe_sim,
    "moe-bench": moe_bench,
    "moe-ckpt": moe_ckpt,
    "moe-generate": moe_generate,
    "moe-eval": moe_eval,
    "moe-data": moe_data,
}

_INTERRUPTED_IMPORT = """
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "moe_lightning.user_errors":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from moe_lightning.cli.commands import moe_train
moe_train()
"""


@pytest.mark.parametrize("program", COMMANDS)
def test_every_command_has_a_version(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--version"])
    assert exit_code(COMMANDS[program]) == 0
    assert capsys.readouterr().out == f"{program} {__version__}\n"


@pytest.mark.parametrize("program", ["moe-train", "moe-sim", "moe-bench", "moe-ckpt", "moe-data"])
def test_help_is_a_word_too(program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, "help"])
    assert exit_code(COMMANDS[program]) == 0
    assert program in capsys.readouterr().out


_WITHOUT_TORCH = """
import os, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "lightning", "transformers"):
            raise AssertionError(f"{name} is imported, which takes seconds")
sys.meta_path.insert(0, NoTorch())
from moe_lightning.cli.commands import *
for command in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        sys.argv = command.split()
        sys.exit(globals()[sys.argv[0].replace("-", "_")]())
    if os.waitpid(pid, 0)[1]:
        print("failed:", command, flush=True)
"""
"""Runs commands in forks of one interpreter that has imported no torch."""


def test_what_answers_at_once_imports_no_torch(tmp_path: Path) -> None:
    commands = [
        *(f"{program} {flag}" for program in COMMANDS for flag in ("--help", "--version")),
        "moe-ckpt export --help",
        "moe-data tokenize --help",
        "moe-bench report --help",
    ]
    done = run_program("-c", _WITHOUT_TORCH, *commands, folder=tmp_path, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(__version__) == len(COMMANDS)
    assert "failed:" not in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_during_imports_is_quiet(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _INTERRUPTED_IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, env=users_environment(), cwd=tmp_path, timeout=60)
    assert done.returncode == 130
    assert done.stderr == "moe-train: ended by SIGINT\n"


def test_many_ranks_on_few_cores_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train, "_visible_gpus", lambda: 0)
    monkeypatch.setattr(train, "usable_cores", lambda: 2)
    for ranks, words in ((8, ""), (64, "moe-train: ranks=64 share 2 cores, so a step takes 32 times as long")):
        with_ranks({"trainer": {"accelerator": "cpu", "devices": ranks}}, external=False)
        err = capsys.readouterr().err
        assert err.startswith(words)
        assert bool(err) == bool(words)


@pytest.mark.parametrize("columns", [60, 80])
def test_headlines_break_at_words(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "model  1.2M parameters, 437.4k active for a token: 8 experts in 3 of 3 layers, top-2, and more"
    assert in_columns(line) == line  # not on a terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = in_columns(line).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= columns
    assert all(broken.startswith(" " * 7) for broken in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(line.split())


def test_a_run_directory_stands_for_its_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert ckpt.main(["inspect", str(tmp_path / "run")]) == 2
    assert f"{tmp_path}/run/checkpoints holds no checkpoint" in capsys.readouterr().err


# ----------------------------------------------------------------------
# Warnings of ours are sentences; those of others keep their place in the code.


def test_our_warnings_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with warnings.catch_warnings():
        training.quiet_libraries()
        ours = warnings.formatwarning("K is raised", UserWarning, str(training.PACKAGE / "callbacks" / "x.py"), 3)
        theirs = warnings.formatwarning("old", UserWarning, "/usr/lib/x.py", 3)
    assert ours == "moe-train: K is raised\n"
    assert theirs == "/usr/lib/x.py:3: old\n"


# ----------------------------------------------------------------------
# Values that read name=value reach Hydra as text; everything else reaches it as it was typed.


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("chaos.kill=rank=1,step=30", "rank=1,step=30"),
        ("chaos.kill=rank=1,step=30; rank=0,step=60,place=backward", "rank=1,step=30; rank=0,step=60,place=backward"),
        ("+a.b=x=1", "x=1"),
        ('chaos.kill="rank=1,step=30"', "rank=1,step=30"),
        ("data.source=~/books", "~/books"),
        ("data.source=~", "~"),
    ],
)
def test_named_values_are_text(typed: str, value: str) -> None:
    assert OverridesParser.create().parse_override(with_quotes(typed)).value() == value


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("hydra.run.dir=~/runs", "/home/u/runs"),
        ("+logger.csv.save_dir=~", "/home/u"),
        ("resume=~/a/step-4.ckpt", "/home/u/a/step-4.ckpt"),
        ("data.source=~/books", "~/books"),  # compared as they were given, and expanded where they are read
        ("++data.source=~/books", "~/books"),
        ("+model.pretrained=~/olmoe", "~/olmoe"),
        ("model.pretrained=~/olmoe", "~/olmoe"),
        ("run_name=~/a", "~/a"),
    ],
)
def test_the_home_folder_is_found_behind_an_equals_sign(
    typed: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert OverridesParser.create().parse_override(with_quotes(typed)).value() == value


def test_options_that_are_paths_find_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given = options_of(run.ElasticRunOptions, "--secret-file=~/secret", "--log-dir=~", "script.py")
    assert (given.secret_file, given.log_dir) == (tmp_path / "secret", tmp_path)


def test_the_secret_of_a_rendezvous_host_finds_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(resource, "setrlimit", Mock())
    monkeypatch.setattr(signal, "pthread_sigmask", Mock())
    assert rendezvous_host.main(["--bind=nowhere", "--secret-file=~/secret"]) == 2
    assert (tmp_path / "secret").exists()


def test_a_launcher_that_is_refused_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.touch()
    assert run.main(["--rdzv-endpoint=127.0.0.1:1", "--secret-file=none", script.name]) == 2
    assert [*tmp_path.iterdir()] == [script]


def test_options_of_advice_find_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit):
        train.main(["--advise", "--config-dir=~/none"])
    assert f"--config-dir {tmp_path / 'none'} is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed",
    ["seed=1", "seed=1,2", "a={b:1}", "a='x=1'", "a=[b,c]", "a=choice(b,c)", "~a", "recipes=chaos", "a.b=c/d=e", "a="],
)
def test_other_values_stay(typed: str) -> None:
    assert with_quotes(typed) == typed


def test_a_folder_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra makes the folder of a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").touch()
    with pytest.raises(SystemExit, match="2"):
        train.main(["trainer.max_steps=1"])
    err = capsys.readouterr().err
    assert "outputs/quickstart cannot be used (Not a directory): start from a folder of yours, or give hydra.run" in err


# ----------------------------------------------------------------------
# What a search gets of a run: a finite metric, or one sentence; failures travel between processes.


METRICS = {"val/loss": 1.5, "train/loss": float("nan"), "train/lr": 1e-3, "moe/layer00/dead_experts_count": 0.0}


def metrics_in(folder: Path) -> Path:
    directory = RunDirectory(folder)
    directory.create()
    directory.write_metrics("train", METRICS)
    return directory.metrics("train")


def test_the_last_value_of_a_metric(tmp_path: Path) -> None:
    assert objective_of(metrics_in(tmp_path), "val/loss") == 1.5
    assert [path.name for path in (tmp_path / "ranks").iterdir()] == ["metrics.json"]


def test_the_metrics_of_a_training_outlive_a_later_validation(tmp_path: Path) -> None:
    path, directory = metrics_in(tmp_path), RunDirectory(tmp_path)
    directory.write_metrics("train", {"val/loss": 1.25})
    for value in (2.0, 2.5):  # of other data, say
        directory.write_metrics("validate", {"val/loss": value})
    assert [objective_of(path, name) for name in ("val/loss", "train/lr")] == [1.25, 1e-3]
    assert directory.read_metrics("validate") == {"val/loss": 2.5}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "val/los",
            "not a metric that the run logged (did you mean 'val/loss'?): use one of train/loss, train/lr, val/loss",
        ),
        ("reward", "not a metric that the run logged: use one of train/loss, train/lr, val/loss"),
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
