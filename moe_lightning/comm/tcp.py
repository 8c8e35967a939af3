"""TCP for small messages that somebody waits for, also where packets are lost."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress

# <linux/tcp.h>
_THIN_LINEAR_TIMEOUTS = 16  # a lost small segment is sent again at once and again, without backing off
_RTO_MIN_US, _DELACK_MAX_US = 45, 46  # since Linux 6.15
_SEND_AGAIN_US = 60_000
"""How long after the usual round trip a segment without an answer is sent again: Linux waits 200 ms, its answers come
within 40 ms or with what the other end says next."""
_ANSWER_US = 40_000


def tune(connection: socket.socket) -> None:
    """Let small messages pass at once, and what is lost of them soon; options that the system does not know are left
    out."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform != "linux":
        return
    connection.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)
    with suppress(OSError):  # an older kernel
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MIN_US, _SEND_AGAIN_US)
        connection.setsockopt(socket.IPPROTO_TCP, _DELACK_MAX_US, _ANSWER_US)
