"""Launchers in this process, whose relay workers connect to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from moe_lightning.elastic.connection import LauncherClient
from moe_lightning.elastic.etcd_rendezvous import EtcdRendezvous
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask
from moe_lightning.elastic.protocol import Address
from moe_lightning.elastic.rendezvous_host import RendezvousServer


@contextmanager
def relayed(
    host: RendezvousServer | EtcdRendezvous,
    settings: ElasticSettings,
    *,
    expected: int = 1,
    locate: Callable[[], Address] | None = None,
) -> Iterator[ElasticTask]:
    """The task of the workers of a launcher.

    Args:
        expected: workers.
        locate: see `LauncherClient`.
    """
    client = LauncherClient(host.address, host.secret_file, settings, expected, locate=locate, relays=True)
    assert client.relay is not None
    with closing(client):
        yield ElasticTask(
            address=str(client.relay.address),
            secret_file=str(host.secret_file),
            node="a",
            expected=expected,
            settings=settings,
        )
