"""State machine of the rendezvous service, without sockets.

Which members form the next world, whom nobody waits for any more, and who goes on where links are dead: pure
decisions on what the rendezvous host knows, with times as its own clock counts them.

Links between nodes that are dead though both ends reach the rendezvous host: reports of them, and who stays out.

Whether what others say of themselves is what it should be.

What the rendezvous host knows, as a state machine without sockets: messages and time in, messages out.

It knows who is there and which world is the newest; it forms worlds, says when one breaks and why, and lets newcomers
knock. All that it knows can be learned again from the members, so a host that is started anew goes on with their
world. Messages are dictionaries with a kind "t"; `Roster.receive` lists those of clients.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_lightning.elastic.membership import BEAT_S, may_hang_s, node_of, token_of
from moe_lightning.elastic.protocol import Message, WireError

Link = frozenset[str]
"""Two nodes."""

RECONNECT_S = 3.0
"""A client that has lost its connection tries again within this time, if it can."""

_EXACT_CONFLICTS = 16  # nodes with dead links up to which the largest part is found exactly
_HANG_MARGIN_S = 2.0  # who hangs ends itself first


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a member's run waits, in seconds; see `ElasticSettings`."""

    heartbeat_s: float
    silence_s: float
    hang_s: float
    start_s: float


@dataclass(kw_only=True)
class Member:
    """What is known of one member.

    Attributes:
        id: its name.
        patience: of its run.
        expected: members that the first world of its run waits for.
        is_local: it runs on the rendezvous host's machine.
        probe: where its links are tried; None on one machine.
        heard_at: when it last said anything.
        lost_at: when its connection ended; None while it has one.
        grace_s: how long it may then take to come back while others wait.
        joining_since: when it came to the join; None while it does not wait for a world.
        has_set_up: it has been in a world, or goes on with training in the next one at once.
        progress: the last count of its steps that it has told.
        kept_out_of: number of the world that it was told not to reach all members of.
        multiple: the worlds of its run train in multiples of so many members.
        is_spare: it was told that it waits until there are enough for a multiple.
    """

    id: str
    patience: Patience
    expected: int = 1
    is_local: bool = False
    probe: tuple[str, int] | None = None
    heard_at: float = 0.0
    lost_at: float | None = None
    grace_s: float = 0.0
    joining_since: float | None = None
    has_set_up: bool = False
    progress: int = 0
    kept_out_of: int = 0
    multiple: int = 1
    is_spare: bool = False

    @property
    def node(self) -> str:
        """Its failure domain."""
        return node_of(self.id)


@dataclass(kw_only=True)
class StandingWorld:
    """The newest world.

    Attributes:
        number: grows for ever.
        ids: its members by rank.
        gone: those that left, died or were expelled.
        broken_at: when it broke; None while it holds.
        reason: why, as one sentence.
        rating: how much the reason says: 1 an error that a rank felt, 2 silence or a dead link, 3 a launcher's word.
        progress_at: when any member last made a step.
        has_settled: some of its members had set up before it formed, or may have.
    """

    number: int
    ids: tuple[str, ...]
    gone: set[str] = field(default_factory=set)
    broken_at: float | None = None
    reason: str = ""
    rating: int = 0
    progress_at: float = 0.0
    has_settled: bool = True

    def holds(self, member_id: str) -> bool:
        """Whether somebody is in it and not gone."""
        return member_id in self.ids and member_id not in self.gone

    @property
    def is_over(self) -> bool:
        """Whether nobody is left of it."""
        return len(self.gone) >= len(self.ids)


def next_number(last: int, wall_clock_s: float) -> int:
    """A world's number: above all former ones, also those of a host that forgot them when it was started again."""
    return max(last + 1, int(wall_clock_s * 1000))


def next_world(
    members: Collection[Member], world: StandingWorld | None, dead: Collection[Link], now: float
) -> tuple[str, ...]:
    """The ids of the world that can form now, oldest first; empty where somebody is waited for or nobody waits.

    A world forms when everybody has come who is alive and was in the last one; the first of a run when all that are
    expected have come, or the first has waited for `start_s`. Those of the last world are all in it, since each may
    hold what no other does; of the others as many as make it a multiple. Where there are fewer than one multiple, all
    are: they hold the state until others come.
    """
    joining = [member for member in members if member.joining_since is not None]
    if not joining or any(member.lost_at is not None for member in joining):
        return ()
    if world is not None and any(world.holds(m.id) and m.joining_since is None for m in members):
        return ()
    chosen = hearing_members(joining, dead)
    if world is None:
        first = min(joining, key=lambda member: member.joining_since or 0.0)
        waited = now - (first.joining_since or 0.0)
        if len(chosen) < max(m.expected for m in chosen) and waited < first.patience.start_s:
            return ()
    known = [member for member in chosen if world is not None and world.holds(member.id)]
    others = sorted((member for member in chosen if member not in known), key=lambda member: member.id)
    whole = _whole(chosen, len(chosen))
    if whole:
        others = others[: max(0, whole - len(known))]
    return tuple(sorted(member.id for member in (*known, *others)))


def _whole(members: Collection[Member], count: int) -> int:
    """How many of `count` train, where these members say of what they train in multiples."""
    multiple = max(member.multiple for member in members)
    return count // multiple * multiple


def waiting_newcomers(members: Iterable[Member], world: StandingWorld, dead: Collection[Link]) -> list[str]:
    """Who waits to be let into a standing world and reaches all its members, as far as they make it a multiple."""
    ids = [member_id for member_id in world.ids if world.holds(member_id)]
    inside = {node_of(member_id) for member_id in ids}
    waiting = [
        member
        for member in members
        if member.joining_since is not None
        and member.lost_at is None
        and member.id not in world.ids
        and not links_between(member.node, inside, dead)
    ]
    if not waiting:
        return []
    room = _whole(waiting, len(ids) + len(waiting)) - len(ids)
    return sorted(member.id for member in waiting)[: max(0, room)]


def links_between(node: str, others: Iterable[str], dead: Collection[Link]) -> list[str]:
    """The nodes that a node does not reach."""
    return sorted(other for other in set(others) if frozenset((node, other)) in dead) if dead else []


def overdue(
    members: Iterable[Member], world: StandingWorld | None, now: float, *, others_wait: bool
) -> list[tuple[str, str]]:
    """Members that nobody waits for any more, with a sentence's end that says why.

    Args:
        others_wait: somebody waits at the join, so every moment counts.
    """
    found = []
    for member in members:
        is_inside = world is not None and world.holds(member.id)
        if (why := _why_overdue(member, world if is_inside else None, now, others_wait=others_wait)) is not None:
            found.append((member.id, why))
    return found


def _why_overdue(member: Member, world: StandingWorld | None, now: float, *, others_wait: bool) -> str | None:
    patience = member.patience
    broken_at = world.broken_at if world is not None else None
    if member.lost_at is not None:
        is_awaited = others_wait and (world is None or broken_at is not None)
        since, limit = max(member.lost_at, broken_at or 0.0), max(member.grace_s, patience.silence_s)
        if is_awaited:
            limit = max(member.grace_s, patience.heartbeat_s)
        elif world is not None and broken_at is None:
            since = max(since, world.progress_at)  # the others step on: it must be with them
        return "lost its connection and did not come back" if now - since > limit else None
    silent_since = member.heard_at
    if world is not None and broken_at is None:
        silent_since = max(silent_since, world.progress_at)
    if now - silent_since > patience.silence_s:
        return f"stopped answering for {patience.silence_s:.1f} s"
    hang_s = may_hang_s(patience.hang_s, patience.start_s, member.progress)
    if broken_at is not None and member.joining_since is None and now - broken_at > hang_s + _HANG_MARGIN_S:
        return f"did not come back within {hang_s:g} s after its world broke"
    return None


def hearing_members(members: Collection[Member], dead: Collection[Link]) -> list[Member]:
    """The members of the nodes that go on where some links between nodes are dead."""
    if not dead:
        return list(members)
    facts: dict[str, NodeFacts] = {}
    for member in members:
        known = facts.get(member.node)
        facts[member.node] = NodeFacts(
            members=1 + (known.members if known else 0),
            is_local=member.is_local or (known is not None and known.is_local),
            oldest=min(member.id, known.oldest) if known else member.id,
        )
    nodes = hearing_part(facts, dead)
    return [member for member in members if member.node in nodes]


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What decides between nodes that do not hear each other.

    Attributes:
        members: how many run there.
        is_local: the rendezvous host's machine.
        oldest: the id of its oldest member.
    """

    members: int
    is_local: bool
    oldest: str


def hearing_part(facts: Mapping[str, NodeFacts], dead: Collection[Link]) -> frozenset[str]:
    """The largest set of nodes that all hear each other; among equals the one with the rendezvous host's machine, then
    with more members, then with the oldest one.

    Exact for up to 16 nodes that have a dead link; beyond, the node with the most dead links stays out until none is
    left.
    """
    heard = frozenset(facts)
    enemies = {node: frozenset(n for link in dead if node in link for n in link if n != node) & heard for node in heard}
    exact = sum(bool(others) for others in enemies.values()) <= _EXACT_CONFLICTS
    return _largest(heard, enemies, facts, exact=exact)


def _largest(
    nodes: frozenset[str], enemies: Mapping[str, frozenset[str]], facts: Mapping[str, NodeFacts], *, exact: bool
) -> frozenset[str]:
    """Either the node with the most enemies stays out, or all its enemies do."""

    def importance(node: str) -> tuple[int, bool, int]:
        return len(enemies[node] & nodes), not facts[node].is_local, -facts[node].members

    worst = max(sorted(nodes, key=lambda node: facts[node].oldest), key=importance, default=None)
    if worst is None or not enemies[worst] & nodes:
        return nodes
    without = _largest(nodes - {worst}, enemies, facts, exact=exact)
    if not exact:
        return without
    alone = _largest(nodes - enemies[worst], enemies, facts, exact=exact)
    return max(without, alone, key=lambda part: _worth(part, facts))


def _worth(part: frozenset[str], facts: Mapping[str, NodeFacts]) -> tuple[int, bool, int, list[int]]:
    everybody = sorted(fact.oldest for fact in facts.values())
    return (
        len(part),
        any(facts[node].is_local for node in part),
        sum(facts[node].members for node in part),
        [-everybody.index(oldest) for oldest in sorted(facts[node].oldest for node in part)],
    )


_DECISION_SHARE = 0.05  # of the silence timeout


def decision_s(silence_s: float) -> float:
    """How long after the first report of a dead link it is decided who goes on."""
    return _DECISION_SHARE * silence_s


class DeadLinks:
    """What members of the standing world have reported, and what is remembered of former worlds.

    Attributes:
        known: links that are dead until one of the two nodes reaches the other.
    """

    def __init__(self) -> None:
        self.known: set[Link] = set()
        self._reports: dict[str, frozenset[str]] = {}  # member -> nodes
        self._decide_at: float | None = None

    def report(self, member: Member, nodes: Collection[str], now: float) -> None:
        """A member of the standing world does not hear these nodes, and no others."""
        self._reports[member.id] = frozenset(nodes)
        if self._decide_at is None:
            self._decide_at = now + decision_s(member.patience.silence_s)

    def mend(self, node: str, others: Iterable[str]) -> None:
        """A node reaches others again."""
        self.known -= {frozenset((node, other)) for other in others}

    def forget_reports(self, member_id: str | None = None) -> None:
        """A member is out of the world, or without one the world has ended."""
        if member_id is not None:
            self._reports.pop(member_id, None)
            return
        self._reports.clear()
        self._decide_at = None

    def decide(self, inside: Collection[Member], now: float) -> list[tuple[Member, str]]:
        """The members that do not hear the larger part, with the links they lack as a sentence's end; nobody before
        the first report is some moments old.

        Args:
            inside: all members of the standing world.
        """
        if self._decide_at is None or now < self._decide_at:
            return []
        nodes = {member.node for member in inside}
        dead = {
            frozenset((node_of(reporter), node))
            for reporter, others in self._reports.items()
            for node in others & nodes
            if node != node_of(reporter)
        }
        silent = {m.node for m in inside if now - m.heard_at > m.patience.silence_s / 2 or m.lost_at is not None}
        if any(link & silent for link in dead):
            return []  # a member that the host does not hear either is judged by its silence
        self._decide_at = None
        staying = {member.id for member in hearing_members(inside, dead)}
        self.known |= dead
        near = {node_of(member_id) for member_id in staying}
        leaving = [member for member in inside if member.id not in staying]
        return [(member, words_for(member.node, links_between(member.node, near, dead))) for member in leaving]


def words_for(node: str, others: Iterable[str]) -> str:
    """What is said of a node's dead links."""
    names = ", ".join(others)
    return f"the link between nodes {node} and {names} is dead, though both reach the rendezvous host"


LONGEST_WORD = 200


def is_text(value: object) -> bool:
    """A name of a length that names have."""
    return isinstance(value, str) and len(value) <= LONGEST_WORD


def is_member_id(value: object) -> bool:
    """A name that `new_member_id` may have made."""
    return is_text(value) and str(value).count(".") >= 2


def parse_patience(values: list[Any]) -> Patience:
    """Times that a member tells.

    Raises:
        WireError: they are none.
    """
    if len(values) != 4 or not all(type(v) in (int, float) and math.isfinite(v) and v > 0 for v in values):
        raise WireError("malformed timeouts")
    return Patience(**dict(zip(("heartbeat_s", "silence_s", "hang_s", "start_s"), map(float, values), strict=True)))


def parse_multiple(said: object) -> int:
    """Of how many members worlds are multiples, as a member tells.

    Raises:
        WireError: it is no such number.
    """
    if type(said) is not int or not 0 < said < 2**20:
        raise WireError("a malformed multiple")
    return said


def parse_endpoint(said: Any) -> tuple[str, int] | None:
    """Where a member can be probed; None where it cannot.

    Raises:
        WireError: it is no address.
    """
    match said:
        case None:
            return None
        case [str(host), int(port)] if len(host) <= LONGEST_WORD and 0 < port < 65536:
            return host, port
    raise WireError("a malformed address")


_LONGEST_REASON = 2000
_MOST_EXPELLED = 10_000
_DEAF_S = 2 * BEAT_S  # without a word of anybody at all

logger = logging.getLogger(__name__)


class Roster:
    """See the top of the file. Times are seconds of one clock of the owner's.

    Args:
        settle_s: no world forms before; a host that was started anew gives the members of a standing world so long to
            tell it.
        wall_clock_s: seconds since the epoch, for the numbers of worlds.

    Attributes:
        world: the newest one, None before the first or when nobody is left of it.
        outbox: (connection, message) to be sent, in order.
        dropped: connections to be closed.
    """

    def __init__(self, *, settle_s: float = 0.0, wall_clock_s: Callable[[], float] = time.time) -> None:
        self._settle_s, self._wall_clock_s = settle_s, wall_clock_s
        self._members: dict[str, Member] = {}
        self._connections: dict[int, str] = {}  # connection -> member
        self._launchers: set[int] = set()
        self._expelled: dict[str, str] = {}  # member -> why, in order of time
        self._last_number = 0
        self._finished = 0
        self._waiting = 0  # newcomers, as the members were told
        self._heard_at = 0.0
        self._links = DeadLinks()
        self.world: StandingWorld | None = None
        self.outbox: list[tuple[int, Message]] = []
        self.dropped: list[int] = []

    # ------------------------------------------------------------------ input

    def receive(self, connection: int, message: Message, now: float, *, is_local: bool = False) -> None:
        """Take in what a client says.

        Args:
            is_local: the client is on this machine.

        Raises:
            WireError: the message is none of ours.
        """
        self._hear_again(now)
        member = self._members.get(self._connections.get(connection, ""))
        if member is not None:
            member.heard_at = now
        match message:
            case {"t": "member"}:
                self._register(connection, message, now, is_local=is_local)
            case {"t": "launcher"}:
                self._launchers.add(connection)
            case {"t": "died", "token": str(token), "how": str(how)} if connection in self._launchers:
                self._take_death(token, how[:LONGEST_WORD], now)
            case {"t": "beat", "progress": int(progress)}:
                self._send(connection, t="beat")
                if member is not None:
                    self._take_progress(member, progress, now)
            case {"t": "sync", "n": int(number)}:
                exists = self.world is not None and not self.world.is_over
                self._send(connection, t="synced", n=number, exists=exists, finished=self._finished)
            case {"t": str(kind)} if member is not None:
                self._receive_from_member(member, kind, message, now)
            case {"t": "join" | "leave" | "broken" | "withdraw" | "unreachable" | "reachable" | "finish"}:
                return  # of a member that has been expelled meanwhile
            case _:
                raise WireError(f"a message of an unknown kind: {str(message)[:LONGEST_WORD]}")

    def _receive_from_member(self, member: Member, kind: str, message: Message, now: float) -> None:
        match message:
            case {"t": "join", "ready": bool(is_ready)}:
                member.joining_since = now if member.joining_since is None else member.joining_since
                member.has_set_up |= is_ready
                member.multiple = parse_multiple(message.get("multiple", 1))
                if message.get("spare") is True and self.world is not None and member.id in self.world.ids:
                    self.world.gone.add(member.id)
            case {"t": "leave"}:
                self._forget(member)
            case {"t": "withdraw", "reason": str(reason)}:
                member.joining_since = None
                if self.world is not None and member.id in self.world.ids:
                    self.world.gone.add(member.id)
                    self._break(reason[:_LONGEST_REASON], 1, now)
            case {"t": "broken", "number": int(number), "reason": str(reason)}:
                if self.world is not None and self.world.number == number:
                    self._break(reason[:_LONGEST_REASON], 1, now)
            case {"t": "unreachable", "number": int(number), "nodes": list(nodes)} if all(map(is_text, nodes)):
                if self.world is not None and self.world.number == number and self.world.broken_at is None:
                    self._links.report(member, nodes, now)
            case {"t": "reachable", "nodes": list(nodes)} if all(map(is_text, nodes)):
                self._links.mend(member.node, nodes)
            case {"t": "finish"}:
                self._finished += 1
                for connection in [*self._connections, *self._launchers]:
                    self._send(connection, t="finished", finished=self._finished)
            case _:
                raise WireError(f"a malformed message of the kind {kind[:LONGEST_WORD]}")

    def disconnect(self, connection: int, now: float) -> None:
        """A connection has ended."""
        self._launchers.discard(connection)
        member = self._members.get(self._connections.pop(connection, ""))
        if member is not None and member.id not in self._connections.values():
            member.lost_at = now

    def tick(self, now: float) -> None:
        """Decide what is due; after all input that has come is taken in."""
        if now - self._heard_at <= _DEAF_S:
            self._expel_overdue(now)
            self._decide_on_links(now)
        if self.world is not None and self.world.is_over:
            self.world = None
            self._links.known.clear()
        if now >= self._settle_s:
            ids = next_world(self._members.values(), self.world, self._links.known, now)
            if ids:
                self._form(ids, now)
        self._tell_of_newcomers()

    def _hear_again(self, now: float) -> None:
        """A host that heard nobody at all was cut off itself: no time has passed for those it could not hear."""
        gap, self._heard_at = now - self._heard_at, now
        if gap <= _DEAF_S:
            return
        for member in self._members.values():
            member.heard_at += gap
            member.lost_at = None if member.lost_at is None else member.lost_at + gap

    def _expel_overdue(self, now: float) -> None:
        others_wait = any(member.joining_since is not None for member in self._members.values())
        for member_id, why in overdue(self._members.values(), self.world, now, others_wait=others_wait):
            self._expel(self._members[member_id], f"{self._called(member_id)} {why}", 2, now)

    # ------------------------------------------------------------------ members

    def _register(self, connection: int, message: Message, now: float, *, is_local: bool) -> None:
        """A member introduces itself, for the first time, under a new name, or on a new connection."""
        match message:
            case {
                "id": str(member_id), "expected": int(expected), "patience": list(patience), "probe": probe,
                "joining": bool(joins), "ready": bool(is_ready), "number": int(number), "world": world,
            } if is_member_id(member_id) and 0 <= number < 2**62:  # fmt: skip
                pass
            case _:
                raise WireError("a malformed introduction")
        self._last_number = max(self._last_number, number)
        self._connections[connection] = member_id
        for older in [c for c, owner in self._connections.items() if owner == member_id and c != connection]:
            del self._connections[older]
            self.dropped.append(older)
        self._learn_world(world, member_id, now)
        self._send(connection, t="state", finished=self._finished)
        if (why := self._is_out(member_id, world)) is not None:
            self._expelled[member_id] = why
            self._send(connection, t="expelled", reason=why)
            return
        member = self._members.get(member_id)
        if member is None:
            member = self._members[member_id] = Member(id=member_id, patience=parse_patience(patience))
        member.patience, member.expected = parse_patience(patience), expected
        member.multiple = parse_multiple(message.get("multiple", 1))
        member.probe, member.is_local, member.heard_at, member.lost_at = parse_endpoint(probe), is_local, now, None
        member.grace_s = 0.0
        if joins:
            member.joining_since = now if member.joining_since is None else member.joining_since
        member.has_set_up |= is_ready or (world is not None and bool(world))
        self._tell_launchers(t="arrived", token=token_of(member_id))
        self._bring_up_to_date(connection, member, world, now)

    def _learn_world(self, said: Any, teller: str, now: float) -> None:
        """A member may know of a newer world than a host that was started anew: its members come back, or are lost."""
        if said is None:
            return
        match said:
            case {"number": int(number), "ids": list(ids), "patience": list(patience)} if (
                0 < number < 2**62 and ids and all(map(is_member_id, ids))
            ):
                pass
            case _:
                raise WireError("a malformed world")
        if (self.world is not None and self.world.number >= number) or number < self._last_number:
            return
        self._last_number = number
        self.world = StandingWorld(number=number, ids=tuple(ids), progress_at=now)
        self._waiting = 0
        for member_id in ids:
            if member_id not in self._members and member_id not in self._expelled:
                self._members[member_id] = Member(
                    id=member_id, patience=parse_patience(patience), heard_at=now, lost_at=now, grace_s=RECONNECT_S
                )
        for connection, owner in list(self._connections.items()):
            if owner in self._members and owner != teller:  # one that has not heard that this world was formed
                self._bring_up_to_date(connection, self._members[owner], None, now)

    def _is_out(self, member_id: str, said: Any) -> str | None:
        """Why a member that introduces itself is none any more; None for a welcome one."""
        if member_id in self._expelled:
            return self._expelled[member_id]
        world = self.world
        if said is None or world is None or said["number"] >= world.number or member_id in world.ids:
            return None
        return "the others went on without this process"

    def _bring_up_to_date(self, connection: int, member: Member, said: Any, now: float) -> None:
        """What a member may have missed while it had no connection."""
        world = self.world
        if world is None or member.id not in world.ids:
            return
        if said is None or said["number"] < world.number:
            member.joining_since = None
            self._send(connection, **self._formed(world))
        elif said.get("broken") and said["number"] == world.number:
            self._break(str(said["broken"])[:_LONGEST_REASON], 1, now)
        if world.broken_at is not None:
            self._send(connection, **_broken(world))
        else:
            self._send(connection, t="waiting", count=self._waiting)

    def _forget(self, member: Member) -> None:
        """A member leaves as it should: its world goes on to its end without it."""
        self._members.pop(member.id, None)
        if self.world is not None and member.id in self.world.ids:
            self.world.gone.add(member.id)
        for connection in [c for c, owner in self._connections.items() if owner == member.id]:
            del self._connections[connection]

    def _expel(self, member: Member, reason: str, rating: int, now: float) -> None:
        """The others go on without a member, which may come back under another name."""
        world = self.world
        if world is not None and world.holds(member.id):
            world.gone.add(member.id)
            self._break(reason, rating, now)
        self._members.pop(member.id, None)
        self._links.forget_reports(member.id)
        self._expelled[member.id] = reason
        while len(self._expelled) > _MOST_EXPELLED:
            del self._expelled[next(iter(self._expelled))]
        for connection, owner in self._connections.items():
            if owner == member.id:
                self._send(connection, t="expelled", reason=reason)
        self._tell_launchers(t="expelled", token=token_of(member.id))

    def _take_death(self, token: str, how: str, now: float) -> None:
        """A launcher saw a process end; its word is better than what the survivors felt."""
        for member_id in [m for m in self._members if token_of(m) == token]:
            self._forget(self._members[member_id])
        for member_id in self.world.ids if self.world is not None else ():
            if token_of(member_id) == token:
                assert self.world is not None
                self.world.gone.add(member_id)
                self._break(f"{self._called(member_id)} {how}", 3, now)

    def _take_progress(self, member: Member, progress: int, now: float) -> None:
        if progress != member.progress and self.world is not None and self.world.holds(member.id):
            self.world.progress_at = now
        member.progress = progress

    # ------------------------------------------------------------------ worlds

    def _form(self, ids: tuple[str, ...], now: float) -> None:
        self._last_number = next_number(self._last_number, self._wall_clock_s())
        has_settled = any(self._members[member_id].has_set_up for member_id in ids)
        self.world = StandingWorld(number=self._last_number, ids=ids, progress_at=now, has_settled=has_settled)
        self._links.forget_reports()
        self._waiting = 0
        for member_id in ids:
            member = self._members[member_id]
            member.joining_since, member.has_set_up, member.is_spare = None, True, False
        self._send_to(ids, self._formed(self.world))
        self._tell_launchers(t="formed", tokens=[token_of(member_id) for member_id in ids])

    def _formed(self, world: StandingWorld) -> Message:
        members = [self._members.get(member_id) for member_id in world.ids]
        probes = {m.node: list(m.probe) for m in members if m is not None and m.probe is not None}  # one for each
        return {
            "t": "formed",
            "number": world.number,
            "ids": list(world.ids),
            "probes": probes,
            "settled": world.has_settled,
        }

    def _break(self, reason: str, rating: int, now: float) -> None:
        """The world breaks, or a better reason for its break is known."""
        world = self.world
        assert world is not None
        if world.broken_at is not None and rating <= world.rating:
            return
        world.broken_at = now if world.broken_at is None else world.broken_at
        world.reason, world.rating = reason, rating
        self._links.forget_reports()
        self._send_to(world.ids, _broken(world))

    def _called(self, member_id: str) -> str:
        """A member in words."""
        world = self.world
        rank = f"rank {world.ids.index(member_id)}" if world is not None and member_id in world.ids else "a rank"
        return f"{rank} on node {node_of(member_id)}"

    # ------------------------------------------------------------------ links

    def _decide_on_links(self, now: float) -> None:
        """Expel those who do not hear the larger part, some moments after the first report."""
        world = self.world
        if world is None or world.broken_at is not None:
            return
        for member, why in self._links.decide([m for m in self._members.values() if world.holds(m.id)], now):
            self._expel(member, f"{self._called(member.id)} was left out: {why}", 2, now)

    def _tell_kept_out(self, member: Member, world: StandingWorld) -> None:
        """Let a newcomer that does not reach all members try its links; once for each world."""
        inside = [m for m in self._members.values() if world.holds(m.id)]
        others = links_between(member.node, (m.node for m in inside), self._links.known)
        if others and member.kept_out_of != world.number:
            member.kept_out_of = world.number
            probes = {m.node: list(m.probe) for m in inside if m.node in others and m.probe is not None}
            self._send_to([member.id], {"t": "kept out", "reason": words_for(member.node, others), "probes": probes})

    def _tell_of_newcomers(self) -> None:
        """Let a standing world know who waits, and those that it does not let in why."""
        world = self.world
        if world is None or world.broken_at is not None:
            return
        waiting = waiting_newcomers(self._members.values(), world, self._links.known)
        for member in self._members.values() if self._links.known else ():
            if member.joining_since is not None and member.id not in world.ids:
                self._tell_kept_out(member, world)
        for member in self._members.values():
            if member.joining_since is not None and member.id not in (*world.ids, *waiting) and not member.is_spare:
                member.is_spare = True
                self._send_to([member.id], {"t": "spare"})
        if len(waiting) != self._waiting:
            self._waiting = len(waiting)
            self._send_to(world.ids, {"t": "waiting", "count": len(waiting)})

    # ------------------------------------------------------------------ output

    def _send(self, connection: int, **message: Any) -> None:
        self.outbox.append((connection, message))

    def _send_to(self, ids: Iterable[str], message: Message) -> None:
        wanted = set(ids)
        self.outbox += [(connection, message) for connection, owner in self._connections.items() if owner in wanted]

    def _tell_launchers(self, **message: Any) -> None:
        self.outbox += [(connection, message) for connection in sorted(self._launchers)]


def _broken(world: StandingWorld) -> Message:
    return {"t": "broken", "number": world.number, "reason": world.reason, "rating": world.rating}
