"""Protocol of the rendezvous service: addresses, the secret, authenticated frames, and what its threads wait with.

`Channel` is the protocol without sockets. Both ends prove with an HMAC over two fresh nonces that they know the run's
secret, the server first, and derive a key for each direction. Every frame after that carries an HMAC over its number
and payload, so frames cannot be injected, replayed, reordered or moved from another connection. Frames are
authenticated, not encrypted.

    client                                      server
    {"moe-lightning": 3, "nonce": c}    ->
                                        <-      {"nonce": s, "proof": HMAC(secret, "server" c s)}
    {"proof": HMAC(secret, "client" c s)} ->
    frames                              <->     frames

A frame is the length of what follows (4 bytes), the HMAC (32 bytes, none in the greeting), and a JSON object, which
zlib has compressed if it is long. The secret is a file that only its owner can read: the rendezvous host makes it, and
every machine needs a copy.
"""

from __future__ import annotations

import hmac
import json
import os
import random
import re
import secrets
import selectors
import socket
import stat
import struct
import tempfile
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from typing_extensions import override

from moe_lightning.config import shown
from moe_lightning.errors import ConfigurationError

_LONGEST_TICK_S = 0.25


class ProcessClock:
    """Clock that counts the seconds in which its process ran: each tick counts for at most a quarter of a second.

    So a process or machine that was stopped for minutes does not conclude that others were silent for so long.

    Attributes:
        now: seconds, as of the last tick.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.now = 0.0

    def tick(self) -> float:
        """Add the time since the last tick, and return `now`; call it several times a second."""
        present = time.monotonic()
        self.now += min(present - self._last, _LONGEST_TICK_S)
        self._last = present
        return self.now


CONNECT_S = 2.0
"""Longest wait of a client for a connection: it tries again, since packets may be lost."""

HANDSHAKE_S = 10.0
"""Longest wait of a client for the host to authenticate it: a host that thousands connect to at once may be late."""

_CHUNK = 1 << 16
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)


class Backoff:
    """Wait before the next attempt to connect, longer after each failure in a row.

    It is random, so that thousands of clients that lose a host at one moment do not return at one moment.

    Attributes:
        due: the owner's time of the next attempt.
        failures: in a row.
    """

    def __init__(self) -> None:
        self.due = 0.0
        self.failures = 0

    def delay(self, now: float) -> None:
        """Wait after a failure."""
        self.due = now + _BACKOFF_S[min(self.failures, len(_BACKOFF_S) - 1)] * random.uniform(0.5, 1.5)
        self.failures += 1

    def reset(self) -> None:
        """Wait shortly after the next failure: an attempt has succeeded, or the next one goes elsewhere."""
        self.failures = 0


class WakingSelector(selectors.DefaultSelector):
    """Selector whose `select` other threads end with `wake`.

    Attributes:
        woken: readable until `drain`, which is its data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.woken, self._waker = socket.socketpair()
        self.woken.setblocking(False)
        self._waker.setblocking(False)
        self.register(self.woken, selectors.EVENT_READ, self.drain)

    def wake(self) -> None:
        """End the present `select`, or the next one."""
        with suppress(OSError):  # it is full already, or closed
            self._waker.send(b"\0")

    def drain(self) -> None:
        """Let `select` wait again."""
        with suppress(BlockingIOError):
            self.woken.recv(_CHUNK)

    @override
    def close(self) -> None:
        super().close()
        self.woken.close()
        self._waker.close()


_UNIX = "unix:"


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address of a listener.

    Attributes:
        path: of a Unix socket; None for TCP.
        host, port: of a TCP socket.
    """

    path: str | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str, least_port: int = 1) -> Self:
        """Return the address in a text as `str` writes it.

        Args:
            least_port: 0 for an address to listen on, where it stands for any port.

        Raises:
            ConfigurationError: it is none.
        """
        if text.startswith(_UNIX):
            return cls(path=text.removeprefix(_UNIX))
        host, _, port = text.rpartition(":")
        is_number = port.isascii() and port.isdigit() and len(port) <= 5
        if not host or not is_number or not least_port <= int(port) <= 65535:
            raise ConfigurationError(f"{shown(text)} must be HOST:PORT, with a port of {least_port} to 65535")
        host = host.strip("[]")
        try:
            host.encode("idna")
        except UnicodeError:
            sentence = f"{shown(text)} must be HOST:PORT, and {shown(host)} is no name of a host: correct it"
            raise ConfigurationError(sentence) from None
        return cls(host=host, port=int(port))

    def __str__(self) -> str:
        if self.path is not None:
            return _UNIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def resolve(self, attempt: int = 0) -> tuple[socket.AddressFamily, Any]:
        """Return family and address for a socket.

        Args:
            attempt: of a name with several addresses, each attempt has the next one.

        Raises:
            OSError: the host's name is not known.
        """
        if self.path is not None:
            return socket.AF_UNIX, self.path
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        family, *_, target = found[attempt % len(found)]
        return family, target


def interface_towards(address: Address) -> str | None:
    """Return the interface that packets to a host leave by; None if it cannot be determined (Linux only)."""
    try:
        family, target = address.resolve()
        if family == socket.AF_UNIX:
            return None
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            mine = probe.getsockname()[0]
            if family == socket.AF_INET6:
                return _interface_of_ipv6(mine)
            return next((name for _, name in socket.if_nameindex() if _address_of(probe, name) == mine), None)
    except OSError:
        return None


def loopback_of_name(address: Address) -> str | None:
    """Return the loopback address of a host's name, as /etc/hosts gives it to a machine's own; None for any other
    address, and for localhost and loopback addresses that were given as such.
    """
    if address.path is not None or address.host == "localhost" or _is_loopback(address.host):
        return None
    with suppress(OSError):
        host = address.resolve()[1][0]
        return host if _is_loopback(host) else None
    return None


def boot_id() -> str:
    """Return the name that this machine's kernel has given itself at its boot; "" where it has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _interface_of_ipv6(host: str) -> str | None:
    """Return the interface that has an IPv6 address."""
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0]).hex()
    rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    return next((row[-1] for row in rows if row[0] == packed), None)


def _address_of(any_socket: socket.socket, interface: str) -> str | None:
    """Return the first IPv4 address of an interface."""
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    except OSError:
        return None


_SHORTEST = 32
_LONGEST = 4096


def create_secret(path: Path) -> bytes:
    """Return the secret in a file; make the file if it is missing, atomically and with mode 0600.

    Raises:
        ConfigurationError: the file cannot be written, or exists and `read_secret` refuses it.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")  # mode 0600
            try:
                with os.fdopen(descriptor, "w") as file:
                    file.write(secrets.token_hex(32) + "\n")
                with suppress(FileExistsError):  # another one was quicker: its secret counts
                    os.link(name, path)
            finally:
                os.unlink(name)
    except OSError as error:
        raise ConfigurationError(
            f"secret_file={path} cannot be written ({error.strerror}): name another place"
        ) from None
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """Return the secret in a file.

    Raises:
        ConfigurationError: it is missing, another user's, readable by others, or too short. A read-only file
            of root may be readable by its group: so a kubelet mounts secrets for pods with an fsGroup, and nobody can
            change that.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigurationError(
            f"secret_file={path} cannot be read ({error.strerror}): copy it from the rendezvous host, which makes it"
        ) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigurationError(f"secret_file={path} is not a file: name one")
        if found.st_uid not in (os.geteuid(), 0):
            raise ConfigurationError(f"secret_file={path} belongs to another user: copy it and make the copy yours")
        is_mounted = found.st_uid == 0 and not found.st_mode & 0o337
        if found.st_mode & 0o077 and not is_mounted:
            raise ConfigurationError(
                f"secret_file={path} has mode {stat.S_IMODE(found.st_mode):o}, so others may read it: chmod 600 it"
            )
        secret = os.read(descriptor, _LONGEST + 1).strip()
    finally:
        os.close(descriptor)
    if not _SHORTEST <= len(secret) <= _LONGEST:
        raise ConfigurationError(
            f"secret_file={path} holds {len(secret)} bytes, not {_SHORTEST} to {_LONGEST}: "
            "delete it and let the rendezvous host create a new one"
        )
    return secret


PROTOCOL = 4

Message = dict[str, Any]

_LONGEST_GREETING = 512
_LONGEST_FRAME = 4 << 20
_LONGEST_PLAIN = 1024
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_MAC_BYTES = 32
_HEXADECIMAL = re.compile("[0-9a-f]{32}")


class WireError(Exception):
    """Violation of the protocol by the other end: close the connection."""


def describe_error(error: Exception) -> str:
    """Return what an error of a connection says, for the end of a sentence."""
    strerror = getattr(error, "strerror", None)
    return str(strerror).lower() if strerror else str(error) or "it ended the connection"


class Refused(WireError):
    """Permanent refusal (another secret or version), as one sentence for the user."""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


_ENCODER = json.JSONEncoder(separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def encode(message: Message) -> bytes:
    """Return a message as the payload of a frame, of any connection.

    Raises:
        WireError: it is too long.
    """
    payload = _ENCODER.encode(message).encode()
    if len(payload) > _LONGEST_FRAME:
        raise WireError(f"a message of {len(payload)} bytes is above the limit of {_LONGEST_FRAME}")
    return payload if len(payload) <= _LONGEST_PLAIN else zlib.compress(payload, 6)


def _decode(payload: bytes) -> Message:
    if payload.startswith(b"{"):
        return _parse(payload)
    try:
        return _parse(zlib.decompressobj().decompress(payload, _LONGEST_FRAME))
    except zlib.error:
        raise WireError("a frame that is not JSON") from None


class Channel:
    """One end of a connection: converts between bytes and messages.

    Args:
        secret: of the run.
        is_server: the end that was connected to.

    Attributes:
        outgoing: bytes to be written; the owner removes what it has written.
        is_open: the handshake of this end is complete, and messages can be sent.
    """

    def __init__(self, secret: bytes, *, is_server: bool) -> None:
        self._secret, self._is_server = secret, is_server
        self._nonce = secrets.token_hex(16)
        self._nonces = b""
        self._incoming = bytearray()
        self._sent = self._received = 0
        self._key_out = self._key_in = b""
        self.outgoing = bytearray()
        self.is_open = False
        if not is_server:
            self._greet({"moe-lightning": PROTOCOL, "nonce": self._nonce})

    def send(self, message: Message) -> None:
        """Queue a message; only when the channel is open."""
        self.send_encoded(encode(message))

    def send_encoded(self, payload: bytes) -> None:
        """Queue what `encode` returned; the same payload may go to many channels."""
        assert self.is_open, "greet first"
        mac = self._mac(self._key_out, self._sent, payload)
        self._sent += 1
        self.outgoing += _LENGTH.pack(len(payload) + _MAC_BYTES) + mac + payload

    def receive(self, data: bytes) -> list[Message]:
        """Add received bytes and return the messages that they complete.

        Raises:
            Refused: the secrets or the versions differ.
            WireError: anything else that the protocol does not allow.
        """
        self._incoming += data
        messages = []
        while (frame := self._next_frame()) is not None:
            if self.is_open:
                messages.append(self._verified(frame))
            else:
                self._handle_greeting(_parse(frame))
        return messages

    def _next_frame(self) -> bytes | None:
        if len(self._incoming) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._incoming)
        if length > (_LONGEST_FRAME + _MAC_BYTES if self.is_open else _LONGEST_GREETING):
            raise WireError(f"a frame of {length} bytes")
        if len(self._incoming) < _LENGTH.size + length:
            return None
        frame = bytes(self._incoming[_LENGTH.size : _LENGTH.size + length])
        del self._incoming[: _LENGTH.size + length]
        return frame

    def _verified(self, frame: bytes) -> Message:
        mac, payload = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self._key_in, self._received, payload)):
            raise WireError("a frame that the other end did not write")
        self._received += 1
        return _decode(payload)

    def _handle_greeting(self, greeting: Message) -> None:
        match greeting:
            case {"refused": str(sentence)} if not self._is_server:
                raise Refused(f"it says: {sentence[:200]}")
            case {"moe-lightning": int(version), "nonce": str(nonce)} if self._is_server and not self._nonces:
                if version != PROTOCOL:
                    self._refuse(f"protocol {version} meets {PROTOCOL}: install the same moe-lightning everywhere")
                self._derive(client=nonce, server=self._nonce)
                self._greet({"nonce": self._nonce, "proof": self._proof("server")})
            case {"nonce": str(nonce), "proof": str(proof)} if not self._is_server:
                self._derive(client=self._nonce, server=nonce)
                if not _equal(proof, self._proof("server")):
                    raise Refused("its secret differs: give every machine the same secret_file")
                self._greet({"proof": self._proof("client")})
                self.is_open = True
            case {"proof": str(proof)} if self._is_server and self._nonces:
                if not _equal(proof, self._proof("client")):
                    self._refuse("the secrets differ: give every machine the same secret_file")
                self.is_open = True
            case _:
                raise WireError("a greeting that is none")

    def _derive(self, *, client: str, server: str) -> None:
        if not all(_HEXADECIMAL.fullmatch(nonce) for nonce in (client, server)):
            raise WireError("a nonce that is none")
        self._nonces = f"{client} {server}".encode()
        to_server, to_client = (self._hash(name).digest() for name in ("to server", "to client"))
        self._key_in, self._key_out = (to_server, to_client) if self._is_server else (to_client, to_server)

    def _proof(self, who: str) -> str:
        return self._hash(who).hexdigest()

    def _hash(self, label: str) -> hmac.HMAC:
        return hmac.new(self._secret, label.encode() + b"\0" + self._nonces, "sha256")

    def _greet(self, greeting: Message) -> None:
        payload = json.dumps(greeting).encode()
        self.outgoing += _LENGTH.pack(len(payload)) + payload

    def _refuse(self, sentence: str) -> NoReturn:
        self._greet({"refused": sentence})
        raise Refused(sentence)

    @staticmethod
    def _mac(key: bytes, number: int, payload: bytes) -> bytes:
        return hmac.digest(key, _NUMBER.pack(number) + payload, "sha256")


def _parse(payload: bytes) -> Message:
    try:
        message = _DECODER.decode(payload.decode())
    except (ValueError, RecursionError):
        raise WireError("a frame that is not JSON") from None
    if not isinstance(message, dict):
        raise WireError("a frame that is not an object")
    return message


def _equal(found: str, wanted: str) -> bool:
    return hmac.compare_digest(found.encode(errors="replace"), wanted.encode())
