"""Callbacks that work through this library's strategy refuse another one in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from moe_lightning import (
    ConfigurationError,
    FaultRecovery,
    LoadBalancer,
    MoELayer,
    PartialExpertsCheckpoint,
    RoutingReplay,
)
from moe_lightning.callbacks.fault_injection import FaultInjection
from tests.distributed.training import quiet_trainer


class OneLayer(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(4, 4, 2)


@pytest.mark.parametrize(
    "made",
    [
        lambda path: PartialExpertsCheckpoint(path).setup,
        lambda path: FaultRecovery().setup,
        lambda path: FaultInjection(path, kill="rank=0,step=1").setup,
        lambda path: RoutingReplay(path).on_fit_start,
        lambda path: LoadBalancer().on_train_start,
    ],
)
def test_another_strategy_is_refused(made: Any, tmp_path: Path) -> None:
    trainer = quiet_trainer()
    hook = made(str(tmp_path))
    expected = f"{type(hook.__self__).__name__} needs strategy='expert_parallel', not SingleDeviceStrategy: use that"
    with pytest.raises(ConfigurationError, match=expected):
        hook(trainer, OneLayer(), *["fit"] * (hook.__name__ == "setup"))
