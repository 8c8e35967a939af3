"""`moe-bench gpu-check` where there is no GPU: it says so, tries its checks on the CPU, and survives any of them."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from moe_lightning.cli import gpu_check
from moe_lightning.cli.bench import main
from moe_lightning.cli.gpu_check import NAMES, Options, outcomes_of, run
from moe_lightning.cli.gpu_check_worker import CHECKS
from tests.distributed.harness import run_ranks
from tests.forks import PATIENCE_S

ENDS_S = 20.0
"""More than it takes to end processes, and less than any of them would take."""
_HANGING_S = 6.0
"""Budget in which `echo` starts on a busy machine."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check"]) == 2
    told = capsys.readouterr().err
    assert "no GPU here" in told
    assert told.count("\n") == 1


@pytest.mark.slow
def test_checks_pass_on_the_cpu_in_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpu = gpu_check.command
    monkeypatch.setattr(gpu_check, "_devices", lambda: (2, "CPU, in the place of a GPU"))
    monkeypatch.setattr(gpu_check, "command", lambda name, device: on_gpu(name, "cpu"))
    monkeypatch.setattr(gpu_check, "outcomes_of", partial(outcomes_of, budget_s=PATIENCE_S))
    assert run(Options()) == 0
    told = capsys.readouterr().out
    assert told.count("pass") == len(NAMES)
    assert "no check failed" in told


def notes(rank: int, world_size: int) -> dict[str, str]:
    return {name: check(torch.device("cpu")) for name, check in CHECKS.items() if name != "communicators"}


def test_every_check_passes_on_the_cpu() -> None:
    """But for communicators, which start processes."""
    assert tuple(CHECKS) == NAMES
    (found,) = run_ranks(1, notes)
    assert all(found.values())
    assert {*found, "communicators"} == set(NAMES)


@pytest.mark.slow
def test_a_check_that_dies_or_hangs_ends_no_other(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    holds = f"import fcntl, signal; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); signal.pause()"
    starts = f"import signal, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {holds!r}]); signal.pause()"
    python = (sys.executable, "-c")
    outcomes = outcomes_of(
        {
            "killed": (*python, "import os; os.kill(os.getpid(), 9)"),
            "raises": (*python, "raise ValueError('a wrong value')"),
            "fine": (*python, "print('within 1e-7')"),
        },
        budget_s=PATIENCE_S,
    )
    outcomes += outcomes_of(dict.fromkeys(("hangs", "hangs too"), (*python, starts)), budget_s=3.0)
    notes = {one.name: (one.verdict, one.note) for one in outcomes}
    assert notes["killed"] == ("FAIL", f"ended by signal {signal.SIGKILL.value}: said nothing")
    assert notes["raises"] == ("FAIL", "ValueError: a wrong value")
    assert notes["fine"] == ("pass", "within 1e-7")
    assert notes["hangs"] == notes["hangs too"] == ("FAIL", "timed out after 3 s")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for ever where what a check has started outlives it


@pytest.mark.slow
def test_checks_that_hang_keep_no_other_from_its_end() -> None:
    hangs, fine = ("sleep", "1000"), ("echo", "within 0")
    commands = {**{f"hangs {number}": hangs for number in range(5)}, "fine": fine, "fine too": fine}
    began = time.monotonic()
    outcomes = outcomes_of(commands, budget_s=_HANGING_S)
    assert time.monotonic() - began < _HANGING_S + ENDS_S
    assert [one.name for one in outcomes] == list(commands)
    assert [one.verdict for one in outcomes] == ["FAIL"] * 5 + ["pass"] * 2
    assert all(one.note.startswith("timed out after") for one in outcomes[:5])


def test_a_check_that_cannot_be_killed_does_not_hold_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken driver holds it in the kernel, as a process that nobody kills here."""
    held: list[int] = []
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: held.append(group))
    try:
        (outcome,) = outcomes_of({"hangs": ("sleep", "30")}, budget_s=0.1)
        assert outcome.verdict == "FAIL"
        assert os.waitpid(held[0], os.WNOHANG) == (0, 0), "it still runs"
    finally:
        kill(held[0], signal.SIGKILL)
    assert os.waitpid(held[0], 0)[0] == held[0]


def test_the_whole_ends_in_under_two_minutes() -> None:
    assert gpu_check._PROBE_S + gpu_check._BUDGET_S < 120
