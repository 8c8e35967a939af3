"""The thread that serves a control plane: one selector over a listener and all connections, bounded in all that
strangers can take: descriptors, time, memory.

A stranger may connect and send a few hundred bytes. Who has not proved itself within seconds is closed, and where too
many try, one of the address that tries most.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from moe_lightning.elastic.clock import OwnClock
from moe_lightning.elastic.roster import Roster
from moe_lightning.elastic.wire import Channel, Message, Refused, WireError
from moe_lightning.elastic.world_store import WorldStore
from moe_lightning.parallel.abort import tune

MOST_STRANGERS = 64
"""Connections that have not proved themselves, at once."""

_PROOF_S = 5.0
_TICK_S = 0.05
_CHUNK = 1 << 16
_MOST_UNSENT = 16 << 20
_ACCEPTS = 16  # at most in one round: those who are known get their turn
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


class ControlServer:
    """Serves from its construction to `close`.

    Args:
        listener: bound and listening.
        secret: of the run.
        roster: what it serves.
    """

    def __init__(self, listener: socket.socket, secret: bytes, roster: Roster) -> None:
        self._listener, self._secret, self._roster = listener, secret, roster
        self._store = WorldStore()
        self._clock = OwnClock()
        self._connections: dict[int, _Connection] = {}
        self._strangers: dict[int, None] = {}  # in the order of their coming
        self._next_id = 0
        self._paused_until = 0.0
        self._selector = selectors.DefaultSelector()
        self._closed = threading.Event()
        self._wake, self._woken = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="elastic-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections."""
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
        """Everything that has come is taken in before anything is concluded from what has not."""
        ready = self._selector.select(_TICK_S)
        now = self._clock.tick()
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept(now)
            elif isinstance(key.data, int) and key.data in self._connections:
                if events & selectors.EVENT_READ:
                    self._read(key.data, now)
                if events & selectors.EVENT_WRITE and key.data in self._connections:
                    self._write(key.data)
        for stranger in [s for s in self._strangers if now - self._connections[s].since > _PROOF_S]:
            self._close(stranger)
        if self._paused_until and time.monotonic() > self._paused_until:
            self._paused_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        try:
            self._roster.tick(now)
        except Exception:  # a defect in one decision shall not silence the host
            logger.exception("the rendezvous host could not decide")
        if self._roster.world is not None:
            self._store.begin(self._roster.world.number)
        self._deliver()

    def _deliver(self) -> None:
        for outbox in (self._roster.outbox, self._store.outbox):
            touched: dict[int, None] = {}
            for number, message in outbox:
                if (connection := self._connections.get(number)) is not None:
                    connection.channel.send(message)
                    touched[number] = None
            outbox.clear()
            for number in touched:
                self._write(number)
        for number in self._roster.dropped:
            self._close(number)
        self._roster.dropped.clear()

    # ------------------------------------------------------------------ connections

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._strangers:
                    self._close(self._most_tiresome())
                    continue
                logger.warning("no connection more can be taken: %s", error)
                self._selector.unregister(self._listener)
                self._paused_until = time.monotonic() + _PAUSE_S
                return
            if len(self._strangers) >= MOST_STRANGERS:
                self._close(self._most_tiresome())
            self._add(accepted, peer, now)

    def _most_tiresome(self) -> int:
        """The oldest stranger of the address that most of them come from."""
        most, _ = Counter(self._connections[number].peer for number in self._strangers).most_common(1)[0]
        return next(number for number in self._strangers if self._connections[number].peer == most)

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
        self._strangers[self._next_id] = None
        self._selector.register(accepted, selectors.EVENT_READ, self._next_id)

    def _read(self, number: int, now: float) -> None:
        connection = self._connections[number]
        try:
            data = connection.socket.recv(_CHUNK)
            if not data:
                raise WireError("it has ended")
            messages = connection.channel.receive(data)
            if connection.channel.is_open:
                self._strangers.pop(number, None)
            for message in messages:
                self._take(number, connection, message, now)
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

    def _take(self, number: int, connection: _Connection, message: Message, now: float) -> None:
        if message.get("t") == "store":
            self._store.receive(number, message)
        else:
            self._roster.receive(number, message, now, is_local=connection.is_local)

    def _write(self, number: int) -> None:
        """Send what the system takes, and come back for the rest; a client that does not read is closed."""
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
        self._strangers.pop(number, None)
        self._selector.unregister(connection.socket)
        with suppress(OSError):  # a process that was forked from this one may hold the socket, too
            connection.socket.shutdown(socket.SHUT_RDWR)
        connection.socket.close()
        self._roster.disconnect(number, self._clock.now)
        self._store.forget(number)
