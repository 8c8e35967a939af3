"""Options and files that stock Lightning takes."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loops import training_epoch_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moe_lightning.errors import CheckpointError, ConfigurationError
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.test_hook_order import fitted, trainer_of
from tests.distributed.test_users_modules import Base, Options, Seen, tokens
from tests.distributed.training import RandomTokens
from tests.parameters import slow


class Dense(pl.LightningModule):
    """A user's module without an MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(64, 32), nn.Linear(32, 64)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.out(self.embed(x).relu()).flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Losses(pl.Callback):
    """Of every step, this rank's."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


# ---------------------------------------------------------------------- options


def compiled(rank: int, world_size: int, strategy: Options | None) -> Any:
    losses = Losses()
    trainer = trainer_of(rank, world_size, strategy, max_steps=4, callbacks=[losses])
    fitted(trainer, torch.compile(Dense(), backend="eager"))  # type: ignore[arg-type]
    state = trainer.strategy.lightning_module_state_dict()
    return losses.values, {name: value.numpy() for name, value in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_a_compiled_module_without_experts_trains(world_size: int) -> None:
    ((losses, state),) = run_ranks(1, compiled, None)
    ranks = run_ranks(world_size, compiled, {})
    np.testing.assert_allclose(np.mean([found for found, _ in ranks], axis=0), losses, rtol=0, atol=1e-5)
    for name, value in ranks[0][1].items():
        np.testing.assert_allclose(value, state[name], rtol=0, atol=1e-5)


def in_half(rank: int, world_size: int, strategy: Options | None) -> Any:
    seen = Seen()
    trainer = trainer_of(rank, world_size, strategy, max_steps=6, precision="16-true", callbacks=[seen])
    module = fitted(trainer, Halved())
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float16}
    return [value for _, value in seen.values]


class Halved(Base):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_weights_in_float16_train() -> None:
    (expected,) = run_pooled(1, in_half, None)
    assert run_pooled(1, in_half, {}) == [expected]
    for found in run_pooled(2, in_half, {}):
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.02)


def with_unused(rank: int, world_size: int) -> str:
    class Unused(Base):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(3, 3)

    try:
        fitted(trainer_of(rank, world_size, {}, max_steps=3), Unused())
    except ConfigurationError as error:
        return str(error)
    return "trained"


def test_advice_names_our_strategy() -> None:
    for said in run_pooled(2, with_unused):
        assert "ExpertParallelStrategy(find_unused_parameters=True)" in said
        assert "DDPStrategy" not in said.replace("ExpertParallelStrategy", "")


# ---------------------------------------------------------------------- files


class Anything:
    """An object of a user's, equal to others of its kind."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything)

    __hash__ = None  # type: ignore[assignment]


class Configured(Base):
    def __init__(self, size: int = 3, anything: object = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def missing(rank: int, world_size: int, path: Path) -> Any:
    try:
        fitted(trainer_of(rank, world_size, {}, max_steps=1), Base(), ckpt_path=str(path))
    except FileNotFoundError as error:
        return str(error), isinstance(error, CheckpointError)


@pytest.mark.parametrize("name", ["none.ckpt", "none"])
def test_a_missing_checkpoint_is_a_missing_file(name: str, tmp_path: Path) -> None:
    for said in run_pooled(2, missing, tmp_path / name):
        cure = "give the path of a .ckpt file or of a directory of checkpoints"
        assert said == (f"the checkpoint {tmp_path / name} does not exist: {cure}", True)


def with_objects(rank: int, world_size: int, path: Path, weights_only: bool | None) -> Any:
    trainer = trainer_of(rank, world_size, {}, max_steps=2)
    fitted(trainer, Configured(size=4, anything=Anything()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.save_checkpoint(path)
        trainer.save_checkpoint(path)
    told = [str(warning.message) for warning in caught if "hyper-parameters" in str(warning.message)]
    trainer = trainer_of(rank, world_size, {}, max_steps=4)
    try:
        fitted(trainer, module := Configured(size=4, anything=Anything()), ckpt_path=path, weights_only=weights_only)
    except CheckpointError as error:
        return told, str(error)
    validated = trainer.validate(module, tokens(6, 6)(), ckpt_path=path, weights_only=weights_only, verbose=False)
    return told, (trainer.global_step, len(validated))


@pytest.mark.parametrize(("world_size", "weights_only"), [(1, False), (2, False), (2, None), (1, True)])
def test_objects_are_unpickled_when_the_user_says_so(
    world_size: int, weights_only: bool | None, tmp_path: Path
) -> None:
    (told, outcome), *others = run_pooled(world_size, with_objects, tmp_path / "one.ckpt", weights_only)
    assert len(told) == 1
    assert told[0].startswith("the values hyper_parameters['anything'] (")
    for found in (outcome, *(other for _, other in others)):
        if weights_only is False:
            assert found == (4, 1)
        else:
            assert "if you trust who wrote it, resume with fit(..., weights_only=False)" in found
            assert "\n" not in found


def test_plain_hyper_parameters_bring_no_warning(tmp_path: Path) -> None:
    trainer = trainer_of(0, 1, {})
    trainer.strategy.connect(Configured(size=4, anything=[1, 2.0, "three", {"four": None}]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.save_checkpoint(tmp_path / "one.ckpt")


class Validated(Dense):
    """Keeps the steps before which it was validated."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def on_validation_start(self) -> None:
        self.steps.append(self.global_step)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx), sync_dist=True)


def validated_by_time(rank: int, world_size: int) -> list[int]:
    """The clock of the last rank is an hour ahead in one step."""
    trainer = trainer_of(rank, world_size, {}, max_steps=4, val_check_interval="00:00:30:00")
    is_ahead = lambda: rank == world_size - 1 and trainer.global_step == 2  # noqa: E731
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * is_ahead())
    module = Validated()
    with mock.patch.object(training_epoch_loop, "time", clock):
        trainer.fit(module, DataLoader(RandomTokens(), batch_size=4), DataLoader(RandomTokens(5), batch_size=4))
    return module.steps


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_validation_is_due_by_the_clock_of_any_rank(world_size: int) -> None:
    assert run_pooled(world_size, validated_by_time) == [[2]] * world_size
