"""Another user of the machine: neither reaches the control plane of a run on one machine, nor reads what it keeps."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.network.attack import IDLE, attack
from tests.network.hosts import wait_for
from tests.network.trainings import ROOT, environment

SCRIPT = ROOT / "tests" / "chaos" / "elastic_script.py"
NOBODY = 65534
_LISTENING = 0x10000  # flag in /proc/net/unix

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can become another user"
)


@dataclass(frozen=True)
class Run:
    """An elastic run on this machine."""

    launcher: subprocess.Popen[bytes]
    folder: Path

    def worlds(self) -> list[dict[str, Any]]:
        path = self.folder / "worlds"
        lines = path.read_text().split("\n") if path.exists() else []
        return [json.loads(line) for line in lines[:-1]]

    def processes(self) -> list[int]:
        """The launcher and all that descend from it."""
        found = [self.launcher.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, task.read_text().split())
        return found


@pytest.fixture
def run() -> Iterator[Run]:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)  # unlike pytest's folders: what the run writes there has to keep others out by itself
    command = [sys.executable, "-m", "moe_lightning.elastic.run", "--ranks", "2", "--log-dir", str(folder / "logs")]
    with (folder / "output").open("wb") as output:
        launcher = subprocess.Popen(
            [*command, str(SCRIPT), str(folder)], stdout=output, stderr=output, cwd=folder, env=environment()
        )
    made = Run(launcher, folder)
    try:
        wait_for(lambda: len(made.worlds()) >= 2 or launcher.poll() is not None, 90)
        assert launcher.poll() is None, (folder / "output").read_text()
        yield made
        (folder / "stop").touch()
        assert launcher.wait(60) == 0, (folder / "output").read_text()
    finally:
        launcher.kill()
        launcher.wait()
        shutil.rmtree(folder)


def as_nobody(function: Callable[[], Any]) -> Any:
    """What a function returns in a process of another user, as JSON."""
    "host".encode("idna")  # loads what the child may not be able to read
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    assert text, "the other user's process failed"
    return json.loads(text)


def _sockets(pids: list[int]) -> dict[str, int]:
    """inode -> process, of every socket that some processes hold."""
    found = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if (inode := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path))) is not None:
                found[inode[1]] = pid
    return found


def _unix_listeners(inodes: set[str]) -> list[str]:
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [line[7] for line in lines if len(line) > 7 and line[6] in inodes and int(line[3], 16) & _LISTENING]


def _tcp_listeners(inodes: set[str]) -> list[tuple[str, str]]:
    """(inode, address in hexadecimal) of sockets that listen."""
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [
        (line.split()[9], line.split()[1]) for line in lines if line.split()[3] == "0A" and line.split()[9] in inodes
    ]


def _kept_files(pids: list[int]) -> set[str]:
    """Files of the run: what its processes have open for writing, or lies beside its sockets."""
    found = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            name = os.readlink(path)
            flags = int(re.search(r"flags:\s*(\d+)", Path(f"/proc/{pid}/fdinfo/{path.name}").read_text())[1], 8)  # type: ignore[index]
            if name.startswith("/") and Path(name).is_file() and flags & os.O_ACCMODE != os.O_RDONLY:
                found.add(name)
    return found


def _connect(path: str) -> int:
    """The error number of connecting to a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex("\0" + path[1:] if path.startswith("@") else path)


@pytest.mark.slow
def test_the_control_plane_is_out_of_reach(run: Run) -> None:
    pids = run.processes()
    sockets = _sockets(pids)
    (path,) = _unix_listeners(set(sockets))
    assert _connect(path) == 0, "this user reaches it"
    assert as_nobody(lambda: _connect(path)) == errno.EACCES
    listeners = _tcp_listeners(set(sockets))
    assert all(sockets[inode] != run.launcher.pid for inode, _ in listeners), "the launcher has no port"
    assert all(address.startswith("0100007F:") for _, address in listeners), "workers' data stays on loopback"


@pytest.mark.slow
def test_nothing_that_a_run_keeps_can_be_read(run: Run) -> None:
    pids = run.processes()
    (path,) = _unix_listeners(set(_sockets(pids)))
    folder = Path(path).parent
    secret = (folder / "secret").read_text().strip()
    files = _kept_files(pids) - {str(run.folder / "output")} | {str(p) for p in folder.iterdir()}
    files |= {f"/proc/{pid}/environ" for pid in pids} | {str(p) for p in (run.folder / "logs").iterdir()}
    assert (
        as_nobody(lambda: [name for name in sorted(files) if os.access(name, os.R_OK) or os.access(name, os.W_OK)])
        == []
    )
    assert as_nobody(lambda: os.access(folder, os.R_OK) or os.access(folder, os.X_OK)) is False
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    assert all(secret.encode() not in command for command in commands), "everybody may read command lines"
    said = [p.read_text(errors="replace") for p in [run.folder / "output", *(run.folder / "logs").iterdir()]]
    assert all(secret not in text for text in said)


@pytest.mark.slow
def test_noise_on_all_that_can_be_reached_ends_nothing(run: Run) -> None:
    """Another user says everything to every port of the workers; then a worker is killed."""
    sockets = _sockets(run.processes())
    ports = [int(address.rpartition(":")[2], 16) for _, address in _tcp_listeners(set(sockets))]
    made = as_nobody(lambda: attack([("127.0.0.1", port) for port in ports], seconds=0.0))
    assert made >= len(ports) * IDLE
    before = len(run.worlds())
    os.kill(run.worlds()[-1]["pid"], signal.SIGKILL)
    wait_for(lambda: any(world["size"] == 2 for world in run.worlds()[before:]), 60)
