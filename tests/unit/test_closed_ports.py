"""Once groups are built gloo accepts no new connections; existing ones and other listeners stay."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

from moe_lightning.parallel.abort import GroupAborter, _watched_together, duplicate, reject_unknown_connections
from tests.leftovers import listening

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")


@pytest.fixture
def foreign() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def pair_of_groups() -> list[ProcessGroupGloo]:
    """Both ranks of a group, in two threads of this process."""
    store = HashStore()
    made: dict[int, ProcessGroupGloo] = {}

    def make(rank: int) -> None:
        device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timedelta(seconds=20)
        made[rank] = ProcessGroupGloo(dist.PrefixStore("group", store), rank, 2, options)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(2)]


def sums(groups: list[ProcessGroupGloo]) -> list[float]:
    tensors = [torch.ones(1000), torch.ones(1000)]
    works = [group.allreduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]
    for work in works:
        work.wait()
    return [float(tensor[0]) for tensor in tensors]


def is_accepted(client: socket.socket) -> bool:
    """True once gloo watches its end of a connection."""
    for descriptor in set().union(*_watched_together()):
        end = duplicate(descriptor)
        if end is not None:
            with closing(end), suppress(OSError):
                if end.getpeername() == client.getsockname():
                    return True
    return False


def test_a_port_of_gloo_is_closed_to_strangers_once_its_group_is_built(foreign: socket.socket) -> None:
    before = listening()
    with GroupAborter() as aborter:
        groups = pair_of_groups()
    early = socket.create_connection(("127.0.0.1", min(port for _, port in listening() - before)), timeout=5)
    limit = time.monotonic() + 20
    while not is_accepted(early):
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert reject_unknown_connections(aborter.connections) == 2
    ports = {port for _, port in listening() - before}
    assert len(ports) == 2
    for port in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.3)
    early.settimeout(5)
    assert early.recv(1) == b"", "who came before and said nothing is let go"
    assert sums(groups) == [2.0, 2.0]
    with socket.create_connection(foreign.getsockname(), timeout=5):
        foreign.accept()[0].close()
    assert sums(groups) == [2.0, 2.0]
    early.close()


def test_groups_that_connect_when_they_are_used_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with GroupAborter() as aborter:
        groups = pair_of_groups()
    assert reject_unknown_connections(aborter.connections) == 0
    del groups
