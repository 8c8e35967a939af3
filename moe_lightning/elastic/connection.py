"""Clients of the rendezvous service: connection, torch store, and the launcher's client.

A `ClientConnection` reconnects by itself. One thread drives it and any thread may send. A connection on which nothing
arrives for too long is replaced, since the operating system would keep it for minutes; so a host that was only stopped
gets its clients back. On several machines a worker's connection leads to its launcher, which relays its messages.
`RendezvousStore` is the torch store on which the groups of one world are built; it fails when that world breaks.
`LauncherClient` reports deaths of workers and receives which workers are in the world.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]
from typing_extensions import override

from moe_lightning.elastic.health import NodeHealth
from moe_lightning.elastic.membership import ElasticSettings, new_token
from moe_lightning.elastic.protocol import (
    CONNECT_S,
    HANDSHAKE_S,
    Address,
    Backoff,
    Channel,
    Message,
    ProcessClock,
    Refused,
    WakingSelector,
    WireError,
    describe_error,
    encode,
    read_secret,
)
from moe_lightning.elastic.relay import HostStatus, Relay
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.abort import tune

_TIMEOUT = timedelta(seconds=60)


class RendezvousStore(Store):
    """torch store with the keys of one world, for several threads.

    Calls wait for the answer of the rendezvous host. They raise `DistNetworkError` if the world or the connection
    breaks, and `DistStoreError` without an answer in time.

    Args:
        send: sends to the rendezvous host; returns False if there is no connection.
        world: the world's number.

    Attributes:
        world: as given.
    """

    _numbers = itertools.count()  # of the requests in all worlds: a late answer is to no other request

    def __init__(self, send: Callable[[Message], bool], world: int) -> None:
        super().__init__()
        self._send, self.world, self._limit = send, world, _TIMEOUT
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._is_over = False

    def answer(self, message: Message) -> None:
        """Deliver an answer to the thread that waits for it."""
        with self._lock:
            waiting = self._waiting.pop(message.get("n", -1), None)
        if waiting is not None and "value" in message:
            waiting.set_result(message["value"])
        elif waiting is not None:
            waiting.set_exception(DistNetworkError("the store of a world that is over"))

    def fail_waiting(self) -> None:
        """Fail all requests that wait for answers."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.set_exception(DistNetworkError("the connection to the store was cut"))

    def end(self) -> None:
        """Fail all requests, now and later: the world broke."""
        with self._lock:
            self._is_over = True
        self.fail_waiting()

    @override
    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        return self._limit

    @override
    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], _text(value))

    @override
    def get(self, key: str) -> bytes:
        return str(self._ask("get", [key])).encode("latin-1")

    @override
    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], str(amount)))

    @override
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return str(self._ask("compare_set", [key], f"{_text(expected)}\0{_text(desired)}")).encode("latin-1")

    @override
    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys))

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, limit=timeout)

    @override
    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]))

    def _ask(self, op: str, keys: Sequence[str], value: str = "", *, limit: timedelta | None = None) -> Any:
        seconds = (self._limit if limit is None else limit).total_seconds()
        number, answer = next(self._numbers), Future[Any]()
        with self._lock:
            if self._is_over:
                raise DistNetworkError("the store of a world that broke")
            self._waiting[number] = answer
        request = {"t": "store", "n": number, "number": self.world, "op": op, "keys": list(keys), "value": value}
        try:
            if not self._send(request):
                raise DistNetworkError("there is no connection to the store")
            return answer.result(max(0.0, seconds))
        except TimeoutError:
            raise DistStoreError(f"{op} of {', '.join(keys)} timed out after {seconds:g} s") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


_CHUNK = 1 << 16

logger = logging.getLogger(__name__)


class _Link:
    """One connection of a client, from the attempt on.

    Args:
        opened: its socket, which does not block.
        secret: of the run.
        now: the owner's time.

    Attributes:
        socket: as given.
    """

    def __init__(self, opened: socket.socket, secret: bytes, now: float) -> None:
        self.socket, self._channel = opened, Channel(secret, is_server=False)
        self._began_at = self._last_received = now
        self._is_connecting = True

    def connect(self, target: Any) -> None:
        """Begin to connect.

        Raises:
            OSError: the system refuses.
        """
        tune(self.socket)
        code = self.socket.connect_ex(target)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))

    @property
    def is_open(self) -> bool:
        """True once the other end is authenticated."""
        return self._channel.is_open

    def refusal(self, now: float, silence_s: float) -> str | None:
        """Return why this connection is given up for another one, as the end of a sentence; None while it is not."""
        if self.is_open:
            return f"it said nothing for {silence_s:g} s" if now - self._last_received > silence_s else None
        limit_s = CONNECT_S if self._is_connecting else HANDSHAKE_S
        return "it does not answer" if now - self._began_at > limit_s else None

    @property
    def local_address(self) -> str | None:
        """Address of this end; None for a Unix socket."""
        return None if self.socket.family == socket.AF_UNIX else str(self.socket.getsockname()[0])

    def finish_connecting(self) -> None:
        """
        Raises:
            OSError: the attempt has failed.
        """
        if self._is_connecting and (code := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
            raise OSError(code, os.strerror(code))
        self._is_connecting = False

    def receive(self, now: float) -> list[Message]:
        """Return the messages that have arrived.

        Raises:
            OSError: the connection is lost.
            WireError: it has ended, or the other end violates the protocol.
        """
        data = self.socket.recv(_CHUNK)
        if not data:
            raise WireError("it ended the connection")
        messages = self._channel.receive(data)
        self._last_received = now
        return messages

    def send(self, messages: Sequence[Message]) -> None:
        """Queue messages, together."""
        for payload in [encode(message) for message in messages]:  # none is sent if one is too long
            self._channel.send_encoded(payload)

    def flush(self) -> int:
        """Send what the system accepts, and return the events to wait for. Errors show when the thread reads."""
        outgoing = self._channel.outgoing
        if self._is_connecting:
            return selectors.EVENT_READ | selectors.EVENT_WRITE
        with suppress(OSError):
            if outgoing:
                del outgoing[: self.socket.send(outgoing)]
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)

    def close(self) -> None:
        """Close the socket; what the system has accepted is sent first."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()


class ClientConnection:
    """Connection to the rendezvous host or to a relay, driven by one thread; other threads may call `send` and `wake`
    only.

    Args:
        address: of the rendezvous host, or of the relay.
        secret: of the run.
        introduce: called with a function that sends the first message, whenever the host can be reached anew.
        handle: called with each message.
        silence_s: the connection is closed after so many seconds without a message.

    Attributes:
        host: status of the rendezvous host.
        is_refused: the last attempt was refused for good: another secret, another version.
        losses: number of connections that were lost.
        lost_at: the owner's time at which the last one was, or the first step.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        *,
        introduce: Callable[[Callable[[Message], None]], None],
        handle: Callable[[Message], None],
        silence_s: float,
    ) -> None:
        self._target, self._secret, self._silence_s = address, secret, silence_s
        self._introduce, self._handle = introduce, handle
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._is_introduced = False
        self._backoff = Backoff()
        self._selector = WakingSelector()
        self.host = HostStatus(address=address, error="it was not tried yet")
        self.is_refused = False
        self.losses = 0
        self.lost_at: float | None = None

    @property
    def is_connected(self) -> bool:
        """True if the rendezvous host is authenticated and knows this client, so messages can be sent."""
        return self._is_introduced

    def watch(self, other: socket.socket, ready: Callable[[], None]) -> None:
        """Call a function whenever another socket has something to read."""
        self._selector.register(other, selectors.EVENT_READ, ready)

    def unwatch(self, other: socket.socket) -> None:
        """Stop watching that socket."""
        self._selector.unregister(other)

    def send(self, *messages: Message) -> bool:
        """Queue messages, together; return False if there is no connection, and drop them."""
        with self._lock:
            if self._link is None or not self._is_introduced:
                return False
            self._link.send(messages)
            self._flush(self._link)
        return True

    def move(self, address: Address, now: float) -> None:
        """Connect to a host at this address from now on."""
        if address != self._target:
            self._backoff.reset()
            self._target = address
            self._disconnect("another launcher hosts it now", now)
            self.host = replace(self.host, address=address)

    def wake(self) -> None:
        """Make `step` return at once."""
        self._selector.wake()

    def step(self, now: float, timeout_s: float) -> None:
        """Wait for at most `timeout_s` for input or output, and handle it.

        Args:
            now: the owner's time.
        """
        self.lost_at = now if self.lost_at is None else self.lost_at
        if self._link is None:
            if now >= self._backoff.due:
                self._connect(now)
        elif (why := self._link.refusal(now, self._silence_s)) is not None:
            self._disconnect(why, now)
        for key, events in self._selector.select(timeout_s):
            if key.data is not None:
                key.data()
            elif self._link is not None and key.fileobj is self._link.socket:
                self._serve(self._link, events, now)

    def close(self) -> None:
        """Close the connection; queued messages are sent first, as far as the system accepts them."""
        self._drop()
        self._selector.close()

    # ------------------------------------------------------------------ the connection

    def _connect(self, now: float) -> None:
        try:
            family, target = self._target.resolve(self._backoff.failures)
            opened = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._disconnect(describe_error(error), now)
            return
        opened.setblocking(False)
        self._link = _Link(opened, self._secret, now)
        try:
            self._link.connect(target)
        except OSError as error:
            self._disconnect(describe_error(error), now)
            return
        self._selector.register(opened, selectors.EVENT_READ | selectors.EVENT_WRITE, None)

    def _serve(self, link: _Link, events: int, now: float) -> None:
        try:
            link.finish_connecting()
            if events & selectors.EVENT_READ:
                self._read(link, now)
            with self._lock:
                if self._link is link:  # no message has ended it
                    self._flush(link)
        except BlockingIOError:
            return
        except Refused as error:
            self._disconnect(str(error), now)
            self.is_refused = True
        except (OSError, WireError) as error:
            self._disconnect(describe_error(error), now)

    def _read(self, link: _Link, now: float) -> None:
        was_open, messages = link.is_open, link.receive(now)
        if link.is_open and not was_open:
            self._backoff.reset()
        for message in messages:
            match message:
                case {"t": "ready"}:
                    self._follow(HostStatus(address=self._target, local_address=link.local_address, error=""), now)
                case {"t": "relay"}:
                    self._follow(HostStatus.parse(message), now)
                case _:
                    self._handle(message)

    def _follow(self, host: HostStatus, now: float) -> None:
        """Introduce this client to a host that is reached; it may have been another one before."""
        self._note_loss(now)
        self.host = host
        if not host.error:
            self._introduce(self._open)

    def _note_loss(self, now: float) -> None:
        with self._lock:
            was_connected, self._is_introduced = self._is_introduced, False
        if was_connected:
            self.losses, self.lost_at = self.losses + 1, now

    def _open(self, introduction: Message) -> None:
        with self._lock:
            assert self._link is not None
            self._link.send([introduction])
            self._is_introduced, self.is_refused = True, False

    def _flush(self, link: _Link) -> None:
        """Send what the system accepts; the selector sends the rest."""
        events = link.flush()
        with suppress(KeyError):  # another thread sends while this one is being closed
            self._selector.modify(link.socket, events, None)

    def _disconnect(self, error: str, now: float) -> None:
        if self.is_connected:
            logger.info("the connection to %s is lost: %s", self.host.address, error)
        self._note_loss(now)
        self._drop()
        self.host = replace(self.host, error=error)
        self._backoff.delay(now)

    def _drop(self) -> None:
        with self._lock:
            link, self._link, self._is_introduced = self._link, None, False
        if link is not None:
            with suppress(KeyError):
                self._selector.unregister(link.socket)
            link.close()


_STEP_S = 0.1
_GOODBYE_S = 1.0
_MOST_DEATHS = 1000
_LONGEST_HOW = 200  # characters that the host keeps


@dataclass
class _Facts:
    """Facts that a launcher reports again to a host that is restarted or elected.

    Attributes:
        health: of its machine; None if that is not compared.
        deaths: of its workers.
        end: number of the newest end of the run, and of the newest world then, as the host sent them.
    """

    health: NodeHealth | None
    deaths: list[Message] = field(default_factory=list)
    end: Message = field(default_factory=dict)


class LauncherClient:
    """Connection of a launcher, open until `close`; deaths reported while it is down are sent on the next one.

    Args:
        address: of the rendezvous host.
        secret_file: of the run.
        settings: timeouts.
        expected: workers of all launchers of the run; 0 if that is not known.
        token: name of this launcher; by default a new one.
        locate: returns the present address of a rendezvous host that moves; None if it stays.
        relays: its workers connect to the host through it.
        health: of this machine, for the host to compare it with others; None: it is not compared.

    Attributes:
        token: as given; the tokens of its workers begin with it.
        health: as given, with the host's verdict.
        relay: for its workers; None if they connect to the host themselves.

    Raises:
        ConfigurationError: the host does not answer within `rendezvous_timeout_s`, turns this launcher away, or the
            secret cannot be read.
    """

    def __init__(
        self,
        address: Address,
        secret_file: Path,
        settings: ElasticSettings,
        expected: int = 0,
        token: str | None = None,
        *,
        locate: Callable[[], Address] | None = None,
        relays: bool = False,
        health: NodeHealth | None = None,
    ) -> None:
        self._locate, self._settings, self._expected = locate, settings, expected
        self.token = token or new_token()
        self._clock = ProcessClock()
        self._lock = threading.Lock()
        self.health = health
        self._facts = _Facts(health=health)
        self._received: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._known = threading.Event()
        self._closed = threading.Event()
        secret = read_secret(secret_file)
        self._connection = ClientConnection(
            address,
            secret,
            introduce=self._introduce,
            handle=self._handle,
            silence_s=settings.silence_timeout_s,
        )
        self.relay = Relay(secret, self._connection.host, self._connection.send) if relays else None
        self._thread = threading.Thread(target=self._run, name="elastic-launcher", daemon=True)
        self._thread.start()
        try:
            self._wait()
        except ConfigurationError:
            self.close()
            raise

    @property
    def address(self) -> Address:
        """Present address of the rendezvous host."""
        return self._connection.host.address

    @property
    def is_connected(self) -> bool:
        """True if the rendezvous host answers."""
        return self._connection.is_connected

    @property
    def connected(self) -> Address | None:
        """Address of the rendezvous host that answers; None if none does."""
        address = self.address  # first: the connection to it ends before it changes
        return address if self.is_connected else None

    @property
    def error(self) -> str:
        """Reason why it does not answer, as the end of a sentence."""
        return self._connection.host.error

    def report_death(self, token: str, how: str) -> None:
        """Report that the process of a worker has ended.

        Args:
            token: of the worker.
            how: end of a sentence that says how.
        """
        message = {"t": "died", "token": token, "how": how[:_LONGEST_HOW]}
        with self._lock:
            self._facts.deaths = [*self._facts.deaths[-_MOST_DEATHS:], message]
            self._connection.send(message)

    def read(self) -> list[Message]:
        """Return the messages since the last call."""
        return [self._received.get() for _ in range(self._received.qsize())]

    def close(self) -> None:
        """Close the connection, after what workers that have ended said last."""
        if self.relay is not None:
            self.relay.close(_GOODBYE_S)
        self._closed.set()
        self._connection.wake()
        self._thread.join(timeout=_GOODBYE_S)

    def _wait(self) -> None:
        limit = self._settings.rendezvous_timeout_s
        deadline = time.monotonic() + limit  # the client's own clock stands still while it looks a name up
        while not self._known.wait(_STEP_S):
            if self._connection.is_refused:
                raise ConfigurationError(f"the rendezvous host at {self.address} refuses this machine: {self.error}")
            if time.monotonic() > deadline:
                command = f"python -m moe_lightning.elastic.rendezvous_host --bind {self.address}"
                cure = f"start `{command}` and give its address"
                if self._locate is not None:
                    cure = "the launcher there leads this run, so see that other machines reach it"
                raise ConfigurationError(f"nothing answers at {self.address} for {limit:g} s ({self.error}): {cure}")

    def _introduce(self, send: Callable[[Message], None]) -> None:
        with self._lock:
            health = None if self._facts.health is None else {"time_s": time.time(), **asdict(self._facts.health)}
            send(
                {"t": "launcher", "token": self.token, "expected": self._expected, "health": health, **self._facts.end}
            )
            for message in self._facts.deaths:
                self._connection.send(message)
        if health is None:
            self._known.set()

    def _handle(self, message: Message) -> None:
        if message["t"] == "finished" and message["finished"] > self._facts.end.get("finished", 0):
            self._facts.end = {"finished": message["finished"], "world": message["world"]}
        if self.relay is not None and self.relay.takes(message):
            return
        match message:
            case {"t": "health", "refused": str(refused), "clock_offset_s": float(offset_s)} if self.health is not None:
                self.health = replace(self.health, refused=refused, clock_offset_s=offset_s)
                self._known.set()
        self._received.put(message)

    def _run(self) -> None:
        next_beat = 0.0
        while not self._closed.is_set():
            try:
                self._connection.step(self._clock.tick(), _STEP_S)
                now = self._clock.tick()
                if self._locate is not None:
                    self._connection.move(self._locate(), now)
                is_due = now >= next_beat
                if is_due:
                    next_beat = now + self._settings.heartbeat_interval_s
                    beats = {} if self.relay is None else {"clients": self.relay.take_beats()}
                    self._connection.send({"t": "beat", "progress": 0, **beats})
                if self.relay is not None:
                    self.relay.publish(self._connection.host, again=is_due)
            except Exception:  # the launcher must go on with its workers
                logger.exception("the launcher's connection could not be served")
                self._closed.wait(_STEP_S)
        self._connection.close()
