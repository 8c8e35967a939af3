"""Who trains together: the members of one world, how members are called, and who knows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moe_lightning.registry import Registry

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from moe_lightning.elastic.settings import ElasticSettings, ElasticTask

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


class Membership(Protocol):
    """One worker's view of who trains: `elastic.engine` shows the order of the calls and `ElasticEngine` says what each
    of them promises. `join`, `guard` and `close` belong to one thread; the rest may be called from any.

    Attributes:
        task: what the launcher said.
        settings: how long this run waits for whom.
        node: the failure domain of this process.
        store: for building groups, under the prefix `members.name`; no wait on it may outlive the world.
        reason: why the last guarded world broke, as one sentence; None while it holds.
        notice: that this process will be taken away, as a sentence; None as long as there is none.
        multiple: worlds train in multiples of so many members.
    """

    task: ElasticTask
    multiple: int

    @property
    def settings(self) -> ElasticSettings: ...

    @property
    def node(self) -> str: ...

    @property
    def store(self) -> Store: ...

    @property
    def reason(self) -> str | None: ...

    @property
    def notice(self) -> str | None: ...

    def world_exists(self) -> bool:
        """Whether this run has a world already."""

    def join(self, *, is_ready: bool = False, is_spare: bool = False) -> Members:
        """Leave the former world and wait for the next one; every process of it is told the same members. A spare
        process waits until there are enough for a multiple."""

    def comes_too_early(self, members: Members) -> bool:
        """Whether others go on with training in this first world of a process that has not set up."""

    def guard(self, members: Members, cut: Callable[[], None]) -> None:
        """Call `cut` once, from any thread, when this world breaks."""

    def made_progress(self) -> None:
        """Training has come a step further."""

    def break_up(self, reason: str) -> None:
        """Break the present world for all its ranks."""

    def wait_for_cause(self) -> str | None:
        """Which member's end broke the last world."""

    def newcomers(self) -> bool:
        """Whether somebody waits to be let in."""

    def finish(self) -> None:
        """The training is done."""

    def is_finished(self) -> bool:
        """Whether others have finished the run."""

    def listen(self) -> None:
        """Receive notices from now on."""

    def close(self) -> None:
        """Leave for good."""


class MembershipFactory(Protocol):
    """Makes a worker's `Membership`."""

    def __call__(self, task: ElasticTask, /) -> Membership:
        """Of the worker that the launcher told this."""


def _rendezvous_host(task: ElasticTask, /) -> Membership:
    from moe_lightning.elastic.engine import ElasticEngine  # launchers, which check the name, need not load it

    return ElasticEngine(task)


MEMBERSHIPS: Registry[MembershipFactory] = Registry(
    "membership", MembershipFactory, {"rendezvous_host": _rendezvous_host}, makes=Membership
)
