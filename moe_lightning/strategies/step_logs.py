"""What a step logs of each micro-batch of a pipeline, put together and logged again on every rank: callbacks and
loggers then see what they see without a pipeline.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from moe_lightning.errors import ConfigurationError

_SIGNATURE = inspect.signature(pl.LightningModule.log)
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}


@dataclass(frozen=True, kw_only=True)
class LoggedValue:
    """One call of `log`.

    Attributes:
        value: None where a Metric was logged.
        metric: the name of its attribute; empty where a number was logged.
        weight: what the value counts for among those of other micro-batches.
        options: other arguments than the defaults.
    """

    name: str
    value: Tensor | float | None
    metric: str
    weight: Tensor | float
    options: dict[str, Any]


@dataclass
class StepLogs:
    """Takes the calls of `log` of a step's micro-batches.

    Attributes:
        values: in the order of the calls.
    """

    values: list[LoggedValue] = field(default_factory=list)

    @contextmanager
    def taking(
        self, module: pl.LightningModule, count: int, shared_weight: Callable[[], Tensor | None]
    ) -> Generator[None, None, None]:
        """Inside, the module logs here.

        Args:
            count: samples of the micro-batch on this rank.
            shared_weight: what a mean over all ranks counts for, where the step has said it.
        """

        def log(*arguments: Any, **named: Any) -> None:
            given = dict(_SIGNATURE.bind(module, *arguments, **named).arguments)
            name, value = given.pop("name"), given.pop("value")
            del given["self"]
            options = {key: _plain(key, v) for key, v in given.items() if v != _SIGNATURE.parameters[key].default}
            metric = ""
            if isinstance(value, Metric):
                metric = next(path for path, part in module.named_modules() if part is value)
            if not count and "batch_size" in options:  # a stand-in counts for nothing
                options["batch_size"] = 0
            weight: Tensor | float | None = options.get("batch_size")
            if weight is None and not options.get("sync_dist"):
                weight = shared_weight()
            self.values.append(
                LoggedValue(
                    name=name,
                    value=None if metric else (value.detach() if isinstance(value, Tensor) else float(value)),
                    metric=metric,
                    weight=count if weight is None else weight,
                    options=options,
                )
            )

        object.__setattr__(module, "log", log)
        try:
            yield
        finally:
            object.__delattr__(module, "log")

    def told(self) -> list[Any]:
        """As plain values."""
        return [
            [v.name, None if v.value is None else float(v.value), v.metric, float(v.weight), v.options]
            for v in self.values
        ]


def log_again(module: pl.LightningModule, told: list[Any], count: int) -> None:
    """Log what `StepLogs.told` says, one value for each name.

    Args:
        count: samples of this rank in all micro-batches.
    """
    for name in dict.fromkeys(entry[0] for entry in told):
        entries = [entry for entry in told if entry[0] == name]
        _, _, metric, _, options = entries[0]
        if metric:
            logged = module.get_submodule(metric)
            assert isinstance(logged, Metric)
            module.log(name, logged, **options)
            continue
        values, weights = [entry[1] for entry in entries], [entry[3] for entry in entries]
        total, reduction = sum(weights), options.get("reduce_fx", "mean")
        if reduction in _REDUCTIONS:
            value = _REDUCTIONS[reduction](values)
        elif total > 0:
            value = sum(v * w for v, w in zip(values, weights, strict=True) if w) / total
        else:
            value = values[0]
        sizes = [entry[4]["batch_size"] for entry in entries if "batch_size" in entry[4]]
        module.log(name, value, **options | {"batch_size": max(1, sum(sizes) if sizes else count)})


def _plain(option: str, value: Any) -> Any:
    if option == "reduce_fx" and value in (torch.mean, torch.sum, torch.max, torch.min):
        return value.__name__
    if option == "metric_attribute" or isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, Tensor) and value.ndim == 0:
        return int(value)
    raise ConfigurationError(f"log({option}={value!r}) cannot be told to the other stages of mesh.pp: drop it")
