"""Stacks of processes of this machine, also of those whose interpreter is busy or blocked.

A process registers a signal at which faulthandler writes the stacks of all its threads into anonymous memory, without
the interpreter's lock. Forked children, such as workers of data loaders, inherit both. Linux only: elsewhere there are
no such processes.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moe_lightning.elastic.protocol import boot_id

_SIGNAL = signal.SIGRTMIN + 7 if sys.platform == "linux" else 0
_ANSWER_S, _QUIET_S = 1.0, 0.05
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a device",
    "Z": "has ended",
    "X": "has ended",
}
_ENDED = "has ended"
_CALLS = 6  # innermost ones, of those that are shown below the user's line
_PACKAGES = Path(__file__).parents[2]
_LIBRARIES = (
    *(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "purelib", "platlib")),
    *(os.path.join(_PACKAGES, name, "") for name in ("moe_lightning", "kernels")),
)
"""Folders of code that is not the user's."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that shows its stacks.

    Attributes:
        host: machine, boot and namespace of process ids.
        pid: in that namespace.
        started: time of its start, in ticks since the boot: a later process of the same id has another.
        file: its descriptor of the memory that stacks are written to.
    """

    host: str
    pid: int
    started: int
    file: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A process as seen from another one.

    Attributes:
        state: predicate of a sentence; "runs" where nothing keeps it from running.
        stacks: of all its threads, as faulthandler writes them, the main thread last; "" where it shows none.
    """

    state: str
    stacks: str = ""

    @property
    def frames(self) -> list[traceback.FrameSummary]:
        """Calls of the main thread, the innermost last."""
        *_, main = self.stacks.rstrip().split("\n\n")
        found = [match for line in main.splitlines() if (match := _FRAME.match(line))]
        return [
            traceback.FrameSummary(path, int(line) if line.isdigit() else 0, name)
            for path, line, name in (match.groups() for match in reversed(found))
        ]


def show_stacks() -> Process | None:
    """Let other processes of this user see the stacks of this one and of the children that it forks from now on.

    Returns:
        This process; None where the platform has no such means, or the signal is used otherwise.
    """
    if sys.platform != "linux":
        return None
    if (file := _files.get(os.getpid())) is None:
        if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
            return None
        file = _files[os.getpid()] = os.memfd_create("stacks")
        faulthandler.register(_SIGNAL, file=file, all_threads=True)
    return Process(host=_host(), pid=os.getpid(), started=_started(os.getpid()), file=file)


_files: dict[int, int] = {}
"""Descriptor by process id: a forked child that is a rank itself shows stacks in memory of its own."""


def look_at(process: Process) -> Seen:
    """Return a process of this machine as it is now; takes a second where it does not answer."""
    if _started(process.pid) != process.started:
        return Seen(state=_ENDED)
    return _look_at(process.pid, process.file)


def look_at_children() -> dict[int, Seen]:
    """Return the children of this process that multiprocessing has started, by their ids; those that were not forked
    show no stacks.
    """
    file = _files.get(os.getpid(), -1)
    return {child.pid: _look_at(child.pid, file) for child in multiprocessing.active_children() if child.pid}


def _look_at(pid: int, file: int) -> Seen:
    letter = _status(pid).get("State", "X")[:1]
    if letter in ("T", "t", "Z", "X") or not _shows_stacks(pid):
        return Seen(state=_STATES.get(letter, "runs"))
    path = Path(f"/proc/{pid}/fd/{file}")
    try:
        before = path.stat().st_size
        os.kill(pid, _SIGNAL)
        deadline, size = time.monotonic() + _ANSWER_S, before
        while time.monotonic() < deadline:
            time.sleep(_QUIET_S)
            last, size = size, path.stat().st_size
            if size == last > before:
                break
        with path.open("rb") as memory:
            memory.seek(before)
            stacks = memory.read().decode(errors="replace")
    except OSError:
        return Seen(state=_ENDED if not _status(pid) else _STATES.get(letter, "runs"))
    return Seen(state=_STATES.get(letter, "runs"), stacks=stacks)


def _shows_stacks(pid: int) -> bool:
    """Return True if a process catches the signal: others would be ended by it."""
    caught = int(_status(pid).get("SigCgt", "0"), 16)
    return bool(caught >> (_SIGNAL - 1) & 1)


def _status(pid: int) -> dict[str, str]:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def _started(pid: int) -> int:
    """Return the time of a process's start in ticks since the boot; -1 where there is none."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    return -1


def _host() -> str:
    return f"{socket.gethostname()} {boot_id()} {os.readlink('/proc/self/ns/pid')}"


def is_users(path: str) -> bool:
    """Return True for a file of the user's own code."""
    return not path.startswith(("<frozen ", *_LIBRARIES))


def place_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the place in a stack as text: the innermost line of the user's own code, and the functions that it has
    called, without those of torch.
    """
    own = max((n for n, f in enumerate(frames) if is_users(f.filename)), default=-1)
    calls = [f"{Path(f.filename).stem}.{f.name}" for f in frames[own + 1 :] if "/torch/" not in f.filename]
    parts = [f"in {' > '.join(calls[-_CALLS:])}"] if calls else []
    if own >= 0:
        frame = frames[own]
        parts.insert(0, f"{relative(frame.filename)}:{frame.lineno}, in {frame.name}: {frame.line}")
    return ", ".join(parts)


def relative(path: str) -> str:
    """Return a path as seen from the working directory."""
    return path.removeprefix(os.path.join(os.getcwd(), ""))


def is_blocked(pid: int) -> bool:
    """Return True if the main thread of a process waits for a disk or another device; seen on Linux only."""
    return _status(pid).get("State", "").startswith("D")


def waits_s() -> dict[int, float]:
    """Return the seconds that each thread of this process has been ready to run without a CPU, by its id; empty where
    it is not known.
    """
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # of a thread that ends meanwhile
            found[int(path.parent.name)] = int(path.read_text().split()[1]) / 1e9
    return found
