"""What FaultRecovery refuses where an elastic launcher started the ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_lightning.callbacks.fault_recovery import FaultRecovery
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy


@pytest.mark.parametrize(
    ("automatic", "reload_every", "words"),
    [
        (False, 0, "manual optimization .*: use automatic optimization"),
        (True, 2, "reload_dataloaders_every_n_epochs=2 makes loaders anew .*: set it to 0"),
    ],
)
def test_fits_that_cannot_go_back_are_refused(
    automatic: bool, reload_every: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = ExpertParallelStrategy()
    monkeypatch.setattr(ExpertParallelStrategy, "elastic", SimpleNamespace(), raising=False)
    trainer: Any = SimpleNamespace(strategy=strategy, reload_dataloaders_every_n_epochs=reload_every)
    module: Any = SimpleNamespace(automatic_optimization=automatic)
    with pytest.raises(ConfigurationError, match=words):
        FaultRecovery().on_fit_start(trainer, module)
