"""State machine of a rendezvous client, without sockets and threads: messages, calls and times in, messages out.

`ClientState` joins worlds, keeps the newest one and the one that training runs in, and records why one breaks. It is
the peer of `RendezvousState`; `RendezvousClient` connects the two. Times are seconds of the owner's clock.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moe_lightning.elastic.membership import ElasticTask, Members, new_member_id, node_of
from moe_lightning.elastic.protocol import Message, WireError
from moe_lightning.errors import ConfigurationError

logger = logging.getLogger(__name__)

Endpoint = tuple[str, int]


class WorldTooSmall(ConfigurationError):
    """Fewer members than `min_ranks` joined in time."""


@dataclass(kw_only=True)
class JoinedWorld:
    """World of this process.

    Attributes:
        has_set_up: a member had set up before the world formed.
        probes: probe endpoint of each node.
        is_left: the main thread is not in it: it has not guarded it yet, or has come to the next join.
        is_done: the training in it is done, and no other has begun.
        may_be_silent: it is done, and this process is in no further call of the Trainer: no other waits for it.
        reason: reason why it broke; None while it is intact.
        rating: quality of the reason: 1 an error, 2 a silent or a failed rank, 3 a death that a launcher reported.
        broken_at: time; None while it is intact.
        unreachable: nodes behind dead links, as the host was told.
    """

    members: Members
    has_set_up: bool
    probes: Mapping[str, Endpoint] = field(default_factory=dict)
    is_left: bool = True
    is_done: bool = False
    may_be_silent: bool = False
    reason: str | None = None
    rating: int = 0
    broken_at: float | None = None
    unreachable: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """Eviction of this process, which may return as a new member.

    Attributes:
        reason: as a sentence.
        probes: probe endpoint of each node that should answer before.
        at: time.
    """

    reason: str
    probes: Mapping[str, Endpoint]
    at: float


@dataclass(kw_only=True)
class _Join:
    """Facts of a join that the host needs, also on a new connection.

    Attributes:
        multiple: of members in worlds that train.
        is_waiting: for a world.
        is_ready: set up.
        is_spare: waits until there are enough for a multiple.
        is_announced: a line says that it waits for members that have finished the training.
    """

    multiple: int
    is_waiting: bool = False
    is_ready: bool = False
    is_spare: bool = False
    is_announced: bool = False


@dataclass(kw_only=True)
class _Finishes:
    """Numbers of ends of the run: of the world that members finished it in, or one more than that of the end before, if
    a script trains several times in one world; 0: none.

    Attributes:
        newest: as the host knows it.
        before: the newest when this process first registered; None before.
        own: of the last end that this process took part in.
    """

    newest: int = 0
    before: int | None = None
    own: int = 0


_LONGEST_REASON = 2000  # characters that the host keeps


@dataclass
class _Return:
    """Return to the host of a process that was left out for a dead link, before its nodes have answered.

    Attributes:
        reason: of the eviction.
        has_failed: the world that it led to broke before progress.
    """

    reason: str
    has_failed: bool = False


class ClientState:
    """State of one member. The owner sends `outbox`, aborts the groups of the worlds in `broken`, and clears both.

    Args:
        task: from the launcher.
        multiple: number of members of which worlds that train are multiples.

    Attributes:
        member_id: name of this process among the members; a new one after an eviction.
        world: the newest one.
        guarded: the one that was guarded last.
        eviction: of this process; None while it is a member.
        progress: count of its steps.
        world_exists: the run had a world when this process registered last; None before it has.
        outbox: messages for the host, in order.
        broken: numbers of worlds whose waits must end.
    """

    def __init__(self, task: ElasticTask, multiple: int = 1) -> None:
        self._task = task
        self._join = _Join(multiple=multiple)
        self._finishes = _Finishes()
        self._waiting_since: float | None = None  # newcomers wait
        self._next_beat = 0.0
        self._return: _Return | None = None  # though nodes did not answer; none after progress
        birth_ns = task.now_ns if task.birth_ns is None else task.birth_ns
        self.member_id = new_member_id(task.node, task.token, birth_ns)
        self.world: JoinedWorld | None = None
        self.guarded: JoinedWorld | None = None
        self.eviction: Eviction | None = None
        self.progress = 0
        self.world_exists: bool | None = None
        self.outbox: list[Message] = []
        self.broken: list[int] = []

    # ------------------------------------------------------------------ calls of the worker

    def start_join(self, *, is_ready: bool, is_spare: bool) -> None:
        """Leave the world, and wait for the next one."""
        if self.guarded is not None:
            self.guarded.is_left = True
        if self._return is not None and not is_spare:
            self._return.has_failed = True
        self._join.is_waiting, self._join.is_announced = True, False
        self._join.is_ready = is_ready
        if self.eviction is None:
            self._send(t="join", ready=is_ready, spare=is_spare)

    def is_unneeded(self) -> bool:
        """Return True if a process that joins can end, since the others have finished without it."""
        return self.is_late() and self._waits_for_a_step

    @property
    def is_dispensable(self) -> bool:
        """True while this process waits to join and no other needs its state."""
        has_no_state = self.guarded is None or self._join.is_spare  # also if it has withdrawn from a first world
        return has_no_state or self.is_late()

    @property
    def _waits_for_a_step(self) -> bool:
        """True if this process is outside of a world that trains, and so waits as long as that needs to its next step,
        perhaps through a validation.
        """
        return self._join.is_spare or (self._join.is_ready and (self.guarded is None or not self._is_inside()))

    def check_wait(self, started: float, now: float) -> None:
        """Raise if a join that started then has been waiting for too long.

        After an eviction for dead links this process returns once all the same: the nodes behind them may have ended or
        been started again, at endpoints that the host knows. It raises if that world breaks before its next step or an
        agreed change: each further world would break as well, perhaps by errors of this process that come before any
        probe. It waits without a limit for members that have finished the training, which may export for long, and says
        so after `join_timeout_s`.
        """
        settings, eviction = self._task.settings, self.eviction
        if self._return is not None and self._return.has_failed:
            reason = self._return.reason
            raise ConfigurationError(f"{reason}: repair it, then give the same command again, which resumes")
        if eviction is not None and now - eviction.at > settings.rendezvous_timeout_s:
            self._return = _Return(eviction.reason)
            self.end_probes()
        if now - started <= settings.join_timeout_s or self._waits_for_a_step:
            return
        if not self.is_late():
            raise WorldTooSmall(f"no world within {settings.join_timeout_s:g} s: look at the other workers")
        if not self._join.is_announced and self.guarded is not None:
            self._join.is_announced = True
            others = sorted({node_of(id) for id in self.guarded.members.ids if id != self.member_id})
            logger.warning(
                "this rank waits for others to end, on nodes %s, which have finished the training and may export: end "
                "the process of one that hangs",
                ", ".join(others[:4]),
            )

    def withdraw_if_early(self, now: float) -> bool:
        """Leave this first world again if others had set up before it; True if so."""
        world = self.world
        if world is None or not world.has_set_up:
            return False
        reason = "a process joined that has not set up"
        world.is_left = True
        if world is not self.guarded:
            self.guarded = None  # a former attempt, in which nobody has trained
        if world.broken_at is None:
            self._break(world, reason, 1, now)
        self._send(t="withdraw", reason=reason)
        return True

    def guard(self, members: Members) -> dict[str, Endpoint]:
        """Train in the newest world from now on; return the probe endpoints of its other nodes."""
        world = self.world
        assert world is not None, "join first"
        assert world.members == members, "guard what was joined last"
        self.guarded, world.is_left, world.unreachable = world, False, frozenset()
        if world.broken_at is not None:
            self.broken.append(members.number)
        mine = members.nodes[members.rank]
        return {node: endpoint for node, endpoint in world.probes.items() if node != mine}

    def abort(self, reason: str, now: float, *, is_cause: bool = False) -> None:
        """Break the guarded world for all its ranks; a no-op if it is broken already.

        Args:
            reason: one sentence.
            now: time of this process' clock.
            is_cause: it says how this process ends, not what the end of another one did to it.
        """
        world = self.guarded
        if world is not None and world.broken_at is None:
            reason, rating = reason[:_LONGEST_REASON], 2 if is_cause else 1
            self._break(world, reason, rating, now)
            self._send(t="broken", number=world.members.number, reason=reason, rating=rating)

    def record_progress(self) -> None:
        """Record a step of training, or that all ranks have met to change the world: no link between them is dead."""
        self.progress += 1
        self._return = None

    def begin_fit(self) -> None:
        """Begin a training, perhaps a further one of a script in the same world."""
        self.record_call(is_running=True)
        if self.guarded is not None:
            self.guarded.is_done = False

    def record_call(self, *, is_running: bool) -> None:
        """Record that a call of the Trainer begins or ends: others may wait in it for this process."""
        world = self.guarded
        if world is None or not world.is_done or world.may_be_silent is not is_running:
            return
        world.may_be_silent = not is_running
        if is_running:
            self._send(t="begin")
        else:
            self._send(t="finish", number=self._finishes.own)

    def finish(self) -> None:
        """Announce that the training is done."""
        if self.guarded is not None:
            self.guarded.is_done = self.guarded.may_be_silent = True
        self._finishes.own = max(self._number, self._finishes.own + 1)  # a further run may end in the same world
        self._send(t="finish", number=self._finishes.own)

    @property
    def is_finish_known(self) -> bool:
        """True if the host knows of what this process has finished, or does not count it."""
        return self.eviction is not None or self._finishes.newest >= self._finishes.own

    def is_finished(self) -> bool:
        """Return True if the run has been finished since this process registered, by others or by all."""
        return self._finishes.before is not None and self._finishes.newest > self._finishes.before

    def is_late(self) -> bool:
        """Return True if others have finished the run, or a later one of the script, without this process."""
        return self.is_finished() and self._finishes.newest > self._finishes.own

    def has_newcomers(self, now: float) -> bool:
        """Return True if a process has been waiting for at least `join_window_s` to join."""
        since = self._waiting_since
        return since is not None and now - since >= self._task.settings.join_window_s

    def leave(self) -> None:
        """Leave for good."""
        self.world = self.guarded = None
        self._send(t="leave")

    def rename(self) -> None:
        """Become a new member after an eviction."""
        self.member_id = new_member_id(self._task.node, self._task.token, self._task.now_ns)
        self.eviction = None

    # ------------------------------------------------------------------ the host

    def introduction(self, probe: Endpoint | None, *, is_full: bool = False) -> Message:
        """Return the message that registers this process, on a new connection or under a new name.

        Args:
            probe: its endpoint for probes.
            is_full: name the members of its world, not only the number, as the host has asked.
        """
        timeouts, world, reported = self._task.settings.patience, self.world, None
        if world is not None and self._is_inside():
            reported = {"number": world.members.number, "patience": timeouts}
            reported |= {"members": world.members.ids} if is_full else {}
            reported |= {"broken": world.reason} if world.reason is not None else {}
        if self.guarded is not None:
            self.guarded.unreachable = frozenset()
        return {
            "t": "member", "id": self.member_id, "expected": 1 if self._is_alone else self._task.expected,
            "patience": timeouts, "probe": None if probe is None else list(probe), "joining": self._join.is_waiting,
            "ready": self._join.is_ready, "number": self._number, "world": reported, "multiple": self._join.multiple,
            "finished": self._finishes.own, "done": self.guarded is not None and self.guarded.may_be_silent,
        }  # fmt: skip

    def receive(self, message: Message, now: float) -> None:
        """Handle a message of the host.

        Raises:
            WireError: it is malformed.
        """
        match message:
            case {"t": "state", "finished": int(finished), "exists": bool(exists)}:
                self._finishes.newest = max(self._finishes.newest, finished)
                if self._finishes.before is None:
                    self._finishes.before = finished
                self.world_exists = exists
            case {"t": "finished", "finished": int(finished)}:
                self._finishes.newest = max(self._finishes.newest, finished)
            case {
                "t": "formed", "number": int(number), "members": list() | tuple() as ids, "probes": dict(probes),
                "has_set_up": bool(has_set_up),
            }:  # fmt: skip
                self._enter(number, ids, probes, has_set_up=has_set_up)
            case {"t": "broken", "number": int(number), "reason": str(reason), "rating": int(rating)}:
                for world in (self.world, self.guarded):
                    if world is not None and world.members.number == number:
                        self._break(world, reason, rating, now)
            case {"t": "evicted", "reason": str(reason), "probes": dict(probes)}:
                self.eviction = Eviction(reason=reason, probes=_endpoints(probes), at=now)
                if self.guarded is not None and self.guarded.broken_at is None:
                    self._break(self.guarded, reason, 2, now)
            case {"t": "waiting", "count": int(count)}:
                if count == 0 or self._waiting_since is None:
                    self._waiting_since = now if count else None
            case {"t": "spare"}:
                self._join.is_spare = True

    def _enter(self, number: int, ids: Sequence[Any], probes: Mapping[str, Any], *, has_set_up: bool) -> None:
        if not all(isinstance(member_id, str) for member_id in ids):
            raise WireError("malformed members")
        if self.member_id not in ids or number <= self._number:
            return
        members = Members(number=number, ids=tuple(ids), rank=ids.index(self.member_id))
        self.world = JoinedWorld(members=members, has_set_up=has_set_up, probes=_endpoints(probes))
        self._join.is_waiting = self._join.is_spare = False
        self._waiting_since = None

    def _break(self, world: JoinedWorld, reason: str, rating: int, now: float) -> None:
        """Record that a world broke, or a better reason for it."""
        if rating > world.rating:
            world.reason, world.rating = reason, rating
        if world.broken_at is None:
            world.broken_at = now
            self.broken.append(world.members.number)

    # ------------------------------------------------------------------ time

    def beat(self, now: float) -> None:
        """Send the heartbeat that is due."""
        if now >= self._next_beat:
            self._next_beat = now + self._task.settings.heartbeat_interval_s
            self._send(t="beat", progress=self.progress)

    @property
    def is_training(self) -> bool:
        """True while the main thread is in an intact world: only then dead links count."""
        return self.guarded is not None and self.guarded.broken_at is None and not self.guarded.is_left

    def report_links(self, nodes: frozenset[str], now: float, *, is_connected: bool) -> None:
        """Report the nodes behind dead links while `is_training`, once after each change.

        Args:
            is_connected: to the host; without it a dead link breaks the world at once.
        """
        world = self.guarded
        assert world is not None
        if nodes and not is_connected:
            names = ", ".join(sorted(nodes))
            self._break(world, f"neither the rendezvous host nor {names} can be reached from here", 2, now)
        elif nodes != world.unreachable:
            world.unreachable = nodes
            self._send(t="unreachable", number=world.members.number, nodes=sorted(nodes))

    @property
    def may_return(self) -> bool:
        """True after an eviction if no node is waited for before this process becomes a member again."""
        return self.eviction is not None and not self.eviction.probes

    def end_probes(self) -> None:
        """Wait no more for the nodes that this process did not reach when it was evicted."""
        if self.eviction is not None:
            self.eviction = replace(self.eviction, probes={})

    @property
    def awaited_since(self) -> float | None:
        """Time since which the guarded world is broken and the main thread has not come back from it; else None."""
        world = self.guarded
        return None if world is None or world.is_left else world.broken_at

    def exceeded_limit_s(self, now: float) -> float | None:
        """Return the time that the main thread had to return from a broken world, if it is over; else None.

        Before its first step it has the longer one: that is slow, and cannot be interrupted. After the training there
        is no limit: it may export for minutes. Nor is there one in a world of one rank: no other waits for it, and it
        has the only state.
        """
        since, settings = self.awaited_since, self._task.settings
        if self._is_alone or (self.guarded is not None and self.guarded.is_done):
            return None
        limit_s = settings.hang_timeout_s
        if self.progress == 0:
            limit_s = max(limit_s, settings.start_timeout_s)
        return limit_s if since is not None and now - since >= limit_s else None

    # ------------------------------------------------------------------

    @property
    def _number(self) -> int:
        """Number of the newest world."""
        return 0 if self.world is None else self.world.members.number

    @property
    def _is_alone(self) -> bool:
        """True if the guarded world has no other rank, so this process has the only state, and waits for no other."""
        return self.guarded is not None and self.guarded.members.size == 1

    def _is_inside(self) -> bool:
        """Return True if this process is in the newest world, and so may hold state that no other does."""
        return self.world is not None and self.member_id in self.world.members.ids

    def _send(self, **message: Any) -> None:
        self.outbox.append(message)


def _endpoints(values: Mapping[str, Any]) -> dict[str, Endpoint]:
    return {node: (str(host), int(port)) for node, (host, port) in values.items()}
