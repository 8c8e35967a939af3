"""Tries whether other nodes can be reached directly, by small signed packets that are answered by the same kind.

Only while a world makes no step: then every rank sends a packet to each other node a few times a second, at most 500
in all. In a world of 1,000 nodes that is one packet to each in two seconds, 18 kB/s for a rank. A packet that comes
back proves both directions.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

Endpoint = tuple[str, int]

_REQUEST, _REPLY = b"moe?", b"moe!"
_NONCE_BYTES = 16
_MAC_BYTES = 16
_PACKET_BYTES = len(_REQUEST) + _NONCE_BYTES + _MAC_BYTES
_MOST_PER_S = 500
_MOST_OPEN = 4096
_BATCH = 64


class Prober:
    """One process's packets.

    Args:
        secret: of the run; the packets' key is derived from it.
        host: address to listen at; the system chooses the port.

    Attributes:
        endpoint: where others send their packets to.
        socket: has something to read when `receive` shall be called.
        heard_at: node -> when it last answered.
        answers: node -> packets that came back.
        misses: node -> packets sent since.
    """

    def __init__(self, secret: bytes, host: str) -> None:
        self._key = hmac.digest(secret, b"probe", "sha256")
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind((host, 0))
        self.endpoint: Endpoint = (host, int(self.socket.getsockname()[1]))
        self.heard_at: dict[str, float] = {}
        self.answers: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self._open: dict[bytes, str] = {}  # nonce -> node
        self._targets: list[tuple[str, Endpoint]] = []
        self._due = 0.0
        self._turn = 0

    def begin(self, targets: Mapping[str, Endpoint], now: float) -> None:
        """Try these nodes from now on; what was heard before is forgotten."""
        self._targets = sorted(targets.items())
        self.heard_at = {}
        self.answers.clear()
        self.misses.clear()
        self._open.clear()
        self._due, self._turn = now, 0

    def end(self) -> None:
        """Try nobody; others are still answered."""
        self._targets = []

    def send(self, now: float, interval_s: float) -> None:
        """Send what is due.

        Args:
            interval_s: between two packets to one node, where the limit allows.
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
            with suppress(OSError):  # no way there: that is what is being found out
                self.socket.sendto(self._packet(_REQUEST, nonce), endpoint)

    def receive(self, now: float) -> None:
        """Answer others and note answers."""
        for _ in range(_BATCH):
            try:
                packet, sender = self.socket.recvfrom(_PACKET_BYTES + 1)
            except OSError:  # nothing left, or word of an earlier packet that could not be delivered
                return
            kind, nonce = packet[: len(_REQUEST)], packet[len(_REQUEST) : len(_REQUEST) + _NONCE_BYTES]
            if not hmac.compare_digest(packet, self._packet(kind, nonce)):
                continue
            if kind == _REQUEST:
                with suppress(OSError):
                    self.socket.sendto(self._packet(_REPLY, nonce), sender)
            elif kind == _REPLY and (node := self._open.pop(nonce, None)) is not None:
                self.heard_at[node] = now
                self.answers[node] += 1
                self.misses[node] = 0

    def close(self) -> None:
        """Free the port."""
        self.socket.close()

    def _packet(self, kind: bytes, nonce: bytes) -> bytes:
        return kind + nonce + hmac.digest(self._key, kind + nonce, "sha256")[:_MAC_BYTES]
