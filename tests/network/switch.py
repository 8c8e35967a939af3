"""The switch between the hosts of the bench: hands frames from tap device to tap device, and loses, delays or drops
them as it is told. It needs no netem and no packet filter of the kernel.

    python switch.py CONTROL      (the descriptor of a Unix socket: one JSON a packet, devices come as descriptors)
"""

from __future__ import annotations

import ctypes
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field

_FRAME = 65536
_BURST = 64
_QUEUE = 1000
"""Frames that a slow line holds before it drops, as netem does."""
_PR_SET_PDEATHSIG = 1
_RST, _ACK = 0x04, 0x10


@dataclass(frozen=True)
class Line:
    """What happens to the frames that leave a host.

    Attributes:
        loss: share of frames lost, 0 to 1.
        delay_s: every frame comes so much later.
        jitter_s: uniform deviation from `delay_s`; frames may overtake each other, as under netem.
        rate: bits per second; 0: unlimited.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    rate: float = 0.0


@dataclass
class _Port:
    """A host's end."""

    name: str
    device: int
    mac: bytes
    line: Line = Line()
    free_at: float = 0.0  # when a slow line has sent what waits
    waiting: int = 0


@dataclass(order=True)
class _Flight:
    """A frame under way."""

    due: float
    number: int
    source: _Port = field(compare=False)
    target: _Port = field(compare=False)
    frame: bytes = field(compare=False)


class Switch:
    """Ports, dead links and frames under way."""

    def __init__(self, seed: int = 7) -> None:
        self._ports: dict[str, _Port] = {}
        self._by_device: dict[int, _Port] = {}
        self._dead: set[tuple[str, str]] = set()
        self._resets: dict[frozenset[str], float] = {}  # pair -> until when its connections are reset
        self._flights: list[_Flight] = []
        self._random = random.Random(seed)
        self._numbers = 0
        self._poll = select.epoll()

    def serve(self, channel: socket.socket) -> None:
        """Until the channel closes."""
        self._poll.register(channel, select.EPOLLIN)
        while True:
            for descriptor, _ in self._poll.poll(self._patience()):
                if descriptor == channel.fileno():
                    if not self._obey(channel):
                        return
                elif descriptor in self._by_device:
                    self._take(self._by_device[descriptor])
            self._deliver()

    def _patience(self) -> float | None:
        return max(0.0, self._flights[0].due - time.monotonic()) if self._flights else None

    def _obey(self, channel: socket.socket) -> bool:
        packet, descriptors, _, _ = socket.recv_fds(channel, 65536, 1)
        if not packet:
            return False
        request = json.loads(packet)
        if "port" in request:
            self._connect(_Port(request["port"], descriptors[0], bytes(request["mac"])))
        if "reset" in request:
            self._resets[frozenset(request["reset"])] = time.monotonic() + request["seconds"]
        if "dead" in request:
            self._dead = {(a, b) for a, b in request["dead"]}
        for name, line in request.get("lines", {}).items():
            self._ports[name].line = Line(**line)
        channel.send(b"{}")
        return True

    def _connect(self, port: _Port) -> None:
        former = self._ports.pop(port.name, None)
        if former is not None:
            self._disconnect(former)
        self._ports[port.name] = self._by_device[port.device] = port
        self._poll.register(port.device, select.EPOLLIN)

    def _disconnect(self, port: _Port) -> None:
        if self._by_device.pop(port.device, None) is not None:
            self._poll.unregister(port.device)
            os.close(port.device)

    def _take(self, source: _Port) -> None:
        """Read what a host sends."""
        for _ in range(_BURST):
            try:
                frame = os.read(source.device, _FRAME)
            except BlockingIOError:
                return
            except OSError:  # the host is gone, and its device with it
                self._disconnect(source)
                return
            to_all = frame[0] & 1
            for target in self._ports.values():
                if target is not source and (to_all or target.mac == frame[:6]):
                    self._send(source, target, frame)

    def _send(self, source: _Port, target: _Port, frame: bytes) -> None:
        line = source.line
        if self._resets and self._resets.get(frozenset({source.name, target.name}), 0.0) > time.monotonic():
            answers = resets(frame)
            if answers is not None:
                self._write(target, answers[0])
                self._write(source, answers[1])
                return
        if (source.name, target.name) in self._dead or (line.loss and self._random.random() < line.loss):
            return
        if not (line.delay_s or line.rate or source.waiting):
            self._write(target, frame)
            return
        if source.waiting >= _QUEUE:
            return
        due = time.monotonic()
        if line.rate:
            source.free_at = due = max(source.free_at, due) + len(frame) * 8 / line.rate
        due += line.delay_s + self._random.uniform(-line.jitter_s, line.jitter_s)
        self._numbers += 1
        source.waiting += 1
        heapq.heappush(self._flights, _Flight(due, self._numbers, source, target, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._flights and self._flights[0].due <= now:
            flight = heapq.heappop(self._flights)
            flight.source.waiting -= 1
            if (flight.source.name, flight.target.name) not in self._dead:
                self._write(flight.target, flight.frame)

    def _write(self, target: _Port, frame: bytes) -> None:
        if self._by_device.get(target.device) is target:
            try:
                os.write(target.device, frame)
            except BlockingIOError:
                return  # a full queue drops
            except OSError:
                self._disconnect(target)


def resets(frame: bytes) -> tuple[bytes, bytes] | None:
    """Frames that reset the connection of a TCP segment at its receiver and at its sender; None for other frames."""
    if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
        return None
    segment = 14 + (frame[14] & 15) * 4
    sender, receiver = frame[26:30], frame[30:34]
    ports, sequence, acknowledged = struct.unpack_from("4s4s4s", frame, segment)
    return (
        frame[:12] + _reset(sender, receiver, ports, sequence, acknowledged),
        frame[6:12] + frame[:6] + _reset(receiver, sender, ports[2:] + ports[:2], acknowledged, bytes(4)),
    )


def _reset(source: bytes, target: bytes, ports: bytes, sequence: bytes, acknowledged: bytes) -> bytes:
    """An IPv4 packet, from its EtherType on."""
    flags = _RST | (_ACK if any(acknowledged) else 0)
    tcp = ports + sequence + acknowledged + bytes([5 << 4, flags]) + bytes(6)
    check = _checksum(source + target + struct.pack("!HH", socket.IPPROTO_TCP, len(tcp)) + tcp)
    tcp = tcp[:16] + check + tcp[18:]
    ip = struct.pack("!BBHHHBB2x4s4s", 0x45, 0, 20 + len(tcp), 0, 0, 64, socket.IPPROTO_TCP, source, target)
    return b"\x08\x00" + ip[:10] + _checksum(ip) + ip[12:] + tcp


def _checksum(data: bytes) -> bytes:
    """The Internet checksum of an even number of bytes (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)


def main(control: int) -> int:
    """Switch until the control socket closes or the starter dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    Switch().serve(socket.socket(fileno=control))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
