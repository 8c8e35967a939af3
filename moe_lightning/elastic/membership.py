"""Membership of a world: members, settings, and the interface of membership services.

`ElasticTask` is what a launcher passes to one worker: address, identity, timeouts. `Members` are
the ranks of one world. `MEMBERSHIPS` holds the services that provide them, by name.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self

from annotated_types import Interval

from moe_lightning.config import PositiveInt, Seconds, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Members:
    """Members of one world.

    Attributes:
        number: of the world; always grows, also over restarts of the rendezvous host and the run.
        ids: the members, oldest first; the index is the rank.
        rank: this process's index.
    """

    number: int
    ids: tuple[str, ...]
    rank: int

    @property
    def name(self) -> str:
        """Unique name of the world; the prefix of its keys in a store."""
        return f"world-{self.number}"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ids)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of each rank."""
        return tuple(node_of(member) for member in self.ids)

    def change_from(self, former: Sequence[str]) -> str:
        """Return in words how many ranks of each node left and joined since a world of these members; at most four
        nodes.
        """
        before, now = set(former), set(self.ids)
        gone = Counter(node_of(id) for id in former if id not in now)
        come = Counter(node_of(id) for id in self.ids if id not in before)
        changes = [
            f"{count} {'rank leaves' if count == 1 else 'ranks leave'} node {node}" for node, count in gone.items()
        ]
        changes += [
            f"{count} {'rank joins' if count == 1 else 'ranks join'} on node {node}" for node, count in come.items()
        ]
        return ", ".join(changes[:4]) + (", ..." if len(changes) > 4 else "")


def new_member_id(node: str, token: str, birth_ns: int) -> str:
    """Return a name that sorts by birth: older members come first. The token is unique in a node."""
    return f"{birth_ns:020d}.{node}.{token}"


def node_of(member_id: str) -> str:
    """Return the node in the name of a member."""
    return member_id.split(".", 1)[1].rsplit(".", 1)[0]


def token_of(member_id: str) -> str:
    """Return the token in the name of a member; it stays when a process joins again under another name."""
    return member_id.rsplit(".", 1)[1]


def worker_token(launcher: str, slot: int, starts: int) -> str:
    """Return the token of a worker: that of its launcher, its slot, and its start there if it is not the first."""
    return f"{launcher}-{slot}" if starts == 1 else f"{launcher}-{slot}-{starts}"


def launcher_of(token: str) -> str:
    """Return the launcher's token in that of a worker."""
    return token.partition("-")[0]


class Membership(Protocol):
    """Membership of one worker. `elastic.rendezvous_client` shows the order of the calls, and `RendezvousClient`
    documents each of them. `join`, `guard` and `close` belong to one thread; the rest may be called from any.

    Attributes:
        task: from the launcher.
        store: for building groups, under the prefix `members.name`; no wait on it may outlive the world.
        reason: why the last guarded world broke, as one sentence; None while it holds.
        notice: notice of preemption of this process, as a sentence; None without one.
    """

    task: ElasticTask

    @property
    def store(self) -> Store: ...

    @property
    def reason(self) -> str | None: ...

    @property
    def notice(self) -> str | None: ...

    def world_exists(self) -> bool:
        """Return True if this run had a world already when this process registered."""

    def join(self, *, is_ready: bool = False, is_spare: bool = False) -> Members:
        """Leave the former world and wait for the next one, whose processes all get the same members. A spare process
        waits until there are enough for a multiple."""

    def withdraw_if_early(self) -> bool:
        """Leave this first world again if others are training in it and this process has not set up; True if so."""

    def guard(self, members: Members, abort: Callable[[], None]) -> None:
        """Call `abort` once, from any thread, when this world breaks."""

    def record_progress(self) -> None:
        """Record that training has made a step, or that all ranks have met to change the world."""

    def abort(self, reason: str) -> None:
        """Break the present world for all its ranks."""

    def wait_for_cause(self) -> str | None:
        """Return how the member ended that broke the last world; None if that is not known in time."""

    def has_newcomers(self) -> bool:
        """Return True if a process waits to join."""

    def finish(self) -> None:
        """Announce that the training is done."""

    def record_call(self, *, is_running: bool) -> None:
        """Record that a call of the Trainer begins or ends, in which others may wait for this process."""

    def is_finished(self) -> bool:
        """Return True if the run has been finished, by others or by all."""

    def is_late(self) -> bool:
        """Return True if others have finished the run without this process."""

    def listen(self) -> None:
        """Begin a training: receive notices from now on."""

    def close(self, failure: str | None = None) -> None:
        """Leave for good: in order, or because of a failure of this process, which the others recover from."""


class MembershipFactory(Protocol):
    """Factory of a worker's `Membership`."""

    def __call__(self, task: ElasticTask, multiple: int, /) -> Membership:
        """Return the membership of the worker with this task, in worlds that train in multiples of so many members."""


def _rendezvous_host(task: ElasticTask, multiple: int, /) -> Membership:
    # Here: launchers, which check the name, need not load it.
    from moe_lightning.elastic.rendezvous_client import RendezvousClient

    return RendezvousClient(task, multiple)


MEMBERSHIPS: Registry[MembershipFactory] = Registry(
    "membership",
    MembershipFactory,
    {"rendezvous_host": _rendezvous_host, "etcd": _rendezvous_host},  # etcd elects the host: launchers talk to it alone
    makes=Membership,
)

HEARTBEAT_S = 0.5
"""Longest interval in seconds between two heartbeats of a client of the rendezvous host."""

ELASTIC_VARIABLE = "MOE_LIGHTNING_ELASTIC"
"""Set by the launcher: the JSON of an `ElasticTask`."""


@validated
@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """Timeouts of an elastic run, in seconds.

    Attributes:
        heartbeat_timeout_s: a member whose connection to the rendezvous host has ended is not waited for longer than
            this by the others' next join, unless it comes back.
        silence_timeout_s: a rank without heartbeats for this long, while the others make no step either, is evicted
            from its world (stopped, frozen, cut off). A thread in Python sends heartbeats: keep this above the longest
            call that holds Python's lock. After the training a rank may export, and is evicted for silence only in
            further calls of the Trainer.
        rendezvous_timeout_s: how long a process that needs the rendezvous host waits for it. Training needs it only
            when ranks come or go. A rank that was evicted for dead links waits as long for the nodes behind them.
        hang_timeout_s: a member whose main thread does not come to the next join within this time after its world
            broke ends its process, so that the others need not wait for it; after two seconds in a collective that an
            abort does not free. Before its first step, in which kernels compile and communicators begin, it may take
            `start_timeout_s`, if that is longer; after the training, where it may export, there is no limit.
        build_timeout_s: for building groups. gloo waits this long, and cannot be freed, for a member that is lost just
            while connections are made; so it is below `hang_timeout_s`.
        join_timeout_s: how long a member waits for a world, and a world below `min_ranks` for more members; a process
            that joins a running one waits as long as that needs to its next step, and a member whose world breaks at
            the end of the training as long as those live that have finished it.
        join_window_s: newcomers wait at least this long, so that those of one moment join together.
        start_timeout_s: how long the first world waits for all that were started.
        min_ranks: the smallest world that trains; a smaller one holds the state and waits, then saves it and ends.
        notice_on_sigterm: take SIGTERM as a notice of preemption instead of an end at once.
        notice_file: a file whose appearance is a notice; its first line says why.
        notice_url: an http(s) address that answers 200 when this machine will be taken away; a session token is
            fetched where it asks for one (AWS, IMDSv2).
        notice_poll_s: how often file and address are looked at.
        membership: how workers learn who trains: "rendezvous_host", "etcd" (a host that the launchers elect, see
            `elastic.etcd_rendezvous`), or a name that somebody has registered in `elastic.membership.MEMBERSHIPS`.

    Raises:
        ConfigurationError: a value is out of range.
    """

    heartbeat_timeout_s: Annotated[Seconds, Interval(ge=0.1)] = 0.5
    silence_timeout_s: Seconds = 5.0
    rendezvous_timeout_s: Seconds = 40.0
    hang_timeout_s: Seconds = 10.0
    build_timeout_s: Seconds = 5.0
    join_timeout_s: Seconds = 600.0
    join_window_s: Seconds = 1.0
    start_timeout_s: Seconds = 120.0
    min_ranks: PositiveInt = 1
    notice_on_sigterm: bool = False
    notice_file: str | None = None
    notice_url: str | None = None
    notice_poll_s: Seconds = 5.0
    membership: str = "rendezvous_host"

    @property
    def patience(self) -> list[float]:
        """Timeouts in the order of `rendezvous_state.parse_timeouts`."""
        return [self.heartbeat_timeout_s, self.silence_timeout_s, self.start_timeout_s]

    @property
    def heartbeat_interval_s(self) -> float:
        """Interval between two heartbeats of a client of the rendezvous host."""
        return min(HEARTBEAT_S, 0.1 * self.silence_timeout_s)

    def __post_init__(self) -> None:
        MEMBERSHIPS.find(self.membership)
        if self.build_timeout_s >= self.hang_timeout_s:
            raise ConfigurationError(
                f"build_timeout_s={self.build_timeout_s} must be below hang_timeout_s={self.hang_timeout_s}: raise that"
            )
        if self.notice_url is not None and not self.notice_url.startswith(("http://", "https://")):
            raise ConfigurationError(f"notice_url={self.notice_url!r} must begin with http:// or https://")


def new_token() -> str:
    """Return a name for one process."""
    return secrets.token_hex(6)


@validated
@dataclass(frozen=True, kw_only=True)
class ElasticTask:
    """Task that the launcher passes to one worker.

    Attributes:
        address: of the launcher's relay, or of the rendezvous host where that is the launcher's own: "unix:PATH" or
            "host:port".
        secret_file: of the run; the host requires it.
        node: name of the failure domain.
        birth_ns: when the launcher began, plus the slot, for a first process: ranks of the first world have the order
            of their slots; None for a process started later.
        epoch_ns: time of day at which the monotonic clock of this machine began, as its launcher has seen it.
        token: names this process; a process started in its place has another.
        slot: index of the worker on its node.
        expected: workers that the first world waits for.
        starts: number of workers started in this slot, this one included.
        settings: see there.
    """

    address: str
    secret_file: str
    node: str
    slot: int = 0
    expected: int = 1
    starts: int = 1
    birth_ns: int | None = None
    epoch_ns: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())
    token: str = field(default_factory=new_token)
    settings: ElasticSettings = field(default_factory=ElasticSettings)

    def __post_init__(self) -> None:
        if not self.node or "." in self.token:
            raise ConfigurationError(f"node={self.node!r} must not be empty, token={self.token!r} not hold a dot")

    @property
    def now_ns(self) -> int:
        """Present time for births. It only grows, so a newcomer is the youngest though the clock has been set back."""
        return self.epoch_ns + time.monotonic_ns()

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable that passes this task to the worker."""
        return {ELASTIC_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self | None:
        """Return the launcher's task; None without a launcher.

        Raises:
            ConfigurationError: the variable is malformed.
        """
        text = (os.environ if environment is None else environment).get(ELASTIC_VARIABLE)
        if text is None:
            return None
        try:
            values: dict[str, Any] = json.loads(text)
            return cls(**{**values, "settings": ElasticSettings(**values.get("settings", {}))})
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{ELASTIC_VARIABLE} is malformed ({error}): leave it to the launcher") from None


_JOINED: set[str] = set()  # tokens of tasks that this process has a membership of


def membership_from_environment(multiple: int = 1) -> Membership | None:
    """Return the membership of a worker that an elastic launcher started; None in any other process.

    Args:
        multiple: worlds train in multiples of so many members.

    Raises:
        ConfigurationError: the launcher's variable is malformed, its membership cannot be made, or this process has it:
            two of one task would evict each other.
    """
    task = ElasticTask.from_environment()
    if task is None:
        return None
    if task.token in _JOINED:
        raise ConfigurationError(
            "an elastic script trains with one strategy: give the same ExpertParallelStrategy to all its Trainers"
        )
    membership: Membership = MEMBERSHIPS.make(task.settings.membership, task, multiple)
    _JOINED.add(task.token)
    return membership


def devices_of_machine(devices: list[torch.device] | None) -> list[torch.device] | None:
    """Return the devices of this machine's ranks, of those that the Trainer found: an elastic launcher sets their
    number.

    Raises:
        ConfigurationError: fewer GPUs than ranks.
    """
    task = ElasticTask.from_environment()
    if task is None or not devices:
        return devices
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", len(devices)))
    if devices[0].type == "cpu":
        return [devices[0]] * ranks
    if len(devices) < ranks:
        raise ConfigurationError(
            f"the launcher started {ranks} ranks on this machine, but the Trainer has {len(devices)} devices: "
            f"use devices={ranks} where there are so many, or start fewer ranks"
        )
    return devices[:ranks]
