"""What users do in their modules, under dense=fsdp: as on one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moe_lightning import auxiliary_loss
from tests.distributed.harness import RankFailure, run_pooled
from tests.distributed.same_training import TOLERANCE
from tests.distributed.training import OwnModule, RandomTokens, Recorder, make_trainer, train
from tests.parameters import slow

FSDP = {"dense": "fsdp"}


class Blocks(OwnModule):
    """Two blocks before the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def block(self) -> nn.Module:
        return nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.embed(x))
        logits: Tensor = self.out(h + self.moe(h))
        return logits

    def middle(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + block(h)
        return h

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("train/loss", loss, sync_dist=True)
        return loss + auxiliary_loss(self)


class StepWrappedInFit(Blocks):
    def on_fit_start(self) -> None:
        own = self.training_step

        def halved(batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return own(batch, batch_idx) / 2

        self.training_step = halved  # type: ignore[method-assign]


class ChangesOutputsInPlace(Blocks):
    def middle(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = nn.functional.relu_(block(h))
        return h


class LeavesTheExpertsOut(Blocks):
    """In every other step, in which they rest as on one rank: no decay moves them, and no moment."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.embed(x))
        logits: Tensor = self.out(h if self.global_step % 2 else h + self.moe(h))
        return logits


class CallsABlockTwice(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])


class HasATransposedWeight(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(32, 32).t() / 10)

    def middle(self, h: Tensor) -> Tensor:
        return super().middle(h) + h @ self.mixing


class DropsABuffer(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("start", torch.ones(3))
        self.register_buffer("mean", torch.zeros(32))

    def middle(self, h: Tensor) -> Tensor:
        self.start = None
        self.mean = 0.9 * self.mean + self.trainer.global_step
        return super().middle(h) + self.mean


class UsesAdagrad(Blocks):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=3e-2)


class FreezesInTurn(Blocks):
    """In its step, by the modules' own parameters, which are gathered there."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        for place, part in enumerate((self.embed, self.blocks, self.moe, self.out)):
            part.requires_grad_((place < 2) == (batch_idx % 2 == 0))
        return super().training_step(batch, batch_idx)


class FreezesOnce(Blocks):
    """In its step and for good; the head is unfrozen so."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx in (0, 2):
            self.embed.requires_grad_(batch_idx == 0)
            self.out.requires_grad_(batch_idx == 2)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "module",
    [
        slow(StepWrappedInFit),
        ChangesOutputsInPlace,
        LeavesTheExpertsOut,
        slow(CallsABlockTwice),
        HasATransposedWeight,
        slow(DropsABuffer),
        slow(UsesAdagrad),
        FreezesInTurn,
        FreezesOnce,
    ],
)
def test_it_trains_as_on_one_rank(module: type[pl.LightningModule]) -> None:
    options: dict[str, Any] = {"own_module": module, "steps": 4, "trainer": {"gradient_clip_val": 1.0}}
    (alone,) = run_pooled(1, partial(train, **options))
    for result in run_pooled(2, partial(train, strategy=FSDP, **options)):
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=0, atol=TOLERANCE)


class Validated(Blocks):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten()))


def test_a_validation_inside_of_a_step_keeps_its_gradients() -> None:
    """They wait for those of the other micro-batches where a unit is gathered, and units are resharded after it."""
    trainer = {"accumulate_grad_batches": 2, "val_check_interval": 3}
    options: dict[str, Any] = {"own_module": Validated, "steps": 4, "trainer": trainer, "validate": True}
    (alone,) = run_pooled(1, partial(train, **options))
    for result in run_pooled(2, partial(train, strategy=FSDP, **options)):
        assert result["validations"]
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------------- mistakes


class UsesWeightsElsewhere(Blocks):
    def middle(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, nn.Linear)
            h = h + nn.functional.linear(h, block.weight)
        return h


def test_weights_used_outside_of_their_unit_are_explained() -> None:
    with pytest.raises(RankFailure, match="use its weights nowhere else, or use dense=zero1"):
        run_pooled(2, partial(train, own_module=UsesWeightsElsewhere, strategy=FSDP, steps=1))


class FailsOnce(Blocks):
    """In the middle of the third step."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def middle(self, h: Tensor) -> Tensor:
        h = super().middle(h)
        if self.trainer.global_step == 2 and self.place == "forward":
            self.fail()
        if self.trainer.global_step == 2 and self.place == "backward":
            h.register_hook(self.fail)
        return h

    def fail(self, *_: Any) -> None:
        self.place = ""
        raise ZeroDivisionError


def fail_and_go_on(rank: int, world_size: int, *, place: str, strategy: dict[str, Any]) -> list[float]:
    module, recorder, loader = FailsOnce(place), Recorder(), DataLoader(RandomTokens(), batch_size=12)
    with pytest.raises(ZeroDivisionError):
        make_trainer(rank, world_size, strategy, max_steps=4).fit(module, loader)
    make_trainer(rank, world_size, strategy, max_steps=3, callbacks=[recorder]).fit(module, loader)
    return recorder.losses


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_module_trains_on_after_an_error(place: str) -> None:
    alone, *ranks = [
        losses
        for size, strategy in ((1, {}), (2, FSDP))
        for losses in run_pooled(size, partial(fail_and_go_on, place=place, strategy=strategy))
    ]
    for losses in ranks:
        assert losses == pytest.approx(alone, abs=TOLERANCE)
