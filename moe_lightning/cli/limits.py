"""Ranges of arguments of other libraries' constructors, whose annotations say types only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from annotated_types import Interval

from moe_lightning.config import Coefficient, Fraction, NonNegativeInt, PositiveInt

_Limit = Annotated[int, Interval(ge=-1)]  # -1: none
_Share = NonNegativeInt | Fraction

_LIMITS: dict[str, dict[str, Any]] = {
    "lightning.pytorch.trainer.trainer.Trainer": {
        "accumulate_grad_batches": PositiveInt,
        "check_val_every_n_epoch": PositiveInt | None,
        "gradient_clip_val": Coefficient | None,
        "limit_predict_batches": _Share | None,
        "limit_test_batches": _Share | None,
        "limit_train_batches": _Share | None,
        "limit_val_batches": _Share | None,
        "log_every_n_steps": NonNegativeInt | None,
        "max_epochs": _Limit | None,
        "max_steps": _Limit,
        "min_epochs": NonNegativeInt | None,
        "min_steps": NonNegativeInt | None,
        "num_nodes": PositiveInt,
        "num_sanity_val_steps": _Limit | None,
        "overfit_batches": _Share,
        "reload_dataloaders_every_n_epochs": NonNegativeInt,
        "val_check_interval": PositiveInt | Annotated[float, Interval(gt=0, le=1)] | str | None,
    },
}


def limits_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Annotations of some arguments that stand in place of the function's own."""
    return _LIMITS.get(f"{function.__module__}.{function.__qualname__}", {})
