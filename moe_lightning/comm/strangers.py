"""Closes the ports of gloo once the groups are built: it knows no password, and keeps whatever connects to it.

gloo has no call for that, and aborts the process when its listener fails. So the listener is left as it is, and the
kernel drops what comes to it: a socket filter on a listening socket sees every packet that would open a connection,
and connections that it has already made do not pass it. Linux only; elsewhere the ports stay open.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from pathlib import Path

from moe_lightning.comm.cut import Connection, duplicate

_SO_ATTACH_FILTER = 26  # <asm-generic/socket.h>
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: keep 0 bytes of the packet
_LAZY = "TORCH_GLOO_LAZY_INIT"


def turn_strangers_away(connections: Collection[Connection]) -> int:
    """Let nobody connect any more to what listens for the same groups, and end what others have connected by now.

    Args:
        connections: all between this process and its peers; of one group at least one.

    Returns:
        Number of listeners that were closed so; 0 where it cannot be done, or groups connect only when they are used.
    """
    if sys.platform != "linux" or os.environ.get(_LAZY, "0").lower() not in ("", "0", "false", "n", "no", "off"):
        return 0
    ours = {connection.descriptor for connection in connections}
    closed = 0
    for watched in _watched_together():
        for descriptor in watched - ours if watched & ours else ():
            found = duplicate(descriptor)
            if found is None:
                continue
            with closing(found):
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    _drop_all(found)
                    closed += 1
                elif found.family in (socket.AF_INET, socket.AF_INET6):
                    with suppress(OSError):  # it has ended by itself
                        found.shutdown(socket.SHUT_RDWR)
    return closed


def _watched_together() -> Iterator[set[int]]:
    """The descriptors that are waited for together: a listener of gloo's and the connections of its groups are."""
    for entry in Path("/proc/self/fdinfo").iterdir():
        try:
            if os.readlink(f"/proc/self/fd/{entry.name}") == "anon_inode:[eventpoll]":
                lines = entry.read_text().splitlines()
                yield {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
        except OSError:
            continue  # it was closed meanwhile


def _drop_all(listener: socket.socket) -> None:
    instructions = ctypes.create_string_buffer(_DROP, len(_DROP))
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
