"""Who trains together: membership on an existing engine, behind one small interface.

torchft's lighthouse agrees on the members; its manager server sends heartbeats from threads that do not need Python's
lock. Where torchft has no wheel, torch's dynamic rendezvous does the same more slowly (`rendezvous.py`).
Groups are ours: built on a TCPStore under the world's unique name.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Protocol

from moe_lightning.errors import ConfigurationError

_CONNECT_TIMEOUT = timedelta(seconds=10)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Members:
    """One membership of ranks.

    Attributes:
        name: unique for ever; the prefix of everything this world keeps in the store.
        ids: the members, oldest first; the index is the rank.
        me: this process's index.
    """

    name: str
    ids: tuple[str, ...]
    me: int

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.me

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ids)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of each rank."""
        return tuple(node_of(member) for member in self.ids)


class Membership(Protocol):
    """An engine that agrees on members."""

    @property
    def member_id(self) -> str:
        """This process's name among the members."""

    def enter(self) -> None:
        """Be waited for from now on; a no-op for a process that entered already.

        Raises:
            ConnectionError: the engine cannot be reached.
        """

    def join(self, *, timeout_s: float) -> Members:
        """Enter, wait until all live members have come, and return the same members to each.

        Raises:
            TimeoutError: they did not come in time.
            ConnectionError: the engine cannot be reached.
        """

    def close(self) -> None:
        """Leave: peers no longer wait for this process."""


def new_member_id(node: str, token: str, birth_ns: int | None = None) -> str:
    """A name that sorts by birth, now unless told otherwise: older members come first. The token tells processes of a
    node apart.
    """
    return f"{time.time_ns() if birth_ns is None else birth_ns:020d}.{node}.{token}"


def node_of(member_id: str) -> str:
    """The node in a member's name."""
    return member_id.split(".", 1)[1].rsplit(".", 1)[0]


def token_of(member_id: str) -> str:
    """The process in a member's name; it stays when a process is born again."""
    return member_id.rsplit(".", 1)[1]


def has_lighthouse() -> bool:
    """Whether torchft is installed (wheels exist for Linux on x86-64)."""
    return find_spec("torchft") is not None


def silence_engine() -> None:
    """Let torchft keep its log of every quorum to itself; only before its import, and unless the user wants it."""
    os.environ.setdefault("RUST_LOG", "error")


class LighthouseMembership:
    """Membership by torchft's lighthouse.

    A process is waited for while its heartbeats last.

    Args:
        member_id: from `new_member_id`.
        lighthouse: "http://host:port".
        heartbeat_timeout_s: the lighthouse's; heartbeats are sent six times as often.
    """

    def __init__(self, member_id: str, *, lighthouse: str, heartbeat_timeout_s: float) -> None:
        if not has_lighthouse():
            raise ConfigurationError("torchft is not installed: pip install torchft==0.2.0, or use the rendezvous")
        silence_engine()
        self._member_id = member_id
        self._lighthouse = lighthouse
        self._interval = timedelta(seconds=heartbeat_timeout_s / 6)
        self._heart: Any = None
        self._client: Any = None

    @property
    def member_id(self) -> str:
        """This process's name among the members."""
        return self._member_id

    def enter(self) -> None:
        """Begin to send heartbeats; the first has arrived when this returns."""
        from torchft.coordination import LighthouseClient, ManagerServer

        try:
            if self._client is None:
                self._client = LighthouseClient(self._lighthouse, _CONNECT_TIMEOUT)
            if self._heart is None:
                self._client.heartbeat(self._member_id, _CONNECT_TIMEOUT)
                self._heart = ManagerServer(
                    replica_id=self._member_id,
                    lighthouse_addr=self._lighthouse,
                    hostname=LOOPBACK,
                    bind=f"{LOOPBACK}:0",
                    store_addr="",
                    world_size=1,
                    heartbeat_interval=self._interval,
                    connect_timeout=_CONNECT_TIMEOUT,
                    quorum_retries=0,
                )
        except (RuntimeError, TimeoutError) as error:
            raise self._lost(error) from None

    def join(self, *, timeout_s: float) -> Members:
        """Wait for the quorum of all live members; see `Membership`."""
        self.enter()
        try:
            quorum = self._client.quorum(
                replica_id=self._member_id,
                timeout=timedelta(seconds=timeout_s),
                address="",
                store_address="",
                step=0,
                world_size=1,
            )
        except TimeoutError:
            raise TimeoutError(f"no quorum at {self._lighthouse} within {timeout_s:.1f} s") from None
        except RuntimeError as error:
            raise self._lost(error) from None
        ids = tuple(sorted(member.replica_id for member in quorum.participants))
        created = quorum.created  # the quorum's number begins anew with the lighthouse: its time makes it unique
        name = f"q{quorum.quorum_id}.{created.seconds}.{created.nanos:09d}"
        return Members(name=name, ids=ids, me=ids.index(self._member_id))

    def close(self) -> None:
        """Stop the heartbeats."""
        if self._heart is not None:
            self._heart.shutdown()
        self._heart = self._client = None

    def _lost(self, error: Exception) -> ConnectionError:
        self._client = None
        return ConnectionError(f"the lighthouse at {self._lighthouse} does not answer: {error}")
