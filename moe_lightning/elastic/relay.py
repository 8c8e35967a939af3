"""Relay of a launcher: its workers connect to it by a private Unix socket, and one connection carries their messages.

Workers authenticate with the run's secret, as at the rendezvous host, and send it the same messages. The relay answers
their heartbeats itself, and passes the progress of all on with the launcher's own. What the host sends to several
workers travels once. A worker's end reaches the host at once.

A worker keeps its connection to the relay while the host is away: a `HostStatus` says whether there is a host to
introduce itself to. A launcher that is suspended
cuts its workers off, as if their machine were suspended; they end with it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Self

from moe_lightning.elastic.protocol import Address, Message
from moe_lightning.elastic.server import LONGEST_PATH, ServerThread, listen_privately
from moe_lightning.files import PrivateFolder

_BEAT: Message = {"t": "beat"}
_LOOK_S = 0.005


@dataclass(frozen=True, kw_only=True)
class HostStatus:
    """Status of the rendezvous host, as a client knows it by its own connection or from a relay.

    Attributes:
        address: of the host.
        local_address: of this machine on the way there; None if that is not known, or if both are one machine.
        error: why the host is not reached, as the end of a sentence; "" while it is.
    """

    address: Address
    local_address: str | None = None
    error: str

    def to_message(self) -> Message:
        """Return the message of a relay to its workers."""
        return {"t": "relay", **asdict(self), "address": str(self.address)}

    @classmethod
    def parse(cls, message: Message) -> Self:
        """Return the status in a message of a relay."""
        address, local_address, error = Address.parse(message["address"]), message["local_address"], message["error"]
        return cls(address=address, local_address=local_address, error=error)


class Relay:
    """Server of a launcher's workers, open until `close`.

    Args:
        secret: of the run.
        host: status of the rendezvous host now.
        send: sends messages to the rendezvous host, together, from any thread; drops them without a connection.

    Attributes:
        address: for workers.
        outbox, dropped: see `Service`.
    """

    missing = 0

    def __init__(self, secret: bytes, host: HostStatus, send: Callable[..., bool]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._workers: set[int] = set()
        self._beats: dict[int, int] = {}  # since the last call of `take_beats`
        self._published = host
        self._status = host.to_message()
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

    def publish(self, host: HostStatus, *, again: bool) -> None:
        """Notify the workers of a change of the connection to the host.

        Args:
            again: also without a change, while there is none: workers must not take this process for stopped.
        """
        if host != self._published or (host.error and again):
            self._published, self._targets = host, None
            self._pass_on(None, host.to_message())

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
