"""A host whose connections are all slower than those between the others is named; networks alike never are."""

from __future__ import annotations

import socket
from contextlib import closing
from itertools import permutations

import numpy as np
import pytest

from moe_lightning.strategies import slow_links
from moe_lightning.strategies.slow_links import Link, own_links, since, slowest_host
from moe_lightning.strategies.slow_ranks import Begun, RankTimeline, cost_of

MS = 1e-3


def network(rtts_s: dict[frozenset[int], float], hosts: int, ranks: int = 1) -> list[list[Link]]:
    """Links of so many ranks on each host, with the round trips between hosts; 0.2 ms where none is given."""
    pairs = [(a, b, rtts_s.get(frozenset((a, b)), 0.2 * MS)) for a, b in permutations(range(hosts), 2)]
    return [
        [Link(f"10.0.0.{a}", f"10.0.0.{b}", s, 1000, 0) for a, b, s in pairs if a == r // ranks]
        for r in range(hosts * ranks)
    ]


def of_host(host: int, hosts: int, rtt_s: float) -> dict[frozenset[int], float]:
    return {frozenset((host, other)): rtt_s for other in range(hosts) if other != host}


@pytest.mark.parametrize("hosts", [3, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_host_behind_a_slow_link_is_named_with_its_ranks(hosts: int, ranks: int) -> None:
    for host in range(hosts):
        found = slowest_host(network(of_host(host, hosts, 50 * MS), hosts, ranks))
        assert (found.address, list(found.ranks)) == (f"10.0.0.{host}", [host * ranks + n for n in range(ranks)])
        who = f"rank {host}" if ranks == 1 else f"ranks {2 * host}, {2 * host + 1}"
        assert str(found) == (f"the link of {who} (10.0.0.{host}): round trips take 50.0 ms, between the others 0.2 ms")


@pytest.mark.parametrize("seed", range(20))
def test_hosts_alike_are_not_slow(seed: int) -> None:
    """Nor is a slow line between two of them, nor a rank that acknowledges late what it is sent."""
    rng = np.random.default_rng(seed)
    hosts = int(rng.integers(2, 9))
    noise = {frozenset(pair): rng.uniform(0.15, 0.25) * MS for pair in permutations(range(hosts), 2)}
    assert slowest_host(network(noise, hosts)) is None
    assert hosts == 3 or slowest_host(network(noise | {frozenset((0, 1)): 50 * MS}, hosts)) is None
    links = network(noise, hosts)
    late = [[link._replace(rtt_s=40 * MS) if link.peer == "10.0.0.0" else link for link in own] for own in links]
    assert slowest_host(late) is None


def test_a_host_that_loses_packets_is_named() -> None:
    links = network({}, 3)
    lossy = [[link._replace(resent=30 if link.local == "10.0.0.2" else 1) for link in own] for own in links]
    found = slowest_host(lossy)
    assert found is not None
    assert str(found) == "the link of rank 2 (10.0.0.2): 3.0 % is sent again, between the others 0.0 %"
    everywhere = [[link._replace(resent=30) for link in own] for own in links]
    assert slowest_host(everywhere) is None


@pytest.mark.parametrize(("rtt_s", "cost"), [(20 * MS, "; up to 99 ms of a step of 200 ms"), (2 * MS, "")])
def test_a_slow_link_is_named_where_it_costs_time(rtt_s: float, cost: str) -> None:
    found = slowest_host(network(of_host(1, 3, rtt_s), 3))
    assert found is not None
    calls = [Begun("all", n, n, waits=n % 2 == 0) for n in range(20)]
    rank = RankTimeline(first=0, marks=(), begun=(7,), calls=calls, waiting=0.0, places={})
    assert cost_of(found, rank, 0.2) == cost


def test_what_was_sent_earlier_does_not_count() -> None:
    before = [Link("a", "b", 0.1, 1000, 50), Link("a", "c", 0.1, 1000, 50)]
    now = [Link("a", "b", 0.2, 1500, 51), Link("a", "c", 0.2, 500, 1), Link("a", "d", 0.2, 7, 0)]
    assert since(before, now) == [Link("a", "b", 0.2, 500, 1), Link("a", "c", 0.2, 500, 1), Link("a", "d", 0.2, 7, 0)]


def test_connections_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0)) as one,
        closing(server.accept()[0]) as other,
    ):
        for _ in range(50):
            one.sendall(b"x" * 100)
            assert other.recv(100, socket.MSG_WAITALL)
            other.sendall(b"y")
            assert one.recv(1)
        links = [link for link in own_links() if {link.local, link.peer} == {"127.0.0.1", "127.0.0.2"}]
    assert {link.local for link in links} == {"127.0.0.1", "127.0.0.2"}
    for link in links:
        assert 0 < link.rtt_s < 0.05
        assert link.sent >= 50
        assert link.resent == 0
    monkeypatch.setattr(slow_links.sys, "platform", "darwin")
    assert own_links() == []
