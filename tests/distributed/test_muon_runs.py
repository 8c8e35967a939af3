"""Muon on several ranks: experts by themselves, the same losses, states that move and are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, OptimizerConfig
from moe_lightning.algorithms.placement import Placement
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.training import TINY, RandomTokens, Recorder, make_trainer

STEPS = 10


class Move(Recorder):
    """Lets experts change places in the middle of a training."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ExpertParallelStrategy)
        if trainer.global_step == STEPS // 2 and strategy.world.size > 1:
            turned = [Placement(replicas=np.roll(p.replicas, 1, axis=0)) for p in strategy.experts.placements]
            strategy.replace_experts(turned)


def fit(
    rank: int, world_size: int, strategy: dict[str, Any], save: str | None = None, load: str | None = None
) -> list[float]:
    recorder = Move()
    trainer = make_trainer(rank, world_size, strategy, max_steps=STEPS if save is None else 4, callbacks=[recorder])
    module = GPTModule(TINY, OptimizerConfig(name="muon", lr=3e-3, warmup_steps=2, decay="constant"))
    trainer.fit(module, DataLoader(RandomTokens(96), batch_size=12, shuffle=True), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return recorder.losses


def test_losses_do_not_depend_on_ranks_or_places(tmp_path: Path) -> None:
    (alone,) = run_ranks(1, fit, {})
    assert alone[-1] < alone[0] - 0.1
    assert run_ranks(2, fit, {"copies": 2})[0] == pytest.approx(alone, abs=1e-5)
    assert run_ranks(3, fit, {"dense": "zero1"})[0] == pytest.approx(alone, abs=1e-5)
    path = str(tmp_path / "four.ckpt")
    run_ranks(2, fit, {}, path)
    assert run_ranks(1, fit, {}, None, path)[0] == pytest.approx(alone[4:], abs=1e-5)


def test_matrices_that_are_cut_by_rows_are_refused() -> None:
    with pytest.raises(RankFailure, match="Muon updates the rows of a parameter by what is in other rows"):
        run_ranks(2, fit, {"dense": "fsdp"})
