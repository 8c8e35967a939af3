"""Real etcd servers for tests, from the system's package (Debian: etcd-server)."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from moe_lightning.elastic.etcd import EtcdAccess, EtcdClient, EtcdError, get
from tests.forks import PATIENCE_S

ETCD = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(ETCD is None, reason="etcd is not installed (Debian: apt-get install etcd-server)")


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on: etcd must know those of its members beforehand."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class EtcdCluster:
    """A cluster of etcd on the loopback interface; its processes end with the block.

    Args:
        folder: for its data and logs.
        members: of the cluster.
        options: more words of each command line.
        scheme: of its client addresses.
    """

    def __init__(self, folder: Path, *, members: int = 1, options: Sequence[str] = (), scheme: str = "http") -> None:
        self.folder, self._options = folder, list(options)
        ports = free_ports(2 * members)
        self.urls = [f"{scheme}://127.0.0.1:{port}" for port in ports[:members]]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def endpoints(self) -> str:
        return ",".join(self.urls)

    def start(self, member: int) -> None:
        """Start one member, also again after its death."""
        assert ETCD is not None
        cluster = ",".join(f"m{index}={peer}" for index, peer in enumerate(self._peers))
        data = self.folder / f"etcd-{member}"
        state = "existing" if data.exists() else "new"
        with (self.folder / f"etcd-{member}.log").open("ab") as log:
            self.processes[member] = subprocess.Popen(
                [
                    *(ETCD, "--name", f"m{member}", "--data-dir", str(data), "--log-level", "error"),
                    *("--listen-client-urls", self.urls[member], "--advertise-client-urls", self.urls[member]),
                    *("--listen-peer-urls", self._peers[member], "--initial-advertise-peer-urls", self._peers[member]),
                    *("--initial-cluster", cluster, "--initial-cluster-state", state, *self._options),
                ],
                stdout=log,
                stderr=log,
            )

    def signal(self, member: int, number: signal.Signals) -> None:
        """Send a signal to a member; after SIGKILL it is gone when this returns."""
        self.processes[member].send_signal(number)
        if number == signal.SIGKILL:
            self.processes.pop(member).wait()

    def wait(self) -> None:
        """Wait until it answers."""
        client, deadline = self.client(), time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with suppress(EtcdError):
                client.transact([], [get("/ready")])
                return
            time.sleep(0.05)
        raise AssertionError("etcd does not answer")

    def client(self, **variables: str) -> EtcdClient:
        """A client with these variables of etcdctl."""
        return EtcdClient(EtcdAccess.parse(self.endpoints, variables))

    def __enter__(self) -> Self:
        for member in range(len(self.urls)):
            self.start(member)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
