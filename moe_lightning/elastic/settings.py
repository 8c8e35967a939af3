"""What an elastic run is told: where its engine is, who it is, and how long it waits for whom."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Self

from annotated_types import Interval

from moe_lightning.config import PositiveInt, Seconds, validated
from moe_lightning.elastic.membership import MEMBERSHIPS, Membership
from moe_lightning.errors import ConfigurationError

BEAT_S = 0.5
"""How often every client of the rendezvous host says that it is there, at least."""

ELASTIC_VARIABLE = "MOE_LIGHTNING_ELASTIC"
"""Set by the launcher: the JSON of an `ElasticTask`."""


@validated
@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """How long an elastic run waits for whom; seconds throughout.

    Attributes:
        heartbeat_timeout_s: a member whose connection to the rendezvous host has ended is not waited for longer than
            this by the others' next join, unless it comes back.
        silence_timeout_s: a rank of which nothing is heard for this long, while the others make no step either, is
            expelled from a standing world (stopped, frozen, cut off). Its monitor runs in Python: keep this above the
            longest call that holds Python's lock.
        rendezvous_timeout_s: how long a process that needs the rendezvous host waits for it. Training needs it only
            when ranks come or go.
        hang_timeout_s: a member whose main thread does not come to the next join within this time after its world
            broke ends its process, so that the others need not wait for it. Before its first step, in which kernels
            compile and communicators begin, it may take `start_timeout_s`, if that is longer.
        build_timeout_s: for building groups. gloo waits this long, and cannot be freed, for a member that is lost just
            while connections are made; so it is below `hang_timeout_s`.
        join_timeout_s: how long a member waits for a world, and a world below `min_ranks` for more members.
        join_window_s: newcomers wait at least this long, so that those of one moment join together.
        start_timeout_s: how long the first world waits for all that were started.
        min_ranks: the smallest world that trains; a smaller one holds the state and waits, then saves it and ends.
        notice_on_sigterm: take SIGTERM as a notice of preemption instead of an end at once.
        notice_file: a file whose appearance is a notice; its first line says why.
        notice_url: an http(s) address that answers 200 when this machine will be taken away; a session token is
            fetched where it asks for one (AWS, IMDSv2).
        notice_poll_s: how often file and address are looked at.
        membership: how workers learn who trains: "rendezvous_host", or a name that somebody has registered in
            `elastic.membership.MEMBERSHIPS`.

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
    def beat_s(self) -> float:
        """How often a client of the rendezvous host says that it is there."""
        return min(BEAT_S, 0.1 * self.silence_timeout_s)

    def may_hang_s(self, progress: int) -> float:
        """How long a member that has told so many steps may take to come back from a world that broke."""
        return may_hang_s(self.hang_timeout_s, self.start_timeout_s, progress)

    def __post_init__(self) -> None:
        MEMBERSHIPS.find(self.membership)
        if self.build_timeout_s >= self.hang_timeout_s:
            raise ConfigurationError(
                f"build_timeout_s={self.build_timeout_s} must be below hang_timeout_s={self.hang_timeout_s}: raise that"
            )
        if self.notice_url is not None and not self.notice_url.startswith(("http://", "https://")):
            raise ConfigurationError(f"notice_url={self.notice_url!r} must begin with http:// or https://")


def may_hang_s(hang_s: float, start_s: float, progress: int) -> float:
    """See `ElasticSettings.hang_timeout_s`: a first step is slow, and nothing of it can be interrupted."""
    return hang_s if progress else max(hang_s, start_s)


def new_token() -> str:
    """A name for one process."""
    return secrets.token_hex(6)


@validated
@dataclass(frozen=True, kw_only=True)
class ElasticTask:
    """What the launcher tells one worker.

    Attributes:
        address: of the rendezvous host, "unix:PATH" or "host:port".
        secret_file: of the run, which the host asks for.
        node: name of the failure domain.
        birth_ns: when the launcher began, plus the slot, for a first process: ranks of the first world have the order
            of their slots; None for a process started later.
        token: names this process; a process started in its place has another.
        slot: the worker's place on its node.
        expected: workers that the first world waits for.
        starts: how often a worker was started in this place, this one included.
        settings: see there.
    """

    address: str
    secret_file: str
    node: str
    slot: int = 0
    expected: int = 1
    starts: int = 1
    birth_ns: int | None = None
    token: str = field(default_factory=new_token)
    settings: ElasticSettings = field(default_factory=ElasticSettings)

    def __post_init__(self) -> None:
        if not self.node or "." in self.token:
            raise ConfigurationError(f"node={self.node!r} must not be empty, token={self.token!r} not hold a dot")

    def to_environment(self) -> dict[str, str]:
        """The variable that hands it on."""
        return {ELASTIC_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self | None:
        """What the launcher said, or None where there is none.

        Raises:
            ConfigurationError: the variable is malformed.
        """
        text = (os.environ if environment is None else environment).get(ELASTIC_VARIABLE)
        if text is None:
            return None
        try:
            said: dict[str, Any] = json.loads(text)
            return cls(**{**said, "settings": ElasticSettings(**said.get("settings", {}))})
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{ELASTIC_VARIABLE} is malformed ({error}): leave it to the launcher") from None


def membership_from_environment() -> Membership | None:
    """Of a worker that an elastic launcher started; None in any other process.

    Raises:
        ConfigurationError: the launcher's variable is malformed, or its membership cannot be made.
    """
    task = ElasticTask.from_environment()
    return None if task is None else MEMBERSHIPS.make(task.settings.membership, task)
