"""Habits of users that make no difference on one rank, and of which several ranks must know."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.data import DataLoader, Subset, random_split

from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.state_check import StateCheck
from tests.distributed.harness import run_pooled
from tests.distributed.training import OwnModule, RandomTokens, make_trainer
from tests.parameters import slow


def data_of(kind: str, rank: int, world_size: int) -> Any:
    data, generator = RandomTokens(8), torch.Generator().manual_seed(rank if kind == "split" else 0)
    if kind == "subset":
        return Subset(data, range(rank, 8, world_size))
    if kind == "length":
        return RandomTokens(8 + 4 * rank)
    return Subset(random_split(data, [4, 4], generator)[0], range(4))


def fit(rank: int, world_size: int, kind: str) -> str | int:
    trainer = make_trainer(rank, world_size, max_epochs=1, max_steps=-1)
    try:
        trainer.fit(OwnModule(), DataLoader(data_of(kind, rank, world_size), batch_size=4))
    except ConfigurationError as error:
        return str(error)
    return trainer.global_step


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            "subset",
            "rank 0 has 4 samples of Subset and rank 1 4 of Subset, or other content or indices: give every rank the",
        ),
        ("split", "rank 0 has 4 samples of Subset and rank 1 4 of Subset, or other content or indices"),
        ("length", "rank 0 has 8 samples of RandomTokens and rank 1 12 of RandomTokens"),
    ],
)
def test_other_data_on_a_rank_are_refused(kind: str, sentence: str) -> None:
    for message in run_pooled(2, fit, kind):
        assert sentence in str(message)


def test_a_split_that_all_ranks_have_is_trained_on() -> None:
    assert run_pooled(2, fit, "same") == [1, 1]


class OwnRates(OwnModule):
    """Its scheduler follows a value of each rank."""

    def on_train_epoch_end(self) -> None:
        self.log("own", float(self.global_rank * self.current_epoch), sync_dist=False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "own"}}


class ScheduleFree(torch.optim.SGD):
    def eval(self) -> None:
        """Exchange weights and averages."""


class Averaged(OwnModule):
    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters(), lr=0.1)


def failed(rank: int, world_size: int, module: type[OwnModule], strategy: dict[str, Any]) -> str:
    trainer = make_trainer(rank, world_size, strategy, max_epochs=5, max_steps=-1)
    try:
        trainer.fit(module(), DataLoader(RandomTokens(16), batch_size=8))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_learning_rates_that_differ_are_named() -> None:
    for message in run_pooled(2, failed, OwnRates, {"check_state_every": 1}):
        assert message.startswith("ConfigurationError: the learning rate is [")
        assert "log that with sync_dist=True" in message


@pytest.mark.parametrize("group", [{"lr": None}, {}])
def test_optimizers_without_a_rate_have_none_to_compare(group: dict[str, Any]) -> None:
    state = MagicMock(optimizers=[MagicMock(param_groups=[group])])
    StateCheck(MagicMock(present=MagicMock(size=1)), state, every=1)._require_same_rates()


@pytest.mark.parametrize("dense", ["fsdp", slow("zero1")])
def test_optimizers_that_exchange_weights_need_all_states(dense: str) -> None:
    for message in run_pooled(2, failed, Averaged, {"dense": dense}):
        assert message.startswith("ConfigurationError: ScheduleFree exchanges weights by its states")
    assert run_pooled(2, failed, Averaged, {}) == ["trained"] * 2
