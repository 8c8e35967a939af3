"""Hosts on one machine that share nothing but files: each in own namespaces, joined by a switch that can be told to
lose, delay and drop.

    with Hosts("a", "b", "c") as hosts:
        process = hosts["a"].start(["ping", "b"], output=folder / "ping")
        hosts.cut("b")
        hosts.block("a", "c", one_way=True)
        hosts.heal()

Everything ends with the process that made them, also when that is killed: there is nothing to clean up.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.network.switch import Line

_FOLDER = Path(__file__).parent
_PACKET = 1 << 20
_POLL_S = 0.02
_START_S = 20.0


@cache
def why_not() -> str | None:
    """Why hosts cannot be had here; None where they can."""
    if sys.platform != "linux":
        return "hosts are made of Linux namespaces"
    if os.geteuid():
        return "namespaces and tap devices need root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    try:
        with Hosts("probe"):
            return None
    except HostFailed as failed:
        return f"the kernel refuses a host: {failed}"


class HostFailed(Exception):
    """A host did not come up."""


@dataclass
class Process:
    """A process on a host.

    Attributes:
        host: where it runs.
        pid: its number there.
        output: the file that takes its output.
        code: its exit code, or minus its signal, once it has ended.
        ended_at: `time.monotonic()` then.
    """

    host: Host
    pid: int
    output: Path
    code: int | None = None
    ended_at: float | None = None

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        self.host.listen()
        return self.code

    def wait(self, timeout_s: float) -> int:
        """Its exit code.

        Raises:
            TimeoutError: it has not ended in time.
        """
        wait_for(lambda: self.poll() is not None, timeout_s, lambda: f"{self.host.name}: {self.tail()}")
        assert self.code is not None
        return self.code

    def send(self, number: int) -> None:
        """Signal it."""
        self.host.signal(self.pid, number)

    def text(self) -> str:
        """Its output so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def tail(self, length: int = 2000) -> str:
        return self.text()[-length:]


@dataclass
class Host:
    """One host, by its first process."""

    name: str
    address: str
    init: subprocess.Popen[bytes]
    channel: socket.socket
    processes: dict[int, Process] = field(default_factory=dict)

    def start(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        output: Path,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a process.

        Args:
            output: file that both its outputs are added to.
            folder: where it runs; that of `output`.
            environment: all of it; ours.
        """
        answer = self._ask(
            {
                "command": [os.fspath(word) for word in command],
                "output": os.fspath(output),
                "folder": os.fspath(folder or output.parent),
                "environment": dict(os.environ if environment is None else environment),
            }
        )
        process = Process(self, answer["started"], output)
        self.processes[process.pid] = process
        return process

    def signal(self, pid: int, number: int) -> None:
        """Signal one of its processes; -1: all of them."""
        self._ask({"pid": pid, "signal": int(number)})

    def listen(self) -> None:
        """Take in which processes have ended."""
        while select.select([self.channel], [], [], 0.0)[0] and (packet := self.channel.recv(_PACKET)):
            self._note(json.loads(packet))

    @property
    def is_off(self) -> bool:
        return self.init.poll() is not None

    def power_off(self) -> None:
        """Everything on it ends at once, and nothing is said to anybody."""
        if self.is_off:
            return
        self.init.kill()
        self.init.wait()
        self.listen()
        for process in self.processes.values():
            if process.code is None:
                process.code, process.ended_at = -signal.SIGKILL, time.monotonic()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.channel.send(json.dumps(request).encode())
        while packet := self.channel.recv(_PACKET):
            answer: dict[str, Any] = json.loads(packet)
            if not self._note(answer):
                return answer
        raise HostFailed(f"{self.name} is off")

    def _note(self, answer: Mapping[str, Any]) -> bool:
        if "ended" not in answer:
            return False
        process = self.processes.get(answer["ended"])
        if process is not None:
            process.code, process.ended_at = answer["code"], answer["at"]
        return True


class Hosts:
    """Hosts that reach each other by address and by name.

    Args:
        names: of the hosts; their addresses are `NETWORK.1`, `NETWORK.2`, and so on.
    """

    NETWORK = "10.77.0"

    def __init__(self, *names: str) -> None:
        self._names = names
        self._hosts: dict[str, Host] = {}
        self._dead: set[tuple[str, str]] = set()
        self._lines = {name: Line() for name in names}

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        try:
            addresses = {name: self.address(name) for name in self._names}
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
            (self._folder / "hosts").write_text("\n".join(lines) + "\n")
            self._switch, self._channel = _started("switch.py")
            for name in self._names:
                self.power_on(name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts.values():
            host.power_off()
            host.channel.close()
        if hasattr(self, "_switch"):
            self._switch.kill()
            self._switch.wait()
            self._channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def address(self, name: str) -> str:
        """A host's address."""
        return f"{self.NETWORK}.{self._names.index(name) + 1}"

    def power_on(self, name: str) -> Host:
        """Start a host, for the first time or again.

        Raises:
            HostFailed: the kernel or the rights do not allow it.
        """
        address = self.address(name)
        init, channel = _started("host.py", name, address, str(self._folder / "hosts"), pipe_errors=True)
        channel.settimeout(_START_S)
        packet, devices, _, _ = socket.recv_fds(channel, _PACKET, 1)
        if not packet:
            channel.close()
            raise HostFailed(init.communicate()[1].decode().strip().rpartition("\n")[2])
        with os.fdopen(devices[0], "rb", buffering=0) as device:
            mac = [2, 0, *socket.inet_aton(address)]
            self._tell({"port": name, "mac": mac}, [device.fileno()])
        self._hosts[name] = Host(name, address, init, channel)
        return self._hosts[name]

    def power_off(self, *names: str) -> None:
        """Hosts go without a word: first their cables, then everything on them. Heals nothing else."""
        self.cut(*names)
        for name in names:
            self[name].power_off()

    # ------------------------------------------------------------------ what happens to the network

    def cut(self, *names: str) -> None:
        """Pull the cables of hosts."""
        for name in names:
            self._dead |= {pair for other in self._names if other != name for pair in ((name, other), (other, name))}
        self._tell_dead()

    def block(self, one: str, other: str, *, one_way: bool = False) -> None:
        """Drop what goes from one host to another, and unless `one_way` what comes back."""
        self._dead |= {(one, other)} if one_way else {(one, other), (other, one)}
        self._tell_dead()

    def part(self, side: Collection[str], rest: Collection[str]) -> None:
        """Drop everything between two sides."""
        self._dead |= {pair for a in side for b in rest for pair in ((a, b), (b, a))}
        self._tell_dead()

    def heal(self) -> None:
        """All links work again; loss, delay and rate stay."""
        self._dead.clear()
        self._tell_dead()

    def loss(self, percent: float, *names: str) -> None:
        """Lose a share of what hosts send; of all hosts, if none is named."""
        self._tell_lines(names, loss=percent / 100)

    def delay(self, seconds: float, *names: str, jitter_s: float = 0.0) -> None:
        """Hold back what hosts send."""
        self._tell_lines(names, delay_s=seconds, jitter_s=jitter_s)

    def rate(self, bits_per_s: float, *names: str) -> None:
        """Let hosts send no faster; 0: as fast as they can."""
        self._tell_lines(names, rate=bits_per_s)

    def calm(self) -> None:
        """A perfect network."""
        self._tell_lines((), loss=0.0, delay_s=0.0, jitter_s=0.0, rate=0.0)
        self.heal()

    def reset(self, one: str, other: str, seconds: float = 0.3) -> None:
        """Reset the TCP connections between two hosts that say something within some time."""
        self._tell({"reset": [one, other], "seconds": seconds})

    # ------------------------------------------------------------------ what happens to hosts

    def freeze(self, *names: str) -> None:
        """Stop every process of hosts."""
        for name in names:
            self[name].signal(-1, signal.SIGSTOP)

    def thaw(self, *names: str) -> None:
        """Let them go on."""
        for name in names:
            self[name].signal(-1, signal.SIGCONT)

    def _tell_dead(self) -> None:
        self._tell({"dead": sorted(self._dead)})

    def _tell_lines(self, names: Sequence[str], **changes: float) -> None:
        for name in names or self._names:
            self._lines[name] = replace(self._lines[name], **changes)
        self._tell({"lines": {name: asdict(line) for name, line in self._lines.items()}})

    def _tell(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """The switch has done it when this returns."""
        socket.send_fds(self._channel, [json.dumps(request).encode()], list(descriptors))
        if not self._channel.recv(_PACKET):
            raise HostFailed("the switch has ended")


def wait_for(
    condition: Callable[[], object], timeout_s: float, words: Callable[[], str] = lambda: "", poll_s: float = _POLL_S
) -> float:
    """Wait until a condition holds; the seconds that took.

    Raises:
        TimeoutError: it did not in time, with `words`.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {words()}")
        time.sleep(poll_s)
    return time.monotonic() - began


def _started(script: str, *arguments: str, pipe_errors: bool = False) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """One of our programs, and the socket to talk to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_FOLDER / script), *arguments, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE if pipe_errors else None,
        )
    ours.settimeout(_START_S)
    return process, ours
