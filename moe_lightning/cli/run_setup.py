"""Preparation of a worker's run: record, memory check, quiet libraries, interruption.

* The configuration is recorded in the run directory and in the loggers.
* Sizes of model, samples and processes are compared with the memory, see `room`.
* Irrelevant notes of other libraries are filtered by text or logger; our own warnings omit the place in the code.
* Ctrl-C and SIGTERM end training after a step, so that checkpoints are whole and ranks end together.
"""

from __future__ import annotations

import inspect
import logging
import math
import signal
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from moe_lightning.callbacks.loggers import QuietWandbLogger
from moe_lightning.cli.capacity import check_model, check_processes, check_sample, machine_memory, whole_memory
from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.compat import private_lightning
from moe_lightning.data.text import TextData
from moe_lightning.models.gpt import GPTConfig, least_gpt_parameters, least_slot_parameters
from moe_lightning.models.gpt_module import GPTModule
from moe_lightning.models.swin import SwinConfig, SwinModule

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
    run in a logger.

    Args:
        directory: of the run.
        config: as composed.
    """

    def __init__(self, directory: RunDirectory, config: Mapping[str, Any]) -> None:
        self._directory = directory
        self._config = config

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self._directory.record(self._config)
            self._directory.metrics.unlink(missing_ok=True)  # of an earlier training
            data = getattr(trainer, "datamodule", None)
            if isinstance(data, TextData) and data.trained_tokenizer is not None:
                self._directory.keep_tokenizer(data.trained_tokenizer)
        for logger in trainer.loggers:
            logger.log_hyperparams({name: self._config[name] for name in _LOGGED})
            if isinstance(logger, QuietWandbLogger) and trainer.ckpt_path:
                logger.resume_from(Path(trainer.ckpt_path), trainer.global_step)


class ResumedWithOverrides(Callback):
    """Gives the optimizer of a resumed run the values of the configuration in place of the checkpoint's: learning
    rate, betas, weight decay, each where the schedule is. Its state stays.
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
        self._apply(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A recovery from storage may bring the checkpoint's values back between two steps."""
        self._apply(trainer)

    def _apply(self, trainer: pl.Trainer) -> None:
        for optimizer, given in zip(trainer.optimizers, self._given, strict=True):
            for group, values in zip(optimizer.param_groups, given, strict=True):
                group.update(values, lr=values.get("initial_lr", values["lr"]))
        for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs):
            if isinstance(scheduler, LambdaLR):
                groups = scheduler.optimizer.param_groups
                scheduler.base_lrs = [group["lr"] for group in groups]
                for group, share in zip(groups, scheduler.lr_lambdas, strict=True):
                    group["lr"] *= share(scheduler.last_epoch)


def _options(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the options of a parameter group; its other keys are counters of the training."""
    return {"initial_lr", *inspect.signature(type(optimizer)).parameters} - {"params"}


_GPT_SIZES = (
    "vocab_size", "context_length", "num_layers", "num_heads", "d_model", "d_hidden", "num_experts", "d_expert",
    "num_shared_experts",
)  # fmt: skip
_SWIN_SIZES = ("num_classes", "image_size", "embed_dim", "num_experts", "mlp_ratio", "patch_size", "window_size")


def check_room(config: Mapping[str, Any], module: pl.LightningModule) -> None:
    """Refuse what cannot be held by the machines that the configuration names.

    Raises:
        ConfigurationError: the key that is too large, and how large it may be.
    """
    trainer, data = config["trainer"], config["data"]
    devices = trainer["devices"] if isinstance(trainer["devices"], int) else len(trainer["devices"])
    nodes = trainer.get("num_nodes", 1) * config["elastic"].get("num_nodes", 1)
    memory = whole_memory(trainer, nodes)
    check_processes(devices, data.get("num_workers", 0))
    if isinstance(module, GPTModule):
        optimizer = module.optimizer_config.name
        _check_gpt(module.config, memory, config["strategy"].get("slots"), devices * nodes, optimizer)
    elif isinstance(module, SwinModule):
        _check_swin(module.config, memory, module.optimizer_config.name)
    for name in ("num_shapes", "global_batch_size"):
        if name in data:
            check_sample(f"data.{name}", data[name], data[name], machine_memory())


def _check_gpt(config: GPTConfig, memory_bytes: int, slots: int | None, ranks: int, optimizer: str) -> None:
    sizes = {f"model.{name}": getattr(config, name) or 0 for name in _GPT_SIZES}
    check_model(sizes, least_gpt_parameters(config), memory_bytes, optimizer)
    # One sample's activations between the layers, or the tables of rotary positions.
    check_sample("model.context_length", config.context_length, config.context_length * config.d_model, memory_bytes)
    if slots is not None:
        parameters = ranks * least_slot_parameters(config, slots)
        check_model({"strategy.slots": slots}, parameters, memory_bytes, optimizer)


def _check_swin(config: SwinConfig, memory_bytes: int, optimizer: str) -> None:
    sizes = {f"model.{name}": getattr(config, name) or 0 for name in _SWIN_SIZES}
    side = config.image_size
    check_sample("model.image_size", side, 3 * side * side, memory_bytes)
    widths = [(config.embed_dim or 96) << stage for stage in range(min(len(config.depths or ()), 32))]
    hidden = [math.ceil((config.mlp_ratio or 4.0) * width) for width in widths]
    dense = sum(depth * 4 * width**2 for depth, width in zip(config.depths or (), widths, strict=False))
    expert = 2 * widths[-1] * hidden[-1] * config.num_experts if widths else 0
    check_model(sizes, dense + expert + config.num_classes, memory_bytes, optimizer)


class GracefulStop(Callback):
    """Takes SIGINT and SIGTERM while training runs: the ranks agree at the next logging step to stop, and callbacks
    save what they save at the end of a training. A second SIGINT ends at once; SIGTERM may come from a scheduler that
    signals the launcher as well as its ranks.

    The ranks agree every `log_every_n_steps`, one rank alone after every step: asking in between would cost a
    collective of its own in each step.

    Attributes:
        stopped_by: the signal that ended the training, with its state saved; None where none did.
    """

    def __init__(self) -> None:
        self.stopped_by: signal.Signals | None = None
        self._asked_by: signal.Signals | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stopped_by = self._asked_by = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning has set its own handlers before, and sets all back when it ends."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._ask)
            if not _is_notice(trainer):
                signal.signal(signal.SIGTERM, self._ask)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if private_lightning.is_accumulating(trainer):
            return
        interval = trainer.log_every_n_steps if trainer.world_size > 1 else 1  # type: ignore[attr-defined]
        if trainer.global_step % max(1, interval) == 0:
            decide = trainer.strategy.reduce_boolean_decision
            if decide(self._asked_by is not None, all=False):
                is_term = decide(self._asked_by == signal.SIGTERM, all=False)
                self.stopped_by = signal.SIGTERM if is_term else signal.SIGINT
                trainer.should_stop = True

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == self._asked_by == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked_by = signal.Signals(number)


def _is_notice(trainer: pl.Trainer) -> bool:
    """True if SIGTERM asks a rank of an elastic run to leave the others."""
    elastic = getattr(trainer.strategy, "elastic", None)
    return elastic is not None and elastic.engine.settings.notice_on_sigterm
