"""The bench itself: what it is told to do to a network happens, and nothing of it stays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network.hosts import Hosts, wait_for

_LISTEN = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 5000))\n"
_ECHO = _LISTEN + "while True: s.sendto(*s.recvfrom(100))"
_COUNT = _LISTEN + "print('ready', flush=True)\nwhile True: print(s.recv(100).decode(), flush=True)"
_ASK = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1.0)
heard = []
for number in range(int(sys.argv[2])):
    began = time.monotonic()
    s.sendto(b"%d" % number, (sys.argv[1], 5000))
    try:
        s.recv(100)
        heard.append(time.monotonic() - began)
    except TimeoutError:
        pass
print(len(heard), sorted(heard)[len(heard) // 2] if heard else None)
"""
_SEND = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(int(sys.argv[2])):
    s.sendto(b"%d" % number, (sys.argv[1], 5000)); time.sleep(0.001)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("echoes")
    with Hosts("a", "b", "c") as made:
        for host in made:
            host.start([sys.executable, "-S", "-c", _ECHO], output=folder / f"echo-{host.name}")
        for name in "abc":
            wait_for(lambda name=name: heard(made, "a", name, folder / f"up-{name}")[0], 10)  # type: ignore[misc]
        yield made


@pytest.fixture(autouse=True)
def _calm(hosts: Hosts) -> Iterator[None]:
    yield
    hosts.calm()


def heard(hosts: Hosts, one: str, other: str, output: Path, times: int = 1) -> tuple[int, float]:
    """How many of some questions were answered, and the median time that took."""
    output.unlink(missing_ok=True)
    asking = hosts[one].start([sys.executable, "-S", "-c", _ASK, other, str(times)], output=output)
    assert asking.wait(30) == 0, asking.text()
    count, median = asking.text().split()
    return int(count), float(median) if median != "None" else 0.0


def test_a_link_dies_in_one_direction(hosts: Hosts, tmp_path: Path) -> None:
    listening = hosts["b"].start([sys.executable, "-S", "-c", _COUNT.replace("5000", "5001")], output=tmp_path / "b")
    wait_for(lambda: "ready" in listening.text(), 10)
    hosts.block("b", "a", one_way=True)
    assert heard(hosts, "a", "b", tmp_path / "out")[0] == 0, "no answer comes back"
    command = [sys.executable, "-S", "-c", _SEND.replace("5000", "5001"), "b", "5"]
    assert hosts["a"].start(command, output=tmp_path / "sent").wait(10) == 0
    wait_for(lambda: listening.text().split() == ["ready", *"01234"], 10, listening.text)
    hosts.heal()
    hosts.block("a", "b", one_way=True)
    assert hosts["a"].start(command, output=tmp_path / "sent").wait(10) == 0
    assert heard(hosts, "b", "c", tmp_path / "out")[0] == 1
    assert listening.text().split() == ["ready", *"01234"], "nothing more came"


def test_delay_and_rate(hosts: Hosts, tmp_path: Path) -> None:
    hosts.delay(0.05)
    count, median = heard(hosts, "a", "b", tmp_path / "out", times=5)
    assert count == 5
    assert 0.1 <= median < 0.2
    hosts.calm()
    hosts.rate(8 * 50 / 0.05)  # a small frame takes about 50 ms
    count, median = heard(hosts, "a", "b", tmp_path / "out", times=5)
    assert count == 5
    assert 0.08 <= median < 0.3


def test_loss(hosts: Hosts, tmp_path: Path) -> None:
    listening = hosts["b"].start([sys.executable, "-S", "-c", _COUNT.replace("5000", "5002")], output=tmp_path / "b")
    wait_for(lambda: "ready" in listening.text(), 10)
    hosts.loss(20, "a")
    command = [sys.executable, "-S", "-c", _SEND.replace("5000", "5002"), "b", "1000"]
    assert hosts["a"].start(command, output=tmp_path / "sent").wait(30) == 0
    came = listening.text().count("\n") - 1
    assert 720 <= came <= 880, "five standard deviations and a bit"


def test_connections_are_reset_at_both_ends(hosts: Hosts, tmp_path: Path) -> None:
    talk = "while True:\n  c.sendall(b'x'); c.recv(1); time.sleep(0.01)"
    head = "import socket, time\n"
    serve = head + "s = socket.create_server(('', 5003)); print('ready', flush=True); c, _ = s.accept()\n" + talk
    server = hosts["a"].start([sys.executable, "-S", "-c", serve], output=tmp_path / "server")
    wait_for(lambda: "ready" in server.text(), 10)
    ask = head + "c = socket.create_connection(('a', 5003)); print('ready', flush=True)\n" + talk
    client = hosts["b"].start([sys.executable, "-S", "-c", ask], output=tmp_path / "client")
    wait_for(lambda: "ready" in client.text(), 10)
    hosts.reset("a", "b")
    assert server.wait(10) == client.wait(10) == 1
    assert "ConnectionResetError" in server.text() + client.text()
    assert heard(hosts, "a", "b", tmp_path / "out")[0] == 1
