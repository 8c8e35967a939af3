"""The LightningModule around the GPT: schedule, optimizer groups, what it saves."""

from __future__ import annotations

import itertools
import json
import math
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from moe_lightning import ConfigurationError, GPTConfig, GPTModule, OptimizerConfig
from moe_lightning.models.gpt_module import WarmupAndDecay
from moe_lightning.models.optimizers import parameter_groups
from moe_lightning.moe.router import RouterConfig
from tests.distributed.training import quiet_trainer

TINY: dict[str, Any] = {
    "vocab_size": 40,
    "context_length": 8,
    "num_layers": 2,
    "num_heads": 2,
    "d_model": 16,
    "num_experts": 4,
    "router": {"forced": {"kind": "zipf"}},
}


def built(**options: Any) -> GPTModule:
    module = GPTModule(TINY, options)
    module.configure_model()
    return module


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_the_schedule_rises_falls_and_ends(decay: Any) -> None:
    config = OptimizerConfig(warmup_steps=4, decay=decay, min_lr_ratio=0.2)
    factors = [config.factor(step, 24) for step in range(30)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    if decay == "constant":
        assert set(factors[4:]) == {1.0}
        return
    assert factors[24:] == pytest.approx([0.2] * 6), "the floor, also past the end"
    assert all(a >= b for a, b in itertools.pairwise(factors[4:]))
    half = 0.5 * (1 + math.cos(math.pi * 0.5)) if decay == "cosine" else 0.5
    assert factors[14] == pytest.approx(0.2 + 0.8 * half)


@pytest.mark.parametrize("total", [0, 1, 4])
def test_a_schedule_shorter_than_its_warm_up(total: int) -> None:
    config = OptimizerConfig(warmup_steps=4, min_lr_ratio=0.0)
    assert all(0.0 <= config.factor(step, total) <= 1.0 for step in range(10))
    assert OptimizerConfig(warmup_steps=0, decay="linear").factor(0, 10) == 1.0


class _Halved(GPTModule):
    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * 0.5


def test_a_subclass_may_have_a_loss_of_its_own() -> None:
    tokens = torch.arange(64).reshape(8, 8) % 40
    loader, found = DataLoader(TensorDataset(tokens, tokens), batch_size=4), []
    for kind in (GPTModule, _Halved):
        pl.seed_everything(1, verbose=False)
        trainer = quiet_trainer(max_steps=1, limit_val_batches=1, val_check_interval=1)
        trainer.fit(kind(TINY), loader, loader)
        found.append({name: float(trainer.callback_metrics[name]) for name in ("train/loss", "val/loss")})
    usual, halved = found
    assert halved["train/loss"] == pytest.approx(0.5 * usual["train/loss"])
    assert halved["val/loss"] < 0.6 * usual["val/loss"]


def test_vectors_do_not_decay() -> None:
    module = built()
    groups = parameter_groups(module, 0.1)
    names = {id(p): name for name, p in module.named_parameters()}
    decayed, rest = ({names[id(p)] for p in group["params"]} for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert not decayed & rest
    assert decayed | rest == set(names.values())
    assert all(name.rsplit(".")[-1] in ("bias", "b_up", "b_down") or "norm" in name for name in rest)
    assert not any(name.endswith(("bias", "b_up", "b_down")) for name in decayed)
    assert any("w_up" in name for name in decayed)


def test_frozen_parameters_are_left_out() -> None:
    module = built()
    module.model.token_embedding.requires_grad_(False)
    params = [p for group in parameter_groups(module, 0.1) for p in group["params"]]
    trained = [p for p in module.parameters() if p is not module.model.token_embedding.weight]
    assert {id(p) for p in params} == {id(p) for p in trained}


def test_the_optimizer_follows_its_config() -> None:
    module = built(lr=0.5, betas=[0.8, 0.7], eps=1e-5, weight_decay=0.3, warmup_steps=1)
    module._trainer = SimpleNamespace(estimated_stepping_batches=10)  # type: ignore[assignment]
    chosen: Any = module.configure_optimizers()
    optimizer, schedule = chosen["optimizer"], chosen["lr_scheduler"]["scheduler"]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["betas"] == (0.8, 0.7)
    assert optimizer.defaults["eps"] == 1e-5
    assert schedule.get_last_lr() == pytest.approx([0.25, 0.25])
    assert chosen["lr_scheduler"]["interval"] == "step"


def test_a_fused_optimizer_and_what_lightning_does_not_clip() -> None:
    module = built(fused=True, warmup_steps=0)
    trainer = SimpleNamespace(estimated_stepping_batches=10, precision="32-true", gradient_clip_val=1.0)
    module._trainer = trainer  # type: ignore[assignment]
    chosen: Any = module.configure_optimizers()
    assert all(group["fused"] for group in chosen["optimizer"].param_groups)
    trainer.precision = "bf16-mixed"
    with pytest.raises(ConfigurationError, match=r"does not clip \(gradient_clip_val=1.0\)"):
        module.configure_optimizers()


class Rates(pl.Callback):
    """Keeps the learning rate of every step, as a share of the peak."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"] / 1e-3)


def trained(steps: int, resumed: Path | None = None, save: Path | None = None, **options: Any) -> list[float]:
    """Train for this many steps in all; the rates of the steps that ran."""
    ids, rates = torch.randint(40, (64, 9)), Rates()
    module = GPTModule(TINY, {"lr": 1e-3, "warmup_steps": 2, **options})
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, callbacks=[rates])
    loader = DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=8)
    trainer.fit(module, loader, ckpt_path=resumed)
    if save is not None:
        trainer.save_checkpoint(save)
    return rates.seen


def told_of(told: list[warnings.WarningMessage], word: str) -> list[str]:
    return [str(warning.message) for warning in told if word in str(warning.message)]


@pytest.mark.parametrize("options", [{}, {"decay": "linear", "warmup_steps": 6}], ids=["cosine", "linear"])
def test_a_resumed_training_with_another_length(
    options: dict[str, Any], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    trained(4, save=tmp_path / "short.ckpt", **options)
    recwarn.clear()
    rates = trained(8, tmp_path / "short.ckpt", **options)
    (line,) = told_of(list(recwarn), "decays until step 8, not 4 as when the checkpoint was saved")
    whole = trained(8, **options)
    assert rates == pytest.approx(whole[4:], rel=1e-12)
    found = re.search(r"step 5 has (\S+) of the peak rate, in the former schedule (\S+)$", line)
    assert found is not None
    former = OptimizerConfig(**{"warmup_steps": 2, **options}).factor(4, 4)
    assert [float(share) for share in found.groups()] == pytest.approx([whole[4], former], rel=5e-3)


def test_a_resumed_training_of_the_same_length(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Nor does a constant rate care for the length."""
    trained(4, save=tmp_path / "short.ckpt", decay="constant")
    assert trained(8, tmp_path / "short.ckpt", decay="constant") == [1.0] * 4
    trained(4, save=tmp_path / "whole.ckpt")
    trained(4, tmp_path / "whole.ckpt")
    assert not told_of(list(recwarn), "decays until")


def scheduled(rates: list[float], total: int) -> tuple[torch.optim.Optimizer, WarmupAndDecay]:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates])
    return optimizer, WarmupAndDecay(optimizer, OptimizerConfig(warmup_steps=2, decay="linear", min_lr_ratio=0), total)


@pytest.mark.parametrize("rates", [[0.0, 0.1], [0.0]])
def test_a_rate_of_zero_resumes_with_another_length(rates: list[float]) -> None:
    optimizer, schedule = scheduled(rates, 10)
    for _ in range(6):
        optimizer.step()
        schedule.step()
    resumed, other = scheduled(rates, 6)
    told = pytest.warns(UserWarning, match=r"has 0 of the peak rate, in the former schedule 0\.5$")
    with told if any(rates) else nullcontext():
        other.load_state_dict(schedule.state_dict())
    assert [group["lr"] for group in resumed.param_groups] == [0.0] * len(rates)


def test_groups_that_are_added_follow_the_schedule_and_resume() -> None:
    optimizer, schedule = scheduled([0.1], 10)
    added = {"params": [nn.Parameter(torch.ones(2))], "lr": 0.02}
    for step in range(6):
        if step == 3:
            optimizer.add_param_group(dict(added))
        optimizer.step()
        schedule.step()
    expected = pytest.approx([0.05, 0.01])
    assert [group["lr"] for group in optimizer.param_groups] == schedule.get_last_lr() == expected
    resumed, other = scheduled([0.1], 10)
    resumed.add_param_group(dict(added))  # as Lightning does before it restores
    resumed.load_state_dict(optimizer.state_dict())
    other.load_state_dict(schedule.state_dict())
    assert [group["lr"] for group in resumed.param_groups] == expected
    for each in (optimizer, schedule, resumed, other):
        each.step()
    assert [group["lr"] for group in resumed.param_groups] == [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(("warmup", "is_told"), [(100, True), (3, True), (2, False)])
def test_a_warm_up_that_is_not_shorter_than_the_training(
    warmup: int, is_told: bool, recwarn: pytest.WarningsRecorder
) -> None:
    rates = trained(3, warmup_steps=warmup)
    assert (max(rates) < 1) == is_told
    told = told_of(list(recwarn), f"warmup_steps={warmup} is not shorter than the 3 steps of this training")
    assert len(told) == is_told
    assert all("optimizer.lr=0.001 is never reached: lower warmup_steps or train longer" in line for line in told)


@pytest.mark.parametrize("trial", [{"fast_dev_run": 2}, {"overfit_batches": 2}])
def test_a_trial_may_end_before_the_warm_up(trial: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    module = built()
    settings = {"estimated_stepping_batches": 2, "fast_dev_run": False, "overfit_batches": 0.0, "ckpt_path": None}
    module._trainer = SimpleNamespace(**settings | trial)  # type: ignore[assignment]
    module.configure_optimizers()
    assert not told_of(list(recwarn), "warmup_steps")


def test_hyperparameters_are_plain_and_rebuild_the_module() -> None:
    module = GPTModule(GPTConfig(**TINY), OptimizerConfig(lr=0.1))
    hyperparameters = json.loads(json.dumps(dict(module.hparams)))
    again = GPTModule(**hyperparameters)
    assert again.config == module.config
    assert again.optimizer_config == module.optimizer_config
    assert isinstance(again.config.router, RouterConfig)


def test_the_model_is_built_once() -> None:
    module = GPTModule(TINY)
    assert not list(module.parameters())
    module.configure_model()
    model = module.model
    module.configure_model()
    assert module.model is model


def test_prediction_is_the_likeliest_token() -> None:
    module, ids = GPTModule({**TINY, "router": {"top_k": 2}}).eval(), torch.randint(0, 40, (2, 8))  # not drawn anew
    module.configure_model()
    assert torch.equal(module.predict_step((ids, ids), 0), module(ids).argmax(dim=-1))
