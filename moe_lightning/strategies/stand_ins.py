"""A rank without a sample of its own computes a stand-in, to take part in the collectives: it leaves no trace."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric


@contextmanager
def without_traces(module: pl.LightningModule) -> Generator[None, None, None]:
    """Give the module's metrics, and what it logs with `sync_dist=True`, the values back that they had.

    What is logged for the first time keeps its entry, with the value of no samples: an epoch's values are reduced by
    all ranks together. Values that are not reduced over ranks stay, since a rank has nothing else to show.
    """
    trainer = module.trainer
    own = [metric for metric in module.modules() if isinstance(metric, Metric)]
    before = [(metric, _values(metric), metric._update_count) for metric in [*own, *_reduced(trainer)]]
    yield
    known = {id(metric) for metric, _, _ in before}
    for metric, values, count in before:
        _give_back(metric, values)
        metric._update_count = count
    for metric in _reduced(trainer):
        if id(metric) not in known:
            _give_back(metric, {name: _copy(value) for name, value in metric._defaults.items()})


def _give_back(metric: Metric, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(metric, name, value)
    metric._computed = None


def nothing_of(prediction: Any) -> Any:
    """A prediction with the rows of no sample."""
    return pytree.tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) and leaf.ndim else leaf, prediction)


def _reduced(trainer: pl.Trainer) -> list[Metric]:
    """Logged values that become a mean, sum or extreme over an epoch and over ranks."""
    results: Any = trainer._results
    values = results.values() if results is not None else ()
    return [value for value in values if value.is_tensor and value.meta.on_epoch and value.meta.sync.should]


def _values(metric: Metric) -> dict[str, Any]:
    return {name: _copy(getattr(metric, name)) for name in metric._defaults}


def _copy(value: Any) -> Any:
    """Later updates in place do not reach it."""
    return value.detach().clone() if isinstance(value, Tensor) else list(value)
