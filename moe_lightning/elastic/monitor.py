"""The thread that watches one process's worlds: it hears when a world breaks, notices silent neighbours, and cuts.

Every rank's thread polls the news in the store, so that whoever sees a failure first (a rank's own error, a launcher,
a neighbour in the ring of heartbeats) frees all of them. It uses a client of the store of its own: a client that waits
is locked.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_lightning.elastic.failure import report_failure
from moe_lightning.elastic.membership import Members, node_of, token_of
from moe_lightning.elastic.news import News
from moe_lightning.elastic.settings import ElasticTask
from moe_lightning.elastic.watches import Knocks, Ring

EXIT_HANGING = 75  # EX_TEMPFAIL: start me again
_POLL_S = 0.02
_POLL_S_PER_RANK = 2e-4  # the store answers at most 5,000 polls a second, however many ranks there are
_SETTLE_S = 0.2
_SETTLE_S_RENDEZVOUS = 2.0  # its members poll once a second
_STORE_TIMEOUT = timedelta(seconds=10)

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Watch:
    """A world that this process is in.

    Attributes:
        cut: frees every operation that waits for a peer.
        reason: why it broke; None while it holds.
        rating: how much the reason says: 1 an error, 2 a silent rank, 3 a launcher's word on a death.
        broken_at: when; 0 while it holds.
        left: ranks that are gone as they should.
    """

    members: Members
    cut: Callable[[], None]
    ring: Ring
    reason: str | None = None
    rating: int = 0
    broken_at: float = 0.0
    left: set[int] = field(default_factory=set)


def connect_store(task: ElasticTask) -> TCPStore:
    """A client of the store that outlives the workers.

    Raises:
        RuntimeError: it does not answer within ten seconds.
    """
    return TCPStore(task.store_host, task.store_port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)


class Monitor:
    """Watches from its construction to `close`.

    Args:
        task: where the store is, and how long to wait.
        member_id: this process's name; see `rename`.
    """

    def __init__(self, task: ElasticTask, member_id: str) -> None:
        self._task = task
        self._settings = task.settings
        self._lock = threading.RLock()
        self._member_id = member_id
        self._watch: _Watch | None = None
        self._main_is_here = True
        self._was_member = False
        self._expelled = False
        self._arrived: set[str] = set()
        self._ready: set[str] = set()
        self._gone: dict[str, str] = {}  # token -> how
        self._last_world: tuple[str, ...] = ()
        self._worlds: dict[str, tuple[str, ...]] = {}  # name -> members
        self._knocking = False
        self._knocks = Knocks()
        self._store: TCPStore | None = None
        self._news: News | None = None
        self._finished = False
        self._connect()
        self._read_news()  # what happened before is known at once
        self._finished = False  # of an earlier run over the same store
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-monitor", daemon=True)
        self._thread.start()

    # ---- called by the main thread

    def announce_arrival(self) -> None:
        """Tell everybody that this process is ready for a first world."""
        with self._lock:
            self._tell("arrived", member=self._member_id)

    def is_start_complete(self) -> bool:
        """Whether all expected workers have arrived, or a world exists already."""
        with self._lock:
            exists = self.world_exists()
            waiting = {token_of(member) for member in self._arrived} - set(self._gone)
            return exists or len(waiting) >= self._task.expected

    def world_exists(self) -> bool:
        """Whether a world has formed of whose members not all are known to be gone, by the news of this moment."""
        with self._lock:
            self._read_news()
            return any(token_of(member) not in self._gone for member in self._last_world)

    def announce_ready(self) -> None:
        """Tell everybody that this process has set up, and trains in whatever world it joins next."""
        with self._lock:
            self._tell("ready", member=self._member_id)

    def has_ready_members(self, members: Members) -> bool:
        """Whether members of a world have set up before it: in an earlier world, or while they waited to be let in. By
        the news of this moment.
        """
        with self._lock:
            self._read_news()
            earlier = [ids for name, ids in self._worlds.items() if name != members.name]
            return any(member in ids for ids in [self._ready, *earlier] for member in members.ids)

    def finish(self) -> None:
        """Tell those who wait to be let in that the training is done."""
        with self._lock:
            self._tell("finished")

    def is_finished(self) -> bool:
        """Whether members of the run have finished it, by the news of this moment."""
        with self._lock:
            self._read_news()
            return self._finished

    def leave_world(self) -> None:
        """The main thread has come to the join: the former world is over for it."""
        with self._lock:
            self._main_is_here = True

    def is_expelled(self) -> bool:
        """Whether the others went on without this process, by the news of this moment: a process that was stopped wakes
        in its main thread before this thread has read anything.
        """
        with self._lock:
            self._read_news()
            return self._expelled

    def rename(self, member_id: str) -> None:
        """This process is a new member from now on."""
        with self._lock:
            self._member_id = member_id
            self._was_member = self._expelled = False
            self.announce_arrival()  # its launcher takes it for hanging otherwise

    def knock(self, on: bool) -> None:
        """Say again and again that somebody waits to be let in, or stop it."""
        with self._lock:
            self._knocking = on

    def guard(self, members: Members, cut: Callable[[], None]) -> None:
        """Watch a world from now on instead of the former one."""
        with self._lock:
            self._read_news()  # of earlier worlds: what comes from now on is about this one or later ones
            ring = Ring(members, self._settings.silence_timeout_s, time.monotonic())
            self._watch = _Watch(members=members, cut=cut, ring=ring)
            self._main_is_here = False
            self._was_member = True
            self._last_world = members.ids
            self._expelled = False
            self._knocks.forget(time.monotonic(), _SETTLE_S if self._task.lighthouse else _SETTLE_S_RENDEZVOUS)
            if members.rank == 0:
                self._tell("formed", world=members.name, ids=list(members.ids))
            for token, how in self._gone.items():
                self._hear_of_death(token, how)

    def break_up(self, reason: str) -> None:
        """Break the present world: tell everybody, cut; nothing where it is broken already."""
        with self._lock:
            if self._watch is not None and not self._watch.broken_at:
                self._break(reason, rating=1, tell={})

    @property
    def reason(self) -> str | None:
        """Why the last world broke; None while it holds."""
        with self._lock:
            return self._watch.reason if self._watch is not None else None

    def newcomers(self) -> bool:
        """Whether somebody outside has been waiting for the join window."""
        with self._lock:
            return self._knocks.have_lasted(self._settings.join_window_s, time.monotonic())

    def close(self) -> None:
        """Say goodbye and end the thread."""
        with self._lock:
            self._watch = None
            self._tell("left", member=self._member_id)
        self._closed.set()
        self._thread.join(timeout=_STORE_TIMEOUT.total_seconds())
        self._store = self._news = None

    # ---- the thread

    def _run(self) -> None:
        while not self._closed.wait(self._period()):
            try:
                if self._store is None:
                    self._connect()
                with self._lock:
                    self._tick(time.monotonic())
            except RuntimeError as error:
                logger.warning("the store at %s:%d is lost: %s", self._task.store_host, self._task.store_port, error)
                with self._lock:
                    self._store = self._news = None
            self._end_if_hanging()

    def _period(self) -> float:
        watch = self._watch
        return max(_POLL_S, _POLL_S_PER_RANK * watch.members.size) if watch is not None else _POLL_S

    def _connect(self) -> None:
        store = connect_store(self._task)
        with self._lock:
            self._store, self._news = store, News(store)

    def _tick(self, now: float) -> None:
        assert self._store is not None
        self._read_news()
        self._watch_neighbour(now)
        self._knocks.step(self._store, self._knocking, now)

    def _read_news(self) -> None:
        if self._news is None:
            return
        for line in self._news.read():
            self._hear(line)

    def _hear(self, line: dict[str, str | list[str]]) -> None:
        match line:
            case {"kind": "arrived", "member": str(member)}:
                self._arrived.add(member)
            case {"kind": "ready", "member": str(member)}:
                self._ready.add(member)
            case {"kind": "formed", "world": str(world), "ids": list(ids)}:
                self._last_world = self._worlds[world] = tuple(ids)
                mine = self._watch is not None and self._watch.members.name == world
                if self._was_member and not mine and self._member_id not in ids:
                    self._expelled = True
            case {"kind": "broken", "world": str(world), "reason": str(reason)}:
                silent = line.get("silent")
                self._expelled |= silent == self._member_id
                if self._watch is not None and self._watch.members.name == world:
                    self._break(reason, rating=1 if silent is None else 2)
            case {"kind": "died", "token": str(token), "how": str(how)}:
                self._gone[token] = how
                self._hear_of_death(token, how)
            case {"kind": "finished"}:
                self._finished = True
            case {"kind": "left", "member": str(member)}:
                self._gone[token_of(member)] = "left"
                if self._watch is not None and member in self._watch.members.ids:
                    self._watch.left.add(self._watch.members.ids.index(member))

    def _hear_of_death(self, token: str, how: str) -> None:
        """A launcher saw a process end; its word is better than what the survivors felt."""
        if self._watch is None or how == "left":
            return
        for rank, member in enumerate(self._watch.members.ids):
            if token_of(member) == token:
                self._break(f"rank {rank} on node {node_of(member)} {how}", rating=3)

    def _break(self, reason: str, *, rating: int, tell: dict[str, str] | None = None) -> None:
        """Note that the world broke and why; tell the others where they do not know; cut."""
        watch = self._watch
        assert watch is not None
        if rating > watch.rating:
            watch.reason, watch.rating = reason, rating
        if watch.broken_at:
            return
        watch.broken_at = time.monotonic()
        try:
            if tell is not None:
                self._tell("broken", world=watch.members.name, reason=reason, **tell)
            watch.cut()
        except Exception:  # this thread must go on: it is the one that ends a process that nothing frees
            logger.exception("the connections of a broken world could not all be cut")

    def _watch_neighbour(self, now: float) -> None:
        """Beat, and expel the rank before this one when it does not."""
        watch = self._watch
        assert self._store is not None
        if watch is None or watch.broken_at or self._main_is_here:
            return
        silent = watch.ring.silent_rank(self._store, watch.left, now)
        if silent is not None:
            node = watch.members.nodes[silent]
            reason = f"rank {silent} on node {node} stopped answering for {self._settings.silence_timeout_s:.1f} s"
            self._break(reason, rating=2, tell={"silent": watch.members.ids[silent]})

    def _end_if_hanging(self) -> None:
        """End a process whose main thread does not come back from a broken world: everybody waits for it."""
        watch = self._watch
        limit = self._settings.hang_timeout_s
        if watch is None or not watch.broken_at or self._main_is_here or time.monotonic() - watch.broken_at < limit:
            return
        message = f"the main thread did not come back within {limit:g} s after its world broke ({watch.reason})"
        stack = _stack_of_main_thread()
        logger.error("%s: ending this process, which is at\n%s", message, stack)
        report_failure("death", message, stack)
        os._exit(EXIT_HANGING)

    def _tell(self, kind: str, **facts: str | list[str]) -> None:
        try:
            if self._news is not None:
                self._news.tell(kind, **facts)  # type: ignore[arg-type]
        except RuntimeError as error:
            logger.warning("could not tell the others (%s): %s", kind, error)


def _stack_of_main_thread() -> str:
    """Where the main thread is, as in a traceback."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
