"""`moe-train` as a user runs it, on two ranks.

Torchrun's runs and those that signals end are processes of their own; the others are forked from one that has imported
everything.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from moe_lightning.cli.run_directory import RunDirectory, locked
from tests.commands import TINY, moe_train, write_words
from tests.parameters import slow
from tests.programs import Program, Watched, children_of, run_program

COMMAND = ["-m", "moe_lightning.cli.train"]
RUN = (*TINY, "trainer.log_every_n_steps=2", "trainer.val_check_interval=2")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc and waits on process descriptors")


def _fork(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return moe_train(folder, *RUN, *arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with a run of four steps on two ranks, and what it said."""
    folder = tmp_path_factory.mktemp("cli")
    write_words(folder, 3000)
    return folder, _fork(folder, "trainer.max_steps=4", "ranks=2", "logger=default")


@pytest.fixture
def folder(trained: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> Path:
    """A copy of that folder, for a test to change."""
    shutil.copytree(trained[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_trains_quietly(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    result = trained[1]
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "run    outputs/tiny"
    assert lines[1].startswith("model  ")
    assert "4 experts in 2 of 2 layers, top-2" in lines[1]
    assert lines[3] == "ranks  2 ranks on cpu, 32-true precision"
    assert sum(line.startswith("step ") and "tokens/s" in line for line in lines) == 2
    assert sum("validation loss" in line for line in lines) == 3
    assert any(line.startswith("order-2 model") for line in lines)
    assert any(line.startswith("checkpoint") and line.endswith("step-0000004.ckpt") for line in lines)


def test_files_follow_the_umask_as_security_says(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    os.umask(umask := os.umask(0o022))
    run = trained[0] / "outputs" / "tiny"
    shared = ("config.yaml", "summary.json", "csv/version_0/metrics.csv", "checkpoints/step-0000004.ckpt")
    assert {name: (run / name).stat().st_mode & 0o777 for name in shared} == dict.fromkeys(shared, 0o666 & ~umask)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (run / "ranks").glob("rank*"))


def test_leaves_its_files(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run = trained[0] / "outputs" / "tiny"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-0000004.ckpt"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 4
    assert {"val_loss", "order_1_loss", "order_2_loss", "tokens_per_s", "expert_imbalance_ratio"} <= set(summary)
    with (run / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = [row for row in rows if row["train/loss"]]
    assert [row["step"] for row in logged] == ["1", "3"]
    for name in (
        "train/tokens_per_s",
        "train/gradient_norm",
        "moe/layer01/rank_imbalance_ratio",
        "comm/layer00/exchanged_rows",
        "comm/exchange_ms",
    ):
        assert all(float(row[name]) > 0 for row in logged), name
    assert all(float(row["moe/layer00/dropped_fraction"]) == 0 for row in logged)
    head, *loads = [line.split(",") for line in (run / "expert_load.csv").read_text().splitlines()]
    assert head[:3] == ["step", "layer", "expert_0"]
    assert [line[:2] for line in loads] == [["2", "0"], ["2", "1"], ["4", "0"], ["4", "1"]]
    assert all(sum(map(float, line[2:])) == pytest.approx(1.0, abs=1e-4) for line in loads)
    assert list((run / "wandb").glob("offline-run-*/*.wandb"))
    assert (run / "ranks").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_finished_run_says_so(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    result = _fork(trained[0], "trainer.max_steps=4", "ranks=2")
    assert (result.returncode, result.stderr) == (0, "")
    assert "has finished its 4 steps" in result.stdout
    assert "trainer.max_steps=8" in result.stdout
    for changed, said in {
        "trainer.max_steps=3": "4 steps, and trainer.max_steps=3 asks for fewer: give this run another run_name",
        "optimizer.lr=1.0e-5": "was trained with other settings: optimizer.lr 0.006 -> 1e-05",
        "data.num_workers=-1": "data.num_workers=-1 must be an integer",
    }.items():
        result = _fork(trained[0], "trainer.max_steps=4", "ranks=2", changed)
        assert result.returncode == 2
        assert said in result.stderr


def test_the_same_command_goes_on_and_is_measured(folder: Path) -> None:
    result = _fork(folder, "trainer.max_steps=6", "ranks=1")  # and on another number of ranks
    assert result.returncode == 0, result.stderr
    assert "resuming after step 4" in result.stdout
    assert "step 6/6" in result.stdout
    assert "step 4/6" not in result.stdout
    measured = _fork(folder, "task=validate", "ranks=2")
    assert measured.returncode == 0, measured.stderr
    final = [line for line in result.stdout.splitlines() if line.startswith("validation loss")]
    again = [line for line in measured.stdout.splitlines() if line.startswith("validation loss")]
    assert final == again


@pytest.mark.slow
def test_a_named_checkpoint_is_the_beginning_of_a_run(folder: Path) -> None:
    """The same command goes on from there, and no other beginning leaves later checkpoints behind."""
    fork = ("ranks=1", "run_name=fork", "resume=outputs/tiny/checkpoints/step-0000004.ckpt", "resume_overrides=true")
    first = _fork(folder, *fork, "trainer.max_steps=6")
    assert first.returncode == 0, first.stderr
    longer = _fork(folder, *fork, "trainer.max_steps=8")
    assert longer.returncode == 0, longer.stderr
    assert "resuming after step 6" in longer.stdout
    assert "step 6/8" not in longer.stdout
    assert "has finished its 8 steps" in _fork(folder, *fork, "trainer.max_steps=8").stdout
    again = _fork(folder, "ranks=1", "trainer.max_steps=6", "resume=outputs/fork/checkpoints/step-0000008.ckpt")
    assert again.returncode == 2
    assert "outputs/tiny has step-0000004.ckpt, and did not begin at resume=outputs/fork" in again.stderr


@pytest.mark.slow
def test_a_damaged_file_is_named_and_not_gone_on_from(folder: Path) -> None:
    saved = folder / "outputs" / "tiny" / "checkpoints"
    damaged = bytearray((saved / "step-0000004.ckpt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (saved / "step-0000006.ckpt").write_bytes(damaged)
    result = _fork(folder, "trainer.max_steps=6", "ranks=1")
    assert result.returncode == 0, result.stderr
    assert "resuming after step 4" in result.stdout
    assert "has finished" not in result.stdout
    (sentence,) = [line for line in result.stderr.splitlines() if "damaged" in line]
    assert "step-0000006.ckpt is damaged: its checksum does not match; step-0000004.ckpt" in sentence
    assert "step 6/6" in result.stdout
    for path in saved.iterdir():
        path.write_bytes(damaged)
    result = _fork(folder, "trainer.max_steps=6", "ranks=1")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "step-0000006.ckpt is damaged" in result.stderr
    assert "start over with resume=false" in result.stderr


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_one_sentence(folder: Path) -> None:
    result = _fork(folder, "trainer.max_steps=6", "ranks=2", "model.d_model=32")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "checkpoint" in result.stderr
    assert "shape" in result.stderr


def test_a_mistake_found_by_the_ranks_is_told_once(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    result = _fork(trained[0], "run_name=wrong", "ranks=2", "strategy.replicas=5")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "moe-train: error: replicas=5 of each expert need between 1 and 2 (the number of ranks): lower replicas, or "
        "start more ranks"
    ]


@pytest.mark.slow
def test_multirun_runs_each_job_once_on_its_own_ranks(folder: Path) -> None:
    result = _fork(
        folder, "-m", "seed=5,6", "run_name=sweep", "trainer.fast_dev_run=false", "trainer.max_steps=2", "ranks=2"
    )
    assert result.returncode == 0, result.stderr
    runs = sorted((folder / "outputs" / "sweep").iterdir())
    assert [run.name for run in runs] == ["seed=5", "seed=6"]
    assert all((run / "checkpoints" / "step-0000002.ckpt").is_file() for run in runs)
    assert all((run / "ranks" / "rank1.out").is_file() for run in runs)
    assert sum(line.startswith("ranks ") for line in result.stdout.splitlines()) == 2


@pytest.mark.slow
def test_anew_keeps_the_earlier_run(folder: Path) -> None:
    result = _fork(folder, "trainer.max_steps=2", "ranks=1", "resume=false")
    assert result.returncode == 0, result.stderr
    assert "the earlier run is kept in tiny.1" in result.stdout
    assert (folder / "outputs" / "tiny.1" / "checkpoints" / "step-0000004.ckpt").is_file()
    assert [path.name for path in (folder / "outputs" / "tiny" / "checkpoints").iterdir()] == ["step-0000002.ckpt"]


@pytest.mark.parametrize("mistake", ["strategy.replicas=abc", slow("model.num_layers=100000000000000")])
def test_a_command_that_cannot_train_moves_nothing(folder: Path, mistake: str) -> None:
    before = (folder / "outputs" / "tiny" / "config.yaml").read_text()
    result = _fork(folder, "ranks=1", "resume=false", mistake)
    assert result.returncode == 2
    assert mistake.split("=")[0] in result.stderr
    assert not (folder / "outputs" / "tiny.1").exists()
    assert (folder / "outputs" / "tiny" / "config.yaml").read_text() == before


REFUSED_BY_RANKS = ["data.global_batch_size=100000", "strategy.replicas=5", "data.num_workers=no", "strategy.ep_size=3"]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", REFUSED_BY_RANKS)
def test_a_refusal_of_the_ranks_leaves_the_earlier_run_where_it_was(folder: Path, mistake: str) -> None:
    outputs = folder / "outputs"
    before = _outside_of_logs(outputs)
    checkpoint = outputs / "tiny" / "checkpoints" / "step-0000004.ckpt"
    saved, config = checkpoint.stat(), outputs / "tiny" / "config.yaml"
    content, command = config.read_text(), (outputs / "tiny" / "ranks" / "command.yaml").read_text()
    for resume in ("resume=false", "resume=true"):
        result = _fork(folder, "trainer.max_steps=6", "ranks=2", "resume_overrides=true", resume, mistake)
        assert result.returncode == 2, result.stderr
        *warned, refused = result.stderr.splitlines()
        assert refused.startswith("moe-train: error: ")
        assert all(line.startswith("moe-train: the learning rate decays until step 6") for line in warned)
        assert _outside_of_logs(outputs) == before
        assert (outputs / "tiny" / "ranks" / "command.yaml").read_text() == command
        assert os.path.samestat(checkpoint.stat(), saved)
        assert config.read_text() == content
    anew = _fork(folder, "trainer.max_steps=2", "ranks=1", "resume=false")
    assert "the earlier run is kept in tiny.1" in anew.stdout, anew.stderr


def _outside_of_logs(outputs: Path) -> set[Path]:
    return {path.relative_to(outputs) for path in outputs.rglob("*") if path.parent.name != "ranks"}


NO_SECRET = "callbacks=fault_recovery elastic.rdzv_endpoint=127.0.0.1:1 elastic.secret_file=none"
NO_CHECKPOINTS = {
    "resume=nowhere.ckpt": "does not exist",
    "resume=/dev/zero": "it is a device, and only regular files are read",
    "resume=pipe": "it is a named pipe, and only regular files are read",
    "resume=sparse": "bytes were ever written",
    "resume=words.txt": "is damaged or no checkpoint",
    "resume=cache": "holds no checkpoint",
    "resume=nowhere.ckpt task=validate": "does not exist",
    NO_SECRET: "secret_file",
}


FIRST_OF_A_KIND = ("resume=nowhere.ckpt",)


@pytest.mark.parametrize(
    ("mistake", "told"), [row if row[0] in FIRST_OF_A_KIND else slow(*row) for row in NO_CHECKPOINTS.items()]
)
def test_what_can_be_refused_at_once_changes_no_file(folder: Path, mistake: str, told: str) -> None:
    os.mkfifo(folder / "pipe")
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 41)
    for outputs in (folder / "outputs", folder / "none"):
        before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in outputs.rglob("*")}
        result = _fork(folder, "trainer.max_steps=6", "ranks=2", f"hydra.run.dir={outputs / 'tiny'}", *mistake.split())
        assert result.returncode == 2, result.stdout
        assert told in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in outputs.rglob("*")} == before


@pytest.mark.slow
@pytest.mark.parametrize("mistake", REFUSED_BY_RANKS)
def test_a_refused_command_leaves_no_run(tmp_path: Path, mistake: str) -> None:
    write_words(tmp_path, 500)
    result = _fork(tmp_path, "trainer.max_steps=2", "ranks=2", mistake)
    assert result.returncode == 2, result.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_refused_command_deletes_nothing_but_its_own(tmp_path: Path) -> None:
    """The folder may be another's, and hold logs of a run that crashed before its first step."""
    write_words(tmp_path, 500)
    logs = tmp_path / "outputs" / "tiny" / "ranks"
    (logs / "node").mkdir(parents=True)
    contents = {"results.csv": "precious", "node/rank1.err": "Traceback", "command.yaml": "seed: 1\n"}
    for name, content in contents.items():
        (logs / name).write_text(content)
    result = _fork(tmp_path, "trainer.max_steps=2", "ranks=1", REFUSED_BY_RANKS[0])
    assert result.returncode == 2, result.stderr
    assert {str(path.relative_to(logs)): path.read_text() for path in logs.rglob("*") if path.is_file()} == contents
    assert [*logs.parent.iterdir()] == [logs]


@pytest.mark.slow
def test_a_refused_command_leaves_the_files_of_the_one_at_work(tmp_path: Path) -> None:
    write_words(tmp_path, 500)
    directory = RunDirectory(tmp_path / "outputs" / "tiny")
    directory.create()
    with locked(directory):
        (directory.logs / "rank1.out").touch()
        for resume in ("resume=true", "resume=false"):
            result = _fork(tmp_path, "trainer.max_steps=2", "ranks=1", resume)
            assert result.returncode == 2
            assert "is in use by process" in result.stderr
    assert {*directory.path.rglob("*")} == {directory.logs, directory.lock, directory.logs / "rank1.out"}


@pytest.mark.slow
def test_what_a_killed_command_left_does_not_block_the_next_one(tmp_path: Path) -> None:
    write_words(tmp_path, 500)
    run = tmp_path / "outputs" / "tiny"
    for name in ("ranks/command.yaml", ".lock", "csv/version_0/hparams.yaml"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    result = _fork(tmp_path, "trainer.max_steps=2", "ranks=1", "resume=false")
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "outputs" / "tiny.1").exists()


@pytest.mark.slow
def test_a_resume_with_other_settings_is_asked_for(folder: Path) -> None:
    run = folder / "outputs" / "tiny"
    before = (run / "config.yaml").read_text()
    changed = ("trainer.max_steps=6", "ranks=1", "optimizer.lr=1.0e-5", "optimizer.decay=constant")
    refused = _fork(folder, *changed)
    assert refused.returncode == 2
    assert "optimizer.lr 0.006 -> 1e-05" in refused.stderr
    assert "resume_overrides=true" in refused.stderr
    assert (run / "config.yaml").read_text() == before

    result = _fork(folder, *changed, "resume_overrides=true", "optimizer.warmup_steps=0")
    assert result.returncode == 0, result.stderr
    assert "optimizer.lr 0.006 -> 1e-05" in result.stdout
    assert (run / "config.1.yaml").read_text() == before
    checkpoint = torch.load(run / "checkpoints" / "step-0000006.ckpt", weights_only=True)
    assert [group["lr"] for group in checkpoint["optimizer_states"][0]["param_groups"]] == [1e-5, 1e-5]
    assert checkpoint["hyper_parameters"]["optimizer"]["lr"] == 1e-5


@pytest.mark.parametrize("name", ["run_name=..", *map(slow, ["run_name=", "run_name=null", "run_name=."])])
def test_a_name_that_leads_elsewhere_moves_nothing(folder: Path, name: str) -> None:
    before = sorted(path.name for path in (folder / "outputs").iterdir())
    result = _fork(folder, name, "resume=false")
    assert result.returncode == 2
    assert result.stderr.startswith("moe-train: error: run_name=")
    assert set(before) <= {path.name for path in (folder / "outputs").iterdir()}
    assert (folder / "words.txt").is_file()


@pytest.mark.slow
def test_early_stopping_ends_a_run_on_two_ranks(tmp_path: Path) -> None:
    write_words(tmp_path, 500)
    no_progress = ("optimizer.lr=1e-12", "trainer.val_check_interval=1", "trainer.max_steps=50")
    result = _fork(
        tmp_path, *no_progress, "ranks=2", "callbacks=early_stopping", "callbacks.early_stopping.min_delta=0.1"
    )
    assert result.returncode == 0, result.stderr
    assert [path.name for path in (tmp_path / "outputs" / "tiny" / "checkpoints").iterdir()] == ["step-0000004.ckpt"]


@pytest.mark.slow
def test_torchrun_starts_the_ranks_itself(folder: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *COMMAND]
    result = run_program(*torchrun, *TINY, "run_name=torchrun", "trainer.max_steps=2", folder=folder)
    assert result.returncode == 0, result.stderr
    assert "ranks  2 ranks on cpu" in result.stdout
    assert result.stdout.count("run    outputs/torchrun") == 1
    assert (folder / "outputs" / "torchrun" / "checkpoints" / "step-0000002.ckpt").is_file()


@dataclass
class Running:
    """A run without an end, past its first steps, and its ranks."""

    folder: Path
    program: Program
    ranks: Watched


@pytest.fixture
def running(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    size = getattr(request, "param", 2)
    endless = ["run_name=endless", "trainer.max_steps=1000000", f"ranks={size}"]
    with Program(*COMMAND, *TINY, *endless, folder=folder) as program:
        program.wait_for(lambda: "\nstep " in program.out)
        with Watched(children_of(program.process.pid)) as ranks:
            assert len(ranks) == (size if size > 1 else 0)  # one rank is the command itself
            yield Running(folder, program, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("running", "number"), [(2, signal.SIGINT), (2, signal.SIGTERM), (1, signal.SIGTERM)], indirect=["running"]
)
def test_a_signal_ends_everything_and_all_is_saved(running: Running, number: signal.Signals) -> None:
    running.program.process.send_signal(number)
    done = running.program.end()
    assert done.returncode == 128 + number
    (saved,) = (running.folder / "outputs" / "endless" / "checkpoints").iterdir()
    step = int(saved.stem.split("-")[1])
    told = f"outputs/endless/checkpoints/{saved.name} is saved, and the same command resumes after step {step}"
    waits = f"{number.name}: the ranks end their step and save; another signal ends them at once"
    assert done.stderr.splitlines() == [waits] * bool(running.ranks) + [f"moe-train: ended by {number.name}; {told}"]
    assert running.ranks.all_end(timeout_s=0)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(running: Running) -> None:
    command = running.program.process
    os.kill(children_of(command.pid)[0], signal.SIGSTOP)  # a rank that will not come to the next step
    command.send_signal(signal.SIGINT)
    assert not running.ranks.all_end(timeout_s=0.5)
    command.send_signal(signal.SIGINT)
    done = running.program.end()
    assert done.returncode == 130
    assert "no checkpoint had been written, so the same command starts over" in done.stderr
    assert running.ranks.all_end(timeout_s=0)


@pytest.mark.slow
def test_a_second_command_of_the_same_run_is_refused(running: Running) -> None:
    for resume in ("true", "false"):
        result = _fork(running.folder, "run_name=endless", "ranks=1", f"resume={resume}")
        assert result.returncode == 2
        assert f"outputs/endless is in use by process {running.program.process.pid}" in result.stderr
    assert running.program.process.poll() is None


@pytest.mark.slow
def test_no_rank_outlives_the_command(running: Running) -> None:
    assert len(running.ranks) == 2
    running.program.process.kill()
    assert running.ranks.all_end(timeout_s=60)
