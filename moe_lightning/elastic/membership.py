"""Who trains together: the members of one world, and how members are called."""

from __future__ import annotations

import time
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Members:
    """One membership of ranks.

    Attributes:
        number: of the world; grows for ever, also over restarts of the rendezvous host and the run.
        ids: the members, oldest first; the index is the rank.
        me: this process's index.
    """

    number: int
    ids: tuple[str, ...]
    me: int

    @property
    def name(self) -> str:
        """Unique for ever; the prefix of everything this world keeps in a store."""
        return f"world-{self.number}"

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
