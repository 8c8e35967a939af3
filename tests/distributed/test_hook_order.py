"""Hooks see under our strategy what they see under stock DDP, in the same order."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe_lightning import ConfigurationError
from tests.distributed.harness import run_pooled
from tests.distributed.test_users_modules import Base, Options, Seen, tokens, trainer_of
from tests.distributed.training import make_trainer
from tests.parameters import slow


def fitted(trainer: pl.Trainer, module: pl.LightningModule, **options: Any) -> pl.LightningModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, tokens(24, 6)(), **options)
    return module


# ---------------------------------------------------------------------- restoring


class Resized(Base):
    """Replaces a parameter by one of the checkpoint's size, as models with a growing vocabulary do."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        rows, columns = checkpoint["state_dict"]["embed.weight"].shape
        self.embed = nn.Embedding(rows, columns)


class RebuiltExperts(Base):
    """Replaces its MoE layer."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.moe = Base().moe


class AtStart(pl.Callback):
    """Notes what a fit begins with."""

    def __init__(self) -> None:
        self.steps = 0
        self.found: tuple[int, float] | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.found = self.steps, float(pl_module.embed.weight.detach().sum())

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def resumed(rank: int, world_size: int, kind: type[Base], strategy: Options | None, file: str) -> Any:
    """The second epoch, of four steps, from a checkpoint of the first."""
    fitted(trainer_of(rank, world_size, strategy, max_epochs=1, callbacks=[AtStart()]), module := Base())
    trainer = module.trainer
    trainer.save_checkpoint(file)
    seen, start = Seen(), AtStart()
    trainer = trainer_of(rank, world_size, strategy, max_epochs=2, callbacks=[seen, start])
    module = kind()
    try:
        fitted(trainer, module, ckpt_path=file)
    except ConfigurationError as error:
        return str(error)
    state = trainer.strategy.lightning_module_state_dict()
    return {"seen": seen.values, "start": start.found, "state": {n: v.numpy() for n, v in state.items()}}


@pytest.mark.parametrize(
    ("kind", "world_size", "strategy"),
    [
        (Resized, 1, {}),
        slow(Resized, 2, {"replicas": 1}),
        (Resized, 2, {"dense": "zero1"}),
        (RebuiltExperts, 2, {"replicas": 1}),
    ],
)
def test_a_module_may_replace_parameters_when_it_is_restored(
    kind: type[Base], world_size: int, strategy: Options, tmp_path: Path
) -> None:
    (expected,) = run_pooled(1, resumed, kind, None, str(tmp_path / "stock.ckpt"))
    ranks = run_pooled(world_size, resumed, kind, strategy, str(tmp_path / "ours.ckpt"))
    for found in ranks:
        assert found["start"][0] == expected["start"][0] == 4
        assert found["start"][1] == pytest.approx(expected["start"][1], abs=1e-4)
        assert [name for name, _ in found["seen"]] == [name for name, _ in expected["seen"]]
        values, wanted = ([value for _, value in one["seen"]] for one in (found, expected))
        np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-5)
    for name, tensor in ranks[0]["state"].items():
        np.testing.assert_allclose(tensor, expected["state"][name], rtol=0, atol=5e-5, err_msg=name)


def test_parameters_that_are_cut_cannot_be_replaced(tmp_path: Path) -> None:
    for said in run_pooled(2, resumed, Resized, {"dense": "fsdp"}, str(tmp_path / "ours.ckpt")):
        assert "replaces the parameter embed.weight in on_load_checkpoint" in said
        assert "\n" not in said


# ---------------------------------------------------------------------- before the strategy is set up


class Planned(Base):
    """Asks for the number of steps as soon as hooks are called."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def setup(self, stage: str) -> None:
        self.asked.append(self.trainer.estimated_stepping_batches)

    def configure_model(self) -> None:
        self.asked.append(self.trainer.estimated_stepping_batches)


class Asking(pl.Callback):
    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.asked.append(trainer.estimated_stepping_batches)


def planned(rank: int, world_size: int, strategy: Options | None) -> Any:
    seen = Seen()
    trainer = trainer_of(rank, world_size, strategy, max_epochs=2, callbacks=[Asking(), seen])
    module = Planned()
    fitted(trainer, module)
    return module.asked, trainer.global_step, seen.values


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_number_of_steps_is_known_before_the_strategy_is_set_up(world_size: int) -> None:
    ((asked, steps, values),) = run_pooled(1, planned, None)
    assert asked == [8, 8, 8]
    for found in run_pooled(world_size, planned, {}):
        assert found[:2] == (asked, steps)
        np.testing.assert_allclose([v for _, v in found[2]], [v for _, v in values], rtol=0, atol=1e-5)


def saved_without_a_fit(rank: int, world_size: int, strategy: Options | None, file: str) -> list[str]:
    trainer = trainer_of(rank, world_size, strategy)
    trainer.strategy.connect(module := Base())
    trainer.save_checkpoint(file)
    saved = torch.load(file, weights_only=True)
    for name, value in module.state_dict().items():
        assert torch.equal(saved["state_dict"][name], value), name
    return sorted(saved)


def test_a_module_that_is_only_connected_is_saved(tmp_path: Path) -> None:
    (expected,) = run_pooled(1, saved_without_a_fit, None, str(tmp_path / "stock.ckpt"))
    assert run_pooled(1, saved_without_a_fit, {}, str(tmp_path / "ours.ckpt")) == [expected]


def saved_by_another_trainer(rank: int, world_size: int, folder: Path, most_bytes: int) -> Any:
    from moe_lightning.strategies import expert_parallel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_parallel, "gather_limit", lambda _: most_bytes)
        trainer = make_trainer(rank, world_size, {}, max_steps=2)
        module = fitted(trainer, Base())
        whole = trainer.strategy.lightning_module_state_dict()
        if rank:
            return None
        other = make_trainer(0, 1)
        other.strategy.connect(module)
        try:
            other.save_checkpoint(folder / "one.ckpt")
        except ConfigurationError as error:
            return str(error)
    saved: dict[str, Tensor] = torch.load(folder / "one.ckpt", weights_only=True)["state_dict"]
    return all(torch.equal(saved[name], value) for name, value in whole.items())


@pytest.mark.parametrize(("most_bytes", "expected"), [(1 << 30, True), (0, "holds experts [0, 1, 2] of 6 only: save")])
def test_one_rank_saves_the_whole_model_or_says_why_not(tmp_path: Path, most_bytes: int, expected: object) -> None:
    found, _ = run_pooled(2, saved_by_another_trainer, tmp_path, most_bytes)
    assert found is True if expected is True else str(expected) in found
