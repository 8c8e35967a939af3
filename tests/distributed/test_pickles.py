"""Trainers and modules in other processes: what is pickled holds nothing of the process that it came from."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_lightning import ConfigurationError, ExpertParallelStrategy
from moe_lightning.strategies import expert_parallel
from tests.distributed.harness import run_pooled
from tests.distributed.test_hook_order import fitted
from tests.distributed.test_users_modules import Base, Options, Seen, stock_trainer, tokens
from tests.distributed.training import make_trainer


@pytest.mark.parametrize("strategy", [{}, {"slots": 6, "dense": "fsdp"}, {"mesh": {"pp": 2}}])
def test_a_trainer_is_pickled(strategy: Options) -> None:
    one = stock_trainer(strategy=ExpertParallelStrategy(**strategy), max_steps=3)
    other = pickle.loads(pickle.dumps(one))  # noqa: S301
    assert other.strategy.state is not one.strategy.state
    assert vars(other.strategy).keys() == vars(one.strategy).keys()
    assert other.strategy.worlds.axes == one.strategy.worlds.axes


def losses_of_a_copy(rank: int, world_size: int, is_copied: bool) -> list[float]:
    seen = Seen()
    trainer = make_trainer(rank, world_size, {"dense": "zero1"}, max_steps=3, callbacks=[seen])
    if is_copied:
        fitted(trainer, Base())
        trainer = pickle.loads(pickle.dumps(make_trainer(rank, world_size, {"dense": "zero1"}, max_steps=3)))  # noqa: S301
        trainer.callbacks.append(seen := Seen())
    fitted(trainer, Base())
    return [value for _, value in seen.values]


def test_a_pickled_trainer_trains() -> None:
    assert run_pooled(2, losses_of_a_copy, True) == run_pooled(2, losses_of_a_copy, False)


def pickled_module(rank: int, world_size: int, strategy: Options, folder: Path, most_bytes: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_parallel, "gather_limit", lambda _: most_bytes)
        trainer = make_trainer(rank, world_size, strategy, max_steps=2)
        module = fitted(trainer, Base())
    whole = trainer.strategy.lightning_module_state_dict()
    try:
        torch.save(module, folder / f"{rank}.pt")
    except ConfigurationError as error:
        return str(error)
    return {name: value.numpy() for name, value in whole.items()}


@pytest.mark.parametrize("strategy", [{}, {"replicas": 2}, {"dense": "fsdp"}, {"dense": "zero1", "slots": 5}])
def test_a_trained_module_is_saved_whole(strategy: Options, tmp_path: Path) -> None:
    whole, _ = run_pooled(2, pickled_module, strategy, tmp_path, 1 << 30)
    for rank in range(2):
        module = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for name, value in module.state_dict().items():
            np.testing.assert_array_equal(value.numpy(), whole[name], err_msg=name)
    batch = next(iter(tokens(6, 6)()))
    before = float(module.nats(batch).detach())
    assert before == float(pickle.loads(pickle.dumps(module)).nats(batch).detach())  # noqa: S301
    trainer = stock_trainer(max_steps=2)
    fitted(trainer, module)
    assert float(module.nats(batch).detach()) < before


def test_a_module_whose_experts_are_elsewhere_says_so(tmp_path: Path) -> None:
    for rank, said in enumerate(run_pooled(2, pickled_module, {}, tmp_path, 0)):
        held = [0, 1, 2] if rank == 0 else [3, 4, 5]
        assert said.startswith(f"this process holds experts {held} of 6 only: save a checkpoint")
