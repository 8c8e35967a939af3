"""Dummy batches: a rank without a sample computes one, to take part in the collectives of a step.

A dummy batch weighs nothing in the loss, but the code of a module also counts, logs and updates metrics:
`without_traces` restores what it changes. `nothing_of` drops the rows of its prediction.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from moe_lightning.compat import private_lightning, private_torch

_NOT_THE_USERS = frozenset(vars(nn.Module())) | frozenset(vars(pl.LightningModule()))
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")})
"""Objects of installed packages are not restored: they may be shared with threads or other processes."""

LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "moe_lightning")
"""Packages whose modules count no samples of a user, or are handled by name."""

Undo = Callable[[], Any]
"""Restores the content of a value, and returns it."""


@contextmanager
def without_traces(module: pl.LightningModule) -> Generator[list[str], None, None]:
    """Restore the values of the module, its metrics, and its logs with `sync_dist=True` afterwards.

    Restored are all attributes and buffers of the module and its parts: numbers, tensors, containers of them, and
    objects of classes that belong to no installed package; parameters and their gradients stay. Layers of this library
    keep their counts over all ranks. Under manual optimization tensors with a graph stay, too: a hook may call
    `manual_backward` for one.

    A value that is logged for the first time keeps its entry, with the value of no samples: an epoch's values are
    reduced by all ranks together. Values that are not reduced over ranks stay, since a rank has no others.

    Yields:
        The names of the numbers that were restored; empty before the end.
    """
    trainer = module.trainer
    known: dict[int, Undo] = {}
    parts = [part for part in module.modules() if _package(part) not in LIBRARIES]
    own = [_undo_of_module(part, known) for part in parts]
    numbers = [(part, name, value) for part in parts for name, value in vars(part).items() if _is_number(name, value)]
    changed: list[str] = []
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    before = [_undo_of_metric(metric) for metric in [*metrics, *_reduced(trainer)]]
    seen = {id(metric) for metric in _reduced(trainer)}
    yield changed
    changed += [
        f"{type(part).__name__}.{name}"
        for part, name, value in numbers
        if (now := vars(part).get(name, value)) is not value and isinstance(now, int | float) and now != value
    ]
    graphs = [] if module.automatic_optimization else [(part, _with_graph(part)) for part in parts]
    for undo in (*own, *before):
        undo()
    for part, tensors in graphs:
        vars(part).update(tensors)
    for metric in _reduced(trainer):
        if id(metric) not in seen:
            values = {name: _copy(value) for name, value in private_lightning.initial_values(metric).items()}
            private_lightning.set_values(metric, values, updates=metric.update_count)


def nothing_of(prediction: Any) -> Any:
    """Return a prediction with no rows: of tensors and arrays, and of lists of texts and numbers."""
    return private_torch.tree_map(
        lambda leaf: leaf[:0] if _is_list(leaf) or (isinstance(leaf, Tensor | np.ndarray) and leaf.ndim) else leaf,
        prediction,
        is_leaf=_is_list,
    )


def _is_list(value: Any) -> bool:
    """True if a value has a text or number of each sample, which torch's pytree would take for a container."""
    return isinstance(value, list) and all(isinstance(each, str | bytes | int | float | np.generic) for each in value)


# ---------------------------------------------------------------------- metrics


@contextmanager
def without_updates(metrics: Iterable[Metric]) -> Generator[None, None, None]:
    """Restore the states of metrics afterwards."""
    before = [_undo_of_metric(metric) for metric in metrics]
    yield
    for undo in before:
        undo()


def _undo_of_metric(metric: Metric) -> Undo:
    values = {name: _copy(value) for name, value in metric.metric_state.items()}
    return partial(private_lightning.set_values, metric, values, updates=metric.update_count)


def _reduced(trainer: pl.Trainer) -> list[Metric]:
    """Return the logged values that become a mean, sum or extreme over an epoch and over ranks."""
    values = private_lightning.logged_values(trainer)
    return [value for value in values if value.is_tensor and value.meta.on_epoch and value.meta.sync.should]


def _copy(value: Any) -> Any:
    """Copy a value, so that later updates in place do not change it."""
    return value.detach().clone() if isinstance(value, Tensor) else list(value)


# ---------------------------------------------------------------------- anything else


def _package(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _is_users(value: object) -> bool:
    """True if a value is an object with attributes, of a class that belongs to no installed package."""
    if isinstance(value, Dataset | DataLoader | nn.Module | type) or not isinstance(
        getattr(value, "__dict__", 0), dict
    ):
        return False
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    in_library = file is None or str(file).startswith(_INSTALLED)
    return type(value).__module__ == "__main__" or not (in_library or _package(value) in LIBRARIES)


def _is_number(name: str, value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and name not in _NOT_THE_USERS


def _with_graph(module: nn.Module) -> dict[str, Tensor]:
    tensors = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {name: tensor for name, tensor in tensors.items() if tensor.grad_fn is not None}


def _undo_of_module(module: nn.Module, known: dict[int, Undo]) -> Undo:
    attributes = _undo_of_names(vars(module), known, but=_NOT_THE_USERS)
    buffers = _undo_of_names(private_torch.buffers_of(module), known)

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
    """Return the function that restores a value's present content; a value that occurs again is copied once."""
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
    if isinstance(value, list | deque | set):
        return _undo_of_items(value, known)
    return _and(_undo_of_names(vars(value), known), value) if _is_users(value) else lambda: value


def _undo_of_array(array: Any) -> Undo:
    before = array.detach().clone() if isinstance(array, Tensor) else array.copy()

    @torch.no_grad()
    def undo() -> Any:
        if not (torch.equal(array, before) if isinstance(array, Tensor) else np.array_equal(array, before)):
            array[...] = before  # a tensor of an earlier step's graph is written only if it has changed
        return array

    return undo


def _undo_of_items(values: Any, known: dict[int, Undo]) -> Undo:
    items = [_undo_of(value, known) for value in values]

    def undo() -> Any:
        values.clear()
        add = values.update if isinstance(values, set) else values.extend
        add(item() for item in items)
        return values

    return undo


def _and(undo: Callable[[], object], value: Any) -> Undo:
    def both() -> Any:
        undo()
        return value

    return both
