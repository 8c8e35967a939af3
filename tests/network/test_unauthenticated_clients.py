"""Clients without the secret: noise, incomplete handshakes, idle connections, forged and replayed messages.

None of them ends or slows a run or joins it, and descriptors are bounded.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_lightning.elastic import server
from moe_lightning.elastic.connection import LauncherClient
from moe_lightning.elastic.membership import ElasticSettings
from moe_lightning.elastic.protocol import Address, Channel, Refused, WireError
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.elastic.server import MAX_UNAUTHENTICATED, ServerThread
from moe_lightning.errors import ConfigurationError
from tests.network.attack import IDLE, frame, lures
from tests.network.hosts import wait_for
from tests.network.trainings import BACK_S, GOES_ON_S, Training

Measured = Callable[[str, str], None]

_SOON_S = 2.0
_FEW = 20  # descriptors that a rank opens and closes as it trains


@pytest.fixture
def served(tmp_path: Path) -> Iterator[RendezvousServer]:
    with RendezvousServer(bind="127.0.0.1:0", secret_file=tmp_path / "secret") as host:
        yield host


def connected(host: RendezvousServer) -> socket.socket:
    return socket.create_connection((host.address.host, host.address.port), timeout=10.0)


def admitted(host: RendezvousServer) -> float:
    """Seconds until a launcher that knows the secret has been let in."""
    began = time.monotonic()
    LauncherClient(host.address, host.secret_file, ElasticSettings()).close()
    return time.monotonic() - began


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Client:
    """A client that speaks the protocol by hand."""

    def __init__(self, host: RendezvousServer, secret: bytes) -> None:
        self.connection = connected(host)
        self.channel = Channel(secret, is_server=False)

    def flush(self) -> bytes:
        """Send what is queued; what it was."""
        data = bytes(self.channel.outgoing)
        self.connection.sendall(data)
        del self.channel.outgoing[:]
        return data

    def greet(self) -> bytes:
        """Prove the secret; the bytes that said it."""
        said = self.flush()
        while not self.channel.is_open:
            data = self.connection.recv(4096)
            assert data, "the server has ended the connection"
            self.channel.receive(data)
        return said + self.flush()

    def is_ended(self) -> bool:
        """Whether the server ends the connection, whatever it says before."""
        try:
            while self.connection.recv(4096):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True


@pytest.mark.parametrize("number", range(len(lures())))
def test_nothing_that_a_stranger_says_ends_or_slows_the_host(served: RendezvousServer, number: int) -> None:
    with connected(served) as stranger:
        stranger.sendall(lures()[number])
        assert admitted(served) < _SOON_S
    assert admitted(served) < _SOON_S


@pytest.mark.slow
def test_idle_connections_are_bounded_and_closed(served: RendezvousServer) -> None:
    admitted(served)
    before = descriptors()
    strangers = [connected(served) for _ in range(IDLE)]
    try:
        assert admitted(served) < _SOON_S, "those who know the secret come in beside them"
        wait_for(lambda: descriptors() <= before + IDLE + MAX_UNAUTHENTICATED, 5)
        wait_for(lambda: descriptors() <= before + IDLE, 15, lambda: f"{descriptors()} of {before} + {IDLE}")
    finally:
        for stranger in strangers:
            stranger.close()
    assert admitted(served) < _SOON_S


def test_an_answer_that_is_too_long_ends_its_client_alone(served: RendezvousServer) -> None:
    """Text that arrives in raw UTF-8 is longer on its way back, where it is escaped."""
    client = Client(served, served.secret_file.read_bytes().strip())
    client.greet()
    request = {"t": "store", "n": 1, "number": 0, "keys": ["k"]}
    for question in ({"op": "set", "value": "\U0001f600" * 600_000}, {"op": "get", "value": ""}):
        client.channel.send_encoded(json.dumps(request | question, ensure_ascii=False).encode())
    client.flush()
    assert client.is_ended()
    assert admitted(served) < _SOON_S
    assert not served.has_ended


def test_the_host_outlives_a_defect_but_not_one_that_stays(
    served: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver, failures = ServerThread._deliver, []

    def fail(thread: ServerThread) -> None:
        if len(failures) < most:
            failures.append(time.monotonic())
            raise ValueError("a defect")
        deliver(thread)

    monkeypatch.setattr(ServerThread, "_deliver", fail)
    most = 3
    wait_for(lambda: len(failures) == most, 5)
    assert admitted(served) < _SOON_S
    most = 1000
    wait_for(lambda: served.has_ended, 5)


def test_as_many_authenticate_at_once_as_members_are_missing(
    served: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_UNAUTHENTICATED", 2)
    launcher = LauncherClient(served.address, served.secret_file, ElasticSettings(), expected=20)
    clients = [Client(served, served.secret_file.read_bytes().strip()) for _ in range(20)]
    try:
        for client in clients:
            client.flush()
        for client in clients:  # all are in the middle of their handshakes
            client.channel.receive(client.connection.recv(4096))
        for client in clients:
            client.flush()
            assert client.channel.receive(client.connection.recv(4096)) == [{"t": "ready"}]
    finally:
        for client in clients:
            client.connection.close()
        launcher.close()


def test_a_client_with_another_secret_is_turned_away_in_a_sentence(served: RendezvousServer, tmp_path: Path) -> None:
    client = Client(served, secrets.token_hex(32).encode())
    client.flush()
    with pytest.raises(Refused, match="secret"):
        client.channel.receive(client.connection.recv(4096))
    client.connection.close()
    wrong = tmp_path / "wrong"
    wrong.write_text(secrets.token_hex(32))
    wrong.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"refuses this machine: .* secret"):
        LauncherClient(served.address, wrong, ElasticSettings())


def test_words_without_proof_are_not_taken(served: RendezvousServer) -> None:
    """A stranger leaves the proof out and goes on as if it had been accepted."""
    with connected(served) as stranger:
        stranger.sendall(frame(b'{"moe-lightning": 4, "nonce": "' + b"0" * 32 + b'"}'))
        assert stranger.recv(4096)
        stranger.sendall(frame(bytes(32) + b'{"t": "launcher", "token": "x", "expected": 2}'))
        assert stranger.recv(4096) == b""


def test_a_recorded_session_cannot_be_played_again(served: RendezvousServer) -> None:
    client = Client(served, served.secret_file.read_bytes().strip())
    recorded = client.greet()
    client.channel.send({"t": "launcher", "token": "x", "expected": 2})
    recorded += client.flush()
    with connected(served) as stranger:
        stranger.sendall(recorded)
        stranger.settimeout(10.0)
        data = b""
        while part := stranger.recv(4096):
            data += part
        assert b"refused" in data, "its proof was for another nonce"
    client.connection.close()


@pytest.mark.parametrize("change", ["again", "other order", "changed", "cut"])
def test_frames_of_a_session_are_taken_once_in_their_order(served: RendezvousServer, change: str) -> None:
    """A man in the middle repeats, swaps, changes or leaves out frames."""
    client = Client(served, served.secret_file.read_bytes().strip())
    client.greet()
    frames = []
    for text in ({"t": "launcher", "token": "x", "expected": 2}, {"t": "beat", "progress": 0}):
        client.channel.send(text)
        frames.append(bytes(client.channel.outgoing))
        del client.channel.outgoing[:]
    first, second = frames
    said = {
        "again": [first, first],
        "other order": [second, first],
        "changed": [first[:-3] + b"X" + first[-2:]],
        "cut": [second],
    }[change]
    client.connection.settimeout(_SOON_S)
    try:
        client.connection.sendall(b"".join(said))
        assert client.is_ended()
    finally:
        client.connection.close()


def test_a_false_host_is_found_out(tmp_path: Path) -> None:
    """Who listens at the address without the secret gets neither a proof that it could use nor a client."""
    secret = secrets.token_hex(32).encode()
    client, false_host = Channel(secret, is_server=False), Channel(b"x" * 64, is_server=True)
    false_host.receive(bytes(client.outgoing))
    del client.outgoing[:]
    with pytest.raises(Refused, match="secret"):
        client.receive(bytes(false_host.outgoing))
    assert not client.outgoing, "no proof is given to it"


def test_a_reflected_proof_is_none() -> None:
    """A host that hands the client's own words back, or a client that hands the host's proof back."""
    secret = secrets.token_hex(32).encode()
    client, host = Channel(secret, is_server=False), Channel(secret, is_server=True)
    with pytest.raises(WireError):
        client.receive(bytes(client.outgoing))
    host.receive(bytes(Channel(secret, is_server=False).outgoing))
    with pytest.raises(WireError):
        host.receive(bytes(host.outgoing))


# ---------------------------------------------------------------------- a running job


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_port_of_a_running_job_is_attacked(three: Training, measured: Measured) -> None:
    """Noise and 200 idle connections on every port, which are then cut off without an end; then a rank is killed."""
    ports = three.ports()
    assert any(port.endswith(f":{three.rdzv_endpoint.rpartition(':')[2]}") for port in ports)
    before = three.descriptors()
    began = time.monotonic()
    output = three.folder / f"attack-{time.monotonic_ns()}"
    attacking = three.hosts[three.stranger].start(
        [sys.executable, str(Path(__file__).with_name("attack.py")), "30", *ports], output=output
    )
    wait_for(attacking.text, 120)
    during = three.descriptors()
    three.hosts.cut(three.stranger)
    assert attacking.wait(60) == 0, attacking.text()
    assert int(attacking.text()) > IDLE, "the rendezvous host's port is open"
    three.go_on(three.members, timeout_s=BACK_S, size=3)
    pause = three.pause(three.members, began)
    assert len(three.worlds_since("a", began)) == 1
    wait_for(lambda: three.descriptors()[three.rendezvous] <= before[three.rendezvous], 30)
    assert during[three.rendezvous] <= before[three.rendezvous] + MAX_UNAUTHENTICATED
    assert all(during[name] <= before[name] + _FEW for name in three.members), "gloo's ports are closed"
    killed = time.monotonic()
    three.kill("b")
    three.go_on("ac", timeout_s=30)
    recovery = three.pause("ac", killed)
    value = f"{pause:.1f} s; {recovery:.1f} s; {len(ports)} ports, {attacking.text().strip()} connections, {during}"
    measured(f"no step late by more than 1 s; a later kill: {GOES_ON_S:g} s", value)
    assert pause <= 1
    assert recovery <= GOES_ON_S
    three.go_on(three.members, timeout_s=BACK_S, size=3)
    three.assert_losses()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_launcher_with_another_secret_stays_out(three: Training, measured: Measured) -> None:
    wrong = three.folder / "wrong-secret"
    wrong.write_text(secrets.token_hex(32))
    wrong.chmod(0o600)
    began = time.monotonic()
    command = three.launcher_command(three.stranger, secret_file=wrong)
    trying = three.start_on(three.stranger, command, three.folder / f"stranger-{time.monotonic_ns()}")
    code = trying.wait(90)
    assert code == 2, trying.text()
    assert "Traceback" not in trying.text()
    (sentence,) = [line for line in trying.text().splitlines() if "secret" in line]
    three.go_on(three.members, timeout_s=30, size=3)
    pause = three.pause(three.members, began)
    measured("it ends in a sentence, the run does not notice", f"{pause:.1f} s, {sentence!r}")
    assert len(three.worlds_since("a", began)) == 1
    assert pause <= 1
    assert three.etcd or Address.parse(three.rdzv_endpoint).host in sentence
