"""A rank without a sample of its own computes a stand-in, to take part in the collectives: it leaves no trace."""

from __future__ import annotations

import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from moe_lightning import seams

_NOT_THE_USERS = frozenset(vars(nn.Module())) | frozenset(vars(pl.LightningModule()))
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")})
"""Objects of installed packages are left alone: they may be shared with threads, or with the world outside."""

_OURS = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "moe_lightning")
"""Whose modules count nothing over a user's samples, or are looked into by name."""

Undo = Callable[[], Any]
"""Gives a value its content back, and answers it."""


@contextmanager
def without_traces(module: pl.LightningModule) -> Generator[None, None, None]:
    """Give the module, its metrics, and what it logs with `sync_dist=True`, the values back that they had.

    Of the module and its parts that is every attribute and buffer: numbers, tensors, containers of them, and objects of
    classes that belong to no installed package; parameters and their gradients stay. Our own layers keep what they
    count over all ranks.

    What is logged for the first time keeps its entry, with the value of no samples: an epoch's values are reduced by
    all ranks together. Values that are not reduced over ranks stay, since a rank has nothing else to show.
    """
    trainer = module.trainer
    known: dict[int, Undo] = {}
    own = [_undo_of_module(part, known) for part in module.modules() if _package(part) not in _OURS]
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    before = [_undo_of_metric(metric) for metric in [*metrics, *_reduced(trainer)]]
    seen = {id(metric) for metric in _reduced(trainer)}
    yield
    for undo in (*own, *before):
        undo()
    for metric in _reduced(trainer):
        if id(metric) not in seen:
            values = {name: _copy(value) for name, value in seams.initial_values(metric).items()}
            seams.set_values(metric, values, updates=metric.update_count)


def nothing_of(prediction: Any) -> Any:
    """A prediction with the rows of no sample."""
    return seams.tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) and leaf.ndim else leaf, prediction)


# ---------------------------------------------------------------------- metrics


def _undo_of_metric(metric: Metric) -> Undo:
    values = {name: _copy(value) for name, value in metric.metric_state.items()}
    return partial(seams.set_values, metric, values, updates=metric.update_count)


def _reduced(trainer: pl.Trainer) -> list[Metric]:
    """Logged values that become a mean, sum or extreme over an epoch and over ranks."""
    values = seams.logged_values(trainer)
    return [value for value in values if value.is_tensor and value.meta.on_epoch and value.meta.sync.should]


def _copy(value: Any) -> Any:
    """Later updates in place do not reach it."""
    return value.detach().clone() if isinstance(value, Tensor) else list(value)


# ---------------------------------------------------------------------- anything else


def _package(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _is_users(value: object) -> bool:
    """Whether it is an object with attributes, of a class that belongs to no installed package."""
    if isinstance(value, Dataset | DataLoader | nn.Module | type) or not isinstance(
        getattr(value, "__dict__", 0), dict
    ):
        return False
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    in_library = file is None or str(file).startswith(_LIBRARIES)
    return type(value).__module__ == "__main__" or not (in_library or _package(value) in _OURS)


def _undo_of_module(module: nn.Module, known: dict[int, Undo]) -> Undo:
    attributes = _undo_of_names(vars(module), known, but=_NOT_THE_USERS)
    buffers = _undo_of_names(seams.buffers_of(module), known)

    def undo() -> None:
        attributes()
        buffers()

    return undo


def _undo_of_names(names: dict[Any, Any], known: dict[int, Undo], but: frozenset[str] = frozenset()) -> Undo:
    values = {name: _undo_of(value, known) for name, value in names.items() if name not in but}

    def undo() -> dict[Any, Any]:
        for name in [name for name in names if name not in values and name not in but]:
            del names[name]
        for name, value in values.items():
            names[name] = value()
        return names

    return undo


def _undo_of(value: Any, known: dict[int, Undo]) -> Undo:
    """How a value gets its present content back; a value that is met again is looked at once."""
    if id(value) not in known:
        known[id(value)] = lambda: value  # until it is known, for values that hold themselves
        known[id(value)] = _made_undo(value, known)
    return known[id(value)]


def _made_undo(value: Any, known: dict[int, Undo]) -> Undo:
    if isinstance(value, Metric):
        return _and(_undo_of_metric(value), value)
    if isinstance(value, Tensor | np.ndarray) and not isinstance(value, nn.Parameter):
        return _undo_of_array(value)
    if isinstance(value, dict):
        return _undo_of_names(value, known)
    if isinstance(value, list | deque):
        return _undo_of_sequence(value, known)
    if isinstance(value, set):
        return _undo_of_set(value)
    return _and(_undo_of_names(vars(value), known), value) if _is_users(value) else lambda: value


def _undo_of_array(array: Any) -> Undo:
    kept = array.detach().clone() if isinstance(array, Tensor) else array.copy()

    @torch.no_grad()
    def undo() -> Any:
        if not (torch.equal(array, kept) if isinstance(array, Tensor) else np.array_equal(array, kept)):
            array[...] = kept  # what an earlier step's graph holds is written to only where it must be
        return array

    return undo


def _undo_of_set(values: set[Any]) -> Undo:
    kept = set(values)

    def undo() -> set[Any]:
        values.clear()
        values.update(kept)
        return values

    return undo


def _undo_of_sequence(values: Any, known: dict[int, Undo]) -> Undo:
    items = [_undo_of(value, known) for value in values]

    def undo() -> Any:
        values.clear()
        values.extend(item() for item in items)
        return values

    return undo


def _and(undo: Callable[[], object], value: Any) -> Undo:
    def both() -> Any:
        undo()
        return value

    return both
