"""A launcher's relay in this process: what a worker sees of the host through it, and what the host makes of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from moe_lightning.elastic import server
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask
from moe_lightning.elastic.protocol import Channel, Message
from moe_lightning.elastic.rendezvous_client import RendezvousClient
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.errors import ConfigurationError
from tests.distributed.relays import relayed
from tests.network.hosts import wait_for

QUICK = ElasticSettings(rendezvous_timeout_s=1.0)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RendezvousServer]:
    with RendezvousServer(bind="127.0.0.1:0", secret_file=tmp_path / "secret") as made:
        yield made


def joined(task: ElasticTask) -> list[RendezvousClient]:
    workers = [RendezvousClient(replace(task, token=name)) for name in "xy"]
    with ThreadPoolExecutor() as pool:
        assert [world.size for world in pool.map(lambda worker: worker.join(is_ready=True), workers)] == [2, 2]
    return workers


def test_a_worker_sees_the_host_as_without_a_relay(host: RendezvousServer) -> None:
    """Keys of the world, what breaks it, its own address, and a host that is away."""
    with relayed(host, QUICK, expected=2) as task:
        first, second = joined(task)
        first.store.set("key", "value")
        assert second.store.get("key") == b"value"
        assert first._links.prober.endpoint[0] == "127.0.0.1"
        broken: list[str] = []
        for worker in (first, second):
            world = worker._state.world
            worker.guard(world.members, lambda: broken.append(""))
        first.abort("a reason")
        wait_for(lambda: second.reason == "a reason" and len(broken) == 2, 10)
        host.close()
        with pytest.raises(ConfigurationError, match=rf"at {host.address} has not answered for 1 s \(connection ref"):
            first.join()
        for worker in (first, second):
            worker.close()


def test_the_last_words_of_workers_arrive_though_their_launcher_ends(host: RendezvousServer) -> None:
    with relayed(host, QUICK, expected=2) as task:
        workers = joined(task)
        (number,) = {worker._state._number for worker in workers}
        for worker in workers:
            worker.finish()
            worker.close()
    late = RendezvousClient(replace(task, address=str(host.address), token="z"))
    wait_for(lambda: late._state._finishes.newest == number, 10)
    assert not late.world_exists(), "they have left"
    late.close()


def test_a_malformed_message_concerns_the_worker_alone_that_sent_it(
    host: RendezvousServer, caplog: pytest.LogCaptureFixture
) -> None:
    with relayed(host, QUICK, expected=2) as task:
        first, second = joined(task)
        for worker in (first, second):
            world = worker._state.world
            worker.guard(world.members, lambda: None)
        first._connection.send({"t": "broken", "number": "x", "rating": 1}, {"t": "nonsense"})
        wait_for(lambda: first._connection.losses and first._connection.is_connected, 10)
        assert "a message from 127.0.0.1 is refused: a malformed message of the kind broken" in caplog.text
        first.abort("a reason")
        wait_for(lambda: second.reason == "a reason", 10)
        assert not second._connection.losses, "it kept its connection"
        for worker in (first, second):
            worker.close()


@pytest.mark.parametrize(
    "messages",
    [
        [{"t": "beat", "progress": "x"}],
        [{"t": "for", "clients": []}],
        [{"t": "gone", "client": "x"}],
        [{"t": "beat", "progress": 0, "clients": [1]}],
        [message for n in range(3) for message in ({"t": "for", "clients": [n]}, {"t": "beat", "progress": 0})],
    ],
)
def test_what_a_launcher_may_not_send(
    messages: list[Message], host: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Malformed messages, and more clients than it may carry, end its connection; others are served."""
    monkeypatch.setattr(server, "_MOST_CARRIED", 2)
    channel = Channel(host.secret_file.read_bytes().strip(), is_server=False)
    with socket.create_connection((host.address.host, host.address.port), timeout=10.0) as connection:
        while not channel.is_open:
            connection.sendall(channel.outgoing)
            channel.outgoing.clear()
            channel.receive(connection.recv(4096))
        for message in messages:
            channel.send(message)
        connection.sendall(channel.outgoing)
        while connection.recv(4096):
            pass
    with relayed(host, QUICK, expected=2) as task:
        for worker in joined(task):
            worker.close()
