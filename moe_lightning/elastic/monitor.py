"""The thread that keeps one process in touch with the rendezvous host: it joins worlds, hears when one breaks, tries
the links when one stands still, and cuts.

Whoever sees a failure first (a rank's own error, a launcher, the host, a neighbour that hears nothing) frees all ranks.
A connection to the host that is lost breaks nothing by itself: the thread makes another one and tells the host, which
may have been started anew, what it knows. Deadlines are counted on the thread's own clock.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_lightning.elastic.address import Address
from moe_lightning.elastic.clock import OwnClock
from moe_lightning.elastic.control_store import StoreRequests
from moe_lightning.elastic.failure import RunFinished
from moe_lightning.elastic.lifeline import end_hanging_process
from moe_lightning.elastic.link import ControlLink
from moe_lightning.elastic.links import LinkWatch
from moe_lightning.elastic.membership import Members, new_member_id
from moe_lightning.elastic.probing import Endpoint, Prober
from moe_lightning.elastic.secret import read_secret
from moe_lightning.elastic.settings import ElasticTask
from moe_lightning.elastic.watch import Watch
from moe_lightning.elastic.wire import Message
from moe_lightning.errors import ConfigurationError

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
