"""Elastic worlds of one rank: join, commit steps together, recover.

A step is committed in two phases: after all its collectives every rank agrees that it is prepared, and only then
applies its update. So survivors of a fault differ by at most one update, and those that were prepared can apply it
later. A recovery does not leave `trainer.fit`: the fit loop runs again with the progress of the last committed step,
in the same process, with the same module, optimizers, loggers and callbacks, as Lightning does on a resume. A retry
inside the strategy could not restore the micro-batches before a failed one, and `trainer.fit` would run the user's
setup hooks once more. Sources: Lazarus 4.3 and REFT 4; here live state replaces the checkpoint.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from moe_lightning.balancing.repair import Repair
from moe_lightning.checkpoint.memory import RecoverySources
from moe_lightning.checkpoint.protection import ProtectionLayout
from moe_lightning.checkpoint.recovery_plan import RecoveryPlan
from moe_lightning.compat import private_torch
from moe_lightning.data.loader import leave_schedule, outline_of
from moe_lightning.elastic.client_state import WorldTooSmall
from moe_lightning.elastic.faults import (
    MEMBERS_CHANGE,
    MembersChange,
    WorldChanged,
    is_network_fault,
    is_world_fault,
    reason_of,
    release_frames,
)
from moe_lightning.elastic.membership import Members, Membership
from moe_lightning.elastic.worker import (
    AT_FAILURE,
    PeerFailed,
    Preempted,
    RunFinished,
    signature_of,
    take_over_terminal,
)
from moe_lightning.errors import ConfigurationError, StateDamagedError, WorldAbortedError
from moe_lightning.parallel.abort import build_world, destroy_groups, store_barrier
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World, any_says
from moe_lightning.strategies.committed_step import CommittedStep
from moe_lightning.strategies.recovery import StateRecovery, Stopwatch, set_up_data
from moe_lightning.strategies.step_data import require_same_data
from moe_lightning.strategies.worlds import ExpertParallelCallback, RecoveryReport, call_hook
from moe_lightning.user_errors import one_line

if TYPE_CHECKING:
    from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_ATTEMPTS = 3  # to build the groups of the first world
_MOST_REPEATS = 3  # of one fault in one step, without a lost rank


def first_world(engine: Membership, build: Callable[[Members], World]) -> World | None:
    """Joined at once with all others; None where a run is under way.

    Where nobody was lost, its groups are built again: a machine with more to do than it has cores may not have
    connected all ranks within `build_timeout_s`.

    Args:
        build: the groups of a membership.
    """
    if engine.world_exists():
        return None
    attempts = 0
    while True:
        attempts += 1
        members = engine.join()
        if engine.withdraw_if_early():
            return None
        try:
            return build(members)
        except Exception as error:
            if attempts == _ATTEMPTS or not is_world_fault(error, engine.reason):
                raise
            engine.abort(reason_of(error, engine.reason))
            destroy_groups()
            if engine.wait_for_cause() is not None:
                raise
            release_frames(error)


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """Choices of a fit that recovers.

    Attributes:
        min_replicas: nodes that shall hold each expert.
        max_recoveries: recoveries from faults after which the run gives up.
        sources: places of saved state; None if nothing is saved.
        protection: returns the ranks that protect each other's snapshots in the present world; None: none do.
    """

    min_replicas: int = 1
    max_recoveries: int = 1000
    sources: RecoverySources | None = None
    protection: Callable[[], ProtectionLayout] | None = None


class RepeatedFaults:
    """Count of recoveries, and of those in a row from one fault."""

    def __init__(self) -> None:
        self._recoveries = 0
        self._last, self._count, self._details = "", 0, ""

    def begin_recovery(self, limit: int, reason: str) -> None:
        """
        Raises:
            ConfigurationError: the run has recovered as often as it may.
        """
        self._recoveries += 1
        if self._recoveries > limit:
            raise ConfigurationError(f"the run has recovered {limit} times, the limit of max_recoveries: {reason}")

    def add(self, fault: BaseException | None, step: int, reason: str | None) -> None:
        """Count a fault in the step after this one, or in a recovery to it. An error that no connection has caused is
        shown: a recovery would hide it.

        Args:
            reason: for which the world is broken.
        """
        if fault is None or isinstance(fault, WorldChanged):
            self._last, self._count = "", 0
            return
        signature = f"{step}; {signature_of(fault)}"
        is_known = signature == self._last
        self._last, self._count = signature, self._count + 1 if is_known else 1
        if not is_known and not is_network_fault(fault):
            logger.warning("taken for a consequence of a broken world (%s)", reason, exc_info=fault)
        self._details = "".join(traceback.format_exception(fault)) if self.is_repeated else ""

    @property
    def is_repeated(self) -> bool:
        """True if the last fault came too often in a row."""
        return self._count >= _MOST_REPEATS

    def check(self, lost_ranks: Sequence[int], step: int, reason: str) -> None:
        """
        Raises:
            PeerFailed: the step after this one failed too often in the same way, and no rank was lost.
        """
        if lost_ranks:
            self._count = 0
        elif self.is_repeated:
            raise PeerFailed(
                f"the step after step {step} failed {_MOST_REPEATS} times in the same way, and no rank was "
                f"lost: {reason}",
                details=self._details,
            )


class Standing(Enum):
    """Standing of a rank: what it has of the run, and so whether it recovers before it trains.

    A process starts with BEGINS, or with NEWCOMER where a run is under way. A later fit keeps what the former one left.

    Attributes:
        BEGINS: initial values. MEMBER once the ranks of the first world agree that no world was lost before it,
            NEWCOMER if one was. After a fault before that MEMBER if the fit resumes a saved step, else NEWCOMER.
        MEMBER: its last committed step; recovers after a fault. SPARE if the mesh has no place for it, once others
            have its state.
        NEWCOMER: nothing. MEMBER after a recovery, SPARE if the mesh has no place for it.
        SPARE: nothing, until the mesh has a place for it. MEMBER after a recovery.
    """

    BEGINS = "begins"
    MEMBER = "member"
    NEWCOMER = "newcomer"
    SPARE = "spare"


class ElasticWorlds:
    """Worlds of this rank: joining them, and the transfer of its state between them.

    Args:
        strategy: of this rank, whose state is transferred.
        engine: membership, monitor and sockets.

    Attributes:
        members: of the world that this process joined last; None before the first.
        step: the last one that was committed, and the way back to it.
        standing: what this rank has of the run.
        change_is_due: the ranks agreed to form another world before the next step.
    """

    def __init__(self, strategy: ExpertParallelStrategy, engine: Membership) -> None:
        self._strategy, self._state, self.engine = strategy, strategy.state, engine
        self.members: Members | None = None
        self._policy = RecoveryPolicy()
        self.step = CommittedStep(strategy.state)
        self._recovery = StateRecovery(strategy, self.step)
        self.standing, self.change_is_due = Standing.BEGINS, False
        self._fits = 0  # that this process has begun
        self._departure: str | None = None
        self._faults = RepeatedFaults()
        self._cause: str | None = None

    # ------------------------------------------------------------------ joining

    def join_first(self, ranks_per_node: int) -> World:
        """Return the first world of this process: joined at once with all others, or, where a run is under way, a place
        to set up in until the fit loop joins it.
        """
        self._strategy.worlds.allow_changes()
        atexit.register(self._close_at_exit)
        AT_FAILURE.append(self.close)
        gc.collect()
        gc.freeze()  # the libraries' objects; a collection in the middle of a recovery need not look at them
        first = first_world(self.engine, self._build)
        if first is not None:
            return first
        self.standing = Standing.NEWCOMER
        task = self.engine.task
        place = min(task.slot, task.expected - 1), task.expected
        nodes = [rank // ranks_per_node for rank in range(task.expected)]
        return World.offline(*place, self._strategy.root_device, self._strategy.worlds.layout(nodes))

    def _join(self, watch: Stopwatch) -> World:
        with watch.phase("rendezvous"):
            members = self.engine.join(is_ready=True, is_spare=self.standing is Standing.SPARE)
        if self.is_newcomer and self.engine.is_late():
            raise RunFinished("the others finished the run before this process joined it")
        self._cause = self.engine.reason or self._cause  # by now a launcher may have said how a rank ended
        with watch.phase("groups"):
            return self._build(members)

    def _build(self, members: Members) -> World:
        world = build_world(
            members.name,
            store=self.engine.store,
            rank=members.rank,
            size=members.size,
            backend=self._strategy.process_group_backend,
            timeout=self._strategy.options.timeout,
            build_timeout_s=self.engine.task.settings.build_timeout_s,
            device=self._strategy.root_device,
            layout=self._strategy.worlds.layout(members.nodes),
            generation=members.number,
            guard=lambda cut: self.engine.guard(members, cut),
        )
        self.members = members
        if world.rank == 0:
            take_over_terminal()
        return world

    @property
    def is_newcomer(self) -> bool:
        """True if this process has nothing of the run: a recovery restores it before it trains."""
        return self.standing in (Standing.NEWCOMER, Standing.SPARE)

    @property
    def node(self) -> str:
        """Name of this rank's node; "" where ranks do not come and go."""
        return self.engine.task.node

    @property
    def is_broken(self) -> bool:
        """True if a rank of the present world is lost."""
        return self.engine.reason is not None

    @property
    def has_rolled_back(self) -> bool:
        """True if the run has gone back to a saved step, and made no other since."""
        return self.step.progress is not None and self.step.progress.went_back

    @property
    def leaves_on_sigterm(self) -> bool:
        """True if SIGTERM asks this rank to leave the others."""
        return self.engine.task.settings.notice_on_sigterm

    def protection(self) -> ProtectionLayout | None:
        """Return the ranks that protect each other's snapshots in the present world; None: none do."""
        return None if self._policy.protection is None else self._policy.protection()

    def request_departure(self, rank: int, reason: str) -> bool:
        """Let a rank leave after the present step, as on a notice; True if enough others are left for that. Called with
        the same rank on every rank.

        Args:
            reason: as one sentence.
        """
        world = self._strategy.worlds.present
        if world.size - 1 < max(1, self.engine.task.settings.min_ranks):
            return False
        if rank == world.rank:
            self._departure = reason
        return True

    def record_call(self, *, is_running: bool) -> None:
        """Record that a call of the Trainer begins or ends: after the training a rank that is silent in one is evicted,
        as in the training; elsewhere it may export.
        """
        self.engine.record_call(is_running=is_running)

    def close(self, error: BaseException | None = None) -> None:
        """Leave for good, when training is over.

        Args:
            error: that ends this process, if one does.
        """
        atexit.unregister(self._close_at_exit)
        with suppress(ValueError):  # never joined, or closed before
            AT_FAILURE.remove(self.close)
        gc.unfreeze()
        failure = None
        if error is not None and self.members is not None and not isinstance(error, Preempted | RunFinished):
            place = f"rank {self.members.rank} on node {self.node}"
            failure = f"{place} failed: {type(error).__name__}: {one_line(error)}"
        self.engine.close(failure)

    def _close_at_exit(self) -> None:
        """Leave where a script ends well: a connection that is lost would break the world of ranks that still save."""
        if not hasattr(sys, "last_value"):
            self.close()

    def _require_members(self) -> Members:
        assert self.members is not None, "join first"
        return self.members

    # ------------------------------------------------------------------ steps

    def prepare(self, update: Callable[[], None]) -> None:
        """Every collective of the step is done: wait until all say so, and agree whether the world changes now.

        Args:
            update: makes the step's update outside of the step, if this rank fails and others have made it.
        """
        self.step.prepare(update)
        self.engine.record_progress()
        is_asked = self.engine.has_newcomers() or (self.engine.notice or self._departure) is not None
        (is_due,) = any_says([is_asked], self._strategy.worlds.present)
        self.change_is_due = is_due and self._state.window_replay is None  # state that crosses is whole

    def repeat_step(self, reason: str) -> None:
        """Repeat the running step, on all ranks.

        Raises:
            WorldChanged: always.
        """
        raise WorldChanged(f"{reason}; the step is repeated")

    def begin_update(self) -> None:
        """Values change from here on."""
        self.step.begin_update()

    def commit(self) -> None:
        """The update is applied, and spread where one rank computes it for others."""
        if self._state.shards.shares_optimizers:
            self._strategy.worlds.present.synchronize()  # the updates of other ranks for this one have arrived
        self.step.commit()
        self.engine.record_progress()

    # ------------------------------------------------------------------ recovering

    def run(self, policy: RecoveryPolicy, fit: Callable[[], None]) -> None:
        """Run the fit loop to its end, through as many worlds as it takes.

        Args:
            policy: of this fit.
            fit: runs the loop in one world.

        Raises:
            Preempted: this process shall leave, or has come to an earlier fit than the others.
            RunFinished: this process comes too late.
            WorldTooSmall: fewer than `min_ranks` are left, and no others came; the state is saved.
        """
        self.engine.listen()  # a SIGTERM would end Lightning's loop on every rank
        self._policy = policy
        self._recovery.begin_fit(policy.sources)
        set_up_data(self._state.trainer)
        self._strategy.checkpoints.begin_training()  # before the step begins that a fault goes back to
        self.step.begin_fit()
        self.change_is_due = False  # one that was agreed in the last step of the fit before
        self._fits += 1
        fault: Exception | None = None
        while True:
            recovers = fault is not None or self.is_newcomer
            if recovers:
                self._recover(fault)
            try:
                if self._train(fit, has_recovered=recovers):
                    return self.engine.finish()
            except Exception as error:
                if not is_world_fault(fault := self._lost_by(error), self.engine.reason):
                    error.add_note(self.step.place)
                    raise
                self.step.keep_batch()
                if self.standing is Standing.BEGINS:  # the next world finds out whether anything is left to restore
                    self.standing = Standing.NEWCOMER if self.step.version == 0 else Standing.MEMBER

    def _train(self, fit: Callable[[], None], *, has_recovered: bool) -> bool:
        """Train in the present world, and return True at the end of the fit; False if a lost world is restored first.
        All ranks of a world make the same calls in this order.
        """
        worlds, loop = self._strategy.worlds, self._state.trainer.fit_loop
        if worlds.spares:
            raise MembersChange(f"ranks wait until they are a multiple of {worlds.axes.num_ranks}")
        if has_recovered:
            self.step.finish(worlds.present, self._strategy.checkpoints.is_deleted)
            if loop.done:  # after the last step: only what ends a run is left to do
                loop.on_run_start()
                loop.on_run_end()
                return True
        elif self.standing is Standing.BEGINS and self._follows_a_lost_world():
            self.standing = Standing.NEWCOMER
            return False
        else:
            self.standing = Standing.MEMBER
            self._require_same_data()
        self._wait_for_ranks()
        leave_schedule(self._state.trainer)
        fit()
        return True

    def _share_stop(self) -> None:
        """Set `trainer.should_stop` on ranks that have joined if it is set on others, where training goes on up to
        `min_steps` and `min_epochs`. Collective.
        """
        trainer = self._state.trainer
        (trainer.should_stop,) = any_says([trainer.should_stop], self._strategy.worlds.present)

    def _lost_by(self, error: Exception) -> Exception:
        """Return the fault that is recovered from: state that no rank has intact is that of a lost rank, if some is
        saved.
        """
        if not isinstance(error, StateDamagedError) or self._policy.sources is None:
            return error
        if error.is_here:
            self.step.begin_overwriting()  # by those of a rank that has them, or of what was saved
        self._recovery.planner.distrust_after(error.last_good, marks=self._strategy.worlds.present.rank == 0)
        return WorldChanged(error.reason)

    def _wait_for_ranks(self) -> None:
        """Wait until others come, where the world holds the state but is too small to train.

        Raises:
            MembersChange: somebody came, or shall leave.
            RunFinished: the others have finished the run, and no mesh fits those that are left.
            WorldTooSmall: on all ranks, nobody came within `join_timeout_s`; the state is saved.
        """
        worlds, settings, loop = self._strategy.worlds, self.engine.task.settings, self._state.trainer.fit_loop
        world, timeout_s = worlds.present, settings.join_timeout_s
        limit = max(settings.min_ranks, worlds.axes.num_ranks)
        if world.size >= limit:
            return
        name = "min_ranks" if limit == settings.min_ranks else "strategy.mesh"
        rank_zero_warn(f"only {world.size} of at least {limit} ranks ({name}) are here: waiting up to {timeout_s:g} s")
        deadline, ends = time.monotonic() + timeout_s, False
        while not ends:
            is_asked = self.engine.has_newcomers() or self.engine.notice is not None
            is_late, changes, ends = any_says([self.engine.is_late(), is_asked, time.monotonic() > deadline], world)
            if is_late and world.size >= worlds.axes.num_ranks:
                return  # to repeat the end of the training, which any number may do
            if is_late:
                raise RunFinished("the others have finished the run, and strategy.mesh needs more ranks than are left")
            if changes:
                raise MembersChange(f"ranks come or leave while there are fewer than {limit}")
            time.sleep(_POLL_S)
        if self.step.version > 0:
            loop.on_run_start()
            loop.on_run_end()
        raise WorldTooSmall(
            f"only {world.size} of at least {limit} ranks ({name}) came together within {timeout_s:g} s: the run ends "
            f"here; start it again with more workers, or lower {name}"
        )

    def _follows_a_lost_world(self) -> bool:
        """True if this first world of its ranks follows one without survivors, whose state can be restored; collective.

        All ranks then abort this world, once all have met: gloo may never wake a rank that waits on connections
        which others have closed.
        """
        world, timeout_s = self._strategy.worlds.present, self._strategy.options.timeout.total_seconds()
        is_later = self._policy.sources is not None and max(all_gather_json(self.engine.task.starts, world)) > 1
        if is_later and world.is_connected:
            store_barrier(self.engine.store, "go back to what was saved", world.size, timeout_s)
        return is_later

    def _require_same_data(self) -> None:
        """Compare the data of ranks that begin together; those that join later compare them with the position that
        they adopt. Collective. Raises as `require_same_data`.
        """
        trainer = self._state.trainer
        loaders = private_torch.tree_leaves([trainer.train_dataloader, trainer.val_dataloaders])
        outlines = all_gather_json([outline_of(loader) for loader in loaders], self._strategy.worlds.present)
        for of_ranks in zip(*outlines, strict=False):
            require_same_data(of_ranks)

    def _hand_over(self, reason: str) -> bool:
        """Transfer the state that only leaving ranks hold to the others, before they leave on notice or because the
        mesh has no place for them. No rank returns, and so aborts the world, while another one still needs it for the
        transfer. Where values of some rank are not those of its step nobody leaves yet: who has them is planned first.
        If all leave, they save: in a world that the mesh fits, so those with a place there stay until then.

        Args:
            reason: why the world changes; who has met all others breaks it up with this.

        Returns:
            True if this rank is spare: others have what it holds.

        Raises:
            Preempted: on the ranks that leave on notice.
        """
        engine, worlds, timeout = self.engine, self._strategy.worlds, self._strategy.options.timeout
        world, notice = worlds.present, engine.notice or self._departure
        found, everyone = all_gather_json([notice, self.step.is_torn], world), range(world.size)
        if not self.step.is_first:  # before that, which is slow, a process has longer to leave a broken world
            engine.record_progress()  # all have met, also those behind a link that was dead
        willing: Sequence[int] = [rank for rank in everyone if found[rank][0] is None]
        if not willing and worlds.spares:
            willing = everyone
        staying = everyone if any(is_torn for _, is_torn in found) else worlds.staying(willing)
        if 0 < len(staying) < world.size and world.is_connected:
            nodes = self._require_members().nodes
            self._state.transfer.hand_over(staying, world, nodes, min_replicas=self._policy.min_replicas)
        elif not staying:
            self._save()
        try:
            store_barrier(engine.store, "hand over", world.size, timeout.total_seconds())
        except (dist.DistError, TimeoutError):  # a faster rank has met all others, and has broken the world up
            if engine.reason != reason:
                raise
        leaves = world.rank not in staying
        if leaves and notice is not None:
            raise Preempted(notice)
        return leaves

    def _save(self) -> None:
        """Let callbacks save what they save at the end of a training, if all ranks have made steps; collective."""
        has_new = self.step.version > 0 and self.step.progress is not None and self._state.window_replay is None
        (lacks,) = any_says([not (has_new and self.step.is_restorable)], self._strategy.worlds.present)
        if not lacks:
            self.step.restore()  # the loop may have fetched the next batch
            self._state.trainer.fit_loop.on_run_end()

    def _recover(self, fault: BaseException | None) -> None:
        began_at, began = time.time(), time.perf_counter()
        self._cause = None
        reason = self._reason(fault)
        self._faults.add(fault, self.step.version, self.engine.reason)
        release_frames(fault)
        before, version = (0 if self.is_newcomer else self._strategy.worlds.present.size), self.step.version
        former = self._require_members().ids if before else ()
        while True:
            if fault is not None and not isinstance(fault, MembersChange):
                self._faults.begin_recovery(self._policy.max_recoveries, reason)
            watch = Stopwatch()
            try:
                if isinstance(fault, WorldChanged) and self._hand_over(reason):
                    self.standing, before = Standing.SPARE, 0
                with watch.phase("leaving"):
                    self._leave(reason)
                plan, repair = self._join_and_transfer(watch)
                break
            except Exception as error:
                if not is_world_fault(error, self.engine.reason):
                    raise
                if not is_network_fault(error):  # else a further rank is lost, perhaps one that had just joined
                    self._faults.add(error, self.step.version, self.engine.reason)
                    if self._faults.is_repeated:
                        raise
                fault, reason = error, self._reason(error)
                release_frames(error)
        seconds = watch.seconds | {"total": time.perf_counter() - began}
        members = self._require_members()
        present = set(members.ids)
        reported = reason if isinstance(fault, WorldChanged) or before == 0 else self._cause or reason
        if reported == MEMBERS_CHANGE:
            reported = members.change_from(former) or reported
        report = RecoveryReport(
            reason=reported,
            step=self.step.version,
            steps_lost=max(0, version - self.step.version) if before else 0,
            lost_ranks=tuple(rank for rank, id in enumerate(former) if id not in present),
            ranks_before=before,
            ranks_after=self._strategy.worlds.present.size,
            restored=plan.describe(),
            stale_experts=len(plan.stale),
            min_replicas=repair.min_replicas,
            began_at=began_at,
            seconds=seconds,
        )
        self.step.batch.record_lost(report.lost_ranks)
        call_hook(self._state.module, ExpertParallelCallback.on_recovered, report)
        self._faults.check(report.lost_ranks, version, reason)

    def _reason(self, fault: BaseException | None) -> str:
        return "this process joins a running world" if self.is_newcomer else reason_of(fault, self.engine.reason)

    def _leave(self, reason: str) -> None:
        """Abort the old world on all ranks, so that nothing waits on its connections."""
        self._departure = None  # it was granted in that world, for its size; who asked asks again
        self.engine.abort(reason)
        self._strategy.leave_world()
        destroy_groups()

    def _join_and_transfer(self, watch: Stopwatch) -> tuple[RecoveryPlan, Repair]:
        """Join the next world and bring every rank to the same committed step."""
        step = self.step
        world = self._join(watch)
        self._require_same_fit(all_gather_json(self._fits, world))
        plan, repair = self._recovery.recover(
            world,
            watch,
            node=self._require_members().nodes[world.rank],
            is_newcomer=self.is_newcomer,
            min_replicas=self._policy.min_replicas,
        )
        with watch.phase("resume"):
            if plan.level == "live" and plan.stale:
                call_hook(self._state.module, ExpertParallelCallback.on_stale_experts, plan.stale)
            step.receive(plan, world)
            self._strategy.enter_world(world)
            self._share_stop()  # before `restore`, which asks it if a validation is due
            step.restore()
        self.standing, self.change_is_due = Standing.MEMBER, False
        return plan, repair

    def _require_same_fit(self, fits: Sequence[int]) -> None:
        """Keep a process that starts a script anew out of a later fit: its Trainer and its data are those of another.

        Args:
            fits: that each rank has begun.

        Raises:
            Preempted: the others are in a later fit than this process.
            WorldAbortedError: others are in an earlier one, and leave this world.
        """
        last, reason = max(fits), "a process has joined that is in an earlier fit of the script"
        if self._fits < last:
            self.engine.abort(reason)
            self.engine.withdraw_if_early()
            raise Preempted("the others are in a later fit of the script, which a process that starts it cannot join")
        if min(fits) < last:
            raise WorldAbortedError(reason)
