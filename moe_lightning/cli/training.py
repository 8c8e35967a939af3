"""One rank's run: builds everything from the composed configuration, trains, validates.

* The configuration is recorded in the run directory and in the loggers.
* Sizes of model, samples and processes are compared with the memory, see `capacity`.
* Irrelevant notes of other libraries are filtered by text or logger; our own warnings omit the place in the code.
* Ctrl-C and SIGTERM end training after a step, so that checkpoints are whole and ranks end together.

A run of one rank, and one started by torchrun or srun, calls `train` in the process of moe-train itself.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.callbacks.loggers import QuietWandbLogger
from moe_lightning.callbacks.summary import Summary
from moe_lightning.checkpoint.directory import headings
from moe_lightning.checkpoint.inspect import checkpoint_values
from moe_lightning.checkpoint.storage import place_of
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.cli.capacity import check_image, check_model, check_processes, nodes_of, ranks_of, whole_memory
from moe_lightning.cli.composition import build_object, check_config
from moe_lightning.cli.resume import changes, check_changes, check_start, goes_on
from moe_lightning.cli.run_directory import RunDirectory, checkpoints
from moe_lightning.compat import private_lightning
from moe_lightning.config import TARGET, with_key
from moe_lightning.data.text import TextData
from moe_lightning.elastic.membership import ELASTIC_VARIABLE, ElasticTask
from moe_lightning.elastic.worker import Interrupted
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.hub import model_folder, weights_folder
from moe_lightning.models.gpt import least_gpt_parameters
from moe_lightning.models.gpt_module import GPTModule
from moe_lightning.models.swin import SwinModule, least_swin_parameters
from moe_lightning.parallel.context import STORE_VARIABLE
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy

PACKAGE = Path(__file__).parents[1]

_IRRELEVANT_WARNINGS = (
    r".*does not have many workers.*",  # slices of a memory map need none
    r".*`_get_pg_default_device` will be deprecated.*",
    r".*is smaller than the logging interval.*",  # short runs
    r".*Checkpoint directory .* exists and is not empty.*",  # a resumed run
    r".*Experiment logs directory .* exists and is not empty.*",
    r".*The dirpath has changed from .*",  # a run directory that was moved
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
)


def quiet_libraries() -> None:
    """Silence Lightning's notes of what hardware it looked for and the warnings above; all else stays visible."""
    import lightning.fabric.utilities.warnings  # noqa: F401  # sets a format of its own when it is imported

    warnings.formatwarning = _formatted
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in _IRRELEVANT_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if PACKAGE in Path(filename).parents:
        return f"moe-train: {message}\n"
    return f"{filename}:{lineno}: {message}\n"


_LOGGED = ("run_name", "seed", "ranks", "task", "data", "strategy", "trainer", "callbacks", "elastic")
"""Beside the model and the optimizer, which the module logs."""


class RunRecord(Callback):
    """Records the configuration when training starts: a command that fails before leaves the former one, and no empty
    run in a logger. With `resume_overrides` it is recorded after the first checkpoint of the new settings: those of the
    newest one are compared with the next command's, and training may be killed before there is another. A checkpoint of
    a model that computes something else is refused, also away from its run.

    Args:
        directory: of the run.
        config: as composed.
    """

    def __init__(self, directory: RunDirectory, config: Mapping[str, Any]) -> None:
        self._directory = directory
        self._config = config
        self._former: set[object] | None = None  # checkpoints when training started
        self._is_recorded = False

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """
        Raises:
            ConfigurationError: the checkpoint's model has other options than the module's, see `check_changes`.
        """
        former, given = (each.get("config") for each in (checkpoint.get("hyper_parameters", {}), pl_module.hparams))
        target = (self._config.get("model") or {}).get(TARGET)
        if target is not None and isinstance(former, Mapping) and isinstance(given, Mapping):
            # Tuples may be lists in a checkpoint.
            former, given = json.loads(json.dumps([dict(former), dict(given)], default=str))
            found = changes({"model": former}, {"model": {**given, TARGET: target}})
            is_resumed = trainer.state.fn == TrainerFn.FITTING  # otherwise nothing is trained with the given settings
            is_named = not is_resumed or isinstance(self._config["resume"], str)
            overrides = self._config["resume_overrides"] or not is_resumed
            check_changes(found, overrides=overrides, is_named=is_named)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._former is None:  # a changed world starts again, behind checkpoints of the new settings
            self._former = self._found() if self._config["resume_overrides"] else set()
        self._record(trainer)
        if trainer.is_global_zero:
            self._directory.metrics("train").unlink(missing_ok=True)  # of an earlier training
            data = getattr(trainer, "datamodule", None)
            if isinstance(data, TextData) and data.trained_tokenizer is not None:
                self._directory.keep_tokenizer(data.trained_tokenizer)
        for logger in trainer.loggers:
            logger.log_hyperparams({name: self._config[name] for name in _LOGGED})
            if isinstance(logger, QuietWandbLogger) and trainer.ckpt_path:
                logger.resume_from(Path(trainer.ckpt_path), trainer.global_step)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._record(trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._record(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._record(trainer)

    def _record(self, trainer: pl.Trainer) -> None:
        if self._former is None or self._is_recorded or not trainer.is_global_zero:
            return
        if not self._former or not self._former.issuperset(self._saved(trainer)):
            self._directory.record(self._config)
            self._is_recorded = True

    def _found(self) -> set[object]:
        """Return the checkpoints of the run, those of a directory with their inodes: a new one may have the name of a
        damaged one, which it replaces. A store takes a request or more.
        """
        if (store := store_of_checkpoints(self._config)) is not None:
            return {str(place) for place, _ in headings(store)}
        found: set[object] = set()
        for checkpoint in checkpoints(self._directory.checkpoints):
            with suppress(FileNotFoundError):  # it is deleted at the moment
                found.add((checkpoint.path, checkpoint.path.stat().st_ino))
        return found

    def _saved(self, trainer: pl.Trainer) -> set[object]:
        """Return the same between two steps: of a store the last one that this command has written, without asking
        it.
        """
        is_in_store = store_of_checkpoints(self._config) is not None
        partial = private_lightning.callback_of(trainer, PartialExpertsCheckpoint) if is_in_store else None
        if partial is None:
            return self._found()
        newest = partial.last_model_path if partial.session is None else partial.session.status().committed_path
        return {newest} if newest else set()


class ResumedEarlyStopping(Callback):
    """Leaves a run that EarlyStopping has ended as it is when its command is repeated. Its `patience` is that of the
    command, where EarlyStopping itself has the checkpoint's.

    Args:
        start: `resume` of the command; a path is that of another run, whose end is none of this one.
    """

    def __init__(self, start: bool | str) -> None:
        self._start = start

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Lightning gives callbacks their states afterwards, and trains nothing where `should_stop` is set by then."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            state = checkpoint.get("callbacks", {}).get(callback.state_key)
            if trainer.state.fn != TrainerFn.FITTING or not isinstance(callback, EarlyStopping) or state is None:
                continue
            state["patience"] = callback.patience
            is_final = state.get("stopping_reason") in _REACHED  # Lightning before 2.6 has saved none
            if not is_final and state["wait_count"] < callback.patience:
                continue
            if trainer.ckpt_path == self._start:
                del checkpoint["callbacks"][callback.state_key]
                continue
            trainer.should_stop = True
            cure = "" if is_final else f"raise its patience={callback.patience}, or "
            rank_zero_warn(
                f"EarlyStopping has ended this run after step {checkpoint['global_step']}: to train on, {cure}leave "
                "EarlyStopping out"
            )


_REACHED = {reason.value for reason in EarlyStoppingReason} - {
    EarlyStoppingReason.NOT_STOPPED.value,
    EarlyStoppingReason.PATIENCE_EXHAUSTED.value,  # which another patience may revoke
}


class ResumedWithOverrides(Callback):
    """Gives the optimizer of a resumed run the values of the configuration in place of the checkpoint's: learning
    rate, betas, weight decay, each where the schedule is. Its state stays, and so do values that a scheduler without
    shares of a peak has computed.
    """

    def __init__(self) -> None:
        self._given: list[list[dict[str, Any]]] = []

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The optimizers are new here: Lightning restores their states afterwards."""
        self._given = [
            [{name: group[name] for name in _options(optimizer) & group.keys()} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for scheduler in _without_shares(trainer):
            rank_zero_warn(
                f"resume_overrides=true leaves learning rate, betas and momentum to {type(scheduler).__name__}, which "
                "continues with those of the checkpoint"
            )
        self._apply(trainer)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """A recovery from storage may bring the checkpoint's values back between two steps."""
        self._apply(trainer)

    def _apply(self, trainer: pl.Trainer) -> None:
        scheduled = [getattr(scheduler, "optimizer", None) for scheduler in _without_shares(trainer)]
        for optimizer, given in zip(trainer.optimizers, self._given, strict=True):
            kept = _SCHEDULED if any(optimizer is other for other in scheduled) else ()
            for group, values in zip(optimizer.param_groups, given, strict=False):  # callbacks may have added groups
                group.update({name: value for name, value in values.items() if name not in kept})
        for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs):
            if isinstance(scheduler, LambdaLR):
                groups = scheduler.optimizer.param_groups
                peaks = zip(groups, scheduler.base_lrs, strict=False)
                scheduler.base_lrs = [group.get("initial_lr", peak) for group, peak in peaks]
                for group, peak, share in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=False):
                    group["lr"] = peak * share(scheduler.last_epoch)


_SCHEDULED = ("lr", "initial_lr", "betas", "momentum")
"""Options of a parameter group that schedulers of torch write."""


def _without_shares(trainer: pl.Trainer) -> list[Any]:
    """Return the schedulers whose rate is not a share of a peak at each step."""
    schedulers = (config.scheduler for config in trainer.lr_scheduler_configs)
    return [scheduler for scheduler in schedulers if not isinstance(scheduler, LambdaLR)]


def _options(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the options of a parameter group; its other keys are counters of the training."""
    return {"initial_lr", *inspect.signature(type(optimizer)).parameters} - {"params"}


def check_room(config: Mapping[str, Any], module: pl.LightningModule) -> None:
    """Refuse what cannot be held by the machines that the configuration names.

    Raises:
        ConfigurationError: the key that is too large, or what helps.
    """
    trainer = config["trainer"]
    check_processes(ranks_of(trainer), config["data"].get("num_workers", 0))
    if isinstance(module, GPTModule):
        check_model(module.config, least_gpt_parameters(module.config), whole_memory(trainer, nodes_of(config)))
    elif isinstance(module, SwinModule):  # which the planner does not know
        check_image(module.config.image_size)
        parameters = least_swin_parameters(module.architecture, module.config.num_experts)
        check_model(module.config, parameters, whole_memory(trainer, nodes_of(config)))
    task = ElasticTask.from_environment()
    is_replacement = task is not None and task.starts > 1  # the others' memory is not free, and the run was admitted
    if config["check_memory"] and config["task"] == "train" and not is_replacement:
        from moe_lightning.cli.planning import check_memory

        check_memory(config)


_ONE_REQUEST_S = 0.5


class GracefulStop(Callback):
    """Takes SIGINT and SIGTERM while training runs: the ranks agree at the next logging step to stop, and callbacks
    save what they save at the end of a training, without the validation before it and before the `min_epochs` and
    `min_steps` of the Trainer are reached: a scheduler may not wait. Callbacks that monitor a metric are not asked at
    this end of an epoch, since they would judge the new weights by the last validation. A second SIGINT, half a second
    later at the earliest, ends at once: a scheduler may signal the launcher, which passes it on, as well as its ranks.

    The ranks agree every `log_every_n_steps`, one rank alone after every step: asking in between would cost a
    collective of its own in each step. The limits of a Trainer that was stopped are not restored: it trains no more.

    Attributes:
        stopped_by: the signal that ended the training, with its state saved; None where none did.
    """

    def __init__(self) -> None:
        self.stopped_by: signal.Signals | None = None
        self._asked_by: signal.Signals | None = None
        self._asked_at = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning has set its own handlers before, and sets all back when it ends."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._ask)
            if not _is_notice(trainer):
                signal.signal(signal.SIGTERM, self._ask)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if private_lightning.is_accumulating(trainer):
            return
        interval = trainer.log_every_n_steps if trainer.world_size > 1 else 1  # type: ignore[attr-defined]
        # Batches count, not `global_step`: that of two optimizers may pass over every multiple.
        if (private_lightning.logged_step(trainer) + 1) % max(1, interval) == 0:
            decide = trainer.strategy.reduce_boolean_decision
            if decide(self._asked_by is not None, all=False):
                is_term = decide(self._asked_by == signal.SIGTERM, all=False)
                self.stopped_by = signal.SIGTERM if is_term else signal.SIGINT
                trainer.should_stop, trainer.limit_val_batches = True, 0
                trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
                for callback in trainer.callbacks:  # type: ignore[attr-defined]
                    if isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.monitor is not None:
                        callback.on_train_epoch_end = Callback().on_train_epoch_end  # type: ignore[method-assign]

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Share the signal with ranks that have joined since the others agreed."""
        for received in (signal.SIGTERM, signal.SIGINT):
            if trainer.strategy.reduce_boolean_decision(self.stopped_by == received, all=False):
                self.stopped_by = received

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number != self._asked_by:
            self._asked_by, self._asked_at = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._asked_at > _ONE_REQUEST_S:
            raise KeyboardInterrupt


def _is_notice(trainer: pl.Trainer) -> bool:
    """True if SIGTERM asks a rank of an elastic run to leave the others."""
    return isinstance(trainer.strategy, ExpertParallelStrategy) and trainer.strategy.elastic.leaves_on_sigterm


@dataclass(frozen=True, kw_only=True)
class Run:
    """Objects built from a configuration."""

    trainer: pl.Trainer
    module: pl.LightningModule
    data: pl.LightningDataModule


def train(config: Mapping[str, Any]) -> None:
    """Train and validate as the composed configuration says, in this process.

    Raises:
        ConfigurationError, CheckpointError: a mistake of the user.
        Interrupted: the run was ended by Ctrl-C or SIGTERM.
    """
    quiet_libraries()
    with _sections_named(config):
        _train(build(config), config)


def _train(run: Run, config: Mapping[str, Any]) -> None:
    failure: Exception | None = None
    try:
        checkpoint = agreed_checkpoint(run, config)
        if config["task"] == "train":
            run.trainer.fit(run.module, datamodule=run.data, ckpt_path=checkpoint)
            for callback in run.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, GracefulStop) and callback.stopped_by is not None:
                    raise Interrupted(callback.stopped_by)
            if isinstance(run.trainer.strategy, ExpertParallelStrategy):
                run.trainer.strategy.elastic.record_call(is_running=True)  # what follows is collective, too
            trained = _logged(run)
            if not config["doctor"]:
                measure(run)
        else:
            trained = {}
            run.trainer.validate(run.module, datamodule=run.data, ckpt_path=checkpoint, verbose=False)
        metrics = trained | _logged(run)
        if run.trainer.is_global_zero:
            RunDirectory(Path(config["run_dir"])).write_metrics(config["task"], metrics)
    except SystemExit:  # Lightning's answer to signals, with a code of its own
        if run.trainer.received_sigterm or run.trainer.interrupted:
            raise Interrupted(signal.SIGTERM if run.trainer.received_sigterm else signal.SIGINT) from None
        raise
    except Exception as error:
        failure = error
        raise
    finally:
        if isinstance(run.trainer.strategy, ExpertParallelStrategy):
            run.trainer.strategy.elastic.close(failure)
        failure = None  # its traceback holds this frame, and so the model


@contextmanager
def _sections_named(config: Mapping[str, Any]) -> Iterator[None]:
    """Name arguments of the data and of the model by the keys that a user types; a script gives them bare."""
    try:
        yield
    except ConfigurationError as error:
        for key, node in (("data", config["data"]), ("model", config["module"].get("config"))):
            message = with_key(str(error), node if isinstance(node, Mapping) else (), key)
            if message != str(error):
                raise ConfigurationError(message) from error
        raise


def _logged(run: Run) -> dict[str, float]:
    """The last value of every metric that was logged; may be collective."""
    return {name: float(value) for name, value in run.trainer.callback_metrics.items()}


def measure(run: Run) -> None:
    """Validate the trained model, unless its last step has just been validated, and sum the run up; collective."""
    summaries = [callback for callback in run.trainer.callbacks if isinstance(callback, Summary)]  # type: ignore[attr-defined]
    is_current = bool(summaries) and all(summary.is_current(run.trainer) for summary in summaries)
    if not run.trainer.strategy.reduce_boolean_decision(is_current, all=True):
        run.trainer.validate(run.module, datamodule=run.data, verbose=False)
        return
    for summary in summaries:
        summary.report(run.trainer)


def build(config: Mapping[str, Any]) -> Run:
    """Build what the configuration describes, after checking every name and type in it.

    Raises:
        ConfigurationError: one sentence about the first thing that is wrong.
    """
    config, parts = _parts(config)
    trainer = build_object(
        config["trainer"],
        "trainer",
        strategy=parts["strategy"],
        callbacks=[*parts["callbacks"], *_records(config)],
        logger=parts["logger"] or False,
        plugins=_environment_plugins(),
    )
    _expect(trainer, pl.Trainer, "trainer")
    return Run(trainer=trainer, module=parts["module"], data=parts["data"])


def check(config: Mapping[str, Any]) -> None:
    """Build all but the trainer, and throw it away; each rank compares its memory itself.

    Raises:
        ConfigurationError: one sentence about the first thing that is wrong.
    """
    with _sections_named(config):
        _parts({**config, "check_memory": False})  # which would leave a context of this process on a GPU


def _parts(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The configuration with the data's sizes, and the objects of its groups."""
    check_config(config)
    pl.seed_everything(config["seed"], verbose=False)
    _check_pretrained(config)
    _check_context(config)
    parts: dict[str, Any] = {"data": build_object(config["data"], "data")}
    _expect(parts["data"], pl.LightningDataModule, "data")
    _restore_tokenizer(config, parts["data"])
    config = with_sizes_of_data(config, parts["data"])
    for name, kind in (("module", pl.LightningModule), ("strategy", Strategy)):
        parts[name] = build_object(config[name], name)
        _expect(parts[name], kind, name)
    check_room(config, parts["module"])
    parts["callbacks"] = _built_group({"callbacks": with_one_checkpoint(config["callbacks"])}, "callbacks")
    # Measuring a checkpoint is no step of the run whose curves these are.
    parts["logger"] = _built_group(config, "logger") if config["task"] == "train" else []
    return config, parts


def _check_pretrained(config: Mapping[str, Any]) -> None:
    """Refuse a wrong `model.pretrained` before its tokenizer, which the data ask for, is missed.

    Raises:
        ConfigurationError: it is not a folder of a checkpoint, or of a model that is not known.
    """
    model = config["module"].get("config")
    if isinstance(model, Mapping) and isinstance(model.get("pretrained"), str):
        from moe_lightning.models.huggingface.loading import check_folder
        from moe_lightning.models.huggingface.module import HuggingFaceConfig

        check_folder(model_folder(model["pretrained"]))
        if str(model.get("_target_")).endswith(f".{HuggingFaceConfig.__name__}"):
            build_object(model, "module.config").architecture()


def fetch_pretrained(config: Mapping[str, Any], name: str) -> None:
    """Download the weights of a model on the Hub, before the ranks of this machine ask for them at the same time.

    Args:
        config: of the run.
        name: of the model.

    Raises:
        ConfigurationError: the model is not known here, or cannot be downloaded.
    """
    with _sections_named(config):
        _check_pretrained(config)
        weights_folder(name)


def _check_context(config: Mapping[str, Any]) -> None:
    """Refuse samples that the model cannot take before any are made.

    Raises:
        ConfigurationError: they are longer than its context.
    """
    model = config["module"].get("config")
    wanted, most = config["data"].get("context_length"), isinstance(model, Mapping) and model.get("context_length")
    if type(wanted) is int and type(most) is int and wanted > most:
        raise ConfigurationError(
            f"data.context_length={wanted} is more than model.context_length={most}: give model.context_length alone, "
            "which sets both"
        )


def _restore_tokenizer(config: Mapping[str, Any], data: object) -> None:
    """Give the data the tokenizer that was trained for the checkpoint which the command goes on from, before tokens are
    made; whether that checkpoint is whole is decided later, by all ranks.
    """
    if not isinstance(data, TextData) or not data.trains_tokenizer:
        return
    if config["resume"] is False and not goes_on(config):
        return
    place = place_of(config["resume"]) if isinstance(config["resume"], str) else store_of_checkpoints(config)
    if place is None:
        newest = RunDirectory(Path(config["run_dir"])).newest_checkpoint()
        place = None if newest is None else newest.path
    if place is not None:
        with suppress(CheckpointError, OSError):
            data.load_state_dict(checkpoint_values(place).get(type(data).__qualname__, {}))


def _expect(built: object, kind: type, key: str) -> None:
    if not isinstance(built, kind):
        raise ConfigurationError(
            f"{key}._target_ makes a {type(built).__name__}, not a {kind.__name__}: name a class of that kind"
        )


def _records(config: Mapping[str, Any]) -> list[pl.Callback]:
    """Callbacks that every run has."""
    records: list[pl.Callback] = [RunRecord(RunDirectory(Path(config["run_dir"])), config), GracefulStop()]
    records.append(ResumedEarlyStopping(config["resume"]))
    return [*records, ResumedWithOverrides()] if config["resume_overrides"] else records


def with_one_checkpoint(callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """Callbacks that write one kind of checkpoints into a folder, or partial ones into a store: of several choices, as
    in callbacks=[partial_experts,routing_recorder], a later one brings back the full ones that partial ones replace.
    """
    full, partial = callbacks.get("checkpoint"), callbacks.get("partial_experts_checkpoint")
    is_elsewhere = store_of_checkpoints({"callbacks": callbacks}) is not None
    if full and partial and (is_elsewhere or full.get("dirpath") == partial.get("dirpath")):
        return {**callbacks, "checkpoint": None}
    return dict(callbacks)


def store_of_checkpoints(config: Mapping[str, Any]) -> Place | None:
    """Return the object store of partial checkpoints; None if they go into a folder, or there are none."""
    partial = config["callbacks"].get("partial_experts_checkpoint") or {}
    place = place_of(str(partial.get("dirpath") or "."))
    return None if isinstance(place, Path) else place


def _built_group(config: Mapping[str, Any], group: str) -> list[Any]:
    """The objects of a group whose entries have names; null leaves one out."""
    built = {f"{group}.{name}": build_object(node, f"{group}.{name}") for name, node in config[group].items() if node}
    for key, thing in built.items():
        _expect(thing, Callback if group == "callbacks" else Logger, key)
    return list(built.values())


def agreed_checkpoint(run: Run, config: Mapping[str, Any]) -> str | None:
    """The checkpoint that all ranks continue from, or None: rank 0 looks, once older worlds cannot commit;
    collective."""
    strategy = run.trainer.strategy
    if not isinstance(strategy, ExpertParallelStrategy):
        return checkpoint_to_load(config)

    def choose() -> str | None:
        for callback in run.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PartialExpertsCheckpoint) and config["task"] == "train" and goes_on(config):
                callback.enter_root(run.trainer)
        return checkpoint_to_load(config)

    return strategy.decide(choose)


def checkpoint_to_load(config: Mapping[str, Any]) -> str | None:
    """The checkpoint that the run goes on from, or None.

    Raises:
        ConfigurationError: `resume` names a file that is not there, or there is nothing to validate.
        CheckpointError: there are files, and all are damaged.
    """
    named = config["resume"] if isinstance(config["resume"], str) else None
    directory = RunDirectory(Path(config["run_dir"]))
    wanted = goes_on(config) or (config["task"] == "validate" and named is None)
    store = store_of_checkpoints(config)
    if wanted and store is not None and headings(store):
        return str(store)
    newest = directory.newest_intact(rank_zero_warn) if wanted else None
    if newest is None and named is not None:
        check_start(named)
        return named
    if newest is None and config["task"] == "validate":
        raise ConfigurationError(
            f"{store or directory.checkpoints} holds no checkpoint to validate: train first, or give resume=CHECKPOINT"
        )
    if newest is None:
        return None
    # Of directories the loader itself takes the newest whole one, and says which damaged one it passed over.
    return str(directory.checkpoints if newest.path.is_dir() else newest.path)


_MOST_SPARE = 4
"""A model may know so many times the tokens or classes of the data before it is told."""


def with_sizes_of_data(config: Mapping[str, Any], data: Any) -> dict[str, Any]:
    """The configuration with `vocab_size: auto` and `num_classes: auto` of the model replaced by the data's.

    Raises:
        ConfigurationError: the model has fewer tokens or classes than the data, or asks for what the data have not.
    """
    model = config["module"].get("config")
    if not isinstance(model, Mapping):
        return dict(config)
    sizes = {}
    for name, things in (("vocab_size", "tokens"), ("num_classes", "classes")):
        wanted, needed = model.get(name), getattr(data, name, None) if name in model else None
        if wanted == "auto" and needed is None:
            raise ConfigurationError(
                f"model.{name}=auto asks {type(data).__name__} for its {things}, but it has none: choose data that fit "
                "the model, as data=images for images"
            )
        if needed is not None and wanted != "auto" and wanted < needed:
            raise ConfigurationError(
                f"model.{name}={wanted} is below the {needed} {things} of the data: use model.{name}=auto"
            )
        if needed is not None and wanted != "auto" and wanted > _MOST_SPARE * needed:
            rank_zero_warn(
                f"model.{name}={wanted} is {wanted / needed:.0f} times the {needed} {things} of the data, so most "
                f"of the softmax is computed for nothing: use model.{name}=auto, or data that have as many"
            )
        if needed is not None:
            sizes[name] = needed if wanted == "auto" else wanted
    return {**config, "module": {**config["module"], "config": {**model, **sizes}}}


def _environment_plugins() -> list[Any]:
    """Ranks started by our launcher are described by plain variables; torchrun and SLURM are found by Lightning
    itself. It takes a process in an allocation of several tasks for one of them, although only srun starts those.
    """
    is_ours = bool({STORE_VARIABLE, ELASTIC_VARIABLE} & os.environ.keys())
    is_no_task = int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_NUM_TASKS" not in os.environ
    return [LightningEnvironment()] if is_ours or is_no_task else []
