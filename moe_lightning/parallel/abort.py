"""Process groups that can be aborted: collectives that wait for a dead or stopped peer raise at once.

gloo's own abort and shutdown do nothing, and a peer of a stopped process never sees an error. Shutting a *connected*
TCP socket down wakes every operation that waits on it, from any thread, also in DDP's reducer and third-party code.
Only reading is shut down: gloo then fails all operations on the connection and closes it, while a failed write of the
last answer would be lost together with its waiting peer. Listening sockets are left alone, because gloo aborts the
process when accept fails. NCCL groups are aborted through their own call.

gloo fails only operations of which no byte has moved (its `Pair::signalException` passes over those being written or
read), so a rank may wait until its timeout, although its peer is dead: now and then amid small messages, in up to half
of the aborts amid an all-to-all of more than 4 MB per pair of ranks, which socket buffers do not take.
`StuckCollective` finds it: that rank ends itself two seconds after the abort and is started again, like one that was
lost.

gloo has no authentication and accepts any connection. Once the groups are built, a socket filter on its listeners drops
packets that would open new connections; established connections do not pass the filter. Linux only.

`tune` sets TCP options for small messages with a waiting reader, also where packets are lost.

gloo waits for another rank's first connection for five times the timeout of the group. So `build_world` builds groups
with a short timeout, after all members have met in the store (a wait that can be aborted), and sets the timeout of
their collectives afterwards; a lost member is then detected soon, and the next attempt works.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import secrets
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from moe_lightning.compat import private_torch
from moe_lightning.parallel.collectives import all_gather_json, check_versions
from moe_lightning.parallel.context import (
    World,
    abort_together,
    first_group_options,
    is_silent,
    prepare_environment,
)
from moe_lightning.parallel.exchange import WAITS
from moe_lightning.parallel.mesh import Layout

# <linux/tcp.h>
_THIN_LINEAR_TIMEOUTS = 16  # a lost small segment is sent again at once and again, without backing off
_RTO_MIN_US, _DELACK_MAX_US = 45, 46  # since Linux 6.15
_SEND_AGAIN_US = 60_000
"""How long after the usual round trip a segment without an answer is sent again: Linux waits 200 ms, its answers come
within 40 ms or with what the other end says next."""
_ANSWER_US = 40_000


def tune(connection: socket.socket) -> None:
    """Set TCP options for small messages: sent at once, lost ones sent again soon; unsupported options are skipped."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform != "linux":
        return
    connection.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)
    with suppress(OSError):  # an older kernel
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MIN_US, _SEND_AGAIN_US)
        connection.setsockopt(socket.IPPROTO_TCP, _DELACK_MAX_US, _ANSWER_US)


Address = tuple[str, int]

_DESCRIPTORS = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A connected TCP socket of this process.

    Attributes:
        descriptor: its number; the system may give the number to another file once it is closed.
        inode: distinguishes a socket from a later one of the same number.
        local, peer: the two ends.
    """

    descriptor: int
    inode: int
    local: Address
    peer: Address


class GroupAborter:
    """Aborter of process groups from any thread: records the TCP connections that groups open inside the block.

        with GroupAborter() as aborter:
            dist.init_process_group(...)
        aborter.confirm(exchange)

    An abort while the block still runs ends present connections at once, later ones at the end of the block.

    Attributes:
        connections: that an abort shuts down.
        is_aborted: True once an abort was requested, before any operation raises.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: frozenset[Connection] | None = None
        self.connections: frozenset[Connection] = frozenset()
        self._abort: Callable[[], None] | None = None
        self.is_aborted = False

    def __enter__(self) -> Self:
        with self._lock:
            self._before = frozenset(open_connections())
        return self

    def tune(self) -> None:
        """Set TCP options on these connections so that lost packets are sent again soon."""
        self._apply(tune)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._remember()
            self._before = None
            if self.is_aborted:
                self._cut_all()

    def add_groups(self, groups: Sequence[ProcessGroup], device: torch.device) -> None:
        """Add groups that do not run on sockets of this process (NCCL); an earlier abort is applied at once.

        Args:
            device: whose tensors they carry.
        """
        with self._lock:
            self._abort = partial(abort_together, groups, device)
        if self.is_aborted:
            self._abort_groups()

    def confirm(self, exchange: Callable[[object], list[object]]) -> int:
        """Drop connections that another thread opened meanwhile: keep those whose two ends another rank also reports.
        Return the number of ranks that report any of them.

        Args:
            exchange: an all-gather of plain JSON values among the ranks; called once, by every rank.
        """
        token = secrets.token_hex(8)
        mine = [[list(c.local), list(c.peer)] for c in self.connections]
        awaited = {(c.peer, c.local) for c in self.connections}
        found: list[set[tuple[Address, Address]]] = []
        for report in exchange({"token": token, "connections": mine}):
            if isinstance(report, dict) and report.get("token") != token:
                theirs = {(_address(local), _address(peer)) for local, peer in report.get("connections", [])}
                found.append(awaited & theirs)
        confirmed = set().union(*found)
        with self._lock:
            self.connections = frozenset(c for c in self.connections if (c.peer, c.local) in confirmed)
        return sum(map(bool, found))

    def abort(self) -> None:
        """Shut the connections down and abort the groups that were added; safe to call often and from any thread."""
        with self._lock:
            self.is_aborted = True
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
        self.connections |= frozenset(open_connections()) - self._before

    def _cut_all(self) -> None:
        self._apply(lambda connection: connection.shutdown(socket.SHUT_RD))

    def _apply(self, act: Callable[[socket.socket], None]) -> None:
        """Call a function with each connection that has not ended; who uses one that ends meanwhile will see."""
        for connection in self.connections:
            if (found := _same(connection)) is not None:
                with closing(found), suppress(OSError):
                    act(found)


_STUCK_S = 2.0  # an abort frees a collective at once, if it does


class StuckCollective:
    """Detection of a main thread that an abort has not freed from a collective: it stays at one instruction of it. One
    that computes is in another function.
    """

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None
        self._since = 0.0

    def exceeded_limit_s(self, now: float) -> float | None:
        """Return the time that the main thread had, if it is over; else None. Call it again and again after an abort.

        Args:
            now: seconds of the caller's clock.
        """
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        waits = frame is not None and (frame.f_code in WAITS or private_torch.is_collective(frame.f_code))
        place = (id(frame), frame.f_lasti) if frame is not None and waits else None
        if place is None or place != self._place:
            self._place, self._since = place, now
        return _STUCK_S if place is not None and now - self._since >= _STUCK_S else None


def open_connections() -> Iterator[Connection]:
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
    """A second handle on a socket; None for numbers that are closed or stand for something else.

    Files get no second handle: closing one drops all record locks that this process has on the file, as of SQLite.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=duplicate)
    except OSError:  # the number was given to something else meanwhile
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
    """(host, port); an IPv4-mapped IPv6 address is written as IPv4, as the other end may report it."""
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


_SO_ATTACH_FILTER = 26  # <asm-generic/socket.h>
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: keep 0 bytes of the packet
_LAZY = "TORCH_GLOO_LAZY_INIT"


def reject_unknown_connections(connections: Collection[Connection]) -> int:
    """Reject new connections to the listeners of these groups, and close unknown ones that exist.

    Args:
        connections: all between this process and its peers; of each group at least one.

    Returns:
        Number of listeners with a filter; 0 where unsupported, or if groups connect only when they are used.
    """
    if sys.platform != "linux" or _connects_lazily():
        return 0
    ours = {connection.descriptor for connection in connections}
    closed = 0
    for watched in _watched_together():
        for descriptor in watched - ours if watched & ours else ():
            found = duplicate(descriptor)
            if found is None:
                continue
            with closing(found):
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    _drop_all(found)
                    closed += 1
                elif found.family in (socket.AF_INET, socket.AF_INET6):
                    with suppress(OSError):  # it has ended by itself
                        found.shutdown(socket.SHUT_RDWR)
    return closed


def _connects_lazily() -> bool:
    return os.environ.get(_LAZY, "0").lower() not in ("", "0", "false", "n", "no", "off")


def _watched_together() -> Iterator[set[int]]:
    """Yield sets of descriptors in one epoll: a listener of gloo and the connections of its groups share one."""
    for entry in Path("/proc/self/fdinfo").iterdir():
        try:
            if os.readlink(f"/proc/self/fd/{entry.name}") == "anon_inode:[eventpoll]":
                lines = entry.read_text().splitlines()
                yield {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
        except OSError:
            continue  # it was closed meanwhile


def _drop_all(listener: socket.socket) -> None:
    instructions = ctypes.create_string_buffer(_DROP, len(_DROP))
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


# ---------------------------------------------------------------------- groups that can be aborted

_GLOO_PATIENCE = 5  # timeouts that gloo waits for another rank's first connection


def store_barrier(store: Store, purpose: str, size: int, timeout_s: float) -> None:
    """Wait in a store until so many ranks have come here; unlike a collective, this needs no group.

    Args:
        store: of the world.
        purpose: words after "came to", used once in a world.

    Raises:
        TimeoutError: not all came in time.
        RuntimeError: the store was closed.
    """
    arrived, everybody = f"{purpose}: met", f"{purpose}: all"
    if store.add(arrived, 1) == size:
        store.set(everybody, "")
    try:
        store.wait([everybody], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        came = store.add(arrived, 0)
        raise TimeoutError(f"only {came} of {size} ranks came to {purpose} within {timeout_s:g} s") from None


def begin_build(store: Store, size: int, timeout_s: float) -> timedelta:
    """Wait until every member of a world has come to build its groups; return the timeout to build them with.

    With it building ends within `timeout_s`, even if a member is lost. Set the timeout of its collectives on each group
    afterwards.

    Args:
        store: with a prefix of this world alone.
        size: number of members, each of which calls this once.

    Raises:
        TimeoutError: not all came in time.
        RuntimeError: the store was closed.
    """
    assert not dist.is_initialized(), "destroy the former groups first"
    private_torch.reset_group_names()
    store_barrier(store, "build their groups", size, timeout_s)
    return timedelta(seconds=timeout_s / _GLOO_PATIENCE)


def build_world(
    name: str,
    *,
    store: Store,
    rank: int,
    size: int,
    backend: str,
    timeout: timedelta,
    build_timeout_s: float,
    device: torch.device,
    layout: Layout | None = None,
    generation: int = 0,
    guard: Callable[[Callable[[], None]], None],
) -> World:
    """Build torch's default group and ours for one world, so that any thread can abort them.

    Args:
        name: unique for ever; prefix of the groups' keys in the store.
        store: outlives its members.
        timeout: of every collective.
        build_timeout_s: of building; a member may die meanwhile.
        layout: as of `World.connect`.
        generation: number of the world.
        guard: receives the function that aborts the groups, before any connection is made.

    Raises:
        WorldAbortedError: the world was aborted meanwhile.
        ConfigurationError: this rank has other versions than rank 0, and would plan otherwise.
    """
    aborter = GroupAborter()
    guard(aborter.abort)
    if size == 1:
        return World.single(device, generation, is_aborted=lambda: aborter.is_aborted)
    prefixed = PrefixStore(name, store)
    prefixed.set_timeout(timedelta(seconds=build_timeout_s))
    with aborter:
        short = begin_build(prefixed, size, build_timeout_s)
        prepare_environment(is_elastic=True)
        own = first_group_options(device)
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=short, **own)
        world = World.connect(device, short, layout, is_aborted=lambda: aborter.is_aborted, generation=generation)
    aborter.tune()
    for group in world.all_groups:
        private_torch.set_group_timeout(group, timeout)
    silent = [group for group in world.all_groups if is_silent(group, device)]
    aborter.add_groups(silent, device)
    connected = aborter.confirm(lambda value: all_gather_json(value, world))
    if connected == size - 1 or silent:
        reject_unknown_connections(aborter.connections)
    elif rank == 0 and not _connects_lazily():
        logger.warning(
            "connections to %d of %d other ranks pass a proxy, so that a lost rank takes others with it: leave the "
            'pods of the run out of the service mesh (label sidecar.istio.io/inject: "false")',
            *(size - 1 - connected, size - 1),
        )
    check_versions(world, recovers=True)
    return world


def destroy_groups() -> None:
    """Destroy the groups of a world that has ended, and the objects that refer to them."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # The next backward pass clears the rest of a failed one from autograd's queue of this thread; until then it keeps
    # the gradient accumulators of parameters alive, which have the old number of slots.
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    gc.collect()  # graphs of the failed step, their threads and connections
