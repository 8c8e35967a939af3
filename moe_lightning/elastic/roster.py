"""What the rendezvous host knows, as a state machine without sockets: messages and time in, messages out.

It knows who is there and which world is the newest; it forms worlds, says when one breaks and why, and lets newcomers
knock. All that it knows can be learned again from the members, so a host that is started anew goes on with their
world. Messages are dictionaries with a kind "t"; `Roster.receive` lists those of clients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from moe_lightning.elastic.dead_links import DeadLinks, words_for
from moe_lightning.elastic.formation import (
    RECONNECT_S,
    Member,
    StandingWorld,
    links_between,
    next_number,
    next_world,
    overdue,
    waiting_newcomers,
)
from moe_lightning.elastic.membership import node_of, token_of
from moe_lightning.elastic.said import (
    LONGEST_WORD,
    is_member_id,
    is_text,
    parse_endpoint,
    parse_multiple,
    parse_patience,
)
from moe_lightning.elastic.settings import BEAT_S
from moe_lightning.elastic.wire import Message, WireError

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
