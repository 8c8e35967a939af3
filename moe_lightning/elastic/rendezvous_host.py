"""Rendezvous host: the server for membership and for the keys that groups are built on.

A launcher embeds it behind a Unix socket in a private folder; between several machines it runs on a safe host:

    python -m moe_lightning.elastic.rendezvous_host --bind HOST:PORT --secret-file FILE

It makes the file, and every machine needs a copy: clients without the secret are refused. Training goes on while the
host is down or silent, and reconnects when it is started again.
"""

from __future__ import annotations

import logging
import resource
import signal
import sys
from pathlib import Path
from typing import Self

from moe_lightning.arguments import Parser, any_path
from moe_lightning.config import validated
from moe_lightning.elastic.membership import LOOPBACK
from moe_lightning.elastic.protocol import Address, create_secret
from moe_lightning.elastic.rendezvous_state import RECONNECT_S, RendezvousState
from moe_lightning.elastic.server import LONGEST_PATH, RendezvousService, ServerThread, listen, listen_privately
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import PrivateFolder

_LOOK_S = 1.0  # between two looks at the server's thread


@validated
class RendezvousServer:
    """Rendezvous server, open until `close`.

    Args:
        bind: address to listen on, "host:port" with port 0 for any; None for a Unix socket that only this user
            reaches.
        secret_file: of the run, made if missing; None for one in the private folder.

    Attributes:
        address: for clients.
        secret_file: for clients.

    Raises:
        ConfigurationError: the address is in use or not of this machine, or `create_secret` refuses the file.
    """

    def __init__(self, *, bind: str | None = None, secret_file: str | Path | None = None) -> None:
        self._folder = PrivateFolder(longest=LONGEST_PATH)
        self.secret_file = self._folder.path / "secret" if secret_file is None else Path(secret_file)
        try:
            secret = create_secret(self.secret_file)
            listener = listen_privately(self._folder.path / "socket") if bind is None else listen(bind)
        except ConfigurationError:
            self._folder.close()
            raise
        name = listener.getsockname()
        self.address = Address(path=name) if isinstance(name, str) else Address(host=name[0], port=name[1])
        # a host at an address that is known may have been restarted: members first report the world that it knew
        state = RendezvousState(startup_grace_s=0.0 if bind is None or bind.endswith(":0") else RECONNECT_S)
        self._server: ServerThread | None = ServerThread(listener, secret, RendezvousService(state))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_ended(self) -> bool:
        """True if the server has ended, in order or for a defect."""
        return self._server is None or self._server.has_ended

    def close(self) -> None:
        """Close the server and its connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._folder.close()


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return 1 if a defect ends the server before."""
    parser = Parser(prog="python -m moe_lightning.elastic.rendezvous_host", description=__doc__)
    parser.add_argument("--bind", default=f"{LOOPBACK}:29510", metavar="HOST:PORT", help="port 0: any")
    parser.add_argument(
        "--secret-file", type=any_path, default=Path("moe-lightning.secret"), help="made where it is not there"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each rank and launcher
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before threads start, which inherit the mask
    try:
        host = RendezvousServer(bind=options.bind, secret_file=options.secret_file)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with host:
        print(f"listening on {host.address}, secret in {host.secret_file}", flush=True)
        while signal.sigtimedwait(signals, _LOOK_S) is None:
            if host.has_ended:
                print("error: the host ended for the defect above: start it again", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
