"""Parameter groups that callbacks add during training, as Lightning's finetuning callbacks do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from moe_lightning import ConfigurationError, PartialExpertsCheckpoint
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.compat import private_torch
from tests.distributed.harness import RankFailure, run_pooled
from tests.distributed.test_hook_order import fitted, trainer_of
from tests.distributed.test_users_modules import Base, Options, Seen
from tests.distributed.training import make_trainer
from tests.parameters import slow


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        own = Base()
        self.embed, self.moe = own.embed, own.moe

    def forward(self, ids: Tensor) -> Tensor:
        h: Tensor = self.embed(ids)
        return h + self.moe(h)


class Tuned(Base):
    """A head that is trained from the beginning, and a backbone that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        del self.embed, self.moe
        self.backbone = Backbone()

    def nats(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.out(self.backbone(x)).flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-3)


class Unfreezing(pl.Callback):
    """Adds a group in the middle of an epoch."""

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.backbone.requires_grad_(False)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            pl_module.backbone.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.backbone.parameters())})


class HeadOnly(Tuned):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.out.parameters(), lr=3e-3)


def tuned(rank: int, world_size: int, strategy: Options | None, kind: str, file: str) -> Any:
    """Three epochs of four steps, the third one from a checkpoint of the others."""
    seen = Seen()

    def part(epochs: int, **options: Any) -> pl.Trainer:
        is_early = kind == "backbone"
        callback = BackboneFinetuning(1, train_bn=False, verbose=False) if is_early else Unfreezing()
        own = {"max_epochs": epochs, "gradient_clip_val": 0.5, "callbacks": [callback, seen]}
        trainer = trainer_of(rank, world_size, strategy, **own)
        fitted(trainer, Tuned() if is_early else HeadOnly(), **options)
        return trainer

    try:
        trainer = part(2)
        trainer.save_checkpoint(file)
        if kind == "backbone":
            trainer = part(3, ckpt_path=file)
            trainer.save_checkpoint(file)
    except ConfigurationError as error:
        return str(error)
    state = trainer.strategy.lightning_module_state_dict()
    groups = [len(group["params"]) for group in trainer.optimizers[0].param_groups]
    return {"seen": seen.values, "groups": groups, "state": {name: v.numpy() for name, v in state.items()}}


@pytest.mark.parametrize(
    ("kind", "world_size", "strategy"),
    [
        ("backbone", 1, {"dense": "zero1"}),
        slow("backbone", 2, {}),
        slow("backbone", 3, {"replicas": 2}),
        ("middle", 2, {}),
    ],
)
def test_added_groups_train_and_are_saved(kind: str, world_size: int, strategy: Options, tmp_path: Path) -> None:
    (expected,) = run_pooled(1, tuned, None, kind, str(tmp_path / "stock.ckpt"))
    ranks = run_pooled(world_size, tuned, strategy, kind, str(tmp_path / "ours.ckpt"))
    for found in ranks:
        assert found["groups"] == expected["groups"]
        values, wanted = ([value for _, value in one["seen"]] for one in (found, expected))
        np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-5)
    for name, tensor in ranks[0]["state"].items():
        np.testing.assert_allclose(tensor, expected["state"][name], rtol=0, atol=5e-5, err_msg=name)
    ours, theirs = (torch.load(tmp_path / f"{who}.ckpt", weights_only=True) for who in ("ours", "stock"))
    mine, others = ours["optimizer_states"][0], theirs["optimizer_states"][0]
    assert mine["param_groups"] == others["param_groups"]
    assert mine["state"].keys() == others["state"].keys()
    for number, state in others["state"].items():
        for name, value in state.items():
            np.testing.assert_allclose(mine["state"][number][name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dense", ["zero1", "fsdp"])
@pytest.mark.parametrize("kind", ["backbone", "middle"])
def test_groups_that_are_dealt_out_cannot_grow(kind: str, dense: str, tmp_path: Path) -> None:
    for said in run_pooled(2, tuned, {"dense": dense}, kind, str(tmp_path / "ours.ckpt")):
        assert "groups cannot be added during training under dense=zero1, fsdp or hsdp" in said
        assert "\n" not in said


class Impatient(PartialExpertsCheckpoint):
    """Waits long for the checkpoint at the end only."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._timeout_s = 60.0
        super().on_train_end(trainer, pl_module)


def saved_in_directories(rank: int, world_size: int, folder: str, timeout_s: float) -> Any:
    """Two epochs of four steps, a checkpoint after every second step; the backbone is trained in the second one."""
    sizes = {"every_n_steps": 2, "k_snapshot": 6, "k_persist": 6, "keep_last": 9}
    callback = Impatient(folder, timeout_s=timeout_s, **sizes)  # type: ignore[arg-type]
    trainer = make_trainer(
        rank,
        world_size,
        {},
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[BackboneFinetuning(1, train_bn=False), callback],
    )
    module = fitted(trainer, Tuned())
    moments = trainer.optimizers[0].state[module.backbone.embed.weight]  # type: ignore[union-attr, index]
    return moments["exp_avg"].numpy()


@pytest.mark.parametrize("timeout_s", [60.0, 1e-3])
def test_a_directory_holds_the_states_of_what_is_unfrozen(timeout_s: float, tmp_path: Path) -> None:
    """Also where storage is too slow for the checkpoint before."""
    moments, _ = run_pooled(2, saved_in_directories, str(tmp_path), timeout_s)
    saved, name = Checkpoint(tmp_path / "step-00000008"), "dense/backbone.embed.weight/exp_avg"
    assert name in saved.shapes()
    np.testing.assert_array_equal(saved.read(name).numpy(), moments)


class LateStates(torch.optim.SGD):
    """Makes a further state in its third update."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.updates += 1
        if self.updates == 3:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["late"] = torch.full_like(parameter, 3.0)
        return result


class LateModule(Tuned):
    """Everything is in the optimizer from the beginning; the backbone is frozen up to the third step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_train_batch_start(self, *_: Any) -> None:
        if self.kind == "frozen":
            self.backbone.requires_grad_(self.trainer.global_step >= 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        make = LateStates if self.kind == "late" else torch.optim.AdamW
        return make(self.parameters(), lr=3e-3)


class CountedSaves(PartialExpertsCheckpoint):
    """Notes how many collectives each checkpoint begins."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.counts: list[int] = []

    def save(self, trainer: pl.Trainer, *args: Any, **options: Any) -> None:
        groups = trainer.strategy.world.all_groups  # type: ignore[attr-defined]
        before = sum(map(private_torch.num_collectives, groups))
        super().save(trainer, *args, **options)
        self.counts.append(sum(map(private_torch.num_collectives, groups)) - before)


def saved_often(rank: int, world_size: int, folder: str, kind: str, dense: str) -> list[int]:
    callback = CountedSaves(folder, every_n_steps=1, k_snapshot=6, keep_last=9, save_on_train_end=False)
    options = {"max_steps": 6, "enable_checkpointing": True, "callbacks": [callback]}
    strategy = {"dense": dense, "find_unused_parameters": kind == "frozen", "check_state_every": 0}  # it would ask, too
    fitted(make_trainer(rank, world_size, strategy, **options), LateModule(kind))
    return callback.counts


@pytest.mark.parametrize(
    ("kind", "dense"), [("plain", "ddp"), ("plain", "zero1"), ("frozen", "ddp"), ("frozen", "zero1"), ("late", "ddp")]
)
def test_states_that_are_made_later_are_saved_and_ranks_ask_only_where_some_may_be(
    kind: str, dense: str, tmp_path: Path
) -> None:
    first, second = run_pooled(2, saved_often, str(tmp_path), kind, dense)
    assert first == second
    saved, scope = Checkpoint(tmp_path / "step-00000006").shapes(), "late" if kind == "late" else "exp_avg"
    assert {name for name in saved if name.endswith(f"backbone.embed.weight/{scope}")}
    assert {name for name in saved if f"/{scope}/" in name}
    if kind == "late":
        assert all(first)
    else:
        assert first[-2:] == [0, 0]


class Switch(pl.Callback):
    """Replaces the optimizer between two steps."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.05)]


def switched(rank: int, world_size: int) -> None:
    fitted(trainer_of(rank, world_size, {}, max_epochs=2, callbacks=[Switch()]), Tuned())


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_that_replaces_another_is_refused(ranks: int) -> None:
    with pytest.raises(RankFailure, match=r"trainer\.optimizers were replaced during a fit: change the options"):
        run_pooled(ranks, switched)
