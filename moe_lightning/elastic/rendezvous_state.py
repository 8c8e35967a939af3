"""State machine of the rendezvous service, without sockets: messages and times in, messages out.

`RendezvousState` registers members, forms worlds, reports why one breaks, and admits newcomers. All of its state can be
reported again by the members, so a host that was restarted goes on with their world. The decisions are pure functions:
which members form the next world (`next_world`), who is overdue (`overdue_members`), and which stay if links between
nodes are dead although both ends reach the host (`connected_nodes`). `Clients` has the connections. Times are
seconds of the host's own clock.

Messages are dictionaries with a kind "t". Those of a worker:

    member        registers it: name, timeouts, endpoint for probes, and the number of its world, which a host that was
                  restarted does not know
    join          it waits for the next world; with "spare" the others go on without it
    beat, alive   heartbeat with its count of steps, by itself or with that of its launcher
    broken        its world is broken for all members
    withdraw      it cannot train in the world that formed, and joins later
    unreachable   all nodes of its world that do not answer its probes
    leave         it is no member any more
    finish        the run has ended, with this number
    begin         after that this member calls the Trainer again, in which others may wait for it

and those to a worker:

    ready         a connection is admitted, and may register or introduce a launcher
    state         answer to "member": number of the last end of the run, and whether a world exists
    introduce     register again: "full" with the members of your world
    formed        the world that it is in
    broken        that world is broken: the reason, and how good it is
    waiting       number of newcomers, which its world admits when it breaks up between two steps
    spare         it waits until there are enough for a multiple
    evicted       it is no member any more, and may register under another name: when these nodes have answered its
                  probes, or after `rendezvous_timeout_s` without an answer
    finished      the run has ended

A launcher sends "launcher" with the health of its machine, "died" for a worker, and heartbeats. It is sent "health",
the verdict on its machine, "formed" with its workers in a world, "arrived" and "evicted" for each of them, and
"finished".
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from moe_lightning.elastic.health import NodeHealth, judged
from moe_lightning.elastic.membership import (
    HEARTBEAT_S,
    launcher_of,
    node_of,
    token_of,
)
from moe_lightning.elastic.protocol import Message, WireError

Link = frozenset[str]
"""Two nodes."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts of a member's run, in seconds; see `ElasticSettings`."""

    heartbeat_s: float
    silence_s: float
    start_s: float


@dataclass(kw_only=True)
class Member:
    """State of one member.

    Attributes:
        id: its name.
        timeouts: of its run.
        expected: members that the first world of its run waits for.
        is_local: it runs on the rendezvous host's machine.
        probe: its endpoint for probes; None on one machine.
        last_seen: time of its last message.
        lost_at: time at which its connection ended; None while it has one.
        grace_s: time that it then has to reconnect while others wait.
        joining_since: time of its join; None while it does not wait for a world.
        has_set_up: as it said at its last join: it trains in the next world at once.
        progress: the last count of its steps; -1 if a restarted host does not know it yet.
        multiple: the worlds of its run train in multiples of so many members.
        is_spare: it was notified that it waits until there are enough for a multiple.
        is_done: it has finished the training, and is in no further call of the Trainer.
    """

    id: str
    timeouts: Timeouts
    expected: int = 1
    is_local: bool = False
    probe: tuple[str, int] | None = None
    last_seen: float = 0.0
    lost_at: float | None = None
    grace_s: float = 0.0
    joining_since: float | None = None
    has_set_up: bool = False
    progress: int = 0
    multiple: int = 1
    is_spare: bool = False
    is_done: bool = False

    @property
    def node(self) -> str:
        """Its failure domain."""
        return node_of(self.id)


@dataclass(kw_only=True)
class CurrentWorld:
    """The newest world.

    Attributes:
        number: always grows.
        ids: its members by rank.
        gone: members that left, died or were evicted.
        broken_at: time at which it broke; None while it is intact.
        reason: reason of the break, as one sentence.
        rating: quality of the reason: 1 an error, 2 a failed or silent rank, a dead link, 3 a death seen by a launcher.
        progress_at: time of the last step of any member.
        has_set_up: some of its members had set up before it formed, or may have.
        probes: probe endpoint of each node that has one.
        waiting: newcomers, as its members know them.
        ranks: rank of each member.
    """

    number: int
    ids: tuple[str, ...]
    gone: set[str] = field(default_factory=set)
    broken_at: float | None = None
    reason: str = ""
    rating: int = 0
    progress_at: float = 0.0
    has_set_up: bool = True
    probes: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    waiting: int = 0
    ranks: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.ranks = {member_id: rank for rank, member_id in enumerate(self.ids)}

    def holds(self, member_id: str) -> bool:
        """Return True if a member is in it and not gone."""
        return member_id in self.ranks and member_id not in self.gone

    @property
    def is_over(self) -> bool:
        """True if all its members are gone."""
        return len(self.gone) >= len(self.ids)

    @cached_property
    def formed(self) -> Message:
        """Message to its members, one for all: it is encoded once."""
        about = {"members": self.ids, "probes": dict(self.probes), "has_set_up": self.has_set_up}
        return {"t": "formed", "number": self.number, **about}


def next_world(members: Collection[Member], world: CurrentWorld | None, now: float) -> tuple[str, ...]:
    """Return the ids of the world that can form now, oldest first; empty while members are missing or none waits.

    A world forms when all live members of the last one have joined; the first of a run when all expected ones have, or
    one has waited for `start_s`. All members of the last world are in it, since each may hold state that no other
    does; of the others as many as make it a multiple. With fewer than one multiple all are in it, and keep the state
    until others join.
    """
    joining = [member for member in members if member.joining_since is not None]
    if not joining or any(member.lost_at is not None for member in joining):
        return ()
    if world is not None and any(world.holds(m.id) and m.joining_since is None for m in members):
        return ()
    if world is None:
        first = min(joining, key=lambda member: member.joining_since or 0.0)
        waited = now - (first.joining_since or 0.0)
        if len(joining) < max(m.expected for m in joining) and waited < first.timeouts.start_s:
            return ()
    known = [member.id for member in joining if world is not None and world.holds(member.id)]
    others = sorted({member.id for member in joining}.difference(known))
    whole = _round_to_multiple(joining, len(joining))
    if whole:
        others = others[: max(0, whole - len(known))]
    return tuple(sorted([*known, *others]))


def _round_to_multiple(members: Collection[Member], count: int) -> int:
    """Return `count` rounded down to the largest multiple that these members require."""
    multiple = max(member.multiple for member in members)
    return count // multiple * multiple


def admissible_newcomers(members: Iterable[Member], world: CurrentWorld) -> list[str]:
    """Return the waiting members that a world admits: as many as make it a multiple."""
    waiting = [
        member
        for member in members
        if member.joining_since is not None and member.lost_at is None and member.id not in world.ranks
    ]
    if not waiting:
        return []
    size = len(world.ids) - len(world.gone)
    room = _round_to_multiple(waiting, size + len(waiting)) - size
    return sorted(member.id for member in waiting)[: max(0, room)]


def overdue_members(
    members: Iterable[Member], world: CurrentWorld | None, now: float, *, others_wait: bool
) -> list[tuple[str, str]]:
    """Return members whose timeout is over, each with the reason as the end of a sentence.

    Args:
        others_wait: members wait at the join, so the shortest timeouts apply.
    """
    found = []
    for member in members:
        is_inside = world is not None and world.holds(member.id)
        if (why := _why_overdue(member, world if is_inside else None, now, others_wait=others_wait)) is not None:
            found.append((member.id, why))
    return found


def _why_overdue(member: Member, world: CurrentWorld | None, now: float, *, others_wait: bool) -> str | None:
    timeouts = member.timeouts
    broken_at = world.broken_at if world is not None else None
    if member.lost_at is not None:
        is_awaited = others_wait and (world is None or broken_at is not None)
        since = member.lost_at if broken_at is None else max(member.lost_at, broken_at)
        limit = max(member.grace_s, timeouts.silence_s)
        if is_awaited:
            limit = max(member.grace_s, timeouts.heartbeat_s)
        elif world is not None and broken_at is None:
            since = max(since, world.progress_at)  # the others make steps, so it must be with them
        return "lost its connection and did not come back" if now - since > limit else None
    silent_since = member.last_seen
    if world is not None and broken_at is None:
        silent_since = max(silent_since, world.progress_at)
    if now - silent_since > timeouts.silence_s:
        return f"stopped answering for {timeouts.silence_s:.1f} s"
    return None  # a process that hangs ends itself


def connected_nodes(members: Collection[Member], dead: Collection[Link]) -> set[str]:
    """Return the nodes of these members that stay: one after another, each that reaches all before it.

    First those with the fewest dead links, then those that reach the rendezvous host's machine, then those with the
    most members, then the oldest.
    """
    nodes: dict[str, list[str]] = {}
    for member in members:
        nodes.setdefault(member.node, []).append(member.id)
    of_host = {member.node for member in members if member.is_local}
    unreached: dict[str, set[str]] = {node: set() for node in nodes}
    for one, other in map(tuple, dead):
        unreached[one].add(other)
        unreached[other].add(one)

    def order(node: str) -> tuple[int, bool, int, str]:
        return len(unreached[node]), bool(unreached[node] & of_host), -len(nodes[node]), min(nodes[node])

    staying: set[str] = set()
    for node in sorted(nodes, key=order):
        if not unreached[node] & staying:
            staying.add(node)
    return staying


_DECISION_SHARE = 0.05  # of the silence timeout


def decision_s(silence_s: float) -> float:
    """Return the time from the first report of a dead link to the decision who stays."""
    return _DECISION_SHARE * silence_s


class DeadLinks:
    """Dead links that members of the present world have reported."""

    def __init__(self) -> None:
        self._reports: dict[str, frozenset[str]] = {}  # member -> nodes
        self._decide_at: float | None = None

    def report(self, member: Member, nodes: Collection[str], now: float) -> None:
        """Record all nodes that a member of the present world does not reach."""
        self._reports[member.id] = frozenset(nodes)
        if self._decide_at is None:
            self._decide_at = now + decision_s(member.timeouts.silence_s)

    def forget_reports(self, member_id: str | None = None) -> None:
        """Drop the reports of a member that left the world; without one all reports, since the world ended."""
        if member_id is not None:
            self._reports.pop(member_id, None)
            return
        self._reports.clear()
        self._decide_at = None

    def decide(self, inside: Collection[Member], now: float) -> list[tuple[Member, list[str]]]:
        """Return the members that do not stay, each with the nodes of those that do that it does not reach; none before
        the first report is `decision_s` old.

        Args:
            inside: all members of the present world.
        """
        if self._decide_at is None or now < self._decide_at:
            return []
        nodes = {member.node for member in inside}
        dead = {
            frozenset((member.node, node))
            for member in inside
            for node in self._reports.get(member.id, ())
            if node in nodes and node != member.node
        }
        quiet = [m for m in inside if now - m.last_seen > m.timeouts.silence_s / 2 or m.lost_at is not None]
        silent = {member.node for member in quiet if not member.is_done}
        finished = {member.node for member in quiet if member.is_done}  # may be silent for long
        later = {link for link in dead if link & finished}
        dead -= later
        is_early = any(link & silent for link in dead)
        self._decide_at = None
        if later or is_early:
            self._decide_at = now + decision_s(max(member.timeouts.silence_s for member in inside))
        if is_early:
            # A member that is silent to the host too falls under the silence timeout. When it is heard again the others
            # first have time to withdraw their reports.
            return []
        staying = connected_nodes(inside, dead)
        return [
            (member, sorted(node for node in staying if frozenset((member.node, node)) in dead))
            for member in inside
            if member.node not in staying
        ]


RECONNECT_S = 3.0
"""A client that has lost its connection tries again within this time, if it can."""


def next_number(last: int, wall_clock_s: float) -> int:
    """Return a number above those of all former worlds, also of worlds that a restarted host does not know."""
    return max(last + 1, int(wall_clock_s * 1000))


LONGEST_WORD = 200


def is_text(value: object) -> bool:
    """Return True for a name of valid length."""
    return isinstance(value, str) and len(value) <= LONGEST_WORD


def is_member_id(value: object) -> bool:
    """Return True for a name that `new_member_id` may have made."""
    return is_text(value) and str(value).count(".") >= 2


def parse_timeouts(values: list[Any]) -> Timeouts:
    """Parse the timeouts of a member.

    Raises:
        WireError: they are malformed.
    """
    if len(values) != 3 or not all(type(v) in (int, float) and math.isfinite(v) and v > 0 for v in values):
        raise WireError("malformed timeouts")
    heartbeat_s, silence_s, start_s = map(float, values)
    return Timeouts(heartbeat_s=heartbeat_s, silence_s=silence_s, start_s=start_s)


def parse_multiple(value: object) -> int:
    """Parse the number of members of which worlds are multiples.

    Raises:
        WireError: it is malformed.
    """
    if type(value) is not int or not 0 < value < 2**20:
        raise WireError("a malformed multiple")
    return value


def parse_endpoint(value: Any) -> tuple[str, int] | None:
    """Parse the endpoint for probes of a member; None if it has none.

    Raises:
        WireError: it is malformed.
    """
    match value:
        case None:
            return None
        case [str(host), int(port)] if len(host) <= LONGEST_WORD and 0 < port < 65536:
            return host, port
    raise WireError("a malformed address")


_BEAT: Message = {"t": "beat"}
_LONGEST_REASON = 2000
_MAX_EVICTED = 10_000
_ANSWER_S = 1.0  # of a client that is asked for the members of its world
_RECONNECT_EACH_S = 1e-3  # of a crowd that returns to a restarted host, beyond `RECONNECT_S`
_OUTAGE_S = 2 * HEARTBEAT_S  # without a message of any client: the host itself was cut off

logger = logging.getLogger(__name__)


class Connections:
    """Connections by name, each of which has one at most.

    Attributes:
        names: by connection.
        by_name: connections.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.by_name: dict[str, int] = {}

    def add(self, connection: int, name: str) -> None:
        """Set the connection of a name."""
        self.names[connection], self.by_name[name] = name, connection

    def remove(self, connection: int) -> None:
        """Forget a connection, whose name may have another one by now."""
        name = self.names.pop(connection, None)
        if name is not None and self.by_name.get(name) == connection:
            del self.by_name[name]


class Clients:
    """Connections of members and launchers, and the messages to them.

    Attributes:
        members: by their ids.
        launchers: by their tokens.
        launchers_seen: time of the last message of each launcher, by its token.
        nodes: health of the launchers' machines, as they came.
        outbox: (connection, message) to be sent, in order.
        dropped: connections to be closed.
    """

    def __init__(self) -> None:
        self.members, self.launchers = Connections(), Connections()
        self.launchers_seen: dict[str, float] = {}
        self.nodes: dict[int, NodeHealth] = {}
        self.outbox: list[tuple[int, Message]] = []
        self.dropped: list[int] = []

    def send(self, connection: int, **message: Any) -> None:
        """Queue a message."""
        self.outbox.append((connection, message))

    def send_to(self, ids: Iterable[str], message: Message) -> None:
        """Queue a message for those of these members that are connected."""
        connections = (self.members.by_name.get(member_id) for member_id in ids)
        self.outbox += [(connection, message) for connection in connections if connection is not None]

    def send_to_all(self, message: Message) -> None:
        """Queue a message for all members and launchers."""
        self.outbox += [(connection, message) for connection in (*self.members.names, *self.launchers.names)]

    def send_to_launcher(self, member_id: str, kind: str) -> None:
        """Queue for the launcher of a member, if it is connected, what happened to that."""
        token = token_of(member_id)
        if (connection := self.launchers.by_name.get(launcher_of(token))) is not None:
            self.send(connection, t=kind, token=token)

    def send_workers(self, ids: Iterable[str]) -> None:
        """Queue for every launcher which of its workers are in a world of these members."""
        workers: dict[str, list[str]] = {token: [] for token in self.launchers.by_name}
        for member_id in ids:
            token = token_of(member_id)
            workers.setdefault(launcher_of(token), []).append(token)
        for token, connection in self.launchers.by_name.items():
            self.send(connection, t="formed", tokens=workers[token])


class RendezvousState:
    """State of the rendezvous host. Times are seconds of one clock of the owner.

    Args:
        startup_grace_s: no world forms before; members of the present world report it to a restarted host meanwhile.
        wall_clock_s: seconds since the epoch, for the numbers of worlds.
        ended: number of the last world, in which members have finished the run; 0: none have.

    Attributes:
        world: the newest one; None before the first, or when all its members are gone.
        clients: those that are connected, with the messages to them.
    """

    def __init__(
        self, *, startup_grace_s: float = 0.0, wall_clock_s: Callable[[], float] = time.time, ended: int = 0
    ) -> None:
        self._startup_grace_s, self._wall_clock_s = startup_grace_s, wall_clock_s
        self._members: dict[str, Member] = {}
        self._expected = 0  # members of the largest run that has introduced itself
        self._unknown: dict[int, int] = {}  # connection -> number of its world, which is newer than any known here
        self._asked_at = -math.inf  # for the members of such a world
        self._evicted: dict[str, Message] = {}  # member -> what it was sent, in order of time
        self._last_number = ended
        self._finished = ended  # number of the newest end of the run, see `ClientState.finish`
        self._announced_end = 0  # that clients know
        self._last_received = 0.0
        self._links = DeadLinks()
        self.world: CurrentWorld | None = None
        self.clients = Clients()

    @property
    def missing(self) -> int:
        """Number of members that are expected and not connected."""
        return max(0, self._expected - len(self.clients.members.by_name))

    # ------------------------------------------------------------------ input

    def receive(self, connection: int, message: Message, now: float, *, is_local: bool = False) -> None:
        """Handle a message of a client.

        Args:
            is_local: the client is on this machine.

        Raises:
            WireError: the message is malformed.
        """
        self._exclude_own_outage(now)
        member = self._members.get(self.clients.members.names.get(connection, ""))
        if member is not None:
            member.last_seen = now
        elif (launcher := self.clients.launchers.names.get(connection)) is not None:
            self.clients.launchers_seen[launcher] = now
        match message:
            case {"t": "member"}:
                self._register(connection, message, now, is_local=is_local)
            case {"t": "launcher", "token": str(token), "expected": int(expected)}:
                self._record_end(message.get("finished", 0), message.get("world", 0))
                self._expected = max(self._expected, expected)
                self.clients.launchers.add(connection, token)
                if (health := message.get("health")) is not None:
                    self._judge_node(connection, health)
                self._send_workers_of(connection, token)
            case {"t": "died", "token": str(token), "how": str(how)} if connection in self.clients.launchers.names:
                self._record_death(token, how[:LONGEST_WORD], now)
            case {"t": "beat", "progress": int(progress)}:
                self.clients.outbox.append((connection, _BEAT))
                if member is not None:
                    self._record_progress(member, progress, now)
            case {"t": "alive", "progress": int(progress)}:  # a heartbeat that its launcher has answered
                if member is not None:
                    self._record_progress(member, progress, now)
            case {"t": str(kind)} if member is not None:
                self._receive_from_member(member, kind, message, now)
            case {"t": "join" | "leave" | "broken" | "withdraw" | "unreachable" | "finish" | "begin"}:
                return  # of a member that has been evicted meanwhile
            case _:
                raise WireError(f"a message of an unknown kind: {str(message)[:LONGEST_WORD]}")

    def _receive_from_member(self, member: Member, kind: str, message: Message, now: float) -> None:
        match message:
            case {"t": "join", "ready": bool(is_ready)}:
                member.joining_since = now if member.joining_since is None else member.joining_since
                member.has_set_up = is_ready
                if message.get("spare") is True and self.world is not None and member.id in self.world.ranks:
                    self.world.gone.add(member.id)
            case {"t": "leave"}:
                self._forget(member)
            case {"t": "withdraw", "reason": str(reason)}:
                member.joining_since = None
                if self.world is not None and member.id in self.world.ranks:
                    self.world.gone.add(member.id)
                    self._break(reason[:_LONGEST_REASON], 1, now)
            case {"t": "broken", "number": int(number), "reason": str(reason), "rating": 1 | 2 as rating}:
                if self.world is not None and self.world.number == number:
                    self._break(reason[:_LONGEST_REASON], rating, now)
            case {"t": "unreachable", "number": int(number), "nodes": list(nodes)} if all(map(is_text, nodes)):
                if self.world is not None and self.world.number == number and self.world.broken_at is None:
                    self._links.report(member, nodes, now)
            case {"t": "finish", "number": number}:
                self._record_end(number)
                member.is_done = True
            case {"t": "begin"}:
                member.is_done = False
            case _:
                raise WireError(f"a malformed message of the kind {kind[:LONGEST_WORD]}")

    def restore(self, value: Any, now: float, *, reporter: str = "") -> None:
        """Restore a newer world from its record, or as a member reports it to a restarted host: its members reconnect,
        or are lost.

        Args:
            value: its number, its members and the timeouts of their run; None: there is none.

        Raises:
            WireError: it is malformed.
        """
        if value is None:
            return
        match value:
            case {"number": int(number), "patience": list(timeouts)} if 0 < number < 2**62:
                pass
            case _:
                raise WireError("a malformed world")
        if self._is_known(number):
            return
        match value:
            case {"members": list() | tuple() as ids} if ids and all(map(is_member_id, ids)):
                pass
            case _:
                raise WireError("a malformed world")
        limits = parse_timeouts(timeouts)
        self._last_number = number
        self.world = CurrentWorld(number=number, ids=tuple(ids), progress_at=now)
        grace_s = RECONNECT_S + _RECONNECT_EACH_S * len(ids)
        for member_id in ids:
            if member_id not in self._members and member_id not in self._evicted:
                self._members[member_id] = Member(
                    id=member_id,
                    timeouts=limits,
                    last_seen=now,
                    lost_at=now,
                    grace_s=grace_s,
                    progress=-1,
                )
        for connection, owner in list(self.clients.members.names.items()):
            if owner in self._members and owner != reporter:  # it has missed that this world formed
                self._send_missed(connection, self._members[owner], None, now)

    def lose_launcher(self, launcher: str, how: str, now: float) -> None:
        """Record the death of all workers of a launcher, whose kernel kills them with it."""
        for token in {token_of(member_id) for member_id in self._members}:
            if launcher_of(token) == launcher:
                self._record_death(token, how, now)

    def _send_workers_of(self, connection: int, launcher: str) -> None:
        """Send a launcher that connects which of its workers are in the world: it may have missed that it formed."""
        ids = () if self.world is None else self.world.ids
        tokens = [token for token in map(token_of, ids) if launcher_of(token) == launcher]
        if tokens:
            self.clients.send(connection, t="formed", tokens=tokens)

    def disconnect(self, connection: int, now: float) -> None:
        """Record that a connection has ended."""
        self.clients.launchers.remove(connection)
        self.clients.nodes.pop(connection, None)
        member = self._members.get(self.clients.members.names.get(connection, ""))
        self._unlink(connection)
        if member is not None and self.clients.members.by_name.get(member.id) is None:
            member.lost_at = now

    def _unlink(self, connection: int) -> None:
        """Remove a connection of a member."""
        self._unknown.pop(connection, None)
        self.clients.members.remove(connection)

    def tick(self, now: float) -> None:
        """Make the decisions that are due; call it after all input is handled."""
        if now - self._last_received <= _OUTAGE_S:
            self._evict_overdue(now)
            self._decide_on_links(now)
        if self.world is not None and self.world.is_over:
            self.world = None
        self._ask_for_world(now)
        is_asking = bool(self._unknown) or now - self._asked_at <= _ANSWER_S
        if now >= self._startup_grace_s and not is_asking:
            ids = next_world(self._members.values(), self.world, now)
            if ids:
                self._form(ids, now)
        self._announce_newcomers()
        if self._finished != self._announced_end:
            self._announced_end = self._finished
            self.clients.send_to_all({"t": "finished", "finished": self._finished, "world": self._last_number})

    def _judge_node(self, connection: int, health: Any) -> None:
        """Compare a launcher's node with the others, and answer whether it may join."""
        try:
            offset_s = float(health["time_s"]) - self._wall_clock_s()
            self.clients.nodes[connection] = replace(NodeHealth.parse(health), clock_offset_s=offset_s)
        except (ValueError, TypeError, LookupError):
            raise WireError("malformed health") from None
        for launcher, node in judged(self.clients.nodes, connection, all_may_leave=self.world is None).items():
            self.clients.send(launcher, t="health", refused=node.refused, clock_offset_s=node.clock_offset_s)
            if node.refused:
                del self.clients.nodes[launcher]

    def _exclude_own_outage(self, now: float) -> None:
        """Exclude an outage of the host itself from all timeouts: it received nothing from any client."""
        gap, self._last_received = now - self._last_received, now
        if gap <= _OUTAGE_S:
            return
        for member in self._members.values():
            member.last_seen += gap
            member.lost_at = None if member.lost_at is None else member.lost_at + gap
        seen = self.clients.launchers_seen
        seen.update({launcher: at + gap for launcher, at in seen.items()})

    def _evict_overdue(self, now: float) -> None:
        others_wait = any(member.joining_since is not None for member in self._members.values())
        for member_id, why in overdue_members(self._members.values(), self.world, now, others_wait=others_wait):
            if not self._may_be_silent(self._members[member_id], now):
                self._evict(self._members[member_id], f"{self._describe(member_id)} {why}", now)

    def _may_be_silent(self, member: Member, now: float) -> bool:
        """Return True for a connected member that has finished the training, as long as its launcher is heard: an
        export may hold Python's lock, and the launcher reports how its process ends.
        """
        seen = self.clients.launchers_seen.get(launcher_of(token_of(member.id)), -math.inf)
        return member.is_done and member.lost_at is None and now - seen <= member.timeouts.silence_s

    # ------------------------------------------------------------------ members

    def _ask_for_world(self, now: float) -> None:
        """Let one after another of those that know a newer world introduce itself with its members, until one does;
        then the others without.
        """
        for connection, number in list(self._unknown.items()):
            if self._is_known(number):
                del self._unknown[connection]
                self.clients.send(connection, t="introduce", full=False)
        if self._unknown and now - self._asked_at > _ANSWER_S:
            asked = max(self._unknown, key=self._unknown.__getitem__)
            del self._unknown[asked]
            self._asked_at = now
            self.clients.send(asked, t="introduce", full=True)

    def _is_known(self, number: int) -> bool:
        """Return True if a world is the present one, or older."""
        return (self.world is not None and self.world.number >= number) or number < self._last_number

    def _register(self, connection: int, message: Message, now: float, *, is_local: bool) -> None:
        """Register a member, for the first time, under a new name, or on a new connection."""
        match message:
            case {
                "id": str(member_id), "expected": int(expected), "patience": list(timeouts), "probe": probe,
                "joining": bool(joins), "ready": bool(is_ready), "number": int(number), "world": world,
            } if is_member_id(member_id) and 0 <= number < 2**62:  # fmt: skip
                pass
            case _:
                raise WireError("a malformed introduction")
        self._last_number = max(self._last_number, number)
        self._record_end(message.get("finished", 0))
        self._unknown.pop(connection, None)
        match world:
            case {"number": int(reported)} if "members" not in world and not self._is_known(reported):
                self._unknown[connection] = reported
                return
        older = self.clients.members.by_name.get(member_id)
        if older is not None and older != connection:
            self._unlink(older)
            self.clients.dropped.append(older)
        self._unlink(connection)  # of the member under its former name
        self.clients.members.add(connection, member_id)
        self._expected = max(self._expected, expected)
        self.restore(world, now, reporter=member_id)
        exists = self.world is not None and not self.world.is_over
        self.clients.send(connection, t="state", finished=self._finished, exists=exists)
        if (evicted := self._eviction(member_id, world)) is not None:
            self._evicted[member_id] = evicted
            self.clients.outbox.append((connection, evicted))
            if message.get("done") is True:  # it joins no more, but is alive
                self.clients.send_to_launcher(member_id, "arrived")
            return
        member = self._members.get(member_id)
        if member is None:
            member = self._members[member_id] = Member(id=member_id, timeouts=parse_timeouts(timeouts))
        member.timeouts, member.expected = parse_timeouts(timeouts), expected
        member.multiple = parse_multiple(message.get("multiple", 1))
        member.probe, member.is_local, member.last_seen, member.lost_at = parse_endpoint(probe), is_local, now, None
        member.grace_s = 0.0
        if joins:
            member.joining_since = now if member.joining_since is None else member.joining_since
        member.has_set_up, member.is_done = is_ready, message.get("done") is True
        self.clients.send_to_launcher(member_id, "arrived")
        self._send_missed(connection, member, world, now)

    def _eviction(self, member_id: str, reported: Any) -> Message | None:
        """Return the message to a member that registers and is evicted; None if it is admitted."""
        if member_id in self._evicted:
            return self._evicted[member_id]
        world = self.world
        if reported is None:
            return None
        if world is None:
            was_left = self._finished > 0 and reported["number"] < self._last_number
        else:
            was_left = reported["number"] < world.number and member_id not in world.ranks
        return _evicted("the others continued without this process") if was_left else None

    def _send_missed(self, connection: int, member: Member, reported: Any, now: float) -> None:
        """Send what a member may have missed while it had no connection."""
        world = self.world
        if world is None or member.id not in world.ranks:
            return
        if reported is None or reported["number"] < world.number:
            member.joining_since = None
            self.clients.outbox.append((connection, world.formed))
        elif reported.get("broken") and reported["number"] == world.number:
            self._break(str(reported["broken"])[:_LONGEST_REASON], 1, now)
        if world.broken_at is not None:
            self.clients.send(connection, **_broken(world))
        else:
            self.clients.send(connection, t="waiting", count=world.waiting)

    def _forget(self, member: Member) -> None:
        """Remove a member that leaves in order: its world goes on without it."""
        self._members.pop(member.id, None)
        if self.world is not None and member.id in self.world.ranks:
            self.world.gone.add(member.id)
        if (connection := self.clients.members.by_name.get(member.id)) is not None:
            self._unlink(connection)

    def _evict(self, member: Member, reason: str, now: float, unreached: Iterable[str] = ()) -> None:
        """Evict a member, which may register again under another name.

        Args:
            unreached: nodes that should answer its probes before.
        """
        world = self.world
        if world is not None and world.holds(member.id):
            world.gone.add(member.id)
            self._break(reason, 2, now)
        self._members.pop(member.id, None)
        self._links.forget_reports(member.id)
        probes = {} if world is None else {node: world.probes[node] for node in unreached if node in world.probes}
        self._evicted[member.id] = _evicted(reason, probes)
        while len(self._evicted) > _MAX_EVICTED:
            del self._evicted[next(iter(self._evicted))]
        self.clients.send_to([member.id], self._evicted[member.id])
        # One with dead links is alive, and registers later than its launcher waits for one that may hang; one that has
        # finished may export, and does not register again.
        if not probes and not member.is_done:
            self.clients.send_to_launcher(member.id, "evicted")

    def _record_death(self, token: str, how: str, now: float) -> None:
        """Record the end of a process that a launcher saw; this reason replaces errors of survivors."""
        end = f".{token}"
        for member_id in [m for m in self._members if m.endswith(end)]:
            self._forget(self._members[member_id])
        for member_id in self.world.ids if self.world is not None else ():
            if member_id.endswith(end):
                assert self.world is not None
                self.world.gone.add(member_id)
                self._break(f"{self._describe(member_id)} {how}", 3, now)

    def _record_progress(self, member: Member, progress: int, now: float) -> None:
        if progress != member.progress >= 0 and self.world is not None and self.world.holds(member.id):
            self.world.progress_at = now
        member.progress = progress

    # ------------------------------------------------------------------ worlds

    def _record_end(self, number: object, world: object = 0) -> None:
        """Record an end of the run; 0: none. Clients repeat it to a host that was restarted or elected since.

        Args:
            number: of the end.
            world: number of the newest world then.
        """
        if type(number) is not int or type(world) is not int or not (0 <= number < 2**62 and 0 <= world < 2**62):
            raise WireError("a malformed number of a finished world")
        self._finished, self._last_number = max(self._finished, number), max(self._last_number, world)

    def _form(self, ids: tuple[str, ...], now: float) -> None:
        self._last_number = next_number(max(self._last_number, self._finished), self._wall_clock_s())
        has_set_up = any(self._members[member_id].has_set_up for member_id in ids)
        members = [self._members[member_id] for member_id in ids]
        self.world = CurrentWorld(
            number=self._last_number,
            ids=ids,
            progress_at=now,
            has_set_up=has_set_up,
            probes={m.node: m.probe for m in members if m.probe is not None},  # one for each node
        )
        self._links.forget_reports()
        for member in members:
            member.joining_since, member.is_spare = None, False
        self.clients.send_to(ids, self.world.formed)
        self.clients.send_workers(ids)

    def _break(self, reason: str, rating: int, now: float) -> None:
        """Break the world, or record a better reason for its break."""
        world = self.world
        assert world is not None
        if world.broken_at is not None and rating <= world.rating:
            return
        world.broken_at = now if world.broken_at is None else world.broken_at
        world.reason, world.rating = reason, rating
        self._links.forget_reports()
        self.clients.send_to(world.ids, _broken(world))

    def _describe(self, member_id: str) -> str:
        """Describe a member by rank and node."""
        world = self.world
        rank = f"rank {world.ranks[member_id]}" if world is not None and member_id in world.ranks else "a rank"
        return f"{rank} on node {node_of(member_id)}"

    # ------------------------------------------------------------------ links

    def _decide_on_links(self, now: float) -> None:
        """Evict the members that do not stay, `decision_s` after the first report."""
        world = self.world
        if world is None or world.broken_at is not None:
            return
        for member, nodes in self._links.decide([m for m in self._members.values() if world.holds(m.id)], now):
            reason = (
                f"{self._describe(member.id)} was left out: the link between nodes {member.node} and "
                f"{', '.join(nodes)} is dead, though both reach the rendezvous host"
            )
            self._evict(member, reason, now, nodes)

    def _announce_newcomers(self) -> None:
        """Send the present world the number of newcomers, and those that it does not admit that they are spare."""
        world = self.world
        if world is None or world.broken_at is not None:
            return
        waiting = admissible_newcomers(self._members.values(), world)
        admitted = {*waiting, *world.ranks}
        for member in self._members.values():
            if member.joining_since is not None and member.id not in admitted and not member.is_spare:
                member.is_spare = True
                self.clients.send_to([member.id], {"t": "spare"})
        if len(waiting) != world.waiting:
            world.waiting = len(waiting)
            self.clients.send_to(world.ids, {"t": "waiting", "count": len(waiting)})


def _evicted(reason: str, probes: Mapping[str, tuple[str, int]] | None = None) -> Message:
    return {"t": "evicted", "reason": reason, "probes": dict(probes or {})}


def _broken(world: CurrentWorld) -> Message:
    return {"t": "broken", "number": world.number, "reason": world.reason, "rating": world.rating}
