"""Everything that a run of a Trainer shows, in plain values: two runs under two strategies can be compared to the last
digit.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import logging
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor

OURS_ALONE = {"step_loaders", "moe_experts"}
"""Keys of a checkpoint that stock Lightning does not write."""

_PATH = re.compile(r"/\S*(?:pytest|tmp|temp)\S*")
_TIMES = re.compile(r"[\d.:]+(it/s|s)?[ \u2500-\u257f]*")
_LEFT_OUT = ("isinstance(treespec, LeafSpec)", "ckpoint director", "litlogger", "Profiler")


def plain(value: Any) -> Any:
    """Numbers, texts, lists and dictionaries of them."""
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, int | float | str | None):
        return value
    return type(value).__name__


class MemoryLogger(Logger):
    """Keeps what it is told."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, plain(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.rows.append(("hyper-parameters", plain(dict(params))))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.rows.append("checkpoint")

    def finalize(self, status: str) -> None:
        self.rows.append(("finalize", status))


class Tape(pl.Callback):
    """The order of all hooks of callbacks, and what each of them finds."""

    def __init__(self) -> None:
        self.events: list[Any] = []


def _callback_hook(name: str) -> Callable[..., None]:
    def hook(self: Tape, trainer: pl.Trainer, module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        seen = sorted(set(args[0]) - OURS_ALONE) if name.endswith("checkpoint") else [a for a in args if type(a) is int]
        training = (trainer.fit_loop.batch_idx, trainer.is_last_batch) if trainer.training else None
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), module.training
        gradients = sum(p.grad is not None for p in module.parameters())
        where = name, trainer.global_step, trainer.current_epoch, str(trainer.state.stage)
        self.events.append((*where, seen, training, modes, gradients))

    return hook


for _name in dir(pl.Callback):
    if _name.startswith("on_") or _name in ("setup", "teardown"):
        setattr(Tape, _name, _callback_hook(_name))


class Run:
    """One run: makes its Trainers, modules and loggers, and describes afterwards what happened to them.

    Args:
        strategy: of its Trainers.
        folder: the working directory.
    """

    def __init__(self, strategy: Callable[[], Any], folder: Path) -> None:
        self._strategy = strategy
        self.folder = folder
        self.tape = Tape()
        self.trainers: list[pl.Trainer] = []
        self.modules: list[pl.LightningModule] = []
        self.loggers: list[MemoryLogger] = []
        self.notes: dict[str, Any] = {}

    def trainer(self, **options: Any) -> pl.Trainer:
        """A Trainer on one CPU; `callbacks` stand after the tape."""
        quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        place = {"default_root_dir": str(self.folder), "accelerator": "cpu", "devices": 1, "strategy": self._strategy()}
        if "logger" not in options:
            self.loggers.append(MemoryLogger())
            options["logger"] = self.loggers[-1]
        callbacks = [self.tape, *options.pop("callbacks", [])]
        defaults = place | quiet | {"max_epochs": 2, "log_every_n_steps": 1}
        self.trainers.append(pl.Trainer(**defaults | options, callbacks=callbacks))
        return self.trainers[-1]

    def module(self, kind: type[pl.LightningModule], **options: Any) -> Any:
        """A module, its first weights the same in every run."""
        torch.manual_seed(len(self.modules))
        self.modules.append(kind(**options))
        return self.modules[-1]

    def note(self, **values: Any) -> None:
        """Compare these, too."""
        for name, value in values.items():
            self.notes.setdefault(name, []).append(plain(value))

    def described(self) -> dict[str, Any]:
        """All of it in plain values."""
        files = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        return {
            "notes": self.notes,
            "events": self.tape.events,
            "logged": [logger.rows for logger in self.loggers],
            "files": [name for name in files if "events.out" not in name and "profil" not in name],
            "trainers": [_of_trainer(trainer) for trainer in self.trainers],
            "modules": [_of_module(module) for module in self.modules],
        }


def _of_trainer(trainer: pl.Trainer) -> dict[str, Any]:
    loop = trainer.fit_loop
    progress = dict(loop.state_dict())
    progress["state_dict"] = {k: v for k, v in progress["state_dict"].items() if k != "combined_loader"}
    names = (
        "global_step", "current_epoch", "max_steps", "max_epochs", "should_stop", "accumulate_grad_batches",
        "num_training_batches", "num_val_batches", "num_test_batches", "num_predict_batches", "num_sanity_val_batches",
        "val_check_batch", "callback_metrics", "logged_metrics", "progress_bar_metrics",
    )  # fmt: skip
    found = {name: plain(getattr(trainer, name)) for name in names}
    state = str(trainer.state.status), str(trainer.state.fn), str(trainer.state.stage)
    return found | {"progress": plain(progress), "state": state, "batch": loop.epoch_loop.total_batch_idx}


def _of_module(module: pl.LightningModule) -> dict[str, Any]:
    parameters = dict(module.named_parameters())
    return {
        "parameters": plain(parameters),
        "buffers": plain(dict(module.named_buffers())),
        "trained": {name: (p.requires_grad, p.grad is not None) for name, p in parameters.items()},
        "hooks": getattr(module, "hooks", None),
        "training": module.training,
    }


def record(case: Callable[[Run], None], strategy: Callable[[], Any], folder: Path) -> dict[str, Any]:
    """Run a case in an empty folder, and describe it with what it printed, warned of and raised."""
    folder.mkdir()
    pl.seed_everything(7, verbose=False)
    os.environ.pop("PL_GLOBAL_SEED", None)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - what a user's data set may draw from
    _forget_warnings()
    gc.collect()  # files that other tests left open are named now, and not as this run's
    run, told, shown, error = Run(strategy, folder), list[str](), io.StringIO(), None
    with warnings.catch_warnings(record=True) as warned, contextlib.chdir(folder), _logs(told):
        warnings.simplefilter("always")
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()):
            try:
                case(run)
            except (Exception, SystemExit) as raised:
                error = type(raised).__name__, _PATH.sub("PATH", str(raised))[:200]
    texts = {str(warning.message)[:150] for warning in warned}
    return run.described() | {
        "error": error,
        "warnings": sorted(_PATH.sub("PATH", t) for t in texts if not any(part in t for part in _LEFT_OUT)),
        "log": [text for text in told if not any(part in text for part in _LEFT_OUT)],
        "shown": _TIMES.sub("#", shown.getvalue()) if error is None else "",
    }


def _forget_warnings() -> None:
    """Let Lightning say again what it says once in a process."""
    for cache in _warning_caches(len(sys.modules)):
        cache.clear()


@functools.cache
def _warning_caches(num_modules: int) -> list[WarningCache]:
    """Those of Lightning's modules and classes; looked for again when more modules have been imported."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("lightning.")]
    things = [thing for module in modules for thing in vars(module).values()]
    attributes = [value for thing in things if isinstance(thing, type) for value in vars(thing).values()]
    return [thing for thing in (*things, *attributes) if type(thing) is WarningCache]


@contextlib.contextmanager
def _logs(told: list[str]) -> Iterator[None]:
    handler = logging.Handler()
    handler.emit = lambda record: told.append(_PATH.sub("PATH", record.getMessage())[:200])  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        _restore(loggers, before, handler)


def _restore(loggers: list[logging.Logger], before: list[tuple[int, bool]], handler: logging.Handler) -> None:
    for logger, (level, propagate) in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def differences(stock: Any, ours: Any, *, digits: float = 0.0, at: str = "") -> list[str]:
    """Where two descriptions differ, the first ones of each list.

    Args:
        digits: relative difference of numbers that is none.
    """
    if isinstance(stock, dict) and isinstance(ours, dict):
        found = [f"{at}.{key}: only in {'ours' if key in ours else 'stock'}" for key in stock.keys() ^ ours.keys()]
        for key in stock.keys() & ours.keys():
            found += differences(stock[key], ours[key], digits=digits, at=f"{at}.{key}")
        return found
    if isinstance(stock, list | tuple) and isinstance(ours, list | tuple):
        found = [f"{at}: {len(stock)} entries, ours {len(ours)}"] if len(stock) != len(ours) else []
        for index, (one, other) in enumerate(zip(stock, ours, strict=False)):
            found += differences(one, other, digits=digits, at=f"{at}[{index}]")
            if len(found) > 4:
                break
        return found
    if stock == ours or (stock != stock and ours != ours):
        return []
    if isinstance(stock, float) and isinstance(ours, float) and abs(stock - ours) <= digits * max(1.0, abs(stock)):
        return []
    return [f"{at}: {stock!r}, ours {ours!r}"]
