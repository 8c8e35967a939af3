"""Relay of a launcher: its workers connect to it by a private Unix socket, and one connection carries their messages.

Workers authenticate with the run's secret, as at the rendezvous host, and send it the same messages. The relay answers
their heartbeats itself, and passes the progress of all on with the launcher's own. What the host sends to several
workers travels once. A worker's end reaches the host at once.

A worker keeps its connection to the relay while the host is away: {"t": "relay", "error": why, "address": of the host,
"host": own address on the way there} says whether there is a host to introduce itself to. A relay that is silent has
been stopped with its launcher: then workers connect to the host themselves. They end with their launcher.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from moe_lightning.elastic.protocol import Address, Message
from moe_lightning.elastic.server import LONGEST_PATH, ServerThread, listen_privately
from moe_lightning.files import PrivateFolder

_BEAT: Message = {"t": "beat"}
_LOOK_S = 0.005


class Relay:
    """Server of a launcher's workers, open until `close`.

    Args:
        secret: of the run.
        send: sends messages to the rendezvous host, together, from any thread; drops them without a connection.

    Attributes:
        address: for workers.
        outbox, dropped: see `Service`.
    """

    missing = 0

    def __init__(self, secret: bytes, send: Callable[..., bool]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._workers: set[int] = set()
        self._beats: dict[int, int] = {}  # since the last call of `take_beats`
        self._status: Message = {"t": "relay", "error": "it was not tried yet", "address": "", "host": None}
        self._published = self._status
        self._arrived: deque[tuple[list[int] | None, Message | None]] = deque()  # for the server's thread
        self._targets: list[int] | None = None  # of the host's next message
        self.outbox: list[tuple[int, Message]] = []
        self.dropped: list[int] = []
        self._folder = PrivateFolder(longest=LONGEST_PATH)
        path = self._folder.path / "socket"
        self.address = Address(path=str(path))
        self._server = ServerThread(listen_privately(path), secret, self)

    # ------------------------------------------------------------------ calls of the launcher's thread

    def takes(self, message: Message) -> bool:
        """Pass a message of the host on; return False if it is for the launcher itself."""
        targets, self._targets = self._targets, None
        match message:
            case {"t": "for", "clients": list(workers)}:
                self._targets = workers
            case {"t": "gone", "client": int(worker)}:
                self._pass_on([worker], None)
            case _ if targets is not None:
                self._pass_on(targets, message)
            case _:
                return False
        return True

    def publish(self, address: Address, host: str | None, error: str, *, again: bool) -> None:
        """Notify the workers of a change of the connection to the host.

        Args:
            address: of the host.
            host: address of this machine on the way there.
            error: why there is no connection; "" if there is one.
            again: also without a change, while there is none: workers must not take this process for stopped.
        """
        status = {"t": "relay", "error": error, "address": str(address), "host": host}
        if status != self._published or (error and again):
            self._published, self._targets = status, None
            self._pass_on(None, status)

    def take_beats(self) -> list[tuple[int, int]]:
        """Return the workers that have sent heartbeats since the last call, each with its progress."""
        with self._lock:
            beats, self._beats = self._beats, {}
        return list(beats.items())

    def close(self, patience_s: float) -> None:
        """Close all connections, as soon as the workers have closed them or the patience is over."""
        deadline = time.monotonic() + patience_s
        while self._workers and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self._server.close()
        self._folder.close()

    def _pass_on(self, workers: list[int] | None, message: Message | None) -> None:
        self._arrived.append((workers, message))
        self._server.wake()

    # ------------------------------------------------------------------ the server's thread

    def admit(self, client: int) -> None:
        """Let a worker introduce itself as soon as there is a host."""
        self._workers.add(client)
        self.outbox.append((client, self._status))

    def receive(self, client: int, message: Message, now: float, *, is_local: bool) -> None:
        """Answer a heartbeat, or pass any other message on."""
        match message:
            case {"t": "beat", "progress": int(progress)}:
                with self._lock:
                    self._beats[client] = progress
                self.outbox.append((client, _BEAT))
            case _:
                self._send({"t": "for", "clients": [client]}, message)

    def disconnect(self, client: int, now: float) -> None:
        """Report the end of a worker's connection."""
        self._workers.discard(client)
        self._send({"t": "gone", "client": client})

    def decide(self, now: float) -> bool:
        """Pass on what has arrived from the host."""
        while self._arrived:
            workers, message = self._arrived.popleft()
            if message is None:
                self.dropped += workers or ()
                continue
            if workers is None:
                self._status = message
            self.outbox += [(worker, message) for worker in (self._workers if workers is None else workers)]
        return True
