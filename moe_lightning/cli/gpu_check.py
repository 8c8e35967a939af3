"""`moe-bench gpu-check`: a table of pass and fail for everything that needs a GPU, in under two minutes.

Every check runs in its own process, so that a poisoned context or a hanging driver fails one check only. All run at
once, and what still runs when the time is over is ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from moe_lightning.errors import ConfigurationError
from moe_lightning.text_table import table

NAMES = ("routing", "rows", "matmul", "grouped", "experts", "buffers", "pinned_copy", "training", "communicators")
_PROBE_S = 20.0
_BUDGET_S = 95.0
_KILLED_S = 2.0
_PROBE = """
import torch, importlib.util
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else "none"
names = ", ".join(torch.cuda.get_device_name(i) for i in range(n))
print(n, f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton}{': ' if n else ''}{names}", sep="|")
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `moe-bench gpu-check`: none."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one check."""

    name: str
    verdict: str
    seconds: float
    note: str


def run(options: Options) -> int:
    """Print the table; 0 where nothing failed, 1 where something did.

    Raises:
        ConfigurationError: there is no GPU.
    """
    num_devices, where = _devices()
    if not num_devices:
        raise ConfigurationError(f"no GPU here ({where}): nothing was checked; run this where there is one")
    names = [name for name in NAMES if name != "communicators" or num_devices > 1]
    outcomes = outcomes_of({name: command(name, "cuda") for name in names})
    if num_devices < 2:
        outcomes.append(Outcome(name="communicators", verdict="left out", seconds=0.0, note="needs two GPUs"))
    rows = [(one.name, one.verdict, f"{one.seconds:.1f}", one.note) for one in outcomes]
    print(table(("check", "verdict", "seconds", "note"), rows, where))
    failed = sum(one.verdict == "FAIL" for one in outcomes)
    print(f"{failed} of {len(outcomes)} checks failed" if failed else "no check failed")
    print("Please send this table to the project's issues, whatever it says.")
    return int(failed > 0)


def command(name: str, device: str) -> tuple[str, ...]:
    """Return the command line of one check."""
    return (sys.executable, "-m", "moe_lightning.cli.gpu_check_worker", name, device)


def outcomes_of(commands: Mapping[str, Sequence[str]], budget_s: float = _BUDGET_S) -> list[Outcome]:
    """Run all commands at once, each in a process of its own; one that ends well prints its note last.

    Args:
        budget_s: seconds after which a command is ended.
    """
    running: set[subprocess.Popen[str]] = set()
    with ThreadPoolExecutor(len(commands)) as pool:
        try:
            outcome = partial(_outcome, budget_s=budget_s, running=running)
            return list(pool.map(outcome, commands, commands.values()))
        except BaseException:  # a Ctrl-C does not reach processes of other sessions
            for process in tuple(running):
                _end(process)
            raise


def _outcome(name: str, command: Sequence[str], budget_s: float, running: set[subprocess.Popen[str]]) -> Outcome:
    began = time.perf_counter()
    try:
        verdict, note = _ended(command, budget_s, running)
    except OSError as error:  # no process could be made
        verdict, note = "FAIL", str(error)
    return Outcome(name=name, verdict=verdict, seconds=time.perf_counter() - began, note=note[:160])


def _ended(command: Sequence[str], budget_s: float, running: set[subprocess.Popen[str]]) -> tuple[str, str]:
    """Verdict and note of a process, which is ended with all that it has started where it takes too long."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    ) as process:
        running.add(process)
        try:
            output, complaint = process.communicate(timeout=budget_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return "FAIL", f"timed out after {budget_s:.0f} s"
        finally:
            running.discard(process)
    note = _last_line(complaint if process.returncode else output)
    if process.returncode < 0:
        note = f"ended by signal {-process.returncode}: {note}"
    return "FAIL" if process.returncode else "pass", note


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it has started; one that a driver holds all the same counts as killed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_KILLED_S)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "said nothing")


def _devices() -> tuple[int, str]:
    """GPUs of this machine and a line on them; asked in another process, since a broken driver may end it."""
    verdict, note = _ended((sys.executable, "-c", _PROBE), _PROBE_S, set())
    if verdict == "FAIL":
        return 0, f"asking for GPUs: {note}"
    number, where = note.split("|", 1)
    return int(number), where
