"""Server of the rendezvous service: authenticated connections, and what the host does with their messages.

One thread with one selector serves the listener and all connections. A `Service` handles the messages:
`RendezvousService` is the host's, with membership and with the keys that groups are built on.

Unauthenticated clients are bounded in descriptors, time and memory: a few hundred bytes within five seconds each, and
so many at once as clients are missing, with some to spare. Above that, others wait until one is authenticated or has
had a fifth of a second, and then the oldest of the busiest address is closed. So a crowd that returns is admitted as
fast as it can authenticate, and one that never does cannot keep others out.

A connection may carry the messages of other clients, as that of a launcher does for its workers
(`moe_lightning.elastic.relay`). These messages of it concern the server alone:

    {"t": "for", "clients": [key, ...]}      the next message comes from, or goes to, these of its clients
    {"t": "gone", "client": key}             that client's connection has ended, or shall
    {"t": "beat", ..., "clients": [[key, progress], ...]}    the launcher's heartbeat, and those of its clients
"""

from __future__ import annotations

import itertools
import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from moe_lightning.elastic.protocol import (
    Address,
    Channel,
    Message,
    ProcessClock,
    Refused,
    WakingSelector,
    WireError,
    encode,
    loopback_of_name,
)
from moe_lightning.elastic.rendezvous_state import CurrentWorld, RendezvousState
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.abort import tune

MAX_UNAUTHENTICATED = 256
"""Most unauthenticated connections at once, beyond one for each client that is missing."""

LONGEST_PATH = 100
"""Bytes of a folder whose socket has a path that Unix sockets can have."""

_MOST_CARRIED = 4096  # clients of one connection
_PROOF_S = 5.0
_CHANCE_S = 0.2  # an unauthenticated connection is not closed for newer ones before
_DECISION_S = 50e-6  # for each client, between two decisions: they cost time in proportion
_TICK_S = 0.05
_CHUNK = 1 << 16
_MOST_UNSENT = 16 << 20
_ACCEPTS = 16  # at most in one round, so that authenticated clients are served
_PAUSE_S = 0.2  # without descriptors for another connection
_MOST_FAILURES = 10
_BACKLOG = 1 << 16  # the system has a lower limit

logger = logging.getLogger(__name__)


class Service(Protocol):
    """Handler of a server's clients, which are numbered. All calls come from the server's thread.

    Attributes:
        outbox: (client, message) to be sent, in order.
        dropped: clients whose connections are to be closed.
    """

    outbox: list[tuple[int, Message]]
    dropped: list[int]

    @property
    def missing(self) -> int:
        """Number of clients that are expected and not connected."""

    def admit(self, client: int) -> None:
        """Handle a connection that was authenticated."""

    def receive(self, client: int, message: Message, now: float, *, is_local: bool) -> None:
        """Handle a message; `is_local`: of a client on this machine."""

    def disconnect(self, client: int, now: float) -> None:
        """Handle the end of a connection."""

    def decide(self, now: float) -> bool:
        """Make the decisions that are due, after all input; return False to end the server."""


@dataclass(kw_only=True)
class _Connection:
    socket: socket.socket
    channel: Channel
    peer: str
    is_local: bool
    since: float
    is_writing: bool = False
    clients: dict[int, int] = field(default_factory=dict)  # that it carries: key -> client
    sender: int | None = None  # key of the client that the next message comes from


class ServerThread:
    """Thread that serves all connections until `close`.

    Args:
        listener: bound and listening.
        secret: of the run.
        service: handles the messages and decides.
    """

    def __init__(self, listener: socket.socket, secret: bytes, service: Service) -> None:
        self._listener, self._secret, self._service = listener, secret, service
        self._clock = ProcessClock()
        self._connections: dict[int, _Connection] = {}
        self._carriers: dict[int, tuple[int, int]] = {}  # carried client -> connection, its key there
        self._unauthenticated: dict[int, None] = {}  # oldest first
        self._ids = itertools.count(1)
        self._paused_until = 0.0
        self._decide_at = 0.0
        self._has_input = False
        self._selector = WakingSelector()
        self._closed = threading.Event()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="elastic-server", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the service decide at once; from any thread."""
        self._selector.wake()

    @property
    def has_ended(self) -> bool:
        """True once the thread has ended."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the thread and close all connections."""
        self._closed.set()
        self.wake()
        self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        failures = 0  # in a row
        try:
            while not self._closed.is_set():
                try:
                    self._round()
                    failures = 0
                except Exception:  # a defect that one message found shall not end the host
                    logger.exception("the server could not do its work")
                    failures += 1
                    if failures == _MOST_FAILURES:
                        return  # another one may do better
        finally:
            for connection in list(self._connections):
                self._close(connection)
            self._listener.close()
            self._selector.close()

    def _round(self) -> None:
        """Handle all input before any decision is made on missing input."""
        due_s = self._decide_at - time.monotonic() if self._has_input else _TICK_S
        ready = self._selector.select(min(_TICK_S, max(0.0, due_s)))
        now = self._clock.tick()
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept(now)
            elif key.fileobj is self._selector.woken:
                self._has_input = True
                self._selector.drain()
            elif key.data in self._connections:
                if events & selectors.EVENT_READ:
                    self._read(key.data, now)
                if events & selectors.EVENT_WRITE and key.data in self._connections:
                    self._write(key.data)
        while self._unauthenticated and now - self._connections[next(iter(self._unauthenticated))].since > _PROOF_S:
            self._close(next(iter(self._unauthenticated)))
        if self._paused_until and time.monotonic() > self._paused_until:
            self._paused_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        if time.monotonic() >= self._decide_at:
            self._has_input = False
            if not self._service.decide(now):
                self._closed.set()
            self._decide_at = time.monotonic() + _DECISION_S * (len(self._connections) + len(self._carriers))
        self._deliver()

    def _deliver(self) -> None:
        touched: dict[int, None] = {}
        outbox = [*self._service.outbox]
        self._service.outbox.clear()  # what cannot be sent is not tried again
        for _, entries in itertools.groupby(outbox, key=lambda entry: id(entry[1])):
            self._queue(list(entries), touched)
        for number in touched:
            self._write(number)
        for client in self._service.dropped:
            self._close(client)
        self._service.dropped.clear()

    def _queue(self, entries: Sequence[tuple[int, Message]], touched: dict[int, None]) -> None:
        """Queue one message for all its clients, once for those that one connection carries; close them if it is too
        long."""
        carried: dict[int, list[int]] = {}
        try:
            payload = encode(entries[0][1])
        except WireError as error:  # text that arrived in raw UTF-8 may be longer in escapes
            logger.warning("a message cannot be sent: %s", error)
            self._service.dropped += [client for client, _ in entries]
            return
        for client, _ in entries:
            if client in self._carriers:
                number, key = self._carriers[client]
                carried.setdefault(number, []).append(key)
            elif client in self._connections:
                self._connections[client].channel.send_encoded(payload)
                touched[client] = None
        for number, keys in carried.items():
            channel = self._connections[number].channel
            channel.send({"t": "for", "clients": keys})
            channel.send_encoded(payload)
            touched[number] = None

    # ------------------------------------------------------------------ connections

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTS):
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED + self._service.missing:
                number = self._oldest_of_busiest_peer()
                wait_s = self._connections[number].since + _CHANCE_S - now
                if wait_s > 0:
                    self._pause(wait_s)
                    return
                self._close(number)
            try:
                accepted, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._unauthenticated:
                    self._close(self._oldest_of_busiest_peer())
                    continue
                logger.warning("no connection more can be taken: %s", error)
                self._pause(_PAUSE_S)
                return
            self._add(accepted, peer, now)

    def _pause(self, seconds: float) -> None:
        """Accept no connection for a while."""
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + seconds

    def _oldest_of_busiest_peer(self) -> int:
        """Return the oldest unauthenticated connection of the address with most of them."""
        most, _ = Counter(self._connections[number].peer for number in self._unauthenticated).most_common(1)[0]
        return next(number for number in self._unauthenticated if self._connections[number].peer == most)

    def _add(self, accepted: socket.socket, peer: object, now: float) -> None:
        accepted.setblocking(False)
        host, is_local = "", True
        if isinstance(peer, tuple):
            tune(accepted)
            host, is_local = str(peer[0]), peer[0] == accepted.getsockname()[0]
        number = next(self._ids)
        self._connections[number] = _Connection(
            socket=accepted,
            channel=Channel(self._secret, is_server=True),
            peer=host,
            is_local=is_local,
            since=now,
        )
        self._unauthenticated[number] = None
        self._selector.register(accepted, selectors.EVENT_READ, number)

    def _read(self, number: int, now: float) -> None:
        connection = self._connections[number]
        try:
            data = connection.socket.recv(_CHUNK)
            if not data:
                raise WireError("it has ended")
            messages = connection.channel.receive(data)
            if connection.channel.is_open:
                self._admit(number)
            for message in messages:
                if number in self._connections:  # no message before has closed it
                    self._dispatch(number, connection, message, now)
            if connection.channel.outgoing:
                self._write(number)
        except BlockingIOError:
            return
        except Refused as error:
            logger.warning("a connection from %s was refused: %s", connection.peer or "this machine", error)
            with suppress(OSError):
                connection.socket.send(connection.channel.outgoing)
            self._close(number)
        except (OSError, WireError) as error:
            logger.debug("the connection from %s: %s", connection.peer or "this machine", error)
            self._close(number)

    def _admit(self, number: int) -> None:
        """Count a connection among the authenticated ones; one that waits may take its place."""
        if number in self._unauthenticated:
            del self._unauthenticated[number]
            self._paused_until = min(self._paused_until, time.monotonic())
            self._service.admit(number)

    def _dispatch(self, number: int, connection: _Connection, message: Message, now: float) -> None:
        """Handle a message; if it is malformed, close the client that it comes from, not those beside it."""
        self._has_input = True
        match message:
            case {"t": "for", "clients": [int(key)]}:
                connection.sender = key
                return
        client = number
        try:
            client, connection.sender = self._sender(number, connection), None
            self._handle(client, connection, message, now)
        except Exception as error:
            is_defect, peer = not isinstance(error, WireError), connection.peer or "this machine"
            logger.warning("a message from %s is refused: %s", peer, error, exc_info=is_defect)
            self._close(client)

    def _handle(self, client: int, connection: _Connection, message: Message, now: float) -> None:
        match message:
            case {"t": "gone", "client": int(key)}:
                if (carried := connection.clients.get(key)) is not None:
                    self._forget(carried, now)
                return
            case {"t": "beat", "clients": list(beats)}:
                for key, progress in beats:
                    if (carried := connection.clients.get(key)) is not None:
                        alive = {"t": "alive", "progress": progress}
                        self._service.receive(carried, alive, now, is_local=connection.is_local)
        self._service.receive(client, message, now, is_local=connection.is_local)

    def _sender(self, number: int, connection: _Connection) -> int:
        """Return the client that a message on a connection comes from."""
        key = connection.sender
        if key is None:
            return number
        if key not in connection.clients:
            if len(connection.clients) >= _MOST_CARRIED:
                raise WireError(f"more than {_MOST_CARRIED} clients on one connection")
            client = connection.clients[key] = next(self._ids)
            self._carriers[client] = number, key
        return connection.clients[key]

    def _write(self, number: int) -> None:
        """Send what the system accepts; the selector sends the rest. A client that does not read is closed."""
        connection = self._connections.get(number)
        if connection is None:
            return
        outgoing = connection.channel.outgoing
        try:
            with suppress(BlockingIOError):  # the rest goes when the selector says so
                if outgoing:
                    del outgoing[: connection.socket.send(outgoing)]
        except OSError:
            self._close(number)
            return
        if len(outgoing) > _MOST_UNSENT:
            self._close(number)
        elif bool(outgoing) != connection.is_writing:
            connection.is_writing = bool(outgoing)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)
            self._selector.modify(connection.socket, events, number)

    def _close(self, client: int) -> None:
        """Close a connection, or let the one that carries this client close that."""
        if client in self._carriers:
            number, key = self._carriers[client]
            self._forget(client, self._clock.now)
            self._connections[number].channel.send({"t": "gone", "client": key})
            self._write(number)
            return
        connection = self._connections.pop(client, None)
        if connection is None:
            return
        self._unauthenticated.pop(client, None)
        self._selector.unregister(connection.socket)
        with suppress(OSError):  # a process that was forked from this one may hold the socket, too
            connection.socket.shutdown(socket.SHUT_RDWR)
        connection.socket.close()
        self._has_input = True
        self._service.disconnect(client, self._clock.now)
        for carried in connection.clients.values():
            del self._carriers[carried]
            self._service.disconnect(carried, self._clock.now)

    def _forget(self, client: int, now: float) -> None:
        """Forget a client that a connection carried."""
        number, key = self._carriers.pop(client)
        del self._connections[number].clients[key]
        self._has_input = True
        self._service.disconnect(client, now)


def listen_privately(path: Path) -> socket.socket:
    """Return a Unix socket that listens at a path, in a folder that only this user reaches."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    return listener


def listen(bind: str) -> socket.socket:
    """Return a TCP socket that listens at one address.

    Raises:
        ConfigurationError: it is in use or not of this machine, or a name that only this machine reaches.
    """
    address = Address.parse(bind, least_port=0)
    if (loopback := loopback_of_name(address)) is not None:
        raise ConfigurationError(
            f"{address.host} is {loopback} on this machine (/etc/hosts), which no other one reaches: bind this "
            "machine's address, and give it in rdzv_endpoint"
        )
    try:
        family, target = address.resolve()
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {bind} ({error.strerror}): choose another") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen on {bind} ({error.strerror}): choose another") from None
    return listener


_LONGEST_KEY = 1024
_MOST_BYTES = 64 << 20


class WorldStore:
    """Keys of the newest world; requests for missing keys are answered when the keys are set, or the world ends.

    Args:
        outbox: gets (connection, answer), in order.

    Attributes:
        outbox: as given.
    """

    def __init__(self, outbox: list[tuple[int, Message]]) -> None:
        self._number = 0
        self._values: dict[str, str] = {}
        self._bytes = 0
        self._waits: dict[str, list[tuple[int, Message]]] = {}  # a missing key -> connections and their requests
        self.outbox = outbox

    def begin(self, number: int) -> None:
        """Start a world: drop the keys of the former one, and refuse the requests that wait for them."""
        if number == self._number:
            return
        self._number, self._bytes = number, 0
        self._values.clear()
        for waits in self._waits.values():
            for connection, request in waits:
                self._refuse(connection, request)
        self._waits.clear()

    def receive(self, connection: int, request: Message) -> None:
        """Handle a request `{"t": "store", "n": int, "number": world, "op": name, "keys": [...], "value": text}`.

        Raises:
            WireError: it is malformed, or above a limit.
        """
        match request:
            case {"n": int(), "number": int(number), "op": str(op), "keys": list(keys), "value": str(value)} if (
                keys and all(isinstance(key, str) and len(key) <= _LONGEST_KEY for key in keys)
            ):
                pass
            case _:
                raise WireError("a malformed request of the store")
        if number != self._number:
            self._refuse(connection, request)
        elif op in ("get", "wait"):
            self._answer_read(connection, request)
        else:
            self._answer(connection, request, self._apply(op, keys, value))
            if keys[0] in self._values:
                for waiting in self._waits.pop(keys[0], ()):
                    self._answer_read(*waiting)

    def _apply(self, op: str, keys: list[str], value: str) -> Any:
        key = keys[0]
        match op:
            case "set":
                return self._set(key, value)
            case "add":
                try:
                    total = int(self._values.get(key, "0")) + int(value)
                except ValueError:
                    raise WireError("an addition to what is no number") from None
                self._set(key, str(total))
                return total
            case "compare_set":
                wanted, _, new = value.partition("\0")
                if self._values.get(key, "") == wanted:
                    self._set(key, new)
                return self._values.get(key, wanted)
            case "check":
                return all(key in self._values for key in keys)
            case "delete":
                former = self._values.pop(key, None)
                self._bytes -= 0 if former is None else len(key) + len(former)
                return former is not None
        raise WireError("an unknown operation of the store")

    def _set(self, key: str, value: str) -> None:
        nbytes = self._bytes + len(value) - len(self._values.get(key, "")) + (0 if key in self._values else len(key))
        if nbytes > _MOST_BYTES:
            raise WireError(f"more than {_MOST_BYTES} bytes in the store")
        self._values[key], self._bytes = value, nbytes

    def _answer_read(self, connection: int, request: Message) -> None:
        """Answer a get or a wait if all its keys are set; else let it wait for a missing one."""
        keys = request["keys"]
        missing = next((key for key in keys if key not in self._values), None)
        if missing is not None:
            self._waits.setdefault(missing, []).append((connection, request))
            return
        self._answer(connection, request, self._values[keys[0]] if request["op"] == "get" else True)

    def _answer(self, connection: int, request: Message, value: Any) -> None:
        self.outbox.append((connection, {"t": "stored", "n": request["n"], "value": value}))

    def _refuse(self, connection: int, request: Message) -> None:
        self.outbox.append((connection, {"t": "stored", "n": request["n"], "error": "this world is over"}))


_READY: Message = {"t": "ready"}


class RendezvousService:
    """Service of the rendezvous host: membership, and the keys of the newest world.

    Args:
        state: handles the messages and decides.
        commit: makes a new world durable before its members learn of it; returns False if this server must form no
            more worlds, and ends then.
    """

    def __init__(self, state: RendezvousState, commit: Callable[[CurrentWorld], bool] | None = None) -> None:
        self._state, self._commit = state, commit
        self.outbox, self.dropped = state.clients.outbox, state.clients.dropped
        self._store = WorldStore(self.outbox)

    @property
    def missing(self) -> int:
        """Number of members that are expected and not connected."""
        return self._state.missing

    def admit(self, client: int) -> None:
        """Ask a client to introduce itself."""
        self.outbox.append((client, _READY))

    def receive(self, client: int, message: Message, now: float, *, is_local: bool) -> None:
        """Handle a message of a client."""
        if message.get("t") == "store":
            self._store.receive(client, message)
        else:
            self._state.receive(client, message, now, is_local=is_local)

    def disconnect(self, client: int, now: float) -> None:
        """Record that a connection has ended."""
        self._state.disconnect(client, now)

    def decide(self, now: float) -> bool:
        """Make the decisions that are due; return False if this host must form no more worlds."""
        former = self._state.world
        self._state.tick(now)
        world = self._state.world
        if world is not None and world is not former and self._commit is not None and not self._commit(world):
            self.outbox.clear()  # nobody learns of it
            return False
        if world is not None:
            self._store.begin(world.number)
        return True
