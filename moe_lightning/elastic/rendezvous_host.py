"""Hosts what the workers meet at: members, worlds, and the keys that groups are built on.

A launcher embeds it behind a Unix socket in a private folder; between several machines it runs on a safe host:

    python -m moe_lightning.elastic.rendezvous_host --bind HOST:PORT --secret-file FILE

It makes the file, which every machine needs a copy of: who does not know the secret is turned away. A training goes on
while its host is down or silent, and finds it again when it is started anew.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from moe_lightning.arguments import Parser
from moe_lightning.config import validated
from moe_lightning.elastic.address import Address
from moe_lightning.elastic.formation import RECONNECT_S
from moe_lightning.elastic.membership import LOOPBACK
from moe_lightning.elastic.roster import Roster
from moe_lightning.elastic.secret import create_secret
from moe_lightning.elastic.server import ControlServer
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import PrivateFolder

_LONGEST_PATH = 100  # bytes of a folder whose socket has a path that Unix sockets can have
_BACKLOG = 1024


@validated
class RendezvousHost:
    """A control plane, until `close`.

    Args:
        bind: address to listen on, "host:port" with port 0 for any; None for a Unix socket that only this user
            reaches.
        secret_file: of the run, made where it is not there; None for one in the private folder.

    Attributes:
        address: where it is reached.
        secret_file: what clients need.

    Raises:
        ConfigurationError: the address is taken or not of this machine, or the file is unfit.
    """

    def __init__(self, *, bind: str | None = None, secret_file: str | Path | None = None) -> None:
        self._folder = PrivateFolder(longest=_LONGEST_PATH) if bind is None or secret_file is None else None
        self.secret_file = Path(secret_file) if secret_file is not None else self._private("secret")
        try:
            secret = create_secret(self.secret_file)
            listener = _unix_listener(self._private("socket")) if bind is None else _listener(bind)
        except ConfigurationError:
            self._remove_folder()
            raise
        name = listener.getsockname()
        self.address = Address(path=name) if isinstance(name, str) else Address(host=name[0], port=name[1])
        # a host that others may know already lets them tell first what it knew before
        roster = Roster(settle_s=0.0 if bind is None or bind.endswith(":0") else RECONNECT_S)
        self._server: ControlServer | None = ControlServer(listener, secret, roster)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it and its connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._remove_folder()

    def _private(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder.path / name

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()


def _unix_listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    return listener


def _listener(bind: str) -> socket.socket:
    """A TCP socket that listens at one address.

    Raises:
        ConfigurationError: it is taken or not of this machine.
    """
    address = Address.parse(bind)
    try:
        family, target = address.resolve()
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {bind} ({error.strerror}): choose another") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen on {bind} ({error.strerror}): choose another") from None
    return listener


def main(arguments: list[str] | None = None) -> int:
    """Host until SIGINT or SIGTERM."""
    parser = Parser(prog="python -m moe_lightning.elastic.rendezvous_host", description=__doc__)
    parser.add_argument("--bind", default=f"{LOOPBACK}:29510", metavar="HOST:PORT", help="port 0: any")
    parser.add_argument(
        "--secret-file", type=Path, default=Path("moe-lightning.secret"), help="made where it is not there"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before threads start, which inherit the mask
    try:
        host = RendezvousHost(bind=options.bind, secret_file=options.secret_file)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with host:
        print(f"listening on {host.address}, secret in {host.secret_file}", flush=True)
        signal.sigwait(signals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
