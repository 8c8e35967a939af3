"""What callbacks that work through the strategy of this library need."""

from __future__ import annotations

import lightning.pytorch as pl

from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy


def own_strategy(trainer: pl.Trainer, name: str, cure: str = "drop the callback") -> ExpertParallelStrategy:
    """The trainer's strategy.

    Args:
        name: of the callback that needs it.
        cure: what else helps whoever has another strategy.

    Raises:
        ConfigurationError: it is another one.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, ExpertParallelStrategy):
        raise ConfigurationError(
            f"{name} needs strategy='expert_parallel', not {type(strategy).__name__}: use that, or {cure}"
        )
    return strategy
