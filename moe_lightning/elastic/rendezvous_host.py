"""Rendezvous host: the server for membership and for the keys that groups are built on.

A launcher embeds it behind a Unix socket in a private folder; between several machines it runs on a safe host:

    python -m moe_lightning.elastic.rendezvous_host --bind HOST:PORT --secret-file FILE

It makes the file, and every machine needs a copy: clients without the secret are refused. Training goes on while the
host is down or silent, and reconnects when it is started again.

One thread with one selector serves the listener and all connections. Unauthenticated clients are bounded in
descriptors, time and memory: a few hundred bytes within five seconds each, and so many at once as members are missing,
with some to spare. Above that, others wait until one is authenticated or has had a fifth of a second, and then the
oldest of the busiest address is closed. So a crowd that returns is admitted as fast as it can authenticate, and one
that never does cannot keep others out. `WorldStore` drops the keys of a world when the next one forms.
"""

from __future__ import annotations

import logging
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moe_lightning.arguments import Parser
from moe_lightning.config import validated
from moe_lightning.elastic.membership import LOOPBACK
from moe_lightning.elastic.protocol import (
    Address,
    Channel,
    Message,
    ProcessClock,
    Refused,
    WireError,
    create_secret,
    encode,
)
from moe_lightning.elastic.rendezvous_state import RECONNECT_S, CurrentWorld, RendezvousState
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import PrivateFolder
from moe_lightning.parallel.abort import tune

_LONGEST_KEY = 1024
_MOST_BYTES = 64 << 20
_MOST_WAITS = 256  # of one connection


class WorldStore:
    """Keys of the newest world; requests for missing keys are answered when the keys are set.

    Attributes:
        outbox: (connection, answer) to be sent, in order.
    """

    def __init__(self) -> None:
        self._number = 0
        self._values: dict[str, str] = {}
        self._bytes = 0
        self._waits: dict[str, list[tuple[int, Message]]] = {}  # a missing key -> (connection, request)
        self._open: Counter[int] = Counter()  # requests of each connection that wait
        self.outbox: list[tuple[int, Message]] = []

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
        self._open.clear()

    def forget(self, connection: int) -> None:
        """Drop the requests of a closed connection."""
        self._open.pop(connection, None)

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
            if not self._answer_read(connection, request):
                self._open[connection] += 1
                if self._open[connection] > _MOST_WAITS:
                    raise WireError(f"more than {_MOST_WAITS} waits at once")
        else:
            self._answer(connection, request, self._apply(op, keys, value))
            if keys[0] in self._values:
                self._serve_waits(keys[0])

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
                self._bytes -= len(key) + len(self._values.get(key, ""))
                return self._values.pop(key, None) is not None
            case "count":
                return len(self._values)
        raise WireError("an unknown operation of the store")

    def _set(self, key: str, value: str) -> None:
        self._bytes += len(value) - len(self._values.get(key, "")) + (0 if key in self._values else len(key))
        if self._bytes > _MOST_BYTES:
            raise WireError(f"more than {_MOST_BYTES} bytes in the store")
        self._values[key] = value

    def _serve_waits(self, key: str) -> None:
        for connection, request in self._waits.pop(key, ()):
            if connection in self._open and self._answer_read(connection, request):
                self._open[connection] -= 1

    def _answer_read(self, connection: int, request: Message) -> bool:
        """Answer a get or a wait if all its keys are set, and return True; else let it wait for a missing one."""
        keys = request["keys"]
        missing = next((key for key in keys if key not in self._values), None)
        if missing is not None:
            self._waits.setdefault(missing, []).append((connection, request))
            return False
        self._answer(connection, request, self._values[keys[0]] if request["op"] == "get" else True)
        return True

    def _answer(self, connection: int, request: Message, value: Any) -> None:
        self.outbox.append((connection, {"t": "stored", "n": request["n"], "value": value}))

    def _refuse(self, connection: int, request: Message) -> None:
        self.outbox.append((connection, {"t": "stored", "n": request["n"], "error": "this world is over"}))


MAX_UNAUTHENTICATED = 256
"""Most unauthenticated connections at once, beyond one for each member that is missing."""

_PROOF_S = 5.0
_CHANCE_S = 0.2  # an unauthenticated connection is not closed for newer ones before
_DECISION_S = 50e-6  # for each connection, between two decisions: they cost time in proportion
_TICK_S = 0.05
_CHUNK = 1 << 16
_MOST_UNSENT = 16 << 20
_ACCEPTS = 16  # at most in one round, so that authenticated clients are served
_PAUSE_S = 0.2  # without descriptors for another connection

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Connection:
    socket: socket.socket
    channel: Channel
    peer: str
    is_local: bool
    since: float
    is_writing: bool = False


class ServerThread:
    """Thread that serves all connections until `close`.

    Args:
        listener: bound and listening.
        secret: of the run.
        state: handles the messages and decides.
        commit: makes a new world durable before its members learn of it; returns False if this server must form no
            more worlds, and ends then.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        state: RendezvousState,
        commit: Callable[[CurrentWorld], bool] | None = None,
    ) -> None:
        self._listener, self._secret, self._state, self._commit = listener, secret, state, commit
        self._store = WorldStore()
        self._clock = ProcessClock()
        self._connections: dict[int, _Connection] = {}
        self._unauthenticated: dict[int, None] = {}  # oldest first
        self._next_id = 0
        self._paused_until = 0.0
        self._decide_at = 0.0
        self._has_input = False
        self._payload: tuple[Message, bytes] | None = None  # the last message and its encoding
        self._selector = selectors.DefaultSelector()
        self._closed = threading.Event()
        self._wake, self._woken = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="elastic-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close all connections."""
        self._closed.set()
        with suppress(OSError):  # it may have seen the flag already
            self._wake.send(b"\0")
        self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._round()
        finally:
            for connection in list(self._connections):
                self._close(connection)
            for each in (self._listener, self._wake, self._woken):
                each.close()
            self._selector.close()

    def _round(self) -> None:
        """Handle all input before any decision is made on missing input."""
        due_s = self._decide_at - time.monotonic() if self._has_input else _TICK_S
        ready = self._selector.select(min(_TICK_S, max(0.0, due_s)))
        now = self._clock.tick()
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept(now)
            elif isinstance(key.data, int) and key.data in self._connections:
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
            self._decide(now)
        self._deliver()

    def _decide(self, now: float) -> None:
        self._has_input = False
        former = self._state.world
        try:
            self._state.tick(now)
        except Exception:  # a defect in one decision shall not silence the host
            logger.exception("the rendezvous host could not decide")
        world = self._state.world
        if world is not None and world is not former and self._commit is not None and not self._commit(world):
            self._state.outbox.clear()  # nobody learns of it
            self._closed.set()
        elif world is not None:
            self._store.begin(world.number)
        self._decide_at = time.monotonic() + _DECISION_S * len(self._connections)

    def _deliver(self) -> None:
        for outbox in (self._state.outbox, self._store.outbox):
            touched: dict[int, None] = {}
            for number, message in outbox:
                if (connection := self._connections.get(number)) is not None:
                    connection.channel.send_encoded(self._encode(message))
                    touched[number] = None
            outbox.clear()
            for number in touched:
                self._write(number)
        for number in self._state.dropped:
            self._close(number)
        self._state.dropped.clear()

    def _encode(self, message: Message) -> bytes:
        """Encode a message once for all connections that it goes to in turn."""
        if self._payload is None or self._payload[0] is not message:
            self._payload = message, encode(message)
        return self._payload[1]

    # ------------------------------------------------------------------ connections

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTS):
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED + self._state.missing:
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
        self._next_id += 1
        self._connections[self._next_id] = _Connection(
            socket=accepted,
            channel=Channel(self._secret, is_server=True),
            peer=host,
            is_local=is_local,
            since=now,
        )
        self._unauthenticated[self._next_id] = None
        self._selector.register(accepted, selectors.EVENT_READ, self._next_id)

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
        except Exception:  # a defect that one client found shall not end the others' host
            logger.exception("the connection from %s is given up", connection.peer or "this machine")
            self._close(number)

    def _admit(self, number: int) -> None:
        """Count a connection among the authenticated ones; one that waits may take its place."""
        if number in self._unauthenticated:
            del self._unauthenticated[number]
            self._paused_until = min(self._paused_until, time.monotonic())

    def _dispatch(self, number: int, connection: _Connection, message: Message, now: float) -> None:
        self._has_input = True
        if message.get("t") == "store":
            self._store.receive(number, message)
        else:
            self._state.receive(number, message, now, is_local=connection.is_local)

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

    def _close(self, number: int) -> None:
        connection = self._connections.pop(number, None)
        if connection is None:
            return
        self._unauthenticated.pop(number, None)
        self._selector.unregister(connection.socket)
        with suppress(OSError):  # a process that was forked from this one may hold the socket, too
            connection.socket.shutdown(socket.SHUT_RDWR)
        connection.socket.close()
        self._has_input = True
        self._state.disconnect(number, self._clock.now)
        self._store.forget(number)


_LONGEST_PATH = 100  # bytes of a folder whose socket has a path that Unix sockets can have
_BACKLOG = 1 << 16  # the system has a lower limit


@validated
class RendezvousServer:
    """Rendezvous server, open until `close`.

    Args:
        bind: address to listen on, "host:port" with port 0 for any; None for a Unix socket that only this user
            reaches.
        secret_file: of the run, made if missing; None for one in the private folder.

    Attributes:
        address: for clients.
        secret_file: for clients.

    Raises:
        ConfigurationError: the address is in use or not of this machine, or `create_secret` refuses the file.
    """

    def __init__(self, *, bind: str | None = None, secret_file: str | Path | None = None) -> None:
        self._folder = PrivateFolder(longest=_LONGEST_PATH) if bind is None or secret_file is None else None
        self.secret_file = Path(secret_file) if secret_file is not None else self._private("secret")
        try:
            secret = create_secret(self.secret_file)
            listener = _unix_listener(self._private("socket")) if bind is None else listen(bind)
        except ConfigurationError:
            self._remove_folder()
            raise
        name = listener.getsockname()
        self.address = Address(path=name) if isinstance(name, str) else Address(host=name[0], port=name[1])
        # a host at an address that is known may have been restarted: members first report the world that it knew
        state = RendezvousState(startup_grace_s=0.0 if bind is None or bind.endswith(":0") else RECONNECT_S)
        self._server: ServerThread | None = ServerThread(listener, secret, state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the server and its connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._remove_folder()

    def _private(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder.path / name

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()


def _unix_listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    return listener


def listen(bind: str) -> socket.socket:
    """Return a TCP socket that listens at one address.

    Raises:
        ConfigurationError: it is in use or not of this machine.
    """
    address = Address.parse(bind)
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


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM."""
    parser = Parser(prog="python -m moe_lightning.elastic.rendezvous_host", description=__doc__)
    parser.add_argument("--bind", default=f"{LOOPBACK}:29510", metavar="HOST:PORT", help="port 0: any")
    parser.add_argument(
        "--secret-file", type=Path, default=Path("moe-lightning.secret"), help="made where it is not there"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each rank and launcher
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before threads start, which inherit the mask
    try:
        host = RendezvousServer(bind=options.bind, secret_file=options.secret_file)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with host:
        print(f"listening on {host.address}, secret in {host.secret_file}", flush=True)
        signal.sigwait(signals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
