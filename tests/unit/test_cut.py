"""Cutting connections: only those made in the block, only connected ones, never a number that means another."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from moe_lightning.errors import WorldAbortedError
from moe_lightning.parallel.abort import GroupAborter, build_world
from moe_lightning.parallel.context import any_says

Pair = tuple[socket.socket, socket.socket]


class Peers:
    """Makes pairs of connected TCP sockets over one listener."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self.listener.getsockname()[1]

    def pair(self) -> Pair:
        """(our end, the peer's end)."""
        ours = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=5))
        theirs, _ = self.listener.accept()
        theirs.settimeout(5)
        return ours, self._stack.enter_context(theirs)


@pytest.fixture
def peers() -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(stack)


def is_cut(pair: Pair) -> bool:
    """Whether whoever reads at our end is told that there is no more."""
    pair[0].setblocking(False)
    try:
        return pair[0].recv(1) == b""
    except BlockingIOError:
        return False


def test_only_what_the_block_opened_is_cut(peers: Peers) -> None:
    before = peers.pair()
    with GroupAborter() as aborter:
        inside = peers.pair()
        listener = socket.create_server(("127.0.0.1", 0))
    after = peers.pair()
    aborter.abort()
    assert [is_cut(pair) for pair in (before, inside, after)] == [False, True, False]
    with closing(listener), socket.create_connection(listener.getsockname(), timeout=5):
        listener.accept()[0].close()  # listening sockets live on


def test_a_blocked_reader_is_freed(peers: Peers) -> None:
    with GroupAborter() as aborter:
        ours, _ = peers.pair()
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(ours.recv(1)))
    reader.start()
    aborter.abort()
    reader.join(timeout=5)
    assert got == [b""]
    aborter.abort()  # again, on what is cut already


def test_a_writer_meets_no_error(peers: Peers) -> None:
    with GroupAborter() as aborter:
        ours, theirs = peers.pair()
    theirs.sendall(b"ready")
    aborter.abort()
    assert ours.recv(5) == b"ready", "what arrived before is read first"
    ours.sendall(b"data")  # gloo would forget this send, and whoever waits for it, if it failed here
    assert ours.recv(1) == b""


def test_what_is_lost_is_sent_again_soon(peers: Peers) -> None:
    with GroupAborter() as aborter:
        inside = peers.pair()
    outside = peers.pair()
    aborter.tune()
    thin = [pair[0].getsockopt(socket.IPPROTO_TCP, 16) for pair in (inside, outside)]  # TCP_THIN_LINEAR_TIMEOUTS
    assert thin == [1, 0]
    assert inside[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_cut_inside_the_block_reaches_what_follows(peers: Peers) -> None:
    with GroupAborter() as aborter:
        first = peers.pair()
        aborter.abort()
        assert is_cut(first)
        second = peers.pair()
    assert is_cut(second)


def test_a_number_that_was_given_away_is_left_alone(peers: Peers) -> None:
    with GroupAborter() as aborter:
        inside = peers.pair()
    numbers = [end.fileno() for end in inside]
    for end in inside:
        end.close()
    others = peers.pair(), peers.pair()
    assert {end.fileno() for pair in others for end in pair} & set(numbers), "numbers are given again"
    aborter.abort()
    assert not any(is_cut(pair) for pair in others)


def test_files_and_pipes_do_not_matter(peers: Peers) -> None:
    reader, writer = os.pipe()
    with GroupAborter() as aborter:
        left, right = socket.socketpair()
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.connect(("127.0.0.1", peers.port))
    assert aborter.connections == frozenset()
    for each in (left, right, datagrams):
        each.close()
    os.close(reader)
    os.close(writer)


def test_locks_of_files_stay(tmp_path: Path) -> None:
    """The system drops a process's record locks on a file, as of SQLite, when it closes any descriptor of that."""
    takes = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with (tmp_path / "lock").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        with GroupAborter():
            pass
        taken = subprocess.run([sys.executable, "-c", takes, file.name], capture_output=True, text=True, check=False)
    assert "BlockingIOError" in taken.stderr


def test_confirm_keeps_what_another_rank_also_names(peers: Peers) -> None:
    with GroupAborter() as aborter:
        ours, _theirs = peers.pair()
        strange = peers.pair()
    other = {"token": "other", "connections": [[list(ours.getpeername()), list(ours.getsockname())]]}
    aborter.confirm(lambda mine: [mine, other])
    assert {c.local for c in aborter.connections} == {ours.getsockname()}
    aborter.abort()
    assert not is_cut(strange)


def test_confirm_does_not_take_a_process_for_its_own_peer(peers: Peers) -> None:
    with GroupAborter() as aborter:
        peers.pair()  # both ends are of this process
    assert len(aborter.connections) == 2
    aborter.confirm(lambda mine: [mine])
    assert aborter.connections == frozenset()


def test_a_world_of_one_rank_learns_that_it_is_aborted() -> None:
    """It has no connections whose end would raise: only an agreement asks."""
    aborts: list[Callable[[], None]] = []
    world = build_world(
        "alone", store=HashStore(), rank=0, size=1, backend="gloo", timeout=timedelta(seconds=1), build_timeout_s=1.0,
        device=torch.device("cpu"), guard=aborts.append,
    )  # fmt: skip
    assert any_says([True], world) == [True]
    aborts[0]()
    with pytest.raises(WorldAbortedError, match="was aborted"):
        any_says([True], world)
