"""Where a control plane is reached: a Unix socket on one machine, host and port between several."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any, Self

from moe_lightning.config import shown
from moe_lightning.errors import ConfigurationError

_UNIX = "unix:"


@dataclass(frozen=True, kw_only=True)
class Address:
    """A listener's address.

    Attributes:
        path: of a Unix socket; None for TCP.
        host, port: of a TCP socket.
    """

    path: str | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """An address as `str` writes it.

        Raises:
            ConfigurationError: it is none.
        """
        if text.startswith(_UNIX):
            return cls(path=text.removeprefix(_UNIX))
        host, _, port = text.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 <= int(port) <= 65535:
            raise ConfigurationError(f"{shown(text)} must be HOST:PORT, with a port of 0 to 65535")
        return cls(host=host.strip("[]"), port=int(port))

    def __str__(self) -> str:
        if self.path is not None:
            return _UNIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def resolve(self) -> tuple[socket.AddressFamily, Any]:
        """Family and address for a socket.

        Raises:
            OSError: the host's name is not known.
        """
        if self.path is not None:
            return socket.AF_UNIX, self.path
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        return found[0], found[4]


def interface_towards(address: Address) -> str | None:
    """Name of the interface whose address packets to a host carry; None where it cannot be told (Linux, IPv4 only)."""
    try:
        family, target = address.resolve()
        if family != socket.AF_INET:
            return None
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            mine = probe.getsockname()[0]
            return next((name for _, name in socket.if_nameindex() if _address_of(probe, name) == mine), None)
    except OSError:
        return None


def _address_of(any_socket: socket.socket, interface: str) -> str | None:
    """The first IPv4 address of an interface."""
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    except OSError:
        return None
