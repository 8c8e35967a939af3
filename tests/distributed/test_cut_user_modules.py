"""What users do in their modules, under dense=fsdp: as on one rank."""

from __future__ import annotations

import copy
from collections import deque
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from moe_lightning import auxiliary_loss
from moe_lightning.compat.fsdp import gather_at_layers, keep_freezing
from tests.distributed.harness import RankFailure, run_pooled, run_ranks
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


class TogglesOptimizers(Blocks):
    """In turn, as for two adversaries: gradients of the other's parameters must not stay."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        first = {*self.embed.parameters(), *self.blocks.parameters()}
        others = [parameter for parameter in self.parameters() if parameter not in first]
        return torch.optim.AdamW(list(first), lr=3e-3), torch.optim.SGD(others, lr=0.1)


class AccumulatesInTurn(TogglesOptimizers):
    """Two batches, whose update begins the next step, when parameters are gathered already."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers() if batch_idx in (2, 4) else ():
            optimizer.step()
            optimizer.zero_grad()
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(Blocks.training_step(self, batch, batch_idx))
            self.untoggle_optimizer(optimizer)


class FreezesInTurn(TogglesOptimizers):
    """By the modules' own parameters, which are gathered where a step begins."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for turn, optimizer in enumerate(self.optimizers()):
            for place, part in enumerate((self.embed, self.blocks, self.moe, self.out)):
                part.requires_grad_((place < 2) == (turn == 0))
            self.manual_backward(Blocks.training_step(self, batch, batch_idx))
            optimizer.step()
            optimizer.zero_grad()


class GoesOnAfterBackward(OwnModule):
    """Calls layers by themselves: for two backward passes in a row, and after the update. One of them is copied, and
    all are frozen in between.
    """

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        parameters = optimizer.param_groups[0]["params"]
        for parameter in parameters:
            parameter.requires_grad_(True)
        copied = copy.deepcopy(self.embed)
        assert copied(batch[0]).equal(self.embed(batch[0]))
        losses = [self.nats(*batch) for _ in range(2)]
        for loss in losses:
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        for parameter in parameters:
            parameter.requires_grad_(False)
        self.log("train/loss", self.nats(*batch), sync_dist=True)

    def nats(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        return nn.functional.cross_entropy(self.out(h + self.moe(h)).flatten(0, 1), y.flatten())


class StepsByHand(OwnModule):
    """Without units, and with a backward pass before the loss has left training_step."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


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
        TogglesOptimizers,
        AccumulatesInTurn,
        FreezesInTurn,
        GoesOnAfterBackward,
        StepsByHand,
    ],
)
def test_it_trains_as_on_one_rank(module: type[pl.LightningModule]) -> None:
    clip = None if module.automatic_optimization is False else 1.0
    options: dict[str, Any] = {"own_module": module, "steps": 6, "trainer": {"gradient_clip_val": clip}}
    (alone,) = run_pooled(1, partial(train, **options))
    for result in run_pooled(2, partial(train, strategy=FSDP, **options)):
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
        for losses in run_ranks(size, partial(fail_and_go_on, place=place, strategy=strategy))
    ]
    for losses in ranks:
        assert losses == pytest.approx(alone, abs=TOLERANCE)


def frozen_twice(rank: int, world_size: int) -> bool:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=world_size)
    layer: Any = fully_shard(nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (world_size,)))
    keep_freezing(layer)
    deque(gather_at_layers(layer, lambda: True), maxlen=0)
    row = layer.weight
    layer.unshard()
    row.requires_grad_(False)  # as toggle_optimizer does
    layer.weight.requires_grad_(False)  # as a module does
    layer(torch.ones(4))
    row.requires_grad_(True)
    layer.reshard()
    return bool(layer.weight.requires_grad)


def test_what_is_frozen_twice_is_unfrozen_by_its_optimizer() -> None:
    assert run_ranks(1, frozen_twice) == [True]
