"""`moe-train recipes=chaos` as a user runs it: ranks are killed where the command says, and the run ends well."""

from __future__ import annotations

import csv
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import SMALL_MODEL, WORDS, moe_train, write_words
from tests.parameters import slow

STEPS = 8
SMALL = [
    "logger=csv",
    *SMALL_MODEL,
    *WORDS,
    "data.val_samples=4",
    f"trainer.max_steps={STEPS}",
    f"trainer.val_check_interval={STEPS}",
    "trainer.log_every_n_steps=1",
    "callbacks.partial_experts_checkpoint.every_n_steps=2",
]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="partial checkpoints need Linux's shared memory")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """With a text to train on; the run's snapshots are deleted afterwards, which ends its agents."""
    write_words(tmp_path, 2000)
    yield tmp_path
    for path in Path("/dev/shm").glob(f"moe-lightning-{run_name(tmp_path)}-*"):
        shutil.rmtree(path, ignore_errors=True)


def run_name(folder: Path) -> str:
    return f"chaos-{os.getpid()}-{folder.name[-20:]}"


def arguments_of(folder: Path, *arguments: str) -> list[str]:
    return ["recipes=chaos", f"run_name={run_name(folder)}", *SMALL, *arguments]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        (2, ["kill.rank1.step3.forward"]),
        slow(3, ["kill.rank1.step3.forward", "kill.rank0.step5.backward"], id="rank-0-too"),
    ],
)
def test_killed_ranks_do_not_end_the_run(folder: Path, ranks: int, kills: list[str]) -> None:
    named = (re.fullmatch(r"kill\.rank(\d+)\.step(\d+)\.(\w+)", name) for name in kills)
    text = "; ".join(f"rank={found[1]},step={found[2]},place={found[3]}" for found in named if found)
    arguments = arguments_of(folder, f"chaos.kill={text}", f"ranks={ranks}")
    ran = moe_train(folder, *arguments)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("was killed by SIGKILL; started again") == len(kills)
    run_dir = folder / "outputs" / run_name(folder)
    assert {path.name for path in (run_dir / "faults").iterdir()} == set(kills)
    assert (run_dir / "checkpoints" / f"step-{STEPS:08d}").is_dir()
    assert not list((run_dir / "checkpoints").glob(f"step-{STEPS:08d}-*")), "who came too late ended nothing anew"
    assert ran.stdout.count("\nvalidation loss") == 1
    tables = [list(csv.DictReader(path.open())) for path in sorted(run_dir.glob("csv/*/recoveries.csv"))]
    told = [row for rows in tables for row in rows if "was killed by SIGKILL" in row["reason"]]
    assert [row["lost_ranks"] for row in told] == [name.split(".")[1].removeprefix("rank") for name in kills]
    again = moe_train(folder, *arguments_of(folder))
    assert again.returncode == 0
    assert f"has finished its {STEPS} steps" in again.stdout


def test_a_wrong_fault_is_one_sentence(folder: Path) -> None:
    ran = moe_train(folder, *arguments_of(folder, "chaos.kill=rank=1,stap=30", "ranks=1", "elastic.enabled=false"))
    assert ran.returncode == 2
    assert "kill='rank=1,stap=30' has stap, which is not one of rank, step, place" in ran.stderr
    assert "Traceback" not in ran.stderr
