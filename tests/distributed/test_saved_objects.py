"""Values of all kinds that users keep in hyper-parameters and states: what is saved can be resumed, or is named."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf

from moe_lightning import PartialExpertsCheckpoint
from moe_lightning.checkpoint.inspect import verify_all
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.strategies.checkpoints import Checkpoints
from tests.agents import agent_ahead
from tests.distributed.harness import run_pooled
from tests.distributed.test_hook_order import trainer_of
from tests.distributed.test_users_modules import Base, tokens
from tests.parameters import slow


class Color(Enum):
    RED = "red"


class Own:
    """An object of a user's."""


class Keeps(pl.Callback):
    def __init__(self, value: Any) -> None:
        self.value, self.loaded = value, None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["value"]


class Saved(Base):
    """Values that are not plain at every place of a checkpoint that a user can reach."""

    def __init__(self, lr: Any = 0.01, folder: Any = None, color: Any = None, config: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        optimizer.param_groups[0]["folder"] = Path("/tmp/x")
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float64(0.9) ** step)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {np.int64(1): np.arange(2)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.own = checkpoint["own"]


def saver(root: Path, kind: str) -> pl.Callback:
    if kind == "directory":
        return PartialExpertsCheckpoint(str(root), every_n_steps=1, k_snapshot=6)
    return ModelCheckpoint(root, every_n_train_steps=1, save_last=True)


def run(
    rank: int,
    world_size: int,
    root: Path,
    kind: str,
    module: Callable[[], Base],
    value: Any,
    steps: int,
    **options: Any,
) -> Any:
    keeps = Keeps(value(rank) if callable(value) else value)
    trainer = trainer_of(
        rank, world_size, {}, max_steps=steps, enable_checkpointing=True, callbacks=[keeps, saver(root, kind)]
    )
    own = module()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(own, tokens(24, 6)(), **options)
        except (CheckpointError, ConfigurationError) as error:
            return str(error)
    told = [str(warning.message) for warning in caught if "hold" in str(warning.message)]
    loaded, others = keeps.loaded, getattr(own, "own", {})
    if isinstance(loaded, dict) and "array" in loaded:
        loaded = loaded["array"].tolist(), np.random.RandomState(1).set_state(loaded["state"])
    return trainer.global_step, told, loaded, {name: value.tolist() for name, value in others.items()}


def plain_module() -> Base:
    return Saved(np.float64(0.01), Path("/tmp/x"), Color.RED, OmegaConf.create({"a": [1]}))


def ranks(size: int, root: Path, kind: str, *arguments: Any, **options: Any) -> list[Any]:
    agent = agent_ahead(root) if kind == "directory" else None
    found = run_pooled(size, partial(run, **options), root, kind, *arguments)
    if agent is not None and not isinstance(found[0], str):
        agent.join(60.0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [slow("directory"), "file"])
def test_what_becomes_plain_is_resumed(kind: str, tmp_path: Path) -> None:
    root, value = tmp_path / "checkpoints", {"array": np.arange(3.0), "state": np.random.RandomState(0).get_state()}
    for step, told, *_ in ranks(2, root, kind, plain_module, value, 2):
        assert (step, told) == (2, [])
    assert all(verdict.is_whole for verdict in verify_all(root))
    for step, told, loaded, own in ranks(2, root, kind, plain_module, value, 3, ckpt_path="last"):
        assert (step, told, loaded, own) == (3, [], ([0.0, 1.0, 2.0], None), {1: [0, 1]})


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_objects_are_named_at_the_first_save_and_read_where_the_user_says_so(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    ((step, told, *_),) = ranks(1, root, kind, Base, Own(), 2)
    assert step == 2
    assert len(told) == 1
    named = "the values callbacks['Keeps']['value'] (tests.distributed.test_saved_objects.Own) hold objects, so"
    assert told[0].startswith(named)
    if kind == "directory":
        assert all("holds more than tensors and plain values" in str(one.problem) for one in verify_all(root))
    (refused,) = ranks(1, root, kind, Base, Own(), 3, ckpt_path="last")
    assert "plain values (tests.distributed.test_saved_objects.Own), which are not loaded: leave these out" in refused
    assert "if you trust who wrote it, resume with fit(..., weights_only=False)" in refused
    ((step, _, loaded, _),) = ranks(1, root, kind, Base, Own(), 3, ckpt_path="last", weights_only=False)
    assert (step, type(loaded)) == (3, Own)


def lock_on_rank_zero(rank: int) -> Any:
    return threading.Lock() if rank == 0 else 1


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_what_rank_zero_cannot_save_ends_every_rank_with_its_sentence(kind: str, tmp_path: Path) -> None:
    ended = run_pooled(2, run, tmp_path / "checkpoints", kind, Base, lock_on_rank_zero, 2)
    assert ended[0] == ended[1]
    assert ended[0].startswith("callbacks['Keeps']['value'] is of class lock, which cannot be saved")


def test_an_elastic_run_refuses_at_every_save_what_a_joining_rank_would_not_read() -> None:
    worlds = SimpleNamespace(is_elastic=True, is_joined=True, present=World.single())
    checkpoints = Checkpoints(worlds, SimpleNamespace())  # type: ignore[arg-type]
    assert checkpoints.plain({"callbacks": {"Keeps": np.float64(1.0)}}) == {"callbacks": {"Keeps": 1.0}}
    for _ in range(2):  # a recovery saves again
        with pytest.raises(
            ConfigurationError, match=r"callbacks\['Keeps'\] \(.*Own\) hold objects, which a rank that joins"
        ):
            checkpoints.plain({"callbacks": {"Keeps": Own()}})


class Configured(Base):
    """A module whose hyper-parameters are a container of OmegaConf, or have one among them."""

    def __init__(self, config: Any, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters(*([config] if config.get("alone") else []))
        self.config = config


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "stock"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "argument"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_load_from_checkpoint_gives_a_module_its_container(alone: bool, is_ours: bool, tmp_path: Path) -> None:
    config = OmegaConf.create({"alone": alone, "model": {"dim": 8, "same": "${model.dim}"}, "layers": [{"k": 1}]})
    trainer = trainer_of(0, 1, {}, max_steps=1) if is_ours else pl.Trainer(max_steps=1, logger=False, devices=1)
    trainer.fit(Configured(config), tokens(4, 4)())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    for weights_only in (None, True, False) if is_ours else (False,):
        loaded = Configured.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only).config
        assert isinstance(loaded, DictConfig)
        assert (loaded.model.dim, loaded.model.same, loaded.layers[0].k) == (8, 8, 1)


@pytest.mark.parametrize("kind", ["directory", slow("file")])
def test_a_run_with_a_container_is_resumed(kind: str, tmp_path: Path) -> None:
    root, module = tmp_path / "checkpoints", partial(Configured, OmegaConf.create({"alone": True, "a": {"b": 1}}))
    value = OmegaConf.create({"x": ["${y}"], "y": 2})
    assert [(step, told) for step, told, *_ in ranks(2, root, kind, module, value, 2)] == [(2, [])] * 2
    assert all(verdict.is_whole for verdict in verify_all(root))
    for step, _, loaded, _ in ranks(2, root, kind, module, value, 3, ckpt_path="last"):
        assert (step, type(loaded), loaded.x[0]) == (3, DictConfig, 2)
