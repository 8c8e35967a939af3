"""A module is used on when the ranks that trained it are gone."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from moe_lightning import ConfigurationError, ExpertParallelStrategy, FaultRecovery
from moe_lightning.elastic.membership import ElasticTask
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.strategies import expert_parallel
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.training import OwnModule, RandomTokens, make_trainer, quiet_trainer


class Evaluated(OwnModule):
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        h = self.embed(x)
        loss = torch.nn.functional.cross_entropy(self.out(h + self.moe(h)).flatten(0, 1), y.flatten())
        self.log("test/loss", loss, sync_dist=True)


def held_out() -> DataLoader[Any]:
    return DataLoader(RandomTokens(30), batch_size=10)


def alone(**options: Any) -> pl.Trainer:
    return quiet_trainer(max_steps=2, **options)


def trained(rank: int, world_size: int, **strategy: Any) -> tuple[pl.Trainer, Evaluated, dict[str, Any]]:
    trainer = make_trainer(rank, world_size, strategy, max_steps=5)
    module = Evaluated()
    trainer.fit(module, DataLoader(RandomTokens(48), batch_size=12))
    return trainer, module, dict(trainer.test(module, held_out(), verbose=False)[0])


def go_on_alone(rank: int, world_size: int) -> list[dict[str, Any]]:
    """The results of a test with all ranks, then of rank 0 alone under stock Lightning and under the strategy."""
    _, module, together = trained(rank, world_size, timeout_s=3.0)
    assert module.moe(torch.ones(4, 32)).requires_grad, "all ranks together still train"
    if rank:
        return []
    results = [together, *alone().test(module, held_out(), verbose=False)]
    with pytest.raises(ConfigurationError, match="2 ranks, and others of them have ended: give the Trainer"):
        alone().fit(module, DataLoader(RandomTokens(48), batch_size=12))
    results += alone(strategy=ExpertParallelStrategy()).test(module, held_out(), verbose=False)
    alone(strategy=ExpertParallelStrategy()).fit(module, DataLoader(RandomTokens(48), batch_size=12))
    assert module.moe.experts.slot_experts == tuple(range(6))
    assert all(p.grad is not None for p in module.moe.experts.parameters())
    return [*results, *alone().test(module, held_out(), verbose=False)]  # type: ignore[list-item]


@pytest.mark.slow
def test_rank_0_goes_on_alone() -> None:
    together, stock, ours, trained_on = run_ranks(2, go_on_alone)[0]
    assert stock == pytest.approx(together, abs=1e-6)
    assert ours == pytest.approx(together, abs=1e-6)
    assert trained_on["test/loss"] < ours["test/loss"]


def use_large_ones_alone(rank: int, world_size: int) -> str:
    expert_parallel.gather_limit = lambda _: 1 << (30 if rank else 4)
    _, module, _ = trained(rank, world_size, timeout_s=2.0)
    if rank:
        return ""
    with pytest.raises(ConfigurationError) as caught:
        alone().test(module, held_out(), verbose=False)
    return str(caught.value)


@pytest.mark.slow
def test_experts_too_large_to_be_kept_are_told_with_a_cure() -> None:
    sentence = run_ranks(2, use_large_ones_alone)[0]
    assert sentence.startswith("the experts of this module lie on 2 ranks, and others of them have ended: give the")
    assert "trainer.save_checkpoint" in sentence


def change_and_use(rank: int, world_size: int) -> bool:
    """Whether weights that were loaded after training are what all ranks compute with."""
    _, module, _ = trained(rank, world_size)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    module.eval()
    with torch.no_grad():
        before = module.moe(x)
        module.moe.load_state_dict({name: torch.zeros_like(t) for name, t in module.moe.state_dict().items()})
        after = module.moe(x)
    if rank:
        return bool(before.any()) and not after.any()
    with pytest.raises(ConfigurationError, match="build the module again and load a checkpoint"):
        alone(strategy=ExpertParallelStrategy()).test(module, held_out(), verbose=False)
    return bool(before.any()) and not after.any()


def test_what_is_loaded_after_training_counts() -> None:
    assert run_pooled(2, change_and_use) == [True, True]


class Asking(pl.Callback):
    """Records what the rendezvous host is told: whether this rank may be silent."""

    def __init__(self) -> None:
        self.answers: list[bool] = []

    def ask(self, trainer: pl.Trainer, *_: Any) -> None:
        engine: Any = trainer.strategy.elastic.engine  # type: ignore[attr-defined]
        self.answers.append(engine._state.introduction(None)["done"])

    on_train_start = on_fit_end = on_test_start = ask


def fit_and_test_elastically(rank: int, world_size: int) -> list[bool]:
    with RendezvousServer() as host:
        task = ElasticTask(address=str(host.address), secret_file=str(host.secret_file), node="a")
        os.environ.update(task.to_environment())
        module, asking = Evaluated(), Asking()
        trainer = make_trainer(rank, world_size, max_steps=1, callbacks=[FaultRecovery(), asking])
        for steps in (1, 2):
            trainer.fit_loop.epoch_loop.max_steps = steps
            trainer.fit(module, DataLoader(RandomTokens(48), batch_size=12))
            asking.ask(trainer)
            trainer.test(module, held_out(), verbose=False)
            asking.ask(trainer)
        trainer.strategy.elastic.close()  # type: ignore[attr-defined]
        return asking.answers


def test_a_rank_may_be_silent_after_the_training_but_not_in_a_test() -> None:
    """It may export with Python's lock for minutes, but in a test the others wait for it."""
    (answers,) = run_ranks(1, fit_and_test_elastically)
    assert answers == [False, True, True, False, True] * 2
