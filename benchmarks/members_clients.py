"""Simulated clients of the rendezvous host for moe-bench members: one process serves many by one selector.

They use the project's protocol and send what launchers and workers send, without training anything: a member joins,
reports a step with every heartbeat, and joins again when its world breaks. Its launcher's connection carries its
messages, and reconnects when the host is lost.
"""

from __future__ import annotations

import errno
import itertools
import random
import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moe_lightning.elastic.membership import (
    ElasticSettings,
    new_member_id,
    new_token,
    worker_token,
)
from moe_lightning.elastic.protocol import (
    CONNECT_S,
    HANDSHAKE_S,
    Address,
    Backoff,
    Channel,
    Message,
    WireError,
    read_secret,
)

_STEP_S = 0.02
_REPORT_S = 0.01  # between two reports
_CHUNK = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Constants of all clients of a run.

    Attributes:
        address: of the rendezvous host.
        secret_file: of the run.
        expected: members of the first world.
        per_node: members of a node.
    """

    address: str
    secret_file: str
    expected: int
    per_node: int


@dataclass(kw_only=True)
class Report:
    """State of the clients of one process.

    Attributes:
        at: time of its last change, on the system's monotonic clock.
        clients: launchers and members that were started and not lost.
        registered: those that the host has answered on their present connection.
        worlds: members in each intact world.
        waiting: most newcomers that a member was told of.
        evicted: members that were evicted although none had been stopped or lost.
        connections: made so far.
        received, sent: bytes, frames included.
        cpu_s: processor time of this process.
        answers: the last request that it answers.
    """

    at: float = 0.0
    clients: int = 0
    registered: int = 0
    worlds: Counter[int] = field(default_factory=Counter)
    waiting: int = 0
    evicted: int = 0
    connections: int = 0
    received: int = 0
    sent: int = 0
    cpu_s: float = 0.0
    answers: int = 0

    def __add__(self, other: Report) -> Report:
        return Report(
            at=max(self.at, other.at),
            clients=self.clients + other.clients,
            registered=self.registered + other.registered,
            worlds=self.worlds + other.worlds,
            waiting=max(self.waiting, other.waiting),
            evicted=self.evicted + other.evicted,
            connections=self.connections + other.connections,
            received=self.received + other.received,
            sent=self.sent + other.sent,
            cpu_s=self.cpu_s + other.cpu_s,
        )


class Launcher:
    """Connection of a simulated launcher, which carries those of its members and reconnects.

    Args:
        crowd: the clients of this process.
        node: number of its node.

    Attributes:
        token: of its process.
        members: that it carries, by key.
    """

    def __init__(self, crowd: Crowd, node: int) -> None:
        self.crowd, self.node = crowd, node
        self.socket: socket.socket | None = None
        self.channel = Channel(crowd.secret, is_server=False)
        self.token = new_token()
        self.members: dict[int, Member] = {}
        self._keys = itertools.count(1)
        self._targets: list[int] | None = None
        self._is_registered = False
        self.attempt_at = 0.0
        self.next_beat = time.monotonic()
        self._is_connecting = False
        self._backoff = Backoff()

    def add(self, member: Member) -> None:
        """Carry a member, under a new key."""
        member.key = next(self._keys)
        self.members[member.key] = member
        if self.channel.is_open:
            member.introduce()

    def remove(self, member: Member, how: str) -> None:
        """Report the end of a member's process."""
        del self.members[member.key]
        member.note_loss()
        self.send({"t": "gone", "client": member.key}, {"t": "died", "token": member.token, "how": how})

    def step(self, now: float) -> None:
        """Connect, give up an attempt, or send a heartbeat, whatever is due."""
        if self.socket is None:
            if now >= self._backoff.due:
                self._connect(now)
        elif not self.channel.is_open:
            if now - self.attempt_at > (CONNECT_S if self._is_connecting else HANDSHAKE_S):
                self.disconnect()
        elif now >= self.next_beat:
            self.next_beat = now + self.crowd.settings.heartbeat_interval_s
            beats = [(key, member.progress()) for key, member in self.members.items()]
            self.send({"t": "beat", "progress": 0, "clients": beats})

    def _connect(self, now: float) -> None:
        self.attempt_at = now
        self.channel = Channel(self.crowd.secret, is_server=False)
        family, target = self.crowd.address.resolve()
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        if self.socket.connect_ex(target) not in (0, errno.EINPROGRESS):
            self.socket.close()
            self.socket = None
            self._backoff.delay(now)
            return
        self._is_connecting = True
        self.crowd.report.connections += 1
        self.crowd.selector.register(self.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def serve(self, events: int) -> None:
        """Read and write what the system allows."""
        assert self.socket is not None
        self._is_connecting = False
        try:
            if events & selectors.EVENT_READ:
                data = self.socket.recv(_CHUNK)
                if not data:
                    raise WireError("the host ended the connection")
                self.crowd.report.received += len(data)
                was_open = self.channel.is_open
                messages = self.channel.receive(data)
                if self.channel.is_open and not was_open:
                    self._backoff.reset()
                    self.send({"t": "launcher", "token": self.token, "expected": self.crowd.plan.expected})
                    for member in self.members.values():
                        member.introduce()
                for message in messages:
                    self._handle(message)
            self._flush()
        except BlockingIOError:
            return
        except (OSError, WireError):
            self.disconnect()

    def _handle(self, message: Message) -> None:
        targets, self._targets = self._targets, None
        match message:
            case {"t": "for", "clients": list(keys)}:
                self._targets = keys
            case {"t": "gone", "client": int(key)} if key in self.members:
                self.add(self.members.pop(key))
            case {"t": "beat"} if targets is None:
                if not self._is_registered:
                    self._is_registered = True
                    self.crowd.report.registered += 1
                    self.crowd.note_change()
            case _:
                for key in targets or ():
                    if key in self.members:
                        self.members[key].handle(message)

    def send(self, *messages: Message) -> None:
        """Send messages, if there is a connection."""
        if self.channel.is_open and self.socket is not None:
            for message in messages:
                self.channel.send(message)
            self._flush()

    def _flush(self) -> None:
        if self.socket is None:
            return
        outgoing = self.channel.outgoing
        with suppress(OSError):  # errors show when the loop reads
            if outgoing:
                sent = self.socket.send(outgoing)
                self.crowd.report.sent += sent
                del outgoing[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)
        if self.crowd.selector.get_key(self.socket).events != wanted:
            self.crowd.selector.modify(self.socket, wanted, self)

    def disconnect(self) -> None:
        """Close the connection; the next one is made when its delay is over."""
        if self.socket is None:
            return
        self.crowd.selector.unregister(self.socket)
        self.socket.close()
        self.socket, self._targets = None, None
        self.crowd.report.registered -= self._is_registered
        self._is_registered = False
        for member in self.members.values():
            member.note_loss()
        self.crowd.note_change()
        self._backoff.delay(time.monotonic())


class Member:
    """Simulated worker.

    Args:
        crowd: the clients of this process.
        node: number of its node.
        birth_ns: of the members that its node starts together.

    Attributes:
        key: at its launcher.
        token: of its process.
        world: number of its world; 0 before the first.
        rank: in it.
    """

    def __init__(self, crowd: Crowd, node: int, slot: int, starts: int, birth_ns: int) -> None:
        self.crowd, self.node, self.key = crowd, node, 0
        self.token = worker_token(crowd.launchers[node].token, slot, starts)
        self.member_id = new_member_id(f"node-{node:04d}", self.token, birth_ns + slot)
        self.world, self.rank = 0, -1
        self._probe = [f"10.0.{node // 250}.{node % 250 + 1}", random.randrange(32_768, 61_000)]  # nobody probes it
        self._reason: str | None = None
        self._is_joining, self._is_registered = True, False
        self._progress = 0

    def introduce(self, *, is_full: bool = False) -> None:
        """Register at the host, with the members of the present world if the host has asked."""
        world: Message | None = None
        if self.world:
            world = {"number": self.world, "patience": self.crowd.settings.patience}
            world |= {"members": self.crowd.ids[self.world]} if is_full else {}
            world |= {"broken": self._reason} if self._reason is not None else {}
        self.send({
            "t": "member", "id": self.member_id, "expected": self.crowd.plan.expected,
            "patience": self.crowd.settings.patience, "probe": self._probe, "joining": self._is_joining,
            "ready": self.world > 0, "number": self.world, "world": world, "multiple": 1,
        })  # fmt: skip

    def send(self, message: Message) -> None:
        """Send a message by the launcher's connection, if it has one."""
        self.crowd.launchers[self.node].send({"t": "for", "clients": [self.key]}, message)

    def progress(self) -> int:
        """Return the count of steps for the next heartbeat: one more than for the last."""
        self._progress += self.is_training
        return self._progress

    @property
    def is_training(self) -> bool:
        """True in an intact world."""
        return self.world > 0 and not self._is_joining

    def note_loss(self) -> None:
        """Count this member out of those that the host has answered."""
        self.crowd.report.registered -= self._is_registered
        self._is_registered = False

    def handle(self, message: Message) -> None:
        """Handle a message of the host."""
        match message:
            case {"t": "state"} if not self._is_registered:
                self._is_registered = True
                self.crowd.report.registered += 1
                self.crowd.note_change()
            case {"t": "introduce", "full": bool(is_full)}:
                self.introduce(is_full=is_full)
            case {"t": "formed", "number": int(number)} if self.member_id in self.crowd.ranks(message):
                self.leave_world()
                self.world, self.rank = number, self.crowd.ranks(message)[self.member_id]
                self._is_joining, self._reason = False, None
                self.crowd.report.worlds[number] += 1
                self.crowd.report.waiting = 0
                self.crowd.note_change()
            case {"t": "broken", "number": int(number), "reason": str(reason)} if number == self.world:
                self._reason = reason
                self.leave_world()
                self.send({"t": "join", "ready": True, "spare": False})
            case {"t": "waiting", "count": int(count)}:
                self.crowd.report.waiting = count
                self.crowd.note_change()
            case {"t": "evicted"}:
                self.crowd.report.evicted += 1
                self.leave_world()
                self.member_id = new_member_id(f"node-{self.node:04d}", self.token, time.time_ns())
                self.world = 0
                self.introduce()

    def leave_world(self) -> None:
        """Count this member out of its intact world, once."""
        if self.is_training:
            self.crowd.report.worlds[self.world] -= 1
            self.crowd.note_change()
        self._is_joining = True


class Crowd:
    """All clients of one process.

    Args:
        plan: see there.
        pipe: to the benchmark.
    """

    def __init__(self, plan: Plan, pipe: Connection) -> None:
        self.plan, self._pipe = plan, pipe
        self.secret, self.address = read_secret(Path(plan.secret_file)), Address.parse(plan.address)
        self.settings = ElasticSettings()
        self.selector = selectors.DefaultSelector()
        self.report = Report()
        self.launchers: dict[int, Launcher] = {}
        self.ids: dict[int, list[str]] = {}  # members of each world
        self._ranks: dict[int, dict[str, int]] = {}  # by world
        self._starts: Counter[int] = Counter()  # of each node
        self._reported_at = 0.0
        self._has_changed = True

    def note_change(self) -> None:
        """Record the time of a change that the benchmark waits for."""
        self.report.at, self._has_changed = time.monotonic(), True

    def ranks(self, formed: Message) -> Mapping[str, int]:
        """Return the members of a new world by rank; computed once, though each worker does it."""
        number = formed["number"]
        if number not in self._ranks:
            self.ids[number] = formed["members"]
            self._ranks[number] = {member_id: rank for rank, member_id in enumerate(formed["members"])}
        return self._ranks[number]

    def run(self) -> None:
        """Serve all clients until the benchmark ends this process by "end" or by its own end."""
        due = 0.0
        while True:
            for key, events in self.selector.select(_STEP_S):
                if key.data.socket is key.fileobj:
                    key.data.serve(events)
            now = time.monotonic()
            if now >= due:
                due = now + _STEP_S
                for launcher in self.launchers.values():
                    launcher.step(now)
            if self._has_changed and now - self._reported_at > _REPORT_S:
                self._reported_at, self._has_changed = now, False
                self.report.cpu_s = time.process_time()
                self._pipe.send(self.report)
            if self._pipe.poll():
                match self._pipe.recv():
                    case ("start", nodes):
                        self._start(nodes)
                    case ("lose", node, is_whole):
                        self._lose(node, is_whole)
                    case ("admit",):
                        self._admit()
                    case ("report", number):
                        self.report.answers = number
                        self._has_changed, self._reported_at = True, 0.0
                    case _:
                        return

    def _start(self, nodes: Iterable[int]) -> None:
        """Start the members of these nodes, and their launchers where none is left."""
        for node in nodes:
            if node not in self.launchers:
                self.launchers[node] = Launcher(self, node)
                self.report.clients += 1
            self._starts[node] += 1
            starts = self._starts[node]
            birth_ns = time.time_ns() // 1_000_000 * 1_000_000
            for slot in range(self.plan.per_node):
                self.launchers[node].add(Member(self, node, slot, starts, birth_ns))
            self.report.clients += self.plan.per_node
        self.note_change()

    def _lose(self, node: int, is_whole: bool) -> None:
        """Kill all members of a node; its launcher sees it and reports them, and is killed then if the node is lost as
        a whole.
        """
        launcher = self.launchers[node]
        for member in list(launcher.members.values()):
            member.leave_world()
            launcher.remove(member, "was killed by SIGKILL")
            self.report.clients -= 1
        if is_whole:
            launcher.disconnect()
            del self.launchers[node]
            self.report.clients -= 1
        self.note_change()

    def _admit(self) -> None:
        """Let rank 0, if it is here, break its world for newcomers."""
        for launcher in self.launchers.values():
            for member in launcher.members.values():
                if member.rank == 0 and member.is_training:
                    member.send({"t": "broken", "number": member.world, "reason": "newcomers", "rating": 1})


def serve(plan: Plan, pipe: Connection) -> None:
    """Run a process of clients."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with suppress(EOFError, BrokenPipeError):  # the benchmark has ended
        Crowd(plan, pipe).run()


def idle(address: str, count: int, pipe: Connection) -> None:
    """Keep so many connections open that never authenticate: one that the host closes is opened again at once."""
    family, target = Address.parse(address).resolve()
    selector = selectors.DefaultSelector()
    made = 0

    def connect() -> None:
        nonlocal made
        each: Any = socket.socket(family, socket.SOCK_STREAM)
        each.setblocking(False)
        each.connect_ex(target)
        selector.register(each, selectors.EVENT_READ)
        made += 1

    for _ in range(count):
        connect()
    while not pipe.poll():
        for key, _ in selector.select(_STEP_S):
            selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
            connect()
    pipe.send(made)
