"""Hosts what the workers meet at: a lighthouse and a TCPStore that outlive them.

A launcher embeds it; on a cluster it runs on a safe host:

    python -m moe_lightning.elastic.rendezvous_host --bind HOST:PORT        # lighthouse at PORT, store at PORT + 1

Neither asks who calls: whoever reaches the two ports can join, disturb or end a run, though nothing that comes from
them is ever unpickled or executed. Bind to the loopback interface (the default) or to an interface of a private
network. The lighthouse also serves a status page.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from types import TracebackType
from typing import Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_lightning.elastic.membership import LOOPBACK, has_lighthouse, silence_engine
from moe_lightning.errors import ConfigurationError

_TICK_MS = 10
_STRAGGLERS_MS = 24 * 3600 * 1000


class RendezvousHost:
    """A lighthouse and a store, until `close`.

    Args:
        bind: interface address to listen on.
        port: of the lighthouse, the store takes the next one; 0 lets the system choose both.
        heartbeat_timeout_s: a member without a heartbeat for this long is dead.

    Attributes:
        lighthouse: "http://host:port", or None where torchft is not installed.
        store_host, store_port: where the store is.
    """

    def __init__(self, *, bind: str = LOOPBACK, port: int = 0, heartbeat_timeout_s: float = 0.5) -> None:
        self.store_host = bind
        self.lighthouse: str | None = None
        self._lighthouse: Any = None
        if has_lighthouse():
            self._lighthouse = _lighthouse(bind, port, heartbeat_timeout_s)
            # it names itself by the host name, which may stand for another interface
            self.lighthouse = f"http://{_url_host(bind)}:{self._lighthouse.address().rpartition(':')[2]}"
        self.store: TCPStore | None
        self.store, self.store_port = bound_store(bind, port + 1 if port else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop both."""
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
        self._lighthouse = self.store = None


def bound_store(host: str, port: int = 0) -> tuple[TCPStore, int]:
    """A store that listens on one interface and nowhere else: torch would bind every one, so it is handed a bound
    socket; and its port.

    Raises:
        ConfigurationError: the address is taken or not of this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # the store closes it
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port} ({error.strerror}): choose another") from None
    finally:
        listener.close()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor), port


def _lighthouse(bind: str, port: int, heartbeat_timeout_s: float) -> Any:
    silence_engine()
    from torchft.coordination import LighthouseServer

    try:
        return LighthouseServer(
            bind=f"{_url_host(bind)}:{port}",
            min_replicas=1,
            join_timeout_ms=_STRAGGLERS_MS,  # a live member that is busy is waited for
            quorum_tick_ms=_TICK_MS,
            heartbeat_timeout_ms=round(heartbeat_timeout_s * 1000),
        )
    except RuntimeError as error:
        raise ConfigurationError(f"the lighthouse cannot listen on {bind}:{port} ({error}): choose another") from None


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def main(arguments: list[str] | None = None) -> int:
    """Host until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m moe_lightning.elastic.rendezvous_host", description=__doc__)
    parser.add_argument(
        "--bind", default=f"{LOOPBACK}:29510", metavar="HOST:PORT", help="the store takes PORT + 1; 0: any two"
    )
    parser.add_argument("--heartbeat-timeout-s", type=float, default=0.5)
    options = parser.parse_args(arguments)
    host, _, port = options.bind.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 65535:
        parser.error(f"--bind {options.bind} is not HOST:PORT")
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before threads start, which inherit the mask
    try:
        host_ = RendezvousHost(bind=host, port=int(port), heartbeat_timeout_s=options.heartbeat_timeout_s)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with host_:
        print(f"lighthouse {host_.lighthouse}, store {host_.store_host}:{host_.store_port}", flush=True)
        signal.sigwait(signals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
