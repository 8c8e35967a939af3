"""One worker's side of elastic training: join a world, have it guarded, break it up, join the next.

    engine = ElasticEngine.from_environment()
    while True:
        members = engine.join()
        with ConnectionCut() as cut:
            engine.guard(members, cut.cut)
            ... build groups on PrefixStore(members.name, engine.store) ...
        try:
            ... train, and call engine.made_progress() now and then ...
        except RuntimeError as error:
            engine.break_up(str(error))
            ... destroy the groups ...

Members meet at a rendezvous host, over authenticated connections that carry JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Self

from moe_lightning.elastic.control_store import ControlStore
from moe_lightning.elastic.membership import Members
from moe_lightning.elastic.monitor import Monitor
from moe_lightning.elastic.preemption import PreemptionWatch
from moe_lightning.elastic.settings import ElasticSettings, ElasticTask

_NOISE = re.compile(r"\[/[^\]]*\]\s*|\. This is typically caused by .*", re.DOTALL)  # gloo names files and guesses


class ElasticEngine:
    """See the top of the file. `join`, `guard` and `close` belong to one thread; the rest may be called from any.

    Args:
        task: what the launcher said.

    Raises:
        ConfigurationError: the run's secret cannot be read.
    """

    def __init__(self, task: ElasticTask) -> None:
        self.task = task
        self._monitor = Monitor(task)
        self._preemption = PreemptionWatch(task.settings)
        self._store: ControlStore | None = None

    @classmethod
    def from_environment(cls) -> Self | None:
        """The engine of a worker that an elastic launcher started; None for any other process.

        Raises:
            ConfigurationError: the launcher's variable is malformed.
        """
        task = ElasticTask.from_environment()
        return cls(task) if task is not None else None

    @property
    def settings(self) -> ElasticSettings:
        """How long this run waits for whom."""
        return self.task.settings

    @property
    def member_id(self) -> str:
        """This process's name among the members; a process that the others went on without gets a new one."""
        return self._monitor.member_id

    @property
    def node(self) -> str:
        """The failure domain of this process."""
        return self.task.node

    @property
    def store(self) -> ControlStore:
        """For building groups, under the prefix `members.name`; a new one after each `join`. Breaking the world up
        ends every wait on it.
        """
        assert self._store is not None, "join first"
        return self._store

    @property
    def multiple(self) -> int:
        """Worlds of this run train in multiples of so many members; set it before the first `join`."""
        return self._monitor.multiple

    @multiple.setter
    def multiple(self, multiple: int) -> None:
        self._monitor.multiple = multiple

    def join(self, *, is_ready: bool = False, is_spare: bool = False) -> Members:
        """Leave the former world, announce an arrival, and wait for the next world, which may be smaller than
        `min_ranks`: its members then hold the state and wait.

        The first join of a run waits for all workers that were started (up to `start_timeout_s`). Groups of the former
        world must have been destroyed.

        Args:
            is_ready: this process has set up, and goes on with training at once.
            is_spare: the others of its world go on without it; it waits until there are enough for a multiple.

        Raises:
            RunFinished: the others finished while this process was spare, stopped or out of reach.
            WorldTooSmall: no members came together within `join_timeout_s`.
            ConfigurationError: the rendezvous host did not answer for `rendezvous_timeout_s`, or no member can be
                reached.
        """
        members = self._monitor.join(is_ready=is_ready, is_spare=is_spare)
        self._store = ControlStore(self._monitor.requests, members.number)
        return members

    def world_exists(self) -> bool:
        """Whether this run has a world already, which a process that has not joined yet would come to.

        Raises:
            ConfigurationError: the rendezvous host did not answer for `rendezvous_timeout_s`.
        """
        return self._monitor.world_exists()

    def comes_too_early(self, members: Members) -> bool:
        """Whether others have set up before this first world of this process: they go on with training in it, and this
        process has no place for their state yet. It then is out of that world again, and the others go on without it
        until it joins.

        Args:
            members: from `join`.
        """
        assert members.me >= 0
        if not self._monitor.has_settled_members():
            return False
        self._monitor.withdraw("a process joined that has not set up")
        return True

    def guard(self, members: Members, cut: Callable[[], None]) -> None:
        """Watch a world until it breaks or the next one is guarded.

        Call it before the groups are built: a member may die while they are.

        Args:
            members: from `join`.
            cut: called once, from any thread, when the world breaks; frees whoever waits for a peer.
        """
        self._monitor.guard(members, cut)

    def made_progress(self) -> None:
        """Say that training has come a step further: while it does, links between ranks are not looked at."""
        self._monitor.made_progress()

    def break_up(self, reason: str) -> None:
        """Break the present world: tell all its ranks, and cut; does nothing where it is broken already.

        Args:
            reason: one sentence, of a network library perhaps; a launcher's or a neighbour's word on the cause goes
                before it.
        """
        self._monitor.break_up(_NOISE.sub("", reason).strip() or "the world broke")

    @property
    def reason(self) -> str | None:
        """Why the last guarded world broke, as one sentence; None while it holds.

        The best that is known by now: ask again after the next join, a launcher's word may have come.
        """
        return self._monitor.reason

    def wait_for_cause(self) -> str | None:
        """Which member's end broke the last guarded world, as one sentence; None where nobody says so within the time
        in which a silent one is found out.
        """
        return self._monitor.wait_for_cause(self.settings.silence_timeout_s + 1.0)

    def newcomers(self) -> bool:
        """Whether somebody outside the present world has been waiting for at least `join_window_s`.

        Ranks learn it at slightly different times: let one of them decide for all.
        """
        return self._monitor.newcomers()

    def finish(self) -> None:
        """Tell those who wait to be let in that the training is done."""
        self._monitor.finish()

    def is_finished(self) -> bool:
        """Whether others have finished the run since this process started."""
        return self._monitor.is_finished()

    def listen(self) -> None:
        """Receive notices from now on, also where a Trainer has taken the signal for itself."""
        self._preemption.listen()

    @property
    def notice(self) -> str | None:
        """A notice that this process will be taken away, as a sentence; None as long as there is none."""
        return self._preemption.notice

    def close(self) -> None:
        """Leave for good: no thread, descriptor or connection stays."""
        self._preemption.close()
        self._monitor.close()
        self._store = None
