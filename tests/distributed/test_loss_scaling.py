"""precision="16-mixed": one scale on all ranks, updates that all skip together, replicas that stay equal to the bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, MoELayer, OptimizerConfig
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.compat.private_torch import SharedScaler
from moe_lightning.errors import ConfigurationError
from tests.distributed.harness import run_pooled
from tests.distributed.training import TINY, OwnModule, RandomTokens, make_trainer, stepped
from tests.parameters import slow

STEPS = 6
SKIPPED = [True, False, False, False, True, False]


def scaler(**options: Any) -> GradScaler:
    """A scale at which half precision overflows, then one at which it does not, and three updates later the first."""
    return GradScaler(
        "cpu",
        **{
            "init_scale": 2.0**40,
            "backoff_factor": 2.0**-30,
            "growth_factor": 2.0**30,
            "growth_interval": 3,
            **options,
        },
    )


def scaling(known: GradScaler) -> dict[str, Any]:
    """Options of a Trainer that scales losses on the CPU, where Lightning's precision="16-mixed" means bfloat16."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", known)]}


class Overflowing(OwnModule):
    """Half precision overflows at large scales; the selection bias follows every update that is made."""

    def __init__(
        self, *, only_expert: int | None = None, fused: bool = False, manual: bool = False, clip: float | None = None
    ) -> None:
        super().__init__()
        self.clip = clip
        self.moe = MoELayer(32, 48, 6, router={"top_k": 2, "bias_update_rate": 0.01})
        self.only_expert, self.fused, self.automatic_optimization = only_expert, fused, not manual

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        slots = self.moe.experts.slot_experts
        if self.trainer.global_step == 1 and self.only_expert in slots:  # a gradient that one rank alone has
            weight = next(iter(self.moe.experts.stacked_parameters().values()))
            loss = loss + weight[slots.index(self.only_expert)].sum() * 1e38
        return stepped(self, loss, self.clip)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=self.fused)


class Watch(pl.Callback):
    """Scale, bias and weights after each step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.skipped: list[bool] = []
        self.unchanged: list[bool] = []
        self._before: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.scales.append(float(trainer.precision_plugin.scaler.get_scale()))  # type: ignore[attr-defined]
        self.skipped.append(trainer.strategy.update.is_skipped)  # type: ignore[attr-defined]
        after = module.state_dict()
        self.unchanged.append(all(torch.equal(after[name], tensor) for name, tensor in self._before.items()))


def train(rank: int, world_size: int, options: dict[str, Any], kinds: dict[str, Any], **known: Any) -> dict[str, Any]:
    watch = Watch()
    trainer = make_trainer(
        rank, world_size, {"check_state_every": 1, **options}, callbacks=[watch],
        **{"max_steps": STEPS, **scaling(scaler()), **known},
    )  # fmt: skip
    module = Overflowing(**kinds)
    trainer.fit(module, DataLoader(RandomTokens(120), batch_size=12))
    whole = trainer.strategy.lightning_module_state_dict()
    return {**{name: getattr(watch, name) for name in ("scales", "skipped", "unchanged")}, "whole": whole}


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, tensor in one["whole"].items():
        torch.testing.assert_close(other["whole"][name], tensor, rtol=2e-2, atol=3e-3, msg=name)


@pytest.mark.parametrize(
    ("ranks", "strategy", "kinds"),
    [
        slow(2, {"replicas": 2}, {}),
        slow(4, {"replicas": 2}, {}),
        (2, {"dense": "zero1"}, {}),
        slow(2, {"dense": "fsdp"}, {}),
        slow(2, {"offload_optimizer": True}, {}),
        slow(2, {"stop_on_nan": "end"}, {}),
        slow(2, {}, {"fused": True}),
        slow(2, {}, {"manual": True}),
    ],
)
def test_all_ranks_skip_the_same_updates(ranks: int, strategy: dict[str, Any], kinds: dict[str, Any]) -> None:
    """Nothing of the model changes in a skipped step: no weight, no selection bias."""
    known = {"gradient_clip_val": None if kinds else 0.1}
    (alone,) = run_pooled(1, partial(train, **known), {}, kinds)
    found = run_pooled(ranks, partial(train, **known), strategy, kinds)
    assert alone["skipped"] == alone["unchanged"] == SKIPPED
    for result in found:
        assert result["skipped"] == result["unchanged"] == SKIPPED
        assert result["scales"] == alone["scales"]
    assert_close(alone, found[0])


@pytest.mark.parametrize("stop", ["end", "skip"])
def test_overflows_that_are_clipped_by_hand_are_no_damage(stop: str) -> None:
    (found,) = run_pooled(1, train, {"stop_on_nan": stop}, {"manual": True, "clip": 0.1})
    assert found["skipped"] == found["unchanged"] == SKIPPED


def test_an_overflow_of_one_rank_is_one_of_all() -> None:
    found = run_pooled(
        2, partial(train, **scaling(scaler(init_scale=16.0, growth_interval=100))), {}, {"only_expert": 0}
    )
    for result in found:
        assert result["skipped"] == result["unchanged"] == [False, True, *[False] * (STEPS - 2)]
        assert result["scales"][:2] == [16.0, 2.0**-26]


def save(rank: int, world_size: int, folder: str) -> list[float]:
    saver = PartialExpertsCheckpoint(f"{folder}/steps", every_n_steps=3)
    watch = Watch()
    options = {"max_steps": 3, "enable_checkpointing": True, **scaling(scaler())}
    trainer = make_trainer(rank, world_size, callbacks=[watch, saver], **options)
    trainer.fit(Overflowing(), DataLoader(RandomTokens(120), batch_size=12))
    trainer.save_checkpoint(f"{folder}/one.ckpt")
    return watch.scales


def resume(rank: int, world_size: int, source: str) -> list[float]:
    watch = Watch()
    known = scaler(init_scale=1.0, growth_interval=77)
    trainer = make_trainer(rank, world_size, callbacks=[watch], max_steps=STEPS, **scaling(known))
    trainer.fit(Overflowing(), DataLoader(RandomTokens(120), batch_size=12), ckpt_path=source)
    assert trainer.precision_plugin.scaler is known  # type: ignore[attr-defined]
    assert known.get_scale() == watch.scales[-1]
    return watch.scales


def test_the_scale_is_saved_and_restored_on_other_ranks(tmp_path: Path) -> None:
    (quiet,) = run_pooled(1, train, {}, {})
    assert run_pooled(2, save, str(tmp_path)) == [quiet["scales"][:3]] * 2
    assert run_pooled(1, resume, str(tmp_path / "one.ckpt")) == [quiet["scales"][3:]]
    assert run_pooled(2, resume, str(tmp_path / "steps")) == [quiet["scales"][3:]] * 2


def staged(rank: int, world_size: int) -> list[Any]:
    watch = Watch()
    strategy = {"mesh": {"pp": world_size}} if world_size > 1 else {}
    options = {"max_steps": STEPS, "gradient_clip_val": 1.0, **scaling(scaler())}
    trainer = make_trainer(rank, world_size, strategy, callbacks=[watch], **options)
    trainer.fit(
        GPTModule({**TINY, "tie_embeddings": False}, OptimizerConfig(lr=3e-3)),
        DataLoader(RandomTokens(120), batch_size=12),
    )
    return [watch.skipped, watch.scales, float(trainer.callback_metrics["train/loss"])]


@pytest.mark.slow
def test_stages_of_a_pipeline_skip_together() -> None:
    ((skipped, scales, loss),) = run_pooled(1, staged)
    found = run_pooled(2, staged)
    assert skipped == SKIPPED
    assert [one[:2] for one in found] == [[SKIPPED, scales]] * 2
    assert found[0][2] == pytest.approx(loss, rel=2e-3)


class Another(GradScaler):
    """A scaler class of a user's own."""


def refused(rank: int, world_size: int) -> str:
    trainer = make_trainer(rank, world_size, max_steps=1, **scaling(Another("cpu")))
    with pytest.raises(ConfigurationError) as error:
        trainer.fit(Overflowing(), DataLoader(RandomTokens(), batch_size=12))
    return str(error.value)


def test_a_scaler_of_ones_own_is_refused() -> None:
    (said,) = run_pooled(1, refused)
    assert said.endswith("give MixedPrecision a torch.amp.GradScaler")


def test_gradients_of_half_precision_are_not_divided() -> None:
    with pytest.raises(ValueError, match="FP16"):
        SharedScaler.divide([torch.ones(2).half()], torch.ones(()), torch.zeros(()))
