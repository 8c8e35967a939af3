"""Rendezvous client of a worker: joins worlds and notices when they end.

Tries whether other nodes can be reached directly, by small signed packets that are answered by the same kind.

Only while a world makes no step: then every rank sends a packet to each other node a few times a second, at most 500
in all. In a world of 1,000 nodes that is one packet to each in two seconds, 18 kB/s for a rank. A packet that comes
back proves both directions.

Which nodes of its world a rank does not reach, found out only while the world makes no step.

A world as the thread of one of its processes sees it.

The thread that keeps one process in touch with the rendezvous host: it joins worlds, hears when one breaks, tries
the links when one stands still, and cuts.

Whoever sees a failure first (a rank's own error, a launcher, the host, a neighbour that hears nothing) frees all ranks.
A connection to the host that is lost breaks nothing by itself: the thread makes another one and tells the host, which
may have been started anew, what it knows. Deadlines are counted on the thread's own clock.

One worker's side of elastic training: join a world, have it guarded, break it up, join the next.

    engine = ElasticEngine.from_environment()
    while True:
        members = engine.join()
        with GroupAborter() as cut:
            engine.guard(members, cut.cut)
            ... build groups on PrefixStore(members.name, engine.store) ...
        try:
            ... train, and call engine.made_progress() now and then ...
        except RuntimeError as error:
            engine.break_up(str(error))
            ... destroy the groups ...

Members meet at a rendezvous host, over authenticated connections that carry JSON.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from moe_lightning.elastic.client import ControlLink, ControlStore, StoreRequests
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask, Members, new_member_id
from moe_lightning.elastic.preemption import PreemptionWatch
from moe_lightning.elastic.protocol import Address, Message, OwnClock, read_secret
from moe_lightning.elastic.worker import RunFinished, end_hanging_process
from moe_lightning.errors import ConfigurationError

Endpoint = tuple[str, int]

_REQUEST, _REPLY = b"moe?", b"moe!"
_NONCE_BYTES = 16
_MAC_BYTES = 16
_PACKET_BYTES = len(_REQUEST) + _NONCE_BYTES + _MAC_BYTES
_MOST_PER_S = 500
_MOST_OPEN = 4096
_BATCH = 64


class Prober:
    """One process's packets.

    Args:
        secret: of the run; the packets' key is derived from it.
        host: address to listen at; the system chooses the port.

    Attributes:
        endpoint: where others send their packets to.
        socket: has something to read when `receive` shall be called.
        heard_at: node -> when it last answered.
        answers: node -> packets that came back.
        misses: node -> packets sent since.
    """

    def __init__(self, secret: bytes, host: str) -> None:
        self._key = hmac.digest(secret, b"probe", "sha256")
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind((host, 0))
        self.endpoint: Endpoint = (host, int(self.socket.getsockname()[1]))
        self.heard_at: dict[str, float] = {}
        self.answers: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self._open: dict[bytes, str] = {}  # nonce -> node
        self._targets: list[tuple[str, Endpoint]] = []
        self._due = 0.0
        self._turn = 0

    def begin(self, targets: Mapping[str, Endpoint], now: float) -> None:
        """Try these nodes from now on; what was heard before is forgotten."""
        self._targets = sorted(targets.items())
        self.heard_at = {}
        self.answers.clear()
        self.misses.clear()
        self._open.clear()
        self._due, self._turn = now, 0

    def end(self) -> None:
        """Try nobody; others are still answered."""
        self._targets = []

    def send(self, now: float, interval_s: float) -> None:
        """Send what is due.

        Args:
            interval_s: between two packets to one node, where the limit allows.
        """
        if not self._targets:
            return
        gap = max(interval_s / len(self._targets), 1 / _MOST_PER_S)
        if now - self._due > interval_s:
            self._due = now - interval_s
        while self._due <= now:
            self._due += gap
            node, endpoint = self._targets[self._turn % len(self._targets)]
            self._turn += 1
            nonce = os.urandom(_NONCE_BYTES)
            while len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
            self._open[nonce] = node
            self.misses[node] += 1
            with suppress(OSError):  # no way there: that is what is being found out
                self.socket.sendto(self._packet(_REQUEST, nonce), endpoint)

    def receive(self, now: float) -> None:
        """Answer others and note answers."""
        for _ in range(_BATCH):
            try:
                packet, sender = self.socket.recvfrom(_PACKET_BYTES + 1)
            except OSError:  # nothing left, or word of an earlier packet that could not be delivered
                return
            kind, nonce = packet[: len(_REQUEST)], packet[len(_REQUEST) : len(_REQUEST) + _NONCE_BYTES]
            if not hmac.compare_digest(packet, self._packet(kind, nonce)):
                continue
            if kind == _REQUEST:
                with suppress(OSError):
                    self.socket.sendto(self._packet(_REPLY, nonce), sender)
            elif kind == _REPLY and (node := self._open.pop(nonce, None)) is not None:
                self.heard_at[node] = now
                self.answers[node] += 1
                self.misses[node] = 0

    def close(self) -> None:
        """Free the port."""
        self.socket.close()

    def _packet(self, kind: bytes, nonce: bytes) -> bytes:
        return kind + nonce + hmac.digest(self._key, kind + nonce, "sha256")[:_MAC_BYTES]


_STALL_SHARE = 0.15  # of the silence timeout: a world without a step for so long is looked at
_INTERVAL_SHARE = 0.05  # between two packets to a node
_UNREACHABLE_SHARE = 0.55  # nothing at all of a node for so long
_FEWEST_MISSES = 10  # packets in a row: with 20 % of round trips lost, that many are by chance once in ten million
_FEWEST_ANSWERS = 3


class LinkWatch:
    """Watches the links of one world at a time; nobody on one machine.

    Args:
        silence_s: see `ElasticSettings.silence_timeout_s`; a dead link is found within about as much.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._prober: Prober | None = None
        self._targets: dict[str, Endpoint] = {}
        self._progress = -1
        self._progress_at = 0.0
        self._probing_since: float | None = None
        self._is_waiting = False

    def use(self, prober: Prober | None) -> None:
        """Probe through this one from now on."""
        self._prober = prober
        self._probing_since = None

    def enter(self, targets: Mapping[str, Endpoint], now: float) -> None:
        """Another world, with these other nodes."""
        self._targets, self._is_waiting = dict(targets), False
        self._progress, self._progress_at = -1, now
        self._end()

    def wait(self, targets: Mapping[str, Endpoint], now: float) -> None:
        """Outside a world: try these nodes until they answer."""
        self._targets, self._is_waiting = dict(targets), True
        if self._prober is not None:
            self._prober.begin(self._targets, now)

    def unreachable(self, progress: int, now: float) -> frozenset[str]:
        """The nodes of the present world that do not answer; none while it makes steps.

        Args:
            progress: a count of this rank's steps.
        """
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
            self._end()
        if self._prober is None or not self._targets or now - self._progress_at < _STALL_SHARE * self._silence_s:
            return frozenset()
        if self._probing_since is None:
            self._probing_since = now
            self._prober.begin(self._targets, now)
        self._prober.send(now, _INTERVAL_SHARE * self._silence_s)
        since, heard_at, misses = self._probing_since, self._prober.heard_at, self._prober.misses
        return frozenset(
            node
            for node in self._targets
            if now - max(since, heard_at.get(node, since)) > _UNREACHABLE_SHARE * self._silence_s
            and misses[node] >= _FEWEST_MISSES
        )

    def reached(self, now: float) -> bool:
        """Whether all nodes that a process outside waits for answer; True once."""
        if not self._is_waiting or self._prober is None:
            return False
        self._prober.send(now, _INTERVAL_SHARE * self._silence_s)
        if not self._targets or any(self._prober.answers[node] < _FEWEST_ANSWERS for node in self._targets):
            return False
        self._is_waiting = False
        self._prober.end()
        return True

    def _end(self) -> None:
        if self._probing_since is not None and self._prober is not None:
            self._prober.end()
        self._probing_since = None


@dataclass(kw_only=True)
class Watch:
    """A world that this process is in.

    Attributes:
        has_settled: somebody in it had set up before it formed.
        probes: where the links to its other nodes are tried.
        cut: frees every operation that waits for a peer; None before the world is guarded.
        reason: why it broke; None while it holds.
        rating: how much the reason says: 1 an error, 2 a silent rank, 3 a launcher's word on a death.
        broken_at: when, on the thread's clock; None while it holds.
    """

    members: Members
    has_settled: bool
    probes: Mapping[str, Endpoint] = field(default_factory=dict)
    cut: Callable[[], None] | None = None
    reason: str | None = None
    rating: int = 0
    broken_at: float | None = None


_LONGEST_STEP_S = 0.1
_LOOK_S = 0.1
_GOODBYE_S = 1.0

logger = logging.getLogger(__name__)


class WorldTooSmall(ConfigurationError):
    """Fewer members than `min_ranks` came together in time."""


class Monitor:
    """Watches from its construction to `close`.

    Args:
        task: where the rendezvous host is, and how long to wait.

    Attributes:
        member_id: this process's name; another one after the others went on without it.
        multiple: worlds of this run train in multiples of so many members.
        requests: of the store that groups are built on.
    """

    def __init__(self, task: ElasticTask) -> None:
        self._task, self._settings = task, task.settings
        self.member_id = new_member_id(task.node, task.token, task.birth_ns)
        self._secret = read_secret(Path(task.secret_file))
        self._address = Address.parse(task.address)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._clock = OwnClock()
        self._watch: Watch | None = None  # the newest world
        self._guarded: Watch | None = None
        self._main_is_here, self.multiple = True, 1
        self._is_joining = self._is_ready = self._is_spare = False
        self._expelled: str | None = None
        self._kept_out: str | None = None
        self._kept_out_at = 0.0
        self._tried: Mapping[str, Endpoint] = {}
        self._number = 0
        self._progress = 0
        self._waiting_since: float | None = None
        self._synced: dict[int, Message] = {}
        self._syncs = itertools.count()
        self._finished = 0
        self._finished_before: int | None = None
        self._finished_together = 0
        self._next_beat = 0.0
        self._reported: frozenset[str] = frozenset()
        self._links = LinkWatch(self._settings.silence_timeout_s)
        self._prober: Prober | None = None
        self._link = ControlLink(
            self._address,
            self._secret,
            introduce=self._introduce,
            handle=self._handle,
            silence_s=self._settings.silence_timeout_s,
        )
        self.requests = StoreRequests(self._link.send)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-monitor", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ called by the main thread

    def wait_for_host(self) -> None:
        """Wait until the rendezvous host knows this process.

        Raises:
            ConfigurationError: it does not answer within `rendezvous_timeout_s`, or turns this process away.
        """
        with self._changed:
            started = self._clock.now
            while not self._link.is_connected:
                self._check_host(started)
                self._changed.wait(_LOOK_S)

    def join(self, *, is_ready: bool, is_spare: bool) -> Members:
        """Wait for the next world; see `ElasticEngine.join`."""
        with self._changed:
            former, started = self._watch, self._clock.now
            self._main_is_here = self._is_joining = True
            self._is_ready |= is_ready
            self._kept_out = None
            if self._expelled is None:
                ready, multiple = self._is_ready, self.multiple
                self._link.send({"t": "join", "ready": ready, "multiple": multiple, "spare": is_spare})
            while self._watch is former:
                is_over = self.is_finished() and self._finished > self._finished_together
                if is_over and (self._is_spare or (is_ready and not self._is_inside())):
                    raise RunFinished("the others have finished the run, and need this process no more")
                if self._expelled is not None:
                    self._rename()
                self._check_host(started)
                self._check_wait(started)
                self._changed.wait(_LOOK_S)
            assert self._watch is not None
            return self._watch.members

    def _is_inside(self) -> bool:
        """True if this process is in the newest world that it knows of, and so may hold what no other does."""
        return self._watch is not None and self.member_id in self._watch.members.ids

    def withdraw(self, reason: str) -> None:
        """Break the world that was just joined, and be waited for no longer until the next join."""
        with self._lock:
            self._main_is_here = True
            if self._watch is not None and self._watch.broken_at is None:
                self._note_break(self._watch, reason, rating=1)
            self._link.send({"t": "withdraw", "reason": reason})

    def world_exists(self) -> bool:
        """Whether this run has a world with anybody in it, by the host's word of this moment.

        Raises:
            ConfigurationError: see `wait_for_host`.
        """
        number = next(self._syncs)
        while True:
            self.wait_for_host()
            with self._changed:
                self._link.send({"t": "sync", "n": number})
                while number not in self._synced and self._link.is_connected:
                    self._changed.wait(_LOOK_S)
                if (answer := self._synced.pop(number, None)) is not None:
                    return bool(answer.get("exists"))

    def has_settled_members(self) -> bool:
        """Whether members of the newest world had set up before it formed."""
        with self._lock:
            return self._watch is not None and self._watch.has_settled

    def guard(self, members: Members, cut: Callable[[], None]) -> None:
        """Watch the world that was joined from now on instead of the former one."""
        with self._lock:
            assert self._watch is not None, "join first"
            assert self._watch.members == members, "guard what was joined last"
            self._guarded, self._main_is_here = self._watch, False
            self._watch.cut = cut
            self._reported = frozenset()
            mine = members.nodes[members.rank]
            self._links.enter({n: e for n, e in self._watch.probes.items() if n != mine}, self._clock.now)
            if self._watch.broken_at is not None:
                self._cut(self._watch)

    def break_up(self, reason: str) -> None:
        """Break the present world: tell everybody, cut; nothing where it is broken already."""
        with self._lock:
            watch = self._guarded
            if watch is not None and watch.broken_at is None:
                self._note_break(watch, reason, rating=1)
                self._link.send({"t": "broken", "number": watch.members.number, "reason": reason})

    def leave_world(self) -> None:
        """The main thread has come back from the former world."""
        with self._lock:
            self._main_is_here = True

    def made_progress(self) -> None:
        """The main thread has come a step further."""
        self._progress += 1

    @property
    def reason(self) -> str | None:
        """Why the last guarded world broke; None while it holds."""
        with self._lock:
            return self._guarded.reason if self._guarded is not None else None

    def wait_for_cause(self, timeout_s: float) -> str | None:
        """Who broke the last guarded world, by the word of a launcher or the host; None where none comes in time."""

        def cause() -> str | None:
            watch = self._guarded
            return watch.reason if watch is not None and watch.rating > 1 else None

        with self._changed:
            return self._changed.wait_for(cause, timeout_s)

    def newcomers(self) -> bool:
        """Whether somebody outside has been waiting for the join window."""
        with self._lock:
            since = self._waiting_since
            return since is not None and self._clock.now - since >= self._settings.join_window_s

    def finish(self) -> None:
        """Tell those who wait to be let in that the training is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._link.is_connected, _GOODBYE_S)
            self._link.send({"t": "finish"})
            if self._watch is not None:  # another run of this process is not over because its peers end this one
                self._finished_together = self._finished + self._watch.members.size

    def is_finished(self) -> bool:
        """Whether others have finished the run since this process started."""
        with self._lock:
            return self._finished_before is not None and self._finished > self._finished_before

    def close(self) -> None:
        """Say goodbye and end the thread."""
        with self._lock:
            self._watch = self._guarded = None
            self._link.send({"t": "leave"})
        self._closed.set()
        self._link.wake()
        self._thread.join(timeout=_GOODBYE_S)

    def _check_host(self, started: float) -> None:
        """Raise where the host has not been there for too long."""
        link, limit = self._link, self._settings.rendezvous_timeout_s
        if link.is_connected:
            return
        never = self._finished_before is None
        if link.is_refused and never:
            raise ConfigurationError(f"the rendezvous host at {self._address} turns this process away: {link.trouble}")
        if self._clock.now - max(started, link.lost_at or 0.0) > limit:
            raise ConfigurationError(
                f"the rendezvous host at {self._address} has not answered for {limit:g} s ({link.trouble}): see that "
                "it runs and can be reached, then give the same command again, which resumes"
            )

    def _check_wait(self, started: float) -> None:
        """Raise where no world has come for too long."""
        now, limit = self._clock.now, self._settings.join_timeout_s
        if self._kept_out is not None and now - self._kept_out_at > self._settings.rendezvous_timeout_s:
            raise ConfigurationError(f"{self._kept_out}: repair it, then give the same command again, which resumes")
        if now - started > limit and not self._is_spare:
            raise WorldTooSmall(f"no world within {limit:g} s: look at the other workers")

    def _rename(self) -> None:
        """The others went on without this process: it comes back as a new member."""
        self.member_id = new_member_id(self._task.node, self._task.token)
        self._expelled = None
        self._introduce(self._link.send)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        step_s = min(_LONGEST_STEP_S, self._settings.beat_s / 2)
        while not self._closed.is_set():
            try:
                was_connected = self._link.is_connected
                self._link.step(self._clock.tick(), step_s)
                with self._lock:
                    if was_connected and not self._link.is_connected:
                        self.requests.end()
                    self._tick(self._clock.tick())
            except Exception:  # this thread must go on: it is the one that ends a process that nothing frees
                logger.exception("the monitor could not do its work")
            self._end_if_hanging()
        self._link.close()
        if self._prober is not None:
            self._prober.close()

    def _tick(self, now: float) -> None:
        if now >= self._next_beat:
            self._next_beat = now + self._settings.beat_s
            self._link.send({"t": "beat", "progress": self._progress})
        watch = self._guarded
        if self._links.reached(now):
            self._kept_out = None
            self._link.send({"t": "reachable", "nodes": sorted(self._tried)})
        if watch is None or watch.broken_at is not None or self._main_is_here:
            return
        unreachable = self._links.unreachable(self._progress, now)
        if unreachable and not self._link.is_connected:
            names = ", ".join(sorted(unreachable))
            self._note_break(watch, f"neither the rendezvous host nor {names} can be reached from here", rating=2)
        elif unreachable != self._reported:
            self._reported = unreachable
            self._link.send({"t": "unreachable", "number": watch.members.number, "nodes": sorted(unreachable)})

    def _introduce(self, say: Callable[[Message], object]) -> None:
        """Tell the host, on a new connection or under a new name, who this is and what it may have forgotten."""
        with self._changed:
            settings, watch, world = self._settings, self._watch, None
            patience = [
                settings.heartbeat_timeout_s,
                settings.silence_timeout_s,
                settings.hang_timeout_s,
                settings.start_timeout_s,
            ]
            if watch is not None and self.member_id in watch.members.ids:
                world = {"number": watch.members.number, "ids": list(watch.members.ids), "patience": patience}
                world |= {"broken": watch.reason} if watch.reason is not None else {}
            self._listen_for_probes()
            self._reported = frozenset()
            say({
                "t": "member", "id": self.member_id, "expected": self._task.expected, "patience": patience,
                "probe": list(self._prober.endpoint) if self._prober is not None else None,
                "joining": self._is_joining, "ready": self._is_ready, "number": self._number, "world": world,
                "multiple": self.multiple,
            })  # fmt: skip
            self._changed.notify_all()

    def _listen_for_probes(self) -> None:
        """Let other nodes try the way to this one; on one machine there is none."""
        host = self._link.local_host
        if host is None or (self._prober is not None and self._prober.endpoint[0] == host):
            return
        if self._prober is not None:
            self._link.unwatch(self._prober.socket)
            self._prober.close()
        prober = self._prober = Prober(self._secret, host)
        self._link.watch(prober.socket, lambda: prober.receive(self._clock.now))
        self._links.use(prober)

    def _handle(self, message: Message) -> None:
        if message.get("t") == "stored":
            self.requests.answer(message)
            return
        with self._changed:
            self._hear(message)
            self._changed.notify_all()

    def _hear(self, message: Message) -> None:
        match message:
            case {"t": "state" | "finished", "finished": int(finished)}:
                self._finished = finished
                if self._finished_before is None:
                    self._finished_before = finished
            case {"t": "synced", "n": int(number)}:
                self._synced[number] = message
            case {"t": "formed", "number": int(number), "ids": list(ids)} if self.member_id in ids:
                self._enter(number, ids, message)
            case {"t": "broken", "number": int(number), "reason": str(reason), "rating": int(rating)}:
                for watch in (self._watch, self._guarded):
                    if watch is not None and watch.members.number == number:
                        self._note_break(watch, reason, rating=rating)
            case {"t": "expelled", "reason": str(reason)}:
                self._expelled = reason
                if self._guarded is not None and self._guarded.broken_at is None:
                    self._note_break(self._guarded, reason, rating=2)
            case {"t": "waiting", "count": int(count)}:
                if count == 0 or self._waiting_since is None:
                    self._waiting_since = self._clock.now if count else None
            case {"t": "spare"}:
                self._is_spare = True
            case {"t": "kept out", "reason": str(reason), "probes": dict(probes)}:
                self._kept_out, self._kept_out_at = reason, self._clock.now
                self._tried = _endpoints(probes)
                self._links.wait(self._tried, self._clock.now)

    def _enter(self, number: int, ids: list[str], message: Message) -> None:
        self._number = max(self._number, number)
        members = Members(number=number, ids=tuple(ids), me=ids.index(self.member_id))
        self._watch = Watch(
            members=members, has_settled=message.get("settled") is True, probes=_endpoints(message.get("probes", {}))
        )
        self._is_joining, self._is_spare, self._waiting_since, self._kept_out = False, False, None, None

    def _note_break(self, watch: Watch, reason: str, *, rating: int) -> None:
        """A world broke, or there is a better reason why."""
        if rating > watch.rating:
            watch.reason, watch.rating = reason, rating
        if watch.broken_at is None:
            watch.broken_at = self._clock.now
            self._cut(watch)

    def _cut(self, watch: Watch) -> None:
        self.requests.end(watch.members.number)
        try:
            if watch.cut is not None:
                watch.cut()
        except Exception:  # this thread must go on: it is the one that ends a process that nothing frees
            logger.exception("the connections of a broken world could not all be cut")

    def _end_if_hanging(self) -> None:
        """End a process whose main thread does not come back from a broken world: everybody waits for it."""
        watch, limit = self._guarded, self._settings.may_hang_s(self._progress)
        if watch is None or watch.broken_at is None or self._main_is_here or self._clock.now - watch.broken_at < limit:
            return
        end_hanging_process(limit, watch.reason)


def _endpoints(said: Mapping[str, Any]) -> dict[str, Endpoint]:
    return {node: (str(host), int(port)) for node, (host, port) in said.items()}


_NOISE = re.compile(r"\[/[^\]]*\]\s*|\. This is typically caused by .*", re.DOTALL)  # gloo names files and guesses


class ElasticEngine:
    """See the top of the file. `join`, `guard` and `close` belong to one thread; the rest may be called from any.

    Args:
        task: what the launcher said.

    Raises:
        ConfigurationError: the run's secret cannot be read.
    """

    def __init__(self, task: ElasticTask) -> None:
        self.task = task
        self._monitor = Monitor(task)
        self._preemption = PreemptionWatch(task.settings)
        self._store: ControlStore | None = None

    @classmethod
    def from_environment(cls) -> Self | None:
        """The engine of a worker that an elastic launcher started; None for any other process.

        Raises:
            ConfigurationError: the launcher's variable is malformed.
        """
        task = ElasticTask.from_environment()
        return cls(task) if task is not None else None

    @property
    def settings(self) -> ElasticSettings:
        """How long this run waits for whom."""
        return self.task.settings

    @property
    def member_id(self) -> str:
        """This process's name among the members; a process that the others went on without gets a new one."""
        return self._monitor.member_id

    @property
    def node(self) -> str:
        """The failure domain of this process."""
        return self.task.node

    @property
    def store(self) -> ControlStore:
        """For building groups, under the prefix `members.name`; a new one after each `join`. Breaking the world up
        ends every wait on it.
        """
        assert self._store is not None, "join first"
        return self._store

    @property
    def multiple(self) -> int:
        """Worlds of this run train in multiples of so many members; set it before the first `join`."""
        return self._monitor.multiple

    @multiple.setter
    def multiple(self, multiple: int) -> None:
        self._monitor.multiple = multiple

    def join(self, *, is_ready: bool = False, is_spare: bool = False) -> Members:
        """Leave the former world, announce an arrival, and wait for the next world, which may be smaller than
        `min_ranks`: its members then hold the state and wait.

        The first join of a run waits for all workers that were started (up to `start_timeout_s`). Groups of the former
        world must have been destroyed.

        Args:
            is_ready: this process has set up, and goes on with training at once.
            is_spare: the others of its world go on without it; it waits until there are enough for a multiple.

        Raises:
            RunFinished: the others finished while this process was spare, stopped or out of reach.
            WorldTooSmall: no members came together within `join_timeout_s`.
            ConfigurationError: the rendezvous host did not answer for `rendezvous_timeout_s`, or no member can be
                reached.
        """
        members = self._monitor.join(is_ready=is_ready, is_spare=is_spare)
        self._store = ControlStore(self._monitor.requests, members.number)
        return members

    def world_exists(self) -> bool:
        """Whether this run has a world already, which a process that has not joined yet would come to.

        Raises:
            ConfigurationError: the rendezvous host did not answer for `rendezvous_timeout_s`.
        """
        return self._monitor.world_exists()

    def comes_too_early(self, members: Members) -> bool:
        """Whether others have set up before this first world of this process: they go on with training in it, and this
        process has no place for their state yet. It then is out of that world again, and the others go on without it
        until it joins.

        Args:
            members: from `join`.
        """
        assert members.me >= 0
        if not self._monitor.has_settled_members():
            return False
        self._monitor.withdraw("a process joined that has not set up")
        return True

    def guard(self, members: Members, cut: Callable[[], None]) -> None:
        """Watch a world until it breaks or the next one is guarded.

        Call it before the groups are built: a member may die while they are.

        Args:
            members: from `join`.
            cut: called once, from any thread, when the world breaks; frees whoever waits for a peer.
        """
        self._monitor.guard(members, cut)

    def made_progress(self) -> None:
        """Say that training has come a step further: while it does, links between ranks are not looked at."""
        self._monitor.made_progress()

    def break_up(self, reason: str) -> None:
        """Break the present world: tell all its ranks, and cut; does nothing where it is broken already.

        Args:
            reason: one sentence, of a network library perhaps; a launcher's or a neighbour's word on the cause goes
                before it.
        """
        self._monitor.break_up(_NOISE.sub("", reason).strip() or "the world broke")

    @property
    def reason(self) -> str | None:
        """Why the last guarded world broke, as one sentence; None while it holds.

        The best that is known by now: ask again after the next join, a launcher's word may have come.
        """
        return self._monitor.reason

    def wait_for_cause(self) -> str | None:
        """Which member's end broke the last guarded world, as one sentence; None where nobody says so within the time
        in which a silent one is found out.
        """
        return self._monitor.wait_for_cause(self.settings.silence_timeout_s + 1.0)

    def newcomers(self) -> bool:
        """Whether somebody outside the present world has been waiting for at least `join_window_s`.

        Ranks learn it at slightly different times: let one of them decide for all.
        """
        return self._monitor.newcomers()

    def finish(self) -> None:
        """Tell those who wait to be let in that the training is done."""
        self._monitor.finish()

    def is_finished(self) -> bool:
        """Whether others have finished the run since this process started."""
        return self._monitor.is_finished()

    def listen(self) -> None:
        """Receive notices from now on, also where a Trainer has taken the signal for itself."""
        self._preemption.listen()

    @property
    def notice(self) -> str | None:
        """A notice that this process will be taken away, as a sentence; None as long as there is none."""
        return self._preemption.notice

    def close(self) -> None:
        """Leave for good: no thread, descriptor or connection stays."""
        self._preemption.close()
        self._monitor.close()
        self._store = None
