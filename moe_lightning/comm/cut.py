"""Cuts the connections of process groups, so that collectives blocked on a dead or stopped peer raise at once.

gloo's own abort and shutdown do nothing, and a peer of a stopped process never sees an error. Shutting a *connected*
TCP socket down wakes every operation that waits on it, from any thread, whoever called it (DDP's reducer, third-party
code). Only reading is shut down: gloo then fails all that is under way on the connection and closes it, while a write
that failed as an answer to the peer's last word would be forgotten together with whoever waits for it. Listening
sockets must be left alone: gloo aborts the process when accept fails. NCCL groups are aborted through their own call.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch.distributed import ProcessGroup

from moe_lightning.comm.nccl import abort_together
from moe_lightning.comm.tcp import tune

Address = tuple[str, int]

_DESCRIPTORS = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A connected TCP socket of this process.

    Attributes:
        descriptor: its number; the system may give the number to another file once it is closed.
        inode: tells a socket from a later one of the same number.
        local, peer: the two ends.
    """

    descriptor: int
    inode: int
    local: Address
    peer: Address


class ConnectionCut:
    """Remembers the TCP connections to peers that groups built inside the block, so that any thread can cut them.

        with ConnectionCut() as cut:
            dist.init_process_group(...)
        cut.confirm(exchange)

    It may be cut while the block still runs: what was connected by then is cut at once, what follows at the block's
    end.

    Args:
        only_to: remember only connections to this port; None for all.
    """

    def __init__(self, *, only_to: int | None = None) -> None:
        self._only_to = only_to
        self._lock = threading.Lock()
        self._before: frozenset[Connection] | None = None
        self._connections: frozenset[Connection] = frozenset()
        self._abort: Callable[[], None] | None = None
        self._is_cut = False

    def __enter__(self) -> Self:
        with self._lock:
            self._before = frozenset(_open_connections())
        return self

    def tune(self) -> None:
        """Let what is lost on these connections be sent again soon."""
        for connection in self._connections:
            found = _same(connection)
            if found is not None:
                with closing(found), suppress(OSError):  # it has ended; who uses it will see
                    tune(found)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._remember()
            self._before = None
            if self._is_cut:
                self._cut_all()

    @property
    def connections(self) -> frozenset[Connection]:
        """What a cut would shut down."""
        return self._connections

    @property
    def is_cut(self) -> bool:
        """Whether somebody has cut; true before anything feels it."""
        return self._is_cut

    def add_groups(self, groups: Sequence[ProcessGroup], device: torch.device) -> None:
        """Let a cut, one that was made already too, abort groups that do not run on sockets of this process (NCCL).

        Args:
            device: whose tensors they carry.
        """
        with self._lock:
            self._abort = partial(abort_together, groups, device)
        if self._is_cut:
            self._abort_groups()

    def confirm(self, exchange: Callable[[object], list[object]]) -> None:
        """Forget connections that another thread opened meanwhile: keep those whose two ends another rank also names.

        Args:
            exchange: an all-gather of plain JSON values among the ranks; called once, by every rank.
        """
        token = secrets.token_hex(8)
        mine = [[list(c.local), list(c.peer)] for c in self._connections]
        theirs = set()
        for said in exchange({"token": token, "connections": mine}):
            if isinstance(said, dict) and said.get("token") != token:
                theirs |= {(_address(local), _address(peer)) for local, peer in said.get("connections", [])}
        with self._lock:
            self._connections = frozenset(c for c in self._connections if (c.peer, c.local) in theirs)

    def cut(self) -> None:
        """Shut the connections down and abort the groups that were added; safe to call often and from any thread."""
        with self._lock:
            self._is_cut = True
            if self._before is not None:
                self._remember()
            self._cut_all()
        self._abort_groups()

    def _abort_groups(self) -> None:
        with self._lock:
            abort, self._abort = self._abort, None
        if abort is not None:
            abort()

    def _remember(self) -> None:
        assert self._before is not None
        new = frozenset(_open_connections()) - self._before
        self._connections |= {c for c in new if self._only_to in (None, c.peer[1])}

    def _cut_all(self) -> None:
        for connection in self._connections:
            _shut_down(connection)


def _open_connections() -> Iterator[Connection]:
    """The connected TCP sockets of this process."""
    for name in os.listdir(_DESCRIPTORS):
        found = duplicate(int(name))
        if found is None:
            continue
        with closing(found):
            ends = _ends(found)
            if ends is not None:
                inode = os.fstat(found.fileno()).st_ino
                yield Connection(descriptor=int(name), inode=inode, local=ends[0], peer=ends[1])


def _shut_down(connection: Connection) -> None:
    """Shut a socket's reading down."""
    found = _same(connection)
    if found is None:
        return
    with closing(found):
        try:
            found.shutdown(socket.SHUT_RD)
        except OSError as error:  # the peer closed it between the look and the cut
            logger.debug("connection to %s was closed already: %s", connection.peer, error)


def _same(connection: Connection) -> socket.socket | None:
    """A second handle on a connection, which cannot be replaced; None where its number stands for another by now."""
    found = duplicate(connection.descriptor)
    if found is None:
        return None
    same = os.fstat(found.fileno()).st_ino == connection.inode
    if same and _ends(found) == (connection.local, connection.peer):
        return found
    found.close()
    return None


def duplicate(descriptor: int) -> socket.socket | None:
    """A second handle on a socket; None for numbers that are closed or stand for something else."""
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
        os.close(duplicate)
        return None
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return None


def _ends(found: socket.socket) -> tuple[Address, Address] | None:
    """Both ends of a connected TCP socket; None for listening, unconnected and other sockets."""
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        return None
    try:
        return _address(found.getsockname()), _address(found.getpeername())
    except OSError:
        return None


def _address(name: Any) -> Address:
    """(host, port); an IPv4 address in IPv6 dress is written as IPv4, as the other end may see it."""
    return str(name[0]).removeprefix("::ffff:"), int(name[1])
