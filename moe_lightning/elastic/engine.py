"""One worker's side of elastic training: join a world, have it guarded, break it up, join the next.

    engine = ElasticEngine.from_environment()
    while True:
        members = engine.join()
        with ConnectionCut() as cut:
            engine.guard(members, cut.cut)
            ... build groups on PrefixStore(members.name, engine.store) ...
        try:
            ... train ...
        except RuntimeError as error:
            engine.break_up(str(error))
            ... destroy the groups ...

Membership is agreed on by an engine that exists (torchft's lighthouse, or torch's rendezvous); everything else that
ranks tell each other goes through the TCPStore that outlives them, as JSON.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_lightning.comm.cut import ConnectionCut
from moe_lightning.elastic.membership import LighthouseMembership, Members, Membership, new_member_id
from moe_lightning.elastic.monitor import Monitor, connect_store
from moe_lightning.elastic.preemption import PreemptionWatch
from moe_lightning.elastic.rendezvous import RendezvousMembership
from moe_lightning.elastic.settings import ElasticSettings, ElasticTask
from moe_lightning.errors import ConfigurationError

_START_POLL_S = 0.01
_NOISE = re.compile(r"\[/[^\]]*\]\s*|\. This is typically caused by .*", re.DOTALL)  # gloo names files and guesses


class WorldTooSmall(ConfigurationError):
    """Fewer members than `min_ranks` came together in time."""


class ElasticEngine:
    """See the top of the file. `join`, `guard` and `close` belong to one thread; the rest may be called from any.

    Args:
        task: what the launcher said.
    """

    def __init__(self, task: ElasticTask) -> None:
        self.task = task
        self._membership = self._new_membership()
        self._monitor = Monitor(task, self._membership.member_id)
        self._preemption = PreemptionWatch(task.settings)
        self._started = False
        self._store_cut = ConnectionCut(only_to=task.store_port)
        self._store: TCPStore | None = None

    @classmethod
    def from_environment(cls) -> Self | None:
        """The engine of a worker that an elastic launcher started; None for any other process.

        Raises:
            ConfigurationError: the launcher's variable is malformed.
            RuntimeError: the store does not answer.
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
        return self._membership.member_id

    @property
    def node(self) -> str:
        """The failure domain of this process."""
        return self.task.node

    @property
    def store(self) -> TCPStore:
        """For building groups, under the prefix `members.name`; a new client after each `join`. Breaking the world up
        ends every wait on it.
        """
        assert self._store is not None, "join first"
        return self._store

    def join(self, *, is_ready: bool = False) -> Members:
        """Leave the former world, announce an arrival, and wait for the next world, which may be smaller than
        `min_ranks`: its members then hold the state and wait.

        The first join of a run waits for all workers that were started (up to `start_timeout_s`). Groups of the former
        world must have been destroyed.

        Args:
            is_ready: this process has set up, and goes on with training at once.

        Raises:
            WorldTooSmall: no members came together within `join_timeout_s`.
            ConnectionError: the membership's engine cannot be reached.
            ConfigurationError: the store cannot be reached.
        """
        self._monitor.leave_world()
        if self._monitor.is_expelled():
            self._membership.close()
            self._membership = self._new_membership(reborn=True)
            self._monitor.rename(self.member_id)
        if is_ready:
            self._monitor.announce_ready()
        self._store_cut = ConnectionCut(only_to=self.task.store_port)
        with self._store_cut:
            self._store = self._connect()
        if not self._started:
            self._wait_for_start()
        self._monitor.knock(True)
        try:
            return self._wait_for_world()
        finally:
            self._monitor.knock(False)

    def world_exists(self) -> bool:
        """Whether this run has a world already, which a process that has not joined yet would come to."""
        return self._monitor.world_exists()

    def comes_too_early(self, members: Members) -> bool:
        """Whether others have set up before this first world of this process: they go on with training in it, and this
        process has no place for their state yet. It then is out of that world again, and the others go on without it
        until it joins.

        Args:
            members: from `join`.
        """
        if not self._monitor.has_ready_members(members):
            return False
        self._monitor.guard(members, lambda: None)
        self.break_up("a process joined that has not set up")
        self._monitor.leave_world()
        self._membership.close()
        return True

    def guard(self, members: Members, cut: Callable[[], None]) -> None:
        """Watch a world until it breaks or the next one is guarded.

        Call it before the groups are built: a member may die while they are.

        Args:
            members: from `join`.
            cut: called once, from any thread, when the world breaks; frees whoever waits for a peer.
        """
        store_cut = self._store_cut

        def cut_all() -> None:
            cut()
            store_cut.cut()

        self._monitor.guard(members, cut_all)

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
        self._membership.close()
        self._store = None

    def _new_membership(self, *, reborn: bool = False) -> Membership:
        member_id = new_member_id(self.task.node, self.task.token, None if reborn else self.task.birth_ns)
        if self.task.lighthouse is None:
            return RendezvousMembership(member_id, connect_store(self.task))
        return LighthouseMembership(
            member_id, lighthouse=self.task.lighthouse, heartbeat_timeout_s=self.settings.heartbeat_timeout_s
        )

    def _connect(self) -> TCPStore:
        """A new client of the store; without the store there is no run to go on with."""
        try:
            return connect_store(self.task)
        except RuntimeError as error:
            raise ConfigurationError(
                f"the store of this run at {self.task.store_host}:{self.task.store_port} does not answer "
                f"({_NOISE.sub('', str(error)).strip()}): start the run again, it resumes from the last checkpoint"
            ) from None

    def _wait_for_start(self) -> None:
        """A lone early worker would form a world of one: wait for the others, or for a world that exists already."""
        self._membership.enter()  # before the announcement: who is known to have come must be waited for
        self._monitor.announce_arrival()
        deadline = time.monotonic() + self.settings.start_timeout_s
        while not self._monitor.is_start_complete() and time.monotonic() < deadline:
            time.sleep(_START_POLL_S)
        self._started = True

    def _wait_for_world(self) -> Members:
        timeout_s = self.settings.join_timeout_s
        try:
            return self._membership.join(timeout_s=timeout_s)
        except TimeoutError as error:
            raise WorldTooSmall(f"no world within {timeout_s:g} s ({error}): look at the other workers") from None
