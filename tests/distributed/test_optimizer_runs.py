"""Optimizers of ours on several ranks: experts by themselves, the same losses, states that move and are saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, OptimizerConfig, PartialExpertsCheckpoint
from moe_lightning.dispatch.placement import Placement
from tests.distributed.harness import run_pooled, run_refused
from tests.distributed.training import TINY, RandomTokens, Recorder, make_trainer
from tests.parameters import slow

STEPS = 8


class Move(Recorder):
    """Lets experts change places in the middle of a training."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        strategy = trainer.strategy
        if trainer.global_step == STEPS // 2 and strategy.world.size > 1:
            turned = [Placement(replicas=np.roll(p.replicas, 1, axis=0)) for p in strategy.experts.placements]
            strategy.replace_experts(turned)


class Counted(torch.optim.Optimizer):
    """SGD with momentum whose count of updates is a number and not a tensor, as in many optimizers outside torch."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                state["step"], state["mean"] = 0, torch.zeros_like(parameter)
            state["step"] += 1
            mean = state["mean"].mul_(0.9).add_(parameter.grad, alpha=0.1)
            parameter.sub_(self.param_groups[0]["lr"] / (1 - 0.9 ** state["step"]) * mean)
        return loss


class OfCounted(GPTModule):
    def configure_optimizers(self) -> Any:
        return Counted(self.parameters())


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"name": "muon", "lr": 3e-3},
    "adafactor": {"name": "adafactor", "lr": 0.05, "weight_decay": 0.01},
    "fused": {"fused": True, "lr": 3e-3},
}


def fit(
    rank: int, world_size: int, name: str, strategy: dict[str, Any], save: str | None = None, load: str | None = None
) -> list[float]:
    recorder, steps = Move(), STEPS if save is None else 4
    partial = [PartialExpertsCheckpoint(save, every_n_steps=2, k_persist=2)] if save and save.endswith("/") else []
    trainer = make_trainer(
        rank, world_size, strategy, max_steps=steps, callbacks=[recorder, *partial], enable_checkpointing=bool(partial)
    )
    module: GPTModule = OfCounted(TINY, OptimizerConfig())
    if name != "counted":
        module = GPTModule(TINY, OptimizerConfig(**OPTIMIZERS[name], warmup_steps=2, decay="constant"))
    trainer.fit(module, DataLoader(RandomTokens(96), batch_size=12, shuffle=True), ckpt_path=load)
    if save is not None and not partial:
        trainer.save_checkpoint(save)
    return recorder.losses


@pytest.mark.parametrize("name", ["counted", *(slow(name) for name in ("muon", "adafactor", "fused"))])
def test_losses_do_not_depend_on_ranks_or_places(name: str, tmp_path: Path) -> None:
    (alone,) = run_pooled(1, fit, name, {})
    assert alone[-1] < alone[0] - 0.1
    assert run_pooled(2, fit, name, {"replicas": 2})[0] == pytest.approx(alone, abs=1e-5)
    assert run_pooled(3, fit, name, {"dense": "zero1"})[0] == pytest.approx(alone, abs=1e-5)
    path = str(tmp_path / "four.ckpt")
    run_pooled(2, fit, name, {"dense": "zero1"}, path)
    assert run_pooled(1, fit, name, {}, None, path)[0] == pytest.approx(alone[4:], abs=1e-5)


@pytest.mark.slow
def test_factors_of_experts_move_with_them() -> None:
    (alone,) = run_pooled(1, fit, "adafactor", {})
    assert alone[-1] < alone[0] - 0.1
    assert run_pooled(2, fit, "adafactor", {"replicas": 2, "dense": "zero1"})[0] == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_fused_updates_of_rows_are_those_of_whole_parameters() -> None:
    (alone,) = run_pooled(1, fit, "fused", {})
    assert run_pooled(3, fit, "fused", {"dense": "fsdp"})[0] == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_partial_checkpoints_hold_the_states(name: str, tmp_path: Path) -> None:
    """All experts are in the last two checkpoints together, and the last restores what no step has changed since."""
    folder = f"{tmp_path}/"
    run_pooled(2, fit, name, {"dense": "zero1"}, folder)
    last = str(sorted(tmp_path.glob("step*"))[-1])
    on_two, on_three = (run_pooled(ranks, fit, name, {}, None, last)[0] for ranks in (2, 3))
    assert on_three == pytest.approx(on_two, abs=1e-5)
    assert len(on_two) == STEPS - 4


@pytest.mark.parametrize(
    ("name", "strategy", "said"),
    [
        ("muon", {"dense": "fsdp"}, "dense=fsdp, hsdp and mesh.tp keep those on other ranks: use .*, or dense=zero1"),
        ("muon", {"mesh": {"tp": 2}}, "dense=fsdp, hsdp and mesh.tp keep those on other ranks: use .*, or dense=zero1"),
        slow("adafactor", {"dense": "fsdp"}, "dense=fsdp, hsdp and mesh.tp keep"),
    ],
)
def test_matrices_that_are_cut_are_refused(name: str, strategy: dict[str, Any], said: str) -> None:
    """By what the user has set."""
    updates = f"{name.title()} updates the rows of a parameter by what is in other rows, and {said}"
    for sentence in run_refused(2, fit, name, strategy):
        assert re.match(updates, sentence), sentence


class TwoLooks(torch.optim.SGD):
    """Takes the gradient again a step ahead, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            super().step()
        return loss


class OfTwoLooks(GPTModule):
    def configure_optimizers(self) -> Any:
        return TwoLooks(self.parameters(), lr=0.1)


def losses_of_two_looks(rank: int, world_size: int, dense: str) -> list[float]:
    recorder = Recorder()
    trainer = make_trainer(rank, world_size, {"dense": dense}, max_steps=2, callbacks=[recorder])
    trainer.fit(OfTwoLooks(TINY, OptimizerConfig()), DataLoader(RandomTokens(96), batch_size=12))
    return recorder.losses


def test_an_optimizer_may_take_gradients_twice_where_ranks_have_all_parameters() -> None:
    [alone] = run_pooled(1, losses_of_two_looks, "ddp")
    assert run_pooled(2, losses_of_two_looks, "ddp") == [pytest.approx(alone, abs=1e-5)] * 2


@pytest.mark.parametrize("dense", ["zero1", "fsdp"])
def test_an_optimizer_that_takes_gradients_twice_is_refused_where_ranks_share(dense: str) -> None:
    for sentence in run_refused(2, losses_of_two_looks, dense):
        assert re.match(f"TwoLooks calls its closure more than once .* dense={dense}", sentence), sentence
