"""`moe-bench gpu-check`: a table of pass and fail for everything that needs a GPU, in under two minutes.

Every check runs in its own process, so that a poisoned context or a hanging driver fails one check only. All run at
once, and what still runs when the time is over is ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moe_lightning.errors import ConfigurationError
from moe_lightning.text_table import table

NAMES = ("routing", "rows", "matmul", "grouped", "experts", "buffers", "pinned_copy", "training", "communicators")
_PROBE_S = 20.0
_BUDGET_S = 95.0
_POLL_S = 0.05
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
        budget_s: seconds after which what still runs is ended, with all that it has started.
    """
    began, outcomes = time.perf_counter(), dict[str, Outcome]()
    with tempfile.TemporaryDirectory(prefix="moe-gpu-check-") as folder:
        running = dict[str, subprocess.Popen[bytes]]()
        try:
            for name, command in commands.items():
                running[name] = _start(command, Path(folder, name))
            while running and time.perf_counter() - began < budget_s:
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    code = running.pop(name).returncode
                    outcomes[name] = _outcome(name, code, Path(folder, name), time.perf_counter() - began)
                time.sleep(_POLL_S)
        finally:
            for process in running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    for name in running:
        note = f"timed out after {budget_s:.0f} s"
        outcomes[name] = Outcome(name=name, verdict="FAIL", seconds=time.perf_counter() - began, note=note)
    return [outcomes[name] for name in commands]


def _start(command: Sequence[str], path: Path) -> subprocess.Popen[bytes]:
    """Start a command that writes into files NAME.out and NAME.err, so that nothing has to read it."""
    with path.with_suffix(".out").open("wb") as out, path.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)


def _outcome(name: str, code: int, path: Path, seconds: float) -> Outcome:
    note = _last_line(path.with_suffix(".err" if code else ".out").read_text(errors="replace"))
    if code < 0:
        note = f"ended by signal {-code}: {note}"
    return Outcome(name=name, verdict="FAIL" if code else "pass", seconds=seconds, note=note[:160])


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "said nothing")


def _devices() -> tuple[int, str]:
    """GPUs of this machine and a line on them; asked in another process, since a broken driver may end it."""
    probe = (sys.executable, "-c", _PROBE)
    (found,) = outcomes_of({"probe": probe}, _PROBE_S)
    if found.verdict == "FAIL":
        return 0, f"asking for GPUs: {found.note}"
    number, where = found.note.split("|", 1)
    return int(number), where
