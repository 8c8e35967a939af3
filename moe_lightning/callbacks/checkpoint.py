"""Partial-experts checkpoints that do not stall training: the callback over `moe_lightning.checkpoint`.

After an optimizer step the state is copied into host memory while the next forward and backward run; a process of its
own writes it to storage and commits it (PEC 3.2; MoC-System 5). Of each layer's E experts a snapshot holds K_snapshot
and storage gets K_persist; the others stay at their last version. The callback says when a checkpoint begins; what it
holds and how it is saved is decided by `CheckpointSession`, and what a restore loses is counted by `LostTokens`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.callbacks.loggers import QuietWandbLogger
from moe_lightning.callbacks.lost_tokens import LostTokens
from moe_lightning.checkpoint.agent_handle import warnings_of
from moe_lightning.checkpoint.arena import fallback_directory
from moe_lightning.checkpoint.contents import SnapshotContents
from moe_lightning.checkpoint.directory import (
    RECORD,
    WorldMark,
    damaged_after,
    headings,
    is_sound,
    newest_of,
    run_of,
)
from moe_lightning.checkpoint.memory import RecoverySources
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.policy import CheckpointSettings, Order
from moe_lightning.checkpoint.schedule import Window
from moe_lightning.checkpoint.session import CheckpointSession, LateCheckpoint, SavingPlace
from moe_lightning.checkpoint.snapshotter import CopyWindows
from moe_lightning.checkpoint.storage import absolute, place_of, shared_place, storage_of
from moe_lightning.checkpoint.storage.interface import URL, exists
from moe_lightning.compat import private_lightning
from moe_lightning.config import Coefficient, PositiveInt, Seconds, validated
from moe_lightning.errors import ConfigurationError, StateDamagedError
from moe_lightning.parallel.context import World, any_says
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy, own_strategy
from moe_lightning.strategies.stages import stages_of
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import ExpertParallelCallback


def log_committed(trainer: pl.Trainer, path: str | None) -> None:
    """Tell W&B's loggers of the newest whole checkpoint, where there is one."""
    for logger in trainer.loggers:
        if isinstance(logger, QuietWandbLogger) and path:
            logger.log_checkpoint(place_of(path))


class StepTimes:
    """Seconds of the last step, of its passes up to the update, and of waits for snapshots.

    A step begins with its first micro-batch; what comes after its update, such as a save or a validation, is no part.

    Attributes:
        step_s, overlap_s: of the step, without waits; of the passes of all its micro-batches, under which copies hide.
        stall_s: that training has waited for snapshots since it was last taken.
    """

    def __init__(self) -> None:
        self.step_s = self.overlap_s = self.stall_s = self._waited_s = 0.0
        self._began: float | None = None
        self._is_in_passes = False

    def begin_batch(self) -> None:
        """A micro-batch begins; the first one begins a step."""
        if self._began is None:
            self._began, self._waited_s, self._is_in_passes = time.perf_counter(), 0.0, True

    def begin_update(self) -> None:
        """The passes have ended; later optimizers of the step change nothing."""
        if self._began is not None and self._is_in_passes:
            self.overlap_s = time.perf_counter() - self._began - self._waited_s
            self._is_in_passes = False

    def wait(self, seconds: float) -> None:
        """Training has waited for a snapshot."""
        self.stall_s += seconds
        self._waited_s += seconds

    def end_step(self) -> None:
        """The step has ended with its update."""
        if self._began is not None:
            self.step_s, self._began = time.perf_counter() - self._began - self._waited_s, None

    def take_stall(self) -> float:
        """Return `stall_s`, and count anew."""
        stall_s, self.stall_s = self.stall_s, 0.0
        return stall_s


class StateGrowth:
    """Detector of optimizer states that the session has no room for, such as those of a backbone that is trained from
    some epoch on.

    Optimizers of torch and of this library make the states of a parameter in its first update. So ranks ask each other
    only while a trained parameter lacks states, and once after a change that all ranks see alike: of parameter groups,
    of the parameters that are trained, of the experts' ranks. Another optimizer may make states in any update, and
    ranks of a pipeline do not see the parameters of other stages: there they ask at every checkpoint.
    """

    def __init__(self) -> None:
        self._known: Collection[str] = ()
        self._seen: object = None
        self._may_grow = True

    def begin(self, state: TrainState) -> None:
        """Take the present states as those of a new session."""
        self._known, self._seen = state.training_state().moment_shapes().keys(), None

    def look_again(self) -> None:
        """Ask at the next checkpoint: experts have moved."""
        self._seen = None

    def found(self, state: TrainState, world: World) -> bool:
        """Return True on every rank if one of them has further states; collective where something can have grown."""
        seen = state.trained()
        if seen == self._seen and not self._may_grow:
            return False
        has_grown = state.training_state().moment_shapes().keys() != self._known
        has_grown, self._may_grow = any_says([has_grown, state.may_make_states()], world)
        self._seen = seen
        return has_grown


def computed_in(strategy: ExpertParallelStrategy) -> torch.dtype | None:
    """Return the dtype experts compute in if it is narrower than their weights'; else None."""
    layers = strategy.experts.layers
    is_less = bool(layers) and strategy.shadow_dtype.itemsize < layers[0].experts.dtype.itemsize
    return strategy.shadow_dtype if is_less else None


@validated
class PartialExpertsCheckpoint(private_lightning.ResumableFrom, ExpertParallelCallback):
    """Saves directories `step-...` under `dirpath`, whole or not at all; resume with `ckpt_path=` such a directory,
    `dirpath` or "last".

    It is a ModelCheckpoint only so that Lightning's `ckpt_path="last"` finds it; that class's saving is not used.

    Args:
        dirpath: directory of the checkpoints of this run, or its URL in a store, such as s3://BUCKET/NAME.
        every_n_steps, k_snapshot, k_persist, order, scopes, keep_last, failures_per_hour, windows, lossless: see
            CheckpointSettings.
        save_on_train_end: save every expert when training ends, so that a resume loses nothing.
        timeout_s: longest wait for the last checkpoint to be written.

    Logs for each snapshot checkpoint/stall_ms, snapshot_ms, snapshot_bytes (of the snapshot before: the time that
    training waited for it, that the copy took, and its size), predicted_bytes, k_snapshot, k_persist, persist_ms,
    persist_bytes, plt; with scheduled windows also copied_{bubble,idle,compute,communication}_bytes and
    copied_in_bubbles, the first one's share. In `trainer.callback_metrics` checkpoint/stall_ms is that of the step.

    Raises:
        ConfigurationError: a value outside its range, another strategy, steps that lossless=True cannot run again, or
            checkpoints of another training under `dirpath`.
    """

    def __init__(
        self,
        dirpath: str,
        *,
        every_n_steps: PositiveInt | Literal["auto"] = 100,
        k_snapshot: PositiveInt | Literal["auto"] | None = None,
        k_persist: PositiveInt | None = None,
        order: Order = "sequential",
        scopes: str | Iterable[str] = "full",
        keep_last: PositiveInt = 2,
        failures_per_hour: Coefficient = 0.0,
        windows: Literal["any", "scheduled"] = "any",
        lossless: bool = False,
        save_on_train_end: bool = True,
        timeout_s: Seconds = 600.0,
    ) -> None:
        self._root = shared_place(dirpath)
        # Of a URL Lightning would ask fsspec, which need not know the scheme.
        super().__init__(dirpath=None if isinstance(self._root, URL) else dirpath, save_top_k=0, save_last=False)
        self._asked = self._settings = CheckpointSettings(
            every_n_steps=every_n_steps,
            k_snapshot=k_snapshot,
            k_persist=k_persist,
            order=order,
            scopes=scopes if isinstance(scopes, str) else tuple(scopes),
            keep_last=keep_last,
            failures_per_hour=failures_per_hour,
            windows=windows,
            lossless=lossless,
        )
        self._save_on_train_end, self._timeout_s = save_on_train_end, timeout_s
        self.session: CheckpointSession | None = None
        self.lost = LostTokens(self._settings)
        self._growth, self._times = StateGrowth(), StepTimes()
        self._is_elastic = self._experts_moved = False
        # The step of the last checkpoint, at which its window began; None: no step has begun in this world yet. Ranks
        # then end the last one, each what it has left of it, so a checkpoint would be begun by some of them only.
        self._saved_at: int | None = None
        self._began_at = 0  # the step of the checkpoint before the session
        self._mark = WorldMark(self._root)

    # ------------------------------------------------------------------ resuming

    @override
    def last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        strategy = trainer.strategy
        if not isinstance(strategy, ExpertParallelStrategy):
            return set()  # `setup` says that it needs another one

        def choose() -> str:
            if trainer.state.fn == "fit":
                self.enter_root(trainer)
            newest = newest_of(self._root)
            return "" if newest is None else str(newest[0] / MANIFEST)

        # Lightning takes the candidate that was written last. Stores know that of files only, and `enter_root` writes
        # to the directory.
        return {*filter(None, [strategy.decide(choose)])}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        own_strategy(trainer, "PartialExpertsCheckpoint", "use ModelCheckpoint")

    @override
    def before_resuming(self, trainer: pl.Trainer) -> None:
        _strategy(trainer).decide(partial(self.enter_root, trainer))  # rank 0 looks for what all load

    def enter_root(self, trainer: pl.Trainer) -> None:
        """Mark the directory on rank 0, so that older worlds commit nothing there: this one resumes from it. A process
        that waits to join a running world marks nothing, nor does a trial (`fast_dev_run`), which saves nothing.
        """
        strategy = _strategy(trainer)
        is_used = exists(storage_of(self._root), self._root / RECORD)
        is_trial = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        if strategy.is_global_zero and not strategy.elastic.is_newcomer and is_used and not is_trial:
            self._mark.leave(strategy.world.generation)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not in a first fit, nor where the world has changed in this one.
        follows_a_fit, self._saved_at = self._saved_at is not None, trainer.global_step
        self._times = StepTimes()
        strategy = _strategy(trainer)
        self._is_elastic = strategy.worlds.is_elastic
        strategy.state.require_one_optimizer_each(beside="PartialExpertsCheckpoint", cure="ModelCheckpoint")
        if self._settings.lossless:
            strategy.state.require_replayable()
        begins = trainer.global_step == 0 and not strategy.elastic.has_rolled_back  # else a fault has destroyed them
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            # The second refuses copies of several runs, before training instead of at its first save.
            look = self._require_no_others if begins else partial(self._warn_of_later, trainer.global_step)
            strategy.decide(look)
        if follows_a_fit and (begins or strategy.state.restored is not None):
            self._settings = self._asked
            self.lost = LostTokens(self._settings)  # those of the fit before are of another state

    def _require_no_others(self) -> None:
        """Refuse checkpoints that this training does not continue from: it would soon delete them, and a recovery
        before its first one would go back to them.

        Raises:
            ConfigurationError: there are some.
        """
        found = headings(self._root)
        if found:
            raise ConfigurationError(
                f"{self._root} has a checkpoint of step {found[0][1].step}, this training begins at step 0, and only "
                f'{self._settings.keep_last} checkpoints are kept: continue with ckpt_path="last" '
                f"(moe-train: resume={self._root}), or choose another dirpath"
            )

    def _warn_of_later(self, step: int) -> None:
        """Warn of a checkpoint that a recovery would go back to, although this training begins before it.

        Raises:
            CheckpointError: there are checkpoints of several runs.
        """
        run_of(self._root)
        damaged = damaged_after(self._root)
        saved = (heading for _, heading in headings(self._root))
        newest = next((each.first_step for each in saved if is_sound(each.session, each.step, damaged)), step)
        if newest > step:
            rank_zero_warn(
                f"{self._root} has a checkpoint of step {newest}, this training continues from step {step}, and until "
                "it has saved one there, a recovery from storage would go back to the other: move that elsewhere"
            )

    @override
    def on_before_experts_move(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finish the copy of the experts' rows. Others may write them from now on."""
        self._wait_for_copy()
        self._experts_moved |= self.session is not None

    @override
    def on_before_weights_swap(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finish the copy of the weights."""
        self._wait_for_copy()

    def _wait_for_copy(self) -> float:
        """Finish the copy of the last snapshot, and return the seconds that training has waited for it."""
        stall_s = self.session.wait_before_update() if self.session is not None else 0.0
        self._times.wait(stall_s)
        return stall_s

    # ------------------------------------------------------------------ another world

    def recovery_sources(self, strategy: ExpertParallelStrategy) -> RecoverySources:
        """Sources of saved state for a recovery."""
        return RecoverySources(
            root=absolute(self._root),
            name=self._run_name,
            node=strategy.elastic.node,
            fallback=fallback_directory(absolute(self._root)),
            report=rank_zero_warn,
            enter=lambda: self.enter_root(strategy.state.trainer),
        )

    @override
    def on_before_recovery(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.session is not None:
            self.session.finish_copy()

    @override
    def on_stale_experts(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, versions: Mapping[tuple[int, int], int]
    ) -> None:
        strategy = _strategy(trainer)
        self.lost.lose(versions, strategy.state.stages, strategy.world)

    @property
    def _run_name(self) -> str:
        return absolute(self._root).parent.name or "run"

    @override
    def on_world_changed(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Other ranks write from now on: the session ends where it is, and the next checkpoint opens another."""
        self._close(wait=False)
        self._settings = self._asked  # ranks that join have measured nothing
        self._experts_moved, self._saved_at = False, None
        self._is_elastic = True  # all may leave, and save, before the loop of a rank that has joined starts
        strategy = _strategy(trainer)
        rolled_back = strategy.elastic.has_rolled_back
        self.lost.enter_world(strategy.state.stages, strategy.world, has_rolled_back=rolled_back)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The ledger where ranks come and go, for those that join; `_objects` leaves it out, since directories have a
        place for it.
        """
        return self.lost.state_dict() if self._is_elastic else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lost.load_state_dict(state_dict)

    @property
    def plt(self) -> float:
        """Proportion of lost tokens so far (MoC eq. 7)."""
        return self.lost.plt

    # ------------------------------------------------------------------ steps

    @property
    def _windows(self) -> CopyWindows | None:
        return self.session.windows if self.session is not None else None

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._times.begin_batch()
        if self._windows is not None:
            self._windows.step.begin_batch()

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._times.begin_update()
        if self._windows is not None:
            self._windows.before_update()
        # Loggers get those of a checkpoint together: they do not see steps that do not log.
        pl_module.log("checkpoint/stall_ms", 1e3 * self._wait_for_copy(), logger=False)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.lost.counts.add(stages_of(trainer))
        is_update = not private_lightning.is_accumulating(trainer)
        if is_update:
            self._times.end_step()
            self.lost.counts.end_step(is_skipped=_strategy(trainer).update.is_skipped)
        if self._windows is not None:
            (self._windows.step.begin if is_update else self._windows.step.end_batch)()
        saved_at = self._saved_at
        if saved_at in (None, trainer.global_step) or not is_update or self._keeps_nothing(trainer):
            return
        if _strategy(trainer).update.is_replaced:
            self._close(wait=False)  # no later checkpoint holds anything of the updates that were taken back
        if self.session is not None:
            self.session.protect()
        if self.session is not None and self.session.in_window and not self._experts_moved:
            self.session.save_more(trainer.global_step)
            self._log(trainer, self.session)
        elif self.session is None or self.session.in_window or trainer.global_step - saved_at >= self._interval():
            self.save(trainer, pl_module)

    def _keeps_nothing(self, trainer: pl.Trainer) -> bool:
        """True if the state is not complete yet after a restore, or Lightning only runs a sanity check."""
        is_replaying = _strategy(trainer).state.window_replay is not None
        return is_replaying or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]

    def _interval(self) -> int:
        """Steps between checkpoints. An automatic interval is chosen once the first checkpoint is committed; until then
        it is the age of the session at the last one, because writing takes longer than that.
        """
        if self._settings.every_n_steps != "auto":
            return self._settings.every_n_steps
        adapted = self.session.adapted if self.session is not None else None
        return adapted.interval_steps if adapted is not None else max(1, (self._saved_at or 0) - self._began_at)

    def save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, full: bool = False) -> None:
        """Begin a checkpoint now, between two steps; every rank must call it."""
        strategy = _strategy(trainer)
        strategy.state.before_reading()
        strategy.update.state_check.before_save(trainer.global_step)
        self.lost.counts.join_stages(strategy.state.stages)
        if self._experts_moved:
            self._experts_moved = False
            self._reassign(strategy)
        if self.session is not None and self._growth.found(strategy.state, strategy.world):
            self._end_session()
        if self.session is None:
            self._open(trainer, strategy)
        self.lost.record()
        self._adapt(trainer, strategy)
        assert self.session is not None
        self.lost.bound_cost(trainer, self.session.contents)
        full = full or (self._settings.every_n_steps == "auto" and self.session.adapted is None)  # for its times
        self.session.save(trainer.global_step, self.lost.checkpoint_ledger, self._objects(strategy), full=full)
        self._saved_at = trainer.global_step
        self._log(trainer, self.session)

    def _log(self, trainer: pl.Trainer, session: CheckpointSession) -> None:
        """Log the last snapshot, the last checkpoint that the agent has committed and the proportion of lost tokens;
        warn of what the agent complains of.
        """
        stall_s = self._times.take_stall()
        metrics: dict[str, float] = {
            "plt": self.plt,
            "k_snapshot": session.contents.k_snapshot,
            "k_persist": session.contents.k_persist,
            "predicted_bytes": session.contents.predicted_bytes,
        }
        report, status = session.last_report, session.status()
        if report is not None:
            metrics |= {
                "stall_ms": 1e3 * stall_s,
                "snapshot_ms": 1e3 * report.copy_s,
                "snapshot_bytes": report.copied_bytes,
            }
            copied = report.copied_by_window
            metrics |= {f"copied_{window.value}_bytes": size for window, size in copied.items()}
            if copied and report.copied_bytes:
                metrics["copied_in_bubbles"] = copied[Window.BUBBLE] / report.copied_bytes
        if status.committed_step is not None:
            metrics |= {"persist_ms": 1e3 * status.persist_s, "persist_bytes": status.persist_bytes}
        for warning in warnings_of(status):
            rank_zero_warn(warning)
        for logger in trainer.loggers:
            logger.log_metrics({f"checkpoint/{name}": value for name, value in metrics.items()}, trainer.global_step)
        log_committed(trainer, status.committed_path)

    def _reassign(self, strategy: ExpertParallelStrategy) -> None:
        """Experts have moved: the session goes on with other writers, or ends where no room was reserved for others."""
        self._growth.look_again()
        if self.session is not None:
            owners = self.session.reassign(strategy.state.training_state())
            if owners is None:
                self._end_session()
            else:
                self.lost.reassign(owners, strategy.world.size)

    def _objects(self, strategy: ExpertParallelStrategy, *, is_first: bool = False) -> dict[str, Any]:
        """Return the saved objects that are not tensors; collective."""
        objects = strategy.checkpoints.training_objects(is_first=is_first)
        objects.get("trainer", {}).get("callbacks", {}).pop(self.state_key, None)
        return objects

    def _open(self, trainer: pl.Trainer, strategy: ExpertParallelStrategy) -> None:
        self._began_at = self._saved_at or 0
        state = strategy.state.training_state()
        restored = strategy.state.restored if self.lost.checkpoint_ledger is None else None
        self.lost.begin(trainer, state, trainer.global_step - (self._saved_at or 0))
        ledger = self.lost.checkpoint_ledger
        contents = SnapshotContents(
            state,
            self._settings,
            computed_in=computed_in(strategy),
            experts_move=private_lightning.callback_of(trainer, LoadBalancer) is not None,
        )
        self.session = CheckpointSession.open(
            contents,
            strategy.world,
            SavingPlace(
                root=self._root,
                name=self._run_name,
                node=strategy.elastic.node,
                leave_mark=partial(self._mark.leave, strategy.world.generation),
            ),
            self._settings,
            objects=self._objects(strategy, is_first=True),
            ledger_bytes=0 if ledger is None else ledger.largest_state_bytes,
            layout=strategy.elastic.protection(),
            is_broken=lambda: strategy.elastic.is_broken,
        )
        self.lost.restore(restored, strategy.world)
        self.lost.choose_k(trainer, contents)
        strategy.checkpoints.release()
        self._growth.begin(strategy.state)

    def _adapt(self, trainer: pl.Trainer, strategy: ExpertParallelStrategy) -> None:
        session = self.session
        assert session is not None
        if not self._settings.adapts:
            return
        if session.adapt(overlap_s=self._times.overlap_s, step_s=self._times.step_s):
            contents, adapted, interval = session.contents, session.adapted, self._interval()
            assert adapted is not None
            self.lost.choose_k(trainer, contents)
            rank_zero_info(
                f"checkpoints from now on: K_snapshot={contents.k_snapshot}, K_persist={contents.k_persist}, every "
                f"{interval} steps; each stalls training for {1e3 * adapted.save_s:.0f} ms"
            )
            if self._settings.lossless and contents.num_experts:  # another session has room for windows of this length
                self._settings = replace(self._settings, every_n_steps=interval, k_snapshot=contents.k_snapshot)
                self._close(wait=False)
                self._open(trainer, strategy)

    # ------------------------------------------------------------------ the end

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A rank that joined an elastic run for the end saves with those that were there.
        if (self.session is None and not self._is_elastic) or self._keeps_nothing(trainer):
            return
        was_partial = self.session is None or self.session.contents.was_partial
        if self._save_on_train_end and (trainer.global_step != self._saved_at or was_partial):
            if self.session is not None:
                self.session.finish_copy()  # a window that ends here is the newest snapshot on all ranks or on none
                if trainer.global_step in (self._saved_at, self.session.newest_step):
                    self._close(wait=False)  # a session saves a step once
            self.save(trainer, pl_module, full=True)
        self._close(wait=True)
        log_committed(trainer, str(self.last_model_path))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave copied state to the agent, which outlives this process and still writes it."""
        last_good = exception.last_good if isinstance(exception, StateDamagedError) else None
        try:
            if last_good is not None and self.session is not None and trainer.is_global_zero:
                self.session.mark_damaged(last_good)
        except OSError as failure:
            exception.add_note(f"checkpoints after step {last_good} cannot be marked as damaged: {failure}")
        try:
            self._close(wait=False, last_good=last_good)
        except RuntimeError as failure:
            exception.add_note(str(failure))

    def _end_session(self) -> None:
        """End the session where another one follows, whose first checkpoint holds everything."""
        try:
            self._close(wait=True)
        except LateCheckpoint as error:
            rank_zero_warn(f"{error}; training goes on, and the next checkpoint holds everything")

    def _close(self, *, wait: bool, last_good: int | None = None) -> None:
        """End the session.

        Args:
            last_good: step after which memory was damaged: no later checkpoint is named as the best one; None: it was
                not.
        """
        session, self.session = self.session, None
        if session is not None:
            status = session.close(timeout_s=self._timeout_s, wait=wait)
            is_sound = last_good is None or (status.committed_step or 0) <= last_good
            self.best_model_path = self.last_model_path = (status.committed_path or "") if is_sound else ""


def _strategy(trainer: pl.Trainer) -> ExpertParallelStrategy:
    return own_strategy(trainer, "PartialExpertsCheckpoint")
