"""The last step that all ranks have committed, and the way back to it.

`FitProgress` is the state of Lightning's loops, schedulers and loaders after a committed step, in memory.
`UnfinishedBatch` keeps the hooks of its batch that a fault has kept from running.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from moe_lightning.checkpoint.files import PlainValues
from moe_lightning.checkpoint.recovery_plan import RecoveryPlan
from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.compat.containers import AS_PLAIN
from moe_lightning.data.loader import StepLoader, follow_schedule
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json, broadcast_object
from moe_lightning.parallel.context import World, any_says
from moe_lightning.strategies.step_data import LOADERS_KEY, loader_states, resume_at_positions
from moe_lightning.strategies.train_state import TrainState

_CALLBACKS, _HOOKS = "callbacks", "hooks"  # the first as in checkpoints of Lightning


@dataclass(frozen=True, kw_only=True)
class FitProgress:
    """State of the fit loop as in a checkpoint of this moment.

    Attributes:
        step: optimizer steps done.
        loops: state_dict of the fit loop and its parts.
        loaders: positions of the training loaders.
        lr_schedulers: their state_dicts.
        lr_schedulers_next: the same as the next batch or epoch begins, after plateaus that count the step or epoch, and
            after a validation; None before.
        rates: learning rates of each optimizer's groups, before these lower them.
        rates_next: the same at the moment of `lr_schedulers_next`.
        precision: state of the precision plugin: the scale of the loss under float16.
        validation_is_due: a validation follows this step, which no recovery has repeated, and the next batch or epoch
            has not begun yet.
        epoch_is_over: the step is the last one of an epoch, or its end has begun, and the next one has not begun yet.
        decisions: `private_lightning.decisions` before that validation, until the next step; None before.
        decisions_at_end: the same before the end of the epoch, until the next step; None before.
        decisions_later: the same before a validation that Lightning itself repeats as it goes on from here, within the
            next step or resumed in its middle; None before.
        is_saved: the loop has not been restored to it since it was read from a checkpoint, so these two and the
            rates are not known.
        went_back: the run has gone back to this step, and made no other since.
        is_adopted: True if this rank, or one that it has finished the step with, has it from another rank or a
            checkpoint, and has made no other since.
    """

    step: int
    loops: dict[str, Any]
    loaders: list[dict[str, Any]]
    lr_schedulers: list[dict[str, Any]]
    lr_schedulers_next: list[dict[str, Any]] | None = None
    rates: list[list[float | Tensor]] = field(default_factory=list)
    rates_next: list[list[float | Tensor]] = field(default_factory=list)
    precision: dict[str, Any] = field(default_factory=dict)
    validation_is_due: bool = False
    epoch_is_over: bool = False
    decisions: dict[str, Any] | None = None
    decisions_at_end: dict[str, Any] | None = None
    decisions_later: dict[str, Any] | None = None
    is_saved: bool = False
    went_back: bool = False
    is_adopted: bool = False

    @property
    def is_in_a_batch(self) -> bool:
        """True in the end of a batch, as after each step, which a validation and the end of the epoch may follow."""
        batches = self.loops["epoch_loop.batch_progress"]["current"]
        return bool(batches["completed"] < batches["processed"])

    @classmethod
    def of(cls, trainer: pl.Trainer, *, after_step: bool) -> FitProgress:
        """Record the progress of a trainer in `on_train_batch_end` after an optimizer step, or in `on_train_start`."""
        loop, schedulers, rates = trainer.fit_loop, _schedulers(trainer), _rates(trainer)
        return cls(
            validation_is_due=after_step and private_lightning.is_validation_due(trainer),
            epoch_is_over=after_step and loop.epoch_loop.batch_progress.is_last_batch,
            step=trainer.global_step,
            loops=copy.deepcopy(loop.state_dict()),
            loaders=loader_states(trainer.train_dataloader),
            lr_schedulers=schedulers,
            lr_schedulers_next=None if after_step else schedulers,
            rates=rates,
            rates_next=[] if after_step else rates,
            precision=trainer.precision_plugin.state_dict(),
        )

    def after_validation(self, trainer: pl.Trainer) -> FitProgress:
        """Return the progress after the same step once the next batch begins."""
        return replace(
            self, validation_is_due=False, lr_schedulers_next=_schedulers(trainer), rates_next=_rates(trainer)
        )

    def after_epoch(self, trainer: pl.Trainer) -> FitProgress:
        """Return the progress after the same step, in `on_train_epoch_start` of the next epoch."""
        return replace(self.after_validation(trainer), epoch_is_over=False, decisions_later=None)

    def dump(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return the progress for another rank, with the live state of the callbacks, and of what hooks of the module
        and the data module save; tensors and plain values.
        """
        live = {
            _CALLBACKS: private_lightning.callback_states(trainer),
            _HOOKS: private_lightning.hooks_state(trainer),
            private_lightning.MONITORED: private_lightning.monitored(trainer),
        }
        plain, _ = PlainValues(AS_PLAIN).convert({**vars(self), **live})
        return dict(plain)

    @classmethod
    def adopt(cls, dump: dict[str, Any], trainer: pl.Trainer, *, with_state: bool) -> FitProgress:
        """Load another rank's progress.

        Args:
            with_state: load the state of callbacks and hooks, too, and what callbacks monitor: this rank has none.
        """
        if with_state:
            private_lightning.load_hooks(trainer, dump[_HOOKS])
            private_lightning.load_callbacks(trainer, dump, is_checkpoint=False)
            private_lightning.load_monitored(trainer, dump[private_lightning.MONITORED])
        return cls(**{each.name: dump[each.name] for each in fields(cls)} | {"is_adopted": with_state})

    @classmethod
    def from_checkpoint(cls, dump: dict[str, Any], trainer: pl.Trainer) -> FitProgress:
        """Load the progress in a checkpoint of Lightning's, with the state of hooks and callbacks, and what callbacks
        monitor.
        """
        private_lightning.load_hooks(trainer, dump)
        private_lightning.load_callbacks(trainer, dump, is_checkpoint=True)
        private_lightning.load_monitored(trainer, dump.get(private_lightning.MONITORED, {}))
        private_lightning.correct_progress(dump["loops"]["fit_loop"])
        return cls(
            step=dump["global_step"],
            loops=dump["loops"]["fit_loop"],
            loaders=dump[LOADERS_KEY],
            lr_schedulers=dump["lr_schedulers"],
            precision=dump.get(type(trainer.precision_plugin).__qualname__, {}),
            is_saved=True,
            went_back=True,
            is_adopted=True,
        )

    def restore(self, trainer: pl.Trainer) -> FitProgress:
        """Restore the fit loop to this progress, where its next run resumes; return the progress with what is due then.

        Raises:
            ConfigurationError: a training loader that has no position to go back to.
        """
        loop = trainer.fit_loop
        private_lightning.abandon_validation(trainer)  # the fault may have come in the middle of one
        loop.load_state_dict(copy.deepcopy(self.loops))
        follow_schedule(trainer)
        ended = None if self.epoch_is_over else self.lr_schedulers_next
        for config, state in zip(trainer.lr_scheduler_configs, ended or self.lr_schedulers, strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(state))
        counts_steps = any(each.reduce_on_plateau and each.interval == "step" for each in trainer.lr_scheduler_configs)
        # Plateaus or a validation may have lowered them since, on some ranks.
        if ended is None and (self.epoch_is_over or self.validation_is_due or counts_steps):
            _restore_rates(trainer, self.rates)
        elif ended is not None and self.decisions_later is not None:  # a validation within the next step may have
            _restore_rates(trainer, self.rates_next)
        if self.precision:
            trainer.precision_plugin.load_state_dict(self.precision)
        loaders = list(private_torch.tree_leaves(trainer.train_dataloader))
        if not all(isinstance(loader, StepLoader) for loader in loaders):
            raise ConfigurationError(
                "in-process recovery needs training loaders that can go back to a step: return a torch DataLoader "
                "over a map-style dataset, or a StepLoader"
            )
        for loader, state in zip(loaders, self.loaders, strict=True):
            loader.load_state_dict(dict(state))
        if self.is_saved and loaders:
            resume_at_positions(loaders, trainer)
        private_lightning.restart_loaders(trainer)
        return self._with_dues(trainer) if self.is_saved else self

    def _with_dues(self, trainer: pl.Trainer) -> FitProgress:
        """Return the progress with what was due when the checkpoint was saved, to which the trainer is restored."""
        if not self.is_in_a_batch:  # saved at the end of training
            return replace(self, is_saved=False)
        is_due = private_lightning.is_validation_due(trainer)
        is_over = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        return replace(self, validation_is_due=is_due, epoch_is_over=is_over, rates=_rates(trainer), is_saved=False)


def _schedulers(trainer: pl.Trainer) -> list[dict[str, Any]]:
    return [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]


def _rates(trainer: pl.Trainer) -> list[list[float | Tensor]]:
    return [[copy.deepcopy(group["lr"]) for group in optimizer.param_groups] for optimizer in trainer.optimizers]


def _restore_rates(trainer: pl.Trainer, saved: list[list[float | Tensor]]) -> None:
    for optimizer, rates in zip(trainer.optimizers, saved, strict=False):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def shared_progress(
    own: FitProgress | None, trainer: pl.Trainer, version: int, world: World, *, is_live: bool
) -> FitProgress:
    """Return the progress at a version, from a rank that has it; collective.

    Args:
        own: progress to which this rank could restore its fit loop.
        is_live: True if this rank's state is valid.
    """
    if is_live and _step_of(own) != version == trainer.global_step:
        # It failed between the update and the end of its step, or before its first one.
        own = FitProgress.of(trainer, after_step=own is not None)
    mine = [-1] * 5
    if is_live and own is not None:
        mine = [own.step, own.validation_is_due, own.epoch_is_over, own.went_back, own.lr_schedulers_next is None]
    everyones = all_gather_json(mine, world)
    steps = [step for step, *_ in everyones]
    if any(step != version for step in steps):
        source = steps.index(version)
        dump = own.dump(trainer) if world.rank == source and own is not None else None
        dump = broadcast_object(dump, source, world)
        if _step_of(own) != version or not is_live:
            own = FitProgress.adopt(dump, trainer, with_state=not is_live)
    assert own is not None
    # What is due on any rank is repeated on those that were ahead of it.
    flags = zip(*(entry[1:] for entry in everyones if entry[0] == version), strict=True)
    validation, epoch, went_back, is_next_unknown = map(any, flags)
    schedulers = None if is_next_unknown else own.lr_schedulers_next
    return replace(
        own,
        validation_is_due=validation,
        epoch_is_over=epoch,
        went_back=went_back,
        lr_schedulers_next=schedulers,
    )


def _step_of(own: FitProgress | None) -> int:
    return own.step if own is not None else -1


class UnfinishedBatch:
    """End of the batch of a committed step that a fault has kept from running: hooks of callbacks, and the log.

    Args:
        state: of this rank.

    Attributes:
        running: end of the batch whose training step came last, as far as it has run.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self.running: private_lightning.BatchEnd | None = None
        self._left: tuple[int, private_lightning.BatchEnd] | None = None  # by the step that it belongs to
        self._ended: tuple[int, private_lightning.BatchEnd] | None = None  # here, perhaps not yet on rank 0
        self._has_lost_rank_zero = False

    def begin(self, batch: Any, output: Any) -> None:
        """Note the batch of a training step, and what that has returned."""
        self.running = private_lightning.BatchEnd.after_training_step(self._state.trainer, batch, output)

    def record_end(self, step: int, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note that the batch of a committed step ends here; rank 0, which logs it, may be lost before."""
        num_parts = private_lightning.BatchEnd.num_parts(self._state.trainer)
        self._ended = step, private_lightning.BatchEnd((outputs, batch, batch_idx), done=num_parts)

    def record_end_of_epoch(self) -> None:
        """Note that Lightning drops the values of the last step now, which rank 0 may not have logged."""
        if self._ended is not None:
            self._ended[1].keep_log(self._state.trainer)

    def record_meeting(self) -> None:
        """Note that all ranks have ended the last batch: they have met in a collective since."""
        self._ended = None

    def record_lost(self, ranks: Sequence[int]) -> None:
        """Note the ranks that a recovery has lost."""
        self._has_lost_rank_zero |= 0 in ranks

    def keep(self, *, is_prepared: bool) -> None:
        """Keep what a fault has left to do of the last step, if that is committed. Where nothing is left here, rank 0
        may not have logged it.

        Args:
            is_prepared: the step is made on other ranks, and this rank makes it as well.
        """
        trainer, left = self._state.trainer, self.running
        is_made = is_prepared or not private_lightning.is_step_open(trainer)
        if left is not None and is_made and left.done < private_lightning.BatchEnd.num_parts(trainer):
            self._left = trainer.global_step + is_prepared, left
        elif self._left is None:  # else a fault in `finish` has left the rest of that
            self._left = self._ended
        self.running = self._ended = None

    def forget(self) -> None:
        """Forget what is left: the run goes on from a saved step, whose batch has ended."""
        self._left = None

    def finish(self, step: int, world: World, *, made_steps: bool, with_newcomers: bool) -> bool:
        """Run what is left, each hook once, and return True if it was run whole; collective.

        A hook that failed is run again, unless it has ended on another rank: then its exchange took place. Where rank 0
        is lost and nobody has met it since, its successor logs the step.

        Args:
            step: that the run goes on from.
            made_steps: this process has committed steps.
            with_newcomers: ranks have joined that have not made the step.
        """
        trainer, (of_step, left) = self._state.trainer, self._left or (-1, None)
        left = left if of_step == step else None
        num_parts = private_lightning.BatchEnd.num_parts(trainer)
        done, has_met = num_parts if left is None else left.done, left is None and made_steps
        reports = all_gather_json([done, has_met, left is not None], world)
        everyones = [done for done, *_ in reports]
        succeeds = self._has_lost_rank_zero and world.rank == 0 and not any(met for _, met, _ in reports)
        runs_whole = left is not None
        if left is not None:  # newcomers have ended no hook
            left.resolve_failed(trainer, ended=max(done for done, met, leaves in reports if met or leaves))
        private_lightning.share_saves(trainer, lambda saves: all_gather_json(saves, world))
        if min(everyones) < num_parts and with_newcomers:
            runs_whole = False
            rank_zero_warn(
                f"on_train_batch_end of step {trainer.global_step} does not run in every callback: a fault came before "
                "it, and a process that has not made the step has joined"
            )
            if succeeds and left is not None:
                left.run_log(trainer)  # its row needs no exchange
        elif left is not None:
            if succeeds:
                left.repeat_for_rank_zero(trainer)
            left.run(trainer)
        self._left, self._has_lost_rank_zero = None, False  # kept where another fault comes before
        return runs_whole


class CommittedStep:
    """The last step that this rank has committed with all others.

    A step makes these calls, in this order; a fault may come after any of them:

        call                 by               effect
        prepare              ElasticWorlds    `prepared` is the update that all ranks are ready for
        begin_update         ElasticWorlds    `is_torn`, where optimizers are sharded: others lack updates of this rank
        commit               ElasticWorlds    neither any more; `version` is the new step, then `trainer.global_step`
        end_batch            FaultRecovery    `progress` and `ended` are of the new step

    A recovery then makes these, to bring all ranks to one step:

        keep_batch           ElasticWorlds    what the fault, or one in `finish` before it, has left of a batch is kept
        apply_prepared       StateRecovery    the update is made, and `version` follows, where other ranks have made it
        forget_prepared      StateRecovery    no `prepared`; an update that has begun leaves `is_torn`
        begin_overwriting    StateRecovery    `is_torn`, where values of this rank are replaced
        end_overwriting      StateRecovery    not `is_torn` any more: all values have arrived
        receive              ElasticWorlds    `version` and `progress` are of the planned step
        restore              ElasticWorlds    `trainer.global_step` and the rest of the fit loop are, too
        finish               ElasticWorlds    what was left or due is done; `ended` follows by `end_batch`

    Two calls come earlier as well: `begin_overwriting` on a rank whose memory was damaged, and `restore` before a save
    at the end of a world.

    Args:
        state: of this rank.

    Attributes:
        version: committed optimizer steps of the live state.
        prepared: makes the update that all ranks are ready for; None: there is none, or it is committed.
        is_torn: values are part of the step and part of the next one, or of another rank's state.
        is_first: this process has committed no step yet.
        ended: the last step whose `on_train_batch_end` has run here; in a recovery `progress` may be ahead of it.
        progress: of the fit loop, after a step or at the start; None before.
        batch: end of the step's batch.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self.version = 0
        self.prepared: Callable[[], None] | None = None
        self.is_torn = False
        self.is_first = True
        self.ended = -1
        self.progress: FitProgress | None = None
        self.batch = UnfinishedBatch(state)
        self._logged: tuple[int, Callable[[], None]] | None = None  # what restores it, by the step before it

    @property
    def place(self) -> str:
        """The place of an error that comes now in words: launchers count the errors of one place."""
        return "in the first step of this process" if self.is_first else f"in the step after step {self.version}"

    @property
    def is_whole(self) -> bool:
        """True if all values are of the step; else other ranks must not take them."""
        return not self.is_torn and self._state.window_replay is None

    @property
    def is_restorable(self) -> bool:
        """True if this rank can restore its fit loop to the step."""
        return self.progress is None or self.version in (self.progress.step, self._state.trainer.global_step)

    # ------------------------------------------------------------------ the next step

    def begin_fit(self) -> None:
        """Begin with what a fit starts from."""
        self.version, self.progress = self._state.trainer.global_step, None
        self.is_torn, self.prepared, self._logged = False, None, None

    def begin_loop(self) -> None:
        """Remember where the fit loop starts; what was restored stays the place to go back to."""
        trainer = self._state.trainer
        if self.progress is None:
            self.progress = FitProgress.of(trainer, after_step=False)
        self.version = self.ended = trainer.global_step

    def prepare(self, update: Callable[[], None]) -> None:
        """Note that this rank is ready for an update, and every other one is, or says why not."""
        self.prepared = update

    def begin_update(self) -> None:
        """Values change from here on: where optimizers are sharded, other ranks lack the updates of this one after a
        fault.
        """
        self.is_torn = self._state.shards.shares_optimizers

    def commit(self) -> None:
        """Count a step whose update is applied, on this rank and where others compute it."""
        self.is_torn, self.is_first, self.prepared = False, False, None
        self.version += 1

    def end_batch(self, outputs: Any, batch: Any, batch_idx: int) -> bool:
        """Remember how far the fit loop is at the end of a batch, and return True if it has made a step."""
        trainer = self._state.trainer
        if trainer.global_step == self.ended:
            return False
        self.progress = FitProgress.of(trainer, after_step=True)
        self.version = self.ended = trainer.global_step
        self.batch.record_end(self.version, outputs, batch, batch_idx)
        return True

    def begin_batch(self) -> None:
        """Note that all hooks of the validation after the last step have ended, and keep what its epoch has logged: the
        batches of the next step may be repeated.
        """
        self._end_validation()
        trainer = self._state.trainer
        if self._logged is None or self._logged[0] != trainer.global_step:
            self._logged = trainer.global_step, private_lightning.logged_so_far(trainer)

    def begin_validation(self) -> None:
        """Keep the decisions of callbacks before a validation that is repeated after a fault. One after a step is due
        from now on at the latest: a callback after FaultRecovery may have asked for it by a stop.
        """
        trainer, progress = self._state.trainer, self.progress
        if progress is None or private_lightning.validates_by_time(trainer):
            return
        if progress.is_in_a_batch and not private_lightning.is_step_open(trainer):
            decisions = progress.decisions or private_lightning.decisions(trainer)
            self.progress = replace(progress, validation_is_due=True, decisions=decisions)
        elif progress.decisions_later is None:
            self.progress = replace(progress, decisions_later=private_lightning.decisions(trainer))

    def end_epoch(self) -> None:
        """Keep the decisions of callbacks, and what the last step has logged, before the end of an epoch. A stop ends
        it at any batch, also within a step.
        """
        self.batch.record_end_of_epoch()
        if self.progress is not None:
            decisions = private_lightning.decisions(self._state.trainer)
            self.progress = replace(self.progress, epoch_is_over=True, decisions_at_end=decisions)

    def begin_epoch(self) -> None:
        """Note that another epoch begins."""
        if self.progress is not None:
            self.progress = self.progress.after_epoch(self._state.trainer)

    def _end_validation(self) -> None:
        progress = self.progress
        if progress is not None and (progress.validation_is_due or progress.lr_schedulers_next is None):
            self.progress = progress.after_validation(self._state.trainer)

    # ------------------------------------------------------------------ recovering

    def keep_batch(self) -> None:
        """Keep what a fault has left to do of the batch."""
        self.batch.keep(is_prepared=self.prepared is not None)

    def apply_prepared(self) -> None:
        """Apply the update that others have applied, unless an earlier plan of this recovery has: snapshots that turn
        out to be damaged make another one, from the same inventories.
        """
        if self.prepared is None:
            return
        self.prepared()
        self.prepared = None
        self.version += 1

    def forget_prepared(self) -> None:
        """Forget an update that the plan does not apply: its gradients go with the experts."""
        self.prepared = None

    def begin_overwriting(self) -> None:
        """Values of other ranks arrive here from now on: a fault leaves a mixture."""
        self.is_torn = True

    def end_overwriting(self) -> None:
        """All values of the step have arrived."""
        self.is_torn = False

    def receive(self, plan: RecoveryPlan, world: World) -> None:
        """Take the version of a plan, and the fit loop's progress there from a rank or the checkpoint that has it;
        collective. Flags of the progress hold until the next step, because the plan of a second fault does not know who
        joined before it.
        """
        self.version, trainer = plan.resumes_at, self._state.trainer
        private_lightning.share_folders(trainer, lambda folders: broadcast_object(folders, 0, world))
        is_live = world.rank in plan.live_ranks
        if plan.level == "live":
            self.progress = shared_progress(self.progress, trainer, plan.version, world, is_live=is_live)
        else:
            saved = self._state.restored
            assert saved is not None
            self.progress = FitProgress.from_checkpoint(saved.read_object("trainer"), trainer)
            private_lightning.forget_logged(trainer)
            self._logged = None
            self.batch.forget()
        trainer.should_stop &= is_live  # else as in a resumed run: checkpoints do not hold it

    def restore(self) -> None:
        """Restore the fit loop to the step; its next run resumes there."""
        assert self.progress is not None, "it was received"
        self.progress = self.progress.restore(self._state.trainer)
        # An end of the epoch that is repeated leaves batches out of which a stop has made no step.
        if self._logged is not None and self._logged[0] == self.progress.step and not self.progress.epoch_is_over:
            self._logged[1]()
        self._logged = None
        self.is_torn, self.prepared = False, None

    def finish(self, world: World, is_deleted: Callable[[str], bool]) -> None:
        """Do what was due after the step that was restored: hooks of its batch that the fault kept from running, a
        validation, and the end of the epoch, or else plateaus that count the step; Lightning itself, restored to this
        state, skips all. Collective.

        All of it is repeated whole if the fault came before the next batch or epoch, because hooks that have ended here
        may have failed on another rank. Callbacks that stop or save by what is monitored go back to their states before
        it: they count no such validation twice, and save what they had only noted. A stop ends the epoch at any batch,
        also one that the validation decides. Each further change of members before the next epoch repeats all once
        more, such as each rank that joins while too few wait there: slow, but nothing is counted twice.

        Values that were logged in the epoch are dropped at its end where some ranks lack them: all reduce them.

        Args:
            is_deleted: of a checkpoint file, as far as this rank knows; callbacks that went back to earlier states, or
                to a saved one, forget it.
        """
        kept, made_steps = self.progress, not self.is_first
        assert kept is not None, "it was restored"
        (some_adopted,) = any_says([kept.is_adopted], world)
        kept = self.progress = replace(kept, is_adopted=some_adopted)  # ranks act on it, also if a fault comes now
        ran = self.batch.finish(self.version, world, made_steps=made_steps, with_newcomers=some_adopted)
        if ran and self.progress is not None:  # what others have still to do follows here, too
            self.progress = replace(
                self.progress, validation_is_due=kept.validation_is_due, epoch_is_over=kept.epoch_is_over
            )
        progress, trainer = self.progress, self._state.trainer
        assert progress is not None, "it was restored"
        decisions = progress.decisions_at_end if progress.epoch_is_over else progress.decisions_later
        if progress.validation_is_due:
            decisions = progress.decisions
        if decisions is not None:
            private_lightning.take_back_decisions(trainer, decisions)
        private_lightning.forget_deleted(trainer, is_deleted, lambda known: broadcast_object(known, 0, world))
        if progress.validation_is_due:
            private_lightning.run_validation(trainer)
        if progress.is_in_a_batch and (progress.epoch_is_over or trainer.fit_loop.done):
            private_lightning.end_epoch(trainer, drop_logged=some_adopted)
            return
        if progress.lr_schedulers_next is None and not some_adopted:  # who has not made the step may lack its metric
            private_lightning.step_plateaus(trainer)
        self._end_validation()
