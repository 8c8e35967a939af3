"""Ranks that are forked or spawned off the user's process, as in notebooks: it has the trained model afterwards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from moe_lightning import ConfigurationError, ExpertParallelStrategy
from tests.distributed.harness import run_ranks
from tests.distributed.test_users_modules import Base, Options, tokens
from tests.distributed.training import make_trainer, quiet, quiet_trainer
from tests.parameters import slow

_LARGE = 400_000  # torch divides it among threads


class Built(Base):
    def __init__(self) -> None:
        pl.LightningModule.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "moe"):
            for name, part in Base().named_children():
                self.add_module(name, part)


class Mistaken(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ExpertParallelStrategy(replicas=0)


class Large(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert torch.ones(_LARGE).sum() == _LARGE
        return super().training_step(batch, batch_idx)


def result(trainer: pl.Trainer, module: Base, folder: Path | None) -> Any:
    trainer.fit(module, tokens(24, 6)())
    logged = sorted(trainer.callback_metrics)
    (found,) = trainer.validate(module, tokens(12, 4)(), verbose=False)
    if folder is None:
        return trainer.strategy.lightning_module_state_dict(), logged, found["val"]
    trainer.save_checkpoint(folder / "whole.ckpt")
    saved = torch.load(folder / "whole.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
    return saved, logged, found["val"]


def on_ranks(rank: int, world_size: int) -> Any:
    state, *others = result(make_trainer(rank, world_size, {}, max_steps=3), Base(), None)
    return {name: value.numpy() for name, value in state.items()}, *others


def from_here(rank: int, world_size: int, kind: type[Base], strategy: str | Options, folder: Path) -> Any:
    """In one process, which starts two ranks."""
    quiet()
    pl.seed_everything(7, verbose=False)
    chosen = strategy if isinstance(strategy, str) else ExpertParallelStrategy(**strategy)
    trainer = quiet_trainer(strategy=chosen, devices=2, max_steps=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if kind is not Base:
                trainer.fit(kind(), tokens(24, 6)())
                return [str(warning.message) for warning in caught]
            state, *others = result(trainer, kind(), folder)
        except ConfigurationError as error:
            return str(error)
    return {name: value.numpy() for name, value in state.items()}, *others


def from_threads(rank: int, world_size: int, folder: Path) -> Any:
    torch.set_num_threads(4)
    torch.ones(_LARGE)
    return from_here(rank, world_size, Large, "expert_parallel_fork", folder)


@pytest.mark.parametrize(
    "strategy",
    [
        slow("expert_parallel_notebook"),
        {"start_method": "fork", "dense": "fsdp"},
        slow("expert_parallel_spawn"),
        slow({"start_method": "forkserver", "dense": "zero1"}),
    ],
)
def test_the_starting_process_has_the_trained_model(strategy: str | Options, tmp_path: Path) -> None:
    ((state, logged, loss),) = run_ranks(1, from_here, Base, strategy, tmp_path)
    wanted, names, wanted_loss = run_ranks(2, on_ranks)[0]
    assert logged == names
    assert loss == pytest.approx(wanted_loss, abs=1e-6)
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(state[name], value, rtol=0, atol=1e-6, err_msg=name)


def test_what_is_built_on_the_ranks_only_is_named(tmp_path: Path) -> None:
    (told,) = run_ranks(1, from_here, Built, "expert_parallel_fork", tmp_path)
    assert any("trained tensors, such as embed.weight, have no place in this process's module" in one for one in told)


def test_forked_ranks_compute_though_the_starting_process_has_used_threads(tmp_path: Path) -> None:
    run_ranks(1, from_threads, tmp_path)


def test_a_mistake_on_a_rank_is_one_sentence(tmp_path: Path) -> None:
    (said,) = run_ranks(1, from_here, Mistaken, "expert_parallel_fork", tmp_path)
    assert said.startswith("replicas=0 of ExpertParallelStrategy must be")
    assert "\n" not in said


def test_ranks_that_were_started_start_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_RANK", "0")
    trainer = pl.Trainer(strategy="expert_parallel_spawn", accelerator="cpu", devices=2, logger=False, max_steps=1)
    with pytest.raises(ConfigurationError, match=r"start_method='spawn' starts the ranks itself.* drop start_method"):
        trainer.fit(Base(), tokens(12, 6)())
