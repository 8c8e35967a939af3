"""What a test module may not leave behind: processes, listening ports, and snapshots in memory.

Processes are known by a variable in their environment, which they inherit however they are started and forked, and also
when whoever started them is gone.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from moe_lightning.checkpoint.agent_handle import LOCK
from moe_lightning.checkpoint.arena import MEMORY, NAMED
from tests.distributed.harness import IDLE
from tests.forks import OWNER

_LISTENS = "0A"
_PATIENCE_S = 30.0  # an agent writes what its workers left before it goes
_POLL_S = 0.05


class Leftovers:
    """Compares what there is with what there was.

    Args:
        homes: folders in which the tests of this process, and no others, keep their files.
    """

    def __init__(self, *homes: Path) -> None:
        self._homes = tuple(str(home.resolve()) for home in homes)
        self._ports = listening()

    def wait_for_none(self) -> list[str]:
        """Return a line for each thing that is still there after some patience; end these processes and delete these
        snapshots, or later modules would be blamed for them.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while (found := self._found()) and time.monotonic() < deadline:
            gc.collect()  # sockets that only a cycle holds
            time.sleep(_POLL_S)
        for pid in processes() if found else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for path in self._arenas() if found else ():
            shutil.rmtree(path, ignore_errors=True)
        return found

    def _found(self) -> list[str]:
        return [
            *(f"process {pid}: {command}" for pid, command in processes().items()),
            *(f"port {port} is listened at" for _, port in listening() - self._ports),
            *(f"{path} with snapshots of {root}" for path, root in self._arenas().items()),
        ]

    def _arenas(self) -> dict[Path, str]:
        """Folders of snapshots in memory, with what their agent wrote to."""
        found = {}
        for path in MEMORY.glob(f"{NAMED}*"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                found[path] = str(json.loads((path / LOCK).read_bytes())["root"])
        return {path: root for path, root in found.items() if root.startswith(self._homes)}


def processes() -> dict[int, str]:
    """pid -> command of what this process started, directly or not, and what lives still; but for the two helpers that
    multiprocessing keeps, and ranks that wait for the next world."""
    helpers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    helpers |= {rank.process.pid for rank in IDLE}
    return {pid: command for pid in _marked() | _children() if pid not in helpers and (command := _command(pid))}


def listening() -> set[tuple[str, int]]:
    """(address in hexadecimal, port) of all listening sockets of this process."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").rstrip("]"))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {
        (address, int(port, 16))
        for fields in lines
        if fields[3] == _LISTENS and fields[9] in inodes
        for address, port in [fields[1].split(":")]
    }


def _marked() -> set[int]:
    mark, found = f"{OWNER}={os.getpid()}".encode(), set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found


def _children() -> set[int]:
    """Of all threads: forks of this process have the environment that it was started with."""
    texts = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return {int(pid) for text in texts for pid in text.split()}


def _command(pid: int) -> str:
    """Empty for one that has ended, whether or not anybody has asked how."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
