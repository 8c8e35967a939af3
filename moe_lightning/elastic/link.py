"""A client's connection to the control plane that comes back by itself: driven by one thread, used by any.

A connection on which nothing has been heard for too long is given up for a new one, as the system would hold on to it
for minutes; so a host that was only stopped finds its clients again.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from moe_lightning.elastic.address import Address
from moe_lightning.elastic.wire import Channel, Message, Refused, WireError
from moe_lightning.parallel.abort import tune

_ATTEMPT_S = 2.0
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_CHUNK = 1 << 16

logger = logging.getLogger(__name__)


class ControlLink:
    """A connection, while its owner calls `step` again and again; all but `send` and `wake` belong to that thread.

    Args:
        address: of the control plane.
        secret: of the run.
        introduce: called on every new connection with a function that takes what is to be said first.
        handle: called with each message.
        silence_s: without a word for so long, the connection is given up.

    Attributes:
        is_connected: the other end has proved itself and may be told things.
        trouble: why there is no connection, as the end of a sentence; "" while there is one.
        is_refused: the last attempt was turned down for good: another secret, another version.
        lost_at: the owner's time at which the connection was last lost, or the first step.
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
        self._address, self._secret = address, secret
        self._introduce, self._handle, self._silence_s = introduce, handle, silence_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._channel: Channel | None = None
        self._is_connecting = False
        self._heard_at = self._attempt_at = self._next_attempt = 0.0
        self._failures = 0
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self.is_connected = self.is_refused = False
        self.trouble = "it was not tried yet"
        self.lost_at: float | None = None

    def watch(self, other: socket.socket, ready: Callable[[], None]) -> None:
        """Call a function whenever another socket has something to read."""
        self._selector.register(other, selectors.EVENT_READ, ready)

    def unwatch(self, other: socket.socket) -> None:
        """Look at that socket no longer."""
        self._selector.unregister(other)

    @property
    def local_host(self) -> str | None:
        """This machine's address on the way to the control plane; None without a connection or on one machine."""
        if self._socket is None or self._socket.family == socket.AF_UNIX:
            return None
        with suppress(OSError):
            return str(self._socket.getsockname()[0])
        return None

    def send(self, message: Message) -> bool:
        """Queue a message; False where there is no connection, which then loses it."""
        with self._lock:
            if not self.is_connected or self._channel is None:
                return False
            self._channel.send(message)
            self._flush()
        return True

    def wake(self) -> None:
        """Let `step` return at once."""
        with suppress(OSError):  # it is full already, or the thread has ended and closed its end
            self._waker.send(b"\0")

    def step(self, now: float, timeout_s: float) -> None:
        """Wait for something to happen, for at most so long, and take it in.

        Args:
            now: the owner's time.
        """
        self.lost_at = now if self.lost_at is None else self.lost_at
        if self._socket is None and now >= self._next_attempt:
            self._connect(now)
        elif self.is_connected and now - self._heard_at > self._silence_s:
            self._lose(f"it said nothing for {self._silence_s:g} s", now)
        elif self._socket is not None and not self.is_connected and now - self._attempt_at > _ATTEMPT_S:
            self._lose("it does not answer", now)
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is not self._socket:
                key.data()
            else:
                self._serve(events, now)

    def close(self) -> None:
        """End the connection; what was sent goes out first, as far as the system takes it."""
        self._drop()
        self._selector.close()
        self._woken.close()
        self._waker.close()

    # ------------------------------------------------------------------ the connection

    def _connect(self, now: float) -> None:
        self._attempt_at = now
        try:
            family, target = self._address.resolve()
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            tune(self._socket)
            code = self._socket.connect_ex(target)
        except OSError as error:
            self._lose(_words(error), now)
            return
        if code not in (0, errno.EINPROGRESS):
            self._lose(os.strerror(code).lower(), now)
            return
        self._is_connecting = True
        self._channel = Channel(self._secret, is_server=False)
        self._selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE, None)

    def _serve(self, events: int, now: float) -> None:
        assert self._socket is not None
        assert self._channel is not None
        if self._is_connecting:
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._lose(os.strerror(code).lower(), now)
                return
            self._is_connecting = False
        try:
            if events & selectors.EVENT_READ:
                self._read(now)
            with self._lock:
                self._flush()
        except BlockingIOError:
            return
        except Refused as error:
            self._lose(str(error), now)
            self.is_refused = True
        except (OSError, WireError) as error:
            self._lose(_words(error), now)

    def _read(self, now: float) -> None:
        assert self._socket is not None
        assert self._channel is not None
        data = self._socket.recv(_CHUNK)
        if not data:
            raise WireError("it ended the connection")
        messages = self._channel.receive(data)
        self._heard_at = now
        if self._channel.is_open and not self.is_connected:
            self._failures = 0
            self._introduce(self._open)
        for message in messages:
            self._handle(message)

    def _open(self, introduction: Message) -> None:
        with self._lock:
            assert self._channel is not None
            self._channel.send(introduction)
            self.is_connected, self.is_refused, self.trouble = True, False, ""

    def _flush(self) -> None:
        """Send what the system takes; the selector comes back for the rest. Errors show when the thread reads."""
        if self._socket is None or self._channel is None or self._is_connecting:
            return
        outgoing = self._channel.outgoing
        with suppress(OSError):
            if outgoing:
                del outgoing[: self._socket.send(outgoing)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)
        with suppress(KeyError):  # another thread sends while this one is being closed
            self._selector.modify(self._socket, wanted, None)

    def _lose(self, trouble: str, now: float) -> None:
        if self.is_connected:
            logger.info("the connection to %s is lost: %s", self._address, trouble)
            self.lost_at = now
        self._drop()
        self.trouble = trouble
        self._next_attempt = now + _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
        self._failures += 1

    def _drop(self) -> None:
        with self._lock:
            self.is_connected = self._is_connecting = False
            connection, self._socket, self._channel = self._socket, None, None
        if connection is not None:
            with suppress(KeyError):
                self._selector.unregister(connection)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            connection.close()

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(_CHUNK)


def _words(error: Exception) -> str:
    strerror: Any = getattr(error, "strerror", None)
    return str(strerror).lower() if strerror else str(error)
