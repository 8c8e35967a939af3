"""The documented SLURM script runs, and ends, under programs in place of sbatch, srun and scontrol."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import SMALL_MODEL, WORDS, write_words
from tests.documented import ROOT, lines
from tests.forks import PATIENCE_S
from tests.parameters import slow
from tests.programs import users_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elastic runs need Linux")

SCRIPT = ROOT / "docs" / "slurm.sh"
NODES = ("127.0.0.1", "localhost")
SRUN = """#!/bin/bash
# Runs a step on this machine: the variables that a task of SLURM finds, and signals that reach it.
tasks=1
while [[ "$1" == --* ]]; do
  [[ "$1" == --ntasks=* ]] && tasks="${1#*=}"
  [[ "$1" == --nodelist=* ]] && node="${1#*=}"
  echo "$1" >> "$FOLDER/srun.options"
  shift
done
export SLURM_STEP_ID=$$ SLURM_STEP_NUM_TASKS=$tasks SLURM_STEP_NUM_NODES=1 SLURM_NTASKS=$tasks
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURMD_NODENAME=$node SLURM_NODELIST=$node
echo $$ > "$FOLDER/step-$node-$(basename "$1")"
exec "$@"
"""


@contextmanager
def sbatch(
    folder: Path,
    *arguments: str,
    trainer: str,
    python: str = f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    etcd: str = "",
    gpus: str = "1",
) -> Iterator[subprocess.Popen[str]]:
    """The documented script as a job of two nodes of this machine, at a free port; all of it ends with the block.

    Args:
        folder: where it runs.
        arguments: of the script.
        trainer: shell commands in place of moe-train.
        python: program in place of python.
        etcd: addresses; none to start a rendezvous host.
        gpus: of a node; none where the job asks for none.
    """
    binaries, home = folder / "bin", folder / "home"
    home.mkdir()
    binaries.mkdir()
    programs = {
        "srun": SRUN,
        "scontrol": f'#!/bin/sh\n[ "$1 $2 $3" = "show hostnames nodes" ] && printf "%s\\n" {" ".join(NODES)}\n',
        "python": python,
        "moe-train": f"#!/bin/sh\n{trainer}\n",
    }
    for name, text in programs.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o700)
    with socket.create_server((NODES[0], 0)) as server:
        port = server.getsockname()[1]
    script = folder / "slurm.sh"
    script.write_text(SCRIPT.read_text().replace(":29510", f":{port}"))
    (folder / "port").write_text(str(port))
    options = dict(re.findall(r"--([\w-]+)=?(\S*)", "\n".join(re.findall("^#SBATCH(.*)", script.read_text(), re.M))))
    variables = {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "FOLDER": str(folder),
        "ETCD": etcd,
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": script.name,
        "SLURM_JOB_NODELIST": "nodes",
        "SLURM_JOB_NUM_NODES": str(len(NODES)),
        **({"SLURM_GPUS_ON_NODE": gpus} if gpus else {}),
        **({"SLURM_CPUS_PER_TASK": options["cpus-per-task"]} if "cpus-per-task" in options else {}),
    }
    with (folder / "slurm.out").open("w") as output:
        job = subprocess.Popen(
            ["bash", str(script), *arguments],
            cwd=folder,
            env=users_environment() | variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
            text=True,
        )
    try:
        yield job
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def ended(job: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    """Wait for the job: its exit code and what it wrote; the step of the rendezvous host has ended with it."""
    try:
        code = job.wait(PATIENCE_S)
    finally:
        text = (folder / "slurm.out").read_text()
    assert is_gone(int((folder / f"step-{NODES[0]}-python").read_text())), text
    assert not list((folder / "home").glob("*.secret")), text
    return code, text


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(("codes", "expected"), [slow((0, 0), 0), slow((0, 1), 0), ((1, 1), 1)])
def test_the_job_ends_with_its_last_step(tmp_path: Path, codes: tuple[int, int], expected: int) -> None:
    """The rendezvous host is the real one; steps end at once, as on a node that is lost."""
    cases = " ".join(f"{node}) exit {code};;" for node, code in zip(NODES, codes, strict=True))
    with sbatch(
        tmp_path,
        "data.source=my corpus/",
        trainer=f'printf "%s\\n" "$@" > "$FOLDER/$SLURMD_NODENAME.called"; case "$SLURMD_NODENAME" in {cases} esac',
    ) as job:
        code, text = ended(job, tmp_path)
    assert code == expected, text
    for node in NODES:
        assert (tmp_path / f"{node}.called").read_text().splitlines() == [
            "callbacks=fault_recovery",
            f"elastic.rdzv_endpoint={NODES[0]}:{(tmp_path / 'port').read_text()}",
            f"elastic.secret_file={tmp_path / 'home' / 'run-17.secret'}",
            "elastic.num_nodes=2",
            "ranks=1",
            "data.source=my corpus/",
        ]
    options = (tmp_path / "srun.options").read_text()
    assert "--cpus-per-task=64" in options
    assert options.count("--gpus=1") == 2
    assert options.count("--overlap") == 3


def test_launchers_of_a_job_meet_in_etcd(tmp_path: Path) -> None:
    urls = "https://a:2379,https://b:2379"
    with sbatch(tmp_path, trainer='printf "%s\\n" "$@" > "$FOLDER/$SLURMD_NODENAME.called"', etcd=urls) as job:
        assert job.wait(PATIENCE_S) == 0
    for node in NODES:
        called = (tmp_path / f"{node}.called").read_text().splitlines()
        assert called[1:4] == [
            "elastic.settings.membership=etcd",
            f"elastic.rdzv_endpoint='{urls}'",
            "elastic.rdzv_id=slurm-17",
        ]
    assert not (tmp_path / f"step-{NODES[0]}-python").exists(), "no rendezvous host"


def test_nodes_may_have_no_gpus(tmp_path: Path) -> None:
    called = 'printf "%s\n" "$@" > "$FOLDER/$SLURMD_NODENAME.called"'
    with sbatch(tmp_path, trainer=called, etcd="https://a:2379", gpus="") as job:
        assert job.wait(PATIENCE_S) == 0
    for node in NODES:
        assert "ranks=auto" in (tmp_path / f"{node}.called").read_text().splitlines()
    assert "--gpus" not in (tmp_path / "srun.options").read_text()


@pytest.mark.slow
def test_the_job_ends_when_training_does(tmp_path: Path) -> None:
    write_words(tmp_path)
    small = [
        *SMALL_MODEL, *WORDS, "model.vocab_size=auto", "data.tokenizer=bytes", "data.global_batch_size=4",
        "data.val_samples=4", "trainer.accelerator=cpu", "trainer.max_steps=4", "logger=csv", "run_name=slurm",
    ]  # fmt: skip
    with sbatch(tmp_path, *small, trainer=f'exec {sys.executable} -m moe_lightning.cli.train "$@"') as job:
        code, text = ended(job, tmp_path)
    assert code == 0, text
    assert "2 ranks" in text
    assert list((tmp_path / "outputs" / "slurm" / "checkpoints").glob("step-*")), text


def test_a_rendezvous_host_that_cannot_start_ends_the_job(tmp_path: Path) -> None:
    with sbatch(tmp_path, trainer="exit 0", python="#!/bin/sh\nexit 2\n") as job:
        assert ended(job, tmp_path)[0] == 1


def test_every_slurm_command_asks_for_whole_nodes() -> None:
    """One CPU and a default share of memory are what a task gets that asks for nothing."""
    asked = [line for line in lines(ROOT / "recipes" / "slurm.yaml") if "sbatch" in line]
    asked += [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert len(asked) == 2
    for line in asked:
        words = shlex.split(line.replace("#SBATCH", ""))
        assert {"--exclusive", "--mem=0"} <= set(words), line
        assert any(word.startswith("--cpus-per-task=") for word in words), line
    for step in re.findall(r"srun (.*)", asked[0]):
        assert "--cpus-per-task=" in step, "srun does not take it over from sbatch"
