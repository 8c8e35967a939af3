"""What strangers do to ports: garbage, halves of greetings, connections that say nothing. Stdlib only.

python attack.py SECONDS HOST:PORT...       TCP ports; with udp: in front, UDP ones
"""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
import sys
import time

IDLE = 200
"""Connections to each port that say nothing."""


def frame(payload: bytes) -> bytes:
    """A payload behind its length, as the control plane's greetings are."""
    return struct.pack(">I", len(payload)) + payload


def lures(seed: int = 7) -> list[bytes]:
    """What is sent on connections of their own."""
    noise = random.Random(seed)
    greetings = [
        b'{"moe-lightning": 4, "nonce": "00000000000000000000000000000000"}',
        b'{"moe-lightning": 4, "nonce": "' + rb"\ud800" * 32 + b'"}',
        b'{"moe-lightning": 4, "nonce": ""}',
        b'{"moe-lightning": 99, "nonce": "00000000000000000000000000000000"}',
        b'{"moe-lightning": 1e999, "nonce": NaN}',
        b'{"moe-lightning": true, "nonce": null}',
        b'{"proof": "' + b"0" * 64 + b'"}',
        b'{"refused": "go away"}',
        b'{"t": "died", "token": "any", "how": "so"}',
        b"[" * 400,
        b"{}",
        b"[]",
        b"null",
        b"",
        b"\xff\xfe",
        b'"' + b"9" * 300,
        b"9" * 500,
    ]
    first, proof = frame(greetings[0]), frame(b'{"proof": "' + b"0" * 64 + b'"}')
    surrogate = frame(b'{"proof": "' + rb"\ud800" * 32 + b'"}')
    return [
        *map(frame, greetings),
        first + proof,
        first + surrogate,
        first + first,
        first[:11],  # half of one
        b"\0",
        b"\xff" * 4,
        struct.pack(">I", 1 << 31),
        struct.pack(">I", 512) + b"x" * 100,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00" + noise.randbytes(500),  # TLS
        *(noise.randbytes(size) for size in (1, 7, 64, 1000, 100_000)),
    ]


def attack(endpoints: list[tuple[str, int]], seconds: float) -> int:
    """Send every lure to every TCP port, keep idle connections open; how many connections were made. A port that does
    not even say no is left alone.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    deadline = time.monotonic() + seconds
    held = []
    for endpoint in endpoints:
        for lure in [*lures(), *[b""] * IDLE]:
            try:
                connection = socket.create_connection(endpoint, timeout=1.0)
                held.append(connection)
                if lure:
                    connection.sendall(lure)
            except TimeoutError:
                break
            except OSError:
                continue
    while time.monotonic() < deadline:
        time.sleep(0.1)
    return len(held)


def attack_udp(endpoints: list[tuple[str, int]]) -> None:
    """Send every lure to every UDP port, and packets that look like probes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for endpoint in endpoints:
            for lure in [*lures(), b"moe?" + bytes(32), b"moe!" + bytes(32)]:
                with contextlib.suppress(OSError):
                    sender.sendto(lure[:60_000], endpoint)


def main(seconds: float, targets: list[str]) -> int:
    """Attack; prints how many connections were made."""
    tcp: list[tuple[str, int]] = []
    udp: list[tuple[str, int]] = []
    for target in targets:
        host, _, port = target.removeprefix("udp:").rpartition(":")
        (udp if target.startswith("udp:") else tcp).append((host, int(port)))
    attack_udp(udp)
    print(attack(tcp, seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
