"""Private parts of Lightning and torchmetrics that this library uses, and torch's pytree.

Each function says why it is needed, and what public name would replace it. `tests/unit/test_compat.py` has a canary for
each private name.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities import imports, move_data_to_device
from lightning.fabric.utilities.types import _Stateful as StatefulLoader
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichModelSummary, WeightAveraging
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as BatchIndices
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as SubprocessLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _worker_check
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric
from typing_extensions import override

__all__ = ["BatchIndices", "StatefulLoader", "SubprocessLauncher"]
# BatchIndices: identifies the loader of a prediction, which is cut; a public class would do.
# StatefulLoader: loaders whose position Lightning saves; a public protocol would do.
# SubprocessLauncher: Ctrl-C and signals reach the ranks of this class only; a public launcher would do.


def batches_of(indices: BatchIndices) -> object:
    """Return the batch sampler that Lightning has wrapped."""
    return indices._batch_sampler


# ---------------------------------------------------------------------- methods that are replaced

_REPLACED = "_moe_lightning_replaced"


def _replace(owner: Any, name: str, value: Any) -> None:
    """Replace a method of a part of the Trainer until `use_own_methods`, or `_restore` of the part."""
    vars(owner)[name] = value
    vars(owner).setdefault(_REPLACED, set()).add(name)


def _restore(owner: Any) -> None:
    for name in vars(owner).pop(_REPLACED, ()):
        del vars(owner)[name]


def use_own_methods(trainer: pl.Trainer) -> None:
    """Undo what functions of this module have replaced in the parts of a Trainer, its precision plugin among them."""
    fit, connectors = trainer.fit_loop, (trainer._signal_connector, trainer._logger_connector)
    loops = (fit, fit.epoch_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for owner in (*connectors, *loops, trainer.precision_plugin, trainer.profiler):  # type: ignore[attr-defined]
        _restore(owner)


# ---------------------------------------------------------------------- launching


def is_interactive() -> bool:
    """True at a prompt and in notebooks. No public name says so."""
    return imports._IS_INTERACTIVE


class WorkersLauncher(_MultiProcessingLauncher):
    """Launcher that forks or spawns ranks off this process. Lightning's own returns the parameters of one rank only,
    and has no hook for others.
    """

    def begin(self) -> None:
        """Prepare a rank before anything else runs in it."""
        raise NotImplementedError

    def whole_state(self) -> dict[str, Any]:
        """Return the state_dict for the starting process on rank 0, after a fit; collective."""
        raise NotImplementedError

    def fitting(self, trained: dict[str, Any], module: pl.LightningModule) -> dict[str, Any]:
        """Return the part of `whole_state` that fits the module of the starting process."""
        raise NotImplementedError

    def explained(self, error: Exception) -> Exception:
        """Return the exception that a rank raises in the place of an error."""
        raise NotImplementedError

    @override
    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        self.begin()
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
        except Exception as error:
            explained = self.explained(error)
            if explained is error:
                raise
            raise explained from None

    @override
    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        module = trainer.lightning_module
        if trainer.state.fn == TrainerFn.FITTING:
            whole = self.whole_state()
            module.__dict__["state_dict"] = lambda: whole
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            module.__dict__.pop("state_dict", None)

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        path, io = worker_output.weights_path, trainer.strategy.checkpoint_io
        if path is not None:
            io.save_checkpoint(self.fitting(io.load_checkpoint(path), trainer.lightning_module), path)
        super()._recover_results_in_main_process(worker_output, trainer)


# ---------------------------------------------------------------------- a step


@contextmanager
def before_update(precision: Precision, act: Callable[[], object]) -> Generator[None, None, None]:
    """Inside, `act` comes after the hooks and the clipping of an optimizer step and before its update.

    Lightning's last hook, on_before_optimizer_step, comes before clipping, which may talk to other ranks; a hook after
    it would do.
    """
    after_closure = precision._after_closure

    def then_act(model: pl.LightningModule, optimizer: Any) -> None:
        after_closure(model, optimizer)
        act()

    precision._after_closure = then_act  # type: ignore[method-assign]
    try:
        yield
    finally:
        del precision._after_closure


def clip_with(
    precision: Precision, by_norm: Callable[[Optimizer, float], None], by_value: Callable[[Optimizer, float], None]
) -> None:
    """Clip in other ways until `use_own_methods`.

    Stock clipping knows this rank's gradients only, and not those of blocks. Overriding the plugin's method would do
    where Lightning let a strategy choose the class of the plugin.
    """
    _replace(precision, "clip_grad_by_norm", by_norm)
    _replace(precision, "clip_grad_by_value", by_value)


def convert_with(precision: Precision, convert: Callable[[nn.Module], nn.Module]) -> None:
    """Convert modules in another way until `use_own_methods`; see `clip_with`."""
    _replace(precision, "convert_module", convert)


def set_environment(strategy: Any, environment: ClusterEnvironment | None) -> None:
    """Set what says which rank a strategy runs on. Lightning itself does so when a Trainer is made, and no public
    method does.
    """
    strategy.cluster_environment = environment


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Return True if another micro-batch of the same step follows the running one. No public property says it."""
    return trainer.fit_loop._should_accumulate()


def is_step_open(trainer: pl.Trainer) -> bool:
    """True while a batch runs, or waits for further micro-batches of its step. No public property says it."""
    loop = trainer.fit_loop.epoch_loop
    batches: Any = loop.batch_progress
    return batches.current.ready != batches.current.processed or loop._should_accumulate()


def leave_open_step_out(loops: dict[str, Any], micros: int) -> None:
    """Take the batches of a step that has not ended out of the fit loop's state: it then is that of a checkpoint of
    `on_train_batch_end` after the batch before them. What the loop saves after an exception counts them in part, and
    resumes with a step of fewer micro-batches.

    Args:
        micros: micro-batches of the step.
    """
    batches = loops["epoch_loop.batch_progress"]
    current = batches["current"]
    is_running = current["ready"] > current["processed"]
    count = (current["ready"] - is_running) % micros + is_running
    for progress in (batches["total"], current):
        ready = progress["ready"] - count
        progress |= {"ready": ready, "started": ready, "processed": ready, "completed": ready - 1}
    batches["is_last_batch"] = False
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1  # the loop counts that batch again as it restarts
    _leave_validation_out(loops, is_due=False)


def has_left_epoch(trainer: pl.Trainer) -> bool:
    """True after an epoch that `on_train_batch_start` has ended with -1, until the next one begins. No public property
    says it.
    """
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    epochs: Any = trainer.fit_loop.epoch_progress.total
    is_left = batches.is_last_batch and batches.current.started < batches.current.processed
    return bool(is_left and epochs.processed == epochs.ready)


def correct_progress(loops: dict[str, Any]) -> None:
    """Let the fit loop resume from its state at the batch where loaders that have a position resume."""
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    total, current = batches["total"], batches["current"]
    is_counted = epochs["total"]["processed"] == epochs["total"]["ready"]
    if batches["is_last_batch"] and current["started"] < current["processed"]:
        # on_train_batch_start has ended the epoch with -1, and the loop takes that batch for one that failed.
        current |= {"started": current["ready"], "completed": current["ready"]}
    elif is_counted and not batches["is_last_batch"] and any(current.values()):
        # The run was stopped within an epoch, and the loop would take what is left of it for a whole one.
        for count in (epochs["total"], epochs["current"]):
            count["processed"] -= 1
            count["completed"] = count["processed"]
    for name in ("started", "processed", "completed"):  # without those that former epochs lack
        total[name] = total["ready"] - current["ready"] + current[name]
    _leave_validation_out(loops, is_due=True)


def count_batches(trainer: pl.Trainer, done: int, *, is_last: bool | None) -> None:
    """Let the fit loop, restored to within or to the end of an epoch, count the batches of it that are done.

    Args:
        is_last: they are all of the epoch; None: as it was saved.
    """
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    current, ready = batches.current, batches.current.ready
    if not ready:
        return
    if is_last and not batches.is_last_batch:  # the epoch has become shorter; the loop ends it after its last batch
        for progress in (batches.total, current):
            progress.completed = progress.processed - 1
    batches.is_last_batch = batches.is_last_batch if is_last is None else is_last
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + done - ready)


def _leave_validation_out(loops: dict[str, Any], *, is_due: bool) -> None:
    """Take the batches of a validation that failed in one of them out of the fit loop's state. The loop begins at the
    first batch again, but would count them, and end as many before the last.

    Args:
        is_due: the loop resumes with that validation.
    """
    progress = loops["epoch_loop.val_loop.batch_progress"]
    total, current = progress["total"], progress["current"]
    has_failed = current["ready"] > current["completed"]
    done = total["ready"] - (has_failed and is_due)  # one less lets the loop resume with a validation
    total |= {"started": total["ready"], "processed": done, "completed": done}
    progress["current"] = dict.fromkeys(current, 0)


def scheduler_steps(trainer: pl.Trainer) -> list[object]:
    """Return how often each learning rate scheduler has stepped; None for one that is not of torch."""
    return [getattr(config.scheduler, "_step_count", None) for config in trainer.lr_scheduler_configs]


def schedulers_behind(trainer: pl.Trainer, before: Sequence[object]) -> list[int]:
    """Return the indices of schedulers that did not follow the last update, because `lr_scheduler_step` failed.

    Args:
        before: their steps before the update.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.scheduler_progress.current
    if progress.ready == progress.completed:
        return []
    return [
        index
        for index, (config, steps) in enumerate(zip(trainer.lr_scheduler_configs, before, strict=True))
        if config.interval == "step" and not config.reduce_on_plateau and (loop.batch_idx + 1) % config.frequency == 0
        if getattr(config.scheduler, "_step_count", None) == steps
    ]


def step_schedulers(trainer: pl.Trainer, indices: Sequence[int]) -> None:
    """Let schedulers follow an update, as the epoch loop does, which has no public name for it."""
    progress = trainer.fit_loop.epoch_loop.scheduler_progress
    for index in indices:
        progress.increment_ready()
        trainer.lightning_module.lr_scheduler_step(trainer.lr_scheduler_configs[index].scheduler, None)
        progress.increment_completed()


def step_plateaus(trainer: pl.Trainer) -> None:
    """Let schedulers of plateaus that count steps follow the last one, as the epoch loop does, which has no public name
    for it.
    """
    trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)


def steps_of_training(trainer: pl.Trainer) -> int | None:
    """Optimizer steps of the whole training; None if nobody knows: Lightning's own number then is infinite where epochs
    have no limit, and -1 where they have no length.
    """
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 <= steps < float("inf") else None


C = TypeVar("C")


def callback_of(trainer: pl.Trainer, kind: type[C]) -> C | None:
    """Return the first callback of a class; None without one. The Trainer declares no attribute that holds them."""
    return next((c for c in trainer.callbacks if isinstance(c, kind)), None)  # type: ignore[attr-defined]


def logs_now(trainer: pl.Trainer) -> bool:
    """Return True if the values of this step reach the loggers. No public property says it."""
    return trainer._logger_connector.should_update_logs


def logged_step(trainer: pl.Trainer) -> int:
    """Return the number that loggers get with the values of the last step and of a validation after it. It is that of
    the update less one, except in a validation before all micro-batches of a step, under manual optimization, and after
    some resumes. No public property says it.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


# ---------------------------------------------------------------------- the fit loop


def run_fit_by(trainer: pl.Trainer, run: Callable[[Callable[[], None]], None], met: Callable[[], None]) -> None:
    """Let `run(fit)` run the fit loop, as often as it takes, until `use_own_methods`. Lightning has no public loop to
    put in the place of its own.

    Args:
        met: called before every batch, once rank 0 has come there. Lightning's own broadcast hides a lost rank 0.
    """

    def of_rank_zero(words: Sequence[bool]) -> list[bool]:
        told = torch.tensor(words, dtype=torch.int32, device=trainer.strategy.root_device)
        dist.broadcast(told, src=0)
        met()
        requeues, terminates = map(bool, told.tolist())
        if terminates:  # rank 0 must not go while others still receive
            with suppress(Exception):
                dist.barrier()
        return [requeues, terminates]

    loop = trainer.fit_loop
    _replace(loop, "run", partial(run, loop.run))
    _replace(loop.epoch_loop, "_broadcast_sigterm_tensor", partial(act_on_signals, trainer, of_rank_zero))


def leave_evaluation_out(trainer: pl.Trainer) -> bool:
    """Let the evaluation that the Trainer begins return nothing, until `use_own_methods`; True if it begins one."""
    if not (trainer.evaluating or trainer.predicting):
        return False
    evaluation = trainer.test_loop if trainer.testing else trainer.validate_loop
    _replace(trainer.predict_loop if trainer.predicting else evaluation, "run", list)
    return True


# ---------------------------------------------------------------------- signals


@dataclass
class _Noted:
    """In the place of a handler of Lightning's: it notes the signal, on which ranks act together.

    Attributes:
        at_once: what the first signal does here.
        number: of the signal; None: none waits.
    """

    at_once: Callable[[int], None]
    number: int | None = None

    def __call__(self, number: int, frame: Any) -> None:
        if self.number is None:
            self.at_once(number)
        self.number = number


def handle_signals_between_batches(trainer: pl.Trainer, agreed: Callable[[Sequence[bool]], list[bool]] | None) -> None:
    """Let SLURM's requeue signal and SIGTERM act on all ranks together, before the next batch of a fit, until
    `use_own_methods`. Lightning saves and broadcasts inside of the handler, where ranks are at different places
    of a step. No public hook replaces its handlers.

    Args:
        agreed: returns for each word True if it is true on any rank; collective, before every batch. None: SIGTERM ends
            this rank after its batch, as in an evaluation, and `run_fit_by` follows the signals of rank 0.
    """
    connector: Any = trainer._signal_connector

    def terminate(number: int) -> None:
        launcher: Any = trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(number)  # to the ranks that rank 0 has started
        if agreed is None:
            connector.received_sigterm = True

    _replace(connector, "_sigterm_notifier_fn", _Noted(terminate))
    if trainer.state.fn == TrainerFn.FITTING:
        _replace(connector, "_slurm_sigusr_handler_fn", _Noted(lambda number: None))
        if agreed is not None:
            act = partial(act_on_signals, trainer, agreed)
            _replace(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", act)


def act_on_signals(trainer: pl.Trainer, agreed: Callable[[Sequence[bool]], list[bool]], *, ends: bool = False) -> None:
    """Do what the signals ask for that ranks have received since `handle_signals_between_batches`; collective.

    Args:
        agreed: returns for each word what holds for all ranks; collective.
        ends: the fit has ended: there is nothing to requeue.

    Raises:
        SIGTERMException: SIGTERM was received.
    """
    connector: Any = trainer._signal_connector
    requeue, termination = connector._slurm_sigusr_handler_fn, connector._sigterm_notifier_fn
    is_requeued = isinstance(requeue, _Noted) and requeue.number is not None and not is_step_open(trainer)
    requeues, terminates = agreed([is_requeued and not ends, termination.number is not None])
    if requeues:
        number, requeue.number = requeue.number or signal.SIGUSR1, None  # other ranks alone may have received it
        type(connector)._slurm_sigusr_handler_fn(connector, number, None)
    if terminates:
        connector.received_sigterm = True
        raise SIGTERMException


@dataclass
class BatchEnd:
    """End of a batch whose optimizer step is made: `on_train_batch_end` of every callback and of the module, then what
    is logged. `watch_batch_ends` counts the parts as they run.

    Attributes:
        arguments: of the hook: outputs, batch, index.
        done: parts that have ended, in this order.
        has_begun: the next part has begun.
        noted: what the ModelCheckpoint whose hook is the next part decides by, before it has begun.
        logged: values of the step that are logged; None: those that Lightning still has.
    """

    arguments: tuple[Any, Any, int]
    done: int = 0
    has_begun: bool = False
    noted: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, Any] | None = None

    @classmethod
    def after_training_step(cls, trainer: pl.Trainer, batch: Any, output: Any) -> BatchEnd:
        """Return the end of a batch, of which nothing has run, with the outputs that the epoch loop makes of that of
        `training_step`.
        """
        result = ClosureResult.from_training_step_output(output, trainer.accumulate_grad_batches)
        outputs = {} if result.loss is None else result.asdict()
        return cls((outputs, batch, trainer.fit_loop.epoch_loop.batch_idx))

    @staticmethod
    def num_parts(trainer: pl.Trainer) -> int:
        """Callbacks, the module, and the log."""
        return len(trainer.callbacks) + 2  # type: ignore[attr-defined]

    @contextmanager
    def next_part(self, trainer: pl.Trainer) -> Generator[None, None, None]:
        """Note that the next part begins, and that it has ended, unless it raises."""
        self.has_begun, self.noted = True, {}
        owner = next(iter(trainer.callbacks[self.done : self.done + 1]), None)  # type: ignore[attr-defined]
        # One that saves by epochs saves in no batch.
        if isinstance(owner, ModelCheckpoint) and not isinstance(owner, ResumableFrom) and not owner.every_n_epochs:
            self.noted = {**_decision(owner), "_last_time_checked": owner._last_time_checked}
        yield
        self.done, self.has_begun = self.done + 1, False

    def keep_log(self, trainer: pl.Trainer) -> None:
        """Keep what the step has logged, which Lightning drops at the end of an epoch; in `on_train_epoch_end`."""
        assert trainer._results is not None
        self.logged = dict(trainer._results.metrics(on_step=True)["log"])

    def repeat_for_rank_zero(self, trainer: pl.Trainer) -> None:
        """Let this rank, which takes the place of a lost rank 0, do what only that one does: hooks that are decorated
        with rank_zero_only run now, the log in the next `run`.
        """
        callbacks, module = trainer.callbacks, trainer.lightning_module  # type: ignore[attr-defined]
        for index, owner in enumerate([*callbacks, module][: self.done]):
            hook = owner.on_train_batch_end
            if getattr(hook, "__code__", None) is _OF_RANK_ZERO:
                hook(*(() if index == len(callbacks) else (trainer, module)), *self.arguments)
        self.done = min(self.done, len(callbacks) + 1)

    def resolve_failed(self, trainer: pl.Trainer, *, ended: int) -> None:
        """Count the part that has failed as ended, if it has ended on another rank, where so many have. Else forget
        what a ModelCheckpoint has noted of a file that it has not saved.
        """
        if self.has_begun and ended > self.done:
            self.done, self.has_begun = self.done + 1, False
        elif self.has_begun and self.noted:
            _take_back(trainer.callbacks[self.done], self.noted)  # type: ignore[attr-defined]

    def run_log(self, trainer: pl.Trainer) -> None:
        """Log, and leave the hooks out."""
        self.done = self.num_parts(trainer) - 1
        self.run(trainer)

    def run(self, trainer: pl.Trainer) -> None:
        """Do what is left, as the training loop does it."""
        callbacks, module = trainer.callbacks, trainer.lightning_module  # type: ignore[attr-defined]
        while self.done < len(callbacks):
            module._current_fx_name = "on_train_batch_end"
            with self.next_part(trainer):
                callbacks[self.done].on_train_batch_end(trainer, module, *self.arguments)
            module._current_fx_name = None
        if self.done == len(callbacks):
            with self.next_part(trainer):
                call._call_lightning_module_hook(trainer, "on_train_batch_end", *self.arguments)
        if self.done < self.num_parts(trainer):
            connector = trainer._logger_connector
            if self.logged is not None:
                connector.log_metrics(self.logged)
                self.done += 1
                return
            kept, connector._first_loop_iter = connector._first_loop_iter, bool(connector._first_loop_iter)  # of a step
            connector.on_batch_end()
            connector.update_train_step_metrics()
            connector._first_loop_iter = kept
            self.done += 1


_OF_RANK_ZERO = rank_zero_only(lambda: None).__code__  # the wrapper's, which all such functions share


def watch_batch_ends(trainer: pl.Trainer, running: Callable[[], BatchEnd | None]) -> None:
    """Note in a `BatchEnd` which of its parts begin and end, until `use_own_methods`. No public hook comes around
    other hooks, but the profiler does, under a name.

    Args:
        running: returns the end of the batch that runs; None: nothing is noted.
    """
    connector: Any = trainer._logger_connector
    own = trainer.profiler.profile  # type: ignore[attr-defined]

    @contextmanager
    def noted(end: BatchEnd, action_name: str) -> Generator[str, None, None]:
        with end.next_part(trainer), own(action_name):
            yield action_name
        end.has_begun = end.done == end.num_parts(trainer) - 1  # the log, which is no hook, follows at once

    def profile(action_name: str) -> AbstractContextManager[Any]:
        end = running() if action_name.endswith(".on_train_batch_end") else None
        return own(action_name) if end is None else noted(end, action_name)

    def update_train_step_metrics() -> None:
        with nullcontext() if (end := running()) is None else end.next_part(trainer):
            type(connector).update_train_step_metrics(connector)

    _replace(trainer.profiler, "profile", profile)  # type: ignore[attr-defined]
    _replace(connector, "update_train_step_metrics", update_train_step_metrics)


def begin_resumed_epoch(trainer: pl.Trainer) -> None:
    """Count the epoch that begins where a run goes on from the last step of the one before. Lightning counts the end of
    that and not this begin: a checkpoint within any later epoch would be that of an epoch before.
    """
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress
    has_begun = loop.restarted_mid_epoch and epochs.total.processed == epochs.total.ready
    if has_begun and epochs.current.processed != loop.max_epochs:
        epochs.increment_ready()
        epochs.increment_started()


def end_resumed_epochs(trainer: pl.Trainer) -> None:
    """Let the end of an epoch that was resumed be that of any other, until `use_own_methods`: Lightning leaves out
    what schedulers of plateaus do there, also where their metric is there. No public hook comes just before it.
    """
    _replace(trainer.fit_loop, "on_advance_end", partial(_end_epoch_without_restart, trainer.fit_loop))


def _end_epoch_without_restart(loop: Any) -> None:
    is_resumed, loop._restarting = loop._restarting, False  # the loop's own setter keeps True under `max_steps`
    strict = [config for config in loop.trainer.lr_scheduler_configs if is_resumed and config.strict]
    for config in strict:
        config.strict = False  # its metric may be of a validation before the checkpoint, and is in no file
    try:
        type(loop).on_advance_end(loop)
    finally:
        for config in strict:
            config.strict = True


def warn_of_few_workers(trainer: pl.Trainer, loader: DataLoader[Any]) -> None:
    """Emit Lightning's warning on the number of a loader's workers; it checks DataLoaders only."""
    assert trainer.state.stage is not None
    _worker_check(trainer, loader, f"{trainer.state.stage.dataloader_prefix}_dataloader")


def _fetcher(trainer: pl.Trainer) -> Any:
    assert trainer.fit_loop._data_fetcher is not None, "the loop has made its loaders"
    return trainer.fit_loop._data_fetcher


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Return True if a validation follows the last batch, not one that is due by time, for which the clocks of ranks
    differ. No public property says it.
    """
    return not validates_by_time(trainer) and trainer.fit_loop.epoch_loop._should_check_val_fx(_fetcher(trainer))


def agree_on_validations(trainer: pl.Trainer, agreed: Callable[[bool], bool]) -> None:
    """Let the ranks decide together on each validation that is due by time, until `use_own_methods`: Lightning asks the
    clock of each rank. No public hook comes before the decision.

    Args:
        agreed: turns the decisions of the ranks into one; collective, after every batch.
    """
    if validates_by_time(trainer):
        loop = trainer.fit_loop.epoch_loop
        decide = partial(type(loop)._should_check_val_fx, loop)
        _replace(loop, "_should_check_val_fx", lambda data_fetcher: agreed(decide(data_fetcher)))


def validates_by_time(trainer: pl.Trainer) -> bool:
    """True if clocks decide when a validation is due. No public property says it."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


@contextmanager
def validating(trainer: pl.Trainer) -> Generator[None, None, None]:
    """Be in a validation of the fit inside. The epoch loop alone runs one."""
    trainer.validating = True
    yield
    trainer.training = True


def run_validation(trainer: pl.Trainer) -> None:
    """Run a validation from its begin in a loop that was restored to the end of a batch, as the epoch loop does it."""
    loop = trainer.fit_loop.epoch_loop
    batches: Any = loop.batch_progress
    batches.increment_completed()  # so that a run which resumes from a file of the validation ends its epoch
    loop.val_loop.restarting = False
    with validating(trainer):
        loop.val_loop.run()
    for progress in (batches.total, batches.current):  # `finish` or the loop itself, as it restarts, counts it
        progress.completed -= 1
    _continue_averages(trainer)


def abandon_validation(trainer: pl.Trainer) -> None:
    """Leave a validation that failed in the middle, if there is one, which Lightning does at its end only."""
    if trainer.validating:
        trainer.fit_loop.epoch_loop.val_loop._on_evaluation_model_train()
        trainer._logger_connector.reset_results()
        _continue_averages(trainer)
    trainer.training = True


def _continue_averages(trainer: pl.Trainer) -> None:
    """Let the next batch continue the averages of its epoch: after a validation it would begin them."""
    trainer._logger_connector._first_loop_iter = False


def restart_loaders(trainer: pl.Trainer) -> None:
    """Fetch from the training loaders' present positions. The fetcher of a loop has no public name."""
    if trainer.fit_loop._data_fetcher is not None:
        iter(trainer.fit_loop._data_fetcher)


def end_epoch(trainer: pl.Trainer, *, drop_logged: bool) -> None:
    """End an epoch in a loop that was restored to the moment after its last step: Lightning considers it ended. The
    next epoch then begins as in a run without faults.

    Args:
        drop_logged: forget what the epoch's steps logged.
    """
    loop = trainer.fit_loop
    epoch_loop = loop.epoch_loop
    if drop_logged:
        forget_logged(trainer)  # a Metric is the user's own, and goes on in the next epoch
        epoch_loop._results.clear()
    _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]  # see _end_epoch_without_restart
    epoch_loop.batch_progress.increment_completed()
    epoch_loop._skip_next_val = True
    trainer._logger_connector._current_fx = None  # what hooks of an end that failed have logged is reset
    epoch_loop.on_advance_end(_fetcher(trainer))
    loop.on_advance_end()


def evaluate_without_inference_mode(trainer: pl.Trainer) -> None:
    """Let validations inside a fit run under no_grad, as Lightning does for its own FSDP strategy: tensors that are
    gathered in inference mode cannot be trained with. The Trainer's option is read when loops are made only.
    """
    trainer.fit_loop.epoch_loop.val_loop.inference_mode = False


# ---------------------------------------------------------------------- checkpoints


def dump_trainer(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the content of Lightning's checkpoint of this moment; collective. The public name writes files only."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def callback_states(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the state of every callback under its key. Public names write it to checkpoints only."""
    return call._call_callbacks_state_dict(trainer)


def load_callbacks(trainer: pl.Trainer, dump: dict[str, Any], *, is_checkpoint: bool) -> None:
    """Give callbacks the states in a dump, after their hook on_load_checkpoint where it is a checkpoint."""
    if is_checkpoint:
        call._call_callbacks_on_load_checkpoint(trainer, dump)
    call._call_callbacks_load_state_dict(trainer, dump)


def hooks_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what the hooks of the module and of the data module save, in a checkpoint without weights, where the
    module loads any of it. Public names save it with all weights only.
    """
    saved: dict[str, Any] = {}
    is_loaded = is_overridden("on_load_checkpoint", trainer.lightning_module)
    if is_loaded:
        saved |= {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": pl.__version__,  # type: ignore[attr-defined]
            "state_dict": {},
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": callback_states(trainer),
            "optimizer_states": [{} for _ in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None and (state := data.state_dict()):
        saved[type(data).__qualname__] = state
    if is_loaded:
        call._call_lightning_module_hook(trainer, "on_save_checkpoint", saved)
    return saved


def load_hooks(trainer: pl.Trainer, saved: dict[str, Any]) -> None:
    """Let the hooks of the module and of the data module load what they have saved, as a resume does."""
    call._call_lightning_module_hook(trainer, "on_load_checkpoint", saved)
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None and type(data).__qualname__ in saved:
        data.load_state_dict(saved[type(data).__qualname__])


MONITORED = "monitored_values"
"""Key of what `monitored` returns."""

_OF_SAVERS = {"_last_global_step_saved": 0, "_last_checkpoint_saved": "", "_defer_save_until_validation": False}
"""Attributes by which a ModelCheckpoint decides besides its state, and their values in a new process."""

_RANKED = ("best_k_models", "best_model_path", "best_model_score", "current_score", "kth_best_model_path", "kth_value")
"""Attributes of a ModelCheckpoint that rank its files. The file that it overwrites, `last_model_path`, is none."""


def monitored(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the logged values by which callbacks and schedulers decide, and what ModelCheckpoints decide by besides
    their states: in a recovery all ranks need the same. No checkpoint of Lightning's has them, and no public name sets
    them. Values of the running hook are left out, because reading them may reduce them over the ranks.
    """
    metrics = move_data_to_device(trainer._logger_connector._callback_metrics, "cpu")
    savers = {saver.state_key: {name: getattr(saver, name) for name in _OF_SAVERS} for saver in _savers(trainer)}
    return {"metrics": metrics, "savers": savers}


def load_monitored(trainer: pl.Trainer, known: dict[str, Any]) -> None:
    """Restore what `monitored` has returned; an empty dictionary: what a new process has."""
    metrics, savers = known.get("metrics", {}), known.get("savers", {})
    trainer._logger_connector._callback_metrics = move_data_to_device(metrics, trainer.strategy.root_device)
    for saver in _savers(trainer):
        vars(saver).update(savers.get(saver.state_key, _OF_SAVERS))


def decisions(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what the EarlyStopping and ModelCheckpoint callbacks decide by, and whether training stops."""
    of_callbacks = {decider.state_key: _decision(decider) for decider in _deciders(trainer)}
    return {"callbacks": of_callbacks, "should_stop": trainer.should_stop}


def take_back_decisions(trainer: pl.Trainer, known: dict[str, Any]) -> None:
    """Restore what `decisions` has returned here or on another rank. Lightning restores callbacks from checkpoints
    only, and notes the best checkpoint before it is saved.
    """
    trainer.should_stop = known["should_stop"]
    for decider in _deciders(trainer):
        if decider.state_key in known["callbacks"]:  # else it was appended since
            _take_back(decider, known["callbacks"][decider.state_key])


def forget_deleted(
    trainer: pl.Trainer, is_deleted: Callable[[str], bool], share: Callable[[list[str]], list[str]]
) -> None:
    """Let ModelCheckpoints that went back to earlier decisions rank no file that is deleted: they then save again,
    instead of keeping its name as that of the best one. No public method does so.

    Args:
        is_deleted: of a file, as far as this rank knows.
        share: returns the value of rank 0; collective.
    """
    ranked = [saver.best_k_models for saver in _deciders(trainer) if isinstance(saver, ModelCheckpoint)]
    for path in share([path for files in ranked for path in files if is_deleted(path)]):
        for files in ranked:
            files.pop(path, None)


def _decision(decider: EarlyStopping | ModelCheckpoint) -> dict[str, Any]:
    """Return what a callback decides by, without what a subclass has of its own."""
    if isinstance(decider, EarlyStopping):
        return EarlyStopping.state_dict(decider)
    return {name: copy.copy(getattr(decider, name)) for name in (*_OF_SAVERS, *_RANKED)}


def _take_back(decider: EarlyStopping | ModelCheckpoint, known: dict[str, Any]) -> None:
    if isinstance(decider, EarlyStopping):
        EarlyStopping.load_state_dict(decider, known)
    else:
        vars(decider).update({name: copy.copy(value) for name, value in known.items()})


def _deciders(trainer: pl.Trainer) -> list[EarlyStopping | ModelCheckpoint]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [c for c in callbacks if isinstance(c, EarlyStopping | ModelCheckpoint) and not isinstance(c, ResumableFrom)]


def share_folders(trainer: pl.Trainer, share: Callable[[list[Any]], list[Any]]) -> None:
    """Let ModelCheckpoints write to the folders of another rank, as their hook `setup` does, which a rank that joins
    has run alone, and overwrite the same last file: ranks ask each other about every other name. No public method does
    it again.

    Args:
        share: returns the value of that rank; collective.
    """
    savers = _savers(trainer)
    shared = share([[saver.dirpath, saver.last_model_path] for saver in savers])
    for saver, (folder, last) in zip(savers, shared, strict=True):
        saver.dirpath, saver.last_model_path = folder, last


def share_saves(trainer: pl.Trainer, gather: Callable[[list[Any]], list[list[Any]]]) -> None:
    """Let each ModelCheckpoint know the last step that it has saved on any rank, and the file: a fault may end a save
    on some ranks only, and those that did not know would save alone. No public method does so.

    Args:
        gather: returns the values of all ranks; collective.
    """
    savers = _savers(trainer)
    everyones = gather([[saver._last_global_step_saved, saver._last_checkpoint_saved] for saver in savers])
    for saver, saves in zip(savers, zip(*everyones, strict=True), strict=True):
        saver._last_global_step_saved, saver._last_checkpoint_saved = max(saves)


def _savers(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]  # type: ignore[attr-defined]


def wrap(outer: CheckpointIO, inner: CheckpointIO) -> None:
    """Replace the plugin that another one wraps. The setter of Lightning's own wrappers keeps the first one."""
    name = "_checkpoint_io" if hasattr(outer, "_checkpoint_io") else "checkpoint_io"
    setattr(outer, name, inner)


def after_saves(io: CheckpointIO, act: Callable[[], None]) -> None:
    """Act once the files that an AsyncCheckpointIO has in hand are written, and not at all if one has failed; at once
    with other plugins. A public way to wait for the files would do.
    """
    if not isinstance(io, AsyncCheckpointIO) or io._executor is None:
        act()
        return

    def act_in_thread() -> None:
        try:
            if io._error is None:
                act()
        except BaseException as error:  # raised by the next save or at the end, as errors of saves are
            io._error = error

    io._executor.submit(act_in_thread)


def save_as_last(saver: ModelCheckpoint, trainer: pl.Trainer) -> None:
    """Save under the saver's own names, unless it has saved this step. ModelCheckpoint does so in hooks only."""
    if saver._last_global_step_saved != trainer.global_step:
        saver._save_topk_checkpoint(trainer, saver._monitor_candidates(trainer))


# ---------------------------------------------------------------------- averages


def averaging_rule(callback: WeightAveraging) -> tuple[dict[str, Any], bool, Any]:
    """Return the arguments of a callback for AveragedModel, whether it averages buffers, and the device of its copy.
    No public property says it.
    """
    return callback._kwargs, callback._use_buffers, callback._device


def average_by(
    callback: WeightAveraging,
    averages: Any,
    *,
    setup: Callable[..., None],
    should_update: Callable[..., bool],
    swap: Callable[[pl.LightningModule], None],
    load: Callable[..., None],
) -> None:
    """Let a callback work on averages that are not in a copy of the module, until `average_as_usual`. A hook for the
    class of the copy would do.

    Args:
        averages: has the methods `update_parameters` and `state_dict` of AveragedModel.
        setup, should_update, load: in the place of the callback's `setup`, `should_update` and `on_load_checkpoint`.
        swap: exchanges weights and averages. At the end of training the callback does not give them to the module:
            that comes after all callbacks, so that checkpoints of the end have both weights.
    """
    callback._average_model = averages
    _replace(callback, "setup", setup)
    _replace(callback, "should_update", should_update)
    _replace(callback, "on_load_checkpoint", load)
    _replace(callback, "_swap_models", swap)
    _replace(callback, "_copy_average_to_current", lambda module: None)


def average_as_usual(callback: WeightAveraging) -> None:
    """Undo `average_by`."""
    if _REPLACED in vars(callback):
        callback._average_model = None
        _restore(callback)


def averaged_at(callback: WeightAveraging, step: int) -> None:
    """Note the number of steps at the last update of the averages, as the callback's own hook does."""
    callback._latest_update_step = step


class ResumableFrom(ModelCheckpoint):
    """A callback that `ckpt_path="last"` asks for checkpoints: Lightning asks this class only."""

    def last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        """Return the checkpoints to choose from, the same on every rank; collective."""
        raise NotImplementedError

    def before_resuming(self, trainer: pl.Trainer) -> None:
        """Called before a fit looks for the checkpoint that it resumes from; collective."""

    @override
    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        return self.last_checkpoints(trainer)


# ---------------------------------------------------------------------- modules


def keep_samplers(trainer: pl.Trainer) -> None:
    """Leave the samplers to the strategy: `Trainer(use_distributed_sampler=False)`, which a strategy cannot ask for."""
    trainer._accelerator_connector.use_distributed_sampler = False


def trainer_of(module: pl.LightningModule | None) -> pl.Trainer | None:
    """Return the module's Trainer; None without one, where the public property raises."""
    return None if module is None else module._trainer


def was_compiled(module: pl.LightningModule) -> bool:
    """Return True if the Trainer was given torch.compile(module), which it unpacks without a public trace."""
    return module._compiler_ctx is not None


# ---------------------------------------------------------------------- what is logged


def logged_values(trainer: pl.Trainer) -> list[Any]:
    """Return the values that the running loop has logged, each a Metric with `meta`."""
    return list(trainer._results.values()) if trainer._results is not None else []


def logged_so_far(trainer: pl.Trainer) -> Callable[[], None]:
    """Return a function that restores the present values of what training has logged in its epoch; it may be called
    once. Values that are logged for the first time until then are reset. No public name reads or sets them.
    """
    results = trainer.fit_loop.epoch_loop._results
    entries = {key: dict(vars(entry)) for key, entry in results.items()}  # whose values are replaced, not changed
    parts = [part for entry in results.values() if not entry.is_tensor for part in entry.value.modules()]
    metrics = [(part, _copy(part.metric_state), part.update_count) for part in parts if isinstance(part, Metric)]

    def restore() -> None:
        for key, entry in results.items():
            if key in entries:
                vars(entry).update(entries[key])
            else:
                entry.reset()
        for metric, values, updates in metrics:
            set_values(metric, values, updates)

    return restore


def _copy(states: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else list(value) for name, value in states.items()}


def forget_logged(trainer: pl.Trainer) -> None:
    """Reset what training has logged in its epoch, as it is where a run resumes. No public name does so."""
    trainer.fit_loop.epoch_loop._results.reset()


def order_reduced(trainer: pl.Trainer, agree: Callable[[list[str]], list[str]]) -> None:
    """Call `agree` at each end of an epoch with the keys of the values that are reduced over ranks next, until
    `use_own_methods`: those that it returns are reduced in this order, the others stay those of this rank. No public
    hook comes between the last batch and the reductions.
    """
    connector: Any = trainer._logger_connector

    def epoch_end_reached() -> None:
        type(connector).epoch_end_reached(connector)
        results: Any = trainer._results
        found = {key: value for key, value in results.valid_items() if _is_reduced(value)}
        agreed = agree(list(found))
        for key in found.keys() - set(agreed):
            _compute_alone(found[key])
        # First, as hooks at the end of the epoch add others, and everywhere, since former epochs have left an order.
        ordered = {key: results[key] for key in dict.fromkeys([*agreed, *results])}
        results.clear()
        results.update(ordered)

    _replace(connector, "epoch_end_reached", epoch_end_reached)


def _compute_alone(value: Any) -> None:
    """Compute the value of an epoch, which is remembered, without other ranks."""
    switch, name = (value.meta.sync, "should") if value.is_tensor else (value.value, "sync_on_compute")
    setattr(switch, name, False)
    value.compute()
    setattr(switch, name, True)


def _is_reduced(value: Any) -> bool:
    if not value.meta.on_epoch:
        return False
    if not value.is_tensor:  # a Metric reduces itself
        return bool(value.value.sync_on_compute)
    sync = value.meta.sync
    return sync.should and sync.group is None and not sync.rank_zero_only


def initial_values(metric: Metric) -> dict[str, Any]:
    """Return the initial states of a metric; `reset` would set them and more."""
    return metric._defaults


def set_values(metric: Metric, values: dict[str, Any], updates: int) -> None:
    """Give a metric states back, and the number of updates that they hold; torchmetrics counts up only."""
    for name, value in values.items():
        setattr(metric, name, value)
    metric._computed = None
    metric._update_count = updates


def forget_version(logger: CSVLogger) -> None:
    """Let a logger that has not written yet choose its folder when it does: another process has written since it was
    made. A public way to choose again would do.
    """
    if logger._experiment is None:
        logger._version = None


def has_begun(logger: Logger) -> bool:
    """True if a CSV, TensorBoard or W&B logger has opened its experiment: the public property opens it."""
    return logger._experiment is not None  # type: ignore[attr-defined]


def wandb_run(logger: WandbLogger) -> Any:
    """W&B's run; None before it is open. The public property opens it."""
    return logger._experiment


def name_wandb_run(logger: WandbLogger, make: Callable[[Path], str]) -> None:
    """Choose the id of a run that has none, by its folder, just before it begins; WandbLogger takes one when it is made
    only.
    """
    if logger._wandb_init.get("id") is None:
        logger._wandb_init["id"] = logger._id = make(Path(str(logger._save_dir)))


def drop_wandb_option(logger: WandbLogger, name: str) -> None:
    """Leave out an option that W&B warns of, even of its default."""
    logger._wandb_init.pop(name, None)


class SummaryTable(ModelSummary):
    """A summary whose columns a subclass may change; Lightning has no public hook for them."""

    @property
    def module(self) -> pl.LightningModule:
        """Module of the summary."""
        return self._model

    def columns(self, stock: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
        """The columns to show, by those of Lightning's, each with its name."""
        return stock

    @override
    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self.columns(super()._get_summary_data())


class SummaryShown(RichModelSummary):
    """A callback that shows another class of summary; Lightning has no option for it."""

    table: type[SummaryTable]

    @override
    def _summary(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> ModelSummary:
        return self.table(pl_module, max_depth=self._max_depth)
