"""Rendezvous client of a worker: joins worlds, watches them, and aborts them when a member fails.

    client = RendezvousClient(task)
    while True:
        members = client.join()
        with GroupAborter() as aborter:
            client.guard(members, aborter.abort)
            ... build groups on PrefixStore(members.name, client.store) ...
        try:
            ... train, and call client.record_progress() now and then ...
        except RuntimeError as error:
            client.abort(str(error))
            ... destroy the groups ...

A thread sends heartbeats and aborts the groups of a world as soon as a failure is detected: by an
error of this rank, by a launcher, by the host, or by dead links. A lost connection to the host aborts nothing: the
thread reconnects and reports the present world to the host, which may have been restarted. Between several machines the
launcher relays its messages (`moe_lightning.elastic.relay`). Timeouts are counted on the thread's own clock.

While a world makes no step for longer than several usual ones, the first rank of each node probes the other nodes by
small signed packets (`Prober`), at most 500 a second in all: in a world of 1,000 nodes one packet to each in two
seconds, 18 kB/s for a node. A reply proves both directions. A rank that has lost the host probes for itself.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from moe_lightning.elastic.client_state import ClientState, Endpoint
from moe_lightning.elastic.connection import ClientConnection, RendezvousStore
from moe_lightning.elastic.membership import ElasticTask, Members
from moe_lightning.elastic.preemption import PreemptionWatch
from moe_lightning.elastic.protocol import Address, Message, ProcessClock, read_secret
from moe_lightning.elastic.worker import Preempted, RunFinished, end_hanging_process
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.abort import StuckCollective

_REQUEST, _REPLY = b"moe?", b"moe!"
_NONCE_BYTES = 16
_MAC_BYTES = 16
_PACKET_BYTES = len(_REQUEST) + _NONCE_BYTES + _MAC_BYTES
_MOST_PER_S = 500
_MOST_OPEN = 4096
_BATCH = 64


class Prober:
    """Probe packets of one process.

    Args:
        secret: of the run; the packets' key is derived from it.
        host: address to listen on; the system chooses the port.

    Attributes:
        endpoint: address for packets of others.
        socket: call `receive` when it is readable.
        last_reply: node -> time of its last reply.
        answers: node -> number of replies.
        misses: node -> packets sent since the last reply.
        is_answered: True once any node has replied.
    """

    def __init__(self, secret: bytes, host: str) -> None:
        self._key = hmac.digest(secret, b"probe", "sha256")
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind((host, 0))
        self.endpoint: Endpoint = (host, int(self.socket.getsockname()[1]))
        self.last_reply: dict[str, float] = {}
        self.answers: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.is_answered = False
        self._open: dict[bytes, str] = {}  # nonce -> node
        self._targets: list[tuple[str, Endpoint]] = []
        self._due = 0.0
        self._turn = 0

    def begin(self, targets: Mapping[str, Endpoint], now: float) -> None:
        """Probe these nodes from now on, and forget former replies."""
        self._targets = sorted(targets.items())
        self.last_reply = {}
        self.answers.clear()
        self.misses.clear()
        self._open.clear()
        self._due, self._turn = now, 0

    def send(self, now: float, interval_s: float) -> None:
        """Send the packets that are due.

        Args:
            interval_s: between two packets to one node, unless the limit makes it longer.
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
            with suppress(OSError):  # an unreachable node is a result of the probe
                self.socket.sendto(self._packet(_REQUEST, nonce), endpoint)

    def receive(self, now: float) -> None:
        """Answer requests and record replies."""
        for _ in range(_BATCH):
            try:
                packet, sender = self.socket.recvfrom(_PACKET_BYTES + 1)
            except OSError:  # nothing left, or an error of an earlier packet
                return
            kind, nonce = packet[: len(_REQUEST)], packet[len(_REQUEST) : len(_REQUEST) + _NONCE_BYTES]
            if not hmac.compare_digest(packet, self._packet(kind, nonce)):
                continue
            if kind == _REQUEST:
                with suppress(OSError):
                    self.socket.sendto(self._packet(_REPLY, nonce), sender)
            elif kind == _REPLY and (node := self._open.pop(nonce, None)) is not None:
                self.is_answered = True
                self.last_reply[node] = now
                self.answers[node] += 1
                self.misses[node] = 0

    def close(self) -> None:
        """Free the port."""
        self.socket.close()

    def _packet(self, kind: bytes, nonce: bytes) -> bytes:
        return kind + nonce + hmac.digest(self._key, kind + nonce, "sha256")[:_MAC_BYTES]


_STALL_SHARE = 0.15  # of the silence timeout: a world without a step for so long is probed,
_STALL_STEPS = 3  # unless its steps are long: then after so many of the shortest
_STEPS = 5  # of the last ones: one may hold a validation or the save of a checkpoint
_INTERVAL_SHARE = 0.05  # between two packets to a node
_UNREACHABLE_SHARE = 0.55  # no reply of a node for so long
_FEWEST_MISSES = 10  # packets in a row: with 20 % of round trips lost, that many are by chance once in ten million
_FEWEST_ANSWERS = 3


class LinkChecker:
    """Detection of dead links to the nodes of one world; does nothing on one machine.

    Where no node has ever answered, UDP may be filtered, and no link counts as dead: so each process greets the others
    until a first one answers.

    Args:
        silence_s: see `ElasticSettings.silence_timeout_s`; a dead link is found within about as much.

    Attributes:
        prober: in use; None on one machine.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self.prober: Prober | None = None
        self._targets: dict[str, Endpoint] = {}
        self._progress = -1
        self._progress_at = 0.0
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._is_first = False
        self._probing_since: float | None = None
        self._greeting_until: float | None = None

    def use(self, prober: Prober, now: float) -> None:
        """Use this prober from now on. That nodes have answered the former one shows that UDP passes."""
        prober.is_answered |= self.prober is not None and self.prober.is_answered
        self.prober = prober
        self._begin(now)

    def enter(self, targets: Mapping[str, Endpoint], now: float, *, is_first: bool) -> None:
        """Start a world with these other nodes.

        Args:
            is_first: this process is the first of its node's.
        """
        self._targets, self._is_first = dict(targets), is_first
        self._steps_s.clear()
        self._progress, self._progress_at = -1, now
        self._begin(now)

    def leave(self, targets: Mapping[str, Endpoint], now: float) -> None:
        """Start to wait, outside a world, until these nodes answer."""
        self._targets = dict(targets)
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._probing_since, self._greeting_until = None, now + self._silence_s
        if self.prober is not None:
            self.prober.begin(self._targets, now)

    def unreachable(self, progress: int, now: float, *, is_connected: bool) -> frozenset[str]:
        """Return the nodes of the present world that do not answer; none while it makes steps.

        Args:
            progress: a count of this rank's steps.
            is_connected: to the host; without it every rank probes, not the first of its node alone.
        """
        is_stalled = self._is_stalled(progress, now) and (self._is_first or not is_connected)
        if not is_stalled:
            self._probing_since = None
        if self.prober is None or not self._targets:
            return frozenset()
        if is_stalled and self._probing_since is None:
            self._probing_since = now
            self.prober.begin(self._targets, now)
        if self._is_greeting(self.prober, now) or is_stalled:
            self.prober.send(now, _INTERVAL_SHARE * self._silence_s)
        if self._probing_since is None or not self.prober.is_answered:
            return frozenset()
        since, last_reply, misses = self._probing_since, self.prober.last_reply, self.prober.misses
        return frozenset(
            node
            for node in self._targets
            if now - max(since, last_reply.get(node, since)) > _UNREACHABLE_SHARE * self._silence_s
            and misses[node] >= _FEWEST_MISSES
        )

    def do_answer(self, now: float) -> bool:
        """Return True once all nodes answer that a process outside a world waits for."""
        if self.prober is None:
            return True
        self.prober.send(now, _INTERVAL_SHARE * self._silence_s)
        return all(self.prober.answers[node] >= _FEWEST_ANSWERS for node in self._targets)

    def _is_stalled(self, progress: int, now: float) -> bool:
        """Return True if the world makes no step for longer than several of its usual ones."""
        if progress != self._progress:
            if self._progress >= 0:
                self._steps_s.append((now - self._progress_at) / max(1, progress - self._progress))
            self._progress, self._progress_at = progress, now
        stall_s = max(_STALL_SHARE * self._silence_s, _STALL_STEPS * min(self._steps_s, default=0.0))
        return now - self._progress_at >= stall_s

    def _is_greeting(self, prober: Prober, now: float) -> bool:
        """Return True until a node answers, or none has for the silence timeout."""
        if self._greeting_until is None or prober.is_answered:
            return False
        if now <= self._greeting_until:
            return True
        self._greeting_until = None
        if self._is_first:
            logger.warning(
                "no node answers UDP packets: allow UDP between the machines of the run, or a link that fails between "
                "two of them is not recognized"
            )
        return False


_LONGEST_STEP_S = 0.1
_LOOK_S = 0.1
_GOODBYE_S = 1.0
_NOISE = re.compile(r"\[/[^\]]*\]\s*|\. This is typically caused by .*", re.DOTALL)  # gloo names files and guesses

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _GuardedGroups:
    """Groups of the guarded world.

    Attributes:
        abort: ends all waits for peers; None before the first world.
        stuck: detects a main thread that the abort does not free.
    """

    abort: Callable[[], None] | None = None
    stuck: StuckCollective = field(default_factory=StuckCollective)


class RendezvousClient:
    """Client of the rendezvous service, connected by a thread of its own until `close`. `join`, `guard` and `close`
    belong to one thread; others may call the rest. `ClientState` decides.

    Args:
        task: from the launcher.
        multiple: number of members of which worlds that train are multiples.

    Attributes:
        task: as given.

    Raises:
        ConfigurationError: the run's secret cannot be read.
    """

    def __init__(self, task: ElasticTask, multiple: int = 1) -> None:
        self.task = task
        self._secret = read_secret(Path(task.secret_file))
        self._changed = threading.Condition()  # reentrant; guards the state
        self._state = ClientState(task, multiple)
        self._clock = ProcessClock()
        self._links = LinkChecker(task.settings.silence_timeout_s)
        self._groups = _GuardedGroups()
        self._connection = ClientConnection(
            Address.parse(task.address),
            self._secret,
            introduce=self._introduce,
            handle=self._handle,
            silence_s=task.settings.silence_timeout_s,
        )
        self._store = RendezvousStore(self._connection.send, 0)
        self._store.end()  # there is no world yet
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-client", daemon=True)
        self._thread.start()
        self._preemption = PreemptionWatch(task.settings)

    # ------------------------------------------------------------------ called by the main thread

    @property
    def store(self) -> RendezvousStore:
        """Store for building groups, under the prefix `members.name`; a new one after each `join`. `abort` ends every
        wait on it.
        """
        return self._store

    def join(self, *, is_ready: bool = False, is_spare: bool = False) -> Members:
        """Leave the former world and wait for the next one. If it is smaller than `min_ranks`, its members keep the
        state and wait.

        The first join of a run waits for all workers that were started (up to `start_timeout_s`). Groups of the former
        world must have been destroyed.

        Args:
            is_ready: this process has set up, and trains at once.
            is_spare: the others go on without this process, which waits until there are enough for a multiple.

        Raises:
            Preempted: a notice came while this process held nothing that others need, or they had finished the run.
            RunFinished: the others finished while this process was spare, stopped or unreachable.
            WorldTooSmall: no world formed within `join_timeout_s`, and none that trains may be joined later.
            ConfigurationError: the rendezvous host did not answer for `rendezvous_timeout_s`, or links to members
                are dead.
        """
        with self._changed:
            state, former, started = self._state, self._state.world, self._clock.now
            state.start_join(is_ready=is_ready, is_spare=is_spare)
            self._carry_out()
            while state.world is former:
                if returns := state.may_return:
                    state.rename()
                if state.is_unneeded():
                    raise RunFinished("the others have finished the run, and need this process no more")
                if state.is_dispensable and self.notice is not None:
                    state.leave()
                    self._carry_out()
                    raise Preempted(self.notice)
                if returns:
                    self._introduce(self._connection.send)
                self._check_host(started)
                state.check_wait(started, self._clock.now)
                self._changed.wait(_LOOK_S)
            assert state.world is not None
            members = state.world.members
            self._store.end()
            self._store = RendezvousStore(self._connection.send, members.number)
            if state.world.broken_at is not None:
                self._store.end()
            return members

    def withdraw_if_early(self) -> bool:
        """Leave this first world again if others had set up before it: they train in it, and this process cannot
        receive their state yet. The others go on without it until it joins; True if so.
        """
        with self._changed:
            is_early = self._state.withdraw_if_early(self._clock.now)
            self._carry_out()
            return is_early

    def world_exists(self) -> bool:
        """Return True if this run had a world already when this process registered.

        Raises:
            ConfigurationError: the rendezvous host did not answer for `rendezvous_timeout_s`, or refuses this process.
        """
        with self._changed:
            started = self._clock.now
            while (answer := self._state.world_exists) is None:
                self._check_host(started)
                self._changed.wait(_LOOK_S)
            return answer

    def guard(self, members: Members, abort: Callable[[], None]) -> None:
        """Watch a world until it breaks or the next one is guarded.

        Call it before the groups are built: a member may die while they are.

        Args:
            members: from `join`.
            abort: called once, from any thread, when the world breaks; ends all waits for peers.
        """
        with self._changed:
            is_first = members.nodes.index(members.nodes[members.rank]) == members.rank
            self._links.enter(self._state.guard(members), self._clock.now, is_first=is_first)
            self._groups = _GuardedGroups(abort)
            self._carry_out()

    def abort(self, reason: str) -> None:
        """Break the present world and abort the groups of all its ranks; a no-op if it is broken already.

        Args:
            reason: one sentence, perhaps of a network library; a cause that a launcher or the host reports replaces
                it.
        """
        with self._changed:
            self._state.abort(_NOISE.sub("", reason).strip() or "the world broke", self._clock.now)
            self._carry_out()

    def record_progress(self) -> None:
        """Record a step of training, or that all ranks have met to change the world: while steps are made, links
        between ranks are not probed.
        """
        self._state.record_progress()

    @property
    def reason(self) -> str | None:
        """Reason why the last guarded world broke, as one sentence; None while it is intact.

        It may improve until the next join, when a launcher reports a death.
        """
        with self._changed:
            return self._state.guarded.reason if self._state.guarded is not None else None

    def wait_for_cause(self) -> str | None:
        """Return how the member ended that broke the last guarded world, as one sentence; None if nothing is reported
        within the time in which a silent member is detected.
        """

        def cause() -> str | None:
            world = self._state.guarded
            return world.reason if world is not None and world.rating > 1 else None

        with self._changed:
            return self._changed.wait_for(cause, self.task.settings.silence_timeout_s + 1.0)

    def has_newcomers(self) -> bool:
        """Return True if a process outside the present world has been waiting for at least `join_window_s`.

        Ranks learn it at slightly different times: let one of them decide for all.
        """
        with self._changed:
            return self._state.has_newcomers(self._clock.now)

    def finish(self) -> None:
        """Announce that the training is done, to processes that wait to join too. As long as its launcher lives, this
        process may be silent from now on, except in further calls of the Trainer.
        """
        with self._changed:
            self._state.finish()
            self._carry_out()

    def record_call(self, *, is_running: bool) -> None:
        """Record that a call of the Trainer begins or ends: in one after the training others may wait for this process
        in a collective.
        """
        with self._changed:
            self._state.record_call(is_running=is_running)
            self._carry_out()

    def is_finished(self) -> bool:
        """Return True if the run has been finished since this process started, by others or by all."""
        with self._changed:
            return self._state.is_finished()

    def is_late(self) -> bool:
        """Return True if others have finished the run, or a later one of the script, without this process."""
        with self._changed:
            return self._state.is_late()

    def listen(self) -> None:
        """Begin a training: receive notices from now on, also if a Trainer has replaced the signal handler."""
        self._preemption.listen()
        with self._changed:
            self._state.begin_fit()
            self._carry_out()

    @property
    def notice(self) -> str | None:
        """Notice of preemption of this process, as a sentence; None without one."""
        return self._preemption.notice

    def close(self, failure: str | None = None) -> None:
        """Leave for good, and free thread, descriptors and connection.

        Args:
            failure: of this process, as one sentence. It breaks the world if exit handlers keep the process alive for
                longer than the silence timeout: until then its launcher may report how it ended, and the others may
                fail in the same way.
        """
        self._preemption.close()
        if failure is None or not self._state.is_training:
            self._leave()
        else:
            threading.Thread(target=self._leave_broken, args=(failure,), daemon=True).start()

    def _leave_broken(self, failure: str) -> None:
        """Break the world for this failure after the silence timeout, unless it breaks before, and leave it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._state.is_training, self.task.settings.silence_timeout_s)
            self._state.abort(failure, self._clock.now, is_cause=True)
            self._carry_out()
        self._leave()

    def _leave(self) -> None:
        with self._changed:
            # A host that is restarted now, or its successor, learns it from the next introduction.
            self._changed.wait_for(lambda: self._state.is_finish_known, self.task.settings.silence_timeout_s)
            self._state.leave()
            self._carry_out()
        self._closed.set()
        self._connection.wake()
        self._thread.join(timeout=_GOODBYE_S)
        self._store.end()

    def _check_host(self, started: float) -> None:
        """Raise if the host has not answered for too long."""
        link, limit = self._connection, self.task.settings.rendezvous_timeout_s
        if link.is_connected:
            return
        host = link.host
        if link.is_refused and self._state.world_exists is None:
            raise ConfigurationError(f"the rendezvous host at {host.address} refuses this process: {host.error}")
        if self._clock.now - max(started, link.lost_at or 0.0) > limit:
            raise ConfigurationError(
                f"the rendezvous host at {host.address} has not answered for {limit:g} s ({host.error}): see that "
                "it runs and can be reached, then give the same command again, which resumes"
            )

    def _carry_out(self) -> None:
        """Send what the state has queued, and abort the groups of worlds that broke."""
        state = self._state
        messages, state.outbox = state.outbox, []  # what cannot be sent is not tried again
        for message in messages:
            self._connection.send(message)
        for number in state.broken:
            if self._store.world <= number:
                self._store.end()
            if self._groups.abort is None or state.guarded is None or state.guarded.members.number != number:
                continue
            try:
                self._groups.abort()
            except Exception:  # this thread must go on: it ends a process that hangs
                logger.exception("the groups of a broken world could not all be aborted")
        state.broken.clear()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        step_s = min(_LONGEST_STEP_S, self.task.settings.heartbeat_interval_s / 2)
        while not self._closed.is_set():
            try:
                losses = self._connection.losses
                self._connection.step(self._clock.tick(), step_s)
                with self._changed:
                    if self._connection.losses != losses:
                        self._store.fail_waiting()
                    self._tick(self._clock.tick())
            except Exception:  # this thread must go on: it ends a process that hangs
                logger.exception("the rendezvous client could not do its work")
                self._closed.wait(step_s)
            self._end_if_hanging()
        self._connection.close()
        if self._links.prober is not None:
            self._links.prober.close()

    def _tick(self, now: float) -> None:
        state = self._state
        state.beat(now)
        if state.eviction is not None and state.eviction.probes and self._links.do_answer(now):
            state.end_probes()
        if state.is_training:
            is_connected = self._connection.is_connected
            unreachable = self._links.unreachable(state.progress, now, is_connected=is_connected)
            state.report_links(unreachable, now, is_connected=is_connected)
        self._carry_out()

    def _introduce(self, send: Callable[[Message], object], *, is_full: bool = False) -> None:
        """Register at the host, on a new connection or under a new name."""
        with self._changed:
            self._listen_for_probes()
            probe = self._links.prober.endpoint if self._links.prober is not None else None
            send(self._state.introduction(probe, is_full=is_full))
            self._changed.notify_all()

    def _listen_for_probes(self) -> None:
        """Open the socket for probes of other nodes; on one machine there is none."""
        host, former = self._connection.host.local_address, self._links.prober
        if host is None or (former is not None and former.endpoint[0] == host):
            return
        if former is not None:
            self._connection.unwatch(former.socket)
            former.close()
        prober = Prober(self._secret, host)
        self._connection.watch(prober.socket, lambda: prober.receive(self._clock.now))
        self._links.use(prober, self._clock.now)

    def _handle(self, message: Message) -> None:
        match message:
            case {"t": "stored"}:
                self._store.answer(message)
                return
            case {"t": "introduce", "full": bool(is_full)}:
                self._introduce(self._connection.send, is_full=is_full)
                return
        with self._changed:
            state, eviction = self._state, self._state.eviction
            state.receive(message, self._clock.now)
            if state.eviction is not None and state.eviction is not eviction:
                self._links.leave(state.eviction.probes, self._clock.now)
            self._carry_out()
            self._changed.notify_all()

    def _end_if_hanging(self) -> None:
        """End this process if its main thread does not return from a broken world, since all others wait for it."""
        with self._changed:
            now = self._clock.now
            limit_s = self._state.exceeded_limit_s(now)
            if limit_s is None and self._state.awaited_since is not None:
                limit_s = self._groups.stuck.exceeded_limit_s(now)
        if limit_s is not None:
            end_hanging_process(limit_s, self.reason)
